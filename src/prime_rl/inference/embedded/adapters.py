"""LoRA adapters beside the model: who is loaded, and what each changes in a forward pass of mixed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.inference.engine import AdapterSpec
from prime_rl.trainer.lora import Adapter, lora_delta
from prime_rl.trainer.lora import AdapterSpec as LoraSpec
from prime_rl.trainer.models.adapter_table import AdapterTable
from prime_rl.trainer.models.attention import min_rows
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.transport.weights import PEFT_PREFIX, digest_tensor


@dataclass(frozen=True)
class Served:
    """A loaded adapter; `family` is another one after every load, so keys of an older load are never shared."""

    spec: AdapterSpec
    family: tuple[str, int]


class Adapters:
    """The adapters of one engine."""

    def __init__(self, model: CausalLM) -> None:
        self.served: dict[str, Served] = {}
        self._table = AdapterTable(model)
        self._loads = 0

    def load(self, name: str, tensors: Mapping[str, Tensor], spec: AdapterSpec) -> dict[str, str]:
        """Add or replace; returns the digests of what is held. `ValueError`, and no change, when it does not fit."""
        plain = {key.removeprefix(PEFT_PREFIX): tensor for key, tensor in tensors.items()}
        if whole := sorted(key for key in plain if ".lora_A." not in key and ".lora_B." not in key):
            raise ValueError(f"adapter {name!r} holds {whole[0]} whole, which is not served beside others: merge it")
        self._table.put(name, Adapter(LoraSpec(spec.rank, spec.alpha), plain))
        self._loads += 1
        self.served[name] = Served(spec, (name, self._loads))
        held: dict[str, Tensor | None] = {}
        for module, changes in self._table.changes.items():
            if name in changes:
                held |= {f"{module}.lora_A.weight": changes[name].a, f"{module}.lora_B.weight": changes[name].b}
        digests = {}
        for key, tensor in tensors.items():
            kept = held[key.removeprefix(PEFT_PREFIX)]
            assert kept is not None
            digests[key] = digest_tensor(kept.to(tensor.dtype))
        return digests

    def remove(self, name: str) -> None:
        """Forget one; `ValueError` when there is none of this name."""
        if self.served.pop(name, None) is None:
            raise ValueError(f"no adapter {name!r} is loaded")
        self._table.remove(name)

    def route(self, names: Sequence[str | None], counts: Sequence[int], device: torch.device) -> Routes | None:
        """Which rows each adapter changes when `counts[i]` rows belong to `names[i]`; None when none does."""
        if not any(names):
            return None
        owners = torch.repeat_interleave(torch.arange(len(names)), torch.tensor(counts))
        rows = {}
        for name in {name for name in names if name is not None}:
            mine = torch.tensor([other == name for other in names])
            rows[name] = mine[owners].nonzero().squeeze(1).to(device)
        return Routes(self._table, rows)


class Routes:
    """Changes the output of a product in the rows that belong to adapters, by the arithmetic of the trainer's layer."""

    def __init__(self, table: AdapterTable, rows: Mapping[str, Int[Tensor, " rows"]]) -> None:
        self._table, self._plain, least = table, rows, min_rows()
        self._rows = {}
        for name, index in rows.items():
            padding = index[-1:].expand(max(least - len(index), 0))  # fewer rows would be rounded in another order
            self._rows[name] = (torch.cat((index, padding)), len(index))

    def routed(self) -> AbstractContextManager[None]:
        """Within it the hooks of the table change what the model's own modules give."""
        return self._table.route(self._plain)

    def change(
        self, parts: Sequence[tuple[str, int, int]], x: Float[Tensor, "rows inputs"], y: Float[Tensor, "rows outputs"]
    ) -> None:
        """Add to `y`, in place; `parts` names the modules whose outputs stand in columns `start .. end`."""
        for module, start, end in parts:
            changes = self._table.changes.get(module)
            if not changes:
                continue
            for name, (index, count) in self._rows.items():
                change = changes.get(name)
                if change is not None and change.a is not None and change.b is not None:
                    delta = lora_delta(x[index], change.a, change.b, change.scale)[:count]
                    y[index[:count], start:end] += delta
