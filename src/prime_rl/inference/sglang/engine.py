"""An engine that forwards requests to an existing SGLang server.

    request --> free slot, gate open --> POST /generate --> known weight version --> Output
                               |                                    |
                   closed during weight updates,      unknown: the server restarted, or the version
                   pauses and outages                 failed verification: the request is retried

SGLang does not expose weight digests. So after every update the canary published by the trainer is scored before the
gate opens; on a mismatch the previous weights are restored.
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
    EngineStats,
    EngineUnavailable,
    Event,
    GenerationRequest,
    Output,
    SamplingParams,
    StreamUpdate,
)
from prime_rl.inference.request_parsing import Json
from prime_rl.inference.sglang.protocol import (
    MalformedResponse,
    StreamedCompletion,
    build_body,
    check_params,
    read_scores,
    read_spans,
)
from prime_rl.inference.sglang.remote import Remote, RequestRejected, ServerUnreachable
from prime_rl.transport.logprob_check import compare_canary, read_canary
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


@dataclass(eq=False)
class InflightRequest:
    """A request in flight."""

    request: GenerationRequest
    task: asyncio.Task[None] | None = None
    send_task: asyncio.Task[tuple[StreamedCompletion, Json]] | None = None
    rid: str | None = None
    """Request id on the server while it runs there."""
    num_streamed: int = 0
    """Number of streamed tokens."""


class SGLangGateway:
    """Implements `prime_rl.inference.engine.GenerationEngine`; its event loop runs in a separate thread."""

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
        has_spans: bool,
        supports_seeds: bool,
    ) -> None:
        self.server, self.dtype = server, dtype
        self.problem: str | None = None
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._loaded = base
        self._decode_text = decode
        self._has_spans, self._supports_seeds = has_spans, supports_seeds
        self._labels = {str(base.version): base.version}
        """Server version label -> policy version, of verified weights."""
        self._rejected: set[str] = set()
        self._adapters: dict[str, RemoteAdapter] = {}
        self._inflight: dict[GenerationRequest, InflightRequest] = {}
        """Unfinished requests; modified by the engine thread, so other threads iterate over a copy."""
        self._on_server: set[InflightRequest] = set()
        """Requests running on the server; accessed only by the event loop thread."""
        self._events: deque[Event] = deque()
        self._crash: BaseException | None = None
        self._paused = False
        self._wake: Callable[[], None] = lambda: None
        self._counts = dict.fromkeys(("prompt_tokens", "shared_prompt_tokens", "generated_tokens", "finished"), 0)
        self._remote = Remote(server, max_running + 1)
        self._slots = asyncio.Semaphore(max_running)
        self._gate, self._server_idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._server_idle.set()
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
        inflight = self._inflight[request] = InflightRequest(request)
        self._loop.call_soon_threadsafe(self._launch, inflight)

    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request; no effect if it has finished."""
        inflight = self._inflight.pop(request, None)
        if inflight is not None:
            self._loop.call_soon_threadsafe(self._cancel_inflight, inflight)

    def has_work(self) -> bool:
        """Whether there are events to deliver."""
        return bool(self._events or self._crash)

    def step(self) -> list[Event]:
        """Return the events received since the last call."""
        if self._crash is not None:
            raise self._crash
        return [self._events.popleft() for _ in range(len(self._events))]

    def load_weights(self, weights: Path, version: int) -> dict[str, str]:
        """Make the server load a directory and verify it with its canary; returns no digests, as SGLang exposes none.
        On failure, restores the previous weights and raises `ValueError`."""
        self._await(self._load(LoadedWeights(weights, version)))
        return {}

    def load_adapter(self, name: str, weights: Path, spec: AdapterSpec) -> dict[str, str]:
        """Add or replace a LoRA adapter; running requests finish with their original adapter. No digests."""
        self._await(self._load_adapter(name, weights, spec))
        return {}

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter; running requests finish with it. `ValueError` if it is not loaded."""
        if name not in self._adapters:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._loop.call_soon_threadsafe(self._unload, self._adapters.pop(name))

    def adapters(self) -> dict[str, AdapterSpec]:
        """Loaded adapters by name."""
        return {name: served.spec for name, served in list(self._adapters.items())}

    def abort(self) -> list[Event]:
        """Abort every request; partial completions are returned with finish_reason "abort"."""
        self._await(self._abort())
        return self.step()

    def stats(self) -> EngineStats:
        """Counters of this gateway's requests."""
        running = len(self._on_server)
        return EngineStats(running=running, waiting=max(len(self._inflight) - running, 0), **self._counts)

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

    # The methods below run in the event loop thread.

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _launch(self, inflight: InflightRequest) -> None:
        if inflight.request in self._inflight:
            inflight.task = self._spawn(self._run_request(inflight))

    def _cancel_inflight(self, inflight: InflightRequest) -> None:
        if inflight.task is not None:
            inflight.task.cancel()
        if inflight.rid is not None:
            self._spawn(self._remote.notify("/abort_request", {"rid": inflight.rid}))

    def _deliver(self, *events: Event) -> None:
        self._events.extend(events)
        self._wake()

    async def _run_request(self, inflight: InflightRequest) -> None:
        """Run one request to its output, across server outages."""
        request = inflight.request
        try:
            async with self._slots:
                output = await self._generate(inflight)
        except (RequestRejected, MalformedResponse) as error:
            output = Output(request, [], [], [], [], "error", f"SGLang: {error}")
        except Exception as error:
            self._fail(error)
            return
        if self._inflight.pop(request, None) is not None:
            self._counts["finished"] += 1
            self._counts["generated_tokens"] += len(output.token_ids)
            self._counts["shared_prompt_tokens"] += output.num_cached
            self._deliver(output)

    async def _generate(self, inflight: InflightRequest) -> Output:
        request, tries = inflight.request, 0
        while True:
            await self._gate.wait()
            served = None if request.adapter is None else self._adapters.get(request.adapter)
            if request.adapter is not None and served is None:
                return Output(request, [], [], [], [], "abort")
            try:
                send_task = self._loop.create_task(self._send(inflight, None if served is None else served.name))
                inflight.send_task = send_task
                completion, meta = await send_task
                await self._gate.wait()  # weights updated in the meantime must be verified first
                versions = self._read_versions(meta)
            except (ServerUnreachable, RequestRejected) as error:
                versions = []
                if await self._has_unknown_weights():
                    self._mark_unavailable(str(error))  # may explain a rejection, such as a missing adapter
                elif isinstance(error, RequestRejected) and self._adapters.get(request.adapter or "") is served:
                    raise  # otherwise the adapter was replaced concurrently
                elif (tries := tries + 1) > MAX_TRIES:
                    raise RequestRejected(f"{error}, {MAX_TRIES} times") from error
                else:  # server full or connection lost: retry this request only
                    await asyncio.sleep(min(RETRY_S * 2**tries, MAX_BACKOFF_S))
            except asyncio.CancelledError:
                send_task.cancel()
                if self.problem is None or (task := asyncio.current_task()) is None or task.cancelling():
                    raise  # this task was canceled, not just the server request because of an outage
                versions = []
            if versions:
                spans = versions if served is None else [(0, served.spec.version)]
                return completion.finish(meta, spans, self._decode_text)
            if inflight.num_streamed:
                raise RequestRejected("the server failed, or its new weights were wrong, during this stream")

    def _read_versions(self, meta: Json) -> list[tuple[int, int]]:
        """Version spans of the tokens, empty if some weights were wrong; `ServerUnreachable` for unknown weights."""
        spans = read_spans(meta)
        if any(label in self._rejected for _, label in spans):
            return []
        for _, label in spans:
            if label not in self._labels:
                raise ServerUnreachable(f"unknown weight version {label!r}: was the server restarted?")
        return [(start, self._labels[label]) for start, label in spans]

    async def _send(self, inflight: InflightRequest, adapter: str | None) -> tuple[StreamedCompletion, Json]:
        """Send a request; returns its tokens and the last `meta_info`. `ServerUnreachable` or `RequestRejected`."""
        inflight.rid = uuid.uuid4().hex
        completion = StreamedCompletion(inflight.request)
        body = build_body(inflight.request, inflight.rid, adapter, self._supports_seeds)
        self._on_server.add(inflight)
        self._server_idle.clear()
        try:
            if inflight.request.stream:
                return completion, await self._send_stream(inflight, completion, body)
            meta = await self._remote.generate(body)
            completion.add(meta)
            return completion, meta
        finally:
            inflight.rid = None
            self._on_server.discard(inflight)
            if not self._on_server:
                self._server_idle.set()

    async def _send_stream(self, inflight: InflightRequest, completion: StreamedCompletion, body: Json) -> Json:
        """Deliver chunks as they arrive; the last one goes into the output."""
        meta: Json = {}
        async for meta in self._remote.stream(body):
            start = len(completion.token_ids)
            if completion.add(meta) and not meta.get("finish_reason"):
                self._deliver(self._build_chunk(inflight, completion, start))
        return meta

    def _build_chunk(self, inflight: InflightRequest, completion: StreamedCompletion, start: int) -> StreamUpdate:
        inflight.num_streamed = len(completion.token_ids)
        tops = completion.top_logprobs[start:] or [[] for _ in completion.token_ids[start:]]
        return StreamUpdate(inflight.request, start, completion.token_ids[start:], completion.logprobs[start:], tops)

    async def _abort(self) -> None:
        """Abort queued requests here and running requests on the server."""
        on_server = list(self._on_server)
        for inflight in [inflight for inflight in list(self._inflight.values()) if inflight not in self._on_server]:
            self._cancel_inflight(inflight)
            self._inflight.pop(inflight.request, None)
            self._events.append(Output(inflight.request, [], [], [], [], "abort"))
        if on_server:
            await self._remote.notify("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.wait([inflight.task for inflight in on_server if inflight.task is not None], timeout=ABORT_S)

    async def _pause_server(self) -> None:
        self._gate.clear()
        await self._control(self.server.post("/pause_generation", {"mode": "retract"}))

    async def _resume_server(self) -> None:
        await self._control(self.server.post("/continue_generation", {}))
        if self.problem is None:
            self._gate.set()

    async def _control(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a control request; `EngineUnavailable` or `ValueError` if it fails."""
        try:
            return await work
        except EngineError as error:
            if error.kind is FailureKind.UNREACHABLE:
                self._mark_unavailable(error.message)
                raise EngineUnavailable(f"SGLang at {self.server} is unavailable: {error.message}") from error
            raise ValueError(f"SGLang at {self.server}: {error.message}") from error

    async def _load(self, wanted: LoadedWeights) -> None:
        """Close the gate, load, verify and reopen; running requests are recomputed, or finish first if the server
        does not report version spans."""
        async with self._changing:
            if self.problem is not None:
                raise EngineUnavailable(self.problem)
            self._gate.clear()
            try:
                if not self._has_spans:
                    await self._server_idle.wait()
                await self._load_and_verify(wanted)
                self._loaded = wanted
                self._labels[str(wanted.version)] = wanted.version
                if self._paused:
                    await self._pause_server()
            finally:
                self._reopen()

    async def _load_and_verify(self, wanted: LoadedWeights) -> None:
        """Load and verify; on failure restore the previous weights, or stop the engine if that fails too."""
        label = str(wanted.version)
        self._rejected.discard(label)
        try:
            await self._control(self.server.update_weights_from_checkpoint(str(wanted.directory), version=label))
            await self._check_canary(wanted.directory, None)
        except EngineUnavailable:
            raise
        except ValueError as error:
            if wanted == self._loaded:
                raise
            if label not in self._labels:
                self._rejected.add(label)
            logger.error(f"Rejected weights version={label}: {error}")
            try:
                await self._load_and_verify(self._loaded)
            except EngineUnavailable:
                raise
            except ValueError as second:
                self._fail(
                    RuntimeError(f"failed to load version {label} ({error}) and to restore the previous one ({second})")
                )
            raise ValueError(f"{error}; version {self.version} stays in service") from error

    async def _check_canary(self, directory: Path, adapter: str | None) -> None:
        """`ValueError` if the server's log-probs differ from the trainer's; no-op without a canary."""
        canary = read_canary(directory)
        if canary is None:
            return
        logprobs = [await self._score(prompt.token_ids, adapter) for prompt in canary.prompts]
        if problem := compare_canary(canary, logprobs, dtype=self.dtype):
            raise ValueError(problem)

    async def _score(self, prompt: list[int], adapter: str | None) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        request = GenerationRequest(prompt, params)
        try:
            meta = await self._remote.generate(build_body(request, uuid.uuid4().hex, adapter))
        except ServerUnreachable as error:
            self._mark_unavailable(str(error))
            raise EngineUnavailable(f"SGLang at {self.server} is unavailable: {error}") from error
        except RequestRejected as error:
            raise ValueError(f"SGLang failed to score the canary: {error}") from error
        scores = read_scores(request, meta)
        assert scores is not None
        return scores.logprobs

    async def _load_adapter(self, name: str, directory: Path, spec: AdapterSpec) -> None:
        async with self._changing:
            served = RemoteAdapter(f"{name}-{spec.version}-{uuid.uuid4().hex[:8]}", directory, spec)
            await self._sync_adapter(served)
            before, self._adapters[name] = self._adapters.get(name), served
            if before is not None:
                self._unload(before)

    async def _sync_adapter(self, served: RemoteAdapter) -> None:
        """Load an adapter and verify it."""
        order = {"lora_name": served.name, "lora_path": str(served.directory)}
        answer = await self._control(self.server.load("/load_lora_adapter", order))
        if answer.get("success") is False:
            raise ValueError(f"SGLang at {self.server}: {answer.get('error_message') or answer}")
        try:
            await self._check_canary(served.directory, served.name)
        except ValueError:
            self._unload(served)
            raise

    def _unload(self, served: RemoteAdapter) -> None:
        """Unload an adapter; the server waits for its last request."""
        self._spawn(self._remote.notify("/unload_lora_adapter", {"lora_name": served.name}))

    def _reopen(self) -> None:
        if self.problem is None and not self._paused:
            self._gate.set()

    def _fail(self, error: BaseException) -> None:
        """Stop the engine: the next step raises `error`."""
        self._crash = error
        self._wake()

    async def _has_unknown_weights(self) -> bool:
        """Whether the server is unreachable or its weights are unknown."""
        try:
            return await self.server.read_version() not in self._labels
        except EngineError:
            return True

    def _mark_unavailable(self, reason: str) -> None:
        """Close the gate until the server is reachable again with the right weights."""
        if self.problem is None:
            self.problem = f"SGLang at {self.server} is unavailable: {reason}"
            logger.warning(self.problem)
            self._gate.clear()
            for inflight in self._on_server:
                if inflight.send_task is not None:
                    inflight.send_task.cancel()
            self._spawn(self._recover())

    async def _watch(self) -> None:
        """Detect outages and restarts of the server independently of requests."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.problem is not None or self._changing.locked():
                continue
            try:
                version = await self.server.read_version()
            except EngineError as error:
                self._mark_unavailable(error.message)
                continue
            if version not in self._labels and version not in self._rejected and not self._changing.locked():
                self._mark_unavailable(f"unknown weight version {version!r}: was the server restarted?")

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                async with self._changing:
                    if await self.server.read_version() != str(self.version):
                        await self._load_and_verify(self._loaded)
                        for served in list(self._adapters.values()):
                            await self._sync_adapter(served)
                    if self._paused:
                        await self.server.post("/pause_generation", {"mode": "retract"})
                    self.problem = None
                    self._reopen()
                logger.success(f"Reconnected to SGLang at {self.server}, version={self.version}")
                return
            except (EngineError, EngineUnavailable) as error:
                self.problem = f"SGLang at {self.server} is unavailable: {error}"
            except ValueError as error:
                self._fail(
                    RuntimeError(f"failed to restore version {self.version} of SGLang at {self.server}: {error}")
                )
                return
