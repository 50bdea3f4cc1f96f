"""Builds and connects the components of the orchestrator, and defines their joint checkpoint state."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from prime_rl.client.scoring import FULL
from prime_rl.orchestrator.advantages import build_advantages
from prime_rl.orchestrator.buffer import PromptBuffer, build_buffer
from prime_rl.orchestrator.checkpoint import CheckpointStore
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.teacher import Teacher, build_teacher
from prime_rl.orchestrator.evaluation import Evaluations, build_evaluations, build_schedules
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.rollout_manager import GroupGenerator, build_rollouts
from prime_rl.orchestrator.server_pool import ServerPool, build_ema_servers, build_servers
from prime_rl.orchestrator.servers import build_engines
from prime_rl.orchestrator.waiting import EventLoopLagMonitor, WaitLogger
from prime_rl.orchestrator.weight_relay import WeightRelay, build_relay
from prime_rl.runtime.hang_watchdog import WaitStatus, explain_on_signal
from prime_rl.runtime.run_dir import RunDir
from prime_rl.telemetry.health_checks import RolloutHealthChecks
from prime_rl.transport.batches import BatchSender
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.factory import build_sender
from prime_rl.utils.client import build_clients
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.environments import Environment
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.steps import step_path
from rollouts.training.types import Sample
from rollouts.training.weight_sync import PrimeEngine


@dataclass(frozen=True, kw_only=True)
class Orchestrator:
    """The connected components that the main loop uses."""

    seq_len: int
    max_steps: int | None
    version: PolicyVersion
    servers: ServerPool
    ema_servers: ServerPool | None
    teacher: Teacher | None
    buffer: PromptBuffer
    generator: GroupGenerator
    rollouts: AsyncRolloutManager
    assign_advantages: Callable[[list[Sample]], None]
    baselines: dict[str, float]
    """Running means of rewards by environment and seat, of the baseline "role"."""
    sender: BatchSender
    relay: WeightRelay
    checkpoints: CheckpointStore
    evaluations: Evaluations
    monitor: Monitor
    health_checks: RolloutHealthChecks
    totals: Counter[str]
    lag: EventLoopLagMonitor = field(default_factory=EventLoopLagMonitor)
    wait_logger: WaitLogger = field(default_factory=WaitLogger)
    started: anyio.Event = field(default_factory=anyio.Event)
    """Set once the servers are ready."""

    @property
    def steps(self) -> Iterable[int]:
        """Batches to be sent, numbered by the version that they produce."""
        first, last = self.rollouts.step_count + 1, self.max_steps
        return itertools.count(first) if last is None else range(first, last + 1)

    def count(self, samples: list[Sample]) -> None:
        """Add a batch to the run totals."""
        self.totals["tokens"] += sum(len(sample.tokens) for sample in samples)
        self.totals["samples"] += len({(sample.group_index, sample.index) for sample in samples})
        self.totals["problems"] += len({sample.group_index for sample in samples})

    def state(self) -> dict[str, Any]:
        """State needed to continue after the batch about to be sent."""
        return {
            "rollouts": self.rollouts.state_dict(),
            "totals": dict(self.totals),
            "baselines": self.baselines,
            "evaluations": {str(schedule.kind): schedule.state() for schedule in self.evaluations.schedules},
        }

    def describe_wait(self) -> WaitStatus:
        """What the orchestrator is waiting for, for hang reports."""
        if not self.started.is_set():
            return WaitStatus("waits for the inference servers to be ready", "inference")
        relay, rollouts, live = self.relay, self.rollouts, self.version.live
        queues = {
            "groups running": rollouts.num_running,
            "groups ready": rollouts.groups.num_ready,
            "slots used": rollouts.num_slots_used,
            "slots": rollouts.slots,
            "batches sent": relay.num_sent,
            "version live": live,
        }
        for name, servers in (("inference", self.servers), ("teacher_inference", self.ema_servers)):
            if servers is not None and servers.is_below_minimum:
                i, since, problem = servers.decisive_loss
                description = f"waits for {servers.engines[i]}, which failed ({problem})"
                return WaitStatus(description, name, anyio.current_time() - since, queues)
        if num := rollouts.num_running:
            return WaitStatus(f"waits for inference: {num} groups in flight", "inference", None, queues)
        if self.version.lock.locked():
            return WaitStatus("waits for inference servers to load weights", "inference", None, queues)
        if relay.num_sent > live:
            return WaitStatus(f"waits for version {live + 1}", "trainer", relay.waited_s, queues)
        return WaitStatus(f"waits for {self.evaluations.in_progress}", None, None, queues)


def build_orchestrator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
    clients: Sequence[Any],
    engines: Sequence[PrimeEngine],
    sender: BatchSender,
    monitor: Monitor,
) -> Orchestrator:
    """Build the components in the order of their dependencies, in the state to resume from; starts no tasks."""
    run = RunDir(config.output_dir)
    checkpoints = CheckpointStore(run, config.ckpt, config.max_steps)
    resumed_step, state = checkpoints.load()
    checkpoints.claim_batches(resumed_step)
    run.begin_attempt("orchestrator", resumed_step)

    version = PolicyVersion(resumed_step)
    servers = build_servers(config, clients, engines, version)
    teacher = build_teacher(config, servers)
    ema_servers = None if teacher is None else build_ema_servers(config, teacher.scorer.clients, version)
    buffer = build_buffer(config, environments, version)
    generator = GroupGenerator(config, environments, servers, teacher)
    rollouts = build_rollouts(config, buffer, generator)
    evaluated = None if state is None else state.get("evaluations")  # earlier versions: not saved
    schedules = build_schedules(config, environments, eval_environments, resumed_step, evaluated)
    evaluations = build_evaluations(config, schedules, servers, monitor, teacher)
    relay = build_relay(config, servers, ema_servers, rollouts, sender, monitor)
    if state is not None:
        rollouts.load_state_dict(state["rollouts"], is_usable=lambda samples: fits_teacher(samples, teacher))

    version.subscribe(lambda version: rollouts.release(version.released))
    version.subscribe(lambda version: evaluations.on_version(version.live))
    if not config.keep_rollouts:
        version.subscribe(lambda version: None if relay.unread else sender.prune(checkpoints.covered(version.released)))
    baselines: dict[str, float] = dict(state.get("baselines", {})) if state is not None else {}
    return Orchestrator(
        seq_len=config.seq_len,
        max_steps=config.max_steps,
        version=version,
        servers=servers,
        ema_servers=ema_servers,
        teacher=teacher,
        buffer=buffer,
        generator=generator,
        rollouts=rollouts,
        assign_advantages=build_advantages(config, baselines),
        baselines=baselines,
        sender=sender,
        relay=relay,
        checkpoints=checkpoints,
        evaluations=evaluations,
        monitor=monitor,
        health_checks=RolloutHealthChecks(config.max_async_level, verified=not config.buffer.skip_verification),
        totals=Counter(state["totals"] if state is not None else {}),
    )


def fits_teacher(samples: Sequence[Sample], teacher: Teacher | None) -> bool:
    """Whether samples of a checkpoint have the log-probs that the trainer needs; the teacher, or the estimator, may be
    another one since."""
    if teacher is None:
        return all(sample.teacher_logprobs is None for sample in samples)
    return all(_has_scores(sample, teacher.scorer.top) for sample in samples if sample.has_teacher)


def _has_scores(sample: Sample, top: int) -> bool:
    """Whether a sample has teacher log-probs, and with `top` the distributions of so many tokens (FULL: of all)."""
    table = sample.teacher_table
    if sample.teacher_logprobs is None or not top:
        return sample.teacher_logprobs is not None
    return table is not None and (not table.ids if top == FULL else bool(table.ids) and table.k == top)


@asynccontextmanager
async def running(orchestrator: Orchestrator) -> AsyncIterator[Orchestrator]:
    """Run relay, generation, evaluation and monitoring while the body runs."""
    relay, evaluations = orchestrator.relay, orchestrator.evaluations
    orchestrator.started.set()
    async with anyio.create_task_group() as tasks:
        for loop in (relay.run, evaluations.run, orchestrator.lag.run, orchestrator.wait_logger.run):
            tasks.start_soon(loop)
        for servers in filter(None, (orchestrator.servers, orchestrator.ema_servers)):
            tasks.start_soon(servers.monitor)
        evaluations.on_version(orchestrator.version.live)
        if evaluations.baseline_evaluator is not None and not orchestrator.version.live:
            await evaluations.wait()  # the baseline must be measured entirely on the weights before training
        async with orchestrator.rollouts:
            yield orchestrator
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_orchestrator(
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
        if config.teacher_model is not None:
            contexts = ContextProvider(config.teacher_model, config.env, config.seed)
            for name, environment in environments.items():
                contexts.check_rows(name, environment.rows("train"), config.model.name)
        monitor = build_monitor(out, "orchestrator", config)
        stack.callback(monitor.finish)
        transport = config.transport
        sender = build_sender(transport.type, RunDir(out).rollouts, transport.host, transport.port)
        stack.callback(sender.close)
        orchestrator = build_orchestrator(config, environments, eval_environments, clients, engines, sender, monitor)
        if (teacher := orchestrator.teacher) is not None:
            stack.push_async_callback(teacher.close)
        sender.open()
        if threading.current_thread() is threading.main_thread():
            explain_on_signal("orchestrator", out, orchestrator.describe_wait)
        await orchestrator.servers.start()
        acknowledge(step_path(config.versions_dir, orchestrator.version.live))
        if teacher is not None:
            student = clients[orchestrator.servers.reachable[0]]
            await teacher.wait_until_ready(config.inference_timeout, student)
        if orchestrator.ema_servers is not None:
            await orchestrator.ema_servers.start()
        yield await stack.enter_async_context(running(orchestrator))
