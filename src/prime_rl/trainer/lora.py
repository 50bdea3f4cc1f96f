"""LoRA: a low-rank change beside frozen matrices, its layer, its training set-up and its PEFT directory on disk.

y = W x + b + scale * B (A x), scale = alpha / rank (Hu et al. 2021, 2106.09685). The trainer's layer and the engine's
table of adapters call the same `lora_delta`, so that a token gets the same bits from both.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
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
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, PEFT_PREFIX
from rollouts.training.linear import linear

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
"""In a mixture of experts these stay as they are, of its plain layers too: `peft` takes their names for experts'."""

MIN_RANK = 4
"""A product with a single row of A takes GEMM's matrix-vector path, whose sums depend on how many tokens there are."""


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter changes and how strongly; `modules_to_save` are trained, and stored, whole."""

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    modules_to_save: tuple[str, ...] = ()
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor on B A x: alpha / rank, or alpha / sqrt(rank) (2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors by module: `<module>.lora_A.weight` [rank, in], `<module>.lora_B.weight` [out, rank].

    Tensors of modules saved whole stand under their own names, such as `lm_head.weight`.
    """

    spec: AdapterSpec
    tensors: dict[str, Tensor]
    base_model: str | None = None


def lora_delta(
    x: Float[Tensor, "tokens in"], a: Float[Tensor, "rank in"], b: Float[Tensor, "out rank"], scale: float
) -> Float[Tensor, "tokens out"]:
    """scale * B (A x). From `attention.min_rows` tokens on, a row's bits do not depend on how many there are."""
    if missing := max(MIN_RANK - a.shape[0], 0):  # rows of zeros add exactly nothing
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    # The factor is its own product: fused into the addition that follows it would be rounded once instead of twice.
    return linear(linear(x, a), b) * scale


class LoraLinear(nn.Linear):
    """A frozen linear layer with one trained adapter beside it; parameters bear the names PEFT gives them."""

    def __init__(self, base: nn.Linear, spec: AdapterSpec) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = spec.scale, spec.dropout
        self.lora_A = _matrix(base.weight.new_zeros(spec.rank, self.in_features))
        self.lora_B = _matrix(base.weight.new_zeros(self.out_features, spec.rank))

    def forward(self, x: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens out"]:
        drops = self.dropout and self.training and torch.is_grad_enabled()  # no gradient: a held-out loss
        dropped = F.dropout(x, self.dropout) if drops else x
        return linear(x, self.weight, self.bias) + lora_delta(
            dropped, self.lora_A.weight, self.lora_B.weight, self.scale
        )


def merge(
    weight: Float[Tensor, "out in"], a: Float[Tensor, "rank in"], b: Float[Tensor, "out rank"], scale: float
) -> Float[Tensor, "out in"]:
    """The one matrix that does the same: W + scale * B A, summed in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + b.to(wide) @ a.to(wide) * scale).to(weight.dtype)


def _matrix(weight: Tensor) -> nn.Linear:
    """A bias-free linear layer around `weight`, without torch's own initialisation."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def match_modules(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The module names that equal a pattern, end in `.<pattern>`, or match it whole as a regular expression.

    `ValueError` when a pattern is no regular expression.
    """
    found: list[str] = []
    for name in names:
        try:
            if any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) for p in patterns):
                found.append(name)
        except re.error as error:
            raise ValueError(f"model.lora: {error.pattern!r} is neither a name nor a regular expression") from error
    return found


@torch.no_grad()
def add_lora(model: CausalLM, spec: AdapterSpec, seed: int = 0) -> list[str]:
    """Freeze `model` except an adapter that changes nothing yet; returns the names of the changed matrices.

    A is uniform in +-1/sqrt(in) as a pure function of (seed, name), B is zero. `ValueError` when a name matches
    nothing or the output head is asked for (its matrix is read by fused kernels: save it whole instead).
    """
    modules = dict(model.named_modules())
    frozen = EXPERT_MATRICES if model.config.num_experts else ()
    linear = [n for n, m in modules.items() if isinstance(m, nn.Linear) and not n.endswith(frozen)]
    for pattern in spec.target_modules:
        if pattern not in frozen:
            _need_match(pattern, linear, "target_modules")
    targets = match_modules(linear, spec.target_modules)
    if not targets:
        raise ValueError(
            "model.lora.target_modules matches no matrix: of a mixture of experts only attention is adapted"
        )
    if "lm_head" in targets:
        raise ValueError("model.lora.target_modules cannot hold lm_head: put it into model.lora.modules_to_save")
    model.requires_grad_(False)
    _thaw_saved(model, spec.modules_to_save, targets)
    for name in targets:
        parent, _, child = name.rpartition(".")
        base = modules[name]
        assert isinstance(base, nn.Linear)
        layer = LoraLinear(base, spec)
        bound = 1 / math.sqrt(layer.in_features)
        digest = hashlib.sha256(f"{seed}:{name}.lora_A.weight".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(layer.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
        layer.lora_A.weight.copy_(values)
        setattr(modules[parent], child, layer)
    return targets


def _thaw_saved(model: CausalLM, patterns: Iterable[str], targets: list[str]) -> None:
    """Make whole modules trainable; a tied head parts from the embedding, because they no longer stay equal."""
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
    """Give a tied head a matrix of its own when it or the embedding is among the modules `saved` whole."""
    if model.config.tie_word_embeddings and {"lm_head", "embed_tokens"} & {name.rpartition(".")[2] for name in saved}:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        model.config = replace(model.config, tie_word_embeddings=False)


def _need_match(pattern: str, names: Iterable[str], key: str) -> None:
    known = list(names)
    if not match_modules(known, [pattern]):
        kinds = sorted({name.rpartition(".")[2] for name in known})
        raise ValueError(f"model.lora.{key}: {pattern!r} matches no module; there are {', '.join(kinds)}")


def adapter_tensors(model: CausalLM, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every trained tensor by its name in the model; of `whole`, gathered tensors by name, where ranks hold parts."""
    return {n: p.detach() if whole is None else whole[n] for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def fill_adapter(model: CausalLM, adapter: Adapter) -> None:
    """Copy an adapter into a model prepared by `add_lora` with the same spec; `ValueError` when names do not fit."""
    wanted = adapter_tensors(model)
    if wrong := sorted(wanted.keys() ^ adapter.tensors.keys()):
        raise ValueError(f"the adapter does not fit model.lora: {wrong[0]} is on one side only")
    for name, parameter in wanted.items():
        if parameter.shape != adapter.tensors[name].shape:
            found = tuple(adapter.tensors[name].shape)
            raise ValueError(f"the adapter does not fit model.lora: {name} has shape {found}")
        parameter.copy_(adapter.tensors[name])


@torch.no_grad()
def merged_tensors(model: CausalLM, whole: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a plain checkpoint, adapters merged into the matrices they change; `whole` as above."""
    held = {n: p.detach() for n, p in model.named_parameters()} if whole is None else dict(whole)
    scales = {name: module.scale for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for name, scale in scales.items():
        a, b = held.pop(f"{name}.lora_A.weight"), held.pop(f"{name}.lora_B.weight")
        held[f"{name}.weight"] = merge(held[f"{name}.weight"], a, b, scale)
    return model.checkpoint_tensors(held)


@torch.no_grad()
def merge_adapter(tensors: Mapping[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of a base checkpoint with an adapter merged in; `ValueError` when it does not fit."""
    merged = dict(tensors)
    saved = {n: t for n, t in adapter.tensors.items() if ".lora_A." not in n and ".lora_B." not in n}
    if {"lm_head.weight", "model.embed_tokens.weight"} & saved.keys() and "lm_head.weight" not in merged:
        merged["lm_head.weight"] = merged["model.embed_tokens.weight"]  # tied in the base, apart from now on
    merged |= saved
    for key, a in adapter.tensors.items():
        name, found, _ = key.rpartition(".lora_A.")
        if found:
            weight, b = merged.get(f"{name}.weight"), adapter.tensors.get(f"{name}.lora_B.weight")
            if weight is None or b is None or weight.shape != (b.shape[0], a.shape[1]):
                raise ValueError(f"the adapter does not fit its base model: {name} differs")
            merged[f"{name}.weight"] = merge(weight, a, b, adapter.spec.scale)
    return merged


def peft_config(model: CausalLM, spec: AdapterSpec, base_model: str | None) -> dict[str, Any]:
    """The contents of `adapter_config.json` for a model prepared by `add_lora`."""
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
    """The contents of `adapter_model.safetensors`: every trained tensor by the name `peft` gives it."""
    return {PEFT_PREFIX + name: tensor for name, tensor in adapter_tensors(model, whole).items()}


def _short_targets(model: CausalLM) -> list[str]:
    """`q_proj` instead of every layer's name, unless some other matrix of that name is left alone."""
    changed = {n: isinstance(m, LoraLinear) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    apart = {name.rpartition(".")[2] for name, yes in changed.items() if not yes}
    kinds = {name: name.rpartition(".")[2] for name, yes in changed.items() if yes}
    return sorted({name if kind in apart else kind for name, kind in kinds.items()})


def load_adapter(directory: Path) -> Adapter:
    """Read a PEFT adapter directory; `ValueError` names what is missing, damaged or not plain LoRA."""
    directory = Path(directory)
    path = directory / ADAPTER_CONFIG_FILE
    if not path.is_file() or not (directory / ADAPTER_WEIGHTS_FILE).is_file():
        raise ValueError(f"{directory} is no adapter: it needs {ADAPTER_CONFIG_FILE} and {ADAPTER_WEIGHTS_FILE}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        raw = load_file(directory / ADAPTER_WEIGHTS_FILE)
    except (json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"{directory} holds a damaged adapter: {error}") from error
    _refuse_variants(config, path)
    targets = config.get("target_modules") or ()
    spec = AdapterSpec(
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
            raise ValueError(f"{name} of {directory} has shape {tuple(tensor.shape)}, its config says rank {spec.rank}")
    return Adapter(spec, tensors, config.get("base_model_name_or_path"))


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{path}: peft_type {config['peft_type']!r} is not supported, only LORA")
    for key in ("use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern", "target_parameters"):
        if config.get(key):
            raise ValueError(f"{path}: {key} is not supported")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias {config['bias']!r} is not supported, only 'none'")
