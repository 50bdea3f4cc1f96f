"""The inference servers: reachable, at the right version before the first request, and again after a fall."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.transport.watch import wait_for
from prime_rl.utils.client import InferenceClient
from rollouts.training.steps import is_complete, step_path
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines

if TYPE_CHECKING:
    from prime_rl.orchestrator.weight_relay import WeightRelay
    from prime_rl.utils.config import ClientConfig

CHECK_EVERY_S = 0.05
WATCH_EVERY_S = 1.0  # supervision alone: requests to a server that falls notice it at once
ABSENCE = ("unreachable: ", "answered 503")


def build_engines(config: ClientConfig) -> list[PrimeEngine]:
    """The control side of every server of the client."""
    headers = dict(config.headers)
    if key := os.environ.get(config.api_key_var):
        headers.setdefault("authorization", f"Bearer {key}")
    return [PrimeEngine(url, headers=headers) for url in config.base_url]


async def prepare_engines(
    config: OrchestratorConfig,
    clients: Sequence[InferenceClient],
    engines: Sequence[PrimeEngine],
    version: int,
    name: str = "weights",
) -> None:
    """Wait until every server is ready, then bring those that hold another version to `version` of `name`."""
    states = [await wait_until_ready(client, config.inference_timeout) for client in clients]
    for engine, state in zip(engines, states, strict=True):
        await bring_to(config, engine, state, version, name)


async def bring_to(
    config: OrchestratorConfig, engine: PrimeEngine, state: Health, version: int, name: str = "weights"
) -> None:
    """Let a server load `version` unless it holds it, or is of a kind that tells none."""
    if state.version is None or (state.version == version and not state.awaits_weights):
        return
    logger.info(f"{engine} holds version {state.version}: loading version {version}")
    if version == 0:
        await engine.reload_weights()
    else:
        await _load_resumed(config, engine, version, name)


class EngineKeeper:
    """Watches the servers: one that fell and was started again is brought to the version that the others hold.

        falls --> requests wait in their clients --> started again, answering nobody --> loads our version --> answers

    A server that stays away longer than `inference_timeout` ends the run.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        clients: Sequence[InferenceClient],
        engines: Sequence[PrimeEngine],
        relay: WeightRelay,
        name: str = "weights",
    ) -> None:
        self.config, self.clients, self.engines, self.relay = config, clients, engines, relay
        self.name = name
        self.num_recovered = 0
        self.away: dict[int, tuple[float, str]] = {}
        """Server -> since when it is away, and why."""

    async def run(self) -> None:
        """Watch until cancelled; raises `TimeoutError` naming a server that does not come back."""
        while True:
            await anyio.sleep(WATCH_EVERY_S)
            for i in range(len(self.engines)):
                await self._look(i)

    async def wait_back(self, error: WeightSyncError) -> bool:
        """After a failed update: whether the failure was a server's absence, which has ended."""
        if not all(state == "ok" or any(sign in state for sign in ABSENCE) for _, state in error.states):
            return False
        logger.warning(f"{error}; trying again when every server answers")
        for client in self.clients:
            await wait_until_ready(client, self.config.inference_timeout)
        return True

    async def _look(self, i: int) -> None:
        try:
            state = await read_health(self.clients[i])
            if i in self.away or state.awaits_weights or state.version not in (None, self.relay.version):
                async with self.relay.lock:  # not in the middle of an update, of which each engine has its own part
                    state = await read_health(self.clients[i])
                    await bring_to(self.config, self.engines[i], state, self.relay.version, self.name)
        except Exception as error:
            self._note_absence(i, str(error))
            return
        if self.away.pop(i, None) is not None:
            self.num_recovered += 1
            logger.success(f"{self.engines[i]} is back and holds version {self.relay.version}")

    def _note_absence(self, i: int, problem: str) -> None:
        now, limit = anyio.current_time(), self.config.inference_timeout
        if i not in self.away:
            logger.warning(f"{self.engines[i]} does not answer ({problem}): waiting up to {limit:g} s for it")
        since, _ = self.away.setdefault(i, (now, problem))
        if now - since > limit:
            raise TimeoutError(f"{self.engines[i]} has not answered for {limit:g} s ({problem}): see its log")


async def _load_resumed(config: OrchestratorConfig, engine: PrimeEngine, version: int, name: str) -> None:
    """Load the version that a resumed trainer publishes once more: it may replace the directory as we look."""
    root = config.output_dir / name
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


class Health(NamedTuple):
    """What a server tells at /health; no version: it is of another kind, or is asked for nothing but its presence."""

    version: int | None = None
    awaits_weights: bool = False


async def read_health(client: InferenceClient) -> Health:
    """The state of a server; raises what the client raises when it does not answer."""
    root = client.copy(base_url=client.root_url)
    try:
        told = msgspec.json.decode(await root.request("GET", "/health", timeout_s=5.0, max_retries=0))
    except msgspec.DecodeError:
        return Health()
    return Health(told.get("version"), bool(told.get("awaits_weights"))) if isinstance(told, dict) else Health()


async def wait_until_ready(client: InferenceClient, timeout_s: float) -> Health:
    """What a server reports once it answers; raises `TimeoutError` naming its address."""
    problem = "no answer"
    logger.info(f"Waiting for the inference server at {client.root_url}")
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                return await read_health(client)
            except Exception as error:
                problem = str(error)
            await anyio.sleep(CHECK_EVERY_S)
    raise TimeoutError(
        f"the inference server at {client.root_url} was not ready within {timeout_s:g} s ({problem}): "
        "start it, or set client.base_url"
    )
