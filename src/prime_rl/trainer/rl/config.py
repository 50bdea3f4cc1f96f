"""Sections of the RL trainer: policy model, loss, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from prime_rl.configuration.imports import check_arguments, import_function
from prime_rl.trainer.model_config import ModelConfig
from prime_rl.utils.pydantic_config import BaseConfig
from rollouts.training.objectives import (
    PRESETS,
    Direction,
    DistillChoice,
    DistillGate,
    KLEstimator,
    LossAggregation,
    Objective,
    OldLogprobs,
    Ratio,
)

BOUND_OPTIONS = {
    name: name
    for name in (
        *("clip_low", "clip_high", "dual_clip", "log_clip_low", "log_clip_high"),
        *("gate_pos", "gate_neg", "gamma_pos", "gamma_neg", "max_prob_diff"),
    )
} | {"delta": "ratio_cap"}
"""Loss options that only some presets use, mapped to their field of `Objective`."""


ENV_LOSS_KEYS = frozenset(BOUND_OPTIONS) | {
    *("type", "ratio", "kl_tau", "inference_kl_coef", "observation_coef", "loss_aggregation", "max_tokens"),
    *(f"{unit}_mask_{side}" for unit in ("token", "seq_ratio", "sequence") for side in ("low", "high")),
}
"""Loss options that an environment can set; the others apply to whole runs."""


class RLModelConfig(ModelConfig):
    """The policy model."""

    seq_len: int = Field(default=2048, ge=2)
    """Maximum sequence length (prompt + completion)."""


class DistillConfig(BaseConfig):
    """Estimator of the distillation loss (docs/on_policy_distillation.md)."""

    estimator: Literal["auto", "token", "reward_to_go", "sequence", "topk+tail", "full"] = "token"
    """token: KL at the sampled token; reward_to_go: KL summed over the sampled token and its successors; sequence:
    sequence KL relative to the group; topk+tail: the teacher's top-k tokens plus one tail bucket; full: the whole
    vocabulary; auto: topk+tail in the adaptive direction; token if the teacher has no top-k."""

    direction: Direction = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jsd: generalized Jensen-Shannon divergence;
    adaptive: forward for tokens whose most likely choice of the teacher has a probability below .2 under the student,
    else reverse. The last three need topk+tail or full."""

    k: int = Field(default=8, ge=1, le=100)
    """topk+tail: number of top teacher tokens."""

    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """jsd: weight of the teacher in the mixture."""

    clip: float | None = Field(default=None, gt=0)
    """token, reward_to_go, sequence: clip the per-token log-prob difference to +-clip, so that a few tokens do not
    dominate."""

    gate: DistillGate = "none"
    """positive: distill only tokens of completions with an advantage above 0; not with reward_to_go and sequence."""

    @property
    def top_logprobs(self) -> int:
        """Number of top teacher log-probs needed per token; 0: the sampled token only, -1: all."""
        return {"auto": self.k, "topk+tail": self.k, "full": -1}.get(self.estimator, 0)

    @property
    def has_target(self) -> bool:
        """Whether the divergence is to the target of the taus, which exists for a student_tau above 0 only."""
        return self.estimator == "auto" or self.direction != "reverse"

    @model_validator(mode="after")
    def _check_direction(self) -> DistillConfig:
        if self.direction != "reverse" and self.estimator not in ("topk+tail", "full"):
            raise ValueError(
                f'direction = "{self.direction}" compares distributions, but estimator = "{self.estimator}" uses '
                'one token\n  set estimator to "topk+tail" or "full"'
            )
        if self.clip is not None and self.top_logprobs:
            raise ValueError('clip applies to sampled tokens only: remove it, or set estimator to "token"')
        if self.gate != "none" and self.estimator in ("reward_to_go", "sequence"):
            raise ValueError('gate applies to single tokens: set estimator to "token", "topk+tail" or "full"')
        return self


def fill_distill(loss_type: object, given: object) -> dict[str, Any]:
    """The keys of `loss.distill`: those of the preset where they are not given and fit the given estimator."""
    preset = PRESETS.get(loss_type) if isinstance(loss_type, str) else None
    options = dict(given) if isinstance(given, Mapping) else {}
    if preset is None or preset.distill == DistillChoice():
        return options
    choice = preset.distill
    names = ["estimator", "gate"]
    if options.get("estimator", choice.estimator) in ("topk+tail", "full"):
        names.append("direction")
    return {name: getattr(choice, name) for name in names} | options


class AnnealConfig(BaseConfig):
    """Anneal the distillation weights: teacher_tau and student_tau decay, so that the reward gains relative weight.

    Enabled by the presence of the section. The student can surpass its teacher once adv_tau / student_tau exceeds the
    cost, in nats per completion, of deviating from it.
    """

    warmup: int = Field(default=0, ge=0)
    """First steps, over which both taus rise linearly from 0 (SDPG)."""

    after: int = Field(default=50, ge=0)
    """Steps before the decay begins."""

    steps: int = Field(default=50, ge=1)
    """Steps of the exponential decay."""

    factor: float = Field(default=0.01, ge=0, lt=1)
    """Final fraction of both taus."""

    margin: float | None = Field(default=None, gt=0)
    """Replaces `factor`: at the end, adv_tau / student_tau is `margin` times the largest batch-mean distance from the
    teacher so far, in nats per completion. A margin of 8 overrides an incorrect teacher."""

    def scale(self, step: int, measured: float = 1.0) -> float:
        """Multiplier of both taus at a step, counted from 1; `measured` is the final factor derived from `margin`."""
        factor = self.factor if self.margin is None else min(measured, 1.0)
        part = min(max(step - self.after, 0) / self.steps, 1.0)
        rise = min(step / self.warmup, 1.0) if self.warmup else 1.0
        return rise * (factor**part if factor else 1.0 - part)

    @model_validator(mode="after")
    def _check_margin_or_factor(self) -> AnnealConfig:
        if self.margin is not None and "factor" in self.changed_keys():
            raise ValueError("factor and margin both set the final taus: remove one of them")
        return self


class EntropyControlConfig(BaseConfig):
    """Adapt entropy_coef to keep the mean entropy of a token above a target (Skywork-OR1, 2505.22312)."""

    target: float = Field(gt=0)
    """Entropy in nats. The coefficient rises by `delta` after a step at or below it and falls after others; the bonus
    is applied only while the entropy is at or below it."""

    delta: float = Field(default=0.005, gt=0)
    """Change of the coefficient per step."""

    max_coef: float = Field(default=1.0, gt=0)
    """Upper bound of the coefficient; the lower bound is 0."""

    def adjust(self, coef: float, entropy: float) -> float:
        """The coefficient after a step with this mean entropy."""
        change = self.delta if entropy <= self.target else -self.delta
        return min(max(coef + change, 0.0), self.max_coef)


def _from_preset(option: str, **constraints: Any) -> Any:
    """A field that is an option of the preset `type` unless it is set."""
    return Field(default_factory=lambda values: getattr(PRESETS[values.get("type", "custom")], option), **constraints)


class LossConfig(BaseConfig):
    """The policy objective: a preset (docs/algorithms.md) whose fields can be overridden.

    Unset fields follow the preset; None disables a bound. Ratios are exp(trainer - inference log-prob).
    """

    type: Literal[
        "aipo",
        "grpo",
        "gspo",
        "luspo",
        "sapo",
        "gmpo",
        "vespo",
        "maxrl",
        "opo",
        "rloo",
        "cispo",
        "ppo",
        "dapo",
        "dr_grpo",
        "reinforce",
        "dppo",
        "sdpo",
        "opsd",
        "sdpg",
        "custom",
    ] = "aipo"
    """Preset. Its baseline and scaling are also the defaults of orchestrator.advantage in rl."""

    ratio: Ratio | None = _from_preset("ratio")
    """Importance ratio: per token, or per sequence as the mean (geometric, arithmetic) or product of token ratios."""

    delta: float | None = _from_preset("ratio_cap", gt=0)
    """Cap on the importance ratio (aipo, opo, rloo, maxrl; sdpo and opsd where adv_tau or inference_kl_coef is set)."""

    clip_low: float | None = _from_preset("clip_low", ge=0, le=1)
    """Lower clip range: 1 - clip_low (grpo, gspo, luspo, cispo, ppo, dapo, dr_grpo, sdpg)."""

    clip_high: float | None = _from_preset("clip_high", ge=0)
    """Upper clip range: 1 + clip_high (same presets)."""

    dual_clip: float | None = _from_preset("dual_clip", gt=1)
    """Dual clip: bound the loss at -dual_clip A for negative advantages A (same presets but cispo)."""

    gate_pos: float | None = _from_preset("gate_pos", gt=0)
    """Temperature of the sigmoid gate on the ratio for positive advantages (sapo)."""

    gate_neg: float | None = _from_preset("gate_neg", gt=0)
    """The same for negative advantages; a higher temperature decays faster."""

    log_clip_low: float | None = _from_preset("log_clip_low", ge=0)
    """Lower bound -log_clip_low of a token's log-ratio where the advantage is negative (gmpo)."""

    log_clip_high: float | None = _from_preset("log_clip_high", ge=0)
    """Upper bound of a token's log-ratio where the advantage is positive (gmpo)."""

    gamma_pos: tuple[float, float] | None = _from_preset("gamma_pos")
    """k and g of the weight exp(g) w^k exp(-g w) of a sequence with ratio w, for positive advantages (vespo)."""

    gamma_neg: tuple[float, float] | None = _from_preset("gamma_neg")
    """The same for negative advantages."""

    max_prob_diff: float | None = _from_preset("max_prob_diff", gt=0, le=1)
    """Mask tokens whose probability moved further than this in the direction of their advantage (dppo)."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Mask tokens with a ratio below this value."""

    token_mask_high: float | None = Field(default=None, gt=0)
    """Mask tokens with a ratio above this value."""

    seq_ratio_mask_low: float | None = Field(default=None, ge=0)
    """Mask sequences with a geometric mean ratio below this value."""

    seq_ratio_mask_high: float | None = Field(default=None, gt=0)
    """Mask sequences with a geometric mean ratio above this value."""

    sequence_mask_low: float | None = Field(default=None, ge=0)
    """Mask sequences that contain a token ratio below this value."""

    sequence_mask_high: float | None = Field(default=None, gt=0)
    """Mask sequences that contain a token ratio above this value."""

    adv_tau: float = _from_preset("adv_tau")
    """Weight of the advantage; rl defaults to 0.5 when orchestrator.teacher_model is set (except sdpo, opsd, sdpg)."""

    teacher_tau: float = _from_preset("teacher_tau", ge=0)
    """Weight of the teacher log-prob in the advantage; rl defaults to 0.5 with a teacher (same exceptions)."""

    student_tau: float | None = None
    """Weight of the student log-prob, subtracted from the advantage; unset: teacher_tau."""

    distill: DistillConfig = DistillConfig()

    anneal: AnnealConfig | None = None

    inference_kl_coef: float = Field(default=0.0, ge=0)
    """KL penalty to the sampling policy: weight of the log-ratio subtracted from the advantage."""

    kl_tau: float | None = _from_preset("kl_tau", ge=0)
    """Weight of the squared log-ratio in the loss."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; the reference model is orchestrator.teacher_model."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of the reference KL: k3 or k2; k1 is that of orchestrator.advantage.kl_coef."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    entropy_control: EntropyControlConfig | None = None

    observation_coef: float = Field(default=0.0, ge=0)
    """Weight of the cross-entropy of tokens that the environment wrote after the first response, such as tool results,
    averaged over these tokens (ECHO)."""

    loss_aggregation: LossAggregation | None = _from_preset("loss_aggregation")
    """token-mean: mean over tokens; the others average over sequences: their means (seq-mean-token-mean), sums
    (seq-mean-token-sum) or sums / max_tokens (constant)."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Divisor of loss_aggregation constant; unset: orchestrator.sampling.max_tokens, or model.seq_len."""

    old_logprobs: OldLogprobs = "inference"
    """Denominator of the importance ratio. inference: log-probs of the sampler; recomputed: of the trainer before its
    first update on the batch, and the loss is weighted by min(trainer / sampler, behavior_cap) (decoupled PPO)."""

    behavior_cap: float = Field(default=Objective.behavior_cap, gt=0)
    """Cap on the weight of old_logprobs recomputed."""

    import_path: str | None = None
    """Custom loss function as package.module:name; maps LossInputs to per-token losses."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the custom loss function."""

    @property
    def needs_teacher(self) -> str | None:
        """The enabled option that requires teacher log-probs, if any."""
        return next((name for name in ("teacher_tau", "kl_coef") if getattr(self, name)), None)

    @property
    def top_logprobs(self) -> int:
        """`distill.top_logprobs`, 0 if the loss has no teacher to distill."""
        return self.distill.top_logprobs if self.teacher_tau else 0

    def import_custom(self) -> Callable[..., Any] | None:
        """The custom loss with its keyword arguments, None without one; `ValueError` if it cannot be called."""
        if self.import_path is None:
            return None
        function = import_function(self.import_path, "loss.import_path")
        check_arguments(function, self.import_path, "loss.import_path", self.kwargs)
        return partial(function, **self.kwargs)

    @model_validator(mode="before")
    @classmethod
    def _fill_distill(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("distill", {}), dict):
            return data
        filled = fill_distill(data.get("type"), data.get("distill"))
        return {**data, "distill": filled} if filled else data

    @model_validator(mode="after")
    def _check_options_of_preset(self) -> LossConfig:
        preset, is_custom = PRESETS[self.type], self.type == "custom"
        for option, choice in BOUND_OPTIONS.items():
            if choice not in preset.bounds and getattr(self, option) is not None:
                users = ", ".join(name for name, row in PRESETS.items() if choice in row.bounds)
                raise ValueError(
                    f"{option} has no effect with type {self.type}: remove it or set it to None, or use one of {users}"
                )
        if self.ratio is not None and (self.ratio == "none") != (preset.ratio == "none"):
            raise ValueError(f"ratio {self.ratio} is incompatible with type {self.type}, whose ratio is {preset.ratio}")
        if preset.gate_pos is not None and None in (self.gate_pos, self.gate_neg):
            raise ValueError(f"type {self.type} needs gate_pos and gate_neg: set both above 0")
        if preset.gamma_pos is not None and min(*(self.gamma_pos or (0, 0)), *(self.gamma_neg or (0, 0))) <= 0:
            raise ValueError(f"type {self.type} needs gamma_pos and gamma_neg: set the numbers of both above 0")
        if self.old_logprobs == "recomputed" and preset.ratio == "none":
            raise ValueError(f"type {self.type} has no importance ratio: remove old_logprobs, or use another type")
        if self.behavior_cap != Objective.behavior_cap and self.old_logprobs == "inference":
            raise ValueError("behavior_cap has no effect with old_logprobs inference: remove it, or use recomputed")
        if self.kl_coef and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 in the loss has a gradient without the reference, of mean 0 on policy: use k2 or k3, "
                "or subtract it from rewards with orchestrator.advantage.kl_coef"
            )
        if is_custom != (self.import_path is not None):
            raise ValueError("type custom and import_path go together: set both or neither")
        if self.kwargs and not is_custom:
            raise ValueError("kwargs are arguments of a custom loss: set type custom, or remove them")
        if self.entropy_control is not None and self.entropy_coef:
            raise ValueError("entropy_coef and entropy_control both set the entropy bonus: remove one of them")
        if self.anneal is not None and not self.teacher_tau:
            raise ValueError("anneal decays teacher_tau but it is 0: raise it, or leave anneal out")
        if self.anneal is not None and self.anneal.margin and not (self.adv_tau > 0 and self.student_tau != 0):
            raise ValueError(
                "anneal.margin compares adv_tau with student_tau: raise both above 0, or set anneal.factor"
            )
        if self.max_tokens is not None and (self.loss_aggregation or preset.loss_aggregation) != "constant":
            raise ValueError(
                "max_tokens is the divisor of loss_aggregation constant: remove it, or set that loss_aggregation"
            )
        return self

    @model_validator(mode="after")
    def _check_target(self) -> LossConfig:
        student_tau = self.teacher_tau if self.student_tau is None else self.student_tau
        if self.teacher_tau and self.distill.has_target and not student_tau > 0:
            raise ValueError(
                f"student_tau = {student_tau:g} leaves no target for distill.estimator = "
                f'"{self.distill.estimator}" in the direction '
                f'"{"adaptive" if self.distill.estimator == "auto" else self.distill.direction}"\n'
                '  set student_tau above 0, or distill.direction = "reverse" with estimator "topk+tail" or "full"'
            )
        return self


class CriticConfig(BaseConfig):
    """A value function, whose generalized advantage estimates replace the advantages of the batch.

    Enabled by the presence of the section. The reward of a sample is its advantage in the batch: rl sets
    orchestrator.advantage.baseline to none.
    """

    backbone: Literal["own", "shared", "detached"] = "own"
    """own: a copy of the policy model with a head; shared: a head on the policy's hidden states, which its loss trains
    too; detached: the same without a gradient to the policy."""

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the critic's parameters; unset: optim.lr."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per sampled token."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Exponent of GAE: 1 is the return minus the value, 0 the one-step error."""

    value_clip: float | None = Field(default=0.5, gt=0)
    """Clip of a value's change within a batch; None: unbounded."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of the value loss."""

    whiten: bool = True
    """Subtract the mean of the batch's advantages and divide by their standard deviation."""

    warmup_steps: int = Field(default=0, ge=0)
    """First steps that update the critic's parameters only."""


class FakeDataConfig(BaseConfig):
    """Random samples instead of those of the orchestrator."""

    batch_size: int = Field(default=16, ge=1)
    """Samples per step."""

    group_size: int = Field(default=4, ge=1)
    """Samples per prompt."""


class DataConfig(BaseConfig):
    """Source of training batches."""

    fake: FakeDataConfig | None = None

    timeout_s: float = Field(default=3600, gt=0)
    """Timeout for one batch of the orchestrator, in seconds."""
