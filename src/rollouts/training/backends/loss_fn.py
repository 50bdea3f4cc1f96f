"""Adapts user loss functions of a backend: call signature, and the unit that the scalar averages over."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollouts.training.rl_losses import LossOutput

STREAMS = (
    "labels",
    "loss_mask",
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "input_ids",
    "attention_mask",
    "position_ids",
)
"""Batch entries that a loss function may take as parameters."""

ACCEPTED = "loss_fn(logits, batch), or loss_fn(logits, ...) with parameters named like " + ", ".join(STREAMS[:5])
UNITS = ("token", "sequence", "constant", "call")


@dataclass(frozen=True)
class BatchLoss:
    """Mean loss of one batch, its weight within the step, and metrics."""

    mean: Tensor
    weight: float
    metrics: dict[str, float]


LossFn = Callable[[Tensor, dict[str, Any]], BatchLoss]


def as_loss_fn(function: Callable[..., Any]) -> LossFn:
    """A loss of either accepted form as `(logits, batch) -> BatchLoss`; any other signature is a `ValueError`.

    The function returns a scalar, `(scalar, metrics)` or a `LossOutput`. With a declared unit (`rl_losses.mean_over`)
    the weight is the number of tokens or sequences, otherwise 1 per call.
    """
    if not callable(function):
        raise ValueError(f"loss_fn {function!r} is not callable: pass {ACCEPTED}")
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"loss_fn {function!r} has no signature to read: pass {ACCEPTED}") from error
    unit = _unit(function, parameters)
    call = _caller(function, parameters)

    def loss(logits: Tensor, batch: dict[str, Any]) -> BatchLoss:
        return _to_batch_loss(call(logits, batch), unit, batch)

    return loss


def _caller(function: Callable[..., Any], parameters: dict[str, Any] | Any) -> Callable[[Tensor, dict[str, Any]], Any]:
    """A wrapper that passes logits and batch in the form that the function takes."""
    kinds = inspect.Parameter
    named = {n: p for n, p in parameters.items() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    if not named and any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        return lambda logits, batch: function(logits=logits, batch=batch)
    required = [n for n, p in named.items() if p.default is kinds.empty]
    if not named or next(iter(named.values())).kind is kinds.KEYWORD_ONLY:
        raise ValueError(f"loss_fn {_name(function)} takes no logits first: pass {ACCEPTED}")
    first, *others = named
    if "batch" in others:
        extra = [n for n in required if n not in (first, "batch")]
        _reject_unknown(function, extra)
        return lambda logits, batch: function(logits, batch=batch)
    _reject_unknown(function, [n for n in required if n != first and n not in STREAMS])
    if not set(others) & set(STREAMS):
        raise ValueError(f"loss_fn {_name(function)} does not take the batch: pass {ACCEPTED}")
    passed = [n for n in others if n in STREAMS]

    def by_name(logits: Tensor, batch: dict[str, Any]) -> Any:
        missing = [n for n in passed if n in required and n not in batch]
        if missing:
            raise ValueError(f"loss_fn {_name(function)} needs {missing[0]!r}, the batch has {', '.join(batch)}")
        return function(logits, **{n: batch[n] for n in passed if n in batch})

    return by_name


def _reject_unknown(function: Callable[..., Any], unknown: list[str]) -> None:
    if unknown:
        raise ValueError(
            f"loss_fn {_name(function)} takes {', '.join(map(repr, unknown))}, which no batch has: pass {ACCEPTED}"
        )


def _unit(function: Callable[..., Any], parameters: Any) -> str:
    """The unit that the scalar averages over; "call" if the function does not declare it."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    unit = getattr(inner, "mean_over", "call")
    if unit == "aggregation":
        unit = parameters["aggregation"].default
    if unit not in UNITS:
        raise ValueError(f"loss_fn {_name(function)} is a mean over {unit!r}, which is none of {', '.join(UNITS)}")
    return str(unit)


def _to_batch_loss(result: Any, unit: str, batch: dict[str, Any]) -> BatchLoss:
    metrics: dict[str, float] = {}
    if isinstance(result, LossOutput):
        weight = float(result.count)
        return BatchLoss(result.loss_sum / (weight or 1.0), weight, result.stats.summary())
    if isinstance(result, tuple) and len(result) == 2:
        result, metrics = result
    if not isinstance(result, Tensor) or result.numel() != 1:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"loss_fn returned {shape}: it must return one number as a tensor, or that and its metrics")
    weight = 1.0
    if unit == "token":
        weight = float(batch["loss_mask"].sum())
    elif unit in ("sequence", "constant"):
        weight = float(len(batch["loss_mask"]))
    return BatchLoss(result, weight, {name: float(value) for name, value in metrics.items()})


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
