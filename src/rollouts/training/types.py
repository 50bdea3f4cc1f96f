"""Data types and protocols of the training library."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

Message = dict[str, Any]
T = TypeVar("T")
LOGPROB_TOLERANCE = 1e-3
"""Maximum log-prob above 0, due to rounding in engines."""
UNFILTERED = b"\0"
"""Entry of `Sample.sampling_support` of a token that was sampled from the whole vocabulary."""
RENAMED_FIELDS = {"anchor": "reference_weight"}
"""Fields of a `Sample` as earlier versions named them."""
ESTIMATORS = ("baseline", "mean", "leave_one_out", "length_weighted")


class Status(str, Enum):
    """Status of a rollout. Failures are recorded, not raised."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class TeacherTable(msgspec.Struct):
    """A teacher's top-k distribution for every loss token of a sample: packed `[tokens, k]` arrays.

    `ids` (int32) and `logprobs` (float32) are the k most likely tokens, `tail_mass` (float32, `[tokens]`) is the
    probability of all others. For the full vocabulary, `ids` and `tail_mass` are empty.
    """

    k: int
    logprobs: bytes
    ids: bytes = b""
    tail_mass: bytes = b""

    def validate(self, num_tokens: int) -> None:
        """Raise `ValueError` unless there is a row for each of `num_tokens` loss tokens."""
        sizes = {"logprobs": self.k, "ids": self.k if self.ids else 0, "tail_mass": 1 if self.ids else 0}
        for name, width in sizes.items():
            if len(getattr(self, name)) != 4 * width * num_tokens:
                raise ValueError(
                    f"`{name}` of a teacher's table has {len(getattr(self, name)) // 4} numbers, not {width} for each "
                    f"of {num_tokens} loss tokens"
                )


class Sample(msgspec.Struct):
    """One token sequence to train on, from prompt to last token.

    Every per-token list covers the *whole* sequence (prompt positions carry 0), so one index addresses all streams:

        tokens              [ 5  9  7 | 3  1 ]     prompt | response
        loss_mask           [ 0  0  0 | 1  1 ]
        inference_logprobs  [ 0  0  0 |-.2-.9]     under the sampling distribution
        versions            [(3, 4), (4, 5)]       token 3 by policy version 4, token 4 by version 5

    `versions` lists `(start, version)` spans over token positions, because weights may change in flight.
    """

    prompt: str | list[Message] | dict[str, Any]
    """Text, messages, or a row of a data set."""
    response: str = ""
    tokens: list[int] = []
    loss_mask: list[float] = []
    reward: float = 0.0
    group_index: int | None = None
    index: int | None = None
    metadata: dict[str, Any] = {}
    inference_logprobs: list[float] | None = None
    status: Status = Status.PENDING
    error: str | None = None
    stop_reason: str | None = None
    temperature: float = 1.0
    advantages: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    versions: list[tuple[int, int]] = []
    teacher_table: TeacherTable | None = None
    has_teacher: bool = True
    """False: no teacher scores this sample, and the loss has no teacher term."""
    objective: str | None = None
    """Name of the trainer's objective for this sample; None: that of the run."""
    sampling_support: bytes = b""
    """With truncated sampling (top_p, top_k, min_p), the tokens that each token was sampled from: one entry per token
    of the sequence, see `sampling_support`. Empty: every token was sampled from the whole vocabulary."""
    seat: str | None = None
    """The player whose calls these are, in an episode of several: it is compared with this seat of other rollouts."""
    reference_weight: float = 0.0
    """Above 0: reference sample (KL regularization to a teacher with the student's context) with this weight; the
    reward is ignored."""

    Status = Status

    @property
    def rollout_log_probs(self) -> list[float] | None:
        """Alias of `inference_logprobs`."""
        return self.inference_logprobs

    @property
    def response_length(self) -> int:
        """Number of tokens that carry loss."""
        return len(self.loss_mask) - self.loss_mask.count(0)

    def validate(self) -> None:
        """Raise `ValueError` for a stream that does not cover the tokens or has an invalid value."""
        if not self.tokens:
            raise ValueError("sample has no tokens: fill `tokens` with prompt and response ids")
        if not all(issubclass(kind, Integral) for kind in set(map(type, self.tokens))):
            raise TypeError(f"tokens of a sample must be whole numbers, got {self.tokens[:5]}")
        if min(self.loss_mask, default=0) < 0:
            raise ValueError(f"loss_mask of a sample holds {min(self.loss_mask)}: weights must not be negative")
        n = len(self.tokens)
        streams = {
            "loss_mask": self.loss_mask,
            "inference_logprobs": self.inference_logprobs,
            "advantages": self.advantages,
            "teacher_logprobs": self.teacher_logprobs,
        }
        for name, stream in streams.items():
            if stream is None:
                continue
            if len(stream) != n:
                raise ValueError(
                    f"sample has {n} tokens but {len(stream)} entries in `{name}`: both must cover prompt and response"
                )
            if not all(map(math.isfinite, stream)):
                raise ValueError(f"`{name}` of a sample holds a value that is not finite")
            if name.endswith("_logprobs") and max(stream, default=0.0) > LOGPROB_TOLERANCE:
                raise ValueError(
                    f"`{name}` of a sample holds {max(stream):g}: a log-prob is at most 0, so these are not natural "
                    "logarithms of probabilities"
                )
        if self.teacher_table is not None:
            self.teacher_table.validate(sum(mask > 0 for mask in self.loss_mask))
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} of a sample is not finite: fix the reward function")

    def with_floats(self) -> Sample:
        """A shallow copy whose loss mask and reward are floats: they may be given as bools, which no reader accepts."""
        return msgspec.structs.replace(self, loss_mask=list(map(float, self.loss_mask)), reward=float(self.reward))

    def to_dict(self) -> dict[str, Any]:
        """A deep copy as plain data, serializable as JSON. In `prompt` and `metadata`, NaN and infinities become None,
        values of other types what `as_plain` returns."""
        data: dict[str, Any] = msgspec.to_builtins(self.with_floats(), enc_hook=as_plain)
        return data | {name: _replace_nonfinite(data[name]) for name in ("prompt", "metadata")}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`, also for earlier versions; leaves `data` untouched. Unknown keys: `ValueError`."""
        data = {RENAMED_FIELDS.get(name, name): value for name, value in data.items()}
        unknown = set(data) - set(Sample.__struct_fields__)
        if unknown:
            raise ValueError(f"unknown field(s) of a sample: {', '.join(sorted(unknown))}")
        try:
            return msgspec.convert(data, Sample)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a sample: {error}") from error


def as_plain(value: Any) -> Any:
    """Plain numbers of array scalars and arrays, text of other types; an `enc_hook` of msgspec."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    return [_replace_nonfinite(item) for item in value] if isinstance(value, list) else value


class RolloutBatch(msgspec.Struct):
    """Scored groups, ready for training, as columns and as `samples`."""

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = {}
    samples: list[Sample] = []
    group_indices: list[int] = []

    @staticmethod
    def from_samples(samples: list[Sample], metadata: dict[str, Any] | None = None) -> RolloutBatch:
        """Columns over `samples`, in order."""
        return RolloutBatch(
            tokens=[s.tokens for s in samples],
            loss_masks=[s.loss_mask for s in samples],
            rewards=[s.reward for s in samples],
            response_lengths=[s.response_length for s in samples],
            metadata=metadata or {},
            samples=samples,
            group_indices=[s.group_index if s.group_index is not None else i for i, s in enumerate(samples)],
        )


@dataclass(frozen=True)
class RolloutConfig:
    """Options of a rollout manager. `batch_size` counts groups of `n_samples_per_prompt` samples."""

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: Callable[..., Any] | None = None
    reward_fn: Callable[[Sample], Any] | None = None
    filter_fn: Callable[[list[Sample]], Any] | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "batch_size", "n_samples_per_prompt")
        if not 1.0 <= self.over_sampling_factor < math.inf:
            raise ValueError(f"over_sampling_factor {self.over_sampling_factor} must be a number of at least 1.0")

    def to_dict(self) -> dict[str, Any]:
        """The options without the functions."""
        names = ("batch_size", "n_samples_per_prompt", "over_sampling_factor")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def from_dict(
        data: dict[str, Any],
        generate_fn: Callable[..., Any] | None = None,
        reward_fn: Callable[[Sample], Any] | None = None,
        filter_fn: Callable[[list[Sample]], Any] | None = None,
    ) -> RolloutConfig:
        """The inverse of `to_dict`; the functions are passed separately."""
        return RolloutConfig(**data, generate_fn=generate_fn, reward_fn=reward_fn, filter_fn=filter_fn)


@dataclass(frozen=True)
class SFTTrainingConfig:
    """Options of supervised fine-tuning; `batch_size` counts samples over all ranks.

    `num_steps` is the number of steps of one call, in addition to earlier ones. Every `checkpoint_every`-th step and
    the last are saved. `micro_batch_size` bounds the samples per forward pass and rank (None: all) and does not change
    the result.
    """

    num_steps: int
    batch_size: int
    log_every: int = 100
    checkpoint_every: int = 500
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "num_steps", "batch_size", "log_every", "checkpoint_every", "micro_batch_size")


@dataclass(frozen=True)
class RLTrainingConfig:
    """Options of reinforcement learning.

    `estimator` "baseline" is reward - `baseline`; "mean", "leave_one_out" and "length_weighted" are group-relative,
    divided by the group's standard deviation with `advantage_std`. Unset: "mean" for groups of several samples without
    a `baseline`, else "baseline". `advantage_fn` replaces it: the samples of a group -> one number for each. Engines
    are updated every `sync_every` steps.
    """

    num_steps: int
    sync_every: int = 10
    baseline: float = 0.0
    log_every: int = 10
    checkpoint_every: int = 100
    estimator: str | None = None
    advantage_std: bool = False
    micro_batch_size: int | None = None
    advantage_fn: Callable[[list[Sample]], Any] | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "num_steps", "sync_every", "log_every", "checkpoint_every", "micro_batch_size")
        if self.estimator is None:
            return self._check_unset()
        if self.advantage_fn is not None:
            raise ValueError(f"estimator {self.estimator!r} has no effect with advantage_fn: leave one of the two out")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator {self.estimator!r} is not one of {', '.join(ESTIMATORS)}")
        if self.estimator != "baseline" and self.baseline:
            raise ValueError(
                f"baseline {self.baseline} has no effect with estimator {self.estimator!r}: leave one of the two out"
            )
        if self.estimator == "baseline" and self.advantage_std:
            raise ValueError("advantage_std divides by a group's deviation: choose an estimator that uses groups")

    def _check_unset(self) -> None:
        if self.advantage_std:
            raise ValueError("advantage_std divides by a group's deviation: choose an estimator that uses groups")
        if self.baseline and self.advantage_fn is not None:
            raise ValueError(f"baseline {self.baseline} has no effect with advantage_fn: leave one of the two out")


def _check_counts(config: Any, *names: str) -> None:
    """Raise `ValueError` for a field that is not a whole number of at least 1."""
    for name in names:
        value = getattr(config, name)
        if value is None and name == "micro_batch_size":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value!r} of {type(config).__name__} must be a whole number of at least 1")


class TrainFuture(Generic[T]):
    """Result or exception of an operation; set once, awaited any number of times.

    `await future.result()` and `await future` are equivalent and work in any task of any event loop. None is valid.
    """

    def __init__(self, operation: str = "") -> None:
        self.operation = operation
        self._future: Future[T] = Future()

    def set_result(self, value: T) -> None:
        """Finish with `value`. Raises `RuntimeError` if already finished."""
        self._end(self._future.set_result, value)

    def set_exception(self, error: BaseException) -> None:
        """Finish with `error`, which is raised in all waiters. Raises `RuntimeError` if already finished."""
        self._end(self._future.set_exception, error)

    def done(self) -> bool:
        """Whether waiting would return at once."""
        return self._future.done()

    def wait(self) -> T:
        """The value; blocks the thread, for code outside of an event loop."""
        return self._future.result()

    async def result(self) -> T:
        """The value; raises the exception the operation ended with."""
        if not self._future.done():
            await self._wait_in_loop()
        return self._future.result()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result().__await__()

    def _end(self, setter: Callable[[Any], None], value: Any) -> None:
        try:
            setter(value)
        except InvalidStateError:
            raise RuntimeError(f"the future of {self.operation or 'an operation'} has its result already") from None

    async def _wait_in_loop(self) -> None:
        """Wait in the event loop until another thread finishes the future."""
        import anyio
        from anyio import from_thread, lowlevel

        event, token, loop_thread = anyio.Event(), lowlevel.current_token(), threading.get_ident()

        def notify() -> None:
            with suppress(anyio.RunFinishedError):  # the event loop has ended
                from_thread.run_sync(event.set, token=token)

        def wake(_: Future[T]) -> None:
            if threading.get_ident() == loop_thread:
                event.set()
            else:  # `run_sync` blocks until the loop runs, which could deadlock the thread that finishes the future
                threading.Thread(target=notify, daemon=True).start()

        self._future.add_done_callback(wake)
        await event.wait()


class ImmediateTrainFuture(TrainFuture[T]):
    """A finished future, for synchronous backends."""

    def __init__(self, result: T, operation: str = "") -> None:
        super().__init__(operation)
        self.set_result(result)


async def settle(value: Any) -> Any:
    """The value of a result that may be an awaitable, a `TrainFuture` or another object with an async `result()`."""
    while True:
        if inspect.isawaitable(value):
            value = await value
        elif hasattr(value, "result"):
            value = await value.result()
        else:
            return value


class TrainingBackend(Protocol):
    """Parameters and optimizer; operations are executed in the order of submission."""

    def forward_backward(self, batch: dict[str, Any]) -> TrainFuture[dict[str, float]]:
        """Accumulate the gradient of `batch`; returns at least `loss` and `grad_norm`."""

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        """Apply and clear the accumulated gradients; returns at least `lr` and `step`."""

    async def save_checkpoint(self, step: int, metrics: dict[str, float]) -> Path:
        """Write a checkpoint and return its directory."""
