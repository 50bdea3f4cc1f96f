"""`grpo_loss` and `ppo_loss` on padded logits, implemented by `policy_loss`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from jaxtyping import Float, Int
from torch import Tensor

from rollouts.training.objectives import KLEstimator, Objective
from rollouts.training.rl_losses.kl import compute_kl
from rollouts.training.rl_losses.logprobs import compute_entropy, compute_label_logprobs
from rollouts.training.rl_losses.normalize import Aggregation, as_divisor, flatten_rows, loss_aggregation_of
from rollouts.training.rl_losses.policy import policy_loss
from rollouts.training.rl_losses.stats import TokenStats

F = TypeVar("F", bound=Callable[..., Any])


def mean_over(unit: str) -> Callable[[F], F]:
    """Declare the unit that a loss function averages over: "token", "sequence", or "aggregation" (its argument).

    A backend weights the parts of a step accordingly, so that splitting a batch over calls or ranks has no effect.
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
    """-mean over sequences of (mean over loss tokens of logp) A  (group-relative, without importance ratio).

    Labels are shifted already. `advantages` are [batch] or [batch, seq].
    """
    _check_mask(logits, loss_mask)
    logprobs = compute_label_logprobs(logits, labels)
    inputs = flatten_rows(logprobs, loss_mask, advantages=_per_token("advantages", advantages, loss_mask))
    return policy_loss(inputs, Objective("grpo", ratio="none", loss_aggregation="seq-mean-token-mean")).loss_sum / len(
        labels
    )


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

    KL per token, d = logp - ref: k2 d^2 / 2, k3 exp(-d) - 1 + d; k1 d only as a metric. `advantages` are [batch] or
    [batch, seq].
    `old_log_probs` are [batch, seq]; with [batch], the mean log-prob of each sequence, the ratio is the sequence's.
    `aggregation`: mean over all loss tokens, mean over sequences of their means, or sum / (batch `max_tokens`).
    """
    high = clip_range if clip_range_high is None else clip_range_high
    _check_mask(logits, loss_mask)
    _check_ppo(clip_range, high, dual_clip, ref_log_probs, kl_coef, kl_estimator)
    reference = None if ref_log_probs is None else _per_token("ref_log_probs", ref_log_probs, loss_mask)
    inputs = flatten_rows(
        compute_label_logprobs(logits, labels),
        loss_mask,
        _per_token("old_log_probs", old_log_probs, loss_mask),
        _per_token("advantages", advantages, loss_mask),
        reference,
        compute_entropy(logits if entropy_coef else logits.detach()),
    )
    objective = Objective(
        "ppo",
        ratio="geometric" if old_log_probs.ndim == 1 else "token",
        detached=False,
        clip_low=clip_range,
        clip_high=high,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        loss_aggregation=loss_aggregation_of(aggregation),
        max_tokens=max_tokens,
    )
    output = policy_loss(inputs, objective)
    loss = output.loss_sum / (as_divisor(output.count) if aggregation == "token" else len(labels))
    if inputs.teacher_logprobs is not None:
        gap = inputs.trainer_logprobs.detach() - inputs.teacher_logprobs
        active = inputs.loss_mask > 0
        output.stats.merge(TokenStats.measure({"ref_kl": compute_kl(gap, kl_estimator)}, active))
    summary = output.stats.summary()
    summary.setdefault("loss_policy/mean", summary.get("loss/mean", 0.0))
    metrics = {name: summary[of] for name, of in _PPO_METRICS.items() if of in summary}
    return loss, {"dual_clip_frac": 0.0, **metrics} if metrics else metrics


@functools.wraps(ppo_loss_with_metrics, assigned=("__module__",))
def ppo_loss(*args: Any, **kwargs: Any) -> Float[Tensor, ""]:
    """The scalar of `ppo_loss_with_metrics`, which has the formula and the parameters."""
    return ppo_loss_with_metrics(*args, **kwargs)[0]


_PPO_METRICS = {
    "policy_loss": "loss_policy/mean",
    "clip_frac": "is_clipped/mean",
    "dual_clip_frac": "is_dual_clipped/mean",
    "ratio": "importance_ratio/mean",
    "ratio/max": "importance_ratio/max",
    "ratio/min": "importance_ratio/min",
    "approx_kl": "mismatch_kl/mean",
    "ref_kl": "ref_kl/mean",
    "entropy": "entropy/mean",
}


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


def _check_mask(logits: Tensor, loss_mask: Tensor) -> None:
    if loss_mask.shape != logits.shape[:-1]:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, logits {list(logits.shape)}: they must agree")


def _check_ppo(
    low: float, high: float, dual_clip: float | None, ref: Tensor | None, kl_coef: float, estimator: str
) -> None:
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"clip_range {low} must lie between 0 and 1, and clip_range_high {high} not below 0")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(
            f"dual_clip {dual_clip} must be above 1: it bounds the ratio of tokens with negative advantage"
        )
    if kl_coef and ref is None:
        raise ValueError(f"kl_coef is {kl_coef} but there are no ref_log_probs to compare with")
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator {estimator!r} is not one of {', '.join(get_args(KLEstimator))}")
    if kl_coef and estimator == "k1":
        raise ValueError(
            "kl_estimator k1 in a loss has a gradient without the reference: use k2 or k3, or subtract it from rewards"
        )
