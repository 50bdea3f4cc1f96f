"""KV cache: memory of short sequences."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prime_rl.inference.embedded.kv_cache import KVCache
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
