"""From what an agent did to what is trained on: a trajectory of turns becomes one or more samples."""

from __future__ import annotations

from typing import Any

import msgspec

from rollouts.training.types import Message, Sample, Status


class Turn(msgspec.Struct):
    """One call of the model: the tokens it was given and the tokens it sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of the completion tokens, under the distribution they were sampled from."""
    versions: list[tuple[int, int]] = []
    """`(start, version)` spans; `start` counts completion tokens of this turn."""


class Rollout(msgspec.Struct, kw_only=True):
    """One finished attempt at a prompt, scored unless it failed. `turns` is empty when the server told no tokens."""

    prompt: str | list[Message]
    completion: str | list[Message] = ""
    turns: list[Turn] = []
    num_turns: int = 0
    reward: float = 0.0
    metrics: dict[str, float] = {}
    status: Status = Status.COMPLETED
    error: str | None = None
    error_type: str | None = None
    stop_reason: str | None = None
    temperature: float = 1.0
    answer: Any = None
    info: Any = None
    task: str = ""
    example_id: int = 0
    generation_ms: float = 0.0
    scoring_ms: float = 0.0

    @property
    def failed(self) -> bool:
        """Nothing to learn from: it has an error instead of a reward."""
        return self.status == Status.FAILED

    @property
    def response(self) -> str:
        """What the model wrote, turns joined by newlines."""
        return completion_text(self.completion)


def completion_text(completion: str | list[Message]) -> str:
    """The assistant's words of a completion."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")


def rollout_to_samples(rollout: Rollout, *, group_index: int | None = None, index: int | None = None) -> list[Sample]:
    """Samples over the turns: one while each prompt extends the tokens before it, a new one where it does not.

        turn 1   prompt [1 2]            completion [3 4]
        turn 2   prompt [1 2 3 4 5]      completion [6]      -> tokens [1 2 3 4 5 6], mask [0 0 1 1 0 1]
        turn 3   prompt [1 2 9]          completion [7]      -> a second sample [1 2 9 7], mask [0 0 0 1]

    Turns without sampled tokens train nothing and are left out. Raises `ValueError` where a turn's log-probs and
    tokens differ in number.
    """
    samples: list[Sample] = []
    for number, turn in enumerate(rollout.turns, start=1):
        if len(turn.logprobs) != len(turn.completion_ids):
            raise ValueError(
                f"turn {number} has {len(turn.completion_ids)} sampled tokens but {len(turn.logprobs)} log-probs: "
                "the server must answer with one log-prob per token"
            )
        if not turn.completion_ids:
            continue
        if not samples or not _extends(turn.prompt_ids, samples[-1].tokens):
            samples.append(_open_sample(rollout, group_index, index))
        _append_turn(samples[-1], turn)
    return samples


def _extends(prompt_ids: list[int], tokens: list[int]) -> bool:
    return prompt_ids[: len(tokens)] == tokens


def _open_sample(rollout: Rollout, group_index: int | None, index: int | None) -> Sample:
    return Sample(
        prompt=rollout.prompt,
        response=rollout.response,
        inference_logprobs=[],
        reward=rollout.reward,
        group_index=group_index,
        index=index,
        status=rollout.status,
        error=rollout.error,
        stop_reason=rollout.stop_reason,
        temperature=rollout.temperature,
    )


def _append_turn(sample: Sample, turn: Turn) -> None:
    """Add what is new in the turn's prompt (masked) and its sampled tokens; spans become absolute."""
    assert sample.inference_logprobs is not None
    given = turn.prompt_ids[len(sample.tokens) :]
    start = len(sample.tokens) + len(given)
    sample.tokens = [*sample.tokens, *given, *turn.completion_ids]
    sample.loss_mask = [*sample.loss_mask, *[0.0] * len(given), *[1.0] * len(turn.completion_ids)]
    sample.inference_logprobs = [*sample.inference_logprobs, *[0.0] * len(given), *turn.logprobs]
    for offset, version in turn.versions:
        if not sample.versions or sample.versions[-1][1] != version:
            sample.versions = [*sample.versions, (start + offset, version)]
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.inference_logprobs)
