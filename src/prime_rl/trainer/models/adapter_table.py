"""Several adapters beside one base model: which rows of a flat token batch each of them changes.

The engine's half of LoRA. Rows of an adapter are gathered, changed by the very `lora_delta` the trainer uses, and put
back; since a row's bits do not depend on how many rows there are, a token gets what its trainer would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from prime_rl.trainer.lora import Adapter, lora_delta
from prime_rl.trainer.models.attention import min_rows
from prime_rl.trainer.models.causal_lm import CausalLM


@dataclass(frozen=True)
class Change:
    """What one adapter does to one module: a low-rank change, or its parameters replaced whole."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The module's output for rows `x`, whose base output is `y`."""
        if self.parameters:
            out: Tensor = functional_call(module, self.parameters, (x,))
            return out
        assert self.a is not None and self.b is not None
        return y + lora_delta(x, self.a, self.b, self.scale)


class AdapterTable:
    """The adapters a model serves; inside `route` each changes its own rows of every forward pass.

    Modules keep their class and names, because the changes are forward hooks: code that reads a module's weight
    instead of calling it must apply `changes[module name]` itself.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.changes: dict[str, dict[str, Change]] = {}
        """Module name -> adapter name -> change."""
        self._handles: dict[str, RemovableHandle] = {}
        self._rows: dict[str, tuple[Int[Tensor, " rows"], int]] = {}
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def names(self) -> list[str]:
        """The adapters that can be routed to."""
        return sorted(self._names)

    def put(self, name: str, adapter: Adapter) -> None:
        """Add an adapter or replace the one of that name; `ValueError`, and no change, when it does not fit."""
        new = self._build(name, adapter)
        self.remove(name)
        self._names.add(name)
        for module_name, change in new.items():
            if module_name not in self.changes:
                self.changes[module_name] = {}
                module = self.model.get_submodule(module_name)
                self._handles[module_name] = module.register_forward_hook(self._hook(self.changes[module_name]))
            self.changes[module_name][name] = change

    def remove(self, name: str) -> None:
        """Forget an adapter; nothing happens when there is none of that name."""
        self._names.discard(name)
        for module_name, changes in list(self.changes.items()):
            changes.pop(name, None)
            if not changes:
                self._handles.pop(module_name).remove()
                del self.changes[module_name]

    @contextmanager
    def route(self, rows: Mapping[str, Int[Tensor, " rows"]]) -> Iterator[None]:
        """Within the context, the given rows of every forward pass belong to these adapters, all others to the base.

        Rows of different adapters must not overlap.
        """
        padded: dict[str, tuple[Tensor, int]] = {}
        for name, index in rows.items():
            if len(index):
                missing = max(min_rows() - len(index), 0)
                padded[name] = (torch.cat((index, index[-1:].expand(missing))), len(index))
        before, self._rows = self._rows, padded
        try:
            yield
        finally:
            self._rows = before

    def _hook(self, changes: dict[str, Change]) -> Any:
        def change_rows(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
            mine = [(changes[name], *self._rows[name]) for name in self._rows if name in changes]
            if not mine:
                return None
            x, out = args[0], y.clone()
            with self.route({}):  # a module saved whole is called again, with other parameters and no change
                for change, index, count in mine:
                    out[index[:count]] = change.apply(module, x[index], y[index])[:count]
            return out

        return change_rows

    def _build(self, name: str, adapter: Adapter) -> dict[str, Change]:
        """The changes of an adapter on this model's device and in its number format, by module."""
        weight = self.model.embedding()
        modules = dict(self.model.named_modules())
        held = {key: tensor.to(weight.device, weight.dtype) for key, tensor in adapter.tensors.items()}
        changes: dict[str, Change] = {}
        for key, tensor in held.items():
            module_name, _, parameter = key.rpartition(".")
            low_rank = module_name.endswith((".lora_A", ".lora_B"))
            owner = module_name[: -len(".lora_A")] if low_rank else module_name
            module = modules.get(owner)
            if module is None or (not low_rank and parameter not in dict(module.named_parameters(recurse=False))):
                raise ValueError(f"adapter {name!r} changes {owner}, which this model does not have")
            if not low_rank:
                _check_shape(name, key, tensor, module.get_parameter(parameter).shape)
                earlier = changes.get(owner, Change()).parameters
                changes[owner] = Change(parameters={**earlier, parameter: tensor})
            elif module_name.endswith(".lora_A"):
                other = held.get(f"{owner}.lora_B.weight")
                if other is None or not isinstance(module, nn.Linear):
                    raise ValueError(f"adapter {name!r} has no matching pair of matrices for {owner}")
                _check_shape(name, key, tensor, (tensor.shape[0], module.in_features))
                _check_shape(name, f"{owner}.lora_B.weight", other, (module.out_features, tensor.shape[0]))
                changes[owner] = Change(tensor, other, adapter.spec.scale)
        return changes


def _check_shape(adapter: str, name: str, tensor: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"adapter {adapter!r}: {name} has shape {tuple(tensor.shape)}, the model asks for {tuple(shape)}"
        )
