"""Does the orchestrator's work per rollout stay what it is when the fleet grows? 1,000 engines, 64 ranks, virtual time.

    python benchmarks/bench_fleet.py [--engines 10 100 1000] [--steps 3] [--output-dir DIR]

Real are the loop, prompt buffer, slots, group generator, advantages, metrics, message encoding, relay, watching of the
servers and packing of a batch for one of 64 ranks. Simulated are engines, trainer, disk notifications and the clock;
one in a hundred engines, at least one, leaves and comes back. The batch grows with the fleet: four rollouts in a group
per engine and step. Work is counted in executed lines of our own code, by component from one in a hundred up; CPU time,
which C code shows up in too, is taken in runs without counting. The watch over servers is counted per engine and second
instead. Prints each beside its threshold, writes `.bench/results/fleet.json`, exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit")]
import anyio  # noqa: E402
import msgspec  # noqa: E402
from loguru import logger  # noqa: E402
from results import Row, describe_machine, finish  # noqa: E402
from virtual_time import VirtualLoop  # noqa: E402

from prime_rl.orchestrator import weight_relay  # noqa: E402
from prime_rl.orchestrator.config import OrchestratorConfig  # noqa: E402
from prime_rl.orchestrator.orchestrator import run_steps  # noqa: E402
from prime_rl.orchestrator.server_monitor import ServerMonitor  # noqa: E402
from prime_rl.orchestrator.servers import prepare_engines  # noqa: E402
from prime_rl.orchestrator.setup import assemble, running  # noqa: E402
from prime_rl.runtime.garbage_collection import relaxed_gc  # noqa: E402
from prime_rl.transport.batches import decode_batch, encode_batch  # noqa: E402
from rollouts.agents import Turn  # noqa: E402
from rollouts.training.agent_integration import Rollout  # noqa: E402
from rollouts.training.batching import pack_samples  # noqa: E402
from rollouts.training.steps import publish_step  # noqa: E402
from rollouts.training.types import Sample  # noqa: E402
from rollouts.training.weight_sync import EngineError  # noqa: E402

SRC = str(ROOT / "src") + "/"
GROUP, RANKS, SEQ_LEN, PROMPT, ANSWER = 4, 64, 256, 16, 24
GROWTH = 1.1
"""Work per rollout of a fleet against that of the next smaller one: 1 is linear in the fleet."""

CPU_GROWTH, REPEATS = 1.5, 3
"""CPU time, the least of three runs, also has caches, the collector and other users of the machine in it."""
WATCH = "prime_rl/orchestrator/engines"
"""Looks at every server once a second, however many rollouts there are."""


class Engine:
    """One server, as its client and its control side see it."""

    def __init__(self, number: int) -> None:
        self.base_url = self.root_url = f"http://engine{number}"
        self.number, self.version, self.there, self.awaits_weights = number, 0, True, True

    def __str__(self) -> str:
        return self.base_url

    def copy(self, *, base_url: str) -> Engine:
        return self

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        await anyio.sleep(0.01)
        if not self.there:
            raise ConnectionError("nobody listens")
        return msgspec.json.encode({"version": self.version, "awaits_weights": self.awaits_weights})

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        await anyio.sleep(0.2)
        if not self.there:
            raise EngineError("unreachable", "nobody listens")
        self.version, self.awaits_weights = int(Path(checkpoint_path).name.removeprefix("step_")), False
        return {"success": True}

    async def reload_weights(self) -> dict[str, Any]:
        self.version, self.awaits_weights = 0, False
        return {"success": True}

    async def leave_and_join(self) -> None:
        await anyio.sleep(3.0 + self.number % 7 / 7)
        self.there = False
        await anyio.sleep(5.0)
        self.version, self.there, self.awaits_weights = 0, True, True


class World:
    """Everything around the orchestrator."""

    def __init__(self, out: Path, num_engines: int, steps: int) -> None:
        self.out, self.steps = out, steps
        self.engines = [Engine(i) for i in range(num_engines)]
        self.wire: dict[int, bytes] = {}
        self.taken = set[int]()
        self.changed = anyio.Event()
        self.num_packed = 0
        self.rows = 0

    def ring(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_for(self, condition: Any, root: Path, *, timeout_s: float | None, what: str) -> Any:
        """Stands in for the file system's notification."""
        with anyio.move_on_after(timeout_s):
            while (found := condition()) is None:
                await self.changed.wait()
            return found
        raise TimeoutError(what)

    async def train(self) -> None:
        """Rank 0 of 64: unpack its message, pack its share, take a second, publish."""
        for step in range(1, self.steps + 1):
            data = await self.wait_for(lambda step=step: self.wire.get(step), self.out, timeout_s=None, what="batch")
            _, samples = decode_batch(data)
            self.taken.add(step)
            self.num_packed += len(pack_samples(samples, SEQ_LEN, RANKS)[0])
            await anyio.sleep(1.0)
            publish_step(self.out / "weights", step, lambda path: None)
            self.ring()

    # The environment

    id = "env"

    def rows_of(self) -> list[dict[str, Any]]:
        return [{"prompt": f"prompt {i}", "example_id": i} for i in range(512)]

    async def run_group(
        self, row: dict[str, Any], client: Engine, model: str, sampling_args: Sequence[Any], retries: int = 0
    ) -> list[Rollout]:
        number = row["example_id"]
        await anyio.sleep(1.0 + number % 11 / 10)
        while not client.there or client.awaits_weights:
            await anyio.sleep(0.25)
        return [self.roll_out(row, client.version, number, i) for i in range(len(sampling_args))]

    def roll_out(self, row: dict[str, Any], version: int, number: int, i: int) -> Rollout:
        ids, length = [number % 97] * PROMPT, ANSWER - i
        turn = Turn(ids, [number % 89] * length, [-0.5] * length, [(0, version)])
        return Rollout(prompt=row["prompt"], completion="x", turns=[turn], num_turns=1, reward=float(i % 2))


class Environment:
    """The one environment of a world."""

    id = "env"

    def __init__(self, world: World) -> None:
        self.run_group, self._rows = world.run_group, world.rows_of()

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return self._rows


class Wire:
    """The messages of the real wires, in memory."""

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self) -> None: ...

    async def publish(self, step: int, samples: list[Sample]) -> None:
        self.world.wire[step] = encode_batch(step, samples)
        self.world.ring()

    def is_received(self, step: int) -> bool:
        return step in self.world.taken

    def prune(self, step: int) -> None:
        for old in [number for number in self.world.wire if number <= step]:
            del self.world.wire[old]

    def close(self) -> None: ...


class Monitor:
    """Takes metrics and keeps none."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def log_timeline(self, what: str, start: float, end: float, step: int) -> None: ...
    def log_samples(self, rows: Any, step: int) -> None: ...


async def live(world: World) -> None:
    """One whole run."""
    number, clients = len(world.engines), world.engines
    config = OrchestratorConfig.model_validate(
        {
            "output_dir": world.out,
            "max_steps": world.steps,
            "batch_size": number * GROUP,
            "rollouts_per_example": GROUP,
            "max_async_level": 1,
            "seq_len": SEQ_LEN,
            "min_servers": max(1, number // 2),
            "weight_check_interval": None,
        }
    )
    servers: Any = clients
    orchestrator = assemble(config, {"env": Environment(world)}, {}, clients, servers, Wire(world), Monitor())  # type: ignore[dict-item, arg-type]
    server_pool = orchestrator.generator.server_pool
    await prepare_engines(config, servers, servers, 0, server_pool=server_pool)
    orchestrator.server_monitor = ServerMonitor(config, servers, servers, orchestrator.relay, server_pool=server_pool)
    orchestrator.relay.wait_for_recovery = orchestrator.server_monitor.wait_for_recovery
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.train)
        for engine in clients[:: max(100, number // 10)]:
            tasks.start_soon(engine.leave_and_join)
        async with running(orchestrator):
            with relaxed_gc():
                await run_steps(orchestrator)
        tasks.cancel_scope.cancel()
    assert orchestrator.relay.version == world.steps and world.num_packed


async def _inline(function: Any, *arguments: Any, **options: Any) -> Any:
    """A thread would take real time, in which virtual time flies."""
    return function(*arguments)


def run(num_engines: int, steps: int, out: Path, counts: Counter[str] | None) -> tuple[float, float]:
    """CPU seconds and virtual seconds of a run; with `counts`, our own lines by component are added to it."""
    anyio.to_thread.run_sync = _inline  # type: ignore[assignment]
    loop = VirtualLoop()

    async def whole() -> None:
        world = World(out, num_engines, steps)
        weight_relay.wait_for = world.wait_for  # type: ignore[assignment]
        await live(world)

    gc.collect()
    start = time.process_time()
    if counts is not None:
        sys.settrace(count_lines(counts))
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(whole())
            return time.process_time() - start, loop.now
    finally:
        sys.settrace(None)


def count_lines(counts: Counter[str]) -> Any:
    """A trace function that counts executed lines of our own files."""

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            counts[names[frame.f_code.co_filename]] += 1
        return count

    names: dict[str, str] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(SRC):
            return None
        if file not in names:
            names[file] = file.removeprefix(SRC).removesuffix(".py")
        return count

    return enter


def main() -> int:
    """Measure every size, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output-dir", type=Path)
    options = parser.parse_args()
    logger.remove()
    machine = describe_machine(threads=1)
    lines: dict[int, dict[str, float]] = {}
    cpu_ms, watch = dict[int, float](), dict[int, float]()
    with tempfile.TemporaryDirectory() as scratch:
        run(10, 1, Path(scratch) / "warm", None)
        for number in options.engines:
            counts, rollouts = Counter[str](), number * GROUP * options.steps
            _, virtual_s = run(number, options.steps, Path(scratch) / f"lines{number}", counts)
            watch[number] = counts.pop(WATCH) / number / virtual_s
            repeats = (run(number, options.steps, Path(scratch) / f"time{number}-{i}", None) for i in range(REPEATS))
            cpu_s = min(seconds for seconds, _ in repeats)
            lines[number] = {name: count / rollouts for name, count in counts.items()}
            cpu_ms[number] = 1000 * cpu_s / rollouts
            total = sum(lines[number].values())
            print(f"{number} engines: {total:.1f} lines, {cpu_ms[number]:.2f} ms a rollout, {virtual_s:.1f} virtual s")
    most = options.engines[-1]
    busy = sorted(lines[most], key=lambda name: -lines[most][name])
    whole = {number: sum(found.values()) for number, found in lines.items()}
    rows = [Row("all lines per rollout, growth", _growth(whole), "<=", GROWTH, _show(whole))]
    for name in busy:
        seen = {number: lines[number].get(name, 0.0) for number in options.engines}
        if seen[most] >= whole[most] / 100:
            rows.append(Row(f"{name}, growth", _growth(seen), "<=", GROWTH, _show(seen)))
    rows.append(Row(f"{WATCH}, lines per engine and second, growth", _growth(watch), "<=", GROWTH, _show(watch)))
    rows.append(Row("CPU ms per rollout, growth", _growth(cpu_ms), "<=", CPU_GROWTH, _show(cpu_ms)))
    path = options.output_dir / "fleet.json" if options.output_dir else None
    return finish("fleet", rows, machine, raw={"lines": lines, "cpu_ms": cpu_ms, "watch": watch}, path=path)


def _growth(values: Mapping[int, float]) -> float:
    """The largest growth from one size of the fleet to the next."""
    found = list(values.values())
    return max(after / before if before else float("inf") for before, after in pairwise(found))


def _show(values: Mapping[int, float]) -> str:
    return ", ".join(f"{number}: {value:.2f}" for number, value in values.items())


if __name__ == "__main__":
    raise SystemExit(main())
