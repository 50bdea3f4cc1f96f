"""Golden vectors for losses and advantages: results of other frameworks, for a test that does not need them.

    make test-peers
    git clone https://github.com/PrimeIntellect-ai/prime-rl
    .venv-peers/bin/python dev/make_golden_losses.py tests/unit/golden/losses.json prime-rl

Only numbers are written. The live comparison of the tests also uses `ORACLES` and `ADVANTAGES`, except for the rows of
prime-rl, which has no wheel.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

MAX_TOKENS = 32
LENGTHS = (10, 17, 20, 13)
SPREADS = {"near": 0.3, "far": 1.5, "tiny": 3e-4}
Streams = dict[str, Tensor]
NO_DUAL_CLIP = 1e9


def draw_streams(kind: str) -> Streams:
    """Rows of log-probs of trainer, sampler and reference, a mask that is 1 for the first tokens, and advantages."""
    generator = torch.Generator().manual_seed(list(SPREADS).index(kind))
    shape = (len(LENGTHS), max(LENGTHS))

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    old = -0.1 - 3 * noise(*shape).abs()
    return {
        "trainer": (old + SPREADS[kind] * noise(*shape)).clamp(max=-1e-3) * mask,
        "inference": old * mask,
        "reference": (old + 0.2 * noise(*shape)).clamp(max=-1e-3) * mask,
        "mask": mask,
        "advantages": noise(shape[0]),
    }


# --- verl -------------------------------------------------------------------------------------------------------------


def _verl(name: str, aggregation: str, low: float = 0.2, high: float = 0.2, c: float = NO_DUAL_CLIP) -> Any:
    def loss(s: Streams) -> Tensor:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import ActorConfig

        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=c,
            loss_scale_factor=MAX_TOKENS,
        )
        if aggregation == "seq-mean-token-sum-norm":
            config.global_batch_info["loss_scale_factor"] = MAX_TOKENS
        advantages = s["advantages"][:, None].expand_as(s["mask"])
        return get_policy_loss_fn(name)(
            s["inference"], s["trainer"], advantages, s["mask"], loss_agg_mode=aggregation, config=config
        )[0]

    return loss


def _verl_reinforce(aggregation: str, threshold: float | str | None, level: str = "token") -> Any:
    def loss(s: Streams) -> Tensor:
        from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
        from verl.workers.config import ActorConfig

        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
        advantages, weights = s["advantages"][:, None].expand_as(s["mask"]), None
        if threshold is not None:
            log_ratio = (s["trainer"] - s["inference"]).detach()
            weights, _ = compute_rollout_correction_weights(log_ratio, s["mask"], level, threshold)
        return compute_policy_loss_reinforce(
            s["inference"], s["trainer"], advantages, s["mask"], aggregation, config, weights
        )[0]

    return loss


# --- TRL --------------------------------------------------------------------------------------------------------------


@contextmanager
def _wide_constants() -> Iterator[None]:
    """Make Python numbers that become tensors double precision, like the streams."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Trainer(SimpleNamespace):
    """The attributes of the trainer that TRL's loss uses; other options are off."""

    def __getattr__(self, name: str) -> None:
        return None


def _trl(
    kind: str, low: float, high: float, *, level: str = "token", delta: float | None = None, beta: float = 0.0
) -> Any:
    def loss(s: Streams) -> Tensor:
        from trl.experimental.gmpo import GMPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer

        kinds = {"gmpo": GMPOTrainer}
        logprobs = s["trainer"]
        trainer = _Trainer(
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
            top_entropy_quantile=1.0,
            beta=beta,
            importance_sampling_level=level,
            epsilon_low=low,
            epsilon_high=high,
            args=_Trainer(
                delta=delta,
                steps_per_generation=1,
                sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05,
                vespo_k_pos=2.0,
                vespo_lambda_pos=3.0,
                vespo_k_neg=3.0,
                vespo_lambda_neg=2.0,
            ),
            loss_type=kind,
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX_TOKENS,
            model=torch.nn.Identity(),
            accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        none = torch.zeros(len(logprobs), 0, dtype=torch.int64)
        inputs = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": torch.zeros_like(logprobs, dtype=torch.int64),
            "completion_mask": s["mask"],
            "advantages": s["advantages"],
            "old_per_token_logps": s["inference"],
            "ref_per_token_logps": s["reference"],
            "num_items_in_batch": s["mask"].sum(),
        }
        with _wide_constants():
            return kinds.get(kind, GRPOTrainer)._compute_loss(trainer, torch.nn.Identity(), inputs)

    return loss


# --- Liger ------------------------------------------------------------------------------------------------------------


def _liger(
    kind: str, low: float, high: float, *, level: str = "token", delta: float | None = None, beta: float = 0.0
) -> Any:
    def loss(s: Streams) -> Tensor:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

        return LigerFusedLinearGRPOFunction.ppo_loss_fn(
            s["trainer"],
            s["mask"],
            s["advantages"],
            s["mask"],
            ref_per_token_logps=s["reference"],
            old_per_token_logps=s["inference"],
            epsilon_low=low,
            epsilon_high=high,
            beta=beta,
            loss_type=kind,
            max_completion_length=MAX_TOKENS,
            importance_sampling_level=level,
            delta=delta,
        )[0]

    return loss


# --- prime-rl, one file of which is read from its repository ---------------------------------------------------------

PRIME_RL: list[Path] = []
"""Path of the repository, set by `main`."""


class _Anything(types.ModuleType):
    """A stub for modules whose names the file imports but does not use in its formulas."""

    def __getattr__(self, name: str) -> Any:
        return name


@cache
def _prime_rl(revision: str) -> dict[str, Any]:
    """The names that its loss module defines at a revision."""
    command = ["git", "-C", str(PRIME_RL[0]), "show", f"{revision}:src/prime_rl/trainer/rl/loss.py"]
    source = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stubs = ("beartype", "prime_rl.configs", "prime_rl.configs.trainer", "prime_rl.utils.utils")
    stubs += ("prime_rl.trainer.rl.config",)
    sys.modules.update({name: _Anything(name) for name in stubs})
    importlib.import_module("jaxtyping").jaxtyped = lambda **_: lambda function: function  # type: ignore[attr-defined]
    module = types.ModuleType("prime_rl_loss")
    sys.modules["prime_rl_loss"] = module
    exec(compile(source, "loss.py", "exec"), module.__dict__)
    return module.__dict__


@cache
def _skyrl() -> dict[str, Any]:
    """The names of SkyRL's module of losses, without the packages that the rest of SkyRL needs."""
    spec = importlib.util.find_spec("skyrl")
    assert spec is not None and spec.submodule_search_locations
    package = "skyrl.backends.skyrl_train.utils"
    unused = (f"{package}.off_policy_correction_utils", "skyrl.train.config")
    sys.modules.update({name: _Anything(name) for name in unused})
    for name in (f"{package}.torch_utils", f"{package}.ppo_utils"):
        path = Path(spec.submodule_search_locations[0], *name.split(".")[1:]).with_suffix(".py")
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), module.__dict__)
    return module.__dict__


def _rows(s: Streams, name: str) -> list[Tensor]:
    return [row[:n] for row, n in zip(s[name], LENGTHS, strict=True)]


def _prime_rl_masked(**options: Any) -> Any:
    """The masked importance sampling of December 2025, with its taus."""

    def loss(s: Streams) -> Tensor:
        config = SimpleNamespace(
            **{
                "ratio_type": "token",
                "sequence_clip_high": 10.0,
                "token_mask_low": 0.125,
                "token_mask_high": 8.0,
                "geo_mask_low": 0.1,
                "geo_mask_high": 10.0,
                "sequence_mask_low": 0.0,
                "sequence_mask_high": 100.0,
                "adv_tau": 1.0,
                "teacher_tau": 0.0,
                "kl_tau": 0.0,
                **options,
            }
        )
        advantages = [a.expand(n) for a, n in zip(s["advantages"], LENGTHS, strict=True)]
        masks = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
        scale = len(LENGTHS) if config.ratio_type == "sequence" else sum(LENGTHS)
        streams = [_rows(s, name) for name in ("trainer", "inference", "reference")]
        return _prime_rl("1a5841b06")["compute_loss"](*streams, advantages, masks, config, scale)[0]

    return loss


def _prime_rl_default(s: Streams) -> Tensor:
    """Its default of August 2026."""
    names, config = (
        _prime_rl("559b44772"),
        SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1, kl_tau=1e-3),
    )
    losses = []
    for trainer, inference, a in zip(_rows(s, "trainer"), _rows(s, "inference"), s["advantages"], strict=True):
        inputs = names["LossInputs"](
            trainer_logprobs=trainer,
            inference_logprobs=inference,
            ref_logprobs=None,
            advantages=a.expand(len(trainer)),
            loss_mask=torch.ones(len(trainer), dtype=torch.bool),
        )
        losses.append(names["default_loss_fn"](inputs, config).loss)
    return torch.stack(losses).sum() / sum(LENGTHS)


# --- oracles by case --------------------------------------------------------------------------------------------------

TOKENS, MEANS, SUMS, CONSTANT = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"

CASES: dict[str, dict[str, Any]] = {
    **{n: {} for n in "aipo grpo gspo opo rloo cispo ppo dapo dr_grpo reinforce".split()},
    **{n: {} for n in "luspo sapo gmpo vespo maxrl".split()},
    "dppo": {},
    "dppo_no_kl": {"kl_tau": 0.0},
    "aipo_masks": {
        "ratio_cap": None,
        "token_mask_low": 0.125,
        "token_mask_high": 8.0,
        "seq_ratio_mask_low": 0.8,
        "seq_ratio_mask_high": 1.25,
        "sequence_mask_high": 20.0,
        "adv_tau": 0.7,
        "teacher_tau": 0.5,
        "student_tau": 0.5,
        "inference_kl_coef": 0.1,
    },
    "aipo_sequence": {
        "ratio": "product",
        "ratio_cap": 10.0,
        "sequence_mask_low": 0.01,
        "loss_aggregation": "seq-mean-token-mean",
    },
    "aipo_icepop": {"token_mask_low": 0.5, "token_mask_high": 2.0, "ratio_cap": None},
    "aipo_product": {"ratio": "product", "ratio_cap": 2.0},
    "grpo_ref_kl": {"kl_coef": 0.3},
    "dapo_ref_kl": {"kl_coef": 0.3},
}
"""Name of a case -> choices that differ from the preset its name begins with."""

ORACLES: dict[str, dict[str, Callable[[Streams], Tensor]]] = {
    "aipo": {"verl": _verl_reinforce(TOKENS, 8.0)},
    "aipo_icepop": {"verl": _verl_reinforce(TOKENS, "0.5_2.0")},
    "aipo_product": {"verl": _verl_reinforce(TOKENS, 2.0, "sequence")},
    "grpo": {
        "verl": _verl("vanilla", MEANS),
        "trl": _trl("grpo", 0.2, 0.2),
        "liger": _liger("grpo", 0.2, 0.2),
    },
    "grpo_ref_kl": {"trl": _trl("grpo", 0.2, 0.2, beta=0.3), "liger": _liger("grpo", 0.2, 0.2, beta=0.3)},
    "gspo": {
        "verl": _verl("gspo", MEANS, 3e-4, 4e-4),
        "trl": _trl("grpo", 3e-4, 4e-4, level="sequence"),
        "liger": _liger("grpo", 3e-4, 4e-4, level="sequence"),
    },
    "luspo": {
        "trl": _trl("luspo", 3e-4, 4e-4, level="sequence"),
        "liger": _liger("luspo", 3e-4, 4e-4, level="sequence"),
    },
    "sapo": {"verl": _verl("sapo", MEANS), "trl": _trl("sapo", 0.2, 0.2), "liger": _liger("sapo", 0.2, 0.2)},
    "gmpo": {"verl": _verl("geo_mean", MEANS, 0.4, 0.4), "trl": _trl("gmpo", 0.4, 0.4)},
    "vespo": {"trl": _trl("vespo", 0.2, 0.2), "liger": _liger("vespo", 0.2, 0.2)},
    "maxrl": {"verl": _verl_reinforce(SUMS, 8.0)},
    "opo": {"verl": _verl_reinforce(TOKENS, 8.0)},
    "rloo": {"verl": _verl_reinforce(SUMS, 8.0)},
    "cispo": {
        "verl": _verl("cispo", TOKENS, 1.0, 0.28),
        "trl": _trl("cispo", 1.0, 1.28),
        "liger": _liger("cispo", 1.0, 1.28),
    },
    "ppo": {
        "verl": _verl("vanilla", TOKENS, c=3.0),
        "trl": _trl("bnpo", 0.2, 0.2, delta=3.0),
        "liger": _liger("bnpo", 0.2, 0.2, delta=3.0),
    },
    "dapo": {
        "verl": _verl("vanilla", TOKENS, 0.2, 0.28),
        "trl": _trl("dapo", 0.2, 0.28),
        "liger": _liger("dapo", 0.2, 0.28),
    },
    "dapo_ref_kl": {"trl": _trl("dapo", 0.2, 0.28, beta=0.3), "liger": _liger("dapo", 0.2, 0.28, beta=0.3)},
    "dr_grpo": {
        "verl": _verl("vanilla", CONSTANT),
        "trl": _trl("dr_grpo", 0.2, 0.2),
        "liger": _liger("dr_grpo", 0.2, 0.2),
    },
    "reinforce": {"verl": _verl_reinforce(TOKENS, None)},
    "dppo": {"prime-rl": _prime_rl_default},
    # Its ratio is detached and multiplies the log-prob: another value, the same gradient.
    "dppo_no_kl": {"verl gradient": _verl("dppo_tv", TOKENS, 0.2, 0.2)},
    "aipo_masks": {
        "prime-rl": _prime_rl_masked(
            geo_mask_low=0.8, geo_mask_high=1.25, sequence_mask_high=20.0, adv_tau=0.7, teacher_tau=0.5, kl_tau=0.1
        )
    },
    "aipo_sequence": {
        "prime-rl": _prime_rl_masked(
            ratio_type="sequence",
            token_mask_low=0.0,
            token_mask_high=torch.inf,
            geo_mask_low=0.0,
            geo_mask_high=torch.inf,
            sequence_mask_low=0.01,
            sequence_mask_high=torch.inf,
        )
    },
}


def run_oracle(oracle: Callable[[Streams], Tensor], streams: Streams) -> tuple[float, Tensor]:
    """Value, and gradient with respect to the trainer's log-probs."""
    trainer = streams["trainer"].clone().requires_grad_()
    loss = oracle({**streams, "trainer": trainer})
    [gradient] = torch.autograd.grad(loss, trainer)
    return loss.item(), gradient * streams["mask"]


# --- advantages -------------------------------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 0.25, 0.5], [0.0, 2.0, -1.0, 0.3]]
RESPONSE_LENGTHS = [[3, 9, 4, 7], [5, 5, 1, 8]]


def _verl_advantages(name: str, **options: Any) -> Callable[[], list[list[float]]]:
    def advantages() -> list[list[float]]:
        import numpy
        from verl.trainer.ppo import core_algos

        lengths = torch.tensor(RESPONSE_LENGTHS).flatten()
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).double()
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = torch.tensor(REWARDS, dtype=torch.float64).flatten()
        group = numpy.repeat(numpy.arange(len(REWARDS)), len(REWARDS[0]))
        function = getattr(core_algos, f"compute_{name}_outcome_advantage")
        result = function(rewards, mask, group, **options)[0]
        return [row.tolist() for row in result[:, 0].reshape(len(REWARDS), -1)]

    return advantages


def _skyrl_maxrl() -> list[list[float]]:
    import numpy

    rewards = torch.tensor(REWARDS, dtype=torch.float64).flatten()[:, None]
    group = numpy.repeat(numpy.arange(len(REWARDS)), len(REWARDS[0]))
    result = _skyrl()["compute_maxrl_advantage"](rewards, torch.ones_like(rewards), group, epsilon=0.0)[0]
    return [row.tolist() for row in result[:, 0].reshape(len(REWARDS), -1)]


COMPONENTS = {"correct": REWARDS, "format": [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]]}
WEIGHTS = {"correct": 1.0, "format": 0.5}


def _verl_gdpo() -> list[list[float]]:
    """In double precision; the weights are scaled so that the constant in its last division vanishes."""
    import numpy
    from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

    num = len(REWARDS) * len(REWARDS[0])
    mask = torch.ones(num, 1, dtype=torch.float64)
    columns = {name: numpy.array(groups).flatten() for name, groups in COMPONENTS.items()}
    config = {"gdpo_reward_keys": list(WEIGHTS), "gdpo_reward_weights": [2.0**14 * w for w in WEIGHTS.values()]}
    batch = {"prompts": torch.zeros(num, 1), "attention_mask": torch.ones(num, 2, dtype=torch.int64)}
    group = numpy.repeat(numpy.arange(len(REWARDS)), len(REWARDS[0]))
    with patch.object(torch, "float32", torch.float64), patch.object(numpy, "float32", numpy.float64):
        result = compute_gdpo_outcome_advantage(
            mask, mask, group, epsilon=0.0, config=config, non_tensor_batch=columns, batch=batch
        )[0]
    return [row.tolist() for row in result[:, 0].reshape(len(REWARDS), -1)]


ADVANTAGES: dict[str, tuple[dict[str, str], Callable[[], list[list[float]]]]] = {
    "grpo": ({"baseline": "mean", "std": "group"}, _verl_advantages("grpo", epsilon=0.0)),
    "dr_grpo": ({"baseline": "mean"}, _verl_advantages("grpo", norm_adv_by_std_in_grpo=False)),
    "rloo": ({"baseline": "leave_one_out"}, _verl_advantages("rloo")),
    "opo": ({"baseline": "length_weighted"}, _verl_advantages("opo")),
    "maxrl": ({"baseline": "mean", "std": "mean"}, _skyrl_maxrl),
}


# --- critic -----------------------------------------------------------------------------------------------------------

GAMMA, GAE_LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.2


def draw_values() -> Streams:
    """Values before and after updates, a reward for the last token of each row, and masks with and without gaps."""
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), max(LENGTHS))
    old, new = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    gaps = mask.clone()
    gaps[:, 3:6] = 0.0  # tokens of the environment
    rewards = torch.zeros(shape, dtype=torch.float64)
    rewards[torch.arange(shape[0]), torch.tensor(LENGTHS) - 1] = torch.tensor(
        [1.0, 0.0, -0.5, 2.0], dtype=torch.float64
    )
    return {"old": old * mask, "new": (old + 0.3 * new) * mask, "mask": mask, "gaps": gaps, "rewards": rewards}


def _verl_critic(s: Streams, mask: Tensor) -> dict[str, Any]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss

    advantages, returns = compute_gae_advantage_return(s["rewards"], s["old"], mask, GAMMA, GAE_LAMBDA)
    new = s["new"].clone().requires_grad_()
    loss, _ = compute_value_loss(new, returns, s["old"], mask, VALUE_CLIP, "token-mean")
    return _pack_critic(advantages, returns, loss, new, mask)


def _skyrl_critic(s: Streams, mask: Tensor) -> dict[str, Any]:
    """Its loss is a mean over rows of means over tokens: compared row by row."""
    names = _skyrl()
    advantages, returns = names["compute_gae_advantage_return"](s["rewards"], s["old"], mask, GAMMA, GAE_LAMBDA)
    new, config = s["new"].clone().requires_grad_(), SimpleNamespace(value_clip=VALUE_CLIP)
    rows = [
        names["ppo_critic_loss"](new[i : i + 1], s["old"][i : i + 1], returns[i : i + 1], config, mask[i : i + 1])[0]
        for i in range(len(new))
    ]
    loss = sum(row * n for row, n in zip(rows, mask.sum(1), strict=True)) / mask.sum()
    return _pack_critic(advantages, returns, loss, new, mask)


def _pack_critic(advantages: Tensor, returns: Tensor, loss: Tensor, new: Tensor, mask: Tensor) -> dict[str, Any]:
    [gradient] = torch.autograd.grad(loss, new)
    named = {"advantages": advantages, "returns": returns, "gradient": gradient}
    return {"loss": loss.item(), **{name: x[mask > 0].tolist() for name, x in named.items()}}


CRITIC: dict[str, Callable[[Streams], dict[str, Any]]] = {
    "verl": lambda s: _verl_critic(s, s["mask"]),
    "verl gaps": lambda s: _verl_critic(s, s["gaps"]),
    "skyrl": lambda s: _skyrl_critic(s, s["mask"]),
}


# --- self-distillation ------------------------------------------------------------------------------------------------

TOP_K = 4


def draw_distillation(seed: int = 11) -> Streams:
    """Rows of logits of student and teacher, sampled tokens with the sampler's log-probs, a mask, and advantages."""
    generator = torch.Generator().manual_seed(seed)
    lengths, vocabulary = torch.tensor([3, 5, 2, 4]), 9

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    shape = (len(lengths), int(lengths.max()))
    student, teacher = 1.5 * noise(*shape, vocabulary), 1.5 * noise(*shape, vocabulary)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    own = torch.log_softmax(student, -1).gather(-1, tokens[..., None]).squeeze(-1)
    return {
        "student": student,
        "teacher": teacher,
        "tokens": tokens,
        "inference": (own + 0.3 * noise(*shape)).clamp(max=-1e-3),
        "mask": (torch.arange(shape[1]) < lengths[:, None]).double(),
        "advantages": noise(len(lengths)),
    }


def _trl_sdpo(s: Streams) -> Tensor:
    """Its support is the student's top k; with both exchanged, the teacher's, and alpha 0 is KL(student || teacher)."""
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss

    kl = compute_topk_self_distillation_loss(
        s["teacher"], s["student"], distillation_topk=TOP_K, distillation_alpha=0.0, distillation_add_tail=True
    )
    return (kl * s["mask"]).sum() / s["mask"].sum()


def _trl_full(s: Streams, alpha: float) -> Tensor:
    from trl.experimental.sdpo.loss_utils import compute_full_logit_self_distillation_loss

    return compute_full_logit_self_distillation_loss(s["student"], s["teacher"], distillation_alpha=alpha)


def _gkd_jsd(s: Streams) -> Tensor:
    """Its sum over all tokens, row by row."""
    from trl.experimental.gkd import GKDTrainer

    logits = (s["student"], s["teacher"])
    rows = [
        GKDTrainer.generalized_jsd_loss(*(x[i : i + 1, :n] for x in logits), beta=0.5, reduction="sum") / n
        for i, n in enumerate(s["mask"].sum(1).int().tolist())
    ]
    return torch.stack(rows).mean()


def _sdpg(s: Streams) -> Tensor:
    """No framework has all of it: verl's clipped loss, plus TRL's divergence where the advantage is positive."""
    own = torch.log_softmax(s["student"], -1).gather(-1, s["tokens"][..., None]).squeeze(-1)
    kl = torch.where(s["advantages"][:, None] > 0, _trl_full(s, 1.0), 0.0) * s["mask"]
    return _verl("vanilla", TOKENS, 0.2, 0.28)({**s, "trainer": own}) + 1e-3 * kl.sum() / s["mask"].sum()


DISTILLATION: dict[str, dict[str, Callable[[Streams], Tensor]]] = {
    "sdpo": {"trl": _trl_sdpo},
    "opsd": {
        "trl": lambda s: ((_trl_full(s, 0.5) * s["mask"]).sum(1) / s["mask"].sum(1)).mean(),
        "trl gkd": _gkd_jsd,
    },
    "sdpg": {"verl and trl": _sdpg},
}


def run_distillation(oracle: Callable[[Streams], Tensor], streams: Streams) -> dict[str, Any]:
    """Value, and gradient with respect to the student's logits."""
    student = streams["student"].clone().requires_grad_()
    loss = oracle({**streams, "student": student})
    [gradient] = torch.autograd.grad(loss, student)
    return {"value": loss.item(), "gradient": gradient[streams["mask"] > 0].tolist()}


def main(path: Path, prime_rl: Path) -> None:
    """Run every oracle on every draw and write the results."""
    PRIME_RL.append(prime_rl)
    draws = {kind: draw_streams(kind) for kind in SPREADS}
    losses = {
        case: {
            oracle: {
                kind: {"value": value, "gradient": gradient[streams["mask"] > 0].tolist()}
                for kind, streams in draws.items()
                for value, gradient in [run_oracle(function, streams)]
            }
            for oracle, function in oracles.items()
        }
        for case, oracles in ORACLES.items()
    }
    golden = {
        "made_by": {
            name: importlib.metadata.version(name) for name in ("verl", "trl", "liger-kernel", "skyrl", "torch")
        }
        | {"prime-rl": "1a5841b06 and 559b44772"},
        "streams": {kind: {name: s.tolist() for name, s in streams.items()} for kind, streams in draws.items()},
        "losses": losses,
        "advantages": {name: function() for name, (_, function) in ADVANTAGES.items()},
        "decoupled_advantages": {"verl": _verl_gdpo()},
        "critic_streams": {name: s.tolist() for name, s in draw_values().items()},
        "critic": {name: function(draw_values()) for name, function in CRITIC.items()},
        "distillation_streams": {name: s.tolist() for name, s in draw_distillation().items()},
        "distillation": {
            name: {oracle: run_distillation(function, draw_distillation()) for oracle, function in oracles.items()}
            for name, oracles in DISTILLATION.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
