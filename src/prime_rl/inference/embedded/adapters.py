"""Multi-LoRA: loaded adapters and their per-row application in a mixed batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.inference.engine import AdapterSpec
from prime_rl.trainer.lora import Adapter, LoraSpec, lora_delta
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.multi_lora import AdapterTable
from prime_rl.transport.weights import PEFT_PREFIX, digest_tensor
from rollouts.training.numerics import min_rows, repeat_last


@dataclass(frozen=True)
class LoadedAdapter:
    """A loaded adapter; its namespace changes with every load, so that cached keys of an older load are not shared."""

    spec: AdapterSpec
    cache_namespace: tuple[str, int]


class Adapters:
    """The adapters of one engine."""

    def __init__(self, model: CausalLM) -> None:
        self.served: dict[str, LoadedAdapter] = {}
        self._table = AdapterTable(model)
        self._loads = 0

    def load(self, name: str, tensors: Mapping[str, Tensor], spec: AdapterSpec) -> dict[str, str]:
        """Add or replace an adapter; returns the digests of its tensors. `ValueError` without changes if it does not
        fit."""
        plain = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
        if whole := sorted(key for key in plain if ".lora_A." not in key and ".lora_B." not in key):
            raise ValueError(
                f"adapter {name!r} has the full tensor {whole[0]}, which multi-LoRA cannot serve: merge it"
            )
        self._table.put(name, Adapter(LoraSpec(spec.rank, spec.alpha), plain))
        self._loads += 1
        self.served[name] = LoadedAdapter(spec, (name, self._loads))
        held: dict[str, Tensor | None] = {}
        for module, changes in self._table.changes.items():
            if name in changes:
                held |= {f"{module}.lora_A.weight": changes[name].a, f"{module}.lora_B.weight": changes[name].b}
        digests = {}
        for key, tensor in tensors.items():
            loaded = held[key.removeprefix(PEFT_PREFIX)]
            assert loaded is not None
            digests[key] = digest_tensor(loaded.to(tensor.dtype))
        return digests

    def cache_namespace(self, name: str | None) -> Hashable:
        """Prefix cache namespace of an adapter's requests; None without an adapter."""
        return None if name is None else self.served[name].cache_namespace

    def remove(self, name: str) -> None:
        """Unload an adapter; `ValueError` if it is not loaded."""
        if self.served.pop(name, None) is None:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._table.remove(name)

    def route(self, names: Sequence[str | None], counts: Sequence[int], device: torch.device) -> LoraRouting | None:
        """Map rows to adapters, where `counts[i]` rows belong to `names[i]`; None if no row has an adapter."""
        if not any(names):
            return None
        owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
        rows = {}
        for name in {name for name in names if name is not None}:
            mine = torch.tensor([other == name for other in names])
            rows[name] = mine[owners].nonzero().squeeze(1).to(device)
        return LoraRouting(self._table, rows)


class LoraRouting:
    """Adds LoRA deltas to the rows of each adapter, with the arithmetic of the trainer's layer."""

    def __init__(self, table: AdapterTable, rows: Mapping[str, Int[Tensor, " rows"]]) -> None:
        self._table, self._plain = table, rows
        self._rows = {name: (repeat_last(index, min_rows()), len(index)) for name, index in rows.items()}

    def routed(self) -> AbstractContextManager[None]:
        """Context in which the table's hooks apply the deltas to the model's own modules."""
        return self._table.route(self._plain)

    def change(
        self, parts: Sequence[tuple[str, int, int]], x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]
    ) -> None:
        """Add the deltas to `y` in place; `parts` lists the modules with their output columns `start .. end`."""
        for module, start, end in parts:
            changes = self._table.changes.get(module)
            if not changes:
                continue
            for name, (index, count) in self._rows.items():
                change = changes.get(name)
                if change is not None and change.a is not None and change.b is not None:
                    delta = lora_delta(x[index], change.a, change.b, change.scale)[:count]
                    y[index[:count], start:end] += delta
