"""Sampling: from logits to tokens, with the log-probs of the distribution that was really sampled from.

The noise of a token is one uniform number, a hash of (request seed, position of the token in its sequence). So what a
request draws does not depend on which requests are computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.engine import SamplingParams
from rollouts.training.sampling import invert_cdf, uniform

_MASK64 = (1 << 64) - 1


class Drawn(Protocol):
    """What the sampler needs to know of a sequence."""

    tokens: list[int]
    num_prompt: int
    stop_ids: frozenset[int]

    @property
    def params(self) -> SamplingParams: ...


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of a batch as vectors over its rows; valid as long as the rows stay the same."""

    rows: Rows[Drawn]
    temperature: Float[Tensor, "rows 1"]  # 1 where greedy: the log-prob is then that of the untempered distribution
    greedy: Bool[Tensor, " rows"] | None  # None: no row is
    seeds: NDArray[np.uint64]
    adjusted: list[int]  # rows with a bias or a penalty, applied before the temperature
    held: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # row, end token, position it is held back to
    filtered: list[int]  # rows drawn from a part of the vocabulary
    top_logprobs: int


@dataclass(frozen=True)
class Sampled:
    """One token per row, its log-prob, and the most likely tokens where a row asked for them."""

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    top_ids: Int[Tensor, "rows top"] | None
    top_values: Float[Tensor, "rows top"] | None


def build_sampling_batch(rows: Rows[Drawn], device: torch.device) -> SamplingBatch:
    """Gather the settings of `rows`."""
    params = [row.params for row in rows]
    heat = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    cold = heat == 0
    return SamplingBatch(
        rows=rows,
        temperature=torch.where(cold, 1.0, heat)[:, None].to(device),
        greedy=cold.to(device) if bool(cold.any()) else None,
        seeds=np.array([p.seed & _MASK64 for p in params], dtype=np.uint64),
        adjusted=[i for i, p in enumerate(params) if _adjusts(p)],
        held=_build_held(rows),
        filtered=[i for i, p in enumerate(params) if p.temperature and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)],
        top_logprobs=max((p.top_logprobs for p in params), default=0),
    )


def _adjusts(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty != 1 or p.logit_bias or p.presence_penalty or p.frequency_penalty)


def _build_held(rows: Rows[Drawn]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """End tokens that `min_tokens` holds back, as three columns."""
    table = [
        (i, token, row.num_prompt + row.params.min_tokens)
        for i, row in enumerate(rows)
        if row.params.min_tokens
        for token in row.stop_ids
    ]
    columns = np.array(table, dtype=np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def sample(logits: Float[Tensor, "rows vocab"], batch: SamplingBatch, positions: NDArray[np.int64]) -> Sampled:
    """Draw one token per row; `positions` are those of the tokens to be drawn.

    `log_softmax(logits / temperature)` in fp32 is the very expression of the trainer, so equal logits give equal bits.
    """
    wide = logits.float()
    held_rows, held_tokens, until = batch.held
    if batch.adjusted or len(held_rows):
        wide = wide.clone()
        for row in batch.adjusted:
            adjust_logits(wide[row], batch.rows[row])
        still = positions[held_rows] < until
        wide[held_rows[still], held_tokens[still]] = float("-inf")
    logprobs = torch.log_softmax(wide / batch.temperature, dim=-1)
    if batch.filtered:
        logprobs[batch.filtered] = filter_logprobs(
            logprobs[batch.filtered], [batch.rows[row].params for row in batch.filtered]
        )
    tokens = _choose(logprobs, batch, positions)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if not batch.top_logprobs:
        return Sampled(tokens, chosen, None, None)
    top = logprobs.topk(min(batch.top_logprobs, logprobs.shape[1]), dim=-1)
    return Sampled(tokens, chosen, top.indices, top.values)


def _choose(
    logprobs: Float[Tensor, "rows vocab"], batch: SamplingBatch, positions: NDArray[np.int64]
) -> Int[Tensor, " rows"]:
    if batch.greedy is not None and bool(batch.greedy.all()):
        return logprobs.argmax(dim=-1)
    noise = torch.from_numpy(uniform(batch.seeds, positions)).to(logprobs.device)
    tokens = invert_cdf(logprobs, noise)
    if batch.greedy is None:
        return tokens
    return torch.where(batch.greedy, logprobs.argmax(dim=-1), tokens)


def adjust_logits(logits: Float[Tensor, " vocab"], row: Drawn) -> None:
    """Apply logit bias, repetition penalty (1909.05858) and OpenAI's penalties on drawn tokens, one row in place."""
    params = row.params
    for token, bias in params.logit_bias:
        logits[token] += bias
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        drawn = torch.tensor(row.tokens[row.num_prompt :], dtype=torch.long, device=logits.device)
        counts = torch.bincount(drawn, minlength=len(logits)).to(logits.dtype)
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts


def filter_logprobs(logprobs: Float[Tensor, "rows vocab"], params: list[SamplingParams]) -> Float[Tensor, "rows vocab"]:
    """Keep the tokens that `min_p`, `top_k` and then `top_p` admit, and normalise again; at least one token stays."""
    vocab, device = logprobs.shape[1], logprobs.device

    def column(values: list[float]) -> Float[Tensor, "rows 1"]:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    top_k = column([p.top_k if p.top_k > 0 else vocab for p in params])
    keep = (rank < top_k) & (ordered >= ordered[:, :1] + column([p.min_p for p in params]).log())
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")).double(), dim=-1)
    keep &= (probs.cumsum(dim=-1) - probs < column([p.top_p for p in params])) | (rank == 0)
    ordered = ordered.masked_fill(~keep, float("-inf"))
    return torch.log_softmax(torch.empty_like(logprobs).scatter_(1, order, ordered), dim=-1)
