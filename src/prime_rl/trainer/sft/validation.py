"""Validation loss on held-out conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loguru import logger

from prime_rl.runtime.run_dir import Attempts
from prime_rl.trainer.sft.config import SFTValConfig
from rollouts.training.metrics import load_jsonl
from rollouts.training.rl_losses import nll_loss
from rollouts.training.steps import is_due
from rollouts.training.types import Sample

if TYPE_CHECKING:
    from prime_rl.trainer.run import TrainerRun


def is_val_due(step: int, val: SFTValConfig | None, max_steps: int | None) -> bool:
    """Whether to evaluate the held-out samples after this step."""
    return val is not None and is_due(step, val.interval, max_steps)


def is_val_missing(run: TrainerRun, step: int) -> bool:
    """Whether the step that the run resumes from has no validation: the run was killed after its checkpoint."""

    def find() -> bytes:
        out = run.publisher.run
        attempt = Attempts(out.root, "sft").find(step)
        rows = (row for row in load_jsonl(out.metrics) if row.get("process") == "sft" and row.get("step") == step)
        return b"" if any(row.get("attempt", 0) == attempt and "val_loss/mean" in row for row in rows) else b"1"

    ranks = run.backend.ranks
    return bool(ranks.broadcast(find() if ranks.rank == 0 else b""))


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
