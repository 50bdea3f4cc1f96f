"""`sft`: supervised fine-tuning on the assistant turns of conversations.

data set --> take --> pack --> forward_backward --> optim_step --> weights and checkpoint when due
              ^                                          |
              +--------------- next step ----------------+
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prime_rl.trainer.command import count_missing_ranks, run_trainer

if TYPE_CHECKING:
    from prime_rl.trainer.backend import Backend
    from prime_rl.trainer.config import SFTConfig


def train(config: SFTConfig, *, keeps_output: bool = True) -> int:
    """Run the trainer for `max_steps` or `num_epochs`; returns the exit code.

    Launches the ranks configured in `parallel`. `keeps_output`: whether the output directory remains, see `run_bench`.
    """
    if config.deployment.type != "local":
        from prime_rl.deployment.launch import deploy
        from prime_rl.trainer.sft.deployment import build_layout

        return deploy(*build_layout(config), config.deployment, config.output_dir)
    if "RANK" not in os.environ and not config.bench:
        from prime_rl.trainer.sft.data import check_first_rows

        check_first_rows(config)
    if num_ranks := count_missing_ranks(config.parallel, os.environ):
        from prime_rl.trainer.launch import run_ranks

        return run_ranks("prime_rl.trainer.sft.train", "sft", config, num_ranks)
    from prime_rl.trainer.profiling import run_bench

    if config.bench:
        return run_bench(config, train)
    from prime_rl.runtime.tokenizer import resolve_model_dir
    from prime_rl.trainer.checkpointer import find_first_step, read_resume_state
    from prime_rl.trainer.run import build_run, start_backend
    from prime_rl.trainer.sft.data import (
        build_sft_batches,
        build_tokenizer,
        check_positions,
        choose_date,
        find_eos_ids,
    )
    from prime_rl.trainer.sft.validation import is_val_due, is_val_missing, run_validation
    from rollouts.training.rl_losses import nll_loss

    tokenizer = build_tokenizer(config)
    backend = start_backend(config, "sft")
    config, progress, resumed_step = read_resume_state(config, "sft", backend.ranks)
    date = choose_date(progress, backend.ranks)
    batches = build_sft_batches(config, backend.model.config.vocab_size, tokenizer, date)
    check_positions(batches, backend.model.max_positions)
    position = batches.restore(progress)
    if config.num_epochs is not None:
        num_before = find_first_step(resumed_step, config.ckpt) - 1
        config = set_num_steps(config, num_before + batches.count_steps(config.num_epochs, position), backend)
    run = build_run(
        config,
        "sft",
        backend,
        resumed_step,
        tokenizer_dir=resolve_model_dir(config.tokenizer.name) if config.tokenizer.name else None,
        chat_template=tokenizer.chat_template if tokenizer and config.tokenizer.chat_template else None,
        eos_ids=find_eos_ids(tokenizer, backend.model_dir, config.tokenizer.name) if tokenizer else (),
    )
    timer = run.timer
    if start := run.first_step - 1:
        is_val_first = is_val_due(start, config.val, config.max_steps) and is_val_missing(run, start)
    else:
        is_val_first = config.val is not None and config.val.eval_on_start
    if is_val_first:
        run_validation(run, config.data.seq_len, batches.held_out, start)

    for step in run.steps():
        with timer("load_data"):
            samples, position = batches.take(position)
            share = run.pack(samples, config.data.seq_len)
        with timer("forward_backward"):
            stats = backend.forward_backward(share.micros, nll_loss)
            report = backend.optim_step(stats)
        if step == config.max_steps or run.checkpointer.is_due(step):
            with timer("broadcast_weights"):
                run.publisher.publish(step)
        state = {"position": position.state(), "date": date.isoformat()}
        run.finish_step(report, stats, share, state, batches.metrics(position))
        if is_val_due(step, config.val, config.max_steps):
            run_validation(run, config.data.seq_len, batches.held_out, step)
    return run.close(keeps_output=keeps_output)


def set_num_steps(config: SFTConfig, num_steps: int, backend: Backend) -> SFTConfig:
    """The config with the `num_steps` of its `num_epochs` as `max_steps`, for which the schedule is rebuilt."""
    from loguru import logger

    from prime_rl.trainer.optim import build_schedule
    from prime_rl.trainer.optim_config import check_schedule

    described = f"num_epochs {config.num_epochs} ({num_steps} steps)"
    logger.info(f"Training for {described} of {config.data.batch_size} rows")
    check_schedule(config.scheduler, num_steps, described)
    backend.stepper.schedule = build_schedule(config.scheduler, config.optim.lr, num_steps)
    return config.model_copy(update={"max_steps": num_steps})


def preview(config: SFTConfig) -> str | None:
    """Deployment files shown by --dry-run."""
    if config.deployment.type == "local":
        return None
    from prime_rl.deployment.launch import build_files, show_files
    from prime_rl.trainer.sft.deployment import build_layout

    return show_files(build_files(*build_layout(config), config.deployment, config.output_dir))


def main() -> None:
    """The `sft` command."""
    run_trainer(
        "sft",
        "prime_rl.trainer.config:SFTConfig",
        train,
        summary="Fine-tune a model on conversations.",
        preview=preview,
    )


if __name__ == "__main__":
    main()
