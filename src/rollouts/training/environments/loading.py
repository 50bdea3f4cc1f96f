"""Loads environments: imports the code, calls the factory and wraps the result in the `Environment` protocol."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollouts.training.environments.plain import Agent, PlainEnvironment, agent_reward
from rollouts.training.environments.protocol import Environment, EnvironmentNotLoaded, locate_error
from rollouts.training.environments.resolve import EnvSource, Parameters, check_args, check_environment, check_verifiers
from rollouts.training.environments.seats import SeatEnvironment
from rollouts.training.environments.verifiers_adapter import VerifiersEnvironment


def load_environment(
    env_id: str,
    args: dict[str, Any] | None = None,
    *,
    search_dirs: Sequence[Path] | None = None,
    timeout_s: float | None = None,
    score: bool = True,
    agent: Agent | None = None,
) -> Environment:
    """Load environment `env_id` with its factory `load_environment(**args)`; see `find_environment` for ids.

    The factory returns a `verifiers` environment, a `PlainEnvironment` or a dict of its arguments, or an object with
    the `Environment` protocol. `timeout_s` limits an attempt and its scoring; without `score` no reward function runs
    and every reward is 0. `agent` runs the turns of a plain environment; a dict without rewards then takes the reward
    that the agent reports. Raises `ValueError`.
    """
    source = check_environment(env_id, args, search_dirs=search_dirs)
    build = _import_factory(source)
    check_args(env_id, _parameters_of(build), args or {})
    with _preserve_signal_handlers():
        try:
            made = build(**(args or {}))
        except EnvironmentNotLoaded:
            raise
        except Exception as error:
            raise ValueError(f"environment {env_id!r} did not load: {locate_error(error)}") from error
    return _wrap(env_id, made, timeout_s, score, agent)


def _wrap(env_id: str, made: Any, timeout_s: float | None, score: bool, agent: Agent | None) -> Environment:
    if isinstance(made, Mapping):
        if agent is not None:
            made = {"rewards": agent_reward, **made}
        try:
            made = PlainEnvironment(**made)
        except (TypeError, ValueError) as error:
            raise ValueError(f"environment {env_id!r} did not load: {error}") from error
    if agent is not None and (isinstance(made, SeatEnvironment) or not isinstance(made, PlainEnvironment)):
        raise ValueError(
            f"environment {env_id!r} made a {type(made).__name__}, whose turns a program cannot run: return a dict "
            "with dataset and rewards, or leave out env.command"
        )
    if isinstance(made, PlainEnvironment):
        made.id, made.timeout_s, made.score, made.agent = made.id or env_id, timeout_s, score, agent or made.agent
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


def _import_factory(source: EnvSource) -> Callable[..., Any]:
    with _preserve_signal_handlers():
        try:
            module = _import_module(source)
        except Exception as error:
            raise ValueError(f"environment {source.env_id!r} did not import: {locate_error(error)}") from error
        try:
            build: Callable[..., Any] | None = getattr(module, source.factory, None)
        except Exception as error:  # a module may import its attributes when they are first used
            raise ValueError(f"environment {source.env_id!r} did not import: {locate_error(error)}") from error
    if build is None or not callable(build):
        where = getattr(module, "__file__", None) or f"module {source.module}"
        raise ValueError(
            f"environment {source.env_id!r}: {where} has no function {source.factory}; "
            "is it another package of that name?"
        )
    return build


def _import_module(source: EnvSource) -> ModuleType:
    """The environment's module, under another name if Python's import of its name would give another file."""
    if source.folder is None or source.file is None:
        return importlib.import_module(source.module)
    if str(source.folder) not in sys.path:
        sys.path.insert(0, str(source.folder))
    found = importlib.util.find_spec(source.module)
    if found is not None and found.origin is not None and Path(found.origin).resolve() == source.file.resolve():
        return importlib.import_module(source.module)
    name = f"{source.module}_{hashlib.sha256(bytes(source.file)).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source.file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _parameters_of(build: Callable[..., Any]) -> Parameters:
    parameters = inspect.signature(build).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return Parameters(tuple(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which `verifiers` replaces in constructors."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("load environments in the main thread: verifiers sets signal handlers in their constructor")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
