"""RoPE frequencies that depend on the length of the sequence (longrope, dynamic) in transformers' models.

transformers chooses them from the largest position of a batch, so that a sequence would depend on its neighbors.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

ORIGINAL = "original_inv_freq"
"""End of the name of the buffer with the frequencies of short sequences, after the layer type if there are several."""


def find_rope_limit(config: Any) -> int | None:
    """Length up to which all sequences have the same frequencies; None if all have, whatever their length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in parameters.values() if isinstance(each, dict)]
    limits = []
    for each in by_layer_type if "rope_type" not in parameters else [parameters]:
        if each.get("rope_type") == "longrope":
            limits.append(each["original_max_position_embeddings"])
        elif "dynamic" in (each.get("rope_type") or ""):
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def separate_sequences(model: nn.Module, limit: int) -> None:
    """Make the rotary embeddings of `model` give every sequence the frequencies that it has alone."""
    for module in model.modules():
        if any(name.endswith(ORIGINAL) for name in module._buffers):
            kind = type(module)
            module.__class__ = type(f"Separate{kind.__name__}", (SeparateSequences, kind), {"limit": limit})


class SeparateSequences(nn.Module):
    """Mixin for a rotary embedding: one call for sequences of up to `limit` tokens, one per greater length."""

    limit: int

    def forward(
        self, x: Tensor, position_ids: Int[Tensor, "*rows tokens"], *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """cos and sin; a position of 0 begins a sequence, and so does a row."""
        lengths = find_lengths(position_ids)
        groups = lengths.where(lengths > self.limit, 0)
        merged: tuple[Tensor, Tensor] | None = None
        for length in groups.unique().tolist():
            self._forget()
            own = groups == length
            found = super().forward(x, position_ids.where(own, 0), *args, **options)
            if merged is not None:
                found = tuple(new.where(own[..., None], old) for new, old in zip(found, merged, strict=True))
            merged = found
        assert merged is not None, "a pack has tokens"
        return merged

    def _forget(self) -> None:
        """Drop the frequencies of the longest sequence so far, which dynamic ones use for shorter ones, too."""
        for name, frequencies in list(self._buffers.items()):  # `named_buffers` skips a tensor with two names
            if name.endswith(ORIGINAL):
                layer_type = name.removesuffix(ORIGINAL)
                setattr(self, f"{layer_type}inv_freq", frequencies)
                setattr(self, f"{layer_type}max_seq_len_cached", self.original_max_seq_len)


def find_lengths(position_ids: Int[Tensor, "*rows tokens"]) -> Int[Tensor, "*rows tokens"]:
    """The length of the sequence of each token."""
    begins = position_ids == 0
    begins[..., 0] = True
    sequence = begins.flatten().cumsum(0) - 1
    ends = torch.zeros_like(sequence).scatter_reduce(0, sequence, position_ids.flatten() + 1, "amax")
    return ends[sequence].view_as(position_ids)
