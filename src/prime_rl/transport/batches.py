"""Batch transport from orchestrator to trainer: one published message of samples per step."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

import anyio.to_thread
import msgspec

from prime_rl.transport.file_watch import wait_for_blocking
from rollouts.training.steps import is_complete, prune_steps, publish_step, step_path
from rollouts.training.types import Sample

SCHEMA = 3
BATCH_FILE = "batch.msgpack"
RECEIVED = "RECEIVED"
LATE = "if it is still generating, raise data.timeout_s"
"""Cure of a batch that does not arrive in time."""


class _Envelope(msgspec.Struct):
    """Decoded first, so that another schema version is rejected before its samples are parsed."""

    schema: int
    step: int
    samples: msgspec.Raw


def encode_batch(step: int, samples: list[Sample]) -> bytes:
    """Encode a msgpack map `{"schema", "step", "samples"}`; samples are maps too, so fields may be added anywhere."""
    return msgspec.msgpack.encode({"schema": SCHEMA, "step": step, "samples": samples})


def decode_batch(data: bytes) -> tuple[int, list[Sample]]:
    """The inverse of `encode_batch`; raises `ValueError` for another schema or for invalid bytes."""
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of samples: {error}") from error
    if envelope.schema != SCHEMA:
        raise ValueError(
            f"batch of step {envelope.step} has schema {envelope.schema}, this version reads schema {SCHEMA}: "
            "run orchestrator and trainer from the same version"
        )
    try:
        return envelope.step, msgspec.msgpack.decode(envelope.samples, type=list[Sample])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"batch of step {envelope.step} has a malformed sample: {error}") from error


class BatchSender(Protocol):
    """The orchestrator's end of the transport."""

    def open(self) -> None:
        """Start serving; call after stale batches of an interrupted run have been removed."""

    async def publish(self, step: int, samples: list[Sample]) -> None:
        """Publish the batch that trains version `step - 1` into version `step`."""

    def is_received(self, step: int) -> bool:
        """Whether a trainer reads the batches: it has requested that of `step`, and was given it."""

    def prune(self, step: int) -> None:
        """Remove batches up to `step`."""

    def close(self) -> None:
        """Release resources."""


class BatchReceiver(Protocol):
    """The trainer's end of the transport; every rank may have one."""

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """Block until the samples of `step` are published; raises `TimeoutError` after `timeout_s`."""

    def close(self) -> None:
        """Release resources."""


class FilesystemBatchSender:
    """Publishes batches as `root/step_N/batch.msgpack`; a reader sees a whole step or none."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def open(self) -> None:
        """No-op."""

    async def publish(self, step: int, samples: list[Sample]) -> None:
        """Run `send` in a thread."""
        await anyio.to_thread.run_sync(self.send, step, samples)

    def send(self, step: int, samples: list[Sample]) -> None:
        """Publish the batch that trains version `step - 1` into version `step`."""
        data = encode_batch(step, samples)
        publish_step(self.root, step, lambda directory: (directory / BATCH_FILE).write_bytes(data))

    def prune(self, step: int) -> None:
        """Remove batches up to `step`."""
        prune_steps(self.root, lambda other: other > step)

    def close(self) -> None:
        """No-op."""

    def is_received(self, step: int) -> bool:
        """Whether a receiver has read the batch of `step`."""
        return (step_path(self.root, step) / RECEIVED).exists()


class FilesystemBatchReceiver:
    """Waits for batches below `root` by file notifications; marks received ones with a file."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """Block until the samples of `step` are published; raises `TimeoutError` after `timeout_s`."""
        path = step_path(self.root, step)
        data = wait_for_blocking(
            lambda: read_batch(path),
            self.root,
            timeout_s=timeout_s,
            what=f"the batch of step {step} from the orchestrator; {LATE}",
        )
        batch_step, samples = decode_batch(data)
        if batch_step != step:
            raise ValueError(f"{path / BATCH_FILE} contains the batch of step {batch_step}, not of step {step}")
        with contextlib.suppress(FileNotFoundError):
            (path / RECEIVED).touch()
        return samples

    def close(self) -> None:
        """No-op."""


def read_batch(path: Path) -> bytes | None:
    """The bytes of a published batch; None if there is none, or if it is removed concurrently."""
    try:
        return (path / BATCH_FILE).read_bytes() if is_complete(path) else None
    except FileNotFoundError:
        return None
