"""Filters rollout results and converts them to rows for `sft`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from rollouts.training.datasets.sft import find_trained_turns, read_conversation
from rollouts.training.metrics import reaches

if TYPE_CHECKING:
    from prime_rl.generation.resume_log import Result
    from prime_rl.synthesize.config import SynthesisFilterConfig


class FilterVerdict(StrEnum):
    """Whether a result is part of the data set, or why not."""

    KEPT = "kept"
    FAILED = "failed"
    BELOW_MIN_REWARD = "below_min_reward"
    ABOVE_MAX_REWARD = "above_max_reward"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    DUPLICATE = "duplicate"
    OVER_MAX_PER_EXAMPLE = "over_max_per_example"


def choose_results(groups: Sequence[Sequence[Result]], keep: SynthesisFilterConfig) -> list[list[FilterVerdict]]:
    """The verdict on each result. Higher rewards of an example take precedence."""
    seen: set[bytes] = set()
    verdicts = []
    for group in groups:
        verdict = [classify_result(result, keep) for result in group]
        num_kept = 0
        for number in sorted(range(len(group)), key=lambda n: (-(group[n].reward or 0.0), n)):
            if verdict[number] is not FilterVerdict.KEPT:
                continue
            key = conversation_key(group[number], loose=keep.dedupe == "loose")
            if keep.dedupe != "off" and key in seen:
                verdict[number] = FilterVerdict.DUPLICATE
            elif keep.max_per_example is not None and num_kept >= keep.max_per_example:
                verdict[number] = FilterVerdict.OVER_MAX_PER_EXAMPLE
            else:
                num_kept += 1
                seen.add(key)
        verdicts.append(verdict)
    return verdicts


def classify_result(result: Result, keep: SynthesisFilterConfig) -> FilterVerdict:
    """Verdict on a single result, without deduplication."""
    if result.reward is None:
        return FilterVerdict.FAILED
    if keep.min_reward is not None and not reaches(result.reward, keep.min_reward):
        return FilterVerdict.BELOW_MIN_REWARD
    if keep.max_reward is not None and not reaches(keep.max_reward, result.reward):
        return FilterVerdict.ABOVE_MAX_REWARD
    if result.is_truncated and not keep.truncated:
        return FilterVerdict.TRUNCATED
    conversation = read_conversation({"prompt": result.prompt, "completion": _trim_completion(result)}, 0)
    if any(find_trained_turns(conversation)):
        return FilterVerdict.KEPT
    return FilterVerdict.TRUNCATED if _is_cut(result) else FilterVerdict.EMPTY


def conversation_key(result: Result, *, loose: bool) -> bytes:
    """Key that is equal for duplicate conversations."""
    parts = [result.prompt, [_without_ids(message) for message in _as_list(result.completion)]]
    plain = msgspec.to_builtins(parts, enc_hook=str)
    return msgspec.json.encode(_loosen(plain) if loose else plain, order="deterministic")


def _loosen(value: Any) -> Any:
    """JSON data whose texts have neither case nor punctuation, and single spaces only."""
    if isinstance(value, str):
        return re.sub(r"[\W_]+", " ", value).casefold().strip()
    if isinstance(value, list):
        return [_loosen(item) for item in value]
    return {key: _loosen(item) for key, item in value.items()} if isinstance(value, dict) else value


def to_row(result: Result, env: str, model: str, template_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One line of the data set: a conversation with loss on the completion, and its origin.

    `template_kwargs`: those of the requests, with which `sft` renders the same prompt.
    """
    row: dict[str, Any] = {"prompt": result.prompt, "completion": _trim_completion(result)}
    if result.tools:
        row["tools"] = result.tools
    if template_kwargs:
        row["chat_template_kwargs"] = template_kwargs
    origin = {"env": env, "example_id": result.example_id, "rollout_idx": result.rollout_idx, "model": model}
    return row | origin | {"reward": result.reward}


def _trim_completion(result: Result) -> Any:
    """A completion without messages after the model's last one, which has no loss if it was cut off."""
    completion, is_cut = result.completion, _is_cut(result)
    if isinstance(completion, str):
        return "" if is_cut else completion
    while completion and completion[-1].get("role") != "assistant":
        completion = completion[:-1]
    return [*completion[:-1], *(answer | {"weight": 0} for answer in completion[-1:])] if is_cut else completion


def _is_cut(result: Result) -> bool:
    """Whether the token limit cut off the last answer: `sft` would train the model to end there."""
    return result.stop_reason == "length"


def _as_list(completion: Any) -> list[Any]:
    return [completion] if isinstance(completion, str) else list(completion)


def _without_ids(message: Any) -> Any:
    """A message without tool call ids, which are random."""
    if not isinstance(message, dict):
        return message
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls") or []]
    return {key: value for key, value in message.items() if key != "tool_call_id"} | {"tool_calls": calls}
