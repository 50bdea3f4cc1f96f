"""Tasksets and harnesses of verifiers 0.4: played in the interpreter `env.python`, with the model behind a gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from prime_rl.gateway.program import record_session
from prime_rl.gateway.server import BY_MODEL, HOST, Gateway
from prime_rl.gateway.session import Session
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import PlainEnvironment
from rollouts.training.environments.protocol import EnvironmentNotLoaded, Row
from rollouts.training.proxies import exclude_from_proxies
from rollouts.training.types import Status

CLOSE_S = 20.0  # running rollouts stop their sandboxes
SCRIPT = Path(__file__).with_name("taskset_runner.py")
INFRASTRUCTURE = ("SandboxError", "TunnelError", "InterceptionError")
"""Errors of verifiers that are not of the task or its code."""


class TasksetFailed(Exception):
    """verifiers could not run or score the rollout."""


class InfraError(Exception):
    """What verifiers uses failed, such as a sandbox; see `INFRASTRUCTURE_ERRORS`."""


class TasksetEnvironment(PlainEnvironment):
    """A taskset; its rows are tasks, its turns and rewards those of verifiers."""

    has_cleanup = True
    """Sandboxes of running rollouts are stopped when the process ends."""

    def __init__(self, process: TasksetProcess, name: str) -> None:
        start = process.start()
        super().__init__(start["rows"], verifiers_reward, eval_dataset=start["eval_rows"] or None, id=name)
        self._process = process
        self.agent = TasksetAgent(process)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def load_environment(
    taskset: dict[str, Any],
    python: str,
    harness: dict[str, Any] | None = None,
    num_examples: int | None = None,
    num_eval_examples: int = 100,
) -> TasksetEnvironment:
    """A taskset of verifiers 0.4, played by `harness`; see `EnvConfig`.

    `num_eval_examples` tasks are held out, of a small taskset those beyond `num_examples`, or half. `num_examples`
    bounds the others; unset: all, of an endless taskset 1,000. Raises `ValueError`.
    """
    settings = {"taskset": taskset, "harness": harness}
    limits = {"num_examples": num_examples, "num_eval_examples": num_eval_examples}
    return TasksetEnvironment(TasksetProcess(find_interpreter(python), {**settings, **limits}), taskset["id"])


def find_interpreter(python: str) -> Path:
    """The path of `env.python`; raises `ValueError` if it does not exist."""
    if (program := shutil.which(python)) is None:
        raise ValueError(f"env.python: there is no program {python!r}: give the path of an interpreter")
    # Not resolved: the path of an interpreter determines its virtual environment.
    return Path(program).absolute()


def verifiers_reward(state: Mapping[str, Any]) -> float:
    """The reward that verifiers gave."""
    return float(state["reward"])


class TasksetAgent:
    """Has verifiers play one rollout against a session of the gateway; an `Agent` of a `PlainEnvironment`."""

    def __init__(self, process: TasksetProcess) -> None:
        self._process = process
        self._gateway = Gateway()
        self._key = secrets.token_urlsafe(24)

    async def __call__(
        self, rollout: Rollout, row: Row, state: dict[str, Any], client: Any, model: str, args: Mapping[str, Any]
    ) -> None:
        """Play the row and record the turns; raises `TasksetFailed`, or the error of the engine."""
        session = Session(client, model, args, self._key)
        try:
            async with self._gateway.open(session) as url:
                # One address for all rollouts: verifiers keeps a client, with its certificates, for each that it sees.
                sessions, _, name = url.rpartition("/")
                request = {"base_url": f"{sessions}/{BY_MODEL}/v1", "key": self._key, "model": f"{model}@{name}"}
                result = await self._process.run({"task": row["task_number"], **request})
        finally:
            record_session(rollout, session)
        if session.error is not None:
            raise session.error
        if result["error"] is not None and not session.is_overlong:
            kind = result["error"].partition(":")[0]
            raise (InfraError if kind in INFRASTRUCTURE else TasksetFailed)(result["error"])
        state["reward"] = result.get("reward", 0.0)
        rollout.metrics = {**rollout.metrics, **result.get("metrics", {})}
        if rollout.status != Status.TRUNCATED:  # the answer is cut off, whatever ended the rollout then
            rollout.stop_reason = result.get("stop") or rollout.stop_reason


class TasksetProcess:
    """The process that runs the rollouts of a taskset, started again if it has ended."""

    def __init__(self, python: Path, settings: Mapping[str, Any]) -> None:
        self._command = [str(python), "-P", str(SCRIPT), json.dumps(settings)]
        self._path = str(python.parent)
        self._name = settings["taskset"]["id"]
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def start(self) -> dict[str, Any]:
        """Start it and wait for its rows (blocking); raises `ValueError` if it has none, `{}` if it runs already."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return {}
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=_build_environment(self._path),
                start_new_session=True,
            )
            assert process.stdout is not None
            line = process.stdout.readline()
            reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended, see above"}
            if (error := reply.get("error")) is not None:
                process.kill()
                raise EnvironmentNotLoaded(f"taskset {self._name!r} did not load in {self._command[0]}: {error}")
            threading.Thread(target=self._read_results, args=(process,), daemon=True).start()
            self._process = process
            return reply

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one rollout; raises `TasksetFailed` if the process ends before."""
        if self._process is None or self._process.poll() is not None:
            await asyncio.to_thread(self.start)
        number, result = next(self._numbers), Future[dict[str, Any]]()
        self._waiting[number] = result
        try:
            self._send({"run": number, **request})
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended already
                self._process.stdin.close()  # it cancels its rollouts, and ends
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
        except (OSError, ValueError):
            self._fail_waiting()

    def _read_results(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            waiting = self._waiting.pop(result.pop("run"), None)
            if waiting is not None and waiting.set_running_or_notify_cancel():
                waiting.set_result(result)
        process.wait()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None and waiting.set_running_or_notify_cancel():
                waiting.set_exception(TasksetFailed(f"the process of taskset {self._name!r} ended"))


def _build_environment(path: str) -> dict[str, str]:
    """The variables of this process without its import paths; the interpreter's programs come first, and no proxy
    stands before the gateway."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    changed = {"PATH": f"{path}{os.pathsep}{variables.get('PATH', '')}", **exclude_from_proxies(HOST, variables)}
    return variables | changed
