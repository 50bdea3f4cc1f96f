"""From what an agent did to what is trained on: a trajectory of turns becomes one or more samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.abc
import msgspec

from rollouts.agents import AgentEnvironment, ChatAgent, Endpoint, Trajectory, Turn
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.sft import Conversation, render_conversation
from rollouts.training.types import Message, Sample, Status

__all__ = [
    "Rollout",
    "Turn",
    "agent_rollout_to_sample",
    "completion_text",
    "generate_rollout_batch",
    "rollout_to_samples",
    "trajectory_to_sample",
]


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
    completion_tokens: int | None = None
    """Sampled tokens by the server's own count; None where it does not tell."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model was offered, as OpenAI schemas."""

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

    `metadata["asked"]` is what the server rendered to a sample's prompt, where that is known.
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
            if turn.asked is not None:
                samples[-1].metadata = {"asked": turn.asked}
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


def trajectory_to_sample(trajectory: Trajectory, tokenizer: Any, metadata: dict[str, Any] | None = None) -> Sample:
    """One sample of an agent's trajectory, with loss on what the model said.

    Where the engine told its tokens these are trained on, with their log-probs. Otherwise `tokenizer` (a Hugging Face
    tokenizer with a chat template) renders the messages, and log-probs are None. Either way each turn must extend
    the tokens before it: `ValueError` where the template rewrites earlier turns, and for a trajectory that failed.
    """
    if trajectory.status == Status.FAILED:
        raise ValueError(f"the trajectory failed, there is nothing to learn from: {trajectory.error}")
    if trajectory.turns:
        sample = _sample_of_turns(trajectory)
    else:
        conversation = Conversation(trajectory.messages, trajectory.num_prompt_messages)
        sample = render_conversation(conversation, TemplateRenderer(tokenizer))
        sample.index = None
    sample.prompt, sample.response = trajectory.prompt, trajectory.text
    sample.status, sample.stop_reason = trajectory.status, trajectory.stop_reason
    sample.temperature = trajectory.temperature
    verdict = {} if trajectory.correct is None else {"correct": trajectory.correct}
    sample.metadata = {**(metadata or {}), **verdict}
    sample.validate()
    return sample


async def agent_rollout_to_sample(
    prompt: str | list[Message],
    environment_cls: Callable[[], AgentEnvironment] | None,
    endpoint: Endpoint,
    tokenizer: Any,
    max_turns: int = 10,
    metadata: dict[str, Any] | None = None,
    *,
    seed: int | None = None,
) -> Sample:
    """Let an agent attempt `prompt` and turn what it did into a sample; a failing server gives one of status FAILED."""
    trajectory = await ChatAgent(endpoint, environment_cls, max_turns).rollout(prompt, seed=seed)
    if trajectory.status == Status.FAILED:
        return Sample(prompt=prompt, status=Status.FAILED, error=trajectory.error, metadata=dict(metadata or {}))
    return trajectory_to_sample(trajectory, tokenizer, metadata)


async def generate_rollout_batch(
    prompts: Sequence[str | list[Message]],
    environment_cls: Callable[[], AgentEnvironment] | None,
    endpoint: Endpoint,
    tokenizer: Any,
    max_turns: int = 10,
    metadata_list: Sequence[dict[str, Any]] | None = None,
) -> list[Sample]:
    """`agent_rollout_to_sample` for all prompts at the same time; samples in the order of the prompts.

    Raises `ValueError` unless there is one entry of `metadata_list` per prompt, or when a trajectory cannot be one
    sample.
    """
    if metadata_list is not None and len(metadata_list) != len(prompts):
        raise ValueError(
            f"metadata_list has {len(metadata_list)} entries for {len(prompts)} prompts: pass one for each"
        )
    samples: list[Sample | None] = [None] * len(prompts)
    errors: list[Exception] = []

    async def attempt(i: int, tasks: anyio.abc.TaskGroup) -> None:
        metadata = metadata_list[i] if metadata_list is not None else None
        try:
            samples[i] = await agent_rollout_to_sample(
                prompts[i], environment_cls, endpoint, tokenizer, max_turns, metadata
            )
        except Exception as error:  # raised below as itself, not in a group of errors
            errors.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for i in range(len(prompts)):
            tasks.start_soon(attempt, i, tasks)
    if errors:
        raise errors[0]
    return [sample for sample in samples if sample is not None]


def _sample_of_turns(trajectory: Trajectory) -> Sample:
    samples = rollout_to_samples(Rollout(prompt=trajectory.prompt, turns=trajectory.turns))
    if len(samples) == 1:
        return samples[0]
    if not samples:
        raise ValueError("the model sampled no token: there is nothing to learn from this trajectory")
    raise ValueError(
        f"the trajectory falls into {len(samples)} token sequences: the chat template rewrites earlier turns, so a "
        "later prompt does not extend the tokens before it; use a prefix-stable template, or rollout_to_samples"
    )
