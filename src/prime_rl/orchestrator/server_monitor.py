"""Monitors the inference servers during a run and updates those that restart."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from loguru import logger

from prime_rl.orchestrator.canary import CanaryMismatch
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import POLL_INTERVAL_S, read_health, run_concurrently, sync_server, wait_until_ready
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.utils.client import InferenceClient
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError

HEALTH_CHECK_INTERVAL_S = 1.0  # requests to a failed server detect it at once; this is only supervision


class ServerMonitor:
    """Polls the servers' health; a restarted server loads the current version before it serves requests.

        fails --> requests wait in the clients --> restarts, not serving --> loads the current version --> serves

    The run ends when fewer than `min_servers` respond for longer than `inference_timeout`.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        clients: Sequence[InferenceClient],
        engines: Sequence[PrimeEngine],
        relay: WeightRelay,
        name: str | None = None,
        server_pool: ServerPool | None = None,
    ) -> None:
        self.config, self.clients, self.engines, self.relay = config, clients, engines, relay
        self.name = name
        self.num_recovered = 0
        self.server_pool = server_pool or ServerPool(len(engines))

    @property
    def unreachable(self) -> dict[int, tuple[float, str]]:
        """Server -> time of its loss and the reason."""
        return self.server_pool.unreachable

    async def run(self) -> None:
        """Monitor until cancelled; raises `TimeoutError` naming a server that does not return."""
        while True:
            await anyio.sleep(HEALTH_CHECK_INTERVAL_S)
            await self._check_servers()

    async def wait_for_recovery(self, error: WeightSyncError) -> bool:
        """After a failed update: whether only lost servers caused it, and enough have returned for a retry."""
        if not error.is_transient:
            return False
        limit = self.config.inference_timeout
        if not self.server_pool.is_elastic:
            logger.warning(f"{error}; retrying when every server responds")
            for client in self.clients:
                await wait_until_ready(client, limit)
            return True
        names = {str(engine): i for i, engine in enumerate(self.engines)}
        for name, state in error.states:
            if state != "ok":
                self._mark_unreachable(names[name], state)
        while self.server_pool.is_below_minimum:
            await anyio.sleep(POLL_INTERVAL_S)
            for i, (since, problem) in list(self.unreachable.items()):
                try:
                    await read_health(self.clients[i])
                except Exception:
                    self._check_timeout(i, since, problem)
                else:
                    del self.unreachable[i]  # the retried update loads the version
        return True

    async def _check_servers(self) -> None:
        """Poll every server; those with another version load the current one concurrently."""
        late: list[int] = []

        async def poll(i: int) -> None:
            try:
                state = await read_health(self.clients[i])
            except Exception as error:
                self._mark_unreachable(i, str(error))
                return
            if i in self.unreachable or state.awaits_weights or state.version not in (None, self.relay.version):
                late.append(i)

        await run_concurrently(poll, range(len(self.engines)))
        # Skipped during an update, which includes every engine. Do not wait for its end either: it may wait for this
        # task to detect a lost server.
        if late and not self.relay.lock.locked():
            async with self.relay.lock:
                await run_concurrently(self._sync, late)

    async def _sync(self, i: int) -> None:
        try:
            state = await read_health(self.clients[i])
            answer = await sync_server(self.config, self.engines[i], state, self.relay.version, self.name)
            if self.name is None:  # EMA weights have no canary
                await self.relay.check_restarted({i: answer})
        except CanaryMismatch:
            raise
        except Exception as error:
            self._mark_unreachable(i, str(error))
            return
        if self.unreachable.pop(i, None) is not None:
            self.num_recovered += 1
            logger.success(f"{self.engines[i]} recovered: serves version {self.relay.version}")

    def _mark_unreachable(self, i: int, problem: str) -> None:
        now, limit = anyio.current_time(), self.config.inference_timeout
        if i in self.unreachable:
            self.server_pool.cancel_server_work(i)  # on the second failure: one slow response is tolerated
        else:
            action = "continuing without it" if self.server_pool.is_elastic else f"waiting up to {limit:g} s for it"
            logger.warning(f"{self.engines[i]} does not respond ({problem}): {action}")
        since, _ = self.unreachable.setdefault(i, (now, problem))
        self._check_timeout(i, since, problem)

    def _check_timeout(self, i: int, since: float, problem: str) -> None:
        limit = self.config.inference_timeout
        if self.server_pool.is_below_minimum and anyio.current_time() - since > limit:
            raise TimeoutError(f"{self.engines[i]} has not responded for {limit:g} s ({problem}): see its log")
