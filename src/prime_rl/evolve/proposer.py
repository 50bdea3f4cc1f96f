"""Proposers of contexts: a Python function, or a model that reads examples."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from loguru import logger

from prime_rl.configuration.imports import import_function
from prime_rl.generation.rollout_jobs import build_request
from rollouts.training.agent_integration import describe_completion
from rollouts.training.environments import digest_code
from rollouts.training.environments.plain import build_request as build_chat_request
from rollouts.training.environments.protocol import describe_failure
from rollouts.training.environments.resolve import EnvSource
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed

if TYPE_CHECKING:
    from prime_rl.evolve.config import EvolveConfig, ProposerConfig
    from prime_rl.generation.resume_log import Result

PROPOSAL_STREAM = 2**20
"""Rollout number of proposals in request seeds, beyond those of rollouts."""
FENCE = re.compile(r"((?:(?!```).)*)(`{3,})([^`]*)$")
"""Text, backticks and what follows of a line that may open or close a block."""

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


def describe_proposer(config: ProposerConfig) -> dict[str, Any]:
    """What proposals depend on: the settings, and of a function a hash of its file and of those that it imports."""
    settings = config.model_dump(exclude={"client"})
    if config.function is None:
        return settings
    import_function(config.function, "proposer.function")
    module = config.function.partition(":")[0]
    file = sys.modules[module].__file__
    source = EnvSource(config.function, module, file=None if file is None else Path(file))
    return {**settings, "code": digest_code(source)}


def _build_model_proposer(config: ProposerConfig, model: str, client: Any, seed: int) -> Proposer:
    async def propose(number: int, context: str, examples: Sequence[Mapping[str, Any]]) -> str:
        request_seed = sample_seed(
            seed if config.sampling.seed is None else config.sampling.seed, number, PROPOSAL_STREAM
        )
        sampling_args = build_request(config.sampling, request_seed, client.base_url, model, with_tokens=False)
        args = build_chat_request(sampling_args)
        while True:
            text = config.template.format(context=context, examples=format_examples(examples))
            messages = [{"role": "user", "content": text}]
            try:
                answer = await client.chat.completions.create(model=model, messages=messages, **args)
            except Exception as error:
                if describe_failure(error)[0] != "OverlongPrompt":
                    raise
                if len(examples) <= 1:
                    logger.warning(f"Candidate {number} is empty, as a request with one rollout is too long: {error}")
                    return ""
                examples = choose_worst(examples, len(examples) // 2)
                continue
            choice = answer.choices[0]
            return extract_context(choice.message.content or "", is_cut=choice.finish_reason == "length")

    return propose


def choose_worst(examples: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The examples with the lowest rewards, in the given order."""
    chosen = sorted(range(len(examples)), key=lambda i: examples[i]["reward"])[:count]
    return [examples[i] for i in sorted(chosen)]


def extract_context(reply: str, is_cut: bool = False) -> str:
    """The text of the last fenced block of a reply, of one without its end, else the whole reply.

    Inside of a block, a fence with a language opens another one; so does one without, if the block has a language and
    pairs of such fences follow. Thoughts before the reply are left out. "" if the reply was cut inside of a block or of
    its thoughts, or before any block.
    """
    lines, found = drop_thoughts(reply).split("\n"), None
    fences = [(number, match) for number, line in enumerate(lines) if (match := FENCE.match(line))]
    opened: list[tuple[int, re.Match[str]]] = []
    for i, (number, fence) in enumerate(fences):
        has_text, info = bool(fence[1].strip()), fence[3]
        if has_text and info.strip():
            continue
        if not opened:
            if not has_text or i + 1 < len(fences):
                opened.append((number, fence))
            continue
        first, opener = opened[-1]
        if len(fence[2]) < len(opener[2]):
            continue
        later = [match for _, match in fences[i + 1 :] if len(match[2]) >= len(opener[2])]
        is_paired = later and len(later) % 2 == 0 and not any(match[3].strip() for match in later)
        has_inner = len(opened) == 1 and opener[3].strip() and not info.strip() and is_paired
        if not has_text and (has_inner or re.fullmatch(r"\S+\s*", info)):
            opened.append((number, fence))
            continue
        opened.pop()
        if not opened:
            found = [*lines[first + 1 : number], fence[1]]
    if is_cut and (opened or found is None):
        return ""
    if found is None:
        found = lines[opened[0][0] + 1 :] if opened else lines
    return "\n".join(found).strip()


def drop_thoughts(reply: str) -> str:
    """The reply after the thoughts of a server without a reasoning parser; "" inside of them.

    The chat template may have opened them. Tags further down are text of the context.
    """
    thoughts, end, rest = reply.partition("</think>")
    if thoughts.lstrip().startswith("<think>"):
        return rest
    ends_line = end and not rest.partition("\n")[0].strip()
    return rest if ends_line and "<think>" not in thoughts else reply


def describe_result(prompt: Any, result: Result) -> dict[str, Any]:
    """A rollout as the proposer sees it, with the prompt that excludes the context."""
    return {
        "prompt": prompt,
        "completion": describe_completion(result.completion),
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
