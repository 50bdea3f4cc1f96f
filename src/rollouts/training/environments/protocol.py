"""What the rooms above need of an environment, and how attempts are run: tried again, timed, never raising."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import anyio

from rollouts.training.agent_integration import Rollout

Row = dict[str, Any]
# Failures that another try does not cure, or that have cost too much time already.
PERMANENT = ("OverlongPrompt", "APITimeoutError", "RolloutTimeout")
OVERLONG_PHRASES = (
    "maximum context length is",
    "longer than the model's context length",
    "exceeds the model's context length",
)


class Environment(Protocol):
    """Prompts, and how an attempt at one is run and scored. `verifiers` is one implementation of it."""

    id: str

    def rows(self, split: str = "train") -> list[Row]:
        """The prompts of "train" or "eval", as rows that `run_group` takes back; empty when there are none."""

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """One rollout per entry of `sampling_args`, in that order, scored together.

        A rollout that fails is tried `retries` more times with another seed, then says so in its `status` and
        `error`; it is in nobody's statistics and never raises.
        """


class RolloutTimeout(Exception):
    """An attempt, or its scoring, took longer than it may."""


async def within(timeout_s: float | None, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """The outcome of `work`: its value, or the exception it raised or ran out of time with; None: no limit."""
    try:
        if timeout_s is None:
            return await work()
        with anyio.move_on_after(timeout_s):
            return await work()
        return RolloutTimeout(f"{what} took longer than {timeout_s:g} s")
    except Exception as error:
        return error


async def run_attempts(
    sampling_args: Sequence[dict[str, Any]],
    retries: int,
    attempt: Callable[[dict[str, Any]], Awaitable[Any]],
    failure: Callable[[Any], tuple[str, str] | None],
) -> list[Any]:
    """The outcome of `attempt(args)` for each entry, all at the same time; failures are tried again, seed + 1 each."""
    outcomes: list[Any] = [None] * len(sampling_args)

    async def run_one(i: int) -> None:
        for number in range(retries + 1):
            # `verifiers` renames keys in place, so every try gets arguments of its own.
            args = {**sampling_args[i], "extra_body": dict(sampling_args[i].get("extra_body", {}))}
            if number and args.get("seed") is not None:
                args["seed"] += number
            outcomes[i] = await attempt(args)
            reason = failure(outcomes[i])
            if reason is None or reason[0] in PERMANENT:
                return

    if len(sampling_args) == 1:
        await run_one(0)
        return outcomes
    # Not anyio's task group, which costs five times as much: environments and their client run under asyncio anyway.
    async with asyncio.TaskGroup() as tasks:
        for i in range(len(sampling_args)):
            tasks.create_task(run_one(i))
    return outcomes


def name_failure(error: BaseException) -> tuple[str, str]:
    """Type and text of an exception; a prompt that the server finds too long is an `OverlongPrompt`."""
    said = getattr(getattr(error, "response", None), "text", "")
    if isinstance(said, str) and any(phrase in said.lower() for phrase in OVERLONG_PHRASES):
        return "OverlongPrompt", "the prompt is longer than the server's context"
    return type(error).__name__, str(error) or repr(error)


def add_usage(so_far: int | None, answer: Any) -> int | None:
    """Completion tokens of a rollout with those of one more answer, as its server counts them."""
    used = getattr(getattr(answer, "usage", None), "completion_tokens", None)
    return so_far if used is None else (so_far or 0) + used


def open_conversation(client: Any) -> Any:
    """The client's view for one rollout, where it has one: it keeps what was sampled as tokens over the turns."""
    opener = getattr(client, "open_conversation", None)
    return client if opener is None else opener()
