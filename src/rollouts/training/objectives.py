"""What a policy objective is: a row of choices, and the rows that papers have given a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Deviation = Literal["none", "group", "batch"]
Ratio = Literal["none", "token", "geometric", "arithmetic", "product"]
Normaliser = Literal["tokens", "sequences", "sums", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Estimator = Literal["token", "togo", "sequence", "topk+tail", "full"]
Direction = Literal["reverse", "forward", "jsd"]


@dataclass(frozen=True)
class AdvantageChoice:
    """How rewards become advantages, the half of an objective that is computed where groups are whole.

    `std`: divide by the standard deviation of the rewards of the group or of the batch. `drop_equal`: a group of equal
    rewards is replaced by another prompt's. `overlong`: answers close to the token limit lose reward.
    """

    baseline: Baseline = "mean"
    std: Deviation = "none"
    drop_equal: bool = False
    overlong: bool = False


@dataclass(frozen=True)
class DistillChoice:
    """How the teacher's term of an objective is estimated; `rl_losses.distill` has the formulas.

    token      the sampled token's log-probs, in the advantage of that token
    togo       those of the tokens that follow too, against the rest of the group
    sequence   those of the whole response on each of its tokens, against the rest of the group
    topk+tail  the teacher's k likeliest tokens and all others as one, in the loss
    full       the whole vocabulary, in the loss

    `direction` says which divergence the last two minimise (the others know reverse KL only); `jsd_beta` is the
    teacher's share of the mixture of jsd. `clip` bounds the teacher's log-prob of a sampled token to that of the
    student plus or minus so much.
    """

    estimator: Estimator = "token"
    direction: Direction = "reverse"
    jsd_beta: float = 0.5
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.direction != "reverse" and not self.has_table:
            raise ValueError(
                f"direction {self.direction} needs more than the sampled token: "
                f"estimator topk+tail or full, not {self.estimator}"
            )
        if not 0 < self.jsd_beta < 1:
            raise ValueError(f"jsd_beta {self.jsd_beta} must lie between 0 and 1")
        if self.clip is not None and (self.has_table or not self.clip > 0):
            raise ValueError(f"clip {self.clip} bounds sampled tokens and must be above 0: remove it")

    @property
    def has_table(self) -> bool:
        """Whether the loss compares distributions, not the log-probs of sampled tokens alone."""
        return self.estimator in ("topk+tail", "full")


LOW_COVERAGE = 0.2
"""Where students put less than this on the teacher's favourite token, they hardly ever sample what it would say."""


def choose_distillation(coverage: float, has_topk: bool) -> DistillChoice:
    """What to distil with, given the mean probability that students give to the teacher's likeliest token.

    A student that never samples what the teacher would say learns nothing from the log-probs of its own tokens: there
    forward KL pulls where reverse KL only pushes. `has_topk`: the teacher's server tells more than sampled tokens.
    """
    if not has_topk:
        return DistillChoice("token")
    return DistillChoice("topk+tail", "forward" if coverage < LOW_COVERAGE else "reverse")


@dataclass(frozen=True)
class Objective:
    """One objective as choices. With l the trainer's log-prob, r = exp(l - inference log-prob), sg = stop-gradient:

        w    the ratio: 1, r, or of the whole sequence its geometric mean, arithmetic mean or product of r
        A'   the advantage mix, see `policy.mix_advantages`
        loss = -sg(min(clip(w), ratio_cap)) A' l        when `detached`
             = max(-w A', -clip(w) A'), at most -dual_clip A' where A' < 0        otherwise
             + kl_tau (l - inference)^2 + ref_kl_tau KL(policy || reference) - entropy_tau H
             + the teacher's term, where `distill` compares distributions

    clip(w) lies in [1 - clip_low, 1 + clip_high]. The masks drop a token when its own ratio, the geometric mean of its
    sequence's ratios, or any single ratio of its sequence is out of bounds; `prob_bound` d drops it when
    sign(A') (p_trainer - p_inference) > d. None: no bound.

    Token losses become one number by `normaliser`: mean over tokens, or mean over sequences of their means
    ("sequences"), sums ("sums"), or sums / `max_tokens` ("constant").
    """

    name: str
    ratio: Ratio = "token"
    detached: bool = True
    ratio_cap: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    prob_bound: float | None = None
    token_mask_low: float | None = None
    token_mask_high: float | None = None
    geo_mask_low: float | None = None
    geo_mask_high: float | None = None
    sequence_mask_low: float | None = None
    sequence_mask_high: float | None = None
    adv_tau: float = 1.0
    teacher_tau: float = 0.0
    student_tau: float = 0.0
    sampler_tau: float = 0.0
    kl_tau: float = 0.0
    ref_kl_tau: float = 0.0
    ref_kl_estimator: KLEstimator = "k3"
    entropy_tau: float = 0.0
    normaliser: Normaliser = "tokens"
    max_tokens: int | None = None
    advantage: AdvantageChoice = AdvantageChoice()
    distill: DistillChoice = DistillChoice()

    @property
    def unit(self) -> Literal["token", "sequence"]:
        """What the loss is a mean over."""
        return "token" if self.normaliser == "tokens" else "sequence"

    @property
    def bounds(self) -> frozenset[str]:
        """Names of the trust region's options that mean something here, apart from the masks, which always do."""
        if self.name in ("reinforce", "custom"):
            return frozenset()
        if self.prob_bound is not None:
            return frozenset({"prob_bound"})
        if not self.detached:
            return frozenset({"clip_low", "clip_high", "dual_clip"})
        return frozenset({"clip_low", "clip_high"} if self.ratio_cap is None else {"ratio_cap"})


_WHITENED = AdvantageChoice(std="group")

PRESETS: dict[str, Objective] = {
    row.name: row
    for row in (
        # LlamaRL, 2505.24034, equation 6
        Objective("aipo", ratio_cap=8.0),
        # DeepSeekMath, 2402.03300, equation 3
        Objective("grpo", detached=False, clip_low=0.2, clip_high=0.2, normaliser="sequences", advantage=_WHITENED),
        # 2507.18071, equations 5 to 7
        Objective(
            "gspo",
            ratio="geometric",
            detached=False,
            clip_low=3e-4,
            clip_high=4e-4,
            normaliser="sequences",
            advantage=_WHITENED,
        ),
        # 2505.23585, equation 11
        Objective("opo", ratio_cap=8.0, advantage=AdvantageChoice("length_weighted")),
        # 2402.14740, equation 9
        Objective("rloo", ratio_cap=8.0, normaliser="sums", advantage=AdvantageChoice("leave_one_out")),
        # MiniMax-M1, 2506.13585, equations 4 and 5
        Objective("cispo", clip_low=1.0, clip_high=0.28, advantage=_WHITENED),
        # 1707.06347, equation 7, with the dual clip of 1912.09729, equation 5
        Objective("ppo", detached=False, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        # 2503.14476, equations 8, 11 and 13
        Objective(
            "dapo",
            detached=False,
            clip_low=0.2,
            clip_high=0.28,
            advantage=AdvantageChoice(std="group", drop_equal=True, overlong=True),
        ),
        # 2503.20783, section 3.2
        Objective("dr_grpo", detached=False, clip_low=0.2, clip_high=0.2, normaliser="constant"),
        # Williams 1992
        Objective("reinforce", ratio="none", advantage=AdvantageChoice("none")),
        # 2602.04879 (binary total variation), with a squared log-ratio beside it
        Objective("dppo", detached=False, prob_bound=0.2, kl_tau=1e-3),
        # a function of the user's
        Objective("custom", ratio="none"),
    )
}
