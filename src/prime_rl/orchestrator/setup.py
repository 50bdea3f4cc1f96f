"""Builds and connects the components of the orchestrator, and defines their joint checkpoint state."""

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

from prime_rl.orchestrator.buffer import PromptBuffer
from prime_rl.orchestrator.checkpoint import CheckpointStore
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.baseline_eval import BaselineEvaluator
from prime_rl.orchestrator.distillation.teacher import Teacher, build_teacher
from prime_rl.orchestrator.evaluation import Evaluations, build_schedules
from prime_rl.orchestrator.rollout_manager import GroupGenerator, build_rollouts
from prime_rl.orchestrator.server_monitor import ServerMonitor
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import build_engines, prepare_engines
from prime_rl.orchestrator.waiting import EventLoopLagMonitor, WaitLogger
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.runtime.hang_watchdog import WaitStatus, explain_on_signal
from prime_rl.runtime.run_dir import AVERAGE_DIR, BROADCASTS_DIR, begin_attempt
from prime_rl.transport.batches import BatchSender
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.factory import build_sender
from prime_rl.utils.client import build_clients
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.environments import Environment
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.steps import step_path
from rollouts.training.types import Sample
from rollouts.training.weight_sync import InferenceEngine, PrimeEngine, WeightSyncError


@dataclass
class Orchestrator:
    """The components that the main loop uses."""

    config: OrchestratorConfig
    buffer: PromptBuffer
    generator: GroupGenerator
    rollouts: AsyncRolloutManager
    sender: BatchSender
    checkpoints: CheckpointStore
    evaluations: Evaluations
    monitor: Monitor
    lag: EventLoopLagMonitor = field(default_factory=EventLoopLagMonitor)
    wait_logger: WaitLogger = field(default_factory=WaitLogger)
    totals: Counter[str] = field(default_factory=Counter)
    teacher: Teacher | None = None
    server_monitor: ServerMonitor | None = None
    teacher_server_monitor: ServerMonitor | None = None
    _relay: WeightRelay | None = None

    @property
    def relay(self) -> WeightRelay:
        """Relay of weight versions to the engines."""
        assert self._relay is not None, "set by `assemble`"
        return self._relay

    @property
    def steps(self) -> Iterable[int]:
        """Batches to be sent, numbered by the version that they produce."""
        first, last = self.rollouts.step_count + 1, self.config.max_steps
        return itertools.count(first) if last is None else range(first, last + 1)

    def count(self, samples: list[Sample]) -> None:
        """Add a batch to the run totals."""
        self.totals["tokens"] += sum(len(sample.tokens) for sample in samples)
        self.totals["samples"] += len({(sample.group_index, sample.index) for sample in samples})
        self.totals["problems"] += len({sample.group_index for sample in samples})

    def on_version_live(self, version: int) -> None:
        """Callback once every engine serves `version`: free slots, start due evaluations, prune old batches."""
        self.buffer.version = version
        self.rollouts.release(version)
        self.evaluations.on_version(self.relay.version)
        if not self.config.keep_rollouts and not self.relay.unread:
            self.sender.prune(self.checkpoints.covered(version))

    def state(self) -> dict[str, Any]:
        """State needed to continue after the batch about to be sent."""
        return {"rollouts": self.rollouts.state_dict(), "totals": dict(self.totals)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        self.rollouts.load_state_dict(state["rollouts"])
        self.totals = Counter(state["totals"])


def describe_wait(orchestrator: Orchestrator | None) -> WaitStatus:
    """What the orchestrator is waiting for, for hang reports; None: it is still being built."""
    if orchestrator is None or orchestrator.server_monitor is None:
        return WaitStatus("waits for the inference servers to be ready", "inference")
    relay, rollouts = orchestrator.relay, orchestrator.rollouts
    queues = {
        "groups running": rollouts.num_running,
        "groups ready": rollouts.groups.num_ready,
        "slots used": rollouts.num_slots_used,
        "slots": rollouts.slots,
        "batches sent": relay.num_sent,
        "version live": relay.version,
    }
    for name, server_monitor in (
        ("inference", orchestrator.server_monitor),
        ("teacher_inference", orchestrator.teacher_server_monitor),
    ):
        if server_monitor is None or not server_monitor.server_pool.is_below_minimum:
            continue
        for i, (since, problem) in server_monitor.unreachable.items():
            waited = anyio.current_time() - since
            return WaitStatus(
                f"waits for {server_monitor.engines[i]}, which does not respond ({problem})", name, waited, queues
            )
    if rollouts.num_running:
        return WaitStatus(f"waits for inference: {rollouts.num_running} groups in flight", "inference", None, queues)
    if relay.num_sent > relay.version:
        return WaitStatus(f"waits for version {relay.version + 1}", "trainer", relay.waited_s, queues)
    return WaitStatus(f"waits for {orchestrator.evaluations.in_progress}", None, None, queues)


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
    """Connect the components and load the checkpoint to resume from; starts no tasks."""
    out = Path(config.output_dir)
    checkpoints = CheckpointStore(out / "checkpoints", config.ckpt, config.max_steps)
    version, state = checkpoints.load()
    checkpoints.claim_batches(out / "rollouts", version)
    begin_attempt(out, "orchestrator", version)
    buffer = PromptBuffer(
        environments, config.buffer, config.seed if config.buffer.seed is None else config.buffer.seed
    )
    server_pool = ServerPool(len(engines), config.min_servers)
    generator = GroupGenerator(config, environments, clients, lambda: orchestrator.relay.version, teacher, server_pool)
    rollouts = build_rollouts(config, buffer, generator)
    schedules = build_schedules(config, environments, eval_environments, version)
    baseline_evaluator = None
    if teacher is not None and config.teacher_model is not None and config.teacher_model.eval_baseline:
        baseline_evaluator = BaselineEvaluator(config, teacher, clients, out / "evals")
    evaluations = Evaluations(config, schedules, clients, monitor, baseline_evaluator, lambda: server_pool.reachable)
    orchestrator = Orchestrator(config, buffer, generator, rollouts, sender, checkpoints, evaluations, monitor)
    orchestrator.teacher = teacher
    orchestrator._relay = WeightRelay(
        config.versions_dir,
        engines,
        version=version,
        on_live=orchestrator.on_version_live,
        is_received=sender.is_received,
        timeout_s=config.weights_timeout,
        log_timeline=monitor.log_timeline,
        before_load=rollouts.wait_until_idle if config.strict_async_level else None,
        weight_check_interval=config.weight_check_interval,
        server_pool=server_pool,
        alternate_dir=out / (BROADCASTS_DIR if config.weight_broadcast.type == "filesystem" else "weights"),
    )
    buffer.version = version
    if state is not None:
        orchestrator.load_state(state)
    return orchestrator


@asynccontextmanager
async def running(orchestrator: Orchestrator) -> AsyncIterator[Orchestrator]:
    """Run relay, generation, evaluation and monitoring while the body runs."""
    async with anyio.create_task_group() as tasks:
        for work in (
            orchestrator.relay.run,
            orchestrator.evaluations.run,
            orchestrator.lag.run,
            orchestrator.wait_logger.run,
        ):
            tasks.start_soon(work)
        for server_monitor in filter(None, (orchestrator.server_monitor, orchestrator.teacher_server_monitor)):
            tasks.start_soon(server_monitor.run)
        orchestrator.evaluations.on_version(orchestrator.relay.version)
        if orchestrator.evaluations.baseline_evaluator is not None and not orchestrator.relay.version:
            await (
                orchestrator.evaluations.wait()
            )  # the baseline must be measured entirely on the weights before training
        async with orchestrator.rollouts:
            yield orchestrator
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def build_orchestrator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
) -> AsyncIterator[Orchestrator]:
    """Build everything against real servers and files; on entry the servers are ready and all tasks run."""
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
        transport = config.transport
        sender = build_sender(transport.type, out / "rollouts", transport.host, transport.port)
        stack.callback(sender.close)
        orchestrator = assemble(config, environments, eval_environments, clients, engines, sender, monitor, teacher)
        sender.open()
        if threading.current_thread() is threading.main_thread():
            explain_on_signal("orchestrator", out, lambda: describe_wait(orchestrator))
        server_pool = orchestrator.generator.server_pool
        answers = await prepare_engines(config, clients, engines, orchestrator.relay.version, server_pool=server_pool)
        await orchestrator.relay.check_restarted(answers)
        acknowledge(step_path(config.versions_dir, orchestrator.relay.version))
        if teacher is not None:
            await teacher.wait_until_ready(config.inference_timeout)
        orchestrator.server_monitor = ServerMonitor(
            config, clients, engines, orchestrator.relay, server_pool=server_pool
        )
        orchestrator.relay.wait_for_recovery = orchestrator.server_monitor.wait_for_recovery
        if teacher is not None and config.teacher_model is not None and config.teacher_model.weights == "ema":
            await _connect_ema_teacher(orchestrator, teacher, build_engines(config.teacher_model.client))
        yield await stack.enter_async_context(running(orchestrator))


async def _connect_ema_teacher(orchestrator: Orchestrator, teacher: Teacher, engines: Sequence[PrimeEngine]) -> None:
    """Keep a teacher's servers on the EMA weights: at start, after each update and after restarts."""
    clients = teacher.scorer.clients
    await prepare_engines(orchestrator.config, clients, engines, orchestrator.relay.version, AVERAGE_DIR)
    student, teacher_monitor = (
        orchestrator.server_monitor,
        ServerMonitor(orchestrator.config, clients, engines, orchestrator.relay, AVERAGE_DIR),
    )
    assert student is not None

    async def wait_for_both(error: WeightSyncError) -> bool:
        return await student.wait_for_recovery(error) and await teacher_monitor.wait_for_recovery(error)

    orchestrator.teacher_server_monitor, orchestrator.relay.wait_for_recovery = teacher_monitor, wait_for_both
    orchestrator.relay.ema_engines = (Path(orchestrator.config.output_dir) / AVERAGE_DIR, engines)
