"""`trainer`: waits for a batch of samples, steps the policy on it, publishes the next version.

orchestrator --> receive --> pack --> forward_backward --> optim_step --> publish --> weight relay
                    ^                                                        |
                    +---------------------- next step -----------------------+
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.pydantic_config import run_command

if TYPE_CHECKING:
    from prime_rl.trainer.session import Session

CKPT_PARTS = ("trainer", "orchestrator")


def train(config: TrainConfig) -> int:
    """Run the trainer until `max_steps`; returns the exit code."""
    from prime_rl.trainer.rl.data import build_batches, check_batch
    from prime_rl.trainer.rl.loss import build_loss, build_spec
    from prime_rl.trainer.session import build_session
    from rollouts.training.batching import pack_samples

    session = build_session(config, "trainer", ckpt_parts=CKPT_PARTS[: 1 if config.data.fake else 2])
    backend, watch = session.backend, session.watch
    vocab_size = backend.model.config.vocab_size
    batches = build_batches(config, vocab_size)
    loss, teacher_tau = build_loss(config.loss), build_spec(config.loss).teacher_tau
    claim_weights(session, config)

    for step in session.steps():
        with watch("wait_for_batch"):
            samples = batches.receive(step, config.data.timeout_s)  # waits for: the orchestrator
        with watch("load_data"):
            check_batch(samples, teacher_tau, vocab_size)
            [micros] = pack_samples(
                samples, config.model.seq_len, rows=config.micro_bs, quadratic_cost=backend.quadratic_cost
            )
        with watch("forward_backward"):
            stats = backend.forward_backward(micros, loss)
            report = backend.optim_step(stats)
        with watch("broadcast_weights"):
            publish_version(session, config, step)  # unblocks: the weight relay
        session.finish_step(report, stats, micros, progress={})
    return session.close()


def publish_version(session: Session, config: TrainConfig, step: int) -> None:
    """Publish `weights/step_N` and drop versions that no engine can need any more."""
    from prime_rl.transport.weights import prune_weights

    session.publish_weights(step)
    interval = config.ckpt.interval if config.ckpt else None
    prune_weights(session.weights_dir, step, config.max_async_level, interval, config.max_steps)


def claim_weights(session: Session, config: TrainConfig) -> None:
    """Make sure that engines find no version of another run.

    A resumed run takes back the versions after its checkpoint and publishes the one it continues from, because engines
    start from it. For a new run see `Session.claim_weights`.
    """
    from rollouts.training.steps import complete_steps, prune_steps

    root, step = session.weights_dir, session.first_step - 1
    found = complete_steps(root)
    if config.ckpt is not None and config.ckpt.resume_step is not None:
        prune_steps(root, [s for s in found if s <= step])
        if step:
            publish_version(session, config, step)
    else:
        session.claim_weights(trying_out=config.data.fake is not None)


def main() -> None:
    """The `trainer` command."""
    run_command("trainer", TrainConfig, train, summary="Train a policy on the batches an orchestrator publishes.")


if __name__ == "__main__":
    main()
