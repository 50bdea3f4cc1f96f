"""Ray driver of a run: reserves the nodes, starts each task's script there, and stops all tasks if one fails.

    python -m prime_rl.deployment.ray_job <directory>/ray.json

Runs on the node that the job was submitted to; an actor on every node starts the processes and reports their exit.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.deployment.layout import KEY_VARIABLE
from prime_rl.runtime.process import WRONG_INPUT
from prime_rl.runtime.redacted_output import (
    LOG_PIPE_VARIABLE,
    copy_redacted,
    describe_log_pipe,
    protect_output,
)

POLL_S = 1.0
GRACE_S = 10.0


class RayTask(msgspec.Struct, frozen=True):
    """One command of the run, see `prime_rl.deployment.layout.Task`."""

    name: str
    script: str
    places: list[int]
    max_restarts: int = 0
    is_work: bool = False
    is_optional: bool = False


class RayPlan(msgspec.Struct, frozen=True):
    """Contents of `ray.json`."""

    address: str
    timeout: float
    bundles: list[dict[str, float]]
    """Resources reserved on each node."""

    workdir: str
    logs: str
    env: dict[str, str]
    """Variables added to the environment of every process, such as PATH."""

    tasks: list[RayTask]


class Host:
    """Processes of one node. Runs as an actor; plain Python, so that it can be tested without Ray."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.outputs: list[threading.Thread] = []

    def address(self) -> str:
        """Address of this node for other nodes."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, name: str, argv: list[str], env: Mapping[str, str], workdir: str, log: str) -> None:
        """Start a command in a new session; append its redacted output to `log`."""
        source, sink = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        variables = {**os.environ, **env, LOG_PIPE_VARIABLE: describe_log_pipe(sink, Path(log))}
        try:
            self.running[name] = subprocess.Popen(
                argv, env=variables, cwd=workdir, stdout=sink, stderr=sink, start_new_session=True
            )
        finally:
            os.close(sink)
            self.outputs.append(copy_redacted(source, output))

    def poll(self) -> dict[str, int]:
        """Exit codes of ended processes."""
        return {name: code for name, child in self.running.items() if (code := child.poll()) is not None}

    def stop(self) -> None:
        """Stop all processes: SIGTERM, then SIGKILL."""
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
            alive = [child for child in self.running.values() if child.poll() is None]
            for child in alive:
                os.killpg(child.pid, number)
            deadline = time.monotonic() + grace_s
            while any(child.poll() is None for child in alive) and time.monotonic() < deadline:
                time.sleep(0.1)
        for output in self.outputs:
            output.join(1.0)


def run(plan: RayPlan) -> int:
    """Run the plan; returns the exit code. Raises `TimeoutError` if the nodes are not available."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=plan.address, log_to_driver=False, ignore_reinit_error=True)
    group = placement_group(plan.bundles, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=plan.timeout)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise TimeoutError(
            f"Ray found no {len(plan.bundles)} nodes with {plan.bundles[0]} free in {plan.timeout:g} s: `ray status`"
        ) from None
    hosts: list[Any] = [
        ray.remote(Host)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
        )
        .remote()
        for place, bundle in enumerate(plan.bundles)
    ]
    try:
        return supervise(plan, hosts, ray.get, ray.exceptions.RayActorError)
    finally:
        stops = [host.stop.remote() for host in hosts]
        ray.wait(stops, num_returns=len(stops), timeout=2 * GRACE_S)  # `get` ends with that of a lost node
        remove_placement_group(group)


def supervise(plan: RayPlan, hosts: list[Any], get: Any, lost: type[Exception]) -> int:
    """Start all tasks; return 0 when all work succeeded, 1 when a task that is not optional exceeded its restarts.

    A task that rejected its input is not restarted.
    `get` raises `lost` for a host whose node is lost, and with it all of its tasks.
    """
    addresses = get([host.address.remote() for host in hosts])
    shared = {f"HOST_{place}": address for place, address in enumerate(addresses)}
    shared |= {KEY_VARIABLE: secrets.token_hex(16), **plan.env}
    tasks = {task.name: task for task in plan.tasks}

    def start(task: RayTask, rank: int) -> None:
        place = task.places[rank]
        env, log = {**shared, "NODE_RANK": str(rank)}, f"{plan.logs}/{task.name}-{rank}.log"
        _log(f"Starting {task.name} on {addresses[place]}")
        get(hosts[place].start.remote(task.name, ["bash", task.script], env, plan.workdir, log))

    for task in plan.tasks:
        for rank in range(len(task.places)):
            start(task, rank)
    num_failures, done = dict.fromkeys(tasks, 0), set[tuple[str, int]]()
    work = {(task.name, place) for task in plan.tasks if task.is_work for place in task.places}
    while not work <= done:
        time.sleep(POLL_S)
        for place, reply in enumerate([host.poll.remote() for host in hosts]):
            try:
                ended = get(reply)
            except lost:
                ended = {task.name: None for task in plan.tasks if place in task.places}
            for name, code in ended.items():
                if (name, place) in done:
                    continue
                task = tasks[name]
                if code == 0 and task.is_work:
                    done.add((name, place))
                    continue
                num_failures[name] += 1
                rank = task.places.index(place)
                end = "is on a lost node" if code is None else f"exited with code {code}"
                _log(f"{name} {end}: see {plan.logs}/{name}-{rank}.log")
                if code not in (None, WRONG_INPUT) and num_failures[name] <= task.max_restarts:
                    with suppress(lost):  # the next poll reports it
                        start(task, rank)
                elif task.is_optional:
                    done.add((name, place))
                else:
                    return 1
    _log("Run finished")
    return 0


def _log(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%T')} {text}\n")
    sys.stdout.flush()


def read_plan(path: Path) -> RayPlan:
    """Load the plan from a file; `ValueError` if it is invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RayPlan)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def render_plan(plan: RayPlan) -> str:
    """The plan as indented JSON."""
    return json.dumps(msgspec.to_builtins(plan), indent=2) + "\n"


def main() -> None:
    """Entry point of the driver."""
    protect_output()
    try:
        raise SystemExit(run(read_plan(Path(sys.argv[1]))))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    except TimeoutError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
