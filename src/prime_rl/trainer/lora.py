"""LoRA: linear layer with adapter, training setup, and adapters in PEFT format.

y = W x + b + scale * B (A x), scale = alpha / rank (Hu et al. 2021, 2106.09685). Trainer and engine share
`lora_delta`, so that they agree bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.moe import Router
from prime_rl.trainer.models.value import without_critic
from prime_rl.transport.weights import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    PEFT_PREFIX,
    check_adapter_config,
)
from rollouts.kernels.linear import linear, linear_inexact
from rollouts.training.json_files import read_json_file
from rollouts.training.numerics import MIN_RANK, pad_rows

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""Not adapted in mixture-of-experts models, not even in dense layers: `peft` maps these names to the experts."""

TEXT_PREFIX = "model.language_model."
"""In checkpoints of models of images and text, such as Qwen3.5, where an adapter of the language model has `model.`."""
FINGERPRINT_SIZE = 64
"""Number of values of each frozen tensor that identify the base model of a checkpoint."""


@dataclass(frozen=True)
class LoraSpec:
    """LoRA hyperparameters; `modules_to_save` are fully fine-tuned and stored in full."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    modules_to_save: tuple[str, ...] = ()
    rslora: bool = False

    @property
    def scale(self) -> float:
        """LoRA scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA (2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Adapter:
    """Adapter tensors by module: `<module>.lora_A.weight` [rank, in], `<module>.lora_B.weight` [out, rank].

    Fully fine-tuned modules keep their parameter names, such as `lm_head.weight`.
    """

    spec: LoraSpec
    tensors: dict[str, Tensor]
    base_model: str | None = None


def lora_delta(
    x: Float[Tensor, "tokens in"], a: Float[Tensor, "rank in"], b: Float[Tensor, "out rank"], scale: float
) -> Float[Tensor, "tokens out"]:
    """scale * B (A x). With at least `numerics.min_rows` tokens, bit-identical for any number of tokens."""
    a, b = a.contiguous(), b.contiguous()  # the engine has views
    if missing := max(MIN_RANK - a.shape[0], 0):  # zero rows do not change the result
        a, b = pad_rows(a, MIN_RANK), F.pad(b, (0, missing))
    # Scale separately: fused into the following addition it would be rounded once instead of twice.
    return linear(linear(x, a), b) * scale


class LoraLinear(nn.Linear):
    """A frozen linear layer with a trainable adapter; parameter names follow PEFT."""

    exact = True
    """As in `Linear`."""
    rounds_inputs = False
    """As in `Linear`, for the frozen layer."""

    def __init__(self, base: nn.Linear, spec: LoraSpec) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = spec.scale, spec.dropout
        self.exact = getattr(base, "exact", True)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)  # that of the optimizer
        self.lora_A = _matrix(base.weight.new_zeros(spec.rank, self.in_features, dtype=dtype))
        self.lora_B = _matrix(base.weight.new_zeros(self.out_features, spec.rank, dtype=dtype))

    def forward(self, x: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens out"]:
        drops = self.dropout and self.training and torch.is_grad_enabled()  # no dropout in evaluation (no_grad)
        dropped = F.dropout(x, self.dropout) if drops else x
        a, b = self.lora_A.weight, self.lora_B.weight
        if self.exact:
            return linear(x, self.weight, self.bias, rounded=self.rounds_inputs) + lora_delta(dropped, a, b, self.scale)
        base, inner = linear_inexact(x, self.weight, self.bias), linear_inexact(dropped, a)
        # In one pass over the outputs, not in three.
        return torch.addmm(base.flatten(0, -2), inner.flatten(0, -2), b.t(), alpha=self.scale).view_as(base)


def merge(
    weight: Float[Tensor, "out in"], a: Float[Tensor, "rank in"], b: Float[Tensor, "out rank"], scale: float
) -> Float[Tensor, "out in"]:
    """Merged weight: W + scale * B A, computed in at least float32, on the device of `weight`."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return (wide + b.to(wide) @ a.to(wide) * scale).to(weight.dtype)


def _matrix(weight: Tensor) -> nn.Linear:
    """A bias-free linear layer around `weight`, without random initialization."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def match_modules(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Module names that equal a pattern, end in `.<pattern>`, or fully match it as a regular expression.

    `ValueError` for an invalid regular expression.
    """
    matches: list[str] = []
    for name in names:
        try:
            if any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) for p in patterns):
                matches.append(name)
        except re.error as error:
            raise ValueError(f"model.lora: {error.pattern!r} is neither a name nor a regular expression") from error
    return matches


@torch.no_grad()
def add_lora(model: CausalLM, spec: LoraSpec, seed: int = 0) -> list[str]:
    """Freeze `model` and add a zero-initialized adapter; returns the names of the adapted modules.

    A is uniform in +-1/sqrt(in) as a pure function of (seed, name), B is zero. `ValueError` when a name has no match
    or selects the output head (fused kernels read its matrix: use `modules_to_save`). Routers are not adapted, either.
    """
    modules = dict(model.named_modules())
    frozen = EXPERT_MATRICES if model.config.num_experts else ()
    linear = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and not isinstance(module, Router) and not name.endswith(frozen)
    ]
    for pattern in spec.target_modules:
        if pattern not in frozen:
            _need_match(pattern, linear, "target_modules")
    targets = match_modules(linear, spec.target_modules)
    if not targets:
        raise ValueError(
            "model.lora.target_modules matches no module: in mixture-of-experts models only attention is adapted"
        )
    if "lm_head" in targets:
        raise ValueError("model.lora.target_modules does not support lm_head: use model.lora.modules_to_save")
    model.requires_grad_(False)
    _unfreeze_saved(model, spec.modules_to_save, targets)
    for name in targets:
        parent, _, child = name.rpartition(".")
        base = modules[name]
        assert isinstance(base, nn.Linear)
        layer = LoraLinear(base, spec)
        values = init_matrix_a(seed, name, spec.rank, layer.in_features)
        layer.lora_A.weight.copy_(values)
        setattr(modules[parent], child, layer)
    return targets


def init_matrix_a(seed: int, module: str, rank: int, inputs: int) -> Float[Tensor, "rank in"]:
    """Initial A of a module: uniform in +-1/sqrt(in), a pure function of (seed, name)."""
    bound = 1 / math.sqrt(inputs)
    digest = hashlib.sha256(f"{seed}:{module}.lora_A.weight".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def _unfreeze_saved(model: CausalLM, patterns: Iterable[str], targets: list[str]) -> None:
    """Make full modules trainable; untie the head if it or the embedding is among them."""
    modules = {name: m for name, m in model.named_modules() if name and next(m.parameters(False), None) is not None}
    for pattern in patterns:
        _need_match(pattern, modules, "modules_to_save")
    saved = match_modules(modules, patterns)
    if both := sorted(set(saved) & set(targets)):
        raise ValueError(f"model.lora: {both[0]} is in target_modules and in modules_to_save: choose one")
    untie_head(model, saved)
    for name in saved:
        modules[name].requires_grad_(True)


def untie_head(model: CausalLM, saved: Iterable[str]) -> None:
    """Untie the head from the embedding when either is in `saved`."""
    if model.config.tie_word_embeddings and {"lm_head", "embed_tokens"} & {name.rpartition(".")[2] for name in saved}:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        model.config = replace(model.config, tie_word_embeddings=False)


def _need_match(pattern: str, names: Iterable[str], key: str) -> None:
    known = list(names)
    if not match_modules(known, [pattern]):
        kinds = sorted({name.rpartition(".")[2] for name in known})
        if kinds == ["lm_head"]:
            raise ValueError(
                "model.lora: the model has no linear layers to adapt: train it in full, without model.lora"
            )
        raise ValueError(f"model.lora.{key}: {pattern!r} matches no module; available: {', '.join(kinds)}")


def describe_adapter(model: CausalLM, spec: LoraSpec) -> dict[str, Any]:
    """What an adapter's checkpoint lacks, by configuration key: a digest of the base model, and alpha."""
    return {"model.name": digest_frozen(model), "model.lora.alpha": spec.alpha}


def digest_frozen(model: CausalLM) -> str:
    """A digest of some frozen values, in bfloat16. Computed of the whole model, before it is sharded."""
    digest = hashlib.sha256()
    for _, parameter in sorted(without_critic(dict(model.named_parameters())).items()):
        if not parameter.requires_grad:
            values = parameter.detach().flatten()[:FINGERPRINT_SIZE].to("cpu", torch.bfloat16)
            digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def adapter_tensors(model: CausalLM, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Trainable tensors by parameter name; taken from the gathered tensors `whole` when parameters are sharded."""
    own = without_critic(dict(model.named_parameters()))
    return {n: p.detach() if whole is None else whole[n] for n, p in own.items() if p.requires_grad}


@torch.no_grad()
def merged_tensors(model: CausalLM, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Checkpoint tensors with adapters merged into the weights; `whole` as in `adapter_tensors`."""
    named = dict(model.named_parameters())
    tensors = {n: p.detach() for n, p in without_critic(named).items()} if whole is None else without_critic(whole)
    modules = without_critic(dict(model.named_modules()))
    scales = {name: module.scale for name, module in modules.items() if isinstance(module, LoraLinear)}
    for name, scale in scales.items():
        a, b = tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
        tensors[f"{name}.weight"] = merge(tensors[f"{name}.weight"], a, b, scale)
    return model.checkpoint_tensors(tensors)


@torch.no_grad()
def merge_adapter(tensors: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """Base checkpoint tensors with an adapter merged in, in their dtypes; `ValueError` for mismatched tensors."""
    merged = dict(tensors)
    own = {_find_base_name(name, tensors): tensor for name, tensor in adapter.tensors.items()}
    saved = {n: t for n, t in own.items() if ".lora_A." not in n and ".lora_B." not in n}
    if unknown := sorted(saved.keys() - tensors.keys() - {"lm_head.weight"}):
        raise ValueError(
            f"the adapter's {unknown[0]} is no tensor of its base model: only adapters of linear layers and "
            "modules_to_save are supported; merge this one with peft (merge_and_unload)"
        )
    table = _find_base_name("model.embed_tokens.weight", tensors)
    if {"lm_head.weight", table} & saved.keys() and "lm_head.weight" not in merged:
        merged["lm_head.weight"] = merged[table]  # tied in the base checkpoint, untied here
    merged |= {name: tensor.to(merged[name].dtype) for name, tensor in saved.items()}
    for name in sorted({key.rpartition(".lora_")[0] for key in own.keys() - saved.keys()}):
        a, b = (own.get(f"{name}.lora_{kind}.weight") for kind in "AB")
        weight = merged.get(f"{name}.weight")
        if weight is None or a is None or b is None or weight.shape != (b.shape[0], a.shape[1]):
            raise ValueError(f"the adapter does not match its base model: {name} differs")
        merged[f"{name}.weight"] = merge(weight, a, b, adapter.spec.scale)
    return merged


def _find_base_name(name: str, tensors: Collection[str]) -> str:
    """Name of an adapter's tensor in a base checkpoint that may have `TEXT_PREFIX`; `name` if it has neither."""
    names = name, name.replace("model.", TEXT_PREFIX, 1)
    return next((n for n in names if re.sub(r"\.lora_[AB]\.", ".", n) in tensors), name)


def peft_config(model: CausalLM, spec: LoraSpec, base_model: str | None) -> dict[str, Any]:
    """Contents of `adapter_config.json` for a model prepared by `add_lora`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _short_targets(model),
        "modules_to_save": list(spec.modules_to_save) or None,
    }


def peft_tensors(model: CausalLM, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Contents of `adapter_model.safetensors`: trainable tensors by their `peft` names."""
    return {PEFT_PREFIX + name: tensor for name, tensor in adapter_tensors(model, whole).items()}


def _short_targets(model: CausalLM) -> list[str]:
    """Use suffixes such as `q_proj` instead of full names, unless another module with the suffix is not adapted."""
    is_adapted = {n: isinstance(m, LoraLinear) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    ambiguous = {name.rpartition(".")[2] for name, adapted in is_adapted.items() if not adapted}
    suffixes = {name: name.rpartition(".")[2] for name, adapted in is_adapted.items() if adapted}
    return sorted({name if suffix in ambiguous else suffix for name, suffix in suffixes.items()})


def load_adapter(directory: Path) -> Adapter:
    """Read a PEFT adapter directory; `ValueError` for missing or damaged files and unsupported LoRA variants."""
    directory = Path(directory)
    path = directory / ADAPTER_CONFIG_FILE
    if not path.is_file() or not (directory / ADAPTER_WEIGHTS_FILE).is_file():
        raise ValueError(f"{directory} is not an adapter: it needs {ADAPTER_CONFIG_FILE} and {ADAPTER_WEIGHTS_FILE}")
    try:
        config = read_json_file(path)
        raw = load_file(directory / ADAPTER_WEIGHTS_FILE)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{directory} contains a damaged adapter: {error}") from error
    check_adapter_config(config, str(path))
    targets = config.get("target_modules") or ()
    spec = LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        dropout=config.get("lora_dropout", 0.0),
        target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        rslora=bool(config.get("use_rslora")),
    )
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in raw.items()}
    for name, tensor in tensors.items():
        if (".lora_A." in name and tensor.shape[0] != spec.rank) or (".lora_B." in name and tensor.dim() != 2):
            raise ValueError(f"{name} of {directory} has shape {tuple(tensor.shape)}, its config has rank {spec.rank}")
    return Adapter(spec, tensors, config.get("base_model_name_or_path"))
