"""Environments: what the rooms above need of one, how an id is found, and the one door to `verifiers`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import anyio

from rollouts.training.agent_integration import Rollout, Turn
from rollouts.training.types import Status

VERIFIERS_RANGE = ">=0.1.9.post3,<0.1.11"
PERMANENT = ("OverlongPrompt", "APITimeoutError")  # failures that another try does not cure
Row = dict[str, Any]


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


def load_environment(
    env_id: str, args: dict[str, Any] | None = None, *, search_dirs: Sequence[Path] | None = None
) -> Environment:
    """The environment called `env_id` ("reverse-text" or "org/reverse-text"), made with its `load_environment(**args)`.

    Looked up in turn: `<dir>/reverse_text` of each search dir (default: `environments` below the working directory
    and beside this library), then an installed module `reverse_text`. Raises `ValueError` that lists what was tried.
    """
    check_verifiers()
    module, where = _import_environment(env_id, search_dirs)
    build = getattr(module, "load_environment", None)
    if not callable(build):
        raise ValueError(
            f"environment {env_id!r}: {where} has no function load_environment; is it another package of that name?"
        )
    _check_args(env_id, build, args or {})
    with _signals_kept():
        try:
            env = build(**(args or {}))
        except Exception as error:
            raise ValueError(f"environment {env_id!r} did not load: {type(error).__name__}: {error}") from error
    return VerifiersEnvironment(env_id, env)


def check_verifiers() -> None:
    """Raise `ValueError` unless a `verifiers` is installed that has the classes environments are written with."""
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"verifiers is not installed: pip install 'verifiers{VERIFIERS_RANGE}'") from None
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", found)
    version = tuple(int(part or 0) for part in match.groups()) if match else ()
    if not (0, 1, 9, 3) <= version < (0, 1, 11):
        raise ValueError(f"verifiers {found} has another interface: pip install 'verifiers{VERIFIERS_RANGE}'")


class VerifiersEnvironment:
    """A `verifiers` environment behind our protocol. It runs under asyncio, as `verifiers` does."""

    def __init__(self, env_id: str, env: Any) -> None:
        self.id = env_id
        self.env = env
        env.env_id = env.env_id or env_id
        # Every failed rollout would be an ERROR line of its own; failures are counted and reported by our caller.
        env.logger.setLevel(logging.CRITICAL)
        # 0.1.9 wants a semaphore for scoring, 0.1.10 none.
        needs_semaphore = "score_sem" in inspect.signature(env.rubric.score_group).parameters
        self._score_args = {"score_sem": contextlib.AsyncExitStack()} if needs_semaphore else {}
        for rubric in _rubrics(env):
            _remember_errors(rubric)

    def rows(self, split: str = "train") -> list[Row]:
        """Rows of the environment's dataset; "eval" falls back on the training rows as `verifiers` does."""
        dataset = self.env.get_eval_dataset() if split == "eval" else self.env.get_dataset()
        return [dict(row) for row in dataset]

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`."""
        results: list[Any] = [None] * len(sampling_args)

        async def run_one(i: int) -> None:
            for attempt in range(retries + 1):
                results[i] = await self._attempt(row, client, model, sampling_args[i], attempt)
                failure = _failure(results[i])
                if failure is None or failure[0] in PERMANENT:
                    return

        async with anyio.create_task_group() as tasks:
            for i in range(len(sampling_args)):
                tasks.start_soon(run_one, i)
        states = [state for state in results if _failure(state) is None]
        scoring_error = await self._score(states)
        return [
            _to_rollout(row, result, args, scoring_error) for result, args in zip(results, sampling_args, strict=True)
        ]

    async def _attempt(self, row: Row, client: Any, model: str, args: dict[str, Any], attempt: int) -> Any:
        """One try at one rollout: its state, or the exception that a mistake in the environment raised."""
        own = {**args, "extra_body": dict(args.get("extra_body", {}))}  # verifiers renames keys in place
        if attempt and own.get("seed") is not None:
            own["seed"] += attempt
        try:
            return await self.env.rollout(dict(row), client, model, own)
        except Exception as error:
            return error

    async def _score(self, states: list[Any]) -> Exception | None:
        """Score the rollouts that did not fail; an error of the rubric fails them all."""
        if not states:
            return None
        try:
            await self.env.rubric.score_group(states, **self._score_args)
        except Exception as error:
            return error
        return None


def _import_environment(env_id: str, search_dirs: Sequence[Path] | None) -> tuple[ModuleType, str]:
    parts = re.fullmatch(r"(?:[\w.-]+/)?([A-Za-z_][\w-]*)(?:@[\w.]+)?", env_id)
    name = parts.group(1).replace("-", "_") if parts else ""
    if not name:
        raise ValueError(f"environment {env_id!r} is not a name: write it like reverse-text or org/reverse-text")
    tried = []
    for root in search_dirs if search_dirs is not None else _default_search_dirs():
        folder = Path(root).resolve() / name
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            break
        tried.append(str(folder))
    else:
        tried.append(f"an installed module {name}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"environment {env_id!r} was not found; tried {', '.join(tried)}")
    with _signals_kept():
        try:
            module = importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"environment {env_id!r} did not import: {type(error).__name__}: {error}") from error
    return module, getattr(module, "__file__", None) or f"module {name}"


def _default_search_dirs() -> list[Path]:
    return list(dict.fromkeys([Path.cwd() / "environments", Path(__file__).resolve().parents[3] / "environments"]))


def _check_args(env_id: str, build: Callable[..., Any], args: dict[str, Any]) -> None:
    """A misspelt argument is named here, before Python says it with a traceback."""
    parameters = inspect.signature(build).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(set(args) - set(parameters)):
        raise ValueError(
            f"environment {env_id!r} takes no argument {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(parameters) or 'none'}"
        )


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Put back the handlers of SIGINT and SIGTERM that constructing an environment replaces."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("load environments in the main thread: verifiers sets signal handlers in their constructor")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _rubrics(env: Any) -> list[Any]:
    """Every rubric that scores for `env`: those of a rubric group, and those of the parts of an environment group."""
    found: list[Any] = []
    queue = [env.rubric, *(part.rubric for part in getattr(env, "envs", []))]
    while queue:
        rubric = queue.pop()
        if any(rubric is known for known in found):
            continue
        found.append(rubric)
        queue += getattr(rubric, "rubrics", [])
    return found


def _remember_errors(rubric: Any) -> None:
    """Let each reward function of `rubric` note its exception in the state, which `verifiers` turns into a plain 0."""
    for i, function in enumerate(rubric.funcs):
        signature = inspect.signature(function)
        if {"states", "prompts", "completions", "answers", "tasks", "infos"} & set(signature.parameters):
            continue  # scores the whole group at once: its states are not told apart here
        rubric.funcs[i] = _with_memory(function, signature)


def _with_memory(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    takes_state = "state" in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    async def scored(**arguments: Any) -> float:
        state = arguments["state"] if takes_state else arguments.pop("state")
        try:
            value = function(**arguments)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            state.setdefault("reward_errors", []).append(f"{name}: {type(error).__name__}: {error}")
            raise

    name = scored.__name__ = getattr(function, "__name__", repr(function))
    # `verifiers` passes what the signature asks for; ours asks for the state as well.
    parameters = list(signature.parameters.values())
    if not takes_state:
        parameters.append(inspect.Parameter("state", inspect.Parameter.KEYWORD_ONLY))
    scored.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return scored


def _failure(result: Any) -> tuple[str, str] | None:
    """Type and text of what went wrong, or None for a rollout that can be scored."""
    if isinstance(result, Exception):
        return type(result).__name__, str(result) or repr(result)
    if (error := result.get("error")) is not None:
        cause = error.__cause__ or error
        return type(cause).__name__, str(cause) or repr(cause)
    if not result["trajectory"]:
        if result.get("prompt_too_long"):
            return "OverlongPrompt", "the prompt is longer than the server's context"
        return "EmptyRollout", "the environment ended the rollout before the model was asked"
    return None


def _to_rollout(row: Row, result: Any, args: dict[str, Any], scoring_error: Exception | None) -> Rollout:
    failure = _failure(result)
    if failure is None and scoring_error is not None:
        failure = type(scoring_error).__name__, f"scoring failed: {scoring_error}"
    known = Rollout(
        prompt=row["prompt"],
        answer=row.get("answer"),
        info=row.get("info"),
        task=str(row.get("task") or ""),
        example_id=int(row.get("example_id") or 0),
        temperature=float(args.get("temperature", 1.0)),
    )
    if failure is not None:
        known.status, (known.error_type, known.error) = Status.FAILED, failure
        return known
    known.completion = result["completion"]
    known.stop_reason = result.get("stop_condition")
    if result["trajectory"][-1]["response"].choices[0].finish_reason == "length":
        known.stop_reason = "length"
    known.turns = [turn for step in result["trajectory"] if (turn := _to_turn(step)) is not None]
    known.num_turns = len(result["trajectory"])
    known.reward = float(result["reward"])
    known.metrics = {name: float(value) for name, value in (result["metrics"] or {}).items()}
    if errors := result.get("reward_errors"):
        known.error_type, known.error = "RewardError", "; ".join(errors)
    known.status = Status.TRUNCATED if result["is_truncated"] else Status.COMPLETED
    known.generation_ms = result["timing"]["generation_ms"]
    known.scoring_ms = result["timing"]["scoring_ms"]
    return known


def _to_turn(step: Any) -> Turn | None:
    """The tokens of a trajectory step, taken from its record; the raw answer is not kept."""
    tokens, choice = step["tokens"], step["response"].choices[0]
    step["response"] = None
    if tokens is None:
        return None
    return Turn(
        prompt_ids=list(tokens["prompt_ids"]),
        completion_ids=list(tokens["completion_ids"]),
        logprobs=list(tokens["completion_logprobs"]),
        versions=[(int(start), int(version)) for start, version in getattr(choice, "versions", None) or []],
    )
