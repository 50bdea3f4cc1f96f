"""The inference servers before the first request: reachable, at the right version, and enough sockets for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.transport.watch import wait_for
from prime_rl.utils.client import InferenceClient
from rollouts.training.steps import is_complete, step_path
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines

if TYPE_CHECKING:
    from prime_rl.utils.config import ClientConfig

CHECK_EVERY_S = 0.05


def build_engines(config: ClientConfig) -> list[PrimeEngine]:
    """The control side of every server of the client."""
    headers = dict(config.headers)
    if key := os.environ.get(config.api_key_var):
        headers.setdefault("authorization", f"Bearer {key}")
    return [PrimeEngine(url, headers=headers) for url in config.base_url]


async def prepare_engines(
    config: OrchestratorConfig, clients: Sequence[InferenceClient], engines: Sequence[PrimeEngine], version: int
) -> None:
    """Wait until every server is ready, then bring those that hold another version to `version`."""
    versions: list[int | None] = [await wait_until_ready(client, config.inference_timeout) for client in clients]
    for engine, held in zip(engines, versions, strict=True):
        if held is None or held == version:
            continue
        logger.info(f"{engine} holds version {held}: loading version {version}")
        if version == 0:
            await engine.reload_weights()
        else:
            await _load_resumed(config, engine, version)


async def _load_resumed(config: OrchestratorConfig, engine: PrimeEngine, version: int) -> None:
    """Load the version that a resumed trainer publishes once more: it may replace the directory as we look."""
    root = config.output_dir / "weights"
    path = step_path(root, version)
    for tries_left in (2, 1, 0):
        await wait_for(
            lambda: is_complete(path) or None, root, timeout_s=config.weights_timeout, what=f"weights of step {version}"
        )
        try:
            await sync_weights_to_engines([engine], str(path))
            return
        except WeightSyncError:
            if not tries_left:
                raise


async def wait_until_ready(client: InferenceClient, timeout_s: float) -> int | None:
    """Version that a server reports at /health once it answers; raises `TimeoutError` naming its address."""
    root = client.copy(base_url=client.root_url)
    problem = "no answer"
    logger.info(f"Waiting for the inference server at {client.root_url}")
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                health = msgspec.json.decode(await root.request("GET", "/health", timeout_s=5.0, max_retries=0))
            except msgspec.DecodeError:
                return None  # another kind of server: it is there, and tells no version
            except Exception as error:
                problem = str(error)
            else:
                return health.get("version") if isinstance(health, dict) else None
            await anyio.sleep(CHECK_EVERY_S)
    raise TimeoutError(
        f"the inference server at {client.root_url} was not ready within {timeout_s:g} s ({problem}): "
        "start it, or set client.base_url"
    )
