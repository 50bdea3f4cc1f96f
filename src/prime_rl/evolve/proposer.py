"""Proposers of contexts: a Python function, or a model that reads examples."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.configuration.imports import import_function
from prime_rl.generation.rollout_jobs import build_request
from rollouts.training.agent_integration import completion_text
from rollouts.training.environments.plain import build_request as build_chat_request
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed

if TYPE_CHECKING:
    from prime_rl.evolve.config import EvolveConfig, ProposerConfig
    from prime_rl.generation.resume_log import Result

PROPOSAL_STREAM = 2**20
"""Rollout number of proposals in request seeds, beyond those of rollouts."""
FENCE = re.compile(r"\s*(`{3,})([^`]*)$")
"""A line that opens a block, or closes it if nothing follows."""

Proposer = Callable[[int, str, Sequence[Mapping[str, Any]]], Awaitable[str]]
"""(candidate number, context of the parent, examples) -> new context."""


def build_proposer(config: EvolveConfig, client: Any) -> Proposer:
    """The configured proposer; `client` is that of its server, unused by a function."""
    proposer = config.proposer
    if proposer.function is None:
        return _build_model_proposer(proposer, proposer.model or config.model.name, client, config.seed)
    function = import_function(proposer.function, "proposer.function")

    async def propose(number: int, context: str, examples: Sequence[Mapping[str, Any]]) -> str:
        text = function(context, list(examples), random.Random(f"{config.seed}/proposal/{number}"))
        if not isinstance(text, str):
            raise ValueError(f"proposer.function returned a {type(text).__name__}: return the new context as text")
        return text

    return propose


def _build_model_proposer(config: ProposerConfig, model: str, client: Any, seed: int) -> Proposer:
    async def propose(number: int, context: str, examples: Sequence[Mapping[str, Any]]) -> str:
        text = config.template.format(context=context, examples=format_examples(examples))
        request_seed = sample_seed(
            seed if config.sampling.seed is None else config.sampling.seed, number, PROPOSAL_STREAM
        )
        args = build_chat_request(build_request(config.sampling, request_seed, client.base_url, model))
        answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **args)
        choice = answer.choices[0]
        return extract_context(choice.message.content or "", is_cut=choice.finish_reason == "length")

    return propose


def extract_context(reply: str, is_cut: bool = False) -> str:
    """The text of the last fenced block of a reply, of one without its end, else the whole reply.

    A fence with a language opens a block inside of another one. "" if the reply was cut inside of a block.
    """
    lines, found = reply.split("\n"), None
    opened: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        if (match := FENCE.match(line)) is None or (opened and len(match[1]) < len(opened[-1][1])):
            continue
        if not opened or match[2].strip():
            opened.append((number, match[1]))
            continue
        first, _ = opened.pop()
        if not opened:
            found = lines[first + 1 : number]
    if opened and is_cut:
        return ""
    if found is None:
        found = lines[opened[0][0] + 1 :] if opened else lines
    return "\n".join(found).strip()


def describe_result(prompt: Any, result: Result) -> dict[str, Any]:
    """A rollout as the proposer sees it, with the prompt that excludes the context."""
    return {
        "prompt": prompt,
        "completion": completion_text(result.completion),
        "answer": result.answer,
        "reward": 0.0 if result.reward is None else result.reward,
        "metrics": dict(result.metrics),
        "feedback": result.feedback,
    }


def format_examples(examples: Sequence[Mapping[str, Any]]) -> str:
    """Numbered examples as text."""
    return "\n\n".join(
        f"Task {number}:\n{_format(example['prompt'])}\nAnswer: {example['completion']}\n"
        f"Reference answer: {_format(example['answer'])}\nReward: {example['reward']:g}"
        + (f"\nFeedback: {example['feedback']}" if example.get("feedback") else "")
        for number, example in enumerate(examples, 1)
    )


def _format(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and "role" in part for part in value):
        return "\n".join(f"{message['role']}: {message.get('content')}" for message in value)
    return json.dumps(msgspec.to_builtins(value, enc_hook=str))
