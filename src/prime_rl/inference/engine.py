"""What the server says to an engine and hears from it, and the thread in which an engine lives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
FinishReason = Literal["stop", "length", "abort", "error"]
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens of one position with their log-probs, most likely first."""

FULL = -1
"""`prompt_logprobs = FULL` asks for the whole distribution of every position; for callers in the same process."""

IDLE_GAP_S = 0.02
"""Steps closer than this are one busy interval."""
MAX_INTERVAL_S = 1.0
"""A busy interval is reported at least this often, so that a watcher sees a long one grow."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn; the defaults draw from the model's own distribution.

    `prompt_logprobs` (None: not wanted) also scores the prompt: the log-prob of every prompt token, beside the k most
    likely tokens and the probability of all others; `prompt_temperature` is that of the scoring distribution, so that
    a teacher can be asked at the student's temperature. Tokens before `prompt_start` are not scored, so that what they
    have in common with other prompts is computed once. `max_tokens = 0` is allowed with it: score, draw nothing.
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


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One prompt and one completion to be drawn; `stream` asks for every token as it comes.

    `adapter` names a LoRA adapter that was given to `Engine.load_adapter`; None is the model itself.
    """

    prompt: list[int]
    params: SamplingParams
    stream: bool = False
    adapter: str | None = None


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """How likely a prompt was: one entry per prompt token from `prompt_start` on; nothing predicts the first.

    `tail_mass[i]` is the probability of everything outside `top_logprobs[i]`. `full` is `[scored, vocab]` when
    `FULL` was asked for (a tensor of the engine), else None.
    """

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    tail_mass: list[float]
    full: Any = None


@dataclass(frozen=True, eq=False)
class Progress:
    """New tokens of a streaming request; `start` counts the completion tokens before them."""

    request: GenerationRequest
    start: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True, eq=False)
class Output:
    """A finished completion: `logprobs` under the distribution each token was drawn from.

    `versions` are spans `(start, version)`: from completion token `start` on, the weights were those of `version`.
    `text` is set where stop strings were watched; it ends before the stop string. `num_cached` prompt tokens were
    found in the cache and not computed.
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


Event = Progress | Output


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request: its own for the first, independent ones for the others (SplitMix64)."""
    mask = (1 << 64) - 1
    if index == 0:
        return seed & mask
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the queue now."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    steps: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    """Tokens whose keys and values are held now."""
    kept_tokens: int = 0
    """Those of them that ended requests have left."""
    cache_size: int = 0
    """Tokens that could be held."""


@dataclass(frozen=True)
class AdapterSpec:
    """What a LoRA adapter says about itself (PEFT's `adapter_config.json`)."""

    rank: int
    alpha: float
    version: int = 0
    """The policy version that answers drawn with it report."""


class EngineAway(ValueError):
    """What draws the tokens cannot be reached; it may come back."""


class InProcess:
    """What an engine that draws in its own `step` has nothing to do for: whoever calls `step` sees to it."""

    problem: str | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """It is called before the first step."""

    def pause(self) -> None:
        """No step is called any more."""

    def resume(self) -> None:
        """Steps are called again."""

    def close(self) -> None:
        """No step will follow."""


class Engine(Protocol):
    """A synchronous engine; one thread owns it and calls `step` while there is work."""

    max_model_len: int
    problem: str | None
    """Why no token is drawn now, in a sentence; None: all is well."""

    @property
    def version(self) -> int:
        """Of the weights that are held."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_score_len(self) -> int:
        """Most tokens of a sequence that is only scored."""

    def check(self, request: GenerationRequest) -> None:
        """`ValueError` in the user's words when the engine cannot do what is asked; any thread may call it."""

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; `ValueError` as `check`."""

    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request; nothing happens when it has finished."""

    def has_work(self) -> bool:
        """True while a request is queued or running."""

    def step(self) -> list[Event]:
        """One forward pass: a chunk of prompts or one token of every running sequence."""

    def load_weights(self, weights: Any, version: int, /) -> dict[str, str]:
        """Replace the weights between two steps, by what the `WeightSource` of this engine read; returns the digest of
        every tensor now held."""

    def load_adapter(self, name: str, weights: Any, spec: AdapterSpec, /) -> dict[str, str]:
        """Add or replace a LoRA adapter, as read by the `WeightSource`; returns the digest of every tensor now held."""

    def remove_adapter(self, name: str) -> None:
        """Drop an adapter and abort its requests; `ValueError` when there is none of this name."""

    def adapters(self) -> dict[str, AdapterSpec]:
        """The adapters that requests may name."""

    def abort(self) -> list[Event]:
        """Break off every request: what was drawn so far comes back with finish_reason "abort"."""

    def stats(self) -> EngineStats:
        """Counters for `/metrics`."""

    def start(self, wake: Callable[[], None]) -> None:
        """Get ready. An engine whose tokens are drawn elsewhere calls `wake`, in any thread, when it has work."""

    def pause(self) -> None:
        """Draw nothing until `resume`; no step is called meanwhile."""

    def resume(self) -> None:
        """Draw again."""

    def close(self) -> None:
        """Let go of everything; no step will follow."""


class IntervalLog(Protocol):
    """Where busy intervals are written (the monitor of a run)."""

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        """Append one interval in unix seconds."""


@dataclass
class BusyClock:
    """Joins engine steps into busy intervals and hands them on when they end."""

    log: IntervalLog | None
    start: float = 0.0
    end: float = 0.0
    version: int = 0

    def add(self, start: float, end: float, version: int) -> None:
        """One step ran from `start` to `end` (unix seconds) under `version`."""
        if self.log is None:
            return
        if self.end and (start - self.end > IDLE_GAP_S or version != self.version or end - self.start > MAX_INTERVAL_S):
            self.flush()
        if not self.end:
            self.start, self.version = start, version
        self.end = end

    def flush(self) -> None:
        """Write the interval that is open, if any."""
        if self.log is not None and self.end:
            self.log.log_timeline("generate", self.start, self.end, self.version)
        self.end = 0.0


@dataclass
class EngineThread:
    """Owns an engine in one thread that sleeps while there is nothing to do.

    `deliver` and `on_crash` are called in that thread; `deliver` gets all events of a step at once.
    """

    engine: Engine
    deliver: Callable[[list[Event]], None]
    on_crash: Callable[[BaseException], None]
    clock: BusyClock = field(default_factory=lambda: BusyClock(None))
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _inbox: deque[Callable[[], None]] = field(default_factory=deque)
    _closed: bool = False
    _paused: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self.engine.start(self._notify)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its events arrive through `deliver`, an `error` output when the engine refuses it."""
        self._post(lambda: self._add(request))

    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request."""
        self._post(lambda: self.engine.cancel(request))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine between two steps; the future holds what it returned or raised."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future

    @property
    def paused(self) -> bool:
        """True while no step is taken."""
        return self._paused

    def pause(self, abort: bool = False) -> Future[None]:
        """Take no further step until `resume`; running requests keep their place, or end as aborted with `abort`."""

        def stop(engine: Engine) -> None:
            self._paused = True
            if abort and (events := engine.abort()):
                self.deliver(events)
            engine.pause()

        return self.call(stop)

    def resume(self) -> Future[None]:
        """Go on after `pause`."""

        def go(engine: Engine) -> None:
            engine.resume()
            self._paused = False

        return self.call(go)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop after the current step; requests that are left are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self.engine.close()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
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
            self._closed = True
            self.on_crash(error)
        finally:
            self.clock.flush()

    def _serve_commands(self) -> bool:
        """Take what was posted, waiting for it when the engine is idle; False when the thread should end."""
        if not self._inbox and not self._closed and not self._has_work():
            with self._wake:
                if not self._wake.wait_for(self._has_news, IDLE_GAP_S):
                    self.clock.flush()
                    self._wake.wait_for(self._has_news)
        while self._inbox:
            self._inbox.popleft()()
        return not self._closed

    def _add(self, request: GenerationRequest) -> None:
        try:
            self.engine.add(request)
        except ValueError as error:
            self.deliver([Output(request, [], [], [], [], "error", str(error))])

    def _has_work(self) -> bool:
        return not self._paused and self.engine.has_work()

    def _has_news(self) -> bool:
        return bool(self._inbox) or self._closed or self._has_work()
