"""Prefix deduplication: identical log-probs, same gradient, fewer rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import LossConfig, TrainConfig
from prime_rl.trainer.forward import can_dedup_prefixes
from prime_rl.trainer.models.prefix_dedup import find_shared_prefixes
from prime_rl.trainer.rl.loss import build_loss
from rollouts.training.batching import pack_samples
from rollouts.training.types import Sample


def make_backend(directory: Path, **model: Any) -> Backend:
    settings = {"name": "tiny-qwen3", "seq_len": 96, "debug": {"random_init": True}} | model
    return build_backend(TrainConfig.model_validate({"model": settings, "output_dir": directory}))


def make_groups(prompt: int = 40) -> list[Sample]:
    """Groups with a common prompt and common completion prefixes, and one unrelated sample."""
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(0, 300, (n,), generator=draw).tolist()

    samples = []
    for size in (5, 3, 1):
        given, begin = tokens(prompt), tokens(4)
        for i in range(size):
            answer = begin + tokens(6 + 3 * i)
            n = len(given) + len(answer)
            samples.append(
                Sample(
                    prompt="",
                    tokens=given + answer,
                    loss_mask=[0.0] * len(given) + [1.0] * len(answer),
                    advantages=[0.5 + i] * n,
                    inference_logprobs=[-5.0] * n,
                )
            )
    return samples


def logprobs(backend: Backend, samples: list[Sample]) -> torch.Tensor:
    [micros] = pack_samples(samples, 1024)
    with torch.no_grad():
        return torch.cat([backend._compute(backend._prepare(micro)).trainer_logprobs for micro in micros])


def gradient(backend: Backend, samples: list[Sample]) -> list[torch.Tensor]:
    [micros] = pack_samples(samples, 1024)
    backend.forward_backward(micros, build_loss(LossConfig(type="aipo", entropy_coef=0.1), 96))
    grads = [p.grad.clone() for p in backend.parameters.values() if p.grad is not None]
    backend.stepper.optimizer.zero_grad()
    return grads


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=9, max_size=60))
def test_tokens_map_to_their_unique_prefix(sequences: list[list[int]]) -> None:
    ids = [token for sequence in sequences for token in sequence]
    lengths = [len(sequence) for sequence in sequences]
    pasts = [tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))]
    num = len(set(pasts))
    shared = find_shared_prefixes(ids, lengths)
    assert (shared is not None) == (64 <= num <= 0.9 * len(ids))
    if shared is not None:
        assert len(shared.first) == num
        assert [pasts[i] for i in shared.first[shared.place].tolist()] == pasts


@pytest.mark.parametrize("attn", ["exact", "sdpa"])
def test_dedup_is_bit_identical_in_exact_mode(tmp_path: Path, attn: str) -> None:
    samples = make_groups()
    backend = make_backend(tmp_path, attn=attn)
    shared = logprobs(backend, samples)
    backend.shares_prefixes = False
    whole = logprobs(backend, samples)
    assert torch.equal(shared, whole) if attn == "exact" else torch.allclose(shared, whole, atol=1e-5)


@pytest.mark.parametrize("attn", ["exact", "sdpa"])
def test_dedup_gradient_matches_full_pack(tmp_path: Path, attn: str) -> None:
    samples = make_groups()
    backend = make_backend(tmp_path, attn=attn)
    shared = gradient(backend, samples)
    backend.shares_prefixes = False
    for ours, whole in zip(shared, gradient(backend, samples), strict=True):
        assert (ours - whole).norm() <= 2e-6 * whole.norm()


def test_shared_prefixes_are_computed_once(tmp_path: Path) -> None:
    backend, samples = make_backend(tmp_path), make_groups()
    [[micro]] = pack_samples(samples, 1024)
    layout = backend._prepare(micro)
    alone = sum(len(sample.tokens) for sample in samples)
    assert len(micro.input_ids) == alone
    assert len(layout.pack.input_ids) == alone - (4 + 2) * (40 + 4)


def test_flash_attention_is_not_deduplicated(tmp_path: Path) -> None:
    backend = make_backend(tmp_path)
    assert can_dedup_prefixes(backend.model, backend.placement, backend.mesh)
    assert not can_dedup_prefixes(backend.model, replace(backend.placement, attn="flash"), backend.mesh)
    object.__setattr__(backend.model, "mixes_tokens_only_in_attend", False)
    assert not can_dedup_prefixes(backend.model, backend.placement, backend.mesh)
