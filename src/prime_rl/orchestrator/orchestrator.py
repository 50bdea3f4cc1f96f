"""The orchestrator's main loop: generate groups, compute advantages, send batches, relay weights.

prompts -> GroupGenerator -> AsyncRolloutManager -> advantages -> rollouts/step_N -> (trainer)
              ^ engine            ^ slots                                              |
              +---- update -------+---- free ------- WeightRelay <---- weights/step_N -+
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from prime_rl.configuration.command import run_command
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prime_rl.orchestrator.config import OrchestratorConfig
    from prime_rl.orchestrator.setup import Orchestrator
    from rollouts.training.environments import Environment
    from rollouts.training.types import Sample


async def run_steps(orchestrator: Orchestrator) -> None:
    """Send `max_steps` batches; return once the last version is live and evaluated."""
    from prime_rl.orchestrator.metrics import drop_overlong
    from prime_rl.orchestrator.report import Reporter
    from rollouts.training.rollout_gen.groups import DropReason

    relay, reporter, done = orchestrator.relay, Reporter(orchestrator), time.time()
    for step in orchestrator.steps:
        start = done
        samples = await next_batch(orchestrator)  # blocks on the inference servers, and on the trainer for free slots
        generated = time.time()
        orchestrator.assign_advantages(samples)
        kept = drop_overlong(samples, orchestrator.seq_len)
        dropped = [sample for sample in samples if len(sample.tokens) > orchestrator.seq_len]
        orchestrator.rollouts.tokens.drop_from_batch(step, dropped, DropReason.OVERLONG)
        if not kept:
            raise ValueError(f"step {step}: all samples are longer than seq_len = {orchestrator.seq_len}: raise it")
        orchestrator.count(samples)
        # Saved before the batch is sent, so that checkpoint N of the trainer always has its orchestrator half.
        orchestrator.checkpoints.save(step, orchestrator.state)
        saved = time.time()
        relay.mark_sent(step)  # before publishing: the version may arrive before `publish` returns
        await orchestrator.sender.publish(step, kept)  # unblocks the trainer
        done = time.time()
        orchestrator.monitor.log_timeline("generate", start, generated, step)
        times = {"step": done - start, "generate_completions": generated - start, "save_ckpt": saved - generated}
        reporter.report(step, samples, len(kept), times)
    await relay.wait_for_version(orchestrator.rollouts.step_count)
    evaluations = orchestrator.evaluations
    with orchestrator.wait_logger.waiting(lambda waited: f"Waiting for {evaluations.in_progress} ({waited:.0f} s)"):
        await evaluations.wait()
    reporter.finish()


async def next_batch(orchestrator: Orchestrator) -> list[Sample]:
    """Samples of the next batch. If no group can be generated, raise with the drop counts and the last error."""
    from rollouts.training.rollout_gen.async_rollout_manager import NoTrainableGroupsError
    from rollouts.training.rollout_gen.groups import DropReason

    rollouts = orchestrator.rollouts

    def describe(waited: float) -> str | None:
        if not rollouts.num_running:
            return None  # waiting for the trainer, which the relay logs
        return (
            f"Waiting for the inference server ({waited:.0f} s): groups running={rollouts.num_running} "
            f"ready={rollouts.groups.num_ready} needed={rollouts.config.batch_size}"
        )

    try:
        with orchestrator.wait_logger.waiting(describe):
            return (await rollouts.generate_batch()).samples
    except NoTrainableGroupsError as error:
        last = orchestrator.generator.last_error
        # Prompts and settings are input errors that the user can fix; failures of servers are not.
        kind = RuntimeError if DropReason.ENGINE_ERROR in error.reasons else ValueError
        raise kind(f"{error}" + (f"; last error of a rollout: {last}" if last else "")) from error


async def run_orchestrator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment] | None = None,
) -> None:
    """Run all steps against the configured servers."""
    from prime_rl.orchestrator.setup import open_orchestrator
    from prime_rl.runtime.garbage_collection import relaxed_gc

    async with open_orchestrator(config, environments, eval_environments or {}) as orchestrator:
        with relaxed_gc():
            await run_steps(orchestrator)


def orchestrate(config: OrchestratorConfig) -> int:
    """Entry point after argument parsing; returns the exit code."""
    import anyio
    from loguru import logger

    from prime_rl.client.http import ensure_open_files
    from prime_rl.orchestrator.buffer import load_curriculum
    from prime_rl.orchestrator.checkpoint import CheckpointStore
    from prime_rl.orchestrator.distillation.teacher import build_teacher
    from prime_rl.orchestrator.evaluation import max_concurrent_rollouts
    from prime_rl.orchestrator.filters import build_group_filter
    from prime_rl.orchestrator.rollout_manager import count_slots
    from prime_rl.runtime.interrupts import cancel_on_signals
    from prime_rl.telemetry.trackers import check_trackers
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.vf import open_environments

    if config.teacher_model is not None and config.teacher_model.inspect_context is not None:
        from prime_rl.orchestrator.distillation.inspect_contexts import inspect_contexts

        sys.stdout.write(inspect_contexts(config, config.teacher_model.inspect_context))
        return 0
    # Validate before waiting for environments and servers.
    check_trackers(config)
    checkpoints = CheckpointStore(RunDir(config.output_dir), config.ckpt, config.max_steps)
    resumed_step, _ = checkpoints.load()
    build_group_filter(config.buffer)
    build_teacher(config)
    load_curriculum(config.buffer.curriculum)
    setup_logger("orchestrator", config.log, RunDir(config.output_dir).logs)
    if config.rollouts_per_example == 1 and config.has_group_baseline:
        logger.warning("rollouts_per_example = 1 has no group baseline: every advantage is 0")
    in_flight = count_slots(config) * config.rollouts_per_example
    in_flight = min(in_flight, config.max_concurrent or in_flight) + max_concurrent_rollouts(config)
    if advice := ensure_open_files(in_flight):
        logger.warning(advice)
    # Before environments load: a trainer that is ready earlier would read batches of the interrupted attempt.
    checkpoints.claim_batches(resumed_step)
    with (
        open_environments(config.env, score=not config.buffer.skip_verification) as environments,
        open_environments(config.eval_envs) as eval_environments,
        cancel_on_signals(),
    ):
        anyio.run(run_orchestrator, config, environments, eval_environments)
    logger.success(f"Finished after {config.max_steps} batches")
    return 0


def find_lock(config: OrchestratorConfig) -> str | None:
    """The part of the output directory that this command writes; None if it only prints contexts."""
    only_prints = config.teacher_model is not None and config.teacher_model.inspect_context is not None
    return None if only_prints else "orchestrator"


def main() -> None:
    """Console script `orchestrator`."""
    run_command(
        "orchestrator",
        "prime_rl.orchestrator.config:OrchestratorConfig",
        orchestrate,
        summary="Generate and score rollouts with an inference server, send batches to the trainer, relay its weights.",
        record=lambda config: config,
        locks=find_lock,
    )


if __name__ == "__main__":
    main()
