"""`micro_bs = "auto"`: rows of a micro-batch that fit into the memory, from one measured forward pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from loguru import logger
from torch import Tensor, nn

from prime_rl.runtime.machine import SHARED_GPU_VARIABLE, find_available_memory
from prime_rl.trainer.activations import observe_stored
from prime_rl.trainer.config import MAX_AUTO_TOKENS
from prime_rl.trainer.models.moe import pop_expert_load
from prime_rl.trainer.sharded_checkpoint import local_part
from rollouts.training.backends.ranks import is_shard
from rollouts.training.batching import MicroBatch

if TYPE_CHECKING:
    from prime_rl.trainer.backend import Backend

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the free memory used for activations; on a CPU the engine of the same run takes memory later."""

OVERHEAD = 1.5
"""Peak memory of forward and backward in units of the stored activations: gradients of activations, temporaries."""

SHARED_GPU_PART = 0.625
"""Part of the free memory of a GPU that counts as free where an engine will take memory later."""

STATE_BYTES = 12
"""Gradient and two moments of a trained parameter in float32, allocated in the first step."""


def choose_num_rows(row_bytes: float, free_bytes: float, seq_len: int, kind: str, num_threads: int = 1) -> int:
    """Rows of `seq_len` tokens in a micro-batch: the largest power of two within `MAX_AUTO_TOKENS` and the memory.

    `row_bytes` are the stored activations of one row; each of `num_threads` threads computes one micro-batch at a time.
    At least 1, for which the memory may not suffice.
    """
    share = MEMORY_SHARE[kind] * max(free_bytes, 0.0) / num_threads
    limit = min(share / (OVERHEAD * row_bytes), MAX_AUTO_TOKENS[kind] / seq_len)
    return 1 << max(int(limit).bit_length() - 1, 0)


def measure_num_rows(backend: Backend, seq_len: int) -> int:
    """The rows for `micro_bs = "auto"`, the same on all ranks (collective); `ValueError` with a pipeline."""
    if backend.pipeline is not None:
        raise ValueError('micro_bs "auto" is not supported with parallel.pp: give a number of rows')
    row_bytes = measure_row_bytes(backend, seq_len)
    device = backend.placement.device
    own = [local_part(tensor) for tensor in backend.parameters.values()]
    state_bytes = STATE_BYTES * sum(part.numel() for part in own if part.device.type == device.type)
    free_bytes = find_free_bytes(device) / count_local_ranks(device)
    rows = choose_num_rows(row_bytes, free_bytes - state_bytes, seq_len, device.type, backend.num_threads)
    rows = min(int(data) for data in backend.ranks.gather_bytes(str(rows).encode()))
    logger.info(
        f"micro_bs auto: {rows} rows of {seq_len} tokens; the activations of a row take {row_bytes / 2**20:,.0f} MiB, "
        f"{free_bytes / 2**30:.1f} GiB of memory are free"
    )
    return rows


def measure_row_bytes(backend: Backend, seq_len: int) -> int:
    """Bytes that the forward pass of one full row stores on the device, parameters excluded; changes no state."""
    stored: dict[int, int] = {}

    def count(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in stored and address not in find_parameters(backend.model):
            stored[address] = storage.nbytes()

    row, sums = build_row(seq_len, backend.model.max_positions), list[Tensor]()
    device = backend.placement.device
    unchanged_rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with unchanged_rng, observe_stored(count):
        backend.run_micros([row], lambda _, inputs: _keep(sums, inputs.trainer_logprobs), train=False)
    backend.reshard()
    pop_expert_load(backend.model)
    return sum(stored.values())


def find_parameters(model: nn.Module) -> set[int]:
    """Addresses of the parameters; with several ranks of those that are gathered now, in other memory than shards."""
    return {p.untyped_storage().data_ptr() for p in model.parameters() if not is_shard(p)}


def _keep(sums: list[Tensor], logprobs: Tensor) -> Tensor:
    """Hold the graph of a forward pass, so that no stored tensor is freed and its address used again."""
    sums.append(logprobs.sum())
    return sums[-1]


def build_row(seq_len: int, max_positions: int | None) -> MicroBatch:
    """A row without text that has a loss on every token: one sequence, or several if positions are limited."""
    longest = min(seq_len, max_positions or seq_len)
    lengths = [min(longest, seq_len - start) for start in range(0, seq_len, longest)]
    return MicroBatch(
        input_ids=[0] * seq_len,
        positions=[position % longest for position in range(seq_len)],
        labels=[0] * seq_len,
        loss_mask=[1.0] * seq_len,
        advantages=[0.0] * seq_len,
        inference_logprobs=[0.0] * seq_len,
        temperature=[1.0] * seq_len,
        teacher_logprobs=None,
        lengths=lengths,
        sample_ids=list(range(len(lengths))),
    )


def find_free_bytes(device: torch.device) -> float:
    """Free memory of a GPU, or of this machine."""
    if device.type != "cuda":
        return find_available_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    part = SHARED_GPU_PART if SHARED_GPU_VARIABLE in os.environ else 1.0
    return part * (torch.cuda.mem_get_info(device)[0] + cached)


def count_local_ranks(device: torch.device) -> int:
    """Ranks that share the memory of a device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
