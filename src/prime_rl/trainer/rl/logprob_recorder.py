"""Records the trainer log-probs of every token, to compare them with the engine's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from prime_rl.runtime.run_dir import Attempts
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.monitor import TRAINER_LOGPROBS_FILE
from rollouts.training.batching import MicroBatch
from rollouts.training.metrics import append_jsonl
from rollouts.training.rl_losses import LossInputs, LossOutput, PolicyLoss
from rollouts.training.types import Sample


class RecordingLoss:
    """A loss that records its trainer log-probs, one entry per micro-batch with loss."""

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss
        self._recorded: list[Tensor] = []

    @property
    def mean_over(self) -> str:
        """Aggregation unit of the loss."""
        return self.loss.mean_over

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Record the log-probs and compute the loss."""
        self._recorded.append(inputs.trainer_logprobs.detach())
        return self.loss(inputs)

    def write(self, output_dir: Path, step: int, samples: Sequence[Sample], micros: Sequence[MicroBatch]) -> None:
        """Append one line per sample of this rank to `trainer_logprobs.jsonl`."""
        attempt = Attempts(output_dir, "trainer").find(step)
        head = {"step": step, "timestamp": time.time(), "process": "trainer", "attempt": attempt}
        rows = recorded_rows(samples, micros, [logprobs.tolist() for logprobs in self._recorded])
        append_jsonl(output_dir / TRAINER_LOGPROBS_FILE, ({**head, **row} for row in rows))


@contextmanager
def record_when_due(
    loss: PolicyLoss,
    config: TrainConfig,
    step: int,
    samples: Sequence[Sample],
    micros: Sequence[MicroBatch],
    *,
    is_reporting_rank: bool = True,
) -> Iterator[PolicyLoss | RecordingLoss]:
    """Yield the loss of a step; every `logprob_dump_interval` steps, a recording loss whose log-probs are written by
    the reporting rank at the end of the step."""
    if config.logprob_dump_interval is None or step % config.logprob_dump_interval or not is_reporting_rank:
        yield loss
        return
    recorder = RecordingLoss(loss)
    yield recorder
    recorder.write(config.output_dir, step, samples, micros)


def recorded_rows(
    samples: Sequence[Sample], micros: Sequence[MicroBatch], logprobs: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """`group_index`, `index` and `trainer_logprobs` of each sample: one value per token, 0 without loss.

    `logprobs` has one list per micro-batch with loss: the values of its loss tokens, in order.
    """
    with_loss = [micro for micro in micros if micro.loss_count]
    for micro, of_loss_tokens in zip(with_loss, logprobs, strict=True):
        values = iter(of_loss_tokens)
        for sample in (samples[number] for number in micro.sample_ids):
            # The first token has no log-prob.
            per_token = [next(values) if t and mask else 0.0 for t, mask in enumerate(sample.loss_mask)]
            yield {"group_index": sample.group_index, "index": sample.index, "trainer_logprobs": per_token}
        assert next(values, None) is None, "more log-probs than loss tokens"
