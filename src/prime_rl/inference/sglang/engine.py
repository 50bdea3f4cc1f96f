"""An engine that forwards requests to an existing SGLang server.

    request --> free slot, gate open --> POST /generate --> weight version in service --> Output
                               |                                    |
                   closed during weight updates,      another one: the server was restarted,
                   pauses and outages                 the request is sent again

SGLang exposes no weight digests. So after every update the canary published by the trainer is scored before the gate
opens; on a mismatch the previous weights are restored. Running requests finish before an update.
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

from prime_rl.inference.detokenizer import Decode
from prime_rl.inference.engine import (
    AdapterSpec,
    ComputeDigests,
    EngineStats,
    EngineUnavailable,
    Event,
    GenerationRequest,
    Output,
    SamplingParams,
)
from prime_rl.inference.request_parsing import Json
from prime_rl.inference.sglang.protocol import MalformedResponse, build_body, check_params, read_output, read_scores
from prime_rl.inference.sglang.remote import Remote, RequestRejected, ServerUnreachable
from prime_rl.transport.canary import compare_canary, read_canary
from rollouts.training.weight_sync import EngineError, FailureKind, SGLangEngine

T = TypeVar("T")
RETRY_S = 0.2  # poll interval while the server is unreachable
WATCH_S = 1.0  # poll interval while it is reachable: it may vanish without closing its connections
MAX_TRIES = 20  # per request, to a reachable server
MAX_BACKOFF_S = 5.0
ABORT_S = 30.0


class LoadedWeights(NamedTuple):
    """A weight directory and its version."""

    directory: Path
    version: int


@dataclass(frozen=True)
class RemoteAdapter:
    """An adapter and its name on the server, unique per load."""

    name: str
    directory: Path
    spec: AdapterSpec


class SGLangGateway:
    """Implements `prime_rl.inference.engine.GenerationEngine`; its event loop runs in a separate thread.

    A streaming request gets its tokens at once, when it has finished.
    """

    exact = False

    def __init__(
        self,
        server: SGLangEngine,
        *,
        base: LoadedWeights,
        decode: Decode,
        vocab_size: int,
        max_model_len: int,
        max_running: int,
        dtype: str,
        supports_seeds: bool,
    ) -> None:
        self.server, self.dtype = server, dtype
        self.problem: str | None = None
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._loaded = base
        self._decode, self._supports_seeds = decode, supports_seeds
        self._adapters: dict[str, RemoteAdapter] = {}
        self._requests: dict[GenerationRequest, asyncio.Task[None]] = {}
        """Unfinished requests; only their number is read outside the event loop thread, as below."""
        self._on_server: dict[GenerationRequest, asyncio.Task[Json]] = {}
        """Requests running on the server."""
        self._events: deque[Event] = deque()
        self._crash: BaseException | None = None
        self._paused = False
        self._wake: Callable[[], None] = lambda: None
        self._counts = dict.fromkeys(("prompt_tokens", "shared_prompt_tokens", "generated_tokens", "finished"), 0)
        self._remote = Remote(server, max_running + 1)
        self._slots = asyncio.Semaphore(max_running)
        self._gate = asyncio.Event()
        self._gate.set()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version of the weights in service."""
        return self._loaded.version

    @property
    def max_score_len(self) -> int:
        """Maximum length of a sequence that is only scored, in tokens."""
        return self.max_model_len - 1

    def check(self, request: GenerationRequest) -> None:
        """`ValueError` for requests that SGLang does not support."""
        if not 0 < len(request.prompt) <= self.max_score_len:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit in {self.max_model_len}")
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ValueError(f"no adapter {request.adapter!r} is loaded")
        check_params(request.params)

    def add(self, request: GenerationRequest) -> None:
        """Submit a request; raises as `check`."""
        self.check(request)
        self._counts["prompt_tokens"] += len(request.prompt)
        self._loop.call_soon_threadsafe(self._launch, request)

    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request; no effect if it has finished."""
        self._loop.call_soon_threadsafe(self._cancel, request)

    def has_work(self) -> bool:
        """Whether there are events to deliver."""
        return bool(self._events or self._crash)

    def step(self) -> list[Event]:
        """Return the events received since the last call."""
        if self._crash is not None:
            raise self._crash
        return [self._events.popleft() for _ in range(len(self._events))]

    def load_weights(self, weights: Path, version: int) -> ComputeDigests:
        """Make the server load a directory and verify it with its canary; there are no digests, as SGLang exposes none.
        On failure, restores the previous weights and raises `ValueError`."""
        self._await(self._load(LoadedWeights(weights, version)))
        return dict

    def load_adapter(self, name: str, weights: Path, spec: AdapterSpec) -> dict[str, str]:
        """Add or replace a LoRA adapter; running requests finish with their original adapter. No digests."""
        self._await(self._load_adapter(name, weights, spec))
        return {}

    def remove_adapter(self, name: str) -> list[Event]:
        """Unload an adapter; running requests finish with it. `ValueError` if it is not loaded."""
        if name not in self._adapters:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._loop.call_soon_threadsafe(self._unload, self._adapters.pop(name))
        return []

    def adapters(self) -> dict[str, AdapterSpec]:
        """Loaded adapters by name."""
        return {name: adapter.spec for name, adapter in list(self._adapters.items())}

    def abort(self) -> list[Event]:
        """Abort every request; partial completions are returned with finish_reason "abort"."""
        self._await(self._abort())
        return self.step()

    def stats(self) -> EngineStats:
        """Counters of this gateway's requests."""
        running = len(self._on_server)
        return EngineStats(running=running, waiting=max(len(self._requests) - running, 0), **self._counts)

    def start(self, wake: Callable[[], None]) -> None:
        """Start monitoring the server; `wake` is called when events arrive."""
        self._wake = wake
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._watch()))

    def pause(self) -> None:
        """Pause generation on the server; its running requests are kept."""
        self._paused = True
        self._await(self._pause_server())

    def resume(self) -> None:
        """Resume generation on the server."""
        self._paused = False
        self._await(self._resume_server())

    def close(self) -> None:
        """Close the connections; the server aborts requests whose connection closes."""

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

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The methods below run in the event loop thread.

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _launch(self, request: GenerationRequest) -> None:
        self._requests[request] = self._spawn(self._run_request(request))

    def _cancel(self, request: GenerationRequest) -> None:
        if (task := self._requests.pop(request, None)) is not None:
            task.cancel()

    async def _run_request(self, request: GenerationRequest) -> None:
        """Run one request to its output, across server outages."""
        try:
            async with self._slots:
                output = await self._generate(request)
        except (RequestRejected, MalformedResponse) as error:
            output = Output(request, [], [], [], [], "error", f"SGLang: {error}")
        except Exception as error:
            self._fail(error)
            return
        if self._requests.pop(request, None) is not None:
            self._counts["finished"] += 1
            self._counts["generated_tokens"] += len(output.token_ids)
            self._counts["shared_prompt_tokens"] += output.num_cached
            self._events.append(output)
            self._wake()

    async def _generate(self, request: GenerationRequest) -> Output:
        tries = 0
        while True:
            while not self._gate.is_set():
                await self._gate.wait()
            adapter = None if request.adapter is None else self._adapters.get(request.adapter)
            if request.adapter is not None and adapter is None:
                return Output(request, [], [], [], [], "abort")
            try:
                meta = await self._send(request, adapter)
                if meta is not None:
                    version = self.version if adapter is None else adapter.spec.version
                    return read_output(request, meta, version, self._decode)
            except (ServerUnreachable, RequestRejected) as error:
                if not await self._has_right_weights():
                    self._mark_unavailable(str(error))  # may explain a rejection, such as a missing adapter
                elif isinstance(error, RequestRejected) and self._adapters.get(request.adapter or "") is adapter:
                    raise  # otherwise the adapter was replaced concurrently
                elif (tries := tries + 1) > MAX_TRIES:
                    raise RequestRejected(f"{error}, {MAX_TRIES} times") from error
                else:  # server full or connection lost: retry this request only
                    await asyncio.sleep(min(RETRY_S * 2**tries, MAX_BACKOFF_S))

    async def _send(self, request: GenerationRequest, adapter: RemoteAdapter | None) -> Json | None:
        """The response's `meta_info`; None if `_interrupt` ended the request. `ServerUnreachable` or
        `RequestRejected`."""
        rid = uuid.uuid4().hex
        body = build_body(request, rid, None if adapter is None else adapter.name, self._supports_seeds)
        task = self._on_server[request] = self._spawn(self._remote.generate(body))
        try:
            await asyncio.wait([task])
        finally:
            del self._on_server[request]
            if task.cancel() or task.cancelled():
                self._spawn(self._remote.notify("/abort_request", {"rid": rid}))
        if task.cancelled():
            return None
        meta = task.result()
        if (label := str(meta.get("weight_version"))) != str(self.version):
            raise ServerUnreachable(f"unknown weight version {label!r}: was the server restarted?")
        return meta

    def _interrupt(self) -> None:
        """End the running requests on the server; they are sent again when the gate is open."""
        for task in self._on_server.values():
            task.cancel()

    async def _abort(self) -> None:
        """Abort queued requests here and running requests on the server."""
        running = [self._requests[request] for request in self._on_server if request in self._requests]
        for request in [request for request in self._requests if request not in self._on_server]:
            self._cancel(request)
            self._events.append(Output(request, [], [], [], [], "abort"))
        if running:
            await self._remote.notify("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.wait(running, timeout=ABORT_S)

    async def _pause_server(self) -> None:
        self._gate.clear()
        await self._control(self.server.post("/pause_generation", {"mode": "retract"}))

    async def _resume_server(self) -> None:
        await self._control(self.server.post("/continue_generation", {}))
        self._reopen()

    async def _control(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a control request; `EngineUnavailable` or `ValueError` if it fails."""
        try:
            return await work
        except EngineError as error:
            if error.kind is FailureKind.UNREACHABLE:
                self._mark_unavailable(error.message)
                raise EngineUnavailable(f"SGLang at {self.server} is unavailable: {error.message}") from error
            raise ValueError(f"SGLang at {self.server}: {error.message}") from error

    async def _load(self, weights: LoadedWeights) -> None:
        """Close the gate, let running requests finish, load, verify and reopen. While paused, and after a timeout,
        running requests start again with the new weights."""
        async with self._changing:
            if self.problem is not None:
                raise EngineUnavailable(self.problem)
            self._gate.clear()
            try:
                if self._on_server and not self._paused:
                    await asyncio.wait(self._on_server.values(), timeout=self.server.timeout)
                self._interrupt()
                await self._load_or_restore(weights)
                if self._paused:
                    await self._pause_server()
            finally:
                self._reopen()

    async def _load_or_restore(self, weights: LoadedWeights) -> None:
        """Load and verify; on failure restore the previous weights, or stop the engine if that fails too."""
        try:
            await self._load_and_verify(weights)
        except EngineUnavailable:
            raise
        except ValueError as error:
            logger.error(f"Rejected weights version={weights.version}: {error}")
            try:
                await self._load_and_verify(self._loaded)
            except EngineUnavailable:
                raise
            except ValueError as second:
                self._fail(
                    RuntimeError(
                        f"failed to load version {weights.version} ({error}) and to restore the previous one ({second})"
                    )
                )
            raise ValueError(f"{error}; version {self.version} stays in service") from error
        self._loaded = weights

    async def _load_and_verify(self, weights: LoadedWeights) -> None:
        label = str(weights.version)
        await self._control(self.server.update_weights_from_checkpoint(str(weights.directory), version=label))
        await self._check_canary(weights.directory, None)

    async def _check_canary(self, directory: Path, adapter: str | None) -> None:
        """`ValueError` if the server's log-probs differ from the trainer's; no-op without a canary."""
        canary = read_canary(directory)
        if canary is None:
            return
        logprobs = [await self._score(prompt.token_ids, adapter) for prompt in canary.prompts]
        if problem := compare_canary(canary, logprobs, dtype=self.dtype):
            raise ValueError(problem)

    async def _score(self, prompt: list[int], adapter: str | None) -> list[float]:
        request = GenerationRequest(prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        try:
            async with asyncio.timeout(self.server.timeout):
                meta = await self._remote.generate(build_body(request, uuid.uuid4().hex, adapter))
        except (ServerUnreachable, TimeoutError) as error:
            reason = str(error) or f"it did not score the canary within {self.server.timeout:g} s"
            self._mark_unavailable(reason)
            raise EngineUnavailable(f"SGLang at {self.server} is unavailable: {reason}") from error
        except RequestRejected as error:
            raise ValueError(f"SGLang failed to score the canary: {error}") from error
        scores = read_scores(request, meta)
        assert scores is not None
        return scores.logprobs

    async def _load_adapter(self, name: str, directory: Path, spec: AdapterSpec) -> None:
        async with self._changing:
            adapter = RemoteAdapter(f"{name}-{spec.version}-{uuid.uuid4().hex[:8]}", directory, spec)
            if self._paused:  # a paused server would not score the canary
                await self._control(self.server.post("/continue_generation", {}))
            try:
                await self._sync_adapter(adapter)
            finally:
                if self._paused:
                    await self._pause_server()
            before, self._adapters[name] = self._adapters.get(name), adapter
            if before is not None:
                self._unload(before)

    async def _sync_adapter(self, adapter: RemoteAdapter) -> None:
        """Load an adapter and verify it."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        answer = await self._control(self.server.load("/load_lora_adapter", body))
        if answer.get("success") is False:
            raise ValueError(f"SGLang at {self.server}: {answer.get('error_message') or answer}")
        try:
            await self._check_canary(adapter.directory, adapter.name)
        except ValueError:
            self._unload(adapter)
            raise

    def _unload(self, adapter: RemoteAdapter) -> None:
        """Unload an adapter; the server waits for its last request."""
        self._spawn(self._remote.notify("/unload_lora_adapter", {"lora_name": adapter.name}))

    def _reopen(self) -> None:
        if self.problem is None and not self._paused:
            self._gate.set()

    def _fail(self, error: BaseException) -> None:
        """Stop the engine: the next step raises `error`."""
        self._crash = error
        self._wake()

    async def _has_right_weights(self) -> bool:
        """Whether the server is reachable and reports the version in service."""
        try:
            return await self.server.read_version() == str(self.version)
        except EngineError:
            return False

    def _mark_unavailable(self, reason: str) -> None:
        """Close the gate until the server is reachable again with the right weights."""
        if self.problem is None:
            self.problem = f"SGLang at {self.server} is unavailable: {reason}"
            logger.warning(self.problem)
            self._gate.clear()
            self._interrupt()
            self._spawn(self._recover())

    async def _watch(self) -> None:
        """Detect outages and restarts of the server independently of requests."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.problem is not None or self._changing.locked() or await self._has_right_weights():
                continue
            if not self._changing.locked():  # an update may have begun in the meantime
                self._mark_unavailable("it does not respond, or was restarted with other weights")

    async def _recover(self) -> None:
        """Bring a server that is reachable again to the version in service, and reopen the gate."""
        while self.problem is not None:
            await asyncio.sleep(RETRY_S)
            try:
                async with self._changing:
                    if await self.server.read_version() != str(self.version):
                        await self._load_and_verify(self._loaded)
                        for adapter in list(self._adapters.values()):
                            await self._sync_adapter(adapter)
                    if self._paused:
                        await self.server.post("/pause_generation", {"mode": "retract"})
                    self.problem = None
                    self._reopen()
            except (EngineError, EngineUnavailable) as error:
                self.problem = f"SGLang at {self.server} is unavailable: {error}"
            except ValueError as error:
                self._fail(
                    RuntimeError(f"failed to restore version {self.version} of SGLang at {self.server}: {error}")
                )
                return
        logger.success(f"Reconnected to SGLang at {self.server}, version={self.version}")
