"""`trainer`: receives batches of samples, trains the policy and publishes new versions.

orchestrator --> receive --> pack --> forward_backward, optim_step --> publish --> weight relay
                    ^                 (per minibatch and epoch)       |
                    +------------------- next step -------------------+
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from prime_rl.trainer.command import count_missing_ranks, run_trainer

if TYPE_CHECKING:
    from prime_rl.trainer.config import TrainConfig


def train(config: TrainConfig, *, keeps_output: bool = True) -> int:
    """Run the trainer until `max_steps`; returns the exit code. Launches the ranks configured in `parallel`.

    `keeps_output`: whether the output directory remains, see `run_bench`.
    """
    if num_ranks := count_missing_ranks(config.parallel, os.environ):
        from prime_rl.trainer.launch import run_ranks

        return run_ranks("prime_rl.trainer.rl.train", "trainer", config, num_ranks)
    from prime_rl.trainer.profiling import run_bench

    if config.bench:
        return run_bench(config, train)
    from prime_rl.runtime.core_lease import open_core_lease
    from prime_rl.telemetry.health_checks import TrainerHealthChecks
    from prime_rl.trainer.checkpointer import read_resume_state
    from prime_rl.trainer.rl.data import apply_reference_regularization, build_batches, check_batch
    from prime_rl.trainer.rl.logprob_recorder import LogprobRecorder
    from prime_rl.trainer.rl.loss import build_loss_schedule
    from prime_rl.trainer.rl.off_policy import MeasuredLoss
    from prime_rl.trainer.rl.updates import pack_minibatches, run_updates, split_batch
    from prime_rl.trainer.run import build_run, start_backend
    from rollouts.training.rl_losses import compute_sequence_kl_advantages

    config.loss.import_custom()  # fails before the model is loaded
    backend = start_backend(config, "trainer")
    config, _, resumed_step = read_resume_state(config, "trainer", backend.ranks)
    run = build_run(config, "trainer", backend, resumed_step)
    timer, cores = run.timer, open_core_lease()
    vocab_size = backend.model.config.vocab_size
    batches = build_batches(config, vocab_size, backend.model.max_positions)
    schedule = build_loss_schedule(config.loss, config.model.seq_len, run.progress, config.env_loss)
    interval = config.logprob_dump_interval if backend.mesh.is_reporting_rank else None
    recorder = LogprobRecorder(config.output_dir, interval)
    if run.first_step > 1:
        run.publisher.publish(run.first_step - 1)  # the engines start from it
    health_checks = TrainerHealthChecks(config.max_async_level, adapter=config.model.lora is not None)

    for step in run.steps():
        with timer("wait_for_batch"), cores.leave():
            samples = batches.receive(step, config.data.timeout_s)  # waits for: the orchestrator
        with timer("load_data"):
            check_batch(samples, config.loss, vocab_size, config.env_loss)
            step_loss, loss_metrics = schedule.loss_for_step(step, samples)
            samples = compute_sequence_kl_advantages(apply_reference_regularization(samples), step_loss.objective)
            parts = split_batch(samples, config.num_minibatches, f"{config.seed}:{step}")
            has_gradient = step_loss.has_gradient if config.skip_zero_advantage else lambda sample: True
            minibatches, share = pack_minibatches(
                samples, parts, lambda part: run.pack(part, config.model.seq_len), has_gradient
            )
        with timer("forward_backward"), recorder.record(step_loss, step, samples) as recorded_loss:
            first_loss = MeasuredLoss(recorded_loss, samples, step)
            report, stats = run_updates(
                backend,
                minibatches,
                step_loss,
                config.num_epochs,
                first_loss,
                run.publisher.wait,
                critic=config.critic,
                step=step,
            )
        with timer("broadcast_weights"):
            texts = [sample.tokens for sample in samples]
            # At level 0 the next batch is generated with this version, so an error of writing it must be raised now.
            run.publisher.publish(step, texts, background=config.max_async_level > 0)  # unblocks: the weight relay
        loss_metrics |= schedule.observe_entropy(stats)
        updates = {"optim/num_updates": float(len(parts) * config.num_epochs)}
        share = replace(share, passes=config.num_epochs)
        metrics = run.finish_step(report, stats, share, schedule.progress, updates | loss_metrics)
        if backend.ranks.rank == 0:
            health_checks.check(step, metrics, samples)
    return run.close(keeps_output=keeps_output)


def main() -> None:
    """The `trainer` command."""
    run_trainer(
        "trainer",
        "prime_rl.trainer.config:TrainConfig",
        train,
        summary="Train a policy on the batches an orchestrator publishes.",
    )


if __name__ == "__main__":
    main()
