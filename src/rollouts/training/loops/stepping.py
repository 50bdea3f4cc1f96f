"""One training step of a backend, on one rank or several; shared by the SFT and RL loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

from rollouts.training.types import RLTrainingConfig, SFTTrainingConfig, TrainingBackend, settle

T = TypeVar("T")
Row = dict[str, float]


def steps_of(backend: TrainingBackend, config: SFTTrainingConfig | RLTrainingConfig) -> range:
    """The next `num_steps` step numbers of the backend."""
    first = getattr(backend, "current_step", 0) + 1
    return range(first, first + config.num_steps)


def rank_of(backend: TrainingBackend) -> tuple[int, int]:
    """Rank and number of ranks of a backend; (0, 1) without these attributes."""
    return getattr(backend, "rank", 0), getattr(backend, "world_size", 1)


def state_of(backend: TrainingBackend) -> dict[str, Any]:
    """The backend's `data_state` for data positions; a temporary dict if it has none."""
    state: dict[str, Any] = getattr(backend, "data_state", {})
    return state


def continues_checkpoint(backend: TrainingBackend, *, is_new_run: bool = True) -> bool:
    """Whether no run has begun since `load_checkpoint`; `is_new_run` for a backend without this attribute."""
    return bool(getattr(backend, "is_restored", is_new_run))


def begin_run(backend: TrainingBackend) -> None:
    """Record that a run has taken up the restored data position, so that the next one does not."""
    own: Any = backend
    if hasattr(own, "is_restored"):
        own.is_restored = False


def check_batch_size(backend: TrainingBackend, num_samples: int) -> None:
    """Raise `ValueError` unless every rank has as many samples."""
    size = rank_of(backend)[1]
    if num_samples % size:
        raise ValueError(f"a batch of {num_samples} samples does not divide over {size} ranks: change batch_size")


async def run_step(
    backend: TrainingBackend,
    items: Sequence[T],
    collate: Callable[[Sequence[T]], dict[str, Any]],
    micro_batch_size: int | None,
) -> Row:
    """Gradient of all items (each rank takes every `world_size`-th) and one optimizer step."""
    rank, size = rank_of(backend)
    check_batch_size(backend, len(items))
    share = items[rank::size]
    width = micro_batch_size or len(share)
    parts = [share[i : i + width] for i in range(0, len(share), width)]
    batches = [collate(part) for part in parts]  # all first: a part that is refused must leave no gradient of others
    forward = [backend.forward_backward(batch) for batch in batches]
    optim = backend.optim_step()
    rows = [await settle(future) for future in forward]
    # What `optim_step` reports takes precedence: the backend may weight the parts itself.
    return {**merge_rows(rows, [len(part) for part in parts]), **await settle(optim)}


def merge_rows(rows: Sequence[Row], sizes: Sequence[int]) -> Row:
    """Metrics of all parts of a batch: means weighted by their `sizes`, extremes of metrics named `/max` and `/min`.

    Counts become means, too. The gradient norm is that of the last part, because gradients accumulate; so is a value
    that is no number.
    """
    merged: Row = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [(row[name], size) for row, size in zip(rows, sizes, strict=True) if name in row]
        if name == "grad_norm" or not all(isinstance(value, Real) for value, _ in values):
            merged[name] = values[-1][0]
        elif name.endswith(("/max", "/min")):
            merged[name] = (max if name.endswith("/max") else min)(value for value, _ in values)
        else:
            merged[name] = sum(value * size for value, size in values) / sum(size for _, size in values)
    return merged


def is_due(step: int, every: int, steps: range) -> bool:
    """Every `every`-th step, and the last."""
    return step % every == 0 or step == steps[-1]
