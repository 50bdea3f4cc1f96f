"""The orchestrator's loop: groups from the engines, advantages, batches to the trainer, versions back to the engines.

prompts -> GroupGenerator -> AsyncRolloutManager -> advantages -> rollouts/step_N -> (trainer)
              ^ engine            ^ slots                                              |
              +---- update -------+---- free ------- WeightRelay <---- weights/step_N -+
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.utils.pydantic_config import run_command

if TYPE_CHECKING:
    from prime_rl.orchestrator.checkpoint import CheckpointStore
    from prime_rl.orchestrator.rollout_manager import GroupGenerator
    from prime_rl.orchestrator.weight_relay import WeightRelay
    from prime_rl.transport.batches import FilesystemBatchSender
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.environments import Environment
    from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
    from rollouts.training.types import Sample


@dataclass
class Orchestrator:
    """The parts of the loop, made by `build_orchestrator`."""

    config: OrchestratorConfig
    generator: GroupGenerator
    rollouts: AsyncRolloutManager
    relay: WeightRelay
    sender: FilesystemBatchSender
    checkpoints: CheckpointStore
    monitor: Monitor
    totals: Counter[str] = field(default_factory=Counter)

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

    def report(self, step: int, samples: list[Sample], num_kept: int, times: dict[str, float]) -> None:
        """Metrics, samples and the one line that a reader of the terminal gets per step."""
        from loguru import logger

        from prime_rl.orchestrator.metrics import compute_batch_metrics, compute_error_metrics, sample_rows

        metrics = compute_batch_metrics(samples, step=step, version=self.relay.version, num_kept=num_kept)
        metrics |= compute_error_metrics(self.generator.take_errors(), int(metrics["progress/samples"]))
        metrics["error/quarantined"] = float(len(self.generator.quarantine))
        metrics |= {f"drops/{reason}": float(count) for reason, count in self.rollouts.groups.drops.items()}
        metrics |= {f"progress/total_{name}": float(count) for name, count in self.totals.items()}
        metrics |= times | {"time/update_weights": self.relay.update_s}
        metrics["perf/throughput"] = metrics["progress/tokens"] / max(times["time/step"], 1e-9)
        self.monitor.log(metrics, step)
        self.monitor.log_samples(sample_rows(samples), step)
        logger.info(
            f"Step {step} | Time: {times['time/step']:.2f}s | Reward: {metrics['reward/mean']:.4f} | "
            f"Throughput: {metrics['perf/throughput']:.0f} tokens/s | "
            f"Seq. Length: {metrics['seq_len/mean']:.1f} tokens/sample | "
            f"Async Level: {metrics['batch/async_level']:.0f} | "
            f"Max. Off-Policy Level: {metrics.get('batch/off_policy_level/max', 0):.0f}"
        )
        if num_kept < len(samples):
            logger.warning(
                f"{len(samples) - num_kept} samples are longer than seq_len = {self.config.seq_len}: left out"
            )

    def state(self) -> dict[str, Any]:
        """Everything needed to continue after the batch that is about to go out."""
        return {
            "rollouts": self.rollouts.state_dict(),
            "quarantine": sorted(self.generator.quarantine),
            "totals": dict(self.totals),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.rollouts.load_state_dict(state["rollouts"])
        self.generator.quarantine = set(state["quarantine"])
        self.totals = Counter(state["totals"])


async def run_orchestrator(config: OrchestratorConfig, environments: Mapping[str, Environment]) -> None:
    """Send `max_steps` batches, and leave when the last one's version is live."""
    import anyio.to_thread

    from prime_rl.orchestrator.metrics import assign_advantages, drop_overlong

    async with build_orchestrator(config, environments) as parts:
        done = time.time()
        for step in parts.steps:
            start = done
            samples = await next_batch(parts)  # waits for: the engines, and the trainer for slots
            generated = time.time()
            assign_advantages(samples, config.advantage)
            kept = drop_overlong(samples, config.seq_len)
            if not kept:
                raise ValueError(f"step {step}: all samples are longer than seq_len = {config.seq_len}: raise it")
            parts.count(samples)
            # Before the batch goes out: a trainer that got as far as checkpoint N then never lacks our half of it.
            parts.checkpoints.save(step, parts.state)
            saved = time.time()
            parts.relay.sent(step)  # first: the answer may be quicker than our return from the next line
            await anyio.to_thread.run_sync(parts.sender.send, step, kept)  # unblocks: the trainer
            done = time.time()
            parts.monitor.log_timeline("generate", start, generated, step)
            times = {"step": done - start, "generate_completions": generated - start, "save_ckpt": saved - generated}
            parts.report(step, samples, len(kept), {f"time/{name}": value for name, value in times.items()})
        await parts.relay.wait_version(parts.rollouts.step_count)


async def next_batch(parts: Orchestrator) -> list[Sample]:
    """The next batch's samples. When nothing can be generated any more, the error says why with the last failure."""
    from rollouts.training.rollout_gen.async_rollout_manager import RolloutStarvedError

    try:
        return (await parts.rollouts.generate_batch()).samples
    except RolloutStarvedError as error:
        last = parts.generator.last_error
        # What prompts and settings do to every rollout is for the user to change; an engine that fails is not.
        kind = RuntimeError if "engine failed" in error.reasons else ValueError
        raise kind(f"{error}" + (f"; last error of a rollout: {last}" if last else "")) from error


@asynccontextmanager
async def build_orchestrator(
    config: OrchestratorConfig, environments: Mapping[str, Environment]
) -> AsyncIterator[Orchestrator]:
    """All parts, connected and running: servers ready, state resumed, versions relayed, groups being generated."""
    import anyio

    from prime_rl.orchestrator.checkpoint import CheckpointStore
    from prime_rl.orchestrator.engines import build_engines, prepare_engines
    from prime_rl.orchestrator.rollout_manager import GroupGenerator, build_rollouts
    from prime_rl.orchestrator.weight_relay import WeightRelay
    from prime_rl.transport.batches import FilesystemBatchSender
    from prime_rl.utils.client import build_clients
    from prime_rl.utils.monitor import build_monitor

    out = Path(config.output_dir)
    checkpoints = CheckpointStore(out / "checkpoints", config.ckpt, config.max_steps)
    version, state = checkpoints.load()
    checkpoints.claim_batches(out / "rollouts", version)
    clients = build_clients(config.client)
    generator = GroupGenerator(config, environments, clients, lambda: relay.version)
    rollouts = build_rollouts(config, environments, generator)
    monitor = build_monitor(out, "orchestrator", config.wandb)
    engines = build_engines(config.client)
    sender = FilesystemBatchSender(out / "rollouts")
    relay = WeightRelay(
        out / "weights",
        engines,
        version=version,
        on_live=rollouts.release,
        is_received=sender.is_received,
        timeout_s=config.weights_timeout,
        log_timeline=monitor.log_timeline,
    )
    parts = Orchestrator(config, generator, rollouts, relay, sender, checkpoints, monitor)
    if state is not None:
        parts.load_state(state)
    async with AsyncExitStack() as stack:
        stack.callback(monitor.finish)
        for client in clients:
            stack.push_async_callback(client.close)
        await prepare_engines(config, clients, engines, version)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(relay.run)
        await stack.enter_async_context(rollouts)
        yield parts


def orchestrate(config: OrchestratorConfig) -> int:
    """The command, after its arguments are read."""
    import anyio
    from loguru import logger

    from prime_rl.orchestrator.engines import ensure_open_files
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.vf import load_environments

    setup_logger("orchestrator", config.log, Path(config.output_dir) / "logs")
    if config.rollouts_per_example == 1 and config.advantage is not None and config.advantage.baseline != "none":
        logger.warning("rollouts_per_example = 1 leaves nothing to compare: every advantage is 0")
    ensure_open_files(config)
    environments = load_environments(config.env)
    anyio.run(run_orchestrator, config, environments)
    logger.success(f"Finished after {config.max_steps} batches")
    return 0


def main() -> None:
    """Console script `orchestrator`."""
    run_command(
        "orchestrator",
        OrchestratorConfig,
        orchestrate,
        summary="Generate and score rollouts with an inference server, send batches to the trainer, relay its weights.",
    )


if __name__ == "__main__":
    main()
