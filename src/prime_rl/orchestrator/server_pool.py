"""The inference servers of one model: work, health, and the version that each serves."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
from loguru import logger

from prime_rl.orchestrator.canary_check import CanaryCheck, CanaryMismatch
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.servers import (
    POLL_INTERVAL_S,
    Health,
    build_engines,
    read_health,
    wait_until_ready,
)
from prime_rl.runtime.run_dir import RunDir
from prime_rl.transport.broadcast import is_announcement
from prime_rl.transport.file_watch import wait_for
from prime_rl.utils.client import InferenceClient
from rollouts.training.concurrency import run_concurrently
from rollouts.training.steps import is_complete, step_path
from rollouts.training.weight_sync import EngineError, PrimeEngine, WeightSyncError, sync_weights_to_engines

HEALTH_CHECK_INTERVAL_S = 1.0  # requests to a failed server detect it at once; this is only supervision
LOAD_ATTEMPTS = 3  # at the start of a run; later, the next check repeats a failed load
LOAD_RETRY_S = 5.0  # before a load is repeated
Result = TypeVar("Result")


class ServerUnavailable(Exception):
    """A server was lost while in use."""


class ServerPool:
    """The servers of one model. A server that restarts loads the live version before it serves requests:

        fails --> requests wait in the clients --> restarts, not serving --> loads the live version --> serves

    If all are required, work waits for its assigned server, so that runs are exactly repeatable. If `min_servers` of
    them are enough (an elastic pool), work moves to the reachable ones:

        lost --> its work restarts on other servers, updates skip it --> returns --> loads the live version

    The run ends when fewer than `min_servers` respond for longer than `ready_timeout_s`. Server i has `clients[i]` for
    requests and `engines[i]` for control; versions are loaded from `weights_dir` and verified by `canary`, if given.
    """

    def __init__(
        self,
        clients: Sequence[InferenceClient],
        engines: Sequence[PrimeEngine],
        version: PolicyVersion,
        weights_dir: Path,
        *,
        min_servers: int | None = None,
        ready_timeout_s: float = 600.0,
        weights_timeout_s: float = 3600.0,
        canary: CanaryCheck | None = None,
        has_resumed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.num_servers = len(engines)
        if min_servers is not None and min_servers > self.num_servers:
            raise ValueError(f"min_servers = {min_servers} but client.base_url lists {self.num_servers}: lower it")
        self.clients, self.engines, self.version, self.weights_dir = clients, engines, version, weights_dir
        self.min_servers = min_servers or self.num_servers
        self.canary = canary or CanaryCheck(None)
        self.has_resumed = has_resumed
        """Whether the trainer has resumed, too; before, versions are those of the interrupted attempt."""
        self.unreachable: dict[int, tuple[float, str]] = {}
        """Server -> time of its loss and the reason."""
        self.num_recovered = 0
        self._foreign: set[int] = set()  # servers whose weights may be of another run, whatever their version
        self._last_load: dict[int, tuple[int | None, int]] = {}  # server -> its version and the loaded one
        self._ready_timeout_s, self._weights_timeout_s = ready_timeout_s, weights_timeout_s
        self._work: list[set[anyio.CancelScope]] = [set() for _ in engines]

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues without some servers."""
        return self.min_servers < self.num_servers

    @property
    def is_below_minimum(self) -> bool:
        """Whether fewer servers are reachable than the run requires."""
        return self.num_servers - len(self.unreachable) < self.min_servers

    @property
    def decisive_loss(self) -> tuple[int, float, str]:
        """The server whose loss took the pool below the minimum, with the time and the reason."""
        losses = sorted(self.unreachable, key=lambda i: self.unreachable[i][0])
        server = losses[self.num_servers - self.min_servers]
        return server, *self.unreachable[server]

    @property
    def reachable(self) -> list[int]:
        """Servers that take part in weight updates; all if the pool is not elastic, or if none is reachable."""
        available = [i for i in range(self.num_servers) if i not in self.unreachable]
        return available if self.is_elastic and available else list(range(self.num_servers))

    def choose(self, number: int) -> int:
        """The server for work item `number`; items of a lost server are spread over the others."""
        home = number % self.num_servers
        if not self.is_elastic or home not in self.unreachable:
            return home
        step = number // self.num_servers + 1
        candidates = ((number + i * step) % self.num_servers for i in range(1, self.num_servers))
        return next((i for i in candidates if i not in self.unreachable), self.reachable[0])

    async def run(self, number: int, work: Callable[[int], Awaitable[Result]]) -> Result:
        """The result of `work(server)`, restarted on another server whenever its server is lost."""
        while True:
            server = self.choose(number)
            with contextlib.suppress(ServerUnavailable):
                return await self.run_together([server], lambda: work(server))  # noqa: B023 - called at once

    async def run_together(self, servers: Iterable[int], work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of work that uses all `servers`; raises `ServerUnavailable` as soon as one is lost."""
        servers = list(servers)
        with anyio.CancelScope() as scope:
            for server in servers:
                self._work[server].add(scope)
            try:
                return await work()
            finally:
                for server in servers:
                    self._work[server].discard(scope)
        raise ServerUnavailable

    def cancel_server_work(self, server: int) -> None:
        """Cancel the work of a lost server, whose responses will never arrive."""
        if self.is_elastic:
            for scope in list(self._work[server]):
                scope.cancel()

    async def start(self) -> None:
        """Wait until enough servers are ready, then load and verify the live version on them.

        A resumed run loads it on every server, and every run on those that come later: another run may have left
        weights of the same version number.
        """
        self._foreign = set(range(self.num_servers)) if self.version.live else set()
        health: dict[int, Health] = {}

        async def wait(i: int) -> None:
            health[i] = await wait_until_ready(self.clients[i], self._ready_timeout_s)
            if len(health) >= self.min_servers:
                raise _MinimumReached

        async def load(i: int) -> None:
            try:
                await self._check_canary(i, await self._load_live(i, health[i], LOAD_ATTEMPTS))
            except (EngineError, WeightSyncError) as error:
                if not (self.is_elastic and error.is_transient):
                    raise
                self._mark_unreachable(i, str(error))

        with contextlib.suppress(_MinimumReached):
            await run_concurrently(wait, range(self.num_servers))
        since = anyio.current_time()
        self.unreachable |= {i: (since, "not started yet") for i in range(self.num_servers) if i not in health}
        self._foreign |= self.unreachable.keys()
        await run_concurrently(load, sorted(health))
        while self.is_below_minimum:
            await anyio.sleep(HEALTH_CHECK_INTERVAL_S)
            await self.recover(await self.check_servers())

    async def monitor(self) -> None:
        """Check the servers until cancelled; raises `TimeoutError` naming a server that does not return.

        Recoveries run beside the checks, which cancel those of servers that are lost again.
        """
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(HEALTH_CHECK_INTERVAL_S)
                tasks.start_soon(self.recover, await self.check_servers())

    async def check_servers(self) -> list[int]:
        """Check every server; returns those that need the live version (`recover`)."""
        late: list[int] = []

        async def check(i: int) -> None:
            try:
                health = await read_health(self.clients[i])
            except Exception as error:
                self._mark_unreachable(i, str(error))
                return
            if i in self.unreachable or health.awaits_weights or health.version not in (None, self.version.live):
                late.append(i)

        await run_concurrently(check, range(self.num_servers))
        return late

    async def recover(self, servers: Sequence[int]) -> None:
        """Load the live version concurrently on servers that returned or restarted.

        Skipped during an update, which includes every server, and during another recovery.
        """
        if servers and not self.version.lock.locked():
            async with self.version.lock:
                await run_concurrently(self._recover, servers)

    async def wait_for_recovery(self, error: WeightSyncError) -> bool:
        """After a failed update: whether a retry may succeed.

        It may once enough servers have returned, if only lost ones failed, and after a short fault of the file system.
        """
        if not error.is_transient:
            if error.is_repeatable:
                logger.warning(f"{error}; trying again in {LOAD_RETRY_S:g} s")
                await anyio.sleep(LOAD_RETRY_S)
            return error.is_repeatable
        if not self.is_elastic:
            logger.warning(f"{error}; retrying when every server responds")
            for client in self.clients:
                await wait_until_ready(client, self._ready_timeout_s)
            return True
        for i, problem in self._find_failed(error).items():
            self._mark_unreachable(i, problem)
        while self.is_below_minimum:
            await anyio.sleep(POLL_INTERVAL_S)
            for i, (since, problem) in list(self.unreachable.items()):
                try:
                    await read_health(self.clients[i])
                except Exception:
                    self._check_timeout(i, since, problem)
                else:
                    del self.unreachable[i]  # the retried update loads the version
        return True

    def leave_out(self, error: WeightSyncError) -> bool:
        """Continue without servers that failed in every attempt, as one whose disk is gone; whether enough are left.

        Each of their next checks loads the live version, if it then can.
        """
        failed = self._find_failed(error)
        left = set(range(self.num_servers)) - self.unreachable.keys() - failed.keys()
        if not (self.is_elastic and error.is_repeatable and failed and len(left) >= self.min_servers):
            return False
        for i, problem in failed.items():
            self._mark_unreachable(i, problem)
            self.cancel_server_work(i)
        return True

    def _find_failed(self, error: WeightSyncError) -> dict[int, str]:
        """The servers of this pool that failed in an update, and why."""
        states = dict(error.states)
        problems = {i: states.get(str(engine), "ok") for i, engine in enumerate(self.engines)}
        return {i: problem for i, problem in problems.items() if problem != "ok"}

    async def _recover(self, i: int) -> None:

        async def load() -> None:
            await self._check_canary(i, await self._load_live(i, await read_health(self.clients[i])))

        try:
            await self.run_together([i], load)
        except CanaryMismatch:
            raise
        except ServerUnavailable:
            return
        except Exception as error:
            self._mark_unreachable(i, str(error))
            return
        if self.unreachable.pop(i, None) is not None:
            self.num_recovered += 1
            logger.success(f"{self.engines[i]} recovered: serves version {self.version.live}")

    async def _load_live(self, i: int, health: Health, attempts: int = 1) -> dict[str, Any]:
        """Load the live version unless the server has it or reports none; returns its answer, else its numerics.

        A server that an earlier run left paused, as after a mismatch of its canary, is resumed.
        """
        version, engine = self.version.live, self.engines[i]
        is_live = health.version == version and not health.awaits_weights and i not in self._foreign
        answer: dict[str, Any] = {"exact": health.exact, "dtype": health.dtype, "arithmetic": health.arithmetic}
        if not (health.version is None or is_live):
            if self._last_load.get(i) != (health.version, version):  # one that fails is repeated at every check
                logger.info(f"Loading version {version} on {engine} (has {health.version})")
            self._last_load[i] = (health.version, version)
            answer = await (self._load_published(engine, version, attempts) if version else engine.reload_weights())
            self._foreign.discard(i)
            self._last_load.pop(i, None)
        if health.is_paused:
            logger.warning(f"{engine} was paused, as after a log-prob mismatch in an earlier run: resuming it")
            await engine.post("/resume")
        return answer

    async def _load_published(self, engine: PrimeEngine, version: int, attempts: int) -> dict[str, Any]:
        """Load a version that a resumed trainer publishes again, so that its directory may be replaced meanwhile."""
        path = step_path(self.weights_dir, version)

        def is_loadable() -> bool:  # the interrupted attempt's announcement has the address of an exited trainer
            return is_complete(path) and (self.has_resumed() or not is_announcement(path))

        for attempts_left in reversed(range(attempts)):
            await wait_for(
                lambda: is_loadable() or None,
                self.weights_dir,
                timeout_s=self._weights_timeout_s,
                what=f"weights of step {version}",
            )
            try:
                [answer] = await sync_weights_to_engines([engine], str(path))
                return answer
            except WeightSyncError:
                if not attempts_left:
                    raise
            await anyio.sleep(LOAD_RETRY_S)
        raise AssertionError("the last attempt returns or raises")

    async def _check_canary(self, i: int, answer: dict[str, Any]) -> None:
        """Verify the live version on a restarted server, or in a resumed run."""
        await self.canary.check_restarted(step_path(self.weights_dir, self.version.live), self.engines[i], answer)

    def _mark_unreachable(self, i: int, problem: str) -> None:
        if i in self.unreachable:
            self.cancel_server_work(i)  # on the second failure: one slow response is tolerated
        else:
            limit = f"waiting up to {self._ready_timeout_s:g} s for it"
            action = "continuing without it" if self.is_elastic else limit
            logger.warning(f"{self.engines[i]} failed ({problem}): {action}")
        since, _ = self.unreachable.setdefault(i, (anyio.current_time(), problem))
        self._check_timeout(i, since, problem)

    def _check_timeout(self, i: int, since: float, problem: str) -> None:
        if not self.is_below_minimum or since < self.decisive_loss[1]:  # earlier losses left enough servers
            return
        limit = self._ready_timeout_s
        if anyio.current_time() - since > limit:
            raise TimeoutError(f"{self.engines[i]} has not recovered for {limit:g} s ({problem}): see its log")


def build_servers(
    config: OrchestratorConfig,
    clients: Sequence[InferenceClient],
    engines: Sequence[PrimeEngine],
    version: PolicyVersion,
) -> ServerPool:
    """Build the pool of the policy's servers."""
    run, start = RunDir(config.output_dir), version.live
    stopped = run.find_last_record("orchestrator") if start else 0.0  # this attempt has recorded nothing yet
    return ServerPool(
        clients,
        engines,
        version,
        config.versions_dir,
        min_servers=config.min_servers,
        ready_timeout_s=config.inference_timeout,
        weights_timeout_s=config.weights_timeout,
        canary=CanaryCheck(config.weight_check_interval),
        has_resumed=lambda: version.live > start or run.has_resumed("trainer", start, stopped),
    )


def build_ema_servers(
    config: OrchestratorConfig, clients: Sequence[InferenceClient], version: PolicyVersion
) -> ServerPool | None:
    """Build the pool of a teacher's servers that follow the EMA weights; None for other teachers."""
    teacher = config.teacher_model
    if teacher is None or teacher.weights != "ema":
        return None
    return ServerPool(
        clients,
        build_engines(teacher.client),
        version,
        RunDir(config.output_dir).average,
        ready_timeout_s=config.inference_timeout,
        weights_timeout_s=config.weights_timeout,
    )


class _MinimumReached(Exception):
    """Enough servers are ready."""
