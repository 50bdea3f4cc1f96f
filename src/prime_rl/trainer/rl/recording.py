"""The trainer's own log-prob of every token, kept for those who look at rollouts: where does the engine differ?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.monitor import TRAINER_LOGPROBS_FILE
from rollouts.training.batching import MicroBatch
from rollouts.training.metrics import append_jsonl
from rollouts.training.rl_losses import LossInputs, LossOutput, PolicyLoss
from rollouts.training.types import Sample


class RecordingLoss:
    """A loss that remembers the log-probs it was given, one entry per micro-batch with loss."""

    def __init__(self, loss: PolicyLoss) -> None:
        self.loss = loss
        self._seen: list[Tensor] = []

    @property
    def mean_over(self) -> str:
        """That of the loss."""
        return self.loss.mean_over

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss itself."""
        self._seen.append(inputs.trainer_logprobs.detach())
        return self.loss(inputs)

    def write(self, output_dir: Path, step: int, samples: Sequence[Sample], micros: Sequence[MicroBatch]) -> None:
        """Append a line per sample of this rank to `trainer_logprobs.jsonl`."""
        head = {"step": step, "timestamp": time.time(), "process": "trainer"}
        rows = recorded_rows(samples, micros, [logprobs.tolist() for logprobs in self._seen])
        append_jsonl(output_dir / TRAINER_LOGPROBS_FILE, ({**head, **row} for row in rows))


@contextmanager
def record_when_due(
    loss: PolicyLoss,
    config: TrainConfig,
    step: int,
    samples: Sequence[Sample],
    micros: Sequence[MicroBatch],
    *,
    speaks: bool = True,
) -> Iterator[PolicyLoss | RecordingLoss]:
    """The loss of a step; of every `record_logprobs`-th step one whose log-probs are written when the step is done, by
    the rank that `speaks` for those that train the same micro-batches."""
    if config.record_logprobs is None or step % config.record_logprobs or not speaks:
        yield loss
        return
    recording = RecordingLoss(loss)
    yield recording
    recording.write(config.output_dir, step, samples, micros)


def recorded_rows(
    samples: Sequence[Sample], micros: Sequence[MicroBatch], logprobs: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """`group_index`, `index` and `trainer_logprobs` of each sample: one number per token, 0 where no loss is.

    `logprobs` has one list for each micro-batch with loss: those of its loss tokens, in order.
    """
    measured = [micro for micro in micros if micro.loss_count]
    for micro, of_loss_tokens in zip(measured, logprobs, strict=True):
        values = iter(of_loss_tokens)
        for sample in (samples[number] for number in micro.sample_ids):
            # Nothing predicts the first token.
            own = [next(values) if t and mask else 0.0 for t, mask in enumerate(sample.loss_mask)]
            yield {"group_index": sample.group_index, "index": sample.index, "trainer_logprobs": own}
        assert next(values, None) is None, "more log-probs than loss tokens"
