"""A run in virtual time: the real orchestrator with a simulated engine, trainer and transport.

Real are the loop, the prompt buffer, the rollout manager, the group generator, the relay, the checkpoints on disk and
the messages. Simulated are what they talk to, the file system's notifications, and the clock.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from prime_rl.orchestrator import weight_relay
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.metrics import compute_group_metrics
from prime_rl.orchestrator.orchestrator import run_steps
from prime_rl.orchestrator.setup import Orchestrator, build_orchestrator, running
from prime_rl.transport.batches import decode_batch, encode_batch
from prime_rl.transport.file_watch import RECHECK_S
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.steps import complete_steps, latest_step, publish_dir, publish_step, step_path
from rollouts.training.types import Sample, Status
from rollouts.training.weight_sync import EngineError, FailureKind

DEADLINE_S = 2000.0  # virtual seconds after which a run counts as stuck


@dataclass
class Faults:
    """How bad the world is; rates are probabilities."""

    failing: float = 0.0  # of one attempt
    poison: frozenset[int] = frozenset()  # rows that always fail
    outages: tuple[tuple[float, float], ...] = ()  # intervals in which the engine refuses all requests
    crashes: tuple[tuple[float, float], ...] = ()  # times of engine crashes, and seconds until the restart
    latency_s: float = 1.0
    train_s: float = 1.0
    update_s: float = 0.3
    lost: float = 0.0  # of notifications that something has appeared


@dataclass
class World:
    """State outside the orchestrator that survives an interruption: files, transport, received batches."""

    out: Path
    config: OrchestratorConfig
    faults: Faults
    seed: int  # of latencies only: what is generated does not depend on it
    sizes: Mapping[str, int] = field(default_factory=lambda: {"env": 9})
    received: dict[int, list[Sample]] = field(default_factory=dict)
    received_at: dict[int, float] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    num_checks: int = 0
    trained_s: float = 0.0
    sticky: bool = False  # restarted rollouts take as long as before, and all other durations are constant
    eval_latency_s: float = 0.0
    writes_left: int | None = None  # until the disk is full
    sealed: bool = False  # the trainer's half of a checkpoint has contents, which can be damaged

    def __post_init__(self) -> None:
        self.noise = random.Random(self.seed)
        self.bell = anyio.Event()
        self.sent_batches: dict[int, bytes] = {}
        self.orchestrator: Orchestrator
        self.engine = Engine(self)

    def ring(self) -> None:
        """Notify waiters of new files or batches."""
        if self.faults.lost and self.noise.random() < self.faults.lost:
            return
        self.bell.set()
        self.bell = anyio.Event()

    async def wait_for(self, condition: Any, root: Path, *, timeout_s: float | None, what: str) -> Any:
        """Stands in for the file system's notification, and where some get lost for the second look."""
        with anyio.move_on_after(timeout_s):
            while (found := condition()) is None:
                with anyio.move_on_after(RECHECK_S if self.faults.lost else None):
                    await self.bell.wait()
            return found
        raise TimeoutError(what)

    def reach_disk(self, path: Path) -> None:
        """Stands in for fsync, where a full disk makes itself known."""
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async def pause(self, mean_s: float, key: str | None = None) -> None:
        """Some time passes; now and then much more than usual."""
        self.check()
        noise = random.Random(f"{self.seed}/{key}") if self.sticky else self.noise
        varied = noise.expovariate(1.0) * (20 if noise.random() < 0.03 else 1)
        await anyio.sleep(mean_s * (1.0 if self.sticky and key is None else varied))
        self.check()

    def check(self) -> None:
        """Invariants: drawn = trained + filtered + quarantined + in flight, token accounts, and the slot limit."""
        if not hasattr(self, "orchestrator"):
            return
        self.num_checks += 1
        rollouts, config = self.orchestrator.rollouts, self.config
        counts = compute_group_metrics(rollouts.groups, {})
        accounted = sum(counts[f"groups/{name}"] for name in ("trained", "filtered", "quarantined", "in_flight"))
        assert counts["groups/drawn"] == accounted
        assert counts["groups/trained"] == rollouts.step_count * config.num_groups
        rollouts.tokens.check(rollouts.ready_samples)
        assert rollouts.slots is not None and rollouts.num_slots_used <= rollouts.slots

    def metrics(self) -> Monitor:
        """Keeps what is logged."""
        return Monitor(self)

    async def run(self, patch: pytest.MonkeyPatch, stop_at: float | None = None) -> bool:
        """Run to the end, or until `stop_at`; True when it got to the end."""
        patch.setattr(weight_relay, "wait_for", self.wait_for)
        patch.setattr("rollouts.training.steps._fsync", self.reach_disk)
        patch.setattr("anyio.to_thread.run_sync", _inline)  # a thread would take real time, in which virtual time flies
        environments = {name: Environment(self, name, size) for name, size in self.sizes.items()}
        judged = {"judged": Environment(self, "judged", 3, self.eval_latency_s)} if self.config.eval else {}
        sender = Wire(self)
        self.sent_batches.clear()
        self.bell = anyio.Event()
        done = False
        with anyio.fail_after(DEADLINE_S), anyio.move_on_after(stop_at):
            trainer = Trainer(self)
            self.engine = Engine(self)
            self.engine.version = trainer.version
            self.orchestrator = build_orchestrator(
                self.config, environments, judged, [Client(self)], [self.engine], sender, self.metrics()
            )  # type: ignore[arg-type]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trainer.run)
                tasks.start_soon(self.engine.live)
                async with running(self.orchestrator):
                    await run_steps(self.orchestrator)
                    if self.sealed:
                        await (
                            trainer.finished.wait()
                        )  # as a launcher does: its last commit comes after its last version
                    done = True
                tasks.cancel_scope.cancel()
        self.check()
        if done:  # what the ledger calls trained is what the trainer received, over all resumed attempts
            received = sum(sample.response_length for samples in self.received.values() for sample in samples)
            assert self.orchestrator.rollouts.tokens.trained == received
        return done


async def _inline(function: Any, *arguments: Any, **options: Any) -> Any:
    return function(*arguments)


class Client:
    """Client of the simulated engine, for rollouts and health checks."""

    base_url = root_url = "http://simulated/v1"

    def __init__(self, world: World) -> None:
        self.world = world

    def copy(self, *, base_url: str) -> Client:
        return self

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        await self.world.pause(0.01)
        engine = self.world.engine
        if engine.unreachable:
            raise ConnectionError("connection refused")
        return msgspec.json.encode({"version": engine.version, "awaits_weights": engine.awaits_weights})


class Monitor:
    """Collects rows of metrics."""

    def __init__(self, world: World) -> None:
        self.world = world

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.world.rows.append((step, dict(metrics)))

    def log_timeline(self, what: str, start: float, end: float, step: int) -> None:
        pass

    def log_samples(self, rows: Any, step: int) -> None:
        assert all(row["advantage"] is not None for row in rows)


class Engine:
    """Serves one version; updates take time, during which requests continue."""

    def __init__(self, world: World) -> None:
        self.world, self.version = world, 0
        self.unreachable = self.awaits_weights = False
        self.num_restarts = 0  # crashes so far

    async def live(self) -> None:
        """Crash and restart with the initial weights, not serving, at the scripted times."""
        for moment, seconds in self.world.faults.crashes:
            await anyio.sleep_until(moment)
            self.num_restarts += 1
            self.unreachable = True
            await anyio.sleep(seconds)
            self.version, self.unreachable, self.awaits_weights = 0, False, True

    async def answering(self) -> int:
        """Wait like a client while the engine is down; returns the number of its current restart."""
        while self.unreachable or self.awaits_weights:
            await anyio.sleep(0.25)
        return self.num_restarts

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        num_restarts = self.num_restarts
        await self.world.pause(self.world.faults.update_s)
        if self.unreachable or num_restarts != self.num_restarts:
            raise EngineError(FailureKind.UNREACHABLE, "the connection was cut")
        self.version, self.awaits_weights = int(Path(checkpoint_path).name.removeprefix("step_")), False
        await self.world.pause(self.world.faults.update_s)
        if self.unreachable or num_restarts != self.num_restarts:
            raise EngineError(FailureKind.UNREACHABLE, "the connection was cut")
        return {"success": True}

    async def reload_weights(self) -> dict[str, Any]:
        self.version, self.awaits_weights = 0, False
        return {"success": True}


class Environment:
    """Rollouts whose content depends on the row, the request's seed and the version alone; their duration does not."""

    def __init__(self, world: World, name: str, size: int, latency_s: float | None = None) -> None:
        self.id, self.world, self.size = name, world, size
        self.latency_s = world.faults.latency_s if latency_s is None else latency_s

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": f"{self.id} {i}", "example_id": i} for i in range(self.size)]

    async def run_group(
        self, row: dict[str, Any], client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        rollouts: list[Rollout] = [Rollout(prompt="")] * len(sampling_args)

        async def fill(i: int) -> None:
            num_sampled = 0
            for attempt in range(retries + 1):
                rollouts[i] = await self._attempt(row, sampling_args[i]["seed"] + attempt)
                num_sampled += sum(len(turn.completion_ids) for turn in rollouts[i].turns)
                rollouts[i].num_sampled = num_sampled
                if not rollouts[i].failed:
                    return

        async with anyio.create_task_group() as tasks:
            for i in range(len(sampling_args)):
                tasks.start_soon(fill, i)
        return rollouts

    async def _attempt(self, row: dict[str, Any], seed: int) -> Rollout:
        faults, engine = self.world.faults, self.world.engine
        prompt_ids = [1000 + row["example_id"]]
        versions, ids = [], list[int]()
        for piece in range(2):  # two pieces of work, between which the weights may change
            while True:  # requests to a crashed engine are resent unchanged
                num_restarts = await engine.answering()
                version, length = engine.version, 1 + seed % 3
                await self.world.pause(self.latency_s / 2, f"{seed}/{piece}")
                if num_restarts == engine.num_restarts:
                    break
            if not versions or versions[-1][1] != version:
                versions.append((len(ids), version))
            ids += [seed % 97 + version] * length
        draw = random.Random(f"{self.id}/{row['example_id']}/{seed}/{versions}")
        now = anyio.current_time()
        if any(start <= now < end for start, end in faults.outages):
            return _failed(row, "APIConnectionError")
        turn = Turn(prompt_ids, ids, [-0.5] * len(ids), versions)
        if row["example_id"] in faults.poison or draw.random() < faults.failing:
            return _failed(row, "BadRequestError", [turn])
        solved = draw.random() < (0.3 + 0.05 * row["example_id"]) % 1.0
        return Rollout(
            prompt=row["prompt"], completion="x", turns=[turn], num_turns=1, reward=float(solved), metrics={"m": 1.0}
        )


def _failed(row: dict[str, Any], kind: str, turns: list[Turn] | None = None) -> Rollout:
    return Rollout(prompt=row["prompt"], turns=turns or [], status=Status.FAILED, error_type=kind, error="scripted")


class Wire:
    """The messages of the real wires, in memory."""

    def __init__(self, world: World) -> None:
        self.world, self.taken = world, set[int]()

    def open(self) -> None:
        pass

    async def publish(self, step: int, samples: list[Sample]) -> None:
        await self.world.pause(0.05)
        self.world.sent_batches[step] = encode_batch(step, samples)
        self.world.ring()

    def is_received(self, step: int) -> bool:
        return step in self.taken

    def prune(self, step: int) -> None:
        for old in [s for s in self.world.sent_batches if s <= step]:
            del self.world.sent_batches[old]

    def close(self) -> None:
        pass


class Trainer:
    """Receives batches in order, checks them, publishes versions and its half of checkpoints."""

    def __init__(self, world: World) -> None:
        self.world, self.finished = world, anyio.Event()
        ckpt, out = world.config.ckpt, world.out
        resumed = latest_step(out / "checkpoints", ("trainer", "orchestrator")) if ckpt and ckpt.resume_step else None
        self.version = resumed or 0
        for step in complete_steps(out / "weights"):
            if step > self.version:
                shutil.rmtree(step_path(out / "weights", step))
        if self.version:
            self._publish(self.version)

    def _publish(self, step: int) -> None:
        publish_step(self.world.out / "weights", step, lambda path: None)
        self.world.ring()

    async def run(self) -> None:
        await self._steps()
        self.finished.set()

    async def _steps(self) -> None:
        world, config = self.world, self.world.config
        while config.max_steps is None or self.version < config.max_steps:
            step = self.version + 1
            data = await world.wait_for(lambda: world.sent_batches.get(step), world.out, timeout_s=None, what="batch")  # noqa: B023
            found, samples = decode_batch(data)
            assert found == step
            world.orchestrator.sender.taken.add(step)  # type: ignore[attr-defined]
            self._check(step, samples)
            world.received[step], world.received_at[step] = samples, anyio.current_time()
            await world.pause(world.faults.train_s)
            world.trained_s += anyio.current_time() - world.received_at[step]
            self._publish(step)
            self.version = step
            if config.ckpt is not None and config.ckpt.interval and step % config.ckpt.interval == 0:
                await world.pause(0.1)
                half = step_path(world.out / "checkpoints", step) / "trainer"
                publish_dir(
                    half, lambda path: (path / "model").write_bytes(b"parameters") and None, sealed=world.sealed
                )

    def _check(self, step: int, samples: list[Sample]) -> None:
        """Whole groups within the staleness limit; in strict mode exactly at it."""
        config = self.world.config
        num_groups = len({s.group_index for s in samples})
        # A group of which all samples are overlong is dropped from its batch.
        assert num_groups == config.num_groups or (num_groups < config.num_groups and config.seq_len < 10)
        for sample in samples:
            sample.validate()
            ages = [step - 1 - version for _, version in sample.versions]
            assert all(0 <= age <= config.max_async_level for age in ages), (step, sample.versions)
            if config.strict_async_level:
                assert [v for _, v in sample.versions] == [max(step - 1 - config.max_async_level, 0)]


def content(world: World) -> dict[int, list[Any]]:
    """What the trainer trained on, batch by batch."""
    return {
        step: [(s.group_index, s.index, s.prompt, s.tokens, s.reward, s.advantages, s.versions) for s in samples]
        for step, samples in sorted(world.received.items())
    }


def make_world(out: Path, noise: int, faults: Faults, sizes: dict[str, int] | None = None, **config: Any) -> World:
    values = {"env": [{"id": name} for name in sizes or {"env": 9}], "output_dir": out, "weights_timeout": 1e6}
    return World(out, OrchestratorConfig.model_validate(values | config), faults, noise, sizes or {"env": 9})
