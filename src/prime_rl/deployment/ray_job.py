"""The driver of a run on Ray: claims the machines, starts each task's script there, and ends all when one falls.

    python -m prime_rl.deployment.ray_job <directory>/ray.json

Runs where the job was handed in to; an actor on every machine starts the processes and says when they end.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.deployment.layout import KEY_VARIABLE

POLL_S = 1.0
GRACE_S = 10.0


class RayTask(msgspec.Struct, frozen=True):
    """One command of the run, see `prime_rl.deployment.layout.Task`."""

    name: str
    script: str
    places: list[int]
    max_restarts: int = 0
    is_work: bool = False


class RayPlan(msgspec.Struct, frozen=True):
    """What `ray.json` holds."""

    address: str
    timeout: float
    bundles: list[dict[str, float]]
    """What is claimed on each machine."""

    workdir: str
    logs: str
    env: dict[str, str]
    """Variables that every process gets beside those of its machine, such as PATH."""

    tasks: list[RayTask]


class Host:
    """What runs on one machine. Lives there as an actor; also plain Python, so that it can be tried without Ray."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def address(self) -> str:
        """Where other machines reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, name: str, argv: list[str], env: Mapping[str, str], workdir: str, log: str) -> None:
        """Start a command in a session of its own; its output is added to `log`."""
        with Path(log).open("ab") as output:
            self.running[name] = subprocess.Popen(
                argv, env={**os.environ, **env}, cwd=workdir, stdout=output, stderr=output, start_new_session=True
            )

    def poll(self) -> dict[str, int]:
        """Exit codes of what has ended."""
        return {name: code for name, child in self.running.items() if (code := child.poll()) is not None}

    def stop(self) -> None:
        """End everything: asked first, then killed."""
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
            left = [child for child in self.running.values() if child.poll() is None]
            for child in left:
                os.killpg(child.pid, number)
            deadline = time.monotonic() + grace_s
            while any(child.poll() is None for child in left) and time.monotonic() < deadline:
                time.sleep(0.1)


def run(plan: RayPlan) -> int:
    """Run the plan to its end; returns the exit code. Raises `ValueError` when the machines are not to be had."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=plan.address, log_to_driver=False, ignore_reinit_error=True)
    group = placement_group(plan.bundles, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=plan.timeout)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        raise ValueError(
            f"Ray has no {len(plan.bundles)} machines with {plan.bundles[0]} free, in {plan.timeout:g} s: `ray status`"
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
        return supervise(plan, hosts, ray.get)
    finally:
        try:
            ray.get([host.stop.remote() for host in hosts], timeout=2 * GRACE_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            _say(f"a machine is gone: {error}")
        remove_placement_group(group)


def supervise(plan: RayPlan, hosts: list[Any], get: Any) -> int:
    """Start all tasks; return 0 when the work has ended well, 1 when a task has fallen more often than it may."""
    addresses = get([host.address.remote() for host in hosts])
    shared = {f"HOST_{place}": address for place, address in enumerate(addresses)}
    shared |= {KEY_VARIABLE: secrets.token_hex(16), **plan.env}
    tasks = {task.name: task for task in plan.tasks}

    def start(task: RayTask, rank: int) -> None:
        place = task.places[rank]
        env, log = {**shared, "NODE_RANK": str(rank)}, f"{plan.logs}/{task.name}-{rank}.log"
        _say(f"{task.name} starts on {addresses[place]}")
        get(hosts[place].start.remote(task.name, ["bash", task.script], env, plan.workdir, log))

    for task in plan.tasks:
        for rank in range(len(task.places)):
            start(task, rank)
    falls, done = dict.fromkeys(tasks, 0), set[tuple[str, int]]()
    wanted = {(task.name, place) for task in plan.tasks if task.is_work for place in task.places}
    while not wanted <= done:
        time.sleep(POLL_S)
        for place, ended in enumerate(get([host.poll.remote() for host in hosts])):
            for name, code in ended.items():
                if (name, place) in done:
                    continue
                task = tasks[name]
                if code == 0 and task.is_work:
                    done.add((name, place))
                    continue
                falls[name] += 1
                rank = task.places.index(place)
                _say(f"{name} ended with code {code}: see {plan.logs}/{name}-{rank}.log")
                if falls[name] > task.max_restarts:
                    return 1
                start(task, rank)
    _say("the run is through")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%T')} {text}\n")
    sys.stdout.flush()


def read_plan(path: Path) -> RayPlan:
    """The plan in a file; `ValueError` says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RayPlan)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def render_plan(plan: RayPlan) -> str:
    """The plan as text to read and edit."""
    return json.dumps(msgspec.to_builtins(plan), indent=2) + "\n"


def main() -> None:
    """Entry point of the driver."""
    try:
        raise SystemExit(run(read_plan(Path(sys.argv[1]))))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
