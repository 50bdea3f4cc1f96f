"""Multi-LoRA: applies several adapters to the rows of a mixed batch.

Rows of an adapter are gathered, passed through the `lora_delta` of the trainer, and scattered back. `lora_delta` is
batch-invariant, so the engine matches the trainer bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prime_rl.trainer.lora import Adapter, lora_delta
from prime_rl.trainer.models.causal_lm import CausalLM
from rollouts.training.numerics import min_rows, repeat_last


@dataclass(frozen=True)
class LoraDelta:
    """Low-rank update of one module by one adapter: y + scale * B (A x)."""

    a: Tensor
    b: Tensor
    scale: float


class _SliceDeltas(torch.autograd.Function):
    """y + scale B (A x) for slices of rows. The products of the gradients have the shapes of a slice:

    with dz = scale dy and h = A x:   dB = dz h^T,   dA = (B^T dz) x^T,   dx = A^T B^T dz
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, slices: tuple[tuple[int, int, float], ...], *matrices: Tensor
    ) -> Tensor:
        ctx.slices = slices
        ctx.save_for_backward(x, *matrices)
        out = y.clone()
        for (start, end, scale), a, b in zip(slices, matrices[::2], matrices[1::2], strict=True):
            out[start:end] += lora_delta(repeat_last(x[start:end], min_rows()), a, b, scale)[: end - start]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        of_matrices: list[Tensor] = []
        for (start, end, scale), a, b in zip(ctx.slices, matrices[::2], matrices[1::2], strict=True):
            rows, of_delta = x[start:end].clone(), grads[0][start:end] * scale
            of_low = of_delta @ b
            of_matrices += [of_low.t() @ rows, of_delta.t() @ (rows @ a.t())]
            if grad_x is not None:
                grad_x[start:end] = of_low @ a
        return grad_x, grads[0], None, *of_matrices


class _Slices(threading.local):
    """Rows `start .. end` by adapter, of the forward pass of a thread."""

    def __init__(self) -> None:
        self.slices: dict[str, tuple[int, int]] = {}


class AdapterTable:
    """Loaded adapters of a model; inside `route` each applies to its own rows of every forward pass.

    Adapters are applied by forward hooks: code that reads a module's weight instead of calling the module must apply
    `changes[module name]` itself.
    """

    def __init__(self, model: CausalLM, dtype: torch.dtype | None = None) -> None:
        """`dtype`: that of the arithmetic, if the model's embedding has another one."""
        self.model, self._dtype = model, dtype or model.embedding().dtype
        self.changes: dict[str, dict[str, LoraDelta]] = {}
        """Module name -> adapter name -> change."""
        self._handles: dict[str, RemovableHandle] = {}
        self._rows: dict[str, tuple[Int[Tensor, " rows"], int]] = {}
        self._local = _Slices()

    def put(self, name: str, adapter: Adapter) -> None:
        """Add or replace an adapter; `ValueError`, without any change, when it does not match the model."""
        new = self._build(name, adapter)
        self.remove(name)
        for module_name, change in new.items():
            if module_name not in self.changes:
                self.changes[module_name] = {}
                module = self.model.get_submodule(module_name)
                self._handles[module_name] = module.register_forward_hook(self._hook(self.changes[module_name]))
            self.changes[module_name][name] = change

    def remove(self, name: str) -> None:
        """Remove an adapter, if loaded."""
        for module_name, changes in list(self.changes.items()):
            changes.pop(name, None)
            if not changes:
                self._handles.pop(module_name).remove()
                del self.changes[module_name]

    @contextmanager
    def route_slices(self, slices: Mapping[str, tuple[int, int]]) -> Iterator[None]:
        """Like `route` in this thread, for rows `start .. end`; gradients of an adapter depend on its own rows only."""
        self._local.slices = dict(slices)
        try:
            yield
        finally:
            self._local.slices = {}

    @contextmanager
    def route(self, rows: Mapping[str, Int[Tensor, " rows"]]) -> Iterator[None]:
        """Context in which the given rows use these adapters and all other rows the base model.

        Rows of different adapters must not overlap.
        """
        padded = {name: (repeat_last(index, min_rows()), len(index)) for name, index in rows.items() if len(index)}
        before, self._rows = self._rows, padded
        try:
            yield
        finally:
            self._rows = before

    def _hook(self, changes: dict[str, LoraDelta]) -> Any:
        def change_rows(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
            if own := [(changes[name], *place) for name, place in self._local.slices.items() if name in changes]:
                matrices = [matrix for change, _, _ in own for matrix in (change.a, change.b)]
                slices = tuple((start, end, change.scale) for change, start, end in own)
                flat = args[0].flatten(0, -2), y.flatten(0, -2)  # models of transformers have a batch dimension
                return cast(Tensor, _SliceDeltas.apply(*flat, slices, *matrices)).view_as(y)  # type: ignore[no-untyped-call]
            active = [(changes[name], *self._rows[name]) for name in self._rows if name in changes]
            if not active:
                return None
            x, rows = args[0].flatten(0, -2), y.flatten(0, -2)
            out = rows.clone()
            for change, index, count in active:
                delta = lora_delta(x[index], change.a, change.b, change.scale)
                out[index[:count]] = (rows[index] + delta)[:count]
            return out.view_as(y)

        return change_rows

    def _build(self, name: str, adapter: Adapter) -> dict[str, LoraDelta]:
        """Deltas of an adapter by module, on the device of the model; `ValueError` as `put`."""
        device, modules = self.model.embedding().device, dict(self.model.named_modules())
        tensors = {key: tensor.to(device, self._dtype) for key, tensor in adapter.tensors.items()}
        if whole := sorted(key for key in tensors if ".lora_A." not in key and ".lora_B." not in key):
            raise ValueError(
                f"adapter {name!r} has the full tensor {whole[0]}, which multi-LoRA cannot serve: merge it"
            )
        changes: dict[str, LoraDelta] = {}
        for key in tensors:
            owner = key.rpartition(".lora_")[0]
            module, pair = modules.get(owner), [f"{owner}.lora_{kind}.weight" for kind in "AB"]
            if module is None:
                raise ValueError(f"adapter {name!r} adapts {owner}, which this model does not have")
            if key not in pair or not tensors.keys() >= set(pair) or not isinstance(module, nn.Linear):
                raise ValueError(f"adapter {name!r} has no matching pair of matrices for {owner}")
            a, b = (tensors[matrix] for matrix in pair)
            rank = adapter.spec.rank
            _check_shape(name, pair[0], a, (rank, module.in_features), rank)
            _check_shape(name, pair[1], b, (module.out_features, rank), rank)
            changes[owner] = LoraDelta(a, b, adapter.spec.scale)
        if not changes:
            raise ValueError(f"adapter {name!r} has no tensors: it is damaged, save it again")
        return changes


def _check_shape(adapter: str, name: str, tensor: Tensor, shape: tuple[int, int], rank: int) -> None:
    if tuple(tensor.shape) != shape:
        found = tuple(tensor.shape)
        raise ValueError(f"adapter {adapter!r}: {name} has shape {found}, it should be {shape} (r = {rank})")
