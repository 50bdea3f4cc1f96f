"""Sampling: from logits to tokens, with log-probs of the distribution that was actually sampled from.

The noise of a token is one uniform number, a hash of (request seed, position in the sequence), so the samples of a
request do not depend on the other requests in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.inference.engine import SamplingParams, TopLogprobs
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.sampling import sample_tokens, top_tokens, uniform
from rollouts.training.sampling_support import encode_supports
from rollouts.training.transfers import send

_MASK64 = (1 << 64) - 1


ALL = 1 << 40
"""`top_k` of rows that have none, and the largest one: requests may have integers that do not fit in a tensor."""


@dataclass(frozen=True)
class Filters:
    """Truncated sampling of some rows, on the device of their logits; `wanted` are those whose support is returned."""

    rows: Int[Tensor, " filtered"]
    min_p: Float[Tensor, " filtered"]
    top_p: Float[Tensor, " filtered"]
    top_k: Int[Tensor, " filtered"]
    wanted: list[int]


def build_filters(rows: list[int], params: list[SamplingParams], device: torch.device) -> Filters:
    """The filters of `rows`, which have these `params`."""
    min_p, top_p = torch.tensor([(p.min_p, p.top_p) for p in params], dtype=torch.float32).T.contiguous().to(device)
    top_k = torch.tensor([min(p.top_k, ALL) if p.top_k > 0 else ALL for p in params])
    wanted = [i for i, p in enumerate(params) if p.return_support]
    return Filters(torch.tensor(rows, device=device), min_p, top_p, top_k.to(device), wanted)


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of a batch as vectors over its rows; valid as long as the rows stay the same."""

    rows: list[Sequence]
    temperature: Float[Tensor, "rows 1"] | None  # None if all are 1, as for greedy rows
    greedy: Bool[Tensor, " rows"] | None  # None if no row is greedy
    all_greedy: bool  # known here, without reading `greedy` from a device
    seeds: NDArray[np.uint64]
    adjusted: list[int]  # rows with a bias, a penalty or a grammar, applied before the temperature
    blocked: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # row, token, first allowed position
    filters: Filters | None  # of the rows with top_p, top_k or min_p, if there are any
    top_logprobs: int

    @property
    def needs_host(self) -> bool:
        """Whether sampling a token reads or writes memory of the host."""
        returns_support = self.filters is not None and bool(self.filters.wanted)
        return bool(self.adjusted or len(self.blocked[0]) or self.top_logprobs or returns_support)


@dataclass(frozen=True)
class SamplerOutput:
    """One token per row, its log-prob, and the top tokens if requested."""

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    top_ids: Int[Tensor, "rows top"] | None
    top_values: Float[Tensor, "rows top"] | None
    supports: dict[int, bytes] = field(default_factory=dict)  # of rows with truncated sampling that request them

    def top_logprobs(self) -> list[TopLogprobs]:
        """The top tokens of every row; empty if not requested."""
        if self.top_ids is None or self.top_values is None:
            return []
        pairs = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        # Tokens excluded from sampling are omitted: JSON has no -inf.
        return [[(i, v) for i, v in zip(ids, values, strict=True) if v > float("-inf")] for ids, values in pairs]


def build_sampling_batch(rows: list[Sequence], device: torch.device) -> SamplingBatch:
    """Collect the sampling settings of `rows`."""
    params = [row.params for row in rows]
    given = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    is_greedy = given == 0
    temperature = torch.where(is_greedy, 1.0, given)[:, None]
    filtered = [i for i, p in enumerate(params) if p.temperature and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)]
    return SamplingBatch(
        rows=rows,
        temperature=None if bool((temperature == 1).all()) else temperature.to(device),
        greedy=is_greedy.to(device) if bool(is_greedy.any()) else None,
        all_greedy=bool(is_greedy.all()),
        seeds=np.array([p.seed & _MASK64 for p in params], dtype=np.uint64),
        adjusted=[
            i
            for i, row in enumerate(rows)
            if row.grammar is not None or row.params.logit_bias or has_penalty(row.params)
        ],
        blocked=_build_blocked(rows),
        filters=build_filters(filtered, [params[i] for i in filtered], device) if filtered else None,
        top_logprobs=max((p.top_logprobs for p in params), default=0),
    )


def has_penalty(p: SamplingParams) -> bool:
    """Whether logits depend on the tokens before them by a penalty."""
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _build_blocked(rows: list[Sequence]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Stop tokens blocked by `min_tokens`, as three columns."""
    table = [
        (i, token, row.num_prompt + row.params.min_tokens)
        for i, row in enumerate(rows)
        if row.params.min_tokens
        for token in row.stop_ids
    ]
    columns = np.array(table, dtype=np.int64).reshape(-1, 3).T
    return columns[0], columns[1], columns[2]


def draw_noise(
    batch: SamplingBatch, positions: NDArray[np.int64], device: torch.device
) -> Float[Tensor, "*steps rows"] | None:
    """The random numbers of every row for the tokens at `positions [*steps, rows]`; None if all rows are greedy."""
    if batch.all_greedy:
        return None
    return send(torch.from_numpy(uniform(batch.seeds, positions)), device)


def sample(
    logits: Float[Tensor, "rows vocab"],
    batch: SamplingBatch,
    positions: NDArray[np.int64],
    noise: Float[Tensor, " rows"] | None = None,
) -> SamplerOutput:
    """Sample one token per row; `positions` are those of the sampled tokens, `noise` is that of `draw_noise`.

    `log_softmax(logits / temperature)` in fp32 is the trainer's expression, so equal logits give bitwise equal results.
    May overwrite `logits`: a real vocabulary has 25 MB of them at 128 rows.
    """
    scores = logits.float()
    blocked_rows, blocked_tokens, until = batch.blocked
    for row in batch.adjusted:
        adjust_logits(scores[row], batch.rows[row])
    if len(blocked_rows):  # an assignment to no elements would take 1 % of a step of one row
        still = positions[blocked_rows] < until
        scores[blocked_rows[still], blocked_tokens[still]] = float("-inf")
    if batch.temperature is not None:  # division by 1 changes no bit
        scores.div_(batch.temperature)
    supports: dict[int, bytes] = {}
    if (filters := batch.filters) is not None:
        scores[filters.rows] = filtered = apply_filters(log_softmax(scores[filters.rows]), filters)
        if filters.wanted:
            encoded = encode_supports(filtered[filters.wanted] > float("-inf"))
            supports = dict(zip(filters.rows[filters.wanted].tolist(), encoded, strict=True))
    noise = draw_noise(batch, positions, scores.device) if noise is None else noise
    tokens, logprobs = sample_tokens(scores, noise, batch.greedy)
    if not batch.top_logprobs:
        return SamplerOutput(tokens, logprobs, None, None, supports)
    values, ids = top_tokens(log_softmax(scores), batch.top_logprobs)
    return SamplerOutput(tokens, logprobs, ids, values, supports)


def adjust_logits(logits: Float[Tensor, " vocab"], row: Sequence) -> None:
    """Apply logit bias, repetition penalty (1909.05858), OpenAI's presence and frequency penalties and the grammar."""
    params = row.params
    if params.logit_bias:
        ids, values = (column.to(logits.device) for column in row.bias)
        logits.index_put_((ids,), values, accumulate=True)
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        drawn = torch.tensor(row.tokens[row.num_prompt :], dtype=torch.long, device=logits.device)
        counts = torch.bincount(drawn, minlength=len(logits)).to(logits.dtype)
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    if row.grammar is not None:
        logits[torch.from_numpy(row.grammar.forbidden()).to(logits.device)] = float("-inf")


def apply_filters(logprobs: Float[Tensor, "rows vocab"], filters: Filters) -> Float[Tensor, "rows vocab"]:
    """Minus infinity for what `min_p`, `top_k` and then `top_p` exclude; at least one token of each row remains."""
    min_p, top_k, top_p = filters.min_p, filters.top_k, filters.top_p
    if cpu_kernels.runs_here(logprobs):
        filtered = logprobs.clone(memory_format=torch.contiguous_format)
        cpu_kernels.filter_logprobs_(filtered, min_p, top_k, top_p)
        return filtered
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)
    keep = (rank < top_k[:, None]) & (ordered >= ordered[:, :1] + min_p.log()[:, None])
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")).double(), dim=-1)
    # A sum of probabilities may round to 1 before the last token: without `top_p`, all of them remain.
    keep &= (probs.cumsum(dim=-1) - probs < top_p[:, None]) | (rank == 0) | (top_p >= 1)[:, None]
    ordered = ordered.masked_fill(~keep, float("-inf"))
    return torch.empty_like(logprobs).scatter_(1, order, ordered)
