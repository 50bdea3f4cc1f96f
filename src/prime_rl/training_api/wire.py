"""Protobuf messages of the `tinker` client (0.38): requests of `forward_backward`, results of passes and samples.

The messages are declared here by field numbers, so that no generated code is needed. Fields that the server does not
read (provenance spans) are skipped by the parser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

PACKAGE = "tinker_public"
MESSAGES = {
    "LossConfigValue": "1 number double oneof=value, 2 text string oneof=value",
    "EncodedTextChunk": "1 tokens bytes",
    "OtherChunk": "",
    "Chunk": "1 encoded_text EncodedTextChunk oneof=chunk, 2 image OtherChunk oneof=chunk, "
    "3 dmel OtherChunk oneof=chunk",
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes oneof=encoding, 2 sparse_csr SparseCsr oneof=encoding, 3 dtype int32, 4 shape int64*",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs map:Tensor",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, "
    "5 loss_fn_config map:double, 6 forward_only bool, 7 loss_fn_config_v2 map:LossConfigValue",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string, 2 fields map:BatchedTensor, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics map:double",
    "TopkLogprobs": "1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs, "
    "4 prompt_cache_hit_tokens int32, 5 target_prompt_logprobs Tensor",
}
"""Message -> its fields `number name type`; `type*` is repeated, `map:type` has string keys."""

FLOAT32, INT64 = 1, 2
NUMPY = {FLOAT32: np.dtype(np.float32), INT64: np.dtype(np.int64)}
STOP, LENGTH = 0, 1
MAX_ELEMENTS = 2**26
"""Maximum elements of the tensors of a request, whose sparse encoding may be far smaller."""


def _add_field(message: Any, declaration: str) -> None:
    number, name, kind, *oneof = declaration.split()
    field = message.field.add(name=name, number=int(number), label=1)
    if kind.startswith("map:"):
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "1 key string")
        _add_field(entry, f"2 value {kind.removeprefix('map:')}")
        field.label, field.type = 3, 11
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label, kind = 3, kind[:-1]
    if kind in MESSAGES:
        field.type, field.type_name = 11, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    if oneof:
        group = oneof[0].removeprefix("oneof=")
        if group not in [known.name for known in message.oneof_decl]:
            message.oneof_decl.add(name=group)
        field.oneof_index = [known.name for known in message.oneof_decl].index(group)


def _build_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for declaration in filter(None, fields.split(", ")):
            _add_field(message, declaration)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{PACKAGE}.{name}")) for name in MESSAGES}


CLASSES = _build_classes()


@dataclass(frozen=True)
class Datum:
    """One training sequence: input tokens and the tensors of the loss by name, as arrays of their shape."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]
    listed: np.ndarray | None = None
    """Of sparse `target_tokens`: 1 in the cells that the client has listed, 0 in others. None for dense ones."""


@dataclass(frozen=True)
class PassTarget:
    """Model and number of a `forward_backward` request."""

    model_id: str
    seq_id: int
    forward_only: bool


@dataclass(frozen=True)
class PassRequest:
    """A decoded `forward_backward` request."""

    data: list[Datum]
    loss_fn: str
    loss_config: dict[str, float | str]
    forward_only: bool


def _parse_pass(body: bytes) -> Any:
    try:
        return CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise ValueError("the body is not a ForwardBackwardRequest in protobuf") from error


def decode_target(body: bytes) -> PassTarget:
    """Decode what a request is for; `ValueError` for bytes that are not such a message. Its data are not checked."""
    message = _parse_pass(body)
    return PassTarget(message.model_id, message.seq_id, message.forward_only)


def decode_pass(body: bytes) -> PassRequest:
    """Decode a request; `ValueError` for bytes that are not such a message and for tensors that do not fit."""
    message = _parse_pass(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    data, room = [], MAX_ELEMENTS
    for i, datum in enumerate(message.data):
        data.append(_decode_datum(datum, f"data[{i}]", room))
        room -= sum(array.size for array in data[-1].inputs.values())
    return PassRequest(
        data=data,
        loss_fn=message.loss_fn,
        loss_config=config,
        forward_only=message.forward_only,
    )


def _decode_datum(message: Any, where: str, room: int) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ValueError(f"{where}: this server has no {kind or 'empty'} chunks, only text (encoded_text)")
        tokens += _array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{where}.model_input").tolist()
    inputs: dict[str, np.ndarray] = {}
    listed = None
    for name, value in message.loss_fn_inputs.items():
        inputs[name] = decode_tensor(value, f"{where}.{name}", room)
        room -= inputs[name].size
        if name == "target_tokens" and value.HasField("sparse_csr"):
            listed = _find_listed(value)
    return Datum(tokens, inputs, listed)


def _find_listed(message: Any) -> np.ndarray:
    """1 in the cells that a decoded sparse tensor lists, 0 in the others."""
    csr = message.sparse_csr
    rows, columns = (np.frombuffer(data, np.int64) for data in (csr.crow_indices, csr.col_indices))
    return densify(tuple(message.shape), np.ones(len(columns), np.float32), rows, columns, "")


def _array(data: bytes, dtype: Any, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where}: {len(data)} bytes are not a whole number of {dtype} values")
    return np.frombuffer(data, dtype=dtype)


def decode_tensor(message: Any, where: str, room: int = MAX_ELEMENTS) -> np.ndarray:
    """A dense array of at most `room` elements; `ValueError` for anything else."""
    dtype = NUMPY.get(message.dtype)
    if dtype is None:
        raise ValueError(f"{where}: data type {message.dtype} is not float32 or int64")
    shape = tuple(message.shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"{where}: shape {list(shape)} is not possible")
    if math.prod(shape) > room:
        raise ValueError(f"{where}: shape {list(shape)} is too large: send at most {MAX_ELEMENTS} elements per request")
    if message.WhichOneof("encoding") != "sparse_csr":
        values = _array(message.dense, dtype, where)
        shape = shape or (len(values),)
        if values.size != int(np.prod(shape)):
            raise ValueError(f"{where}: {values.size} values do not fill the shape {list(shape)}")
        return values.reshape(shape)
    csr, index = message.sparse_csr, np.dtype(np.int64)
    return densify(
        shape, _array(csr.values, dtype, where), _array(csr.crow_indices, index, where),
        _array(csr.col_indices, index, where), where,
    )  # fmt: skip


def densify(shape: tuple[int, ...], values: Any, rows: Any, columns: Any, where: str) -> np.ndarray:
    """A dense array from CSR; `ValueError` for indices outside of the shape.

    Cells that are not listed are 0: the client leaves out every 0, also token 0.
    """
    valid = len(shape) == 2 and len(rows) == shape[0] + 1 and len(values) == len(columns)
    valid = valid and rows[0] == 0 and rows[-1] == len(values) and bool(np.all(np.diff(rows) >= 0))
    if not valid or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise ValueError(f"{where}: the sparse indices do not fit the shape {list(shape)}")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def encode_pass(outputs: Sequence[Mapping[str, Tensor]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a pass: one record per datum, so that shapes may differ."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for output in outputs:
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        for name, tensor in output.items():
            data = tensor.detach().to(torch.float32).contiguous().numpy().tobytes()
            field = record.fields[name]
            field.data, field.dtype = data, FLOAT32
            field.offsets = np.array([0, len(data)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(tensor.shape[1:])
    for key, value in metrics.items():
        message.metrics[key] = value
    return bytes(message.SerializeToString())


def fill_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]] | None], k: int) -> None:
    """Fill `TopkLogprobs`; rows without values and missing ranks have token 0 and log-prob -99999."""
    ids = np.zeros((len(rows), k), dtype=np.int32)
    logprobs = np.full((len(rows), k), -99999.0, dtype=np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate((row or ())[:k]):
            ids[i, j], logprobs[i, j] = token, logprob
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), logprobs.tobytes(), k, len(rows)
