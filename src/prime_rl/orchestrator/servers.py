"""Requests to a single inference server: weight updates and health."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec
from loguru import logger

from prime_rl.runtime.run_dir import RunDir
from prime_rl.transport.broadcast import read_broadcast
from prime_rl.utils.client import InferenceClient
from rollouts.training.steps import is_complete, parse_step
from rollouts.training.weight_sync import EngineError, PrimeEngine

if TYPE_CHECKING:
    from prime_rl.configuration.sections import ClientConfig

POLL_INTERVAL_S = 0.05


def build_engines(config: ClientConfig, *, broadcast: bool = False) -> list[PrimeEngine]:
    """One engine per server of `client`. `broadcast`: servers receive weights from the trainer over process groups."""
    headers = config.read_headers()
    timeout = max(config.timeout, PrimeEngine.timeout)
    if not broadcast:
        return [PrimeEngine(url, timeout, headers=headers) for url in config.base_url]
    number = len(config.base_url)
    return [
        BroadcastEngine(url, timeout, headers=headers, server_rank=rank, num_servers=number)
        for rank, url in enumerate(config.base_url)
    ]


@dataclass(frozen=True)
class BroadcastEngine(PrimeEngine):
    """A server that receives announced versions from the trainer and loads others from files."""

    server_rank: int = field(default=0, kw_only=True)
    num_servers: int = field(default=1, kw_only=True)

    async def load_version(self, path: Path) -> dict[str, Any]:
        """Load a version and return the response; if the trainer has exited, from its saved weights where possible."""
        broadcast = read_broadcast(path)
        rank = {"server_rank": self.server_rank, "num_inference_server": self.num_servers}
        try:
            address = {name: getattr(broadcast, name) for name in ("type", "host", "port", "timeout")}
            await self.load("/init_broadcaster", {**address, **rank})
            return await self.load("/update_weights", {"weight_dir": None, "step": parse_step(path.name)})
        except EngineError as error:
            saved = RunDir(path.parents[1]).weights / path.name
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE or not is_complete(saved):
                raise
            logger.warning(f"{self}: {error.message}; loading {saved} instead")
            try:
                return await super().load_version(saved)
            except EngineError as second:  # such as 403 of a server without shared files: the first one may pass
                raise EngineError(error.kind, f"{error.message}; {second.message}", error.status) from second


class Health(NamedTuple):
    """Response of /health; no version or dtype: the server does not report one."""

    version: int | None = None
    awaits_weights: bool = False
    exact: bool = False
    dtype: str = ""
    arithmetic: str = ""
    is_paused: bool = False


async def read_health(client: InferenceClient) -> Health:
    """The health of a server; client errors are raised unchanged."""
    root = client.copy(base_url=client.root_url)
    try:
        fields = msgspec.json.decode(await root.request("GET", "/health", timeout_s=5.0, max_retries=0))
    except (msgspec.DecodeError, RecursionError):
        return Health()
    if not isinstance(fields, dict):
        return Health()
    return Health(
        fields.get("version"),
        bool(fields.get("awaits_weights")),
        bool(fields.get("exact")),
        str(fields.get("dtype", "")),
        str(fields.get("arithmetic", "")),
        bool(fields.get("is_paused")),
    )


async def wait_until_ready(client: InferenceClient, timeout_s: float) -> Health:
    """The health of a server once it responds; raises `TimeoutError` naming its address."""
    problem = "no response"
    logger.info(f"Waiting for the inference server at {client.root_url}")
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                return await read_health(client)
            except Exception as error:
                problem = str(error)
            await anyio.sleep(POLL_INTERVAL_S)
    raise TimeoutError(
        f"the inference server at {client.root_url} was not ready within {timeout_s:g} s ({problem}): "
        "start it, or set client.base_url"
    )
