"""`trainer`: waits for a batch of samples, steps the policy on it, publishes the next version.

orchestrator --> receive --> pack --> forward_backward --> optim_step --> publish --> weight relay
                    ^                                                        |
                    +---------------------- next step -----------------------+
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from prime_rl.trainer.command import count_missing_ranks, run_trainer

if TYPE_CHECKING:
    from prime_rl.trainer.config import TrainConfig
    from prime_rl.trainer.session import Session

CKPT_PARTS = ("trainer", "orchestrator")
MAX_FAREWELL_S = 3600.0


def train(config: TrainConfig) -> int:
    """Run the trainer until `max_steps`; returns the exit code. Starts the ranks that `parallel` asks for."""
    if num_ranks := count_missing_ranks(config.parallel, os.environ):
        from prime_rl.trainer.launch import run_ranks

        return run_ranks("prime_rl.trainer.rl.train", "trainer", config, num_ranks)
    from prime_rl.trainer.profiling import run_bench

    if config.bench:
        return run_bench(config, train)
    from prime_rl.trainer.rl.data import apply_anchors, build_batches, check_batch
    from prime_rl.trainer.rl.loss import LossSchedule, build_loss
    from prime_rl.trainer.rl.recording import record_when_due
    from prime_rl.trainer.session import build_session
    from prime_rl.utils.sentinels import StepSentinels
    from rollouts.training.rl_losses import credit_samples

    session = build_session(config, "trainer", ckpt_parts=CKPT_PARTS[: 1 if config.data.fake else 2])
    backend, watch = session.backend, session.watch
    vocab_size = backend.model.config.vocab_size
    batches = build_batches(config, vocab_size)
    loss = build_loss(config.loss, config.model.seq_len)
    schedule = LossSchedule(loss, config.loss, session.progress.get("teacher_distance", 0.0))
    open_broadcaster(session, config)
    claim_weights(session, config)
    sentinels = StepSentinels(config.max_async_level, adapter=config.model.lora is not None)

    for step in session.steps():
        with watch("wait_for_batch"):
            samples = batches.receive(step, config.data.timeout_s)  # waits for: the orchestrator
        with watch("load_data"):
            check_batch(samples, config.loss, vocab_size)
            of_step, told = schedule.at(step, samples)
            samples = credit_samples(apply_anchors(samples), of_step.objective)
            share = session.pack(samples, config.model.seq_len)
        due = record_when_due(of_step, config, step, samples, share.micros, speaks=backend.mesh.speaks)
        with watch("forward_backward"), due as watched:
            stats = backend.forward_backward(share.micros, watched)
            report = backend.optim_step(stats)
        with watch("broadcast_weights"):
            publish_version(session, config, step)  # unblocks: the weight relay
        metrics = session.finish_step(report, stats, share, schedule.progress, told)
        if session.ranks.rank == 0:
            sentinels.look(step, metrics, samples)
    return session.close()


def open_broadcaster(session: Session, config: TrainConfig) -> None:
    """Let engines receive versions from this process, where the configuration says so."""
    from prime_rl.transport.broadcast import Broadcaster

    wire = config.weight_broadcast
    if wire.type == "filesystem":
        return
    device = session.backend.placement.device
    max_held = config.max_async_level + 2  # as many as there are files otherwise
    session.broadcaster = Broadcaster(wire.type, wire.host, wire.port, wire.timeout, device, max_held=max_held)
    session.farewell_s = 0 if config.data.fake else MAX_FAREWELL_S
    session.ranks.run_first(session.broadcaster.open)


def publish_version(session: Session, config: TrainConfig, step: int) -> None:
    """Publish `weights/step_N` and drop versions that no engine can need any more."""
    from prime_rl.transport.weights import prune_weights

    interval = config.ckpt.interval if config.ckpt else None
    level = config.max_async_level
    session.publish_weights(step, keep=step == config.max_steps or (interval is not None and step % interval == 0))
    for root in (session.weights_dir, session.broadcasts_dir, session.average_dir):
        session.ranks.run_first(partial(prune_weights, root, step, level, interval, config.max_steps))


def claim_weights(session: Session, config: TrainConfig) -> None:
    """Make sure that engines find no version of another run.

    A resumed run takes back the versions after its checkpoint and publishes the one it continues from, because engines
    start from it. For a new run see `Session.claim_weights`.
    """
    from rollouts.training.steps import prune_steps

    root, step = session.weights_dir, session.first_step - 1
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        session.ranks.run_first(lambda: prune_steps(root, lambda found: found <= step))
        session.ranks.run_first(lambda: prune_steps(session.average_dir, lambda found: found <= step))
        session.ranks.run_first(lambda: prune_steps(session.broadcasts_dir, lambda found: False))  # nobody offers them
        if step:
            publish_version(session, config, step)
    else:
        session.claim_weights(trying_out=config.data.fake is not None)


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
