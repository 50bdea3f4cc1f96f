"""Validation loss on held-out conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.trainer.config import SFTConfig
from rollouts.training.rl_losses import nll_loss
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from prime_rl.trainer.session import TrainerBase


def is_val_due(step: int, config: SFTConfig) -> bool:
    """Whether to evaluate the held-out samples after this step."""
    return config.val is not None and (step % config.val.interval == 0 or step == config.max_steps)


def run_validation(session: TrainerBase, config: SFTConfig, samples: Sequence[Sample], step: int) -> None:
    """Log `val_loss/{mean,std,min,max}` per token and `val_entropy/...` after `step` (0: before the first)."""
    share = session.pack(samples, config.data.seq_len)
    start = time.time()
    stats = session.backend.evaluate(share.micros, nll_loss)
    end = time.time()
    session.monitor.log_timeline("validation", start, end, step)
    metrics = {f"val_{name}": value for name, value in stats.summary().items()}
    metrics |= {"val/samples": len(samples), "val/tokens": sum(sum(s.loss_mask[1:]) for s in samples)}
    metrics["time/validation"] = end - start
    session.monitor.log(metrics, step)
    logger.info(f"Step {step} | Val. Loss: {metrics['val_loss/mean']:.4f} over {len(samples)} held-out samples")
