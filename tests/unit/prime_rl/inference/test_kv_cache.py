"""KV cache: memory of short sequences."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prime_rl.inference.embedded import kv_cache
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import load_hf_config

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="needs /proc")
def test_short_sequences_use_memory_of_their_positions() -> None:
    config = DecoderConfig.from_hf(load_hf_config(resolve_model_dir("tiny-qwen3")))
    config = replace(config, num_hidden_layers=4, num_key_value_heads=4, head_dim=64)
    cache = KVCache(config, torch.float32, torch.device("cpu"), max_slots=256, max_tokens=2**16)
    before = resident_bytes()
    for slots in (16, 64, 256):  # two reallocations, which copy what is in use
        assert cache.reserve([slots], 16)
        cache.blocks[0][:, :, slots // 4 : slots, :, :16] = slots
    used = 2 * 4 * 256 * 4 * 16 * 64 * 4  # an eighth of the block
    assert resident_bytes() - before < 2 * used
    held = cache.blocks[0][0, 0, :, 0, 0, 0]
    assert held[4:].tolist() == [16] * 12 + [64] * 48 + [256] * 192
    assert not cache.blocks[0][:, :, :, :, 16:].any()


def build_cache(max_slots: int, max_tokens: int) -> KVCache:
    config = DecoderConfig.from_hf(load_hf_config(resolve_model_dir("tiny-qwen3")))
    return KVCache(config, torch.float32, torch.device("cpu"), max_slots, max_tokens)


def test_blocks_grow_by_less_near_the_limit() -> None:
    cache = build_cache(max_slots=1000, max_tokens=200 * BLOCK)
    assert cache.reserve([60], 1) and cache.num_pages == [120]
    assert cache.reserve([125], 1) and cache.num_pages == [187]
    assert cache.reserve([190], 1) and cache.num_pages == [190]
    assert not cache.reserve([201], 1) and cache.num_pages == [190]
    assert cache.reserve([150, 45], BLOCK + 1) and cache.num_pages == [150, 45], "unused pages are freed"
    assert cache.reserve([150, 55], BLOCK + 1, required=True) and cache.num_pages == [150, 55]


def test_a_full_gpu_moves_blocks_through_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which half of the blocks does not fit twice: contents stay, and what is allocated always fits."""
    cache = build_cache(max_slots=1000, max_tokens=120 * BLOCK)
    allocate, room, peak = kv_cache.zeros, 130, 0

    def allocate_if_it_fits(shape: tuple[int, ...], *arguments: object, **options: object) -> Tensor:
        nonlocal peak
        if sum(cache.num_pages) + shape[2] > room:
            raise torch.OutOfMemoryError
        peak = max(peak, sum(cache.num_pages) + shape[2])
        return allocate(shape, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_cache, "zeros", allocate_if_it_fits)
    assert cache.reserve([30, 20], 2 * BLOCK)
    values = [torch.randn_like(block) for block in cache.blocks]
    for block, value in zip(cache.blocks, values, strict=True):
        block.copy_(value)
    assert cache.reserve([70, 45], BLOCK + 3)
    assert peak <= room and cache.num_pages == [70, 45]
    assert torch.equal(cache.blocks[0][:, :, :60], values[0])
    assert torch.equal(cache.blocks[1][:, :, :40, :, :3], values[1][..., :3, :])
    assert not cache.blocks[0][:, :, 60:].any() and not cache.blocks[1][:, :, 40:].any()
