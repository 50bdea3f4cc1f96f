"""From results to the rows that `sft` reads: what is kept, and why the rest is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.training.datasets.sft import is_empty_turn, read_conversation

if TYPE_CHECKING:
    from prime_rl.synthesize.config import KeepConfig
    from prime_rl.utils.journal import Result

KEPT = "kept"


def choose_results(groups: Sequence[Sequence[Result]], keep: KeepConfig) -> list[list[str]]:
    """The verdict on each result: "kept", or the reason why not. Of an example the best come first, then by order."""
    seen: set[bytes] = set()
    verdicts = []
    for group in groups:
        verdict = [judge(result, keep) for result in group]
        taken = 0
        for number in sorted(range(len(group)), key=lambda n: (-(group[n].reward or 0.0), n)):
            words = conversation_words(group[number], loose=keep.dedupe == "loose")
            if verdict[number] == KEPT and keep.dedupe != "off" and words in seen:
                verdict[number] = "duplicate"
            elif verdict[number] == KEPT and keep.max_per_example is not None and taken >= keep.max_per_example:
                verdict[number] = "over max_per_example"
            if verdict[number] == KEPT:
                taken += 1
                seen.add(words)
        verdicts.append(verdict)
    return verdicts


def judge(result: Result, keep: KeepConfig) -> str:
    """The verdict on a result by itself."""
    if result.reward is None:
        return "failed"
    if keep.min_reward is not None and result.reward < keep.min_reward:
        return "reward below min_reward"
    if keep.max_reward is not None and result.reward > keep.max_reward:
        return "reward above max_reward"
    if result.is_truncated and not keep.truncated:
        return "truncated"
    conversation = read_conversation({"prompt": result.prompt, "completion": result.completion}, 0)
    learnt = conversation.messages[conversation.first_trained :]
    says = any(message.get("role") == "assistant" and not is_empty_turn(message) for message in learnt)
    return KEPT if says else "empty"


def conversation_words(result: Result, *, loose: bool) -> bytes:
    """What two equal conversations have in common."""
    said = [result.prompt, [_without_ids(message) for message in _as_list(result.completion)]]
    text = msgspec.json.encode(said, order="deterministic", enc_hook=str).decode()
    return (re.sub(r"[\W_]+", " ", text).casefold() if loose else text).encode()


def to_row(result: Result, env: str, model: str) -> dict[str, Any]:
    """One line of the data set: a conversation with loss on the completion, and where it comes from."""
    row: dict[str, Any] = {"prompt": result.prompt, "completion": _until_last_word(result.completion)}
    if result.tools:
        row["tools"] = result.tools
    origin = {"env": env, "example_id": result.example_id, "rollout_idx": result.rollout_idx, "model": model}
    return row | origin | {"reward": result.reward}


def _until_last_word(completion: Any) -> Any:
    """A completion without what the environment said after the model's last message."""
    if isinstance(completion, str):
        return completion
    last = max(n for n, message in enumerate(completion) if message.get("role") == "assistant")
    return completion[: last + 1]


def _as_list(completion: Any) -> list[Any]:
    return [completion] if isinstance(completion, str) else list(completion)


def _without_ids(message: Any) -> Any:
    """A message without the names of its tool calls, which a server draws at random."""
    if not isinstance(message, dict):
        return message
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls") or []]
    return {key: value for key, value in message.items() if key != "tool_call_id"} | {"tool_calls": calls}
