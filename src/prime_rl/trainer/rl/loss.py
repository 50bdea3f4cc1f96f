"""From the loss section of a config to a function of per-token streams."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from prime_rl.trainer.backend import Loss
from prime_rl.trainer.config import LossConfig
from rollouts.training.rl_losses import PRESETS, LossSpec, policy_loss


def build_spec(config: LossConfig) -> LossSpec:
    """The preset that `loss.type` names, with the options of the config."""
    return replace(
        PRESETS[config.type],
        ratio_cap=config.delta,
        token_mask_low=config.token_mask_low,
        token_mask_high=config.token_mask_high,
        geo_mask_low=config.geo_mask_low,
        geo_mask_high=config.geo_mask_high,
        sequence_mask_low=config.sequence_mask_low,
        sequence_mask_high=config.sequence_mask_high,
        adv_tau=config.adv_tau,
        teacher_tau=config.teacher_tau,
        student_tau=config.teacher_tau if config.student_tau is None else config.student_tau,
    )


def build_loss(config: LossConfig) -> Loss:
    """The loss of one micro-batch, as sum and count."""
    return partial(policy_loss, spec=build_spec(config))
