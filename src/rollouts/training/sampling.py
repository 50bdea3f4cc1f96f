"""Token sampling with counter-based noise per (seed, position), independent of the batch."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels.select import gpu_kernels

MAX_TOP = 64
"""Up to so many tokens, inserting them into a sorted list is faster than torch's selection."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_tokens(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, " rows"] | None,
    greedy: Bool[Tensor, " rows"] | None = None,
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """A token of each row and its log-prob, bitwise equal to that of `log_softmax`.

    It is the first token whose cumulative probability exceeds `noise` (fp64, below 1), never one of probability 0; the
    most likely one in `greedy` rows, and in all without noise.
    """
    if noise is not None and greedy is not None:
        noise = noise.masked_fill(greedy, -1.0)
    if cpu_kernels.runs_here(logits):
        if noise is None:
            noise = torch.full((len(logits),), -1.0, dtype=torch.float64)
        return cpu_kernels.sample(logits, noise)
    if logits.is_cuda and logits.dtype == torch.float32 and gpu_kernels() is not None:
        from rollouts.kernels import gpu_sample

        return gpu_sample.sample(logits, noise)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = logprobs.argmax(-1) if noise is None else _invert_cdf(logprobs, noise)
    if greedy is not None:
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _invert_cdf(logprobs: Float[Tensor, "rows vocab"], noise: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
    cdf = logprobs.to(torch.float64, copy=True).exp_().cumsum(dim=-1)
    total = cdf[:, -1:]
    # Rounding could lift noise * total to the total itself, past the last token that has any probability.
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=logprobs.shape[1] - 1)


def top_tokens(
    logprobs: Float[Tensor, "rows vocab"], num: int
) -> tuple[Float[Tensor, "rows num"], Int[Tensor, "rows num"]]:
    """The `num` largest log-probs of each row in descending order, and their tokens."""
    if num <= MAX_TOP and cpu_kernels.runs_here(logprobs):
        return cpu_kernels.top(logprobs, num)
    if num == 1:  # the token that is drawn in a greedy row, unlike `topk`, which may take another one of equal ones
        best = logprobs.max(dim=-1, keepdim=True)
        return best.values, best.indices
    top = logprobs.topk(min(num, logprobs.shape[1]), dim=-1)
    return top.values, top.indices


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one per (seed, position) (SplitMix64, Steele et al. 2014).

    Seeds and positions are broadcast.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keep_top_k(
    logits: Float[Tensor, "*rows vocab"], k: int | None, also: Int[Tensor, "*rows"] | None = None
) -> Float[Tensor, "*rows vocab"]:
    """Mask all but the `k` highest logits of each row with minus infinity (ties are kept); None or 0: no mask.

    `also`: one more token per row to keep, for log-probs of tokens sampled by an older policy.
    """
    if not k or k >= logits.shape[-1]:
        return logits
    drop = logits < logits.topk(k, dim=-1).values[..., -1:]
    if also is not None:
        drop = drop.scatter(-1, also[..., None], False)
    return logits.masked_fill(drop, float("-inf"))
