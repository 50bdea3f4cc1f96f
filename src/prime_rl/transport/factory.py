"""Selects the batch transport: one sender and one receiver per `transport.type`."""

from __future__ import annotations

from pathlib import Path

from prime_rl.transport.batches import (
    BatchReceiver,
    BatchSender,
    FilesystemBatchReceiver,
    FilesystemBatchSender,
)


def build_sender(kind: str, rollouts_dir: Path, host: str, port: int) -> BatchSender:
    """The orchestrator's end; call `open` before the trainer requests batches."""
    if kind == "filesystem":
        return FilesystemBatchSender(rollouts_dir)
    from prime_rl.transport.zeromq import ZmqBatchSender

    return ZmqBatchSender(rollouts_dir, host, port)


def build_receiver(kind: str, rollouts_dir: Path, host: str, port: int) -> BatchReceiver:
    """The trainer's end."""
    if kind == "filesystem":
        return FilesystemBatchReceiver(rollouts_dir)
    from prime_rl.transport.zeromq import ZmqBatchReceiver

    return ZmqBatchReceiver(host, port)
