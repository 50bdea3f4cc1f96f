"""The `Environment` protocol, and rollout attempts with retries and timeouts."""

from __future__ import annotations

import asyncio
import math
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import anyio

from rollouts.training.agent_integration import Rollout
from rollouts.training.types import Status

Row = dict[str, Any]
# Failures that are not retried: permanent ones and timeouts.
PERMANENT = ("OverlongPrompt", "APITimeoutError", "RolloutTimeout")
# Failures of servers or, as `InfraError`, of what an environment uses, such as sandboxes; not of a prompt or of what
# the model wrote. A rollout also times out while it waits for a server that is restarted or has too many requests.
INFRASTRUCTURE_ERRORS = frozenset(
    "APIConnectionError APITimeoutError InternalServerError RateLimitError ModelError InfraError RolloutTimeout".split()
)
OVERLONG_PHRASES = (
    "maximum context length is",
    "longer than the model's context length",
    "exceeds the model's context length",
)
STDLIB = sysconfig.get_path("stdlib")
OWN_CODE = str(Path(__file__).parent)
_timeout: ContextVar[anyio.CancelScope | None] = ContextVar("timeout", default=None)


class Environment(Protocol):
    """Prompts, and running and scoring rollouts of them; for example a `verifiers` environment."""

    id: str

    def rows(self, split: str = "train") -> list[Row]:
        """Rows of "train" or "eval", to be passed to `run_group`; may be empty."""

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """One rollout per entry of `sampling_args`, in that order, scored as a group.

        Failed rollouts are retried up to `retries` times with another seed. Failures are reported in `status` and
        `error` and excluded from scoring; never raises.
        """


def require_row_prompts(environment: Environment, use: str) -> None:
    """`ValueError` for an environment whose games write the prompts, so that those of the rows are never sent."""
    if getattr(environment, "builds_prompts", False):
        raise ValueError(f"environment {environment.id!r} writes the prompt of every move itself: {use}")


class EnvironmentNotLoaded(ValueError):
    """A factory could not make its environment, for a reason that its text explains."""


class RolloutTimeout(Exception):
    """An attempt or its scoring exceeded the timeout."""


def number_row(row: Mapping[str, Any], number: int) -> Row:
    """The row with an integer `example_id`: its own, else `number`; its own is then `src_id`, as in verifiers."""
    given = row.get("example_id")
    if isinstance(given, Integral):
        return dict(row)
    kept = {} if given is None else {"src_id": given}
    return {"example_id": number, **row, **kept} | {"example_id": number}


def open_rollout(row: Row, args: Mapping[str, Any]) -> Rollout:
    """A rollout of a row with these sampling arguments, before its first turn; an `example_id` but an integer is 0."""
    example_id = row.get("example_id")
    return Rollout(
        prompt=row["prompt"],
        answer=row.get("answer"),
        info=row.get("info"),
        task=str(row.get("task") or ""),
        example_id=int(example_id) if isinstance(example_id, Integral) else 0,
        temperature=float(args.get("temperature", 1.0)),
    )


def fail_rollout(row: Row, args: Mapping[str, Any], error_type: str, error: str) -> Rollout:
    """A failed rollout of a row with these sampling arguments."""
    failed = open_rollout(row, args)
    failed.status, failed.error_type, failed.error = Status.FAILED, error_type, error
    return failed


async def run_with_timeout(timeout_s: float | None, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """Run `work` and return its value, or its exception or a `RolloutTimeout`. `timeout_s` None: no limit."""
    try:
        if timeout_s is None:
            return await work()
        with anyio.move_on_after(timeout_s) as scope:
            token = _timeout.set(scope)
            try:
                return await work()
            finally:
                _timeout.reset(token)
        return RolloutTimeout(f"{what} took longer than {timeout_s:g} s")
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return RuntimeError(f"{what} awaited a task that the environment, or a library of it, had cancelled")
    except Exception as error:
        return error


@contextmanager
def pause_timeout() -> Iterator[None]:
    """Exclude the time inside from the timeout of `run_with_timeout`."""
    if (scope := _timeout.get()) is None:
        yield
        return
    left, scope.deadline = scope.deadline - anyio.current_time(), math.inf
    try:
        yield
    finally:
        scope.deadline = anyio.current_time() + left


async def run_attempts(
    sampling_args: Sequence[dict[str, Any]],
    retries: int,
    attempt: Callable[[dict[str, Any]], Awaitable[Any]],
    failure: Callable[[Any], tuple[str, str] | None],
) -> list[list[Any]]:
    """Run `attempt(args)` for all entries concurrently; failures are retried with seed + 1.

    Returns all attempts of each entry, of which the last one counts.
    """
    outcomes: list[list[Any]] = [[] for _ in sampling_args]

    async def run_one(i: int) -> None:
        for number in range(retries + 1):
            # `verifiers` renames keys in place, so every try gets a copy of the arguments.
            args = {**sampling_args[i], "extra_body": dict(sampling_args[i].get("extra_body", {}))}
            if number and args.get("seed") is not None:
                args["seed"] += number
            outcomes[i].append(await attempt(args))
            reason = failure(outcomes[i][-1])
            if reason is None or reason[0] in PERMANENT:
                return

    if len(sampling_args) == 1:
        await run_one(0)
        return outcomes
    # asyncio's task group is five times as fast as anyio's; environments run under asyncio anyway.
    async with asyncio.TaskGroup() as tasks:
        for i in range(len(sampling_args)):
            tasks.create_task(run_one(i))
    return outcomes


def describe_failure(error: BaseException) -> tuple[str, str]:
    """Type and text of an exception; `OverlongPrompt` if the server rejected the prompt as too long."""
    text = getattr(getattr(error, "response", None), "text", "")
    if isinstance(text, str) and any(phrase in text.lower() for phrase in OVERLONG_PHRASES):
        return "OverlongPrompt", "the prompt is longer than the server's context"
    return type(error).__name__, str(error) or repr(error)


def locate_error(error: BaseException) -> str:
    """`type: text (file:line)` of an exception in an environment's code: the deepest line outside of libraries."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [(file, line) for file, line in frames if not file.startswith(("<frozen", OWN_CODE))]
    own = [(file, line) for file, line in frames if not file.startswith(STDLIB) and "site-packages" not in file]
    place = "".join(f" ({file}:{line})" for file, line in (own or frames)[-1:])
    return f"{type(error).__name__}: {error}{place}"


class RewardError(Exception):
    """A reward function raised, or returned something else than a number."""


def check_reward(name: str, value: Any) -> float:
    """The reward as a float; `RewardError` unless it is a finite number."""
    try:
        number = None if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not math.isfinite(number):
        raise RewardError(f"{name} returned {repr(value)[:40]}: return a finite number, such as 0.0 or 1.0")
    return number


def read_feedback(state: Mapping[str, Any]) -> str | None:
    """`state["feedback"]` as text; None without it."""
    value = state.get("feedback")
    return None if value in (None, "") else str(value)


def add_usage(so_far: int | None, answer: Any) -> int | None:
    """Add the server's completion token count of a response to that of a rollout."""
    used = getattr(getattr(answer, "usage", None), "completion_tokens", None)
    return so_far if used is None else (so_far or 0) + used


def open_conversation(client: Any) -> Any:
    """The client's per-rollout session, if supported: it keeps sampled tokens across turns."""
    opener = getattr(client, "open_conversation", None)
    return client if opener is None else opener()
