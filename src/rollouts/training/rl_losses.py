"""Log-probs to loss: policy objectives on per-token streams, each a choice of ratio, trust region and advantage mix.

Losses return a sum and a count. Whoever calls divides by the count of the whole step over all ranks, so neither
packing nor micro-batching nor sharding can change a gradient. Streams are aligned to labels: entry t belongs to the
token that position t predicts. Nothing here shifts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

F = TypeVar("F", bound=Callable[..., Any])

LOGITS_PER_CHUNK = 1 << 24
"""Logits that are held at once in fp32 (64 MiB); more tokens are taken in chunks and recomputed for the backward."""

MIN_CHUNK = 4
"""A chunk has at least this many rows, or a matrix product takes another path and rounds differently."""


@dataclass(frozen=True)
class LossSpec:
    """One objective as choices; the presets of `PRESETS` are values of this type.

    With r = exp(trainer - inference log-prob) and sg = stop-gradient, the loss of a token is
    `-sg(min(r, ratio_cap)) A' logp`, A' the mix of `mix_advantages`. The masks drop a token when its own ratio, the
    geometric mean of its sequence's ratios, or any single ratio in its sequence is out of bounds; None means no bound.
    """

    name: str = "aipo"
    ratio_cap: float | None = 8.0
    token_mask_low: float | None = None
    token_mask_high: float | None = None
    geo_mask_low: float | None = None
    geo_mask_high: float | None = None
    sequence_mask_low: float | None = None
    sequence_mask_high: float | None = None
    adv_tau: float = 1.0
    teacher_tau: float = 0.0
    student_tau: float = 0.0


PRESETS: dict[str, LossSpec] = {
    "aipo": LossSpec("aipo"),  # LlamaRL, 2505.24034
}


@dataclass(frozen=True)
class LossInputs:
    """Per-token streams of one micro-batch; only `trainer_logprobs` carries a gradient.

    `loss_mask` weighs tokens (0: no loss). `sequence` numbers the sequence each token belongs to, from 0.
    """

    trainer_logprobs: Float[Tensor, " tokens"]
    inference_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    loss_mask: Float[Tensor, " tokens"]
    sequence: Int[Tensor, " tokens"]
    teacher_logprobs: Float[Tensor, " tokens"] | None = None
    entropy: Float[Tensor, " tokens"] | None = None


@dataclass
class TokenStats:
    """Count, sum, sum of squares, minimum and maximum per metric, in fp64 on the device of the values.

    Rows can be merged over micro-batches and ranks in any grouping, so mean, std, min and max come out right.
    """

    rows: dict[str, Float[Tensor, "5"]] = field(default_factory=dict)

    @staticmethod
    @torch.no_grad()
    def measure(values: dict[str, Float[Tensor, " tokens"]], mask: Bool[Tensor, " tokens"]) -> TokenStats:
        """Statistics of each stream over the tokens where `mask` is true."""
        table = torch.stack([v.double() for v in values.values()])[:, mask]
        count = torch.full((len(table),), table.shape[1], dtype=torch.float64, device=table.device)
        edge = torch.full_like(count, torch.inf)[:, None]
        low, high = torch.cat((table, edge), 1).amin(1), torch.cat((table, -edge), 1).amax(1)
        packed = torch.stack((count, table.sum(1), table.square().sum(1), low, high), dim=1)
        return TokenStats(dict(zip(values, packed, strict=True)))

    def merge(self, other: TokenStats) -> None:
        """Add the tokens that `other` has seen."""
        for name, row in other.rows.items():
            mine = self.rows.get(name)
            if mine is None:
                self.rows[name] = row
            else:
                low, high = torch.minimum(mine[3], row[3]), torch.maximum(mine[4], row[4])
                self.rows[name] = torch.cat((mine[:3] + row[:3], torch.stack((low, high))))

    def summary(self) -> dict[str, float]:
        """`name/mean`, `name/std`, `name/min`, `name/max` of every metric that has seen a token."""
        if not self.rows:
            return {}
        out: dict[str, float] = {}
        for name, (count, total, squares, low, high) in zip(
            self.rows, torch.stack(list(self.rows.values())).tolist(), strict=True
        ):
            if count:
                mean = total / count
                std = max(0.0, squares / count - mean * mean) ** 0.5
                out |= {f"{name}/mean": mean, f"{name}/std": std, f"{name}/min": low, f"{name}/max": high}
        return out


@dataclass(frozen=True)
class LossOutput:
    """The summed loss (divide by the global count), this part's count, and statistics over its loss tokens."""

    loss_sum: Float[Tensor, ""]
    count: Float[Tensor, ""]
    stats: TokenStats = field(default_factory=TokenStats)


def compute_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    temperature: Float[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each label under softmax(logits / temperature), and the entropy of that distribution (no gradient).

    In fp32 and in exactly this order of operations, which is the sampler's: the two agree bit for bit.
    """
    logprobs = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None]).squeeze(-1), entropy


def compute_head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, " tokens"],
    temperature: Float[Tensor, " tokens"],
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`compute_logprobs` of `hidden @ weight.T`, in chunks of tokens when the logits would be large."""
    vocab = weight.shape[0]
    num_chunks = max(1, min(-(-len(labels) * vocab // logits_per_chunk), len(labels) // MIN_CHUNK))
    if num_chunks == 1:
        return compute_logprobs(torch.nn.functional.linear(hidden, weight), labels, temperature)
    parts = [
        checkpoint(_chunk_logprobs, h, weight, y, t, use_reentrant=False)
        for h, y, t in zip(
            hidden.tensor_split(num_chunks),
            labels.tensor_split(num_chunks),
            temperature.tensor_split(num_chunks),
            strict=True,
        )
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    return compute_logprobs(torch.nn.functional.linear(hidden, weight), labels, temperature)


def policy_loss(inputs: LossInputs, spec: LossSpec) -> LossOutput:
    """The objective of `spec` summed over tokens; see `LossSpec` for the formula."""
    mask = inputs.loss_mask
    log_ratio = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
    ratio = log_ratio.exp() if spec.ratio_cap is None else log_ratio.exp().clamp(max=spec.ratio_cap)
    advantage = mix_advantages(inputs, spec)
    dropped = compute_dropped(log_ratio, mask, inputs.sequence, spec)
    keep = (mask > 0) & ~union_of(dropped, mask > 0)
    # Taken out by `where`, not by a product with 0: the coefficient of what is dropped may be infinite.
    coefficient = torch.where(keep, ratio * advantage, 0.0)
    per_token = -coefficient * inputs.trainer_logprobs
    stats = _policy_stats(inputs, spec, log_ratio, advantage, per_token.detach(), dropped)
    return LossOutput((mask * per_token).sum(), mask.sum(), stats)


def nll_loss(inputs: LossInputs) -> LossOutput:
    """-logp of the labels, the loss of supervised fine-tuning; of the streams it reads mask and log-probs only."""
    logprobs, mask = inputs.trainer_logprobs, inputs.loss_mask
    values = {"loss": -logprobs.detach()}
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    return LossOutput(-(mask * logprobs).sum(), mask.sum(), TokenStats.measure(values, mask > 0))


def mix_advantages(inputs: LossInputs, spec: LossSpec) -> Float[Tensor, " tokens"]:
    """A' = adv_tau A + teacher_tau lt - student_tau ls, detached; lt, ls the teacher's and student's log-prob."""
    mixed = spec.adv_tau * inputs.advantages
    if spec.teacher_tau:
        if inputs.teacher_logprobs is None:
            raise ValueError(f"loss.teacher_tau is {spec.teacher_tau} but the batch carries no teacher log-probs")
        mixed = mixed + spec.teacher_tau * inputs.teacher_logprobs
    if spec.student_tau:
        mixed = mixed - spec.student_tau * inputs.trainer_logprobs.detach()
    return mixed


def compute_dropped(
    log_ratio: Float[Tensor, " tokens"],
    mask: Float[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    spec: LossSpec,
) -> dict[str, Bool[Tensor, " tokens"]]:
    """Which loss tokens each bound of the trust region drops, under the name of the bound's metric."""
    dropped: dict[str, Bool[Tensor, " tokens"]] = {}
    active = mask > 0
    if spec.token_mask_low is not None:
        dropped["is_masked_low"] = log_ratio.exp() < spec.token_mask_low
    if spec.token_mask_high is not None:
        dropped["is_masked_high"] = log_ratio.exp() > spec.token_mask_high
    if spec.geo_mask_low is not None or spec.geo_mask_high is not None:
        geo = compute_geo_ratio(log_ratio, mask, sequence)[sequence]
        if spec.geo_mask_low is not None:
            dropped["geo_masked_low"] = geo < spec.geo_mask_low
        if spec.geo_mask_high is not None:
            dropped["geo_masked_high"] = geo > spec.geo_mask_high
    if spec.sequence_mask_low is not None:
        least = _reduce(torch.where(active, log_ratio, torch.inf), sequence, "amin")
        dropped["sequence_masked_low"] = least.exp()[sequence] < spec.sequence_mask_low
    if spec.sequence_mask_high is not None:
        most = _reduce(torch.where(active, log_ratio, -torch.inf), sequence, "amax")
        dropped["sequence_masked_high"] = most.exp()[sequence] > spec.sequence_mask_high
    return {name: which & active for name, which in dropped.items()}


def compute_geo_ratio(
    log_ratio: Float[Tensor, " tokens"], mask: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"]
) -> Float[Tensor, " sequences"]:
    """exp(mean over loss tokens of log r) of each sequence; 1 for a sequence without loss tokens."""
    active = (mask > 0).to(log_ratio.dtype)
    total = _reduce(torch.where(mask > 0, log_ratio, 0.0), sequence, "sum")
    return (total / _reduce(active, sequence, "sum").clamp(min=1)).exp()


def _reduce(values: Tensor, sequence: Tensor, how: str) -> Tensor:
    """`sum`, `amin` or `amax` of the values of each sequence."""
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    start = {"sum": 0.0, "amin": torch.inf, "amax": -torch.inf}[how]
    empty = torch.full((num_sequences,), start, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, sequence, values, how)


def _policy_stats(
    inputs: LossInputs,
    spec: LossSpec,
    log_ratio: Tensor,
    advantage: Tensor,
    per_token: Tensor,
    dropped: dict[str, Tensor],
) -> TokenStats:
    """The metrics of the loss, each over the loss tokens it speaks of."""
    active = inputs.loss_mask > 0
    student, ratio = inputs.trainer_logprobs.detach(), log_ratio.exp()
    is_masked = union_of(dropped, active)
    mismatch_kl = log_ratio.expm1() - log_ratio  # k3 of KL(sampler || trainer); expm1 keeps tiny differences
    values = {
        "loss": per_token,
        "mismatch_kl": mismatch_kl,
        "importance_ratio": ratio,
        "trainer_probs": student.exp(),
        "inference_probs": inputs.inference_logprobs.exp(),
        "advantages": inputs.advantages,
        "combined_advantage": advantage,
        "is_masked": is_masked.to(student.dtype),
        **{name: which.to(student.dtype) for name, which in dropped.items()},
    }
    if spec.ratio_cap is not None:
        values["is_capped"] = (ratio > spec.ratio_cap).to(student.dtype)
    if inputs.entropy is not None:
        values["entropy"] = inputs.entropy
    if inputs.teacher_logprobs is not None:
        # E over the student's tokens of ls - lt estimates KL(student || teacher) and falls to 0 as they agree.
        gap = inputs.teacher_logprobs - student
        values["teacher_kl"], values["teacher_kl_k3"] = -gap, gap.expm1() - gap
    stats = TokenStats.measure(values, active)
    stats.merge(TokenStats.measure({"masked_mismatch_kl": mismatch_kl}, active & is_masked))
    stats.merge(TokenStats.measure({"unmasked_mismatch_kl": mismatch_kl}, active & ~is_masked))
    geo = compute_geo_ratio(log_ratio, inputs.loss_mask, inputs.sequence)
    has_loss = _reduce(active.to(student.dtype), inputs.sequence, "sum") > 0
    stats.merge(TokenStats.measure({"geo_seq_ratio": geo}, has_loss))
    return stats


def union_of(dropped: dict[str, Bool[Tensor, " tokens"]], like: Bool[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """Tokens that any bound drops."""
    union = torch.zeros_like(like)
    for which in dropped.values():
        union = union | which
    return union


Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


def mean_over(unit: str) -> Callable[[F], F]:
    """Say what a loss function's scalar is a mean over: "token", "sequence", or "aggregation" for its own argument.

    With that, a backend weighs the parts of a step so that splitting a batch over calls or ranks changes nothing.
    """

    def mark(function: F) -> F:
        function.mean_over = unit  # type: ignore[attr-defined]
        return function

    return mark


@mean_over("sequence")
def grpo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    advantages: Tensor,
) -> Float[Tensor, ""]:
    """-mean over sequences of (mean over loss tokens of logp) A  (group relative, without a ratio).

    Labels are shifted already. `advantages` are [batch] or [batch, seq].
    """
    logprobs = compute_label_logprobs(logits, labels)
    return aggregate_tokens(-logprobs * _per_token("advantages", advantages, loss_mask), loss_mask, "sequence")


@mean_over("aggregation")
def ppo_loss(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
    *,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    ref_log_probs: Float[Tensor, "batch seq"] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token",
    max_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """The scalar of `ppo_loss_with_metrics`, which has the formula."""
    loss, _ = ppo_loss_with_metrics(
        logits,
        labels,
        loss_mask,
        advantages,
        old_log_probs,
        clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        aggregation=aggregation,
        max_tokens=max_tokens,
    )
    return loss


@mean_over("aggregation")
def ppo_loss_with_metrics(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
    *,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    ref_log_probs: Float[Tensor, "batch seq"] | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coef: float = 0.0,
    aggregation: Aggregation = "token",
    max_tokens: int | None = None,
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """Clipped policy loss per token (1707.06347, equation 7), with a KL term and an entropy bonus.

        r = exp(logp - old)        L = -min(r A, clip(r, 1 - clip_range, 1 + clip_range_high) A)
        dual clip c > 1            L = min(L, -c A) where A < 0  (1912.09729)
        + kl_coef KL(policy || reference)  - entropy_coef H

    KL per token, d = logp - ref: k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d. `advantages` are [batch] or [batch, seq].
    `old_log_probs` are [batch, seq]; with [batch], the mean log-prob of each sequence, the ratio is the sequence's.
    `aggregation`: mean over all loss tokens, mean over sequences of their means, or sum / (batch `max_tokens`).
    """
    high = clip_range if clip_range_high is None else clip_range_high
    _check_ppo(clip_range, high, dual_clip, ref_log_probs, kl_coef, kl_estimator)
    active = loss_mask > 0
    logprobs = compute_label_logprobs(logits, labels)
    advantage = _per_token("advantages", advantages, loss_mask)
    log_ratio = _log_ratio(logprobs, old_log_probs, loss_mask)
    ratio = log_ratio.exp()
    clipped = torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip_range, 1 + high) * advantage)
    per_token, is_dual = clipped, torch.zeros_like(active)
    if dual_clip is not None:
        is_dual = (advantage < 0) & (clipped > -dual_clip * advantage)
        per_token = torch.where(is_dual, -dual_clip * advantage, clipped)
    with torch.no_grad():
        outside = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - clip_range))
        values = {
            "policy_loss": per_token,
            "clip_frac": outside.float(),
            "dual_clip_frac": is_dual.float(),
            "ratio": ratio,
            "approx_kl": log_ratio.expm1() - log_ratio,  # k3 of KL(old || policy) over the old policy's tokens
        }
    if ref_log_probs is not None:
        gap = torch.where(active, logprobs - _per_token("ref_log_probs", ref_log_probs, loss_mask), 0.0)
        kl = compute_kl(gap, kl_estimator)
        per_token = per_token + kl_coef * kl
        values["ref_kl"] = kl.detach()
    entropy = compute_entropy(logits) if entropy_coef else compute_entropy(logits.detach())
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    values["entropy"] = entropy.detach()
    loss = aggregate_tokens(per_token, loss_mask, aggregation, max_tokens)
    return loss, _means(values, active)


def compute_label_logprobs(
    logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Log-prob of each label, in fp32; 0 for the label -100, which stands for no label."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels have shape {list(labels.shape)}, logits {list(logits.shape)}: they must agree")
    flat = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return -flat.view(labels.shape)


def compute_entropy(logits: Float[Tensor, "batch seq vocab"]) -> Float[Tensor, "batch seq"]:
    """Entropy of each position's distribution, in nats."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def compute_kl(gap: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from `gap` = logp - ref on the policy's tokens.

    k1: gap (unbiased, may be negative); k2: gap^2 / 2; k3: exp(-gap) - 1 + gap (unbiased and never negative).
    Source: Schulman, "Approximating KL divergence", 2020.
    """
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return 0.5 * gap.square()
    if estimator == "k3":
        return (-gap).expm1() + gap
    raise ValueError(f"kl_estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")


def aggregate_tokens(
    values: Float[Tensor, "batch seq"],
    loss_mask: Float[Tensor, "batch seq"],
    aggregation: Aggregation,
    max_tokens: int | None = None,
) -> Float[Tensor, ""]:
    """One number of a per-token loss: mean over loss tokens, mean of sequence means, or sum / (batch max_tokens)."""
    # Taken out by `where`, not by a product with 0: what is masked may be infinite.
    weighted = torch.where(loss_mask > 0, values, 0.0) * loss_mask
    if aggregation == "token":
        return weighted.sum() / loss_mask.sum().clamp(min=1)
    if aggregation == "sequence":
        return (weighted.sum(1) / loss_mask.sum(1).clamp(min=1)).mean()
    if aggregation == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError('aggregation "constant" divides by max_tokens: pass the longest response you allow')
        return weighted.sum() / (len(values) * max_tokens)
    raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(get_args(Aggregation))}")


def _log_ratio(logprobs: Tensor, old: Tensor, loss_mask: Tensor) -> Tensor:
    """log r per token, 0 where there is no loss; of the sequence's means when `old` is [batch]."""
    if old.ndim == 1:
        mean = (logprobs * loss_mask).sum(1) / loss_mask.sum(1).clamp(min=1)
        logprobs = mean[:, None].expand_as(loss_mask)
    return torch.where(loss_mask > 0, logprobs - _per_token("old_log_probs", old, loss_mask), 0.0)


def _per_token(name: str, stream: Tensor, loss_mask: Tensor) -> Tensor:
    """[batch] as [batch, seq]; `ValueError` for any other shape."""
    if stream.shape == loss_mask.shape:
        return stream
    if stream.shape != loss_mask.shape[:1]:
        raise ValueError(
            f"{name} have shape {list(stream.shape)}: they must be [batch] or [batch, seq] of the loss mask, "
            f"{list(loss_mask.shape)}"
        )
    return stream[:, None].expand_as(loss_mask)


def _check_ppo(
    low: float, high: float, dual_clip: float | None, ref: Tensor | None, kl_coef: float, estimator: str
) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"clip_range {low} must lie between 0 and 1, and clip_range_high {high} not below 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip {dual_clip} must be above 1, it bounds the ratio of tokens with negative advantage"
        )
    if kl_coef and ref is None:
        raise ValueError(f"kl_coef is {kl_coef} but there are no ref_log_probs to compare with")
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")


def _means(values: dict[str, Tensor], active: Tensor) -> dict[str, float]:
    """`TokenStats` as plain means, with the largest and smallest ratio beside."""
    stats = TokenStats.measure({name: value.flatten() for name, value in values.items()}, active.flatten()).summary()
    kept = ("ratio/max", "ratio/min")
    return {name.removesuffix("/mean"): v for name, v in stats.items() if name.endswith("/mean") or name in kept}
