"""The engine interface (requests, outputs, protocol) and the thread that runs an engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
FinishReason = Literal["stop", "length", "abort", "error"]
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens of one position with their log-probs, in descending order."""

FULL = -1
"""`prompt_logprobs = FULL` returns the full distribution of every position; for callers in the same process."""

ComputeDigests = Callable[[], dict[str, str]]
"""Computes the digest of every loaded tensor, in any thread, while the engine steps, until the next update."""

IDLE_GAP_S = 0.02
"""Steps closer than this form one busy interval."""
MAX_INTERVAL_S = 1.0
"""Maximum length of a reported busy interval; longer ones are split, so that monitors see progress."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one completion; the defaults sample from the model's unmodified distribution.

    `prompt_logprobs = k` (None: off) also scores the prompt: the log-prob of every prompt token, the k most likely
    tokens and the probability mass of all others, at `prompt_temperature` (so that a teacher can be scored at the
    student's temperature). Tokens before `prompt_start` are not scored and can come from the prefix cache. With
    `prompt_logprobs`, `max_tokens = 0` scores without sampling.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    prompt_temperature: float = 1.0
    prompt_start: int = 1
    prompt_support: bytes = b""
    """Supports over which the scored tokens are renormalized, one per token from `prompt_start` on; see
    `rollouts.training.sampling_support`."""
    return_support: bool = False
    """With `top_p`, `top_k` or `min_p`: also return the tokens that each token was sampled from."""
    grammar: str | None = None
    """Restricts the completion; see `prime_rl.inference.grammar`."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt and one completion to sample; `stream` returns every token as it is sampled.

    `adapter` names a LoRA adapter loaded by `GenerationEngine.load_adapter`; None selects the base model. `context`:
    the last tokens of a prompt whose text the completion continues (`find_context`); empty if it begins a text.
    """

    prompt: list[int]
    params: SamplingParams
    stream: bool = False
    adapter: str | None = None
    context: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Prompt scores: one entry per prompt token from `prompt_start` on (the first token has no prediction).

    `tail_mass[i]` is the probability mass outside `top_logprobs[i]`. `full` is a tensor `[scored, vocab]` on the
    CPU if `FULL` was requested, else None.
    """

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    tail_mass: list[float]
    full: Any = None


@dataclass(frozen=True, eq=False)
class StreamUpdate:
    """New tokens of a streaming request; `start` is the number of completion tokens before them."""

    request: GenerationRequest
    start: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True, eq=False)
class Output:
    """A finished completion; `logprobs` are under the distribution each token was sampled from.

    `versions` are spans `(start, version)`: tokens from `start` on were sampled with the weights of `version`.
    `text` is set if the request has stop strings; it ends before the stop string. `num_cached` is the number of
    prompt tokens read from the prefix cache. `sampling_support` has the support of every token, if it was requested and
    sampling was truncated.
    """

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    text: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached: int = 0
    sampling_support: bytes = b""


Event = StreamUpdate | Output


def derive_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's seed for the first, independent seeds for the others (SplitMix64)."""
    mask = (1 << 64) - 1
    if index == 0:
        return seed & mask
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and current queue lengths."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    steps: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    """Tokens whose keys and values are cached now; those that running requests share in memory count once."""
    kept_tokens: int = 0
    """Those of finished requests; on a GPU all positions of their pages."""
    cache_size: int = 0
    """Cache capacity in tokens."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were kept (speculative decoding)."""


@dataclass(frozen=True)
class AdapterSpec:
    """Rank and scaling of a LoRA adapter (PEFT's `adapter_config.json`), and its end tokens."""

    rank: int
    alpha: float
    version: int = 0
    """Policy version reported in its responses."""
    eos_ids: frozenset[int] = frozenset()
    """End tokens besides those of the base model."""


class EngineUnavailable(ValueError):
    """The generation backend is unreachable; it may recover."""


class EngineFailed(RuntimeError):
    """The engine stopped with an error and accepts no more requests."""


class InProcessEngineMixin:
    """No-op lifecycle hooks of engines that sample in `step`; the caller of `step` controls them."""

    problem: str | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """Called before the first step."""

    def pause(self) -> None:
        """Called when stepping stops."""

    def resume(self) -> None:
        """Called when stepping resumes."""

    def close(self) -> None:
        """No step will follow."""


class GenerationEngine(Protocol):
    """A synchronous engine, owned by one thread that calls `step` while there is work."""

    max_model_len: int
    problem: str | None
    """Why generation is stalled; None if the engine is healthy."""

    @property
    def version(self) -> int:
        """Version of the loaded weights."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; token ids are below it."""

    @property
    def max_score_len(self) -> int:
        """Maximum length of a sequence that is only scored, in tokens."""

    def check(self, request: GenerationRequest) -> None:
        """Raise `ValueError` for an unsupported request; thread-safe."""

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises as `check`."""

    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request; no effect if it has finished."""

    def has_work(self) -> bool:
        """Whether a request is queued or running."""

    def step(self) -> list[Event]:
        """Run one forward pass: a chunk of prompts, or one token for every running sequence."""

    def load_weights(self, weights: Any, version: int, /) -> ComputeDigests:
        """Replace the weights between two steps by those read by the `WeightSource`."""

    def load_adapter(self, name: str, weights: Any, spec: AdapterSpec, /) -> dict[str, str]:
        """Add or replace a LoRA adapter read by the `WeightSource`; returns the digest of every loaded tensor."""

    def remove_adapter(self, name: str) -> list[Event]:
        """Unload an adapter and abort its requests, as `abort`; `ValueError` if it is not loaded."""

    def adapters(self) -> dict[str, AdapterSpec]:
        """Loaded adapters by name."""

    def abort(self) -> list[Event]:
        """Abort every request; partial completions are returned with finish_reason "abort"."""

    def stats(self) -> EngineStats:
        """Counters for `/metrics`."""

    def start(self, wake: Callable[[], None]) -> None:
        """Start. A remote engine calls `wake`, from any thread, when it has work."""

    def pause(self) -> None:
        """Stop generation until `resume`; `step` is not called in between."""

    def resume(self) -> None:
        """Resume generation."""

    def close(self) -> None:
        """Release all resources; `step` is not called afterwards."""


class IntervalLog(Protocol):
    """Sink of busy intervals (the monitor of a run)."""

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        """Append one interval (Unix seconds)."""


@dataclass
class BusyIntervalLogger:
    """Merges engine steps into busy intervals and logs them when they end."""

    log: IntervalLog | None
    start: float = 0.0
    end: float = 0.0
    version: int = 0

    def add(self, start: float, end: float, version: int) -> None:
        """Record a step from `start` to `end` (Unix seconds) with weights `version`."""
        if self.log is None:
            return
        if self.end and (start - self.end > IDLE_GAP_S or version != self.version or end - self.start > MAX_INTERVAL_S):
            self.flush()
        if not self.end:
            self.start, self.version = start, version
        self.end = end

    def flush(self) -> None:
        """Write the open interval, if any."""
        if self.log is not None and self.end:
            self.log.log_timeline("generate", self.start, self.end, self.version)
        self.end = 0.0


@dataclass
class EngineThread:
    """Runs an engine in its own thread, which sleeps while there is no work.

    `deliver` and `on_crash` are called in that thread; `deliver` receives all events of a step at once.
    """

    engine: GenerationEngine
    deliver: Callable[[list[Event]], None]
    on_crash: Callable[[BaseException], None]
    clock: BusyIntervalLogger = field(default_factory=lambda: BusyIntervalLogger(None))
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _inbox: deque[Callable[[], None]] = field(default_factory=deque)
    _calls: set[Future[Any]] = field(default_factory=set)  # posted and without a result
    _closed: bool = False
    paused: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self.engine.start(self._notify)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its events arrive through `deliver`, as an `error` output if the engine rejects it."""
        self._post(lambda: self._add(request))

    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request, unless the thread has ended."""
        with suppress(EngineFailed):
            self._post(lambda: self.engine.cancel(request))

    def call(self, function: Callable[[GenerationEngine], T]) -> Future[T]:
        """Run `function` on the engine between two steps; the future receives its result or exception.

        It receives `EngineFailed` if the engine fails before.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)

        self._post(run, future)
        return future

    def pause(self, abort: bool = False) -> Future[None]:
        """Stop stepping until `resume`; running requests are kept, or aborted with `abort`."""

        def stop(engine: GenerationEngine) -> None:
            self.paused = True
            if abort and (events := engine.abort()):
                self.deliver(events)
            engine.pause()

        return self.call(stop)

    def resume(self) -> Future[None]:
        """Resume after `pause`."""

        def go(engine: GenerationEngine) -> None:
            engine.resume()
            self.paused = False

        return self.call(go)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step; unfinished requests are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self.engine.close()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _post(self, command: Callable[[], None], future: Future[Any] | None = None) -> None:
        with self._wake:
            if self._closed:
                raise EngineFailed("engine stopped")
            if future is not None:
                self._calls.add(future)
                future.add_done_callback(self._calls.discard)
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        failure = EngineFailed("engine stopped")
        try:
            while self._serve_commands():
                if not self._has_work():
                    continue
                start, version = time.time(), self.engine.version
                events = self.engine.step()
                self.clock.add(start, time.time(), version)
                if events:
                    self.deliver(events)
        except BaseException as error:
            failure = EngineFailed(f"engine failed: {error}")
            failure.__cause__ = error
            self.on_crash(error)
        finally:
            self._fail_calls(failure)
            self.clock.flush()

    def _fail_calls(self, failure: EngineFailed) -> None:
        """Accept no more commands, and end the calls that nothing else will end."""
        with self._wake:
            self._closed = True
        for future in list(self._calls):
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(failure)

    def _serve_commands(self) -> bool:
        """Run posted commands, blocking while the engine is idle; False if the thread should end."""
        if not self._inbox and not self._closed and not self._has_work():
            with self._wake:
                if not self._wake.wait_for(self._should_wake, IDLE_GAP_S):
                    self.clock.flush()
                    self._wake.wait_for(self._should_wake)
        while self._inbox:
            self._inbox.popleft()()
        return not self._closed

    def _add(self, request: GenerationRequest) -> None:
        try:
            self.engine.add(request)
        except ValueError as error:
            self.deliver([Output(request, [], [], [], [], "error", str(error))])

    def _has_work(self) -> bool:
        return not self.paused and self.engine.has_work()

    def _should_wake(self) -> bool:
        return bool(self._inbox) or self._closed or self._has_work()
