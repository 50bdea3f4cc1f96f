"""Policy losses on per-token streams, configured by `rollouts.training.objectives`.

Losses return a sum and a count. The caller divides by the count of the whole step over all ranks, so packing,
micro-batching and sharding do not change the gradient. Streams are aligned to labels: entry t belongs to the token that
position t predicts. Nothing is shifted here.
"""

from __future__ import annotations

from rollouts.training.rl_losses.distill import (
    compute_coverage,
    compute_divergence,
    compute_fixed_point,
    compute_sequence_kl_advantages,
    reference_samples,
)
from rollouts.training.rl_losses.inputs import LossInputs, LossOutput
from rollouts.training.rl_losses.kl import compute_kl
from rollouts.training.rl_losses.logprobs import (
    VocabPart,
    compute_entropy,
    compute_head_logprobs,
    compute_head_table,
    compute_label_logprobs,
    compute_logprobs,
)
from rollouts.training.rl_losses.normalize import aggregate_tokens
from rollouts.training.rl_losses.padded import grpo_loss, mean_over, ppo_loss, ppo_loss_with_metrics
from rollouts.training.rl_losses.policy import PolicyLoss, mix_advantages, nll_loss, policy_loss
from rollouts.training.rl_losses.stats import TokenStats

__all__ = [
    "LossInputs",
    "LossOutput",
    "PolicyLoss",
    "TokenStats",
    "VocabPart",
    "aggregate_tokens",
    "compute_coverage",
    "compute_divergence",
    "compute_entropy",
    "compute_fixed_point",
    "compute_head_logprobs",
    "compute_head_table",
    "compute_kl",
    "compute_label_logprobs",
    "compute_logprobs",
    "compute_sequence_kl_advantages",
    "grpo_loss",
    "mean_over",
    "mix_advantages",
    "nll_loss",
    "policy_loss",
    "ppo_loss",
    "ppo_loss_with_metrics",
    "reference_samples",
]
