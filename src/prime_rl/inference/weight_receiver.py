"""Parses the requests that set up a weight broadcast and select the version to receive."""

from __future__ import annotations

import asyncio
import math

from prime_rl.inference.request_parsing import ApiError, Json, Range, read_integer
from prime_rl.transport.broadcast import SCHEMA, Broadcast, BroadcastFailed, check_broadcast

NO_TRAINER = "no weight broadcast is set up: POST /init_broadcaster first"
TIMEOUT_S = 60.0
"""Default timeout of a stalled transfer in seconds."""


def parse_broadcast(body: Json, own_type: str) -> Broadcast:
    """Parse the trainer's address; `ApiError` names an invalid field.

    The optional `server_rank` and `num_inference_server` are validated but unused: every server has its own group
    with the trainer.
    """
    if own_type == "filesystem":
        raise ApiError(
            'this server loads weights from directories (weight_broadcast.type = "filesystem"): start it with the '
            "trainer's type, or use /update_weights with a directory",
            status=409,
        )
    kind = body.get("type", own_type)
    if kind != own_type:
        raise ApiError(
            f"the trainer sends over {kind!r}, this server receives over {own_type!r}: set the same "
            "weight_broadcast.type for both",
            status=409,
            param="type",
        )
    host, timeout = body.get("host"), body.get("timeout", TIMEOUT_S)
    if not isinstance(host, str) or not host:
        raise ApiError("host must be the address of the trainer", param="host")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ApiError("timeout must be a number of seconds above 0", param="timeout")
    rank = read_integer(body, "server_rank", Range(0, 0))
    num_servers = read_integer(body, "num_inference_server", Range(None, 1))
    if num_servers is not None and rank is not None and rank >= num_servers:
        raise ApiError(f"server_rank {rank} is not below num_inference_server {num_servers}", param="server_rank")
    port = read_integer(body, "port", Range(None, 1))
    if port is None or port > 65535:
        raise ApiError("port must be an integer from 1 to 65535", param="port")
    return Broadcast(SCHEMA, "nccl" if own_type == "nccl" else "gloo", host, port, float(timeout))


async def init_broadcast(body: Json, own_type: str) -> Broadcast:
    """Connect to the trainer named in a /init_broadcaster request; `ApiError` if it does not respond."""
    broadcast = parse_broadcast(body, own_type)
    try:
        await asyncio.to_thread(check_broadcast, broadcast)
    except BroadcastFailed as error:
        raise ApiError(str(error), status=503) from error
    return broadcast


def parse_version(body: Json) -> int:
    """Parse the version to receive."""
    step = read_integer(body, "step", Range(None, 0))
    if step is None:
        raise ApiError('give {"weight_dir": null, "step": N}, or {"weight_dir": "<directory>"}', param="step")
    return step
