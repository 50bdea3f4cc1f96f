"""A gateway to an SGLang server that runs already: an engine whose tokens are drawn over there.

    request --> place free, gate open --> POST /generate --> its version is one that we know --> Output
                                |                                        |
                     closed while weights change,          unknown: the server was started again, or
                     while paused, while it is away        the version failed its canary: drawn anew

SGLang tells no digests that could be compared with a manifest. So after every update the canary that the trainer
published is scored before the gate opens; a difference brings the weights before back.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loguru import logger

from prime_rl.inference.engine import (
    AdapterSpec,
    EngineAway,
    EngineStats,
    Event,
    GenerationRequest,
    Output,
    Progress,
    SamplingParams,
)
from prime_rl.inference.requests import Json
from prime_rl.inference.sglang.remote import Away, Refused, Remote
from prime_rl.inference.sglang.wire import Drawn, Garbled, build_body, check_params, read_scores, read_spans
from prime_rl.inference.text import Decode
from prime_rl.transport.canary import compare_canary, read_canary
from rollouts.training.weight_sync import EngineError, SGLangEngine

T = TypeVar("T")
RETRY_S = 0.2  # between looks for a server that is away
WATCH_S = 1.0  # between looks at one that is there: it may go without closing its connections
MAX_TRIES = 20  # of a request to a server that is there
LONGEST_WAIT_S = 5.0
ABORT_S = 30.0


class Held(NamedTuple):
    """What the server is to hold."""

    directory: Path
    version: int


@dataclass(frozen=True)
class Served:
    """An adapter, and what it is called over there: every load has a name of its own."""

    name: str
    directory: Path
    spec: AdapterSpec


@dataclass(eq=False)
class Flight:
    """One request on its way."""

    request: GenerationRequest
    task: asyncio.Task[None] | None = None
    asking: asyncio.Task[tuple[Drawn, Json]] | None = None
    rid: str | None = None
    """Its name over there, while it is there."""
    num_told: int = 0
    """Tokens that were streamed."""


class SGLangGateway:
    """Implements `prime_rl.inference.engine.Engine`; its coroutines run in a thread of their own."""

    exact = False

    def __init__(
        self,
        server: SGLangEngine,
        *,
        base: Held,
        decode: Decode,
        vocab_size: int,
        max_model_len: int,
        max_running: int,
        dtype: str,
        tells_spans: bool,
        keeps_seeds: bool,
    ) -> None:
        self.server, self.dtype = server, dtype
        self.problem: str | None = None
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._held = base
        self._decode_text = decode
        self._tells_spans, self._keeps_seeds = tells_spans, keeps_seeds
        self._labels = {str(base.version): base.version}
        """Version as the server calls it -> ours; of those that passed their check."""
        self._refused: set[str] = set()
        self._adapters: dict[str, Served] = {}
        self._flights: dict[GenerationRequest, Flight] = {}
        """All that are not answered; the thread of the engine adds and takes, so that others look at a copy."""
        self._there: set[Flight] = set()
        """Those that are at the server, told by the thread of the loop alone."""
        self._events: deque[Event] = deque()
        self._crash: BaseException | None = None
        self._paused = False
        self._wake: Callable[[], None] = lambda: None
        self._counts = dict.fromkeys(("prompt_tokens", "shared_prompt_tokens", "generated_tokens", "finished"), 0)
        self._remote = Remote(server, max_running + 1)
        self._places = asyncio.Semaphore(max_running)
        self._open, self._none_there = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._none_there.set()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version of the weights in service."""
        return self._held.version

    @property
    def max_score_len(self) -> int:
        """Most tokens of a sequence that is only scored."""
        return self.max_model_len - 1

    def check(self, request: GenerationRequest) -> None:
        """`ValueError` in the user's words for what SGLang cannot do."""
        if not 0 < len(request.prompt) <= self.max_score_len:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit in {self.max_model_len}")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ValueError(f"no adapter {request.adapter!r} is loaded")
        check_params(request.params)

    def add(self, request: GenerationRequest) -> None:
        """Send a request on its way; `ValueError` as `check`."""
        self.check(request)
        self._counts["prompt_tokens"] += len(request.prompt)
        flight = self._flights[request] = Flight(request)
        self._loop.call_soon_threadsafe(self._launch, flight)

    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request; nothing happens when it has finished."""
        flight = self._flights.pop(request, None)
        if flight is not None:
            self._loop.call_soon_threadsafe(self._drop, flight)

    def has_work(self) -> bool:
        """True while there is something to tell."""
        return bool(self._events or self._crash)

    def step(self) -> list[Event]:
        """What has come in since."""
        if self._crash is not None:
            raise self._crash
        return [self._events.popleft() for _ in range(len(self._events))]

    def load_weights(self, weights: Path, version: int) -> dict[str, str]:
        """Have the server load a directory and pass its canary; no digests, SGLang tells none. `ValueError`, and the
        weights before are in service again, when it does not."""
        self._await(self._load(Held(weights, version)))
        return {}

    def load_adapter(self, name: str, weights: Path, spec: AdapterSpec) -> dict[str, str]:
        """Add or replace a LoRA adapter; requests that run end with the one they began with. No digests."""
        self._await(self._load_adapter(name, weights, spec))
        return {}

    def remove_adapter(self, name: str) -> None:
        """Drop an adapter; requests that run end with it. `ValueError` when there is none of this name."""
        if name not in self._adapters:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._loop.call_soon_threadsafe(self._unload, self._adapters.pop(name))

    def adapters(self) -> dict[str, AdapterSpec]:
        """The adapters that requests may name."""
        return {name: served.spec for name, served in list(self._adapters.items())}

    def abort(self) -> list[Event]:
        """Break off every request: what was drawn so far comes back with finish_reason "abort"."""
        self._await(self._abort())
        return self.step()

    def stats(self) -> EngineStats:
        """Counters of what went through here."""
        running = len(self._there)
        return EngineStats(running=running, waiting=max(len(self._flights) - running, 0), **self._counts)

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` is called when something has come in."""
        self._wake = wake
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._watch()))

    def pause(self) -> None:
        """Let the server draw nothing; what it runs keeps its place."""
        self._paused = True
        self._await(self._hold())

    def resume(self) -> None:
        """Let it go on."""
        self._paused = False
        self._await(self._let_go())

    def close(self) -> None:
        """Let go of the server; it forgets requests whose connection closes."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._remote.close()

        if self._thread.is_alive():
            self._await(end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # From here on in the thread of the loop.

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _launch(self, flight: Flight) -> None:
        if flight.request in self._flights:
            flight.task = self._spawn(self._fly(flight))

    def _drop(self, flight: Flight) -> None:
        if flight.task is not None:
            flight.task.cancel()
        if flight.rid is not None:
            self._spawn(self._remote.tell("/abort_request", {"rid": flight.rid}))

    def _hand_over(self, *events: Event) -> None:
        self._events.extend(events)
        self._wake()

    async def _fly(self, flight: Flight) -> None:
        """One request from the gate to its output, however often the server leaves meanwhile."""
        request = flight.request
        try:
            async with self._places:
                output = await self._draw(flight)
        except (Refused, Garbled) as error:
            output = Output(request, [], [], [], [], "error", f"SGLang: {error}")
        except Exception as error:
            self._fail(error)
            return
        if self._flights.pop(request, None) is not None:
            self._counts["finished"] += 1
            self._counts["generated_tokens"] += len(output.token_ids)
            self._counts["shared_prompt_tokens"] += output.num_cached
            self._hand_over(output)

    async def _draw(self, flight: Flight) -> Output:
        request, tries = flight.request, 0
        while True:
            await self._open.wait()
            served = None if request.adapter is None else self._adapters.get(request.adapter)
            if request.adapter is not None and served is None:
                return Output(request, [], [], [], [], "abort")
            try:
                asking = self._loop.create_task(self._ask(flight, None if served is None else served.name))
                flight.asking = asking
                drawn, meta = await asking
                await self._open.wait()  # weights that change meanwhile have to pass their check
                versions = self._read_versions(meta)
            except (Away, Refused) as error:
                versions = []
                if await self._holds_others():
                    self._lose(str(error))  # which may be why it refused, such as an adapter that it has not
                elif isinstance(error, Refused) and self._adapters.get(request.adapter or "") is served:
                    raise  # else the adapter has been replaced just as we asked for it
                elif (tries := tries + 1) > MAX_TRIES:
                    raise Refused(f"{error}, {MAX_TRIES} times") from error
                else:  # full, or a connection broke: that is this request's affair alone
                    await asyncio.sleep(min(RETRY_S * 2**tries, LONGEST_WAIT_S))
            except asyncio.CancelledError:
                asking.cancel()
                if self.problem is None or (task := asyncio.current_task()) is None or task.cancelling():
                    raise  # it is our task that was cancelled, not the question because the server is away
                versions = []
            if versions:
                told = versions if served is None else [(0, served.spec.version)]
                return drawn.finish(meta, told, self._decode_text)
            if flight.num_told:
                raise Refused("it left, or its new weights were wrong, in the middle of this stream")

    def _read_versions(self, meta: Json) -> list[tuple[int, int]]:
        """Which weights drew the tokens; none when some were found wrong. `Away` for those of somebody else."""
        spans = read_spans(meta)
        if any(label in self._refused for _, label in spans):
            return []
        for _, label in spans:
            if label not in self._labels:
                raise Away(f"it holds version {label!r}, which is none of ours: was it started again?")
        return [(start, self._labels[label]) for start, label in spans]

    async def _ask(self, flight: Flight, adapter: str | None) -> tuple[Drawn, Json]:
        """The tokens of a request and the last `meta_info`. `Away` when nobody answers, `Refused` with the reason."""
        flight.rid = uuid.uuid4().hex
        drawn = Drawn(flight.request)
        body = build_body(flight.request, flight.rid, adapter, self._keeps_seeds)
        self._there.add(flight)
        self._none_there.clear()
        try:
            if flight.request.stream:
                return drawn, await self._ask_stream(flight, drawn, body)
            meta = await self._remote.generate(body)
            drawn.add(meta)
            return drawn, meta
        finally:
            flight.rid = None
            self._there.discard(flight)
            if not self._there:
                self._none_there.set()

    async def _ask_stream(self, flight: Flight, drawn: Drawn, body: Json) -> Json:
        """Hand on pieces as they come; the last one is left for the output."""
        meta: Json = {}
        async for meta in self._remote.stream(body):
            start = len(drawn.token_ids)
            if drawn.add(meta) and not meta.get("finish_reason"):
                self._hand_over(self._piece(flight, drawn, start))
        return meta

    def _piece(self, flight: Flight, drawn: Drawn, start: int) -> Progress:
        flight.num_told = len(drawn.token_ids)
        tops = drawn.top_logprobs[start:] or [[] for _ in drawn.token_ids[start:]]
        return Progress(flight.request, start, drawn.token_ids[start:], drawn.logprobs[start:], tops)

    async def _abort(self) -> None:
        """End what waits here, and let the server end what runs there."""
        there = list(self._there)
        for flight in [flight for flight in list(self._flights.values()) if flight not in self._there]:
            self._drop(flight)
            self._flights.pop(flight.request, None)
            self._events.append(Output(flight.request, [], [], [], [], "abort"))
        if there:
            await self._remote.tell("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.wait([flight.task for flight in there if flight.task is not None], timeout=ABORT_S)

    async def _hold(self) -> None:
        self._open.clear()
        await self._control(self.server.post("/pause_generation", {"mode": "retract"}))

    async def _let_go(self) -> None:
        await self._control(self.server.post("/continue_generation", {}))
        if self.problem is None:
            self._open.set()

    async def _control(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a request to the server; `EngineAway` or `ValueError` when it fails."""
        try:
            return await work
        except EngineError as error:
            if error.kind == "unreachable":
                self._lose(error.message)
                raise EngineAway(f"SGLang at {self.server} is away: {error.message}") from error
            raise ValueError(f"SGLang at {self.server}: {error.message}") from error

    async def _load(self, wanted: Held) -> None:
        """Close the gate, load, check, open it; running requests are computed anew over there, or end before."""
        async with self._changing:
            if self.problem is not None:
                raise EngineAway(self.problem)
            self._open.clear()
            try:
                if not self._tells_spans:
                    await self._none_there.wait()
                await self._install(wanted)
                self._held = wanted
                self._labels[str(wanted.version)] = wanted.version
                if self._paused:
                    await self._hold()
            finally:
                self._reopen()

    async def _install(self, wanted: Held) -> None:
        """Load and check; whatever fails, the weights before are loaded again, or nothing is drawn any more."""
        label = str(wanted.version)
        self._refused.discard(label)
        try:
            await self._control(self.server.update_weights_from_checkpoint(str(wanted.directory), version=label))
            await self._check_canary(wanted.directory, None)
        except EngineAway:
            raise
        except ValueError as error:
            if wanted == self._held:
                raise
            if label not in self._labels:
                self._refused.add(label)
            logger.error(f"version {label} is not taken: {error}")
            try:
                await self._install(self._held)
            except EngineAway:
                raise
            except ValueError as second:
                self._fail(RuntimeError(f"neither version {label} ({error}) nor the one before ({second}) is held"))
            raise ValueError(f"{error}; version {self.version} stays in service") from error

    async def _check_canary(self, directory: Path, adapter: str | None) -> None:
        """`ValueError` when the server computes something else than the trainer did; nothing without a canary."""
        canary = read_canary(directory)
        if canary is None:
            return
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = GenerationRequest(canary.token_ids, params)
        try:
            meta = await self._remote.generate(build_body(request, uuid.uuid4().hex, adapter))
        except Away as error:
            self._lose(str(error))
            raise EngineAway(f"SGLang at {self.server} is away: {error}") from error
        except Refused as error:
            raise ValueError(f"SGLang does not score the canary: {error}") from error
        scores = read_scores(request, meta)
        assert scores is not None
        if problem := compare_canary(canary, scores.logprobs, dtype=self.dtype):
            raise ValueError(problem)

    async def _load_adapter(self, name: str, directory: Path, spec: AdapterSpec) -> None:
        async with self._changing:
            served = Served(f"{name}-{spec.version}-{uuid.uuid4().hex[:8]}", directory, spec)
            await self._bring(served)
            before, self._adapters[name] = self._adapters.get(name), served
            if before is not None:
                self._unload(before)

    async def _bring(self, served: Served) -> None:
        """Load an adapter and check it."""
        order = {"lora_name": served.name, "lora_path": str(served.directory)}
        answer = await self._control(self.server.load("/load_lora_adapter", order))
        if answer.get("success") is False:
            raise ValueError(f"SGLang at {self.server}: {answer.get('error_message') or answer}")
        try:
            await self._check_canary(served.directory, served.name)
        except ValueError:
            self._unload(served)
            raise

    def _unload(self, served: Served) -> None:
        """The server drops it when the last request with it has ended."""
        self._spawn(self._remote.tell("/unload_lora_adapter", {"lora_name": served.name}))

    def _reopen(self) -> None:
        if self.problem is None and not self._paused:
            self._open.set()

    def _fail(self, error: BaseException) -> None:
        """End the engine: the next step raises."""
        self._crash = error
        self._wake()

    async def _holds_others(self) -> bool:
        """Whether the server is away, or another one than it was."""
        try:
            return await self.server.read_version() not in self._labels
        except EngineError:
            return True

    def _lose(self, reason: str) -> None:
        """Close the gate until the server is back and holds what it should."""
        if self.problem is None:
            self.problem = f"SGLang at {self.server} is away: {reason}"
            logger.warning(self.problem)
            self._open.clear()
            for flight in self._there:
                if flight.asking is not None:
                    flight.asking.cancel()
            self._spawn(self._recover())

    async def _watch(self) -> None:
        """Notice that the server has gone, or is another one, though no request tells it."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.problem is not None or self._changing.locked():
                continue
            try:
                held = await self.server.read_version()
            except EngineError as error:
                self._lose(error.message)
                continue
            if held not in self._labels and held not in self._refused and not self._changing.locked():
                self._lose(f"it holds version {held!r}, which is none of ours: was it started again?")

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                async with self._changing:
                    if await self.server.read_version() != str(self.version):
                        await self._install(self._held)
                        for served in list(self._adapters.values()):
                            await self._bring(served)
                    if self._paused:
                        await self.server.post("/pause_generation", {"mode": "retract"})
                    self.problem = None
                    self._reopen()
                logger.success(f"SGLang at {self.server} is back and holds version {self.version}")
                return
            except (EngineError, EngineAway) as error:
                self.problem = f"SGLang at {self.server} is away: {error}"
            except ValueError as error:
                self._fail(
                    RuntimeError(f"SGLang at {self.server} came back, but not to version {self.version}: {error}")
                )
                return
