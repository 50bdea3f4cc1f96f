"""Operations on the device against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from dev.gpu.context import Context, Measured, measure_error
from torch import Tensor

from prime_rl.inference.embedded.sampler import build_sampling_batch, sample
from prime_rl.inference.engine import SamplingParams
from prime_rl.trainer.models.attention import PackedAttention, has_flash
from prime_rl.trainer.models.causal_lm import apply_rotary_emb, rms_norm, swiglu
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.moe import Experts
from rollouts.training.backends.muon import orthogonalize
from rollouts.training.rl_losses import compute_head_logprobs

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def attend_in_fp64(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of every sequence by its definition."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs = []
    for queries, keys, values in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


def differentiate(function: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """The result, and the gradients of its weighted sum by the inputs of floating type."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = function(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    return [out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), wanted)]


def compare_attention(context: Context, mode: str, dtype: str) -> Measured:
    """Attention of a pack, and its gradients."""
    if mode == "flash" and not has_flash(context.device):
        raise RuntimeError("has_flash is false: torch.nn.attention.varlen does not work here, training uses SDPA")
    lengths = [30, 5, 17, 1] if context.tiny else [300, 5, 1560, 1, 5000, 129, 4096]
    shapes = [(sum(lengths), heads, 32 if context.tiny else 128) for heads in (8, 2, 2, 8)]
    q, k, v, weight = (torch.randn(shape, device=context.device, dtype=getattr(torch, dtype)) for shape in shapes)
    attend = PackedAttention(lengths, context.device, mode)  # type: ignore[arg-type]
    found = differentiate(lambda *x: attend(0, *x), (q, k, v), weight)
    exact = [x.double() for x in (q, k, v)]
    expected = differentiate(lambda *x: attend_in_fp64(lengths, *x), exact, weight.double())
    return Measured(measure_error(found, expected))


def compare_operation(context: Context, kind: str, dtype: str) -> Measured:
    """An operation of the decoder, and its gradients, against itself in fp64."""
    rows, size = (24, 64) if context.tiny else (1000, 1024)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device).to(getattr(torch, dtype))

    if kind == "rms_norm":
        function, inputs = (lambda x, w: rms_norm(x, w, 1e-6)), [draw(rows, size), draw(size)]
    elif kind == "rotary":
        angles = torch.rand(rows, 1, 32, device=context.device).repeat(1, 1, 2)
        tables = [angles.cos().to(getattr(torch, dtype)), angles.sin().to(getattr(torch, dtype))]
        function, inputs = (lambda x: apply_rotary_emb(x, *(t.to(x.dtype) for t in tables))), [draw(rows, 4, 64)]
    elif kind == "swiglu":
        function, inputs = swiglu, [draw(rows, size), draw(rows, size)]
    elif kind == "head":
        vocab = 4 * size
        labels = torch.randint(vocab, (rows,), device=context.device)

        def function(hidden: Tensor, weight: Tensor) -> Tensor:
            temperature = torch.full((rows,), 0.7, device=context.device, dtype=torch.float32)
            # Several chunks, as for long packs.
            found = compute_head_logprobs(hidden, weight, labels, temperature, logits_per_chunk=vocab * rows // 3)
            return found[0] + found[1]

        inputs = [draw(rows, size), draw(vocab, size) * size**-0.5]
    else:
        counts = torch.tensor([10, 0, 50, 4], device=context.device)
        experts = Experts(DecoderConfig.from_hf(MOE)).to(context.device)

        def function(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return torch.func.functional_call(experts, {"gate_up_proj": gate_up, "down_proj": down}, (x, counts))

        inputs = [draw(64, 64), draw(4, 192, 64) / 8, draw(4, 64, 96) / 8]
    weight = torch.randn(function(*inputs).shape, device=context.device).to(getattr(torch, dtype))
    found = differentiate(function, inputs, weight)
    return Measured(measure_error(found, differentiate(function, [x.double() for x in inputs], weight.double())))


def compare_muon(context: Context) -> Measured:
    """Muon's orthogonalization, in bf16 on a device, of a matrix of condition number 10."""
    rows, columns = (48, 64) if context.tiny else (1024, 3072)
    u, _, v = torch.linalg.svd(
        torch.randn(rows, columns, device=context.device, dtype=torch.float64), full_matrices=False
    )
    matrix = u * torch.logspace(-1, 0, rows, device=context.device, dtype=torch.float64) @ v
    return Measured(measure_error([orthogonalize(matrix.float())], [orthogonalize(matrix)]))


def compare_sampler(context: Context) -> Measured:
    """Share of tokens sampled on the device that are those sampled on the CPU from the same logits."""
    rows, vocab = (32, 300) if context.tiny else (256, 50000)
    logits = 3 * torch.randn(rows, vocab)
    settings = [
        SamplingParams(
            max_tokens=8, seed=i, temperature=(1.0, 0.0, 0.7)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=(-1, 40)[i % 2]
        )
        for i in range(rows)
    ]
    common = {"tokens": [1, 2], "num_prompt": 1, "stop_ids": frozenset({0}), "grammar": None}
    states = [SimpleNamespace(params=p, **common) for p in settings]
    positions = np.arange(rows) + 2
    cpu = torch.device("cpu")
    found, expected = (
        sample(logits.to(device, copy=True), build_sampling_batch(states, device), positions)
        for device in (context.device, cpu)
    )
    is_equal = found.tokens.cpu() == expected.tokens
    error = (found.logprobs.cpu() - expected.logprobs)[is_equal].abs().max()
    return Measured(float(is_equal.float().mean()), f"log-probs differ by at most {error:.1g}")
