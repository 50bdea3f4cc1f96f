"""Trust region: off-policy masks, importance ratios and clipping."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rollouts.training.objectives import MAX_LOG_RATIO, Objective, Ratio
from rollouts.training.rl_losses.inputs import LossInputs


def compute_dropped(
    inputs: LossInputs, advantage: Float[Tensor, " tokens"], objective: Objective
) -> dict[str, Bool[Tensor, " tokens"]]:
    """Loss tokens dropped by each bound of the objective, by metric name."""
    active = inputs.loss_mask > 0
    trainer, inference = inputs.trainer_logprobs.detach(), inputs.inference_logprobs
    log_ratio = torch.where(active, trainer - inference, 0.0)
    dropped: dict[str, Bool[Tensor, " tokens"]] = {}

    def drop(name: str, which: Tensor) -> None:
        dropped[name] = (dropped[name] | which & active) if name in dropped else which & active

    if objective.token_mask_low is not None:
        drop("is_masked_low", log_ratio.exp() < objective.token_mask_low)
    if objective.token_mask_high is not None:
        drop("is_masked_high", log_ratio.exp() > objective.token_mask_high)
    if objective.max_prob_diff is not None:
        moved = trainer.exp() - inputs.ratio_logprobs.exp()
        drop("is_masked_low", (advantage <= 0) & (moved < -objective.max_prob_diff))
        drop("is_masked_high", (advantage > 0) & (moved > objective.max_prob_diff))
    if objective.seq_ratio_mask_low is not None or objective.seq_ratio_mask_high is not None:
        geo = inputs.mean_per_sequence(log_ratio).exp()[inputs.sequence]
        if objective.seq_ratio_mask_low is not None:
            drop("seq_ratio_masked_low", geo < objective.seq_ratio_mask_low)
        if objective.seq_ratio_mask_high is not None:
            drop("seq_ratio_masked_high", geo > objective.seq_ratio_mask_high)
    if objective.sequence_mask_low is not None:
        least = inputs.per_sequence(torch.where(active, log_ratio, torch.inf), "amin")
        drop("sequence_masked_low", least.exp()[inputs.sequence] < objective.sequence_mask_low)
    if objective.sequence_mask_high is not None:
        most = inputs.per_sequence(torch.where(active, log_ratio, -torch.inf), "amax")
        drop("sequence_masked_high", most.exp()[inputs.sequence] > objective.sequence_mask_high)
    return dropped


def any_mask(dropped: dict[str, Bool[Tensor, " tokens"]], like: Bool[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """Tokens that any bound drops."""
    union = torch.zeros_like(like)
    for which in dropped.values():
        union = union | which
    return union


def compute_ratio(inputs: LossInputs, log_ratio: Float[Tensor, " tokens"], kind: Ratio) -> Float[Tensor, " tokens"]:
    """Importance ratio of each token or of its sequence; `log_ratio` is 0 without loss.

    geometric  exp(mean of log r)        arithmetic  mean of r        product  exp(sum of log r)

    Every exponent is bounded by `MAX_LOG_RATIO`, beyond which the gradient is 0.
    """
    if kind == "none":
        return torch.ones_like(log_ratio)
    if kind == "token":
        return bounded_exp(log_ratio)
    if kind == "geometric":
        of_sequence = bounded_exp(inputs.mean_per_sequence(log_ratio))
    elif kind == "arithmetic":
        of_sequence = inputs.mean_per_sequence(bounded_exp(log_ratio))
    else:
        of_sequence = bounded_exp(inputs.per_sequence(log_ratio))
    return of_sequence[inputs.sequence]


def clip_log_ratio(
    log_ratio: Float[Tensor, " tokens"], advantage: Float[Tensor, " tokens"], objective: Objective
) -> tuple[Float[Tensor, " tokens"], dict[str, Bool[Tensor, " tokens"]]]:
    """Log-ratios bounded in the direction of their advantage (GMPO, 2507.20673), and the tokens that were."""
    low, high = objective.log_clip_low, objective.log_clip_high
    if low is None and high is None:
        return log_ratio, {}
    clipped = log_ratio.clamp(None if low is None else -low, high)
    is_clipped = torch.where(advantage > 0, clipped < log_ratio, clipped > log_ratio) & (advantage != 0)
    return torch.where(is_clipped, clipped, log_ratio), {"is_clipped": is_clipped}


def compute_gamma_weight(
    ratio: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Float[Tensor, " tokens"]:
    """exp(g) w^k exp(-g w), which is 1 at w = 1; (k, g) by the sign of the advantage (VESPO, 2602.10693)."""
    is_negative = (advantage < 0)[:, None]
    k, g = torch.where(is_negative, ratio.new_tensor(negative), ratio.new_tensor(positive)).unbind(1)
    return torch.exp(g + k * ratio.log() - g * ratio)


def weigh_behavior(
    inputs: LossInputs, objective: Objective
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]] | None:
    """min(old policy / sampler, `behavior_cap`), of a token or a sequence like the ratio, and where it is the cap.

    None if old policy and sampler are the same. Decoupled PPO, 2110.00641, equation 4, with truncated weights; AReaL,
    2505.24298, drops the tokens above its cap.
    """
    if inputs.old_logprobs is None:
        return None
    log_ratio = torch.where(inputs.loss_mask > 0, inputs.old_logprobs - inputs.inference_logprobs, 0.0)
    ratio = compute_ratio(inputs, log_ratio, objective.ratio).detach()
    return ratio.clamp(max=objective.behavior_cap), ratio > objective.behavior_cap


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of at most `MAX_LOG_RATIO`; the gradient beyond is 0."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@torch.no_grad()
def find_bounded(inputs: LossInputs, log_ratio: Float[Tensor, " tokens"], kind: Ratio) -> Bool[Tensor, " tokens"]:
    """Tokens for which `compute_ratio` bounds the exponent of the token or of its sequence."""
    if kind == "none":
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    if kind == "geometric":
        log_ratio = inputs.mean_per_sequence(log_ratio)[inputs.sequence]
    elif kind == "product":
        log_ratio = inputs.per_sequence(log_ratio)[inputs.sequence]
    return log_ratio > MAX_LOG_RATIO


def surrogate_loss(
    ratio: Float[Tensor, " tokens"],
    advantage: Float[Tensor, " tokens"],
    logprobs: Float[Tensor, " tokens"],
    objective: Objective,
) -> tuple[Float[Tensor, " tokens"], dict[str, Bool[Tensor, " tokens"]]]:
    """Per-token loss of the clipped ratio (see `Objective`), and the tokens at which each bound is active."""
    low = None if objective.clip_low is None else 1 - objective.clip_low
    high = None if objective.clip_high is None else 1 + objective.clip_high
    clipped = ratio if low is None and high is None else ratio.clamp(low, high)
    bound: dict[str, Bool[Tensor, " tokens"]] = {}
    if objective.gamma_pos is not None and objective.gamma_neg is not None:
        weight = compute_gamma_weight(ratio.detach(), advantage, objective.gamma_pos, objective.gamma_neg)
        return -weight * advantage * logprobs, bound
    if objective.detached:
        weight = clipped if objective.ratio_cap is None else clipped.clamp(max=objective.ratio_cap)
        if objective.ratio_cap is not None:
            bound["is_ratio_capped"] = ratio > objective.ratio_cap
        if clipped is not ratio:
            bound["is_clipped"] = clipped != ratio
        return -weight.detach() * advantage * logprobs, bound
    if objective.gate_pos is not None and objective.gate_neg is not None:
        gate = torch.full_like(advantage, objective.gate_neg).masked_fill(advantage > 0, objective.gate_pos)
        return -4 / gate * torch.sigmoid(gate * (ratio - 1)) * advantage, bound
    loss = -ratio * advantage
    if clipped is not ratio:
        limited = -clipped * advantage
        bound["is_clipped"] = limited > loss
        loss = torch.maximum(loss, limited)
    if objective.dual_clip is not None:
        ceiling = -objective.dual_clip * advantage
        bound["is_dual_clipped"] = (advantage < 0) & (loss > ceiling)
        loss = torch.where(bound["is_dual_clipped"], ceiling, loss)
    return loss, bound
