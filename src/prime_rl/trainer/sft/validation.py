"""Validation loss on held-out conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.trainer.config import SFTValConfig
from rollouts.training.rl_losses import nll_loss
from rollouts.training.steps import is_due
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from prime_rl.trainer.run import TrainerRun


def is_val_due(step: int, val: SFTValConfig | None, max_steps: int | None) -> bool:
    """Whether to evaluate the held-out samples after this step."""
    return val is not None and is_due(step, val.interval, max_steps)


def run_validation(run: TrainerRun, seq_len: int, samples: Sequence[Sample], step: int) -> None:
    """Log `val_loss/{mean,std,min,max}` per token and `val_entropy/...` after `step` (0: before the first)."""
    share = run.pack(samples, seq_len)
    start = time.time()
    stats = run.backend.evaluate(share.micros, nll_loss)
    end = time.time()
    run.step_logger.monitor.log_timeline("validation", start, end, step)
    metrics = {f"val_{name}": value for name, value in stats.summary().items()}
    metrics |= {"val/samples": len(samples), "val/tokens": sum(sum(s.loss_mask[1:]) for s in samples)}
    metrics["time/validation"] = end - start
    run.step_logger.monitor.log(metrics, step)
    logger.info(f"Step {step} | Val. Loss: {metrics['val_loss/mean']:.4f} over {len(samples)} held-out samples")
