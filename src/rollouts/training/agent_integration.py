"""Converts agent trajectories and environment rollouts to training samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollouts.agents import AgentEnvironment, ChatAgent, Endpoint, Trajectory, Turn
from rollouts.training.concurrency import run_concurrently
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.sft import (
    Conversation,
    UnlearnableTextError,
    find_trained_turns,
    is_empty_turn,
    name_reasoning,
    render_conversation,
)
from rollouts.training.types import UNFILTERED, Message, Sample, Status


class Rollout(msgspec.Struct, kw_only=True):
    """One finished attempt at a prompt, scored unless it failed. `turns` is empty if the server returned no tokens."""

    prompt: str | list[Message]
    completion: str | list[Message] = ""
    turns: list[Turn] = []
    num_turns: int = 0
    reward: float = 0.0
    seat_rewards: dict[str, float] = {}
    """Rewards of the players of an episode of several; `reward` is that of the first."""
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
    """Sampled tokens as counted by the server; None if it does not report them."""
    num_sampled: int = 0
    """Tokens that the server returned for this rollout: those of `turns`, of failed attempts and of other requests."""
    tools: list[dict[str, Any]] | None = None
    """Available tools, as OpenAI schemas."""
    feedback: str | None = None
    """What the environment says about this attempt (`state["feedback"]`): a traceback, a judge's remark."""

    @property
    def failed(self) -> bool:
        """Whether the rollout has an error instead of a reward."""
        return self.status == Status.FAILED

    @property
    def response(self) -> str:
        """The model's text, turns joined by newlines."""
        return completion_text(self.completion)


def completion_text(completion: str | list[Message]) -> str:
    """The assistant's text of a completion."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")


def describe_completion(completion: str | list[Message]) -> str:
    """A completion for a reader: the assistant's text, with tool calls and results if it has any."""
    if isinstance(completion, str) or not any(message.get("tool_calls") for message in completion):
        return completion_text(completion)
    lines = []
    for message in completion:
        text = str(message.get("content") or "")
        if text:
            lines.append(text if message.get("role") == "assistant" else f"{message.get('role')}: {text}")
        functions = [call.get("function") or call for call in message.get("tool_calls") or []]
        lines += [f"call {function.get('name')}: {function.get('arguments')}" for function in functions]
    return "\n".join(lines)


def rollout_to_samples(rollout: Rollout, *, group_index: int | None = None, index: int | None = None) -> list[Sample]:
    """Merge turns into samples: a turn whose prompt extends the tokens of no sample starts a new one.

        turn 1   prompt [1 2]            completion [3 4]
        turn 2   prompt [1 2 3 4 5]      completion [6]      -> tokens [1 2 3 4 5 6], mask [0 0 1 1 0 1]
        turn 3   prompt [1 2 9]          completion [7]      -> a second sample [1 2 9 7], mask [0 0 0 1]
        turn 4   prompt [1 2 3 4 5 6 8]  completion [2]      -> the first sample goes on

    So branches of a conversation may alternate, and every sampled token has a mask of 1 in exactly one sample.

    `metadata["chat_request"]` is the chat request of the sample's prompt, if the server rendered it, or of its
    beginning, where the prompt continues an earlier turn as tokens. Turns without sampled tokens are skipped. Turns of
    several seats are merged seat by seat, each with the reward of its own. Raises `ValueError` if a turn's log-probs
    and tokens differ in number, or if it was sampled under a grammar: its log-probs are then those of the allowed
    tokens, not those of the trained policy.
    """
    samples: list[Sample] = []
    for number, turn in enumerate(rollout.turns, start=1):
        if len(turn.logprobs) != len(turn.completion_ids):
            raise ValueError(
                f"turn {number} has {len(turn.completion_ids)} sampled tokens but {len(turn.logprobs)} log-probs: "
                "the server must return one log-prob per token"
            )
        if turn.constrained_by is not None:
            raise ValueError(
                f"turn {number} was sampled under a grammar ({turn.constrained_by}): its log-probs are not those of "
                "the trained policy, so training on it is biased; leave the field out in training"
            )
        if not turn.completion_ids:
            continue
        extended = [s for s in samples if s.seat == turn.seat and _extends(turn.prompt_ids, s.tokens)]
        sample = max(extended, key=lambda sample: len(sample.tokens), default=None)
        if sample is None:
            samples.append(sample := _open_sample(rollout, group_index, index))
            if turn.seat is not None:
                sample.seat, sample.reward = turn.seat, rollout.seat_rewards.get(turn.seat, 0.0)
            if (chat_request := _find_chat_request(turn, rollout.turns[: number - 1])) is not None:
                sample.metadata = {"chat_request": chat_request}
        _append_turn(sample, turn)
    return samples


def _extends(prompt_ids: list[int], tokens: list[int]) -> bool:
    return prompt_ids[: len(tokens)] == tokens


def _find_chat_request(turn: Turn, earlier: Sequence[Turn]) -> dict[str, Any] | None:
    """The chat request of a turn, or of the first turn of the conversation that it continues as tokens."""
    if turn.chat_request is not None:
        return turn.chat_request
    for root in reversed(earlier):
        is_continued = root.seat == turn.seat and _extends(turn.prompt_ids, [*root.prompt_ids, *root.completion_ids])
        if is_continued and root.chat_request is not None:
            return root.chat_request
    return None


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
    """Append the new prompt tokens (masked) and the sampled tokens of a turn; version spans become absolute."""
    assert sample.inference_logprobs is not None
    given = turn.prompt_ids[len(sample.tokens) :]
    start = len(sample.tokens) + len(given)
    if turn.sampling_support or sample.sampling_support:
        before = sample.sampling_support or UNFILTERED * len(sample.tokens)
        sampled = turn.sampling_support or UNFILTERED * len(turn.completion_ids)
        sample.sampling_support = before + UNFILTERED * len(given) + sampled
    sample.tokens = [*sample.tokens, *given, *turn.completion_ids]
    sample.loss_mask = [*sample.loss_mask, *[0.0] * len(given), *[1.0] * len(turn.completion_ids)]
    sample.inference_logprobs = [*sample.inference_logprobs, *[0.0] * len(given), *turn.logprobs]
    for offset, version in turn.versions:
        if not sample.versions or sample.versions[-1][1] != version:
            sample.versions = [*sample.versions, (start + offset, version)]
    assert len(sample.tokens) == len(sample.loss_mask) == len(sample.inference_logprobs)


def trajectory_to_sample(trajectory: Trajectory, tokenizer: Any, metadata: dict[str, Any] | None = None) -> Sample:
    """One sample of an agent's trajectory, with loss on the assistant's messages.

    Uses the sampled tokens and log-probs if the server returned them. Otherwise `tokenizer` (a Hugging Face tokenizer
    with a chat template) renders the messages, and log-probs are None. Each turn must extend the previous tokens:
    `ValueError` if the template rewrites earlier turns, and for a failed trajectory.
    """
    if trajectory.status == Status.FAILED:
        raise ValueError(f"the trajectory failed and has no training data: {trajectory.error}")
    if trajectory.turns:
        sample = _sample_of_turns(trajectory)
    else:
        sample = _render_messages(trajectory, TemplateRenderer(tokenizer))
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
    """Run an agent on `prompt` and convert the trajectory to a sample.

    Server failures, empty answers, and generated text that the template of `tokenizer` drops or merges with the prompt
    give status FAILED.
    """
    trajectory = await ChatAgent(endpoint, environment_cls, max_turns).rollout(prompt, seed=seed)
    error = trajectory.error
    if trajectory.status != Status.FAILED:
        try:
            return trajectory_to_sample(trajectory, tokenizer, metadata)
        except UnlearnableTextError as problem:
            error = str(problem)
    return Sample(prompt=prompt, status=Status.FAILED, error=error, metadata=dict(metadata or {}))


async def generate_rollout_batch(
    prompts: Sequence[str | list[Message]],
    environment_cls: Callable[[], AgentEnvironment] | None,
    endpoint: Endpoint,
    tokenizer: Any,
    max_turns: int = 10,
    metadata_list: Sequence[dict[str, Any]] | None = None,
) -> list[Sample]:
    """`agent_rollout_to_sample` for all prompts concurrently; samples in the order of the prompts.

    Raises `ValueError` unless `metadata_list` has one entry per prompt, and for a trajectory that is not one sample.
    """
    if metadata_list is not None and len(metadata_list) != len(prompts):
        raise ValueError(
            f"metadata_list has {len(metadata_list)} entries for {len(prompts)} prompts: pass one for each"
        )
    samples: list[Sample | None] = [None] * len(prompts)

    async def attempt(i: int) -> None:
        metadata = metadata_list[i] if metadata_list is not None else None
        samples[i] = await agent_rollout_to_sample(
            prompts[i], environment_cls, endpoint, tokenizer, max_turns, metadata
        )

    await run_concurrently(attempt, range(len(prompts)))
    return [sample for sample in samples if sample is not None]


def _render_messages(trajectory: Trajectory, chat: TemplateRenderer) -> Sample:
    messages = [name_reasoning(message, str(chat.tokenizer.chat_template)) for message in trajectory.messages]
    conversation = Conversation(messages, trajectory.num_prompt_messages, trajectory.tools)
    if not any(find_trained_turns(conversation)):
        raise UnlearnableTextError("the trajectory has no text or tool call of the assistant")
    sample = render_conversation(conversation, chat)
    sample.index = None
    is_cut = trajectory.stop_reason == "length" and not is_empty_turn(messages[-1])
    if is_cut and sample.tokens[-1] in chat.end_ids:  # the template's, which the model did not generate
        sample.tokens, sample.loss_mask = sample.tokens[:-1], sample.loss_mask[:-1]
    return sample


def _sample_of_turns(trajectory: Trajectory) -> Sample:
    samples = rollout_to_samples(Rollout(prompt=trajectory.prompt, turns=trajectory.turns))
    if len(samples) == 1:
        return samples[0]
    if not samples:
        raise UnlearnableTextError("the trajectory has no sampled tokens")
    raise ValueError(
        f"the trajectory has {len(samples)} token sequences: the chat template rewrites earlier turns, so a "
        "later prompt does not extend the previous tokens; use a prefix-stable template, or rollout_to_samples"
    )
