"""A decode step with shared keys and values: the same bits as with a copy per row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from prime_rl.inference.embedded.attention import decode_metadata
from prime_rl.inference.embedded.fused_decode import FusedDecode
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, count_slots
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")

SHAPE = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_shared_columns_do_not_change_bits(threads: int, dtype: torch.dtype, head_dim: int) -> None:
    config = DecoderConfig.from_hf({**SHAPE, "head_dim": head_dim})
    torch.manual_seed(0)
    model = CausalLM(config).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    decoder = PreparedDecoder(model, True, dtype)
    assert decoder.fused is not None
    # Groups of 5 rows with two columns in common, 1, 4 of which two share one and two share two, 3 that share nothing.
    shared = np.array([0, 2, 2, 2, 2, 0, 0, 1, 2, 2, 0, 0, 0], dtype=np.int64)
    positions = 2 * BLOCK + np.arange(len(shared), dtype=np.int64) * 17 % BLOCK
    positions[6] = 3 * BLOCK - 1
    cache = KVCache(config, dtype, torch.device("cpu"), len(shared), 10**6)
    assert cache.reserve(count_slots(positions + 1), int(positions.max()) + 1)
    for column in cache.blocks:
        column.normal_()
    for slot, j in itertools.product(range(1, len(shared)), range(2)):
        if shared[slot] > j:
            cache.blocks[j][:, :, slot] = cache.blocks[j][:, :, slot - 1]
    tokens = torch.arange(len(shared)) * 5
    alone = FusedDecode(decoder.fused, cache, decode_metadata(positions, np.zeros_like(shared)))(tokens, positions)
    for slot, j in itertools.product(range(1, len(shared)), range(2)):
        if shared[slot] > j:
            cache.blocks[j][:, :, slot] = torch.nan  # never read
    metadata = decode_metadata(positions, shared)
    assert metadata.num_shared_blocks > 0
    backend = FusedDecode(decoder.fused, cache, metadata)
    for _ in range(2):
        assert torch.equal(backend(tokens, positions), alone)
