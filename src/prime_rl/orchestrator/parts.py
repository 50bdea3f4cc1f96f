"""The parts of the orchestrator, how they are built and connected, and what they save together."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from prime_rl.orchestrator.arms import Arms
from prime_rl.orchestrator.buffer import PromptBuffer
from prime_rl.orchestrator.checkpoint import CheckpointStore
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.engines import Attendance, EngineKeeper, build_engines, prepare_engines
from prime_rl.orchestrator.evaluation import Evaluations, build_plans
from prime_rl.orchestrator.rollout_manager import GroupGenerator, build_rollouts
from prime_rl.orchestrator.teacher import Teacher, build_teacher
from prime_rl.orchestrator.waiting import LagMeter, Reminder
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.transport.batches import BatchSender
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.wires import build_sender
from prime_rl.utils.client import build_clients
from prime_rl.utils.hang import Wait, explain_on_signal
from prime_rl.utils.monitor import Monitor, build_monitor
from prime_rl.utils.output_dir import AVERAGE_DIR, BROADCASTS_DIR
from rollouts.training.environments import Environment
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.steps import step_path
from rollouts.training.types import Sample
from rollouts.training.weight_sync import InferenceEngine, PrimeEngine, WeightSyncError


@dataclass
class Orchestrator:
    """Everything the loop works with."""

    config: OrchestratorConfig
    buffer: PromptBuffer
    generator: GroupGenerator
    rollouts: AsyncRolloutManager
    sender: BatchSender
    checkpoints: CheckpointStore
    evaluations: Evaluations
    monitor: Monitor
    lag: LagMeter = field(default_factory=LagMeter)
    reminder: Reminder = field(default_factory=Reminder)
    totals: Counter[str] = field(default_factory=Counter)
    teacher: Teacher | None = None
    keeper: EngineKeeper | None = None
    teacher_keeper: EngineKeeper | None = None
    _relay: WeightRelay | None = None

    @property
    def relay(self) -> WeightRelay:
        """Brings versions to the engines."""
        assert self._relay is not None, "set by `assemble`"
        return self._relay

    @property
    def steps(self) -> Iterable[int]:
        """Batches still to be sent, numbered by the version they train into."""
        first, last = self.rollouts.step_count + 1, self.config.max_steps
        return itertools.count(first) if last is None else range(first, last + 1)

    def count(self, samples: list[Sample]) -> None:
        """Add a batch to the totals of the run."""
        self.totals["tokens"] += sum(len(sample.tokens) for sample in samples)
        self.totals["samples"] += len({(sample.group_index, sample.index) for sample in samples})
        self.totals["problems"] += len({sample.group_index for sample in samples})

    def go_live(self, version: int) -> None:
        """Every engine holds `version`: free slots, begin what is due, drop batches that nobody needs any more."""
        self.buffer.version = version
        self.rollouts.release(version)
        self.evaluations.on_version(self.relay.version)
        if not self.config.keep_rollouts and not self.relay.unread:
            self.sender.prune(self.checkpoints.covered(version))

    def state(self) -> dict[str, Any]:
        """Everything needed to continue after the batch that is about to go out."""
        return {"rollouts": self.rollouts.state_dict(), "totals": dict(self.totals)}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.rollouts.load_state_dict(state["rollouts"])
        self.totals = Counter(state["totals"])


def describe_wait(parts: Orchestrator | None) -> Wait:
    """What the orchestrator waits for, for whoever asks why nothing moves; no parts: it is still being built."""
    if parts is None or parts.keeper is None:
        return Wait("waits for the inference servers to be ready", "inference")
    relay, rollouts = parts.relay, parts.rollouts
    queues = {
        "groups running": rollouts.num_running,
        "groups ready": rollouts.groups.num_ready,
        "slots used": rollouts.num_slots_used,
        "slots": rollouts.slots,
        "batches sent": relay.num_sent,
        "version live": relay.version,
    }
    for name, keeper in (("inference", parts.keeper), ("teacher_inference", parts.teacher_keeper)):
        if keeper is None or not keeper.attendance.is_short:
            continue
        for i, (since, problem) in keeper.away.items():
            waited = anyio.current_time() - since
            return Wait(f"waits for {keeper.engines[i]}, which does not answer ({problem})", name, waited, queues)
    if rollouts.num_running:
        return Wait(f"waits for inference: {rollouts.num_running} groups are under way", "inference", None, queues)
    if relay.num_sent > relay.version:
        return Wait(f"waits for version {relay.version + 1}", "trainer", relay.waited_s, queues)
    return Wait(f"waits for {parts.evaluations.under_way}", None, None, queues)


def assemble(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
    clients: Sequence[Any],
    engines: Sequence[InferenceEngine],
    sender: BatchSender,
    monitor: Monitor,
    teacher: Teacher | None = None,
) -> Orchestrator:
    """The parts, connected and at the checkpoint that is to be continued; nothing runs yet."""
    out = Path(config.output_dir)
    checkpoints = CheckpointStore(out / "checkpoints", config.ckpt, config.max_steps)
    version, state = checkpoints.load()
    checkpoints.claim_batches(out / "rollouts", version)
    buffer = PromptBuffer(
        environments, config.buffer, config.seed if config.buffer.seed is None else config.buffer.seed
    )
    attendance = Attendance(len(engines), config.min_servers)
    generator = GroupGenerator(config, environments, clients, lambda: parts.relay.version, teacher, attendance)
    rollouts = build_rollouts(config, buffer, generator)
    plans = build_plans(config, environments, eval_environments, version)
    arms = None
    if teacher is not None and config.teacher_model is not None and config.teacher_model.eval_baseline:
        arms = Arms(config, teacher, clients, out / "evals")
    evaluations = Evaluations(config, plans, clients, monitor, arms, lambda: attendance.present)
    parts = Orchestrator(config, buffer, generator, rollouts, sender, checkpoints, evaluations, monitor)
    parts.teacher = teacher
    parts._relay = WeightRelay(
        config.versions_dir,
        engines,
        version=version,
        on_live=parts.go_live,
        is_received=sender.is_received,
        timeout_s=config.weights_timeout,
        log_timeline=monitor.log_timeline,
        before_load=rollouts.wait_settled if config.strict_async_level else None,
        canary_interval=config.canary_interval,
        attendance=attendance,
        other_dir=out / (BROADCASTS_DIR if config.weight_broadcast.type == "filesystem" else "weights"),
    )
    buffer.version = version
    if state is not None:
        parts.load_state(state)
    return parts


@asynccontextmanager
async def running(parts: Orchestrator) -> AsyncIterator[Orchestrator]:
    """Versions are relayed, groups generated and evaluations run while the body does."""
    async with anyio.create_task_group() as tasks:
        for work in (parts.relay.run, parts.evaluations.run, parts.lag.run, parts.reminder.run):
            tasks.start_soon(work)
        for keeper in filter(None, (parts.keeper, parts.teacher_keeper)):
            tasks.start_soon(keeper.run)
        parts.evaluations.on_version(parts.relay.version)
        if parts.evaluations.arms is not None and not parts.relay.version:
            await parts.evaluations.wait()  # the baseline is of the weights before training, all of it
        async with parts.rollouts:
            yield parts
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def build_orchestrator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
) -> AsyncIterator[Orchestrator]:
    """All parts against real servers and files: servers ready, state resumed, everything running."""
    out = Path(config.output_dir)
    async with AsyncExitStack() as stack:
        clients = build_clients(config.client, seq_len=config.seq_len)
        engines = build_engines(config.client, broadcast=config.weight_broadcast.type != "filesystem")
        for client in clients:
            stack.push_async_callback(client.close)
        teacher = build_teacher(config)
        if teacher is not None:
            stack.push_async_callback(teacher.close)
        monitor = build_monitor(out, "orchestrator", config)
        stack.callback(monitor.finish)
        wire = config.transport
        sender = build_sender(wire.type, out / "rollouts", wire.host, wire.port)
        stack.callback(sender.close)
        parts = assemble(config, environments, eval_environments, clients, engines, sender, monitor, teacher)
        sender.open()
        if threading.current_thread() is threading.main_thread():
            explain_on_signal("orchestrator", out, lambda: describe_wait(parts))
        attendance = parts.generator.attendance
        await prepare_engines(config, clients, engines, parts.relay.version, attendance=attendance)
        acknowledge(step_path(config.versions_dir, parts.relay.version))
        if teacher is not None:
            await teacher.wait_ready(config.inference_timeout)
        parts.keeper = EngineKeeper(config, clients, engines, parts.relay, attendance=attendance)
        parts.relay.wait_back = parts.keeper.wait_back
        if teacher is not None and config.teacher_model is not None and config.teacher_model.weights == "ema":
            await _follow(parts, teacher, build_engines(config.teacher_model.client))
        yield await stack.enter_async_context(running(parts))


async def _follow(parts: Orchestrator, teacher: Teacher, engines: Sequence[PrimeEngine]) -> None:
    """Servers of a teacher that hold the moving average: at the version in use now, after each update and each fall."""
    clients = teacher.scorer.clients
    await prepare_engines(parts.config, clients, engines, parts.relay.version, AVERAGE_DIR)
    student, own = parts.keeper, EngineKeeper(parts.config, clients, engines, parts.relay, AVERAGE_DIR)
    assert student is not None

    async def wait_for_both(error: WeightSyncError) -> bool:
        return await student.wait_back(error) and await own.wait_back(error)

    parts.teacher_keeper, parts.relay.wait_back = own, wait_for_both
    parts.relay.followers = (Path(parts.config.output_dir) / AVERAGE_DIR, engines)
