"""Records the trainer log-probs of every token, to compare them with the engine's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from prime_rl.runtime.run_dir import Attempts, RunDir
from prime_rl.trainer.backend import WrappedLoss
from rollouts.training.metrics import append_jsonl
from rollouts.training.rl_losses import LossInputs, LossOutput, PolicyLoss
from rollouts.training.types import Sample


@dataclass(frozen=True)
class RecordingLoss(WrappedLoss):
    """A loss that records its trainer log-probs by `sample_ids` of the micro-batch."""

    recorded: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Record the log-probs and compute the loss."""
        self.recorded[inputs.sample_ids] = inputs.trainer_logprobs.detach()
        return self.loss(inputs)

    def write(self, output_dir: Path, step: int, samples: Sequence[Sample]) -> None:
        """Append one line per sample of this rank to `trainer_logprobs.jsonl`."""
        attempt = Attempts(output_dir, "trainer").find(step)
        head = {"step": step, "timestamp": time.time(), "process": "trainer", "attempt": attempt}
        rows = recorded_rows(samples, {ids: logprobs.tolist() for ids, logprobs in self.recorded.items()})
        append_jsonl(RunDir(output_dir).trainer_logprobs, ({**head, **row} for row in rows))


@dataclass(frozen=True)
class LogprobRecorder:
    """Records every `interval`-th step on the reporting rank; None: never."""

    output_dir: Path
    interval: int | None

    @contextmanager
    def record(self, loss: PolicyLoss, step: int, samples: Sequence[Sample]) -> Iterator[PolicyLoss | RecordingLoss]:
        """Yield the loss of a step; when due, a recording loss whose log-probs are written at the end of the step."""
        if self.interval is None or step % self.interval:
            yield loss
            return
        recorder = RecordingLoss(loss)
        yield recorder
        recorder.write(self.output_dir, step, samples)


def recorded_rows(
    samples: Sequence[Sample], recorded: Mapping[tuple[int, ...], Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """`group_index`, `index` and `trainer_logprobs` of each sample: one value per token, 0 without loss.

    `recorded` has the values of the loss tokens of each micro-batch, in order, by its `sample_ids`.
    """
    for ids, of_loss_tokens in recorded.items():
        values = iter(of_loss_tokens)
        for sample in (samples[number] for number in ids):
            # The first token has no log-prob.
            per_token = [next(values) if t and mask else 0.0 for t, mask in enumerate(sample.loss_mask)]
            yield {"group_index": sample.group_index, "index": sample.index, "trainer_logprobs": per_token}
        assert next(values, None) is None, "more log-probs than loss tokens"
