"""Publishes model versions to the engines: as files, as deltas, or over process groups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.backend import Backend
from prime_rl.trainer.config import SFTConfig, TrainConfig, check_delta_dtype
from prime_rl.transport import weights
from prime_rl.transport.broadcast import WeightSender, announce, is_taken
from prime_rl.transport.canary import Canary
from prime_rl.transport.deltas import DeltaPublisher
from prime_rl.transport.file_watch import wait_for_blocking
from rollouts.training.steps import complete_steps, is_due, step_path

MAX_SHUTDOWN_WAIT_S = 3600.0
WAIT_LOG_INTERVAL_S = 30.0
ROUND_S = 0.5
"""Length of a round in which ranks wait for files: one collective for all of the wait might time out."""


@dataclass(frozen=True)
class Retention:
    """Versions that remain on disk, see `weights.prune_weights`; `start` is the version that the run starts from."""

    max_async_level: int
    interval: int | None
    max_steps: int | None
    start: int

    def is_permanent(self, step: int) -> bool:
        """Whether the version is a file even if engines receive it from memory."""
        return is_due(step, self.interval, self.max_steps)


@dataclass
class Publisher:
    """Publishes `weights/step_N`, and the moving average as `average/step_N`; only rank 0 writes.

    `model_files` are the config and tokenizer files of the initial model, with overrides. With `sender`, engines
    receive versions from the memory of rank 0, and `close` waits up to `shutdown_timeout_s` for them to receive the
    last one; with `deltas`, they read what changed, and only some versions are complete files. `retention` None: every
    version is a file and remains. Files are written by a thread, which also computes the canary where micro-batches may
    run concurrently, so that the next forward and backward pass can run meanwhile.
    """

    run: RunDir
    backend: Backend
    model_files: weights.ModelFiles
    sender: WeightSender | None = None
    retention: Retention | None = None
    shutdown_timeout_s: float = 0.0
    deltas: DeltaPublisher | None = None
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "publish"), init=False)
    _pending: Future[None] | None = field(default=None, init=False)

    def publish(self, step: int, texts: Sequence[Sequence[int]] = (), *, background: bool = False) -> None:
        """Publish version `step` (collective), then remove versions that no engine needs.

        The canary also scores tokens of `texts`. With `background` the files are complete after `wait`, which must be
        called before the parameters change.
        """
        self.wait()
        backend, retention, deltas = self.backend, self.retention, self.deltas
        if backend.average is not None:
            with backend.average.in_place():
                average = backend.export_state_dict()

                def write_average() -> None:
                    if backend.ranks.rank == 0:
                        self._write(self.run.average, step, None, average)

                self._pending = self._writer.submit(write_average)
                self.wait()
        tensors, num_threads = backend.export_state_dict(), torch.get_num_threads()
        is_later = background and self.sender is None and backend.concurrent is not None
        canary = None if is_later else backend.compute_canary(step, texts)
        if (sender := self.sender) is not None and canary is not None:
            offered = canary
            backend.ranks.run_on_rank0(lambda: self._offer(sender, step, offered, tensors))
        is_file = (sender or deltas) is None or retention is None or retention.is_permanent(step)
        is_file |= deltas is not None and deltas.needs_anchor(step)

        def finish() -> None:
            torch.set_num_threads(num_threads)  # a new thread has the default of the libraries
            computed = canary or backend.compute_canary(step, texts)
            if backend.ranks.rank == 0:
                if is_file:
                    self._write(self.run.weights, step, computed, tensors)
                if deltas is not None:
                    deltas.publish(step, tensors, computed, is_anchor=is_file)
                self._prune(step)

        self._pending = self._writer.submit(finish)
        if not background:
            self.wait()

    def wait(self) -> None:
        """Wait until the files of the last version are complete (collective); raises the error of writing them."""
        if (pending := self._pending) is not None:
            self._pending, ranks = None, self.backend.ranks
            is_complete = False
            while not is_complete and ranks.size > 1:
                is_done = ranks.rank == 0 and bool(wait([pending], timeout=ROUND_S).done)
                is_complete = any(ranks.sum([float(is_done)]))
            ranks.run_on_rank0(pending.result)

    def close(self) -> None:
        """Wait until every engine has received the final weights, which are only in memory, and stop sending."""
        self._writer.shutdown()
        if self.sender is None or self.backend.ranks.rank:
            return
        last = step_path(self.run.broadcasts, self.backend.stepper.num_steps)
        waited = 0.0
        while last.exists() and not is_taken(last) and waited < self.shutdown_timeout_s:
            try:
                what = f"the engines to receive {last.name}"
                wait_for_blocking(lambda: is_taken(last) or None, last.parent, timeout_s=WAIT_LOG_INTERVAL_S, what=what)
            except TimeoutError as error:
                waited += WAIT_LOG_INTERVAL_S
                logger.info(f"Draining receivers: {error}")
        self.sender.close()

    def _offer(self, sender: WeightSender, step: int, canary: Canary, tensors: dict[str, Tensor]) -> None:
        root = self.run.broadcasts
        received = [version for version in complete_steps(root) if is_taken(step_path(root, version))]
        sender.forget_before(max(received, default=0))  # engines only move forward
        announce(root, sender.offer(step, tensors, self.backend.adapter_config), sender.address, canary)

    def _write(self, root: Path, step: int, canary: Canary | None, tensors: dict[str, Tensor]) -> None:
        backend = self.backend
        weights.publish_weights(
            root,
            step,
            tensors,
            self.model_files,
            num_layers=backend.num_layers,
            tie_word_embeddings=backend.model.config.tie_word_embeddings,
            adapter_config=backend.adapter_config,
            canary=canary,
        )

    def _prune(self, step: int) -> None:
        if (retention := self.retention) is None:
            return
        oldest = step - retention.max_async_level - 1  # that an engine may have to load
        if self.deltas is not None:  # it starts from the full weights before
            oldest = max((full for full in complete_steps(self.run.weights) if full <= oldest), default=0)
        for root in self.run.version_dirs:
            weights.prune_weights(
                root,
                step,
                retention.max_async_level if root == self.run.average else step - oldest - 1,
                retention.interval,
                retention.max_steps,
                retention.start,
            )


def build_publisher(
    config: TrainConfig | SFTConfig, backend: Backend, model_files: weights.ModelFiles, start: int
) -> Publisher:
    """Build the publisher of a run that starts from version `start`; in RL, start sending to engines if configured."""
    if isinstance(config, SFTConfig):
        return Publisher(RunDir(config.output_dir), backend, model_files)
    level, target, sender = config.max_async_level, config.weight_broadcast, None
    if target.delta:
        check_delta_dtype(str(backend.placement.dtype).removeprefix("torch."))
    if target.type != "filesystem":
        sender = WeightSender(
            target.type,
            target.host,
            target.port,
            target.timeout,
            backend.placement.device,
            max_versions=level + 2,  # same number of versions as on disk with file transport
        )
        backend.ranks.run_on_rank0(sender.open)
    return Publisher(
        RunDir(config.output_dir),
        backend,
        model_files,
        sender,
        Retention(level, config.ckpt.interval if config.ckpt else None, config.max_steps, start),
        0.0 if config.data.fake else MAX_SHUTDOWN_WAIT_S,
        DeltaPublisher(RunDir(config.output_dir).broadcasts, target.anchor_interval) if target.delta else None,
    )
