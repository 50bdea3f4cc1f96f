"""Prompts on a GPU: FlashAttention with kernels that copy pages, in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prime_rl.inference.embedded import attention, model_runner, scheduler
from prime_rl.inference.embedded.attention import FlashPrefill, list_ends, list_positions
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights
from prime_rl.trainer.models.decoder_config import DecoderConfig

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None = None,
    key_ends: Tensor | None = None, longest_key: int | None = None,
) -> Tensor:  # fmt: skip
    """`flash_attention` by its definition: queries are the last tokens of a sequence."""
    key_ends = ends if key_ends is None else key_ends
    assert window is None and longest == int(ends.diff().max())
    assert longest_key in (None, int(key_ends.diff().max()))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs = []
    for i in range(len(ends) - 1):
        queries = q[ends[i] : ends[i + 1]]
        keys, values = (x[key_ends[i] : key_ends[i + 1]] for x in (k, v))
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        parts = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def run(requests: list[GenerationRequest], has_pages: bool, num_layers: int, **options: Any) -> list[Output]:
    """Outputs of an engine with shared pages, as for the decode kernels, or with slots."""
    model = CausalLM(DecoderConfig.from_hf(CONFIG | {"num_hidden_layers": num_layers})).requires_grad_(False)
    init_weights(model, 0)
    recorder = SimpleNamespace(warm_up=lambda step: step(), record=lambda step: step)
    engine = EmbeddedEngine(model, exact=False, recorder=None if has_pages else recorder, **options)
    if engine._blocks.is_contiguous == has_pages:
        pytest.skip("no CPU kernels; cure: a C compiler")
    outputs: dict[GenerationRequest, Output] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[request] for request in requests]


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize(("budget", "num_layers"), [(64, 1), (2048, 2)])
def test_flash_prefill_equals_gathered_attention(
    budget: int, num_layers: int, has_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one or several chunks, alone and together, some with a shared prefix."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton; cure: make test-extras")
    from rollouts.kernels import gpu

    draw = torch.Generator().manual_seed(0)
    shared = torch.randint(97, (BLOCK + 2,), generator=draw).tolist()
    prompts = [*(torch.randint(97, (n,), generator=draw).tolist() for n in (1, 30)), shared, [*shared, 5, 6]]
    requests = [GenerationRequest(p, SamplingParams(max_tokens=3, seed=i)) for i, p in enumerate(prompts)]
    expected = run(requests, has_pages, num_layers, max_num_batched_tokens=budget)
    built: list[bool] = []

    def build(decoder: Any, cache: Any, metadata: Any) -> FlashPrefill:
        built.append(bool(metadata.starts.any()))
        return FlashPrefill(cache, metadata, gpu)

    monkeypatch.setattr(scheduler, "MAX_CHUNK_ROWS", 0)
    monkeypatch.setattr(attention, "flash_attention", attend)
    monkeypatch.setattr(model_runner, "build_gathered", build)
    found = run(requests, has_pages, num_layers, max_num_batched_tokens=budget)
    assert False in built and (True in built or budget > 64)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-5)


def test_positions_and_ends_of_chunks() -> None:
    chunk, positions = list_positions(np.array([0, 5]), np.array([3, 2]))
    assert chunk.tolist() == [0, 0, 0, 1, 1] and positions.tolist() == [0, 1, 2, 5, 6]
    assert list_ends(np.array([3, 2]), torch.device("cpu")).tolist() == [0, 3, 5]
