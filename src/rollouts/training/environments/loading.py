"""From an environment's id to one that runs: import its code, call its factory, put it behind our protocol."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.training.environments.finding import Parameters, Place, check_args, check_environment
from rollouts.training.environments.light_verifiers import light_verifiers
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.environments.protocol import Environment
from rollouts.training.environments.verifiers_door import VerifiersEnvironment, check_verifiers


def load_environment(
    env_id: str,
    args: dict[str, Any] | None = None,
    *,
    search_dirs: Sequence[Path] | None = None,
    timeout_s: float | None = None,
    score: bool = True,
) -> Environment:
    """The environment called `env_id`, made with its `load_environment(**args)`; see `find_environment` for ids.

    What it makes may be a `verifiers` environment, a `PlainEnvironment` or a dict of its arguments, or an object of
    the `Environment` protocol. An attempt, and its scoring, may take `timeout_s`; without `score` every reward is 0
    and no reward function runs. Raises `ValueError` in one sentence.
    """
    place = check_environment(env_id, args, search_dirs=search_dirs)
    build = _import_factory(place)
    check_args(env_id, _parameters_of(build), args or {})
    with light_verifiers(), _signals_kept():
        try:
            made = build(**(args or {}))
        except Exception as error:
            raise ValueError(f"environment {env_id!r} did not load: {type(error).__name__}: {error}") from error
    return _behind_protocol(env_id, made, timeout_s, score)


def _behind_protocol(env_id: str, made: Any, timeout_s: float | None, score: bool) -> Environment:
    if isinstance(made, Mapping):
        try:
            made = PlainEnvironment(**made)
        except (TypeError, ValueError) as error:
            raise ValueError(f"environment {env_id!r} did not load: {error}") from error
    if isinstance(made, PlainEnvironment):
        made.id, made.timeout_s, made.score = made.id or env_id, timeout_s, score
        return made
    if all(hasattr(made, name) for name in ("rollout", "rubric", "get_dataset")):
        check_verifiers()
        return VerifiersEnvironment(env_id, made, timeout_s=timeout_s, score=score)
    if all(callable(getattr(made, name, None)) for name in ("rows", "run_group")):
        environment: Environment = made
        environment.id = getattr(made, "id", None) or env_id
        return environment
    raise ValueError(
        f"environment {env_id!r} made a {type(made).__name__}: return a verifiers environment, a PlainEnvironment, "
        "or a dict with dataset and rewards"
    )


def _import_factory(place: Place) -> Callable[..., Any]:
    if place.folder is not None and str(place.folder) not in sys.path:
        sys.path.insert(0, str(place.folder))
    with light_verifiers(), _signals_kept():
        try:
            module = importlib.import_module(place.module)
        except Exception as error:
            raise ValueError(f"environment {place.env_id!r} did not import: {type(error).__name__}: {error}") from error
    build = getattr(module, place.factory, None)
    if not callable(build):
        where = getattr(module, "__file__", None) or f"module {place.module}"
        raise ValueError(
            f"environment {place.env_id!r}: {where} has no function {place.factory}; "
            "is it another package of that name?"
        )
    return build


def _parameters_of(build: Callable[..., Any]) -> Parameters:
    parameters = inspect.signature(build).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return Parameters(tuple(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))


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
