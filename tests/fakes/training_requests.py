"""Requests of the `tinker` client, encoded without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prime_rl.training_api.wire import CLASSES, FLOAT32, INT64


def build_tensor(array: Any) -> Any:
    """A dense tensor of float32 or int64."""
    is_float = array.dtype.kind == "f"
    data = array.astype(np.float32 if is_float else np.int64).tobytes()
    return CLASSES["Tensor"](dense=data, dtype=FLOAT32 if is_float else INT64, shape=array.shape)


def build_pass(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    loss_fn: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    forward_only: bool = False,
) -> bytes:
    """A `forward_backward` body of (tokens, loss inputs)."""
    message = CLASSES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss_fn, forward_only=forward_only, loss_fn_config=config or {}
    )
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, dtype=np.int32).tobytes()
        for name, array in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(build_tensor(array))
    return bytes(message.SerializeToString())
