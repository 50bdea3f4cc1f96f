"""Freed tensors leave their memory to the next ones."""

from __future__ import annotations

import resource

import torch

from prime_rl.trainer.model import keep_freed_memory

NUM_BYTES = 64 << 20  # glibc maps blocks above 32 MiB one by one, unless it is told otherwise


def test_freed_tensors_are_reused_without_page_faults() -> None:
    keep_freed_memory()
    torch.ones(NUM_BYTES // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(NUM_BYTES // 4)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < NUM_BYTES / resource.getpagesize(), "ten tensors fault in fewer pages than one of them has"
