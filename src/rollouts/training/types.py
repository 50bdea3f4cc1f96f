"""The words of the library: what a sample, a batch and a training run are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

Message = dict[str, Any]


class Status(str, Enum):
    """How a rollout ended. A bad rollout is data, never a crash."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Sample(msgspec.Struct):
    """One token sequence to train on, from prompt to last token.

    Every per-token list covers the *whole* sequence (prompt positions carry 0), so one index addresses all streams:

        tokens              [ 5  9  7 | 3  1 ]     prompt | response
        loss_mask           [ 0  0  0 | 1  1 ]
        inference_logprobs  [ 0  0  0 |-.2-.9]     of the distribution really sampled from
        versions            [(3, 4), (4, 5)]       token 3 by policy version 4, token 4 by version 5

    `versions` lists `(start, version)` spans over token positions, because weights may change in flight.
    """

    prompt: str | list[Message]
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

    Status = Status

    @property
    def rollout_log_probs(self) -> list[float] | None:
        """The name of `inference_logprobs` in the first edition of the library."""
        return self.inference_logprobs

    @property
    def response_length(self) -> int:
        """Number of tokens that carry loss."""
        return sum(1 for m in self.loss_mask if m > 0)

    def validate(self) -> None:
        """Raise `ValueError` naming the stream that does not cover the tokens, or the value that is not finite."""
        if not self.tokens:
            raise ValueError("sample has no tokens: fill `tokens` with prompt and response ids")
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
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} of a sample is not finite: fix the reward function")

    def to_dict(self) -> dict[str, Any]:
        """A plain, JSON-ready copy that shares nothing with the sample."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`; leaves `data` untouched. Unknown keys raise `ValueError`."""
        unknown = set(data) - set(Sample.__struct_fields__)
        if unknown:
            raise ValueError(f"unknown field(s) of a sample: {', '.join(sorted(unknown))}")
        try:
            return msgspec.convert(data, Sample)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a sample: {error}") from error


class RolloutBatch(msgspec.Struct):
    """Scored groups, ready for training; `samples` holds everything the columns summarise."""

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
    """How a rollout manager fills a batch. `batch_size` counts groups of `n_samples_per_prompt` samples."""

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: Callable[..., Any] | None = None
    reward_fn: Callable[[Sample], Any] | None = None
    filter_fn: Callable[[list[Sample]], bool] | None = None

    def __post_init__(self) -> None:
        if self.batch_size <= 0:
            raise ValueError(f"batch_size {self.batch_size} must be at least 1 group")
        if self.n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt {self.n_samples_per_prompt} must be at least 1")
        if self.over_sampling_factor < 1.0:
            raise ValueError(f"over_sampling_factor {self.over_sampling_factor} must be at least 1.0")

    def to_dict(self) -> dict[str, Any]:
        """The numbers; functions have no place in a file."""
        names = ("batch_size", "n_samples_per_prompt", "over_sampling_factor")
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def from_dict(
        data: dict[str, Any],
        generate_fn: Callable[..., Any] | None = None,
        reward_fn: Callable[[Sample], Any] | None = None,
        filter_fn: Callable[[list[Sample]], bool] | None = None,
    ) -> RolloutConfig:
        """The inverse of `to_dict`, with the functions given anew."""
        return RolloutConfig(**data, generate_fn=generate_fn, reward_fn=reward_fn, filter_fn=filter_fn)
