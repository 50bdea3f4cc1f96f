"""`sft`: fills batches with conversations and steps the model on what the assistant says in them.

data set --> take --> pack --> forward_backward --> optim_step --> weights and checkpoint when due
              ^                                          |
              +--------------- next step ----------------+
"""

from __future__ import annotations

from prime_rl.trainer.config import SFTConfig
from prime_rl.utils.pydantic_config import run_command


def train(config: SFTConfig) -> int:
    """Run the trainer until `max_steps`; returns the exit code."""
    from prime_rl.trainer.ckpt import is_checkpoint_due
    from prime_rl.trainer.session import build_session
    from prime_rl.trainer.sft.data import build_sft_batches, build_tokenizer, restore_position
    from prime_rl.utils.tokenizer import resolve_model_dir
    from rollouts.training.batching import pack_samples
    from rollouts.training.rl_losses import nll_loss

    tokenizer = build_tokenizer(config)
    session = build_session(
        config,
        "sft",
        tokenizer_dir=resolve_model_dir(config.tokenizer.name) if config.tokenizer.name else None,
        chat_template=tokenizer.chat_template if tokenizer and config.tokenizer.chat_template else None,
    )
    if config.ckpt is None or config.ckpt.resume_step is None:
        session.claim_weights(trying_out=config.data.type == "fake")
    backend, watch = session.backend, session.watch
    batches = build_sft_batches(config, backend.model.config.vocab_size, tokenizer)
    position = restore_position(session.progress)

    for step in session.steps():
        with watch("load_data"):
            samples, position = batches.take(position)
            [micros] = pack_samples(
                samples, config.data.seq_len, rows=config.micro_bs, quadratic_cost=backend.quadratic_cost
            )
        with watch("forward_backward"):
            stats = backend.forward_backward(micros, nll_loss)
            report = backend.optim_step(stats)
        if step == config.max_steps or is_checkpoint_due(step, config.ckpt, config.max_steps):
            with watch("broadcast_weights"):
                session.publish_weights(step)
        extra = {"progress/epoch": position.epoch, "progress/overlong_samples": position.num_overlong}
        session.finish_step(report, stats, micros, {"position": position.state()}, extra)
    return session.close()


def main() -> None:
    """The `sft` command."""
    run_command("sft", SFTConfig, train, summary="Fine-tune a model on conversations.")


if __name__ == "__main__":
    main()
