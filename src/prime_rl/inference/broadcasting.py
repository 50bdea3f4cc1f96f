"""Requests by which a server learns where to receive weights from, and which."""

from __future__ import annotations

import asyncio
import math

from prime_rl.inference.requests import ApiError, Json
from prime_rl.transport.broadcast import SCHEMA, Broadcast, BroadcastFailed, check_broadcast

NO_TRAINER = "no trainer to receive weights from: POST /init_broadcaster first"
TIMEOUT_S = 60.0
"""Seconds that a transfer may stand still where the request says nothing."""


def parse_broadcast(body: Json, own_type: str) -> Broadcast:
    """Where weights are to be received from; `ApiError` names the field that is wrong.

    `server_rank` and `num_inference_server`, which the caller may tell, are checked and not needed: every server has a
    group of its own with the trainer.
    """
    if own_type == "filesystem":
        raise ApiError(
            'this server reads weights from directories (weight_broadcast.type = "filesystem"): start it with the type '
            "that the trainer has, or use /update_weights with a directory",
            status=409,
        )
    kind = body.get("type", own_type)
    if kind != own_type:
        raise ApiError(
            f"the trainer sends over {kind!r}, this server receives over {own_type!r}: give both one "
            "weight_broadcast.type",
            status=409,
            param="type",
        )
    host, timeout = body.get("host"), body.get("timeout", TIMEOUT_S)
    if not isinstance(host, str) or not host:
        raise ApiError("host must be the address of the trainer", param="host")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ApiError("timeout must be a number of seconds above 0", param="timeout")
    rank, number = _integer(body, "server_rank", 0, 0), _integer(body, "num_inference_server", 1, None)
    if number is not None and rank is not None and rank >= number:
        raise ApiError(f"server_rank {rank} is not below num_inference_server {number}", param="server_rank")
    port = _integer(body, "port", 1)
    if port is None or port > 65535:
        raise ApiError("port must be an integer from 1 to 65535", param="port")
    return Broadcast(SCHEMA, "nccl" if own_type == "nccl" else "gloo", host, port, float(timeout))


async def init_broadcast(body: Json, own_type: str) -> Broadcast:
    """The trainer that a request for /init_broadcaster names, once it has answered; `ApiError` otherwise."""
    broadcast = parse_broadcast(body, own_type)
    try:
        await asyncio.to_thread(check_broadcast, broadcast)
    except BroadcastFailed as error:
        raise ApiError(str(error), status=503) from error
    return broadcast


def parse_version(body: Json) -> int:
    """The version that is to be received."""
    step = _integer(body, "step", 0)
    if step is None:
        raise ApiError('give {"weight_dir": null, "step": N}, or {"weight_dir": "<directory>"}', param="step")
    return step


def _integer(body: Json, name: str, least: int, default: int | None = None) -> int | None:
    value = body.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ApiError(f"{name} must be an integer of at least {least}", param=name)
    return value
