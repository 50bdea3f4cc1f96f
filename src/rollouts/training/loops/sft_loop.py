"""SFT training loop in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.loops.stepping import (
    Row,
    begin_run,
    check_batch_size,
    continues_checkpoint,
    is_due,
    rank_of,
    run_step,
    state_of,
    steps_of,
)
from rollouts.training.metrics import MetricsLogger
from rollouts.training.types import Sample, SFTTrainingConfig, TrainingBackend

if TYPE_CHECKING:
    from torch import Tensor


async def run_sft_training(
    backend: TrainingBackend,
    samples: Sequence[Sample],
    config: SFTTrainingConfig,
    metrics_logger: MetricsLogger | None = None,
) -> list[Row]:
    """Take `config.num_steps` steps; returns the metrics of each: `loss`, `grad_norm`, `lr`, `step`.

        samples --> batch --> forward_backward --> optim_step --> log, checkpoint
           ^                                                          |
           +------------------------ next step -----------------------+

    The first epoch is in the given order, later ones are shuffled. A backend restored from a checkpoint continues after
    the last trained sample; `ValueError` if the samples have changed. So does a second run on the same samples; one on
    others is a new stage.
    """
    check_batch_size(backend, config.batch_size)
    for index, sample in enumerate(samples):
        try:
            sample.validate()
        except (TypeError, ValueError) as error:
            raise type(error)(f"samples[{index}]: {error}") from error
    buffer = DataBuffer([sample.tokens for sample in samples])
    state = state_of(backend).get("sft")
    if state is not None and (continues_checkpoint(backend) or state.get("fingerprint") == buffer.fingerprint):
        buffer.load_state(state)
    begin_run(backend)
    rows: list[Row] = []
    steps = steps_of(backend, config)
    for step in steps:
        batch = next_samples(buffer, samples, config.batch_size)
        row = await run_step(backend, batch, prepare_sft_batch, config.micro_batch_size)
        rows.append(row)
        if metrics_logger is not None and is_due(step, config.log_every, steps) and rank_of(backend)[0] == 0:
            metrics_logger.log(row, step)
        if is_due(step, config.checkpoint_every, steps):
            state_of(backend)["sft"] = buffer.save_state()
            await backend.save_checkpoint(step, row)
    return rows


def next_samples(buffer: DataBuffer, samples: Sequence[Sample], num_samples: int) -> list[Sample]:
    """The samples of the next batch; advances the buffer."""
    start = buffer.position
    buffer.get_prompts(num_samples)
    return [samples[buffer.index_at(position)] for position in range(start, start + num_samples)]


def prepare_sft_batch(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Padded `input_ids`, shifted `labels`, `loss_mask` and further streams, see `batching.pad_samples`.

    Tokens are learned as they are, whatever temperature and filters they were sampled with.
    """
    from rollouts.training.batching import pad_samples

    return pad_samples([structs.replace(sample, temperature=1.0, sampling_support=b"") for sample in samples])
