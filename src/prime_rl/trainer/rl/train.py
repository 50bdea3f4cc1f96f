"""`trainer`: receives batches of samples, trains the policy and publishes new versions.

orchestrator --> receive --> pack --> forward_backward --> optim_step --> publish --> weight relay
                    ^                                                        |
                    +---------------------- next step -----------------------+
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from prime_rl.runtime.run_dir import CKPT_PARTS
from prime_rl.trainer.command import count_missing_ranks, run_trainer

if TYPE_CHECKING:
    from prime_rl.trainer.config import TrainConfig
    from prime_rl.trainer.session import TrainerBase

MAX_SHUTDOWN_WAIT_S = 3600.0


def train(config: TrainConfig) -> int:
    """Run the trainer until `max_steps`; returns the exit code. Launches the ranks configured in `parallel`."""
    if num_ranks := count_missing_ranks(config.parallel, os.environ):
        from prime_rl.trainer.launch import run_ranks

        return run_ranks("prime_rl.trainer.rl.train", "trainer", config, num_ranks)
    from prime_rl.trainer.profiling import run_bench

    if config.bench:
        return run_bench(config, train)
    from prime_rl.telemetry.health_checks import TrainerHealthChecks
    from prime_rl.trainer.rl.data import apply_reference_regularization, build_batches, check_batch
    from prime_rl.trainer.rl.logprob_recorder import record_when_due
    from prime_rl.trainer.rl.loss import LossSchedule, build_loss
    from prime_rl.trainer.session import build_session
    from rollouts.training.rl_losses import compute_sequence_kl_advantages

    is_fake = config.data.fake is not None
    session = build_session(config, "trainer", ckpt_parts=CKPT_PARTS[: 1 if is_fake else 2], is_fake_data=is_fake)
    backend, timer = session.backend, session.timer
    vocab_size = backend.model.config.vocab_size
    batches = build_batches(config, vocab_size)
    loss = build_loss(config.loss, config.model.seq_len)
    schedule = LossSchedule(loss, config.loss, session.progress.get("teacher_distance", 0.0))
    open_broadcaster(session, config)
    publish_start(session, config)
    health_checks = TrainerHealthChecks(config.max_async_level, adapter=config.model.lora is not None)

    for step in session.steps():
        with timer("wait_for_batch"):
            samples = batches.receive(step, config.data.timeout_s)  # waits for: the orchestrator
        with timer("load_data"):
            check_batch(samples, config.loss, vocab_size)
            step_loss, loss_metrics = schedule.loss_for_step(step, samples)
            samples = compute_sequence_kl_advantages(apply_reference_regularization(samples), step_loss.objective)
            share = session.pack(samples, config.model.seq_len)
        recording = record_when_due(
            step_loss, config, step, samples, share.micros, is_reporting_rank=backend.mesh.is_reporting_rank
        )
        with timer("forward_backward"), recording as recorded_loss:
            stats = backend.forward_backward(share.micros, recorded_loss)
            report = backend.optim_step(stats)
        with timer("broadcast_weights"):
            texts = [sample.tokens for sample in samples]
            publish_version(session, config, step, texts)  # unblocks: the weight relay
        metrics = session.finish_step(report, stats, share, schedule.progress, loss_metrics)
        if session.ranks.rank == 0:
            health_checks.check(step, metrics, samples)
    return session.close()


def open_broadcaster(session: TrainerBase, config: TrainConfig) -> None:
    """Start sending weights to the engines from this process, if configured."""
    from prime_rl.transport.broadcast import WeightSender

    target = config.weight_broadcast
    if target.type == "filesystem":
        return
    device = session.backend.placement.device
    max_versions = config.max_async_level + 2  # same number of versions as on disk with file transport
    session.broadcaster = WeightSender(
        target.type, target.host, target.port, target.timeout, device, max_versions=max_versions
    )
    session.shutdown_timeout_s = 0 if config.data.fake else MAX_SHUTDOWN_WAIT_S
    session.ranks.run_on_rank0(session.broadcaster.open)


def publish_version(session: TrainerBase, config: TrainConfig, step: int, texts: Sequence[Sequence[int]] = ()) -> None:
    """Publish `weights/step_N`, with a canary on tokens of `texts`, and prune versions that no engine needs."""
    from prime_rl.transport.weights import prune_weights

    interval = config.ckpt.interval if config.ckpt else None
    level = config.max_async_level
    keep = step == config.max_steps or (interval is not None and step % interval == 0)
    session.publish_weights(step, keep=keep, texts=texts)
    start = session.first_step - 1
    for root in (session.weights_dir, session.broadcasts_dir, session.average_dir):
        session.ranks.run_on_rank0(partial(prune_weights, root, step, level, interval, config.max_steps, start))


def publish_start(session: TrainerBase, config: TrainConfig) -> None:
    """Publish the version that a resumed run starts from, for the engines."""
    from rollouts.training.steps import prune_steps

    if config.ckpt is None or config.ckpt.resume_step is None:
        return
    session.ranks.run_on_rank0(lambda: prune_steps(session.broadcasts_dir, lambda version: False))  # no longer offered
    if step := session.first_step - 1:
        publish_version(session, config, step)


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
