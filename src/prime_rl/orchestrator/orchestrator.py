"""The orchestrator's loop: groups from the engines, advantages, batches to the trainer, versions back to the engines.

prompts -> GroupGenerator -> AsyncRolloutManager -> advantages -> rollouts/step_N -> (trainer)
              ^ engine            ^ slots                                              |
              +---- update -------+---- free ------- WeightRelay <---- weights/step_N -+
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prime_rl.orchestrator.config import OrchestratorConfig
    from prime_rl.orchestrator.parts import Orchestrator
    from rollouts.training.environments import Environment
    from rollouts.training.types import Sample


async def run_steps(parts: Orchestrator) -> None:
    """Send `max_steps` batches; return when the last one's version is live and evaluated."""
    from prime_rl.orchestrator.metrics import assign_advantages, drop_overlong
    from prime_rl.orchestrator.report import Reporter
    from prime_rl.orchestrator.rewards import shape_rewards

    config, reporter, done = parts.config, Reporter(parts), time.time()
    penalty, max_tokens = config.length_penalty, config.sampling.max_tokens
    shape = partial(shape_rewards, config=penalty, seq_len=config.seq_len, max_tokens=max_tokens)
    for step in parts.steps:
        start = done
        samples = await next_batch(parts)  # waits for: the engines, and the trainer for slots
        generated = time.time()
        assign_advantages(samples, config.advantage, shape)
        kept = drop_overlong(samples, config.seq_len)
        if not kept:
            raise ValueError(f"step {step}: all samples are longer than seq_len = {config.seq_len}: raise it")
        parts.count(samples)
        # Before the batch goes out: a trainer that got as far as checkpoint N then never lacks our half of it.
        parts.checkpoints.save(step, parts.state)
        saved = time.time()
        parts.relay.sent(step)  # first: the answer may be quicker than our return from the next line
        await parts.sender.publish(step, kept)  # unblocks: the trainer
        done = time.time()
        parts.monitor.log_timeline("generate", start, generated, step)
        times = {"step": done - start, "generate_completions": generated - start, "save_ckpt": saved - generated}
        reporter.report(step, samples, len(kept), times)
    await parts.relay.wait_version(parts.rollouts.step_count)
    with parts.reminder.waiting(lambda waited: f"waiting for {parts.evaluations.under_way} since {waited:.0f} s"):
        await parts.evaluations.wait()


async def next_batch(parts: Orchestrator) -> list[Sample]:
    """The next batch's samples. When nothing can be generated any more, the error says why with the last failure."""
    from rollouts.training.rollout_gen.async_rollout_manager import RolloutStarvedError

    def describe(waited: float) -> str | None:
        rollouts = parts.rollouts
        if not rollouts.num_running:
            return None  # it is the trainer that is waited for: the relay says so
        return (
            f"waiting for the inference server since {waited:.0f} s: {rollouts.num_running} groups are under way, "
            f"{rollouts.groups.num_ready} are ready, a batch takes {parts.config.num_groups}"
        )

    try:
        with parts.reminder.waiting(describe):
            return (await parts.rollouts.generate_batch()).samples
    except RolloutStarvedError as error:
        last = parts.generator.last_error
        # What prompts and settings do to every rollout is for the user to change; an engine that fails is not.
        kind = RuntimeError if "engine failed" in error.reasons else ValueError
        raise kind(f"{error}" + (f"; last error of a rollout: {last}" if last else "")) from error


async def run_orchestrator(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment] | None = None,
) -> None:
    """The whole run, against the servers that the configuration names."""
    from prime_rl.orchestrator.parts import build_orchestrator
    from prime_rl.utils.collector import calm_collector

    async with build_orchestrator(config, environments, eval_environments or {}) as parts:
        with calm_collector():
            await run_steps(parts)


def orchestrate(config: OrchestratorConfig) -> int:
    """The command, after its arguments are read."""
    import anyio
    from loguru import logger

    from prime_rl.orchestrator.buffer import load_curriculum
    from prime_rl.orchestrator.checkpoint import CheckpointStore
    from prime_rl.orchestrator.filters import build_judge
    from prime_rl.orchestrator.teacher import build_teacher
    from prime_rl.utils.http import ensure_open_files
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.vf import open_environments

    if config.teacher_model is not None and config.teacher_model.inspect_context is not None:
        from prime_rl.orchestrator.inspection import inspect_contexts

        sys.stdout.write(inspect_contexts(config, config.teacher_model.inspect_context))
        return 0
    # What cannot work is refused before environments and servers are waited for.
    CheckpointStore(config.output_dir / "checkpoints", config.ckpt, config.max_steps).load()
    build_judge(config.buffer)
    build_teacher(config)
    load_curriculum(config.buffer.curriculum)
    setup_logger("orchestrator", config.log, Path(config.output_dir) / "logs")
    if config.rollouts_per_example == 1 and config.advantage is not None and config.advantage.baseline != "none":
        logger.warning("rollouts_per_example = 1 leaves nothing to compare: every advantage is 0")
    in_flight = (config.max_async_level + 1) * config.batch_size
    if advice := ensure_open_files(min(in_flight, config.max_concurrent or in_flight)):
        logger.warning(advice)
    with (
        open_environments(config.env, score=not config.buffer.skip_verification) as environments,
        open_environments(config.eval.env if config.eval is not None else []) as eval_environments,
    ):
        anyio.run(run_orchestrator, config, environments, eval_environments)
    logger.success(f"Finished after {config.max_steps} batches")
    return 0


def main() -> None:
    """Console script `orchestrator`."""
    run_command(
        "orchestrator",
        "prime_rl.orchestrator.config:OrchestratorConfig",
        orchestrate,
        summary="Generate and score rollouts with an inference server, send batches to the trainer, relay its weights.",
        record=True,
    )


if __name__ == "__main__":
    main()
