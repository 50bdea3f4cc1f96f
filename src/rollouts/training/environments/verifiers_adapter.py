"""Adapter from `verifiers` environments to the `Environment` protocol."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.completion import ChatCompletion, plain_completion
from rollouts.training.environments.plain import add_reasoning, build_turn
from rollouts.training.environments.protocol import (
    RewardError,
    Row,
    add_usage,
    check_reward,
    fail_rollout,
    locate_error,
    number_row,
    open_conversation,
    open_rollout,
    read_feedback,
    run_attempts,
    run_with_timeout,
)
from rollouts.training.types import Status, settle

MAX_TURNS_REACHED = "max_turns_reached"
GROUP_PARAMETERS = {"states", "prompts", "completions", "answers", "tasks", "infos"}
"""A reward function with one of these parameters scores a whole group, as in `verifiers`."""
CLEANUP_S = 20.0
"""Time limit of the cleanup of a cancelled rollout; the limit of a group in `worker_pool` includes it."""


class VerifiersEnvironment:
    """A `verifiers` environment with the `Environment` protocol. Runs under asyncio."""

    def __init__(self, env_id: str, env: Any, *, timeout_s: float | None = None, score: bool = True) -> None:
        self.id = env_id
        self.timeout_s = timeout_s
        self.score = score
        self.env = env
        env.env_id = env.env_id or env_id
        # verifiers logs every failed rollout as ERROR; the caller counts and reports failures instead.
        env.logger.setLevel(logging.CRITICAL)
        # verifiers 0.1.9 requires a semaphore for scoring, 0.1.10 does not.
        needs_semaphore = "score_sem" in inspect.signature(env.rubric.score_group).parameters
        self._score_args = {"score_sem": contextlib.AsyncExitStack()} if needs_semaphore else {}
        for rubric in _rubrics(env):
            _record_errors(rubric)
        self._parts = [env, *getattr(env, "envs", [])]
        if unused := sorted({name for part in self._parts for name in _unused_sampling_args(part)}):
            logging.getLogger(__name__).warning(
                "%s: its sampling_args have no effect (%s): set them in the sampling section of the configuration",
                env_id,
                ", ".join(unused),
            )

    @property
    def prompts_are_messages(self) -> bool:
        """Whether a rollout needs a chat template; others set `message_type = "completion"`."""
        return all(getattr(part, "message_type", "chat") == "chat" for part in self._parts)

    @property
    def scores_groups(self) -> bool:
        """Whether rollouts of a group are compared, so that their rewards hold for all together.

        Reward functions do so, and subclasses of `Rubric` may.
        """
        rubrics = _rubrics(self.env)
        functions = [function for rubric in rubrics for function in rubric.funcs]
        return any(map(_is_of_group, functions)) or not all(map(_scores_as_verifiers, rubrics))

    @property
    def has_cleanup(self) -> bool:
        """Whether functions marked `@vf.cleanup` or `@vf.teardown` free resources."""
        return any(part._cleanup_handlers or part._teardown_handlers for part in self._parts)

    def rows(self, split: str = "train") -> list[Row]:
        """Rows of the environment's dataset; "eval" falls back to the training rows as in `verifiers`."""
        dataset = self.env.get_eval_dataset() if split == "eval" else self.env.get_dataset()
        return [number_row(row, i) for i, row in enumerate(dataset)]

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`."""
        stop = self._read_stop(row)

        async def attempt(args: dict[str, Any]) -> tuple[Any, int]:
            own_client = open_conversation(client)
            result = await run_with_timeout(
                self.timeout_s,
                "the rollout",
                lambda: _run_with_cleanup(self.env.rollout(dict(row), own_client, model, stop | args)),
            )
            return result, getattr(own_client, "num_sampled", 0)

        attempts = await run_attempts(sampling_args, retries, attempt, lambda one: _failure(one[0]))
        results = [tries[-1][0] for tries in attempts]
        states = [state for state in results if _failure(state) is None]
        scoring_error = await self._score(states) if self.score else None
        for state in states:
            state["stop_condition"] = await self._find_stop_reason(state)
        rollouts = [
            _to_rollout(row, result, args, scoring_error) for result, args in zip(results, sampling_args, strict=True)
        ]
        for rollout, tries in zip(rollouts, attempts, strict=True):
            rollout.num_sampled = sum(num_sampled for _, num_sampled in tries)
        return rollouts

    def _find_parts(self, task: Any) -> list[Any]:
        """The environment and, if it is a group, the part for this task."""
        parts = [self.env]
        while (part := getattr(parts[-1], "env_map", {}).get(task)) is not None:
            parts.append(part)
        return parts

    def _read_stop(self, row: Row) -> dict[str, Any]:
        """The argument `stop` of the environment, or of its part for this row; {} without one."""
        found = [part.sampling_args.get("stop") for part in self._find_parts(row.get("task"))]
        return next(({"stop": stop} for stop in found if stop), {})

    async def _find_stop_reason(self, state: Any) -> str | None:
        """The name of the stop condition of a rollout, or the last finish reason ("length", "stop").

        `verifiers` checks conditions in alphabetical order, and `max_turns_reached` is always true at the end of
        single-turn rollouts. It is returned only if no other condition is true.
        """
        found: str | None = state.get("stop_condition")
        finish: str | None = state["trajectory"][-1]["response"].choices[0].finish_reason
        if finish == "length" or found != MAX_TURNS_REACHED:
            return "length" if finish == "length" else found
        env = self._find_parts(state.get("task"))[-1]
        for condition in getattr(env, "_stop_conditions", []):
            name = condition.__name__
            if name != found and await run_with_timeout(self.timeout_s, name, partial(condition, state)) is True:
                return str(name)
        return finish or found if getattr(env, "max_turns", None) == 1 else found

    async def _score(self, states: list[Any]) -> Exception | None:
        """Score the rollouts that did not fail; an error of the rubric fails all of them.

        Completions are converted to `ChatCompletion` for the reward functions.
        """
        if not states:
            return None
        score = self.env.rubric.score_group
        for state in states:
            if isinstance(state["completion"], list):
                state["completion"] = ChatCompletion(state["completion"])
        outcome = await run_with_timeout(self.timeout_s, "scoring", lambda: score(states, **self._score_args))
        return outcome if isinstance(outcome, Exception) else None


async def _run_with_cleanup(work: Awaitable[Any]) -> Any:
    """Run `work` in a task that is cancelled once, and wait for its cleanup.

    A timeout of anyio cancels each `await` of the task that it is in, also those of the cleanup.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task], timeout=CLEANUP_S)
    return task.result()


def _unused_sampling_args(env: Any) -> list[str]:
    """Names of the sampling arguments in the code of `env`, but for `stop`: a run must know how tokens are drawn."""
    return [name for name, value in env.sampling_args.items() if name not in ("stop", "n") and value not in (None, {})]


def _rubrics(env: Any) -> list[Any]:
    """All rubrics of `env`, including those of rubric groups and environment groups."""
    found: list[Any] = []
    queue = [env.rubric, *(part.rubric for part in getattr(env, "envs", []))]
    while queue:
        rubric = queue.pop()
        if any(rubric is known for known in found):
            continue
        found.append(rubric)
        queue += getattr(rubric, "rubrics", [])
    return found


def _record_errors(rubric: Any) -> None:
    """Make the reward functions of `rubric` record exceptions in the states; `verifiers` turns them into reward 0."""
    rubric.funcs[:] = [_with_error_record(function, inspect.signature(function)) for function in rubric.funcs]


def _with_error_record(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    is_group = _is_of_group(function)
    key = "states" if is_group else "state"
    takes_key = key in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    async def scored(**arguments: Any) -> float | list[float]:
        subject = arguments[key] if takes_key else arguments.pop(key)
        try:
            value = await settle(function(**arguments))
            return _check_rewards(name, value, len(subject)) if is_group else check_reward(name, value)
        except Exception as error:
            text = str(error) if isinstance(error, RewardError) else f"{name}: {locate_error(error)}"
            for state in subject if is_group else [subject]:
                state.setdefault("reward_errors", []).append(text)
            raise

    name = scored.__name__ = getattr(function, "__name__", repr(function))
    # `verifiers` passes the arguments in the signature; add the states to it.
    parameters = list(signature.parameters.values())
    if not takes_key:
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY))
    scored.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return scored


def _is_of_group(function: Callable[..., Any]) -> bool:
    return not GROUP_PARAMETERS.isdisjoint(inspect.signature(function).parameters)


def _scores_as_verifiers(rubric: Any) -> bool:
    """Whether `score_group` is that of `verifiers`, which only sums up the reward functions."""
    return str(rubric.score_group.__module__).partition(".")[0] == "verifiers"


def _check_rewards(name: str, values: Any, num_states: int) -> list[float]:
    """The rewards of a group function; `RewardError` unless they are one finite number for each rollout."""
    if not hasattr(values, "__len__") or len(values) != num_states:
        raise RewardError(
            f"{name} returned {repr(values)[:40]}: return a list of {num_states} numbers, one per rollout"
        )
    return [check_reward(name, value) for value in values]


def _failure(result: Any) -> tuple[str, str] | None:
    """Type and text of a failure, or None for a rollout that can be scored."""
    if isinstance(result, Exception):
        return type(result).__name__, str(result) or repr(result)
    if (error := result.get("error")) is not None:
        cause = error.__cause__ or error
        kind, text = type(cause).__name__, str(cause) or repr(cause)
        return ("InfraError", f"{kind}: {text}") if _is_of_infrastructure(error) else (kind, text)
    if not result["trajectory"]:
        if result.get("prompt_too_long"):
            return "OverlongPrompt", "the prompt is longer than the server's context"
        return "EmptyRollout", "the environment ended the rollout before the first model call"
    return None


def _is_of_infrastructure(error: BaseException | None) -> bool:
    """Whether an error is an `InfraError` of verifiers, as that of a sandbox, or was caused by one."""
    while error is not None and not any(kind.__name__ == "InfraError" for kind in type(error).__mro__):
        error = error.__cause__
    return error is not None


def _to_rollout(row: Row, result: Any, args: dict[str, Any], scoring_error: Exception | None) -> Rollout:
    failure = _failure(result)
    if failure is None and scoring_error is not None:
        failure = type(scoring_error).__name__, f"scoring failed: {scoring_error}"
    if failure is not None:
        return fail_rollout(row, args, *failure)
    known = open_rollout(row, args)
    known.prompt = result.get("prompt") or row["prompt"]  # `setup_state` may have replaced it
    known.completion = _with_reasoning(plain_completion(result["completion"]), result["trajectory"])
    known.stop_reason = result.get("stop_condition")
    for step in result["trajectory"]:
        known.completion_tokens = add_usage(known.completion_tokens, step["response"])
    known.tools, known.feedback = _offered_tools(result), read_feedback(result)
    known.turns = [turn for step in result["trajectory"] if (turn := _to_turn(step)) is not None]
    known.num_turns = len(result["trajectory"])
    known.reward = float(result["reward"] or 0.0)
    known.metrics = {name: float(value) for name, value in (result["metrics"] or {}).items()}
    if errors := result.get("reward_errors"):
        known.error_type, known.error = "RewardError", "; ".join(errors)
    known.status = Status.TRUNCATED if result["is_truncated"] else Status.COMPLETED
    known.generation_ms = result["timing"]["generation_ms"]
    known.scoring_ms = result["timing"]["scoring_ms"]
    return known


def _with_reasoning(completion: Any, trajectory: Sequence[Any]) -> Any:
    """A completion whose messages from the model have its reasoning, which `verifiers` leaves out."""
    if not isinstance(completion, list):
        return completion
    messages, steps = list(completion), list(trajectory)
    for i in reversed(range(len(messages))):  # histories that the environment shortens keep the last steps
        number = next((n for n in reversed(range(len(steps))) if messages[i] in steps[n]["completion"]), None)
        if number is not None:
            messages[i] = add_reasoning(messages[i], steps[number]["response"].choices[0].message)
            steps = steps[:number]
    return messages


def _offered_tools(result: Any) -> list[dict[str, Any]] | None:
    """The tools of a rollout as plain data; `verifiers` stores them in the state, or in the row's info."""
    info = result.get("info")
    tools = result.get("oai_tools") or (info.get("oai_tools") if isinstance(info, Mapping) else None)
    return [dict(tool) for tool in tools] if tools else None


def _to_turn(step: Any) -> Turn | None:
    """The tokens of a trajectory step; removes the raw response from the step to free memory."""
    tokens, choice = step["tokens"], step["response"].choices[0]
    step["response"] = None
    if tokens is None:
        return None
    return build_turn(choice, tokens["prompt_ids"], tokens["completion_ids"], tokens["completion_logprobs"])
