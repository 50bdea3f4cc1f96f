"""Policy objectives as options, and presets for published algorithms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "leave_one_out", "length_weighted", "none"]
Deviation = Literal["none", "group", "batch", "mean"]
Ratio = Literal["none", "token", "geometric", "arithmetic", "product"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Estimator = Literal["token", "reward_to_go", "sequence", "topk+tail", "full"]
OldLogprobs = Literal["inference", "recomputed"]
Direction = Literal["reverse", "forward", "jsd", "adaptive"]
DistillGate = Literal["none", "positive"]

MAX_LOG_RATIO = 20.0
"""Upper bound of log-ratios before exponentiation: exp(88.8) overflows fp32.

A sampler draws a token that the trainer finds more than exp(20) times as likely with a probability of at most
exp(-20) = 2e-9 (Markov), so such a ratio is a log-prob error, and its gradient carries no information.
"""


@dataclass(frozen=True)
class AdvantageChoice:
    """The advantage estimator of an objective, computed on complete groups.

    `std`: divide by the standard deviation of the rewards of the group or of the batch, or by the group's mean reward.
    `drop_equal`: replace a group of equal rewards by one of another prompt. `overlong`: penalize completions close to
    the token limit.
    """

    baseline: Baseline = "mean"
    std: Deviation = "none"
    drop_equal: bool = False
    overlong: bool = False


@dataclass(frozen=True)
class DistillChoice:
    """Estimator of the teacher's term of an objective; `rl_losses.distill` has the formulas.

    token         log-probs of the sampled token, in its advantage
    reward_to_go  log-probs of the sampled token and all later ones, minus the group's mean
    sequence      log-probs of the whole response, in the advantage of each token, minus the group's mean
    topk+tail     the teacher's top-k tokens and the sum of all others, in the loss
    full          the whole vocabulary, in the loss

    `direction` is the divergence that the last two minimize (the others: reverse KL only); `jsd_beta` is the teacher's
    share in the mixture of jsd. `clip` bounds the difference between teacher and student log-prob of a sampled token.
    `gate` "positive" restricts the term to tokens with an advantage above 0 (SDPG).
    """

    estimator: Estimator = "token"
    direction: Direction = "reverse"
    jsd_beta: float = 0.5
    clip: float | None = None
    gate: DistillGate = "none"

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
        if self.gate != "none" and self.estimator in ("reward_to_go", "sequence"):
            raise ValueError(f"gate {self.gate} applies to single tokens: estimator token, topk+tail or full")

    @property
    def has_table(self) -> bool:
        """Whether the loss compares distributions instead of log-probs of sampled tokens."""
        return self.estimator in ("topk+tail", "full")


LOW_COVERAGE = 0.2
"""Below this probability of the teacher's most likely token under the student, "adaptive" minimizes forward KL."""


def choose_distillation(has_topk: bool) -> DistillChoice:
    """The estimator `auto`; `has_topk`: the teacher's server returns top-k log-probs."""
    return DistillChoice("topk+tail", "adaptive") if has_topk else DistillChoice("token")


@dataclass(frozen=True)
class Objective:
    """Options of a policy loss. With l the trainer's log-prob, r = exp(l - inference log-prob), sg = stop-gradient:

        w    the ratio: 1, r, or the geometric mean, arithmetic mean or product of r over the sequence
        A'   the advantage mix, see `policy.mix_advantages`
        loss = -sg(min(clip(w), ratio_cap)) A' l        when `detached`
             = max(-w A', -clip(w) A'), at most -dual_clip A' where A' < 0        otherwise
             = -4 / t sigmoid(t (w - 1)) A', t the gate of the sign of A'         with `gate_pos` and `gate_neg`
             = -sg(exp(g) w^k exp(-g w)) A' l, (k, g) those of the sign of A'     with `gamma_pos` and `gamma_neg`
             + kl_tau (l - inference)^2 + kl_coef KL(policy || reference) - entropy_coef H
             - observation_coef l, of the tokens that the environment wrote after the first response, over their count
             + the teacher's term, if `distill` compares distributions

    clip(w) is in [1 - clip_low, 1 + clip_high]. `log_clip_low` and `log_clip_high` bound log r of a token, below where
    A' < 0 and above where A' > 0, before w is formed. The masks drop a token if its own ratio (token_mask), the
    geometric mean of its sequence's ratios (seq_ratio_mask) or any ratio of its sequence (sequence_mask) is out of
    bounds;
    `max_prob_diff` d drops it if sign(A') (p_trainer - p_inference) > d. None: no bound. log w and the log-ratio of k3
    are bounded by `MAX_LOG_RATIO`; beyond it w is constant and has no gradient.

    With `old_logprobs` "recomputed" the old policy is the trainer before the first update of the batch:
    r = exp(l - old log-prob), also in `max_prob_diff`, and the first two losses are multiplied by
    sg(min(old policy / sampler, behavior_cap)). Masks, kl_tau and inference_kl_coef still refer to the sampler.

    `loss_aggregation` averages token losses over tokens (token-mean), or over sequences their means
    (seq-mean-token-mean), sums (seq-mean-token-sum) or sums / `max_tokens` (constant).
    """

    name: str
    ratio: Ratio = "token"
    detached: bool = True
    ratio_cap: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    gate_pos: float | None = None
    gate_neg: float | None = None
    gamma_pos: tuple[float, float] | None = None
    gamma_neg: tuple[float, float] | None = None
    log_clip_low: float | None = None
    log_clip_high: float | None = None
    max_prob_diff: float | None = None
    token_mask_low: float | None = None
    token_mask_high: float | None = None
    seq_ratio_mask_low: float | None = None
    seq_ratio_mask_high: float | None = None
    sequence_mask_low: float | None = None
    sequence_mask_high: float | None = None
    adv_tau: float = 1.0
    teacher_tau: float = 0.0
    student_tau: float = 0.0
    inference_kl_coef: float = 0.0
    kl_tau: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    observation_coef: float = 0.0
    loss_aggregation: LossAggregation = "token-mean"
    max_tokens: int | None = None
    old_logprobs: OldLogprobs = "inference"
    behavior_cap: float = 5.0
    advantage: AdvantageChoice = AdvantageChoice()
    distill: DistillChoice = DistillChoice()

    @property
    def has_other_terms(self) -> bool:
        """Whether tokens with zero advantage have a gradient."""
        coefs = (self.teacher_tau, self.student_tau, self.inference_kl_coef, self.kl_tau, self.kl_coef)
        return any((*coefs, self.entropy_coef, self.observation_coef))

    @property
    def unit(self) -> Literal["token", "sequence"]:
        """The unit that the loss averages over."""
        return "token" if self.loss_aggregation == "token-mean" else "sequence"

    @property
    def bounds(self) -> frozenset[str]:
        """Names of the trust-region options that apply to this objective; masks always do."""
        if self.name in ("reinforce", "custom"):
            return frozenset()
        if self.max_prob_diff is not None:
            return frozenset({"max_prob_diff"})
        if self.gate_pos is not None:
            return frozenset({"gate_pos", "gate_neg"})
        if self.gamma_pos is not None:
            return frozenset({"gamma_pos", "gamma_neg"})
        if self.log_clip_low is not None:
            return frozenset({"log_clip_low", "log_clip_high"})
        if not self.detached:
            return frozenset({"clip_low", "clip_high", "dual_clip"})
        return frozenset({"clip_low", "clip_high"} if self.ratio_cap is None else {"ratio_cap"})


_WHITENED = AdvantageChoice(std="group")
_TOPK = DistillChoice("topk+tail")

PRESETS: dict[str, Objective] = {
    row.name: row
    for row in (
        # LlamaRL, 2505.24034, equation 6
        Objective("aipo", ratio_cap=8.0),
        # DeepSeekMath, 2402.03300, equation 3
        Objective(
            "grpo",
            detached=False,
            clip_low=0.2,
            clip_high=0.2,
            loss_aggregation="seq-mean-token-mean",
            advantage=_WHITENED,
        ),
        # 2507.18071, equations 5 to 7
        Objective(
            "gspo",
            ratio="geometric",
            detached=False,
            clip_low=3e-4,
            clip_high=4e-4,
            loss_aggregation="seq-mean-token-mean",
            advantage=_WHITENED,
        ),
        # 2602.05261: the loss of a sequence in gspo, times its length
        Objective(
            "luspo",
            ratio="geometric",
            detached=False,
            clip_low=3e-4,
            clip_high=4e-4,
            loss_aggregation="seq-mean-token-sum",
            advantage=_WHITENED,
        ),
        # 2511.20347, equations 5 and 6
        Objective(
            "sapo",
            detached=False,
            gate_pos=1.0,
            gate_neg=1.05,
            loss_aggregation="seq-mean-token-mean",
            advantage=_WHITENED,
        ),
        # 2507.20673, equation 4: token ratios are clipped in the geometric mean
        Objective(
            "gmpo",
            ratio="geometric",
            detached=False,
            log_clip_low=0.4,
            log_clip_high=0.4,
            loss_aggregation="seq-mean-token-mean",
            advantage=_WHITENED,
        ),
        # 2602.10693: gamma-shaped weight of the sequence's ratio
        Objective("vespo", ratio="product", gamma_pos=(2.0, 3.0), gamma_neg=(3.0, 2.0), advantage=_WHITENED),
        # 2602.02710: gradient of the log of the success probability, truncated at the group size
        Objective("maxrl", ratio_cap=8.0, loss_aggregation="seq-mean-token-sum", advantage=AdvantageChoice(std="mean")),
        # 2505.23585, equation 11
        Objective("opo", ratio_cap=8.0, advantage=AdvantageChoice("length_weighted")),
        # 2402.14740, equation 9
        Objective(
            "rloo", ratio_cap=8.0, loss_aggregation="seq-mean-token-sum", advantage=AdvantageChoice("leave_one_out")
        ),
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
        Objective("dr_grpo", detached=False, clip_low=0.2, clip_high=0.2, loss_aggregation="constant"),
        # Williams 1992
        Objective("reinforce", ratio="none", advantage=AdvantageChoice("none")),
        # 2602.04879 (binary total variation), with a squared log-ratio beside it
        Objective("dppo", detached=False, max_prob_diff=0.2, kl_tau=1e-3),
        # Self-distillation from outcomes; the context of the teacher is orchestrator.teacher_model's.
        # SDPO, 2601.20802, equation 1, on the teacher's top k and the sum of all others
        Objective("sdpo", ratio_cap=2.0, adv_tau=0.0, teacher_tau=1.0, student_tau=1.0, distill=_TOPK),
        # OPSD, 2601.18734: JSD over the vocabulary, averaged over the tokens of a completion
        Objective(
            "opsd",
            ratio_cap=2.0,
            adv_tau=0.0,
            teacher_tau=1.0,
            student_tau=1.0,
            loss_aggregation="seq-mean-token-mean",
            distill=DistillChoice("full", "jsd"),
        ),
        # SDPG, 2606.04036: clipped policy gradient + beta KL(student || teacher) where A > 0; without its reference KL
        Objective(
            "sdpg",
            detached=False,
            clip_low=0.2,
            clip_high=0.28,
            teacher_tau=1e-3,
            student_tau=1e-3,
            advantage=_WHITENED,
            distill=DistillChoice("full", gate="positive"),
        ),
        # a user-defined loss function
        Objective("custom", ratio="none"),
    )
}
