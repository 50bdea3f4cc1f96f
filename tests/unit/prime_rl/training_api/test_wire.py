"""Protobuf messages of the training API: round trips, sparse tensors, and bytes that are not messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from training_requests import build_pass, build_tensor

from prime_rl.training_api import wire
from prime_rl.training_api.wire import CLASSES, decode_pass, decode_target, decode_tensor, densify, encode_pass


def test_pass_request_round_trip() -> None:
    weights = np.array([0.5, 1.0], dtype=np.float32)
    body = build_pass("m", 3, [([1, 2], {"target_tokens": np.array([2, 3]), "weights": weights})], "ppo", {"x": 2.0})
    request = decode_pass(body)
    assert (decode_target(body).model_id, decode_target(body).seq_id) == ("m", 3)
    assert (request.loss_fn, request.loss_config) == ("ppo", {"x": 2.0})
    [datum] = request.data
    assert datum.tokens == [1, 2] and datum.inputs["target_tokens"].tolist() == [2, 3]
    assert datum.inputs["weights"].tolist() == [0.5, 1.0] and not request.forward_only


def test_pass_result_round_trip() -> None:
    tensors = [torch.tensor([-1.0, -2.0]), torch.tensor([[-1.0, -3.0]])]
    message = CLASSES["ForwardBackwardOutput"].FromString(
        encode_pass([{"logprobs": tensor} for tensor in tensors], {"loss:sum": 3.0})
    )
    for tensor, record in zip(tensors, message.loss_fn_outputs, strict=True):
        stored = record.fields["logprobs"]
        values = np.frombuffer(stored.data, dtype=np.float32).reshape(-1, *stored.trailing_shape)
        assert values.tolist() == tensor.tolist()
        assert np.frombuffer(stored.offsets, dtype=np.int64).tolist() == [0, len(stored.data)]
    assert dict(message.metrics) == {"loss:sum": 3.0}


def test_sparse_tensors_are_filled() -> None:
    values, rows, columns = np.array([2.0, 1.0, 3.0]), np.array([0, 1, 1, 3]), np.array([1, 0, 2])
    assert densify((3, 3), values, rows, columns, "x").tolist() == [[0, 2, 0], [0, 0, 0], [1, 0, 3]]
    assert densify((1, 2), np.array([7]), np.array([0, 1]), np.array([1]), "x").tolist() == [[0, 7]]


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [([0, 2], [0, 5], (1, 2)), ([0, 1], [-1], (1, 2)), ([1, 1], [], (1, 2)), ([0, 1], [0], (2, 2)), ([], [], (1,))],
)
def test_sparse_indices_outside_of_the_shape_are_refused(rows: Any, columns: Any, shape: Any) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        densify(shape, np.ones(len(columns)), np.array(rows), np.array(columns), "x")


@pytest.mark.parametrize("body", [b"\xff" * 40, b"not protobuf at all", b"\x1a\xff\xff\xff\xff\x7f"])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    for decode in (decode_pass, decode_target):
        with pytest.raises(ValueError, match="not a ForwardBackwardRequest"):
            decode(body)


def test_impossible_tensors_are_refused() -> None:
    huge = build_tensor(np.zeros(1, dtype=np.float32))
    huge.shape[:] = [2**40, 2**40]
    ragged = build_tensor(np.zeros(1, dtype=np.float32))
    ragged.dense = b"abc"
    other = build_tensor(np.zeros(1, dtype=np.float32))
    other.dtype = 4
    negative = build_tensor(np.zeros(1, dtype=np.float32))
    negative.shape[:] = [-1]
    for tensor, message in [
        (huge, "too large"),
        (negative, "not possible"),
        (ragged, "whole number"),
        (other, "data type"),
    ]:
        with pytest.raises(ValueError, match=message):
            decode_tensor(tensor, "x")


def test_sparse_tensors_of_a_request_share_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes describe a large tensor, and a request may have many."""
    monkeypatch.setattr(wire, "MAX_ELEMENTS", 100)
    message = CLASSES["ForwardBackwardRequest"](model_id="m")
    sparse = build_tensor(np.zeros(1, dtype=np.float32))
    sparse.sparse_csr.crow_indices = np.zeros(2, dtype=np.int64).tobytes()
    sparse.shape[:] = [1, 20]
    for i in range(5):
        datum = message.data.add() if i % 2 == 0 else message.data[-1]
        datum.loss_fn_inputs[f"{i}"].CopyFrom(sparse)
    decoded = decode_pass(message.SerializeToString())
    assert [array.shape for datum in decoded.data for array in datum.inputs.values()] == [(1, 20)] * 5
    message.data.add().loss_fn_inputs["weights"].CopyFrom(sparse)
    with pytest.raises(ValueError, match=r"data\[3\]\.weights: shape \[1, 20\] is too large: send at most 100"):
        decode_pass(message.SerializeToString())


def test_image_chunks_are_refused() -> None:
    message = CLASSES["ForwardBackwardRequest"](model_id="m")
    message.data.add().model_input.add().image.SetInParent()
    with pytest.raises(ValueError, match="no image chunks"):
        decode_pass(message.SerializeToString())
