"""Synchronous rollout generation, and conversion of samples to a batch."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Event, Thread
from typing import Any

from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.types import RolloutBatch, RolloutConfig, Sample


def generate_rollout_batches(
    data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any
) -> Iterator[RolloutBatch]:
    """Endless iterator over the batches of an `AsyncRolloutManager`, generated on demand.

    `generate_fn` may be sync (runs in worker threads) or async (runs in an event loop owned by the generator);
    `rollout_kwargs` are passed to it. Raises `ValueError` immediately without a `generate_fn` and for over-sampling.
    """
    if config.over_sampling_factor > 1.0:
        raise ValueError(
            f"over_sampling_factor {config.over_sampling_factor} needs a cache between batches: use "
            "AsyncRolloutManager, or 1.0 with generate_rollout_batches"
        )
    return _generate(AsyncRolloutManager(data_buffer, config, rollout_kwargs=rollout_kwargs))


def _generate(manager: AsyncRolloutManager) -> Iterator[RolloutBatch]:
    """Use one event loop for all batches, because connections belong to a loop; no thread runs between batches.

    Hence an unclosed generator does not keep the program alive.
    """
    loop = asyncio.new_event_loop()
    try:
        while True:
            batch = _run_batch(loop, manager)
            yield convert_to_batch(batch.samples, **batch.metadata)
    finally:
        loop.close()


def _run_batch(
    loop: asyncio.AbstractEventLoop, manager: AsyncRolloutManager, reward_fn: Callable[[Sample], Any] | None = None
) -> RolloutBatch:
    """The next batch, generated in a separate thread, so that the caller may be inside an event loop."""
    tasks: list[asyncio.Task[RolloutBatch]] = []
    finished = Event()

    def work() -> None:
        # Created in this thread: the caller's context could indicate another async library (sniffio).
        tasks.append(loop.create_task(manager.generate_batch(reward_fn)))
        with suppress(BaseException):  # raised by `result`
            loop.run_until_complete(tasks[0])
        finished.set()

    try:
        Thread(target=work, daemon=True).start()
        # A signal just before waiting for a lock does not interrupt the wait, hence the timeout.
        while not finished.wait(timeout=1.0):
            pass
    except BaseException:  # the waiting thread was interrupted: return unfinished prompts
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        finished.wait()
        raise
    return tasks[0].result()


def convert_to_batch(samples: list[Sample], epoch_id: int = 0, step_id: int = 0) -> RolloutBatch:
    """A batch of `samples`, with a metadata column `sample_<key>` for every metadata key of any sample.

    Raises `ValueError` without samples and for a sample whose streams do not cover its tokens.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    for sample in samples:
        sample.validate()
    keys = list(dict.fromkeys(key for sample in samples for key in sample.metadata))
    metadata = {
        "epoch_id": epoch_id,
        "step_id": step_id,
        "batch_size": len(samples),
        "prompts": [sample.prompt for sample in samples],
        "responses": [sample.response for sample in samples],
        **{f"sample_{key}": [sample.metadata.get(key) for sample in samples] for key in keys},
    }
    return RolloutBatch.from_samples(samples, metadata)


class RolloutManager:
    """Deprecated synchronous wrapper of `AsyncRolloutManager`."""

    def __init__(self, data_buffer: DataBuffer, config: RolloutConfig, **rollout_kwargs: Any) -> None:
        warnings.warn(
            "RolloutManager is deprecated: use AsyncRolloutManager, or generate_rollout_batches",
            DeprecationWarning,
            stacklevel=2,
        )
        self._manager = AsyncRolloutManager(data_buffer, config, rollout_kwargs=rollout_kwargs)

    def generate_batch(self, reward_fn: Callable[[Sample], Any] | None = None) -> RolloutBatch:
        """See `AsyncRolloutManager.generate_batch`."""
        loop = asyncio.new_event_loop()
        try:
            return _run_batch(loop, self._manager, reward_fn)
        finally:
            loop.close()

    def state_dict(self) -> dict[str, Any]:
        """See `AsyncRolloutManager.state_dict`."""
        return self._manager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `AsyncRolloutManager.load_state_dict`."""
        self._manager.load_state_dict(state)
