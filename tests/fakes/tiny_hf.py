"""A tiny transformers model and batches for it, for tests of the library's backends and loops."""

from __future__ import annotations

import torch

from rollouts.training.batching import pad_samples
from rollouts.training.types import Sample

VOCAB = 64


def build_tiny_hf(seed: int = 0, *, tie: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A Qwen3 of two layers and some ten thousand parameters, the same for the same seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def build_samples(num: int, seed: int = 0, longest: int = 12) -> list[Sample]:
    """Samples of various lengths whose second half carries loss."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(num):
        length = int(torch.randint(4, longest + 1, (1,), generator=generator))
        tokens = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        given = length // 2
        samples.append(Sample(prompt=str(i), tokens=tokens, loss_mask=[0.0] * given + [1.0] * (length - given)))
    return samples


def build_batch(num: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    """A padded batch, with an advantage per sequence."""
    batch = pad_samples(build_samples(num, seed))
    batch["advantages"] = torch.linspace(-1, 1, num)
    return batch
