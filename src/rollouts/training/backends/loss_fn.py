"""What a backend may be given as its loss: read the signature once, and know what the scalar is a mean over."""

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
"""Entries of a batch that a loss function may ask for by the name of a parameter."""

ACCEPTED = "loss_fn(logits, batch), or loss_fn(logits, ...) with parameters named like " + ", ".join(STREAMS[:5])
UNITS = ("token", "sequence", "constant", "call")


@dataclass(frozen=True)
class BatchLoss:
    """Mean loss of one batch, how much it weighs against other parts of the same step, and more numbers to report."""

    mean: Tensor
    weight: float
    metrics: dict[str, float]


LossFn = Callable[[Tensor, dict[str, Any]], BatchLoss]


def as_loss_fn(function: Callable[..., Any]) -> LossFn:
    """A loss of either accepted form as `(logits, batch) -> BatchLoss`; any other signature is a `ValueError`.

    The function returns a scalar, `(scalar, metrics)` or a `LossOutput`. A scalar that says what it is a mean over
    (`rl_losses.mean_over`) weighs as many tokens or sequences, any other one weighs 1 per call.
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
        return _measure(call(logits, batch), unit, batch)

    return loss


def _caller(function: Callable[..., Any], parameters: dict[str, Any] | Any) -> Callable[[Tensor, dict[str, Any]], Any]:
    """How to hand logits and batch to the function."""
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
        _refuse(function, extra)
        return lambda logits, batch: function(logits, batch=batch)
    _refuse(function, [n for n in required if n != first and n not in STREAMS])
    if not set(others) & set(STREAMS):
        raise ValueError(f"loss_fn {_name(function)} does not take the batch: pass {ACCEPTED}")
    wanted = [n for n in others if n in STREAMS]

    def by_name(logits: Tensor, batch: dict[str, Any]) -> Any:
        missing = [n for n in wanted if n in required and n not in batch]
        if missing:
            raise ValueError(f"loss_fn {_name(function)} needs {missing[0]!r}, the batch has {', '.join(batch)}")
        return function(logits, **{n: batch[n] for n in wanted if n in batch})

    return by_name


def _refuse(function: Callable[..., Any], unknown: list[str]) -> None:
    if unknown:
        raise ValueError(
            f"loss_fn {_name(function)} asks for {', '.join(map(repr, unknown))}, which no batch has: pass {ACCEPTED}"
        )


def _unit(function: Callable[..., Any], parameters: Any) -> str:
    """What the scalar is a mean over; "call" when the function does not say."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    unit = getattr(inner, "mean_over", "call")
    if unit == "aggregation":
        unit = parameters["aggregation"].default
    if unit not in UNITS:
        raise ValueError(f"loss_fn {_name(function)} is a mean over {unit!r}, which is none of {', '.join(UNITS)}")
    return str(unit)


def _measure(result: Any, unit: str, batch: dict[str, Any]) -> BatchLoss:
    metrics: dict[str, float] = {}
    if isinstance(result, LossOutput):
        weight = float(result.count)
        return BatchLoss(result.loss_sum / max(weight, 1.0), weight, result.stats.summary())
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
