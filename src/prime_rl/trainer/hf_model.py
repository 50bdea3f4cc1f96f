"""Adapter from transformers models to the interface of the native decoder, for training only.

Parameters keep their names in transformers, as adapters and checkpoints require.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.lora import Adapter, load_adapter, merge_adapter, untie_head
from prime_rl.trainer.models.attention import AttentionBackend, PackedAttention, pad_sequences
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, read_index
from rollouts.training.json_files import read_json_file
from rollouts.training.model_config import check_model_config

PROBE_TOKENS = 8
TOLERANCE = 1e-3


class HFCausalLM(CausalLM):
    """A transformers causal language model on flat packs, computed as one padded row per sequence.

    Padding is on the right, where causal models ignore it: correct for every architecture.
    """

    inner: Any
    backbone: Any

    mixes_tokens_only_in_attend = False

    def __init__(self, inner: Any) -> None:
        nn.Module.__init__(self)
        for name, child in inner.named_children():
            self.add_module(name, child)
        head = inner.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ValueError(f"{type(inner).__name__} has no bias-free output head, which training requires")
        hidden: dict[str, Any] = self.__dict__  # bypass module registration, which would name tensors twice
        hidden["inner"], hidden["backbone"] = inner, inner.base_model
        if "lm_head" not in self._modules:
            hidden["lm_head"] = head
        self.config = describe_config(inner.config.get_text_config())
        self.head_scale = find_head_scale(inner.config.get_text_config())
        self._takes_positions = "position_ids" in inspect.signature(inner.base_model.forward).parameters

    def forward(
        self, input_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], attend: AttentionBackend
    ) -> Float[Tensor, "tokens hidden"]:
        assert isinstance(attend, PackedAttention)
        lengths = attend.lengths
        rows, valid = (
            t.to(input_ids.device) for t in pad_sequences(lengths, torch.arange(len(input_ids)), max(lengths))
        )
        places = {"position_ids": positions[rows]} if self._takes_positions else {}
        out = self.backbone(input_ids=input_ids[rows], attention_mask=valid.long(), use_cache=False, **places)
        hidden: Tensor = out.last_hidden_state[valid]
        return hidden if self.head_scale == 1 else hidden * self.head_scale

    def layers(self) -> list[nn.Module]:
        """The decoder layers: the longest module list."""
        lists = [list(module) for module in self.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    @torch.no_grad()
    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`tensors` with checkpoint names and shapes, which differ from those in memory for some families."""
        from transformers.core_model_loading import revert_weight_conversion

        persistent = self.inner.state_dict().keys()
        buffers = {name: b for name, b in self.named_buffers() if name in persistent}
        return dict(revert_weight_conversion(self.inner, {**tensors, **buffers}))


def load_hf_model(
    model_dir: Path,
    *,
    random_init: bool,
    num_layers: int | None,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> HFCausalLM:
    """Load a model directory with transformers, without dropout.

    `ValueError` when transformers does not support it, or when its logits are not a single product with the head.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = load_adapter(model_dir) if (model_dir / ADAPTER_CONFIG_FILE).is_file() else None
    if adapter is not None:  # transformers would load it as a separate adapter; we merge it into the base model
        model_dir = resolve_model_dir(adapter.base_model or "")
    check_model_config(read_json_file(model_dir / "config.json"), model_dir / "config.json")
    try:
        config = AutoConfig.from_pretrained(str(model_dir))
        if num_layers is not None:
            config.get_text_config().num_hidden_layers = num_layers
        if random_init:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                inner = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            read_index(model_dir)  # validates the index; transformers would open any path in it
            inner = AutoModelForCausalLM.from_pretrained(str(model_dir), config=config, dtype=dtype)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"transformers cannot load {model_dir} as a causal language model: {reason}") from error
    model = HFCausalLM(inner.to(device).eval())
    _check_head(model)
    if adapter is not None:
        _merge(model, adapter)
    return model


@torch.no_grad()
def _merge(model: HFCausalLM, adapter: Adapter) -> None:
    untie_head(model, adapter.spec.modules_to_save)
    parameters = dict(model.named_parameters())
    for name, tensor in merge_adapter({n: p.detach() for n, p in parameters.items()}, adapter).items():
        parameters[name].copy_(tensor)


def describe_config(config: Any) -> DecoderConfig:
    """Model dimensions needed by training; fields about the computation itself are placeholders."""
    heads = config.num_attention_heads
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
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=getattr(config, "max_position_embeddings", 32768),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        initializer_range=getattr(config, "initializer_range", 0.02),
    )


def find_head_scale(config: Any) -> float:
    """Logit scale of some families (Cohere multiplies, Granite divides)."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def _check_head(model: HFCausalLM) -> None:
    """`ValueError` unless logits are hidden states times the head, as the fused losses assume."""
    device = model.lm_head.weight.device
    ids = torch.arange(PROBE_TOKENS, device=device) % model.config.vocab_size
    expected = model.inner(input_ids=ids[None], use_cache=False).logits[0].float()
    hidden = model(ids, torch.arange(PROBE_TOKENS, device=device), PackedAttention([PROBE_TOKENS], device))
    error = (model.logits(hidden).float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    if not error < TOLERANCE:
        kind = type(model.inner).__name__
        raise ValueError(f"{kind} computes its logits in an unsupported way")
