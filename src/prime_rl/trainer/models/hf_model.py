"""Adapter from transformers models to the interface of the native decoder, for trainer and embedded engine.

Two ways to compute a flat pack with transformers' own code:

- Through `attend`: attention calls the given `AttentionBackend` (transformers' attention interface), everything else
  is computed token by token. Used if a pack of two sequences then gives the logits of transformers' own attention.
- In rows: one padded row per sequence, without a cache; correct for every causal architecture.

Parameters keep their names in transformers, as adapters and checkpoints require.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.lora import Adapter, load_adapter, merge_adapter, untie_head
from prime_rl.trainer.models.attention import AttentionBackend, PackedAttention, RoundedAttention, pad_sequences
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.rope_lengths import find_rope_limit, separate_sequences
from prime_rl.transport.weights import is_adapter
from rollouts.kernels.linear import Linear
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import read_index
from rollouts.training.model_config import check_model_config

PROBE_LENGTHS = (11, 6)
"""Lengths of the sequences on which the ways to compute a pack are compared; the second is a prefix of the first."""
TOLERANCE = 1e-3
"""Maximum error of logits relative to the largest, in float32."""
LOW_PRECISION_TOLERANCE = 5e-2
IMPLEMENTATION = "prime_rl"
"""Name of our attention function among those of transformers."""
IGNORED_OPTIONS = frozenset(
    {"position_ids", "is_causal", "position_embeddings", "use_cache", "output_attentions", "cache_position", "dropout"}
)
"""Options of attention functions without effect on one forward pass without cache and dropout."""


class UnsupportedAttention(Exception):
    """This attention is more than `AttentionBackend` computes."""


class _ThreadAttend(threading.local):
    """The `AttentionBackend` of the last forward pass of a thread."""

    attend: AttentionBackend | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _ThreadAttend:
        return _ThreadAttend()


class AttendFunction:
    """Attention of one model in the form of transformers' attention interface; calls the current `AttentionBackend`.

    Several threads may run the model, each with its own backend. It also records the shapes of all layers, from which
    the KV cache is built.
    """

    def __init__(self) -> None:
        self._local = _ThreadAttend()
        self._last: AttentionBackend | None = None
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """Layer -> number of heads, of key heads, and head dimension."""
        self.windows: dict[int, int | None] = {}
        self.num_calls: Counter[int] = Counter()
        """Layer -> number of calls, in one forward pass or in many."""

    def use(self, attend: AttentionBackend) -> None:
        """Choose the backend of the next forward pass of this thread."""
        self._local.attend = self._last = attend

    def __call__(
        self,
        module: nn.Module,
        q: Float[Tensor, "1 heads tokens dim"],
        k: Float[Tensor, "1 kv_heads tokens dim"],
        v: Float[Tensor, "1 kv_heads tokens v_dim"],
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Float[Tensor, "1 tokens heads v_dim"]:
        """Attend; `UnsupportedAttention` for anything beyond plain causal attention with an optional window."""
        self._check(module, q, k, v, options)
        layer, dim = int(module.layer_idx), q.shape[-1]  # type: ignore[arg-type]
        self.shapes[layer], self.windows[layer] = (q.shape[1], k.shape[1], dim), sliding_window
        self.num_calls[layer] += 1
        if scaling is not None and scaling != dim**-0.5:
            q = q * (scaling * dim**0.5)  # `attend` divides by sqrt(dim)
        if (size := v.shape[-1]) < dim:  # values of DeepSeek-V3 are smaller than its keys
            v = F.pad(v, (0, dim - size))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        attend = self._local.attend or self._last  # a thread of autograd, which recomputes layers, has none of its own
        assert attend is not None
        return attend(layer, q, k, v, sliding_window)[None, ..., :size]

    def _check(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        extra = sorted(name for name, value in options.items() if value is not None and name not in IGNORED_OPTIONS)
        fits = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] >= v.shape[-1] and q.shape[2] == k.shape[2]
        if extra or not fits:
            raise UnsupportedAttention(", ".join(extra) or "head dimensions")
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal) or not hasattr(module, "layer_idx"):
            raise UnsupportedAttention("later tokens")


def run_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: that of the module's model."""
    function = module.__dict__["attend_function"]
    return function(module, query, key, value, attention_mask=attention_mask, **options), None


class HFCausalLM(CausalLM):
    """A transformers causal language model on flat packs, through `attend` or as one padded row per sequence.

    Padding is on the right, where causal models ignore it: correct for every architecture. `max_len` is that of a
    sequence, unset: that of the model.
    """

    inner: Any
    backbone: Any

    is_exact = False

    def __init__(self, inner: Any, max_len: int | None = None) -> None:
        nn.Module.__init__(self)
        for name, child in inner.named_children():
            self.add_module(name, child)
        for module in self.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear  # batch-invariant products
        head = inner.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ValueError(f"{type(inner).__name__} has no bias-free output head, which training requires")
        hidden: dict[str, Any] = self.__dict__  # bypass module registration, which would name tensors twice
        hidden["inner"], hidden["backbone"] = inner, find_backbone(inner)
        if "lm_head" not in self._modules:
            hidden["lm_head"] = head
        is_tied = head.weight is inner.get_input_embeddings().weight  # whatever the config says
        described = describe_config(inner.config.get_text_config(), has_experts(inner))
        self.config = replace(described, tie_word_embeddings=is_tied)
        self.head_scale = find_head_scale(inner.config.get_text_config())
        self.max_positions = find_max_positions(inner)
        self.float32_names = frozenset(inner._keep_in_fp32_modules_strict or ())
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        self._function: AttendFunction | None = None
        self._obstacle = ""
        limit = find_rope_limit(inner.config.get_text_config())
        if limit is not None:
            separate_sequences(self, limit)
        self._rotates_by_length = limit is not None and (max_len or self.config.max_position_embeddings) > limit
        if self._rotates_by_length:
            self._obstacle = (
                f"RoPE changes with lengths above {limit}, and log-probs of samples that grow past it are not the "
                f"trainer's: set model.max_model_len = {limit}"
            )

    @property
    def mixes_tokens_only_in_attend(self) -> bool:  # type: ignore[override]
        """Whether attention runs through `attend`, and nothing else depends on other tokens."""
        return self._function is not None and not self._rotates_by_length

    @property
    def recomputes(self) -> bool:  # type: ignore[override]
        """Whether the model runs on whole sequences only."""
        return self._function is None or self._rotates_by_length

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        if self._function is not None:
            self._function.use(attend)
            out = self.backbone(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
            hidden: Tensor = out.last_hidden_state[0]
        else:
            hidden = self._forward_rows(input_ids, positions, attend)
        hidden = hidden.to(self.embedding().dtype)  # Mamba keeps its residual stream in float32
        return hidden if self.head_scale == 1 else hidden * self.head_scale

    def _forward_rows(self, input_ids: Tensor, positions: Tensor, attend: AttentionBackend) -> Tensor:
        if isinstance(attend, RoundedAttention):
            attend = attend.attend
        assert isinstance(attend, PackedAttention)
        lengths = attend.lengths
        rows, valid = (
            t.to(input_ids.device) for t in pad_sequences(lengths, torch.arange(len(input_ids)), max(lengths))
        )
        places = {"position_ids": positions[rows]} if self._takes_positions else {}
        out = self.backbone(input_ids=input_ids[rows], attention_mask=valid.long(), use_cache=False, **places)
        hidden: Tensor = out.last_hidden_state[valid]
        return hidden

    @torch.no_grad()
    def choose_attention(self, expected: Float[Tensor, "tokens vocab"], tolerance: float) -> None:
        """Compute attention through `attend` if that gives the `expected` logits of `PROBE_LENGTHS`, else rows.

        `ValueError` if rows give other logits: those are then not hidden states times the head, as losses assume.
        """
        from transformers import AttentionInterface

        if not find_error(self._probe(), expected) < tolerance:
            raise ValueError(f"{type(self.inner).__name__} computes its logits in an unsupported way")
        config = self.inner.config.get_text_config()
        AttentionInterface.register(IMPLEMENTATION, run_attention)
        before, function = config._attn_implementation, AttendFunction()
        for module in self.modules():
            module.__dict__["attend_function"] = function
        config._attn_implementation, self._function = IMPLEMENTATION, function
        reason = None if self._takes_positions else "no position_ids"
        if reason is None:
            try:
                error = find_error(self._probe(), expected)
                reason = _find_obstacle(config, function) or (None if error < tolerance else f"error {error:.0e}")
            except UnsupportedAttention as problem:
                reason = f"attention with {problem}"
            except (AttributeError, TypeError, RuntimeError, ValueError, KeyError):
                reason = "attention is part of the model's code"
        if reason is not None:
            config._attn_implementation, self._function = before, None
            self._obstacle = reason
            return
        heads, kv_heads, dim = function.shapes[0]
        self.config = replace(
            self.config,
            num_hidden_layers=len(function.shapes),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=dim,
        )

    def describe(self) -> str:
        """How the model is computed, for the log."""
        text = f"{type(self.inner).__name__} runs on transformers' code, slower than the native decoder"
        if self.own_config is not None:
            text += "; it is the text part of its model, and weights are published without the other parts"
        if not self.recomputes:
            return text
        return f"{text}; generation recomputes whole sequences, without a KV cache ({self._obstacle})"

    def _probe(self) -> Float[Tensor, "tokens vocab"]:
        """Logits of `PROBE_LENGTHS` as one pack."""
        ids, positions = build_probe(self.config.vocab_size, self.embedding().device)
        return self.logits(self(ids, positions, PackedAttention(list(PROBE_LENGTHS), ids.device)))

    def layers(self) -> list[nn.Module]:
        """The decoder layers: the longest module list."""
        lists = [list(module) for module in self.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def embedding(self) -> Tensor:
        """The token embedding matrix; its device and dtype are those of the model."""
        weight: Tensor = self.inner.get_input_embeddings().weight
        return weight

    def parse_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Checkpoint tensors have the names and shapes that transformers writes."""
        return dict(tensors)

    @torch.no_grad()
    def copy_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all `tensors`, with checkpoint names, into the parameters."""
        held = {t.untyped_storage().data_ptr() for t in (*self.parameters(), *self.buffers())}
        expected = tensor_names(self)
        if all(tensor.untyped_storage().data_ptr() in held for tensor in expected.values()):
            for name, tensor in expected.items():
                tensor.copy_(tensors[name])
            return
        # Tensors that change their shape on the way to a checkpoint are converted back by transformers.
        kind, dtype = type(self.inner), self.embedding().dtype
        other = kind.from_pretrained(None, config=self.inner.config, state_dict=dict(tensors), dtype=dtype)
        self.inner.load_state_dict(other.state_dict())

    @torch.no_grad()
    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` with checkpoint names and shapes, which differ from those in memory for some families."""
        from transformers.core_model_loading import revert_weight_conversion

        persistent = self.inner.state_dict().keys()
        own = {**tensors, **{name: b for name, b in self.named_buffers() if name in persistent}}
        converted = dict(revert_weight_conversion(self.inner, own))
        assert sum(t.numel() for t in converted.values()) == sum(t.numel() for t in own.values()), "tensors are lost"
        return converted


def load_hf_model(
    model_dir: Path,
    *,
    random_init: bool,
    num_layers: int | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
) -> HFCausalLM:
    """Load a model directory with transformers, without dropout; `max_len` as for `HFCausalLM`.

    `ValueError` when transformers does not support it, or when its logits are not a single product with the head.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    adapters: list[Adapter] = []
    while is_adapter(model_dir):  # transformers would load it as a separate adapter; we merge it into the base model
        adapters.insert(0, load_adapter(model_dir))
        model_dir = resolve_model_dir(adapters[0].base_model or "")
    check_model_config(read_json_file(model_dir / "config.json"), model_dir / "config.json")
    try:
        config = AutoConfig.from_pretrained(str(model_dir))
        is_quantized = _dequantize_on_load(config)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{config.model_type} is an encoder-decoder model")
        if num_layers is not None:
            config.get_text_config().num_hidden_layers = num_layers
        if random_init:
            config.__dict__.pop("quantization_config", None)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                inner = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            read_index(model_dir)  # validates the index; transformers would open any path in it
            options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
            inner, found = AutoModelForCausalLM.from_pretrained(str(model_dir), **options)
            if missing := sorted(found["missing_keys"]):  # transformers would draw them at random
                raise ValueError(f"its weights lack {len(missing)} tensors, such as {missing[0]}")
        if is_quantized:
            for parameter in inner.parameters():  # transformers dequantizes MXFP4 to bfloat16 whatever `dtype` is
                if parameter.dtype.itemsize < dtype.itemsize:
                    parameter.data = parameter.data.to(dtype)
            inner._weight_conversions = None  # those of the class: others would quantize again what is published
    except (ValueError, OSError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"transformers cannot load {model_dir} as a causal language model: {reason}") from error
    tolerance = TOLERANCE if dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
    expected = compute_probe_logits(inner.to(device).eval(), tolerance)
    model = HFCausalLM(inner, max_len)
    model.choose_attention(expected, tolerance)
    if inner.config.model_type != config.model_type:  # Qwen3.5: the language model of one of images and text
        model.own_config = {**json.loads(inner.config.to_json_string()), "architectures": [type(inner).__name__]}
    for adapter in adapters:
        _merge(model, adapter)
    return model


def _dequantize_on_load(config: Any) -> bool:
    """Whether the weights of a model are quantized (MXFP4, FP8); if so, they are dequantized when they are loaded.

    `ValueError` for other kinds of quantization.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    if not hasattr(AutoQuantizationConfig.from_dict(settings), "dequantize"):
        raise ValueError(f"its weights are quantized ({settings.get('quant_method')}): use a bfloat16 version of it")
    config.quantization_config = {**settings, "dequantize": True}
    return True


@torch.no_grad()
def _merge(model: HFCausalLM, adapter: Adapter) -> None:
    untie_head(model, [name.removesuffix(".weight") for name in adapter.tensors])
    parameters = dict(model.named_parameters())
    merged = merge_adapter({n: p.detach() for n, p in parameters.items()}, adapter)
    for name, parameter in parameters.items():
        if merged[name].shape != parameter.shape:
            shapes = f"{tuple(merged[name].shape)}, that of its base model {tuple(parameter.shape)}"
            raise ValueError(f"the adapter's {name} has shape {shapes}: merge it with `convert` first")
    for name, parameter in parameters.items():
        parameter.copy_(merged[name])


def has_experts(inner: Any) -> bool:
    """Whether a model has layers with experts: configs of dense models may have a default number of them."""
    return any("Experts" in type(module).__name__ for module in inner.modules())


def describe_config(config: Any, is_sparse: bool) -> DecoderConfig:
    """Model dimensions needed by training; fields about the computation itself keep their defaults."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if is_sparse else ()
    heads = getattr(config, "num_attention_heads", None) or 1  # state-space models have none
    return DecoderConfig(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(config, "max_position_embeddings", 32768),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        initializer_range=getattr(config, "initializer_range", 0.02),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        num_experts=_find_size(config, *experts),
        num_experts_per_tok=_find_size(config, "num_experts_per_tok", "moe_k"),
    )


def _find_size(config: Any, *names: str) -> int:
    """The first of these sizes that a config has, else 0."""
    return next((size for name in names if isinstance(size := getattr(config, name, None), int) and size), 0)


def find_max_positions(inner: Any) -> int | None:
    """The `max_position_embeddings` of a model with a learned table of positions (GPT-2, OPT), else None."""
    config = inner.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    others = (m for m in inner.modules() if isinstance(m, nn.Embedding) and m is not inner.get_input_embeddings())
    # The table of OPT and its relatives has two rows more.
    return limit if limit is not None and any(0 <= m.num_embeddings - limit <= 2 for m in others) else None


def find_head_scale(config: Any) -> float:
    """Logit scale of some families (Cohere multiplies, Granite divides)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def build_probe(vocab_size: int, device: torch.device) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Tokens and positions of sequences of `PROBE_LENGTHS` with a common prefix."""
    ids = torch.arange(PROBE_LENGTHS[0], device=device) * 7 % vocab_size
    positions = torch.arange(PROBE_LENGTHS[0], device=device)
    return tuple(torch.cat([x[:n] for n in PROBE_LENGTHS]) for x in (ids, positions))  # type: ignore[return-value]


def find_error(logits: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    wide = expected.float()
    return float((logits.float() - wide).abs().max() / wide.abs().max().clamp(min=1e-6))


def _find_obstacle(config: Any, function: AttendFunction) -> str | None:
    """Why the layers, which the probe has run once, cannot use a KV cache of ours; None if they can."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if extra := sorted(kinds - {"full_attention", "sliding_attention"}):
        return ", ".join(extra)
    if max(function.num_calls.values(), default=1) > 1:  # the cache has one place for the keys of a layer
        return "layers that attend more than once"
    if sorted(function.shapes) != list(range(len(function.shapes))) or len(set(function.shapes.values())) != 1:
        return "layers without attention or of different shapes"
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None))
    if windowed and not any(function.windows.values()):
        return "an unknown kind of sliding window"
    return None


def find_backbone(inner: Any) -> Any:
    """The decoder below the head; it is in `model` where the base model is the model itself, as in Llama 4."""
    backbone = inner.base_model if inner.base_model is not inner else getattr(inner, "model", inner)
    if backbone is inner:
        raise ValueError(f"{type(inner).__name__} computes its logits in an unsupported way")
    return backbone


@torch.no_grad()
def compute_probe_logits(inner: Any, tolerance: float) -> Float[Tensor, "tokens vocab"]:
    """The logits of `PROBE_LENGTHS` by a model of transformers; `ValueError` if they depend on later tokens."""
    weight = inner.get_input_embeddings().weight
    ids = build_probe(inner.config.get_text_config().vocab_size, weight.device)[0]
    whole, prefix = (
        inner(input_ids=row[None], attention_mask=torch.ones_like(row[None]), use_cache=False).logits[0]
        for row in ids.split(PROBE_LENGTHS)
    )
    if not find_error(whole[: len(prefix)], prefix) < tolerance:
        raise ValueError(f"{type(inner).__name__} is not a causal language model: its logits depend on later tokens")
    return torch.cat((whole, prefix))
