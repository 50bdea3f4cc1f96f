"""Multi-LoRA: loaded adapters and their per-row application in a mixed batch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.inference.engine import AdapterSpec
from prime_rl.trainer.lora import Adapter, LoraSpec, lora_delta
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.multi_lora import AdapterTable, LoraDelta
from prime_rl.transport.digests import digest_tensors
from prime_rl.transport.weights import PEFT_PREFIX
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels.deltas import DeltaBatch, PackedDelta
from rollouts.training.numerics import min_rows, repeat_last

KINDS = tuple(f"self_attn.{kind}_proj" for kind in "qkvo") + tuple(
    f"mlp.{kind}_proj" for kind in ("gate", "up", "down")
)
"""Modules of a layer in the order of the fused kernel's places."""


def find_place(module: str) -> int | None:
    """The kernel's place of a module of a dense layer; None for other modules."""
    parts = module.removeprefix("model.layers.").split(".", 1)
    if module == parts[0] or not parts[0].isdigit() or parts[-1] not in KINDS:
        return None
    return int(parts[0]) * len(KINDS) + KINDS.index(parts[1])


def pack_adapter(changes: Mapping[str, LoraDelta], num_layers: int) -> PackedDelta | None:
    """An adapter, by module, for the CPU kernel; None if the kernel does not support it or has other bits."""
    matrices: dict[int, tuple[Tensor, Tensor]] = {}
    for module, change in changes.items():
        place, a, b = find_place(module), change.a, change.b
        if place is None or not cpu_kernels.runs_here(a, b):
            return None
        if not has_delta_bits(a.shape[1], b.shape[0], a.shape[0]):
            return None
        matrices[place] = (a, b)
    if len({(change.scale, len(change.a)) for change in changes.values()}) != 1:
        return None
    return PackedDelta(matrices, next(iter(changes.values())).scale, num_layers * len(KINDS))


@cache
def has_delta_bits(inputs: int, outputs: int, rank: int) -> bool:
    """Whether the kernel has the bits of `lora_delta` for matrices of these sizes; measured, as `find_block`."""
    if rank > cpu_kernels.max_rank():
        return False
    draw = torch.Generator().manual_seed(inputs)
    x, a, b = (torch.randn(size, generator=draw) for size in ((33, inputs), (rank, inputs), (outputs, rank)))
    y = torch.zeros(33, outputs)
    DeltaBatch([PackedDelta({0: (a, b)}, 0.7, 1)], [range(33)]).add(0, x, y)
    return torch.equal(y, torch.zeros(33, outputs) + lora_delta(x, a, b, 0.7))


@dataclass(frozen=True)
class LoadedAdapter:
    """A loaded adapter; its namespace changes with every load, so that cached keys of an older load are not shared."""

    spec: AdapterSpec
    cache_namespace: tuple[str, int]


class Adapters:
    """The adapters of one engine."""

    def __init__(self, model: CausalLM, dtype: torch.dtype) -> None:
        self.served: dict[str, LoadedAdapter] = {}
        self._table, self._num_layers = AdapterTable(model, dtype), model.config.num_hidden_layers
        self._has_places = type(model) is CausalLM  # other classes run their own forward pass, with hooks
        self._packed: dict[str, PackedDelta] = {}
        self._whole: dict[str, BatchDelta] = {}
        self._loads = 0

    def load(self, name: str, tensors: Mapping[str, Tensor], spec: AdapterSpec) -> dict[str, str]:
        """Add or replace an adapter; returns the digests of its tensors. `ValueError` without changes if it does not
        fit."""
        plain = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
        self._table.put(name, Adapter(LoraSpec(spec.rank, spec.alpha), plain))
        self._pack(name)
        self._loads += 1
        self.served[name] = LoadedAdapter(spec, (name, self._loads))
        changes = self._changes(name)
        self._whole[name] = BatchDelta(name, changes)
        held = {f"{module}.lora_A.weight": change.a for module, change in changes.items()}
        held |= {f"{module}.lora_B.weight": change.b for module, change in changes.items()}
        return digest_tensors((key, held[key.removeprefix(PEFT_PREFIX)].to(t.dtype)) for key, t in tensors.items())

    def _changes(self, name: str) -> dict[str, LoraDelta]:
        """The deltas of an adapter by module."""
        return {module: held[name] for module, held in self._table.changes.items() if name in held}

    def _pack(self, name: str) -> None:
        """Let the kernel hold the matrices of an adapter that it supports."""
        self._packed.pop(name, None)
        changes = self._changes(name)
        packed = pack_adapter(changes, self._num_layers) if self._has_places else None
        if packed is not None:
            self._packed[name] = packed
            for module, change in changes.items():
                a, b = packed.matrices(find_place(module) or 0)
                self._table.changes[module][name] = replace(change, a=a, b=b)

    def cache_namespace(self, name: str | None) -> Hashable:
        """Prefix cache namespace of an adapter's requests; None without an adapter."""
        return None if name is None else self.served[name].cache_namespace

    def eos_ids(self, name: str | None) -> frozenset[int]:
        """End tokens of an adapter besides those of the base model; none without an adapter."""
        return frozenset() if name is None else self.served[name].spec.eos_ids

    def remove(self, name: str) -> None:
        """Unload an adapter; `ValueError` if it is not loaded."""
        if self.served.pop(name, None) is None:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._table.remove(name)
        self._packed.pop(name, None)
        del self._whole[name]

    def are_packed(self, names: Collection[str | None]) -> bool:
        """Whether the kernel supports all of these adapters."""
        return all(name is None or name in self._packed for name in names)

    def find_whole(self, names: Collection[str | None]) -> BatchDelta | None:
        """The adapter of all rows of a batch that has requests for these `names`; None if they have several or none."""
        only = next(iter(names)) if len(names) == 1 else None
        return None if only is None else self._whole[only]

    def route(self, names: Sequence[str | None], counts: Sequence[int], device: torch.device) -> LoraRouting | None:
        """Map rows to adapters, where `counts[i]` rows belong to `names[i]`; None if no row has an adapter."""
        if not any(names):
            return None
        owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
        rows = {}
        for name in {name for name in names if name is not None}:
            mine = torch.tensor([other == name for other in names])
            rows[name] = mine[owners].nonzero().squeeze(1).to(device)
        batch = None
        if all(name in self._packed for name in rows):
            batch = DeltaBatch([self._packed[name] for name in rows], [index.tolist() for index in rows.values()])
        return LoraRouting(self._table, rows, batch)


class RowChanges(Protocol):
    """Changes the outputs of modules for the rows of a batch; `LoraRouting` or `BatchDelta`."""

    def change(
        self, parts: Sequence[tuple[str, int, int]], x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]
    ) -> None:
        """Change `y` in place; `parts` lists the modules with their output columns `start .. end`."""

    def changes_module(self, module: str) -> bool:
        """Whether an adapter has a delta for this module."""


@dataclass(frozen=True)
class BatchDelta:
    """One adapter for all rows, by operations that a CUDA graph can contain: y += scale B (A x)."""

    name: str
    deltas: Mapping[str, LoraDelta]
    """By module; another load of the adapter has other ones."""

    def change(
        self, parts: Sequence[tuple[str, int, int]], x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]
    ) -> None:
        """As `RowChanges`."""
        for module, start, end in parts:
            if (delta := self.deltas.get(module)) is not None:
                y[:, start:end].addmm_(F.linear(x, delta.a), delta.b.t(), alpha=delta.scale)

    def changes_module(self, module: str) -> bool:
        """As `RowChanges`."""
        return module in self.deltas


class LoraRouting:
    """Adds LoRA deltas to the rows of each adapter, with the arithmetic of the trainer's layer."""

    def __init__(
        self, table: AdapterTable, rows: Mapping[str, Int[Tensor, " rows"]], batch: DeltaBatch | None = None
    ) -> None:
        self._table, self._plain = table, rows
        self.batch = batch
        """The same for the CPU kernel, if it supports all of these adapters."""
        self._rows = {name: (repeat_last(index, min_rows()), len(index)) for name, index in rows.items()}

    def routed(self) -> AbstractContextManager[None]:
        """Context in which the table's hooks apply the deltas to the model's own modules."""
        return self._table.route(self._plain)

    def change(
        self, parts: Sequence[tuple[str, int, int]], x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]
    ) -> None:
        """As `RowChanges`."""
        for module, start, end in parts:
            changes = self._table.changes.get(module)
            if not changes:
                continue
            if self.batch is not None:
                if (place := find_place(module)) is not None:
                    self.batch.add(place, x, y[:, start:end])
                continue
            for name, (index, count) in self._rows.items():
                if (change := changes.get(name)) is not None:
                    delta = lora_delta(x[index], change.a, change.b, change.scale)[:count]
                    y[index[:count], start:end] += delta

    def changes_module(self, module: str) -> bool:
        """As `RowChanges`."""
        return bool(self._table.changes.get(module))
