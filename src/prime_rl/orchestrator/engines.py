"""The inference servers: reachable, at the right version before the first request, and again after a fall."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import msgspec
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.transport.broadcast import read_broadcast
from prime_rl.transport.watch import wait_for
from prime_rl.utils.client import InferenceClient
from rollouts.training.steps import is_complete, parse_step, step_path
from rollouts.training.weight_sync import EngineError, PrimeEngine, WeightSyncError, sync_weights_to_engines

if TYPE_CHECKING:
    from prime_rl.orchestrator.weight_relay import WeightRelay
    from prime_rl.utils.config import ClientConfig

Result = TypeVar("Result")
CHECK_EVERY_S = 0.05
WATCH_EVERY_S = 1.0  # supervision alone: requests to a server that falls notice it at once
ABSENCE = ("unreachable: ", "answered 503")


def build_engines(config: ClientConfig, *, broadcast: bool = False) -> list[PrimeEngine]:
    """The control side of every server of the client; to `broadcast`, servers receive weights from the trainer."""
    headers = dict(config.headers)
    if key := os.environ.get(config.api_key_var):
        headers.setdefault("authorization", f"Bearer {key}")
    if not broadcast:
        return [PrimeEngine(url, headers=headers) for url in config.base_url]
    number = len(config.base_url)
    return [
        BroadcastEngine(url, headers=headers, server_rank=rank, num_servers=number)
        for rank, url in enumerate(config.base_url)
    ]


@dataclass(frozen=True)
class BroadcastEngine(PrimeEngine):
    """A server that receives announced versions from the trainer, and reads the files of others."""

    server_rank: int = field(default=0, kw_only=True)
    num_servers: int = field(default=1, kw_only=True)

    async def load_version(self, path: Path) -> dict[str, Any]:
        """The answer of the server to a version; where the trainer has gone, to a directory of it if there is one."""
        broadcast = read_broadcast(path)
        rank = {"server_rank": self.server_rank, "num_inference_server": self.num_servers}
        try:
            address = {name: getattr(broadcast, name) for name in ("type", "host", "port", "timeout")}
            await self.load("/init_broadcaster", {**address, **rank})
            return await self.load("/update_weights", {"weight_dir": None, "step": parse_step(path.name)})
        except EngineError as error:
            kept = path.parent.with_name("weights") / path.name
            if "answered 503" not in error.message or not is_complete(kept):
                raise
            logger.warning(f"{self}: {error.message}; reading {kept} instead")
            return await super().load_version(kept)


class Attendance:
    """Which servers are there. Where not all are `needed`, work goes to those that are:

        leaves --> its work begins again elsewhere, versions go to others --> comes back --> loads the version in use

    When all are needed, work waits for its own server, so that a run repeats exactly.
    """

    def __init__(self, number: int, needed: int | None = None) -> None:
        if needed is not None and needed > number:
            raise ValueError(f"min_servers = {needed} but client.base_url names {number}: lower it")
        self.number, self.needed = number, needed or number
        self.away: dict[int, tuple[float, str]] = {}
        """Server -> since when it is away, and why."""
        self._work: list[set[anyio.CancelScope]] = [set() for _ in range(number)]

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without some."""
        return self.needed < self.number

    @property
    def is_short(self) -> bool:
        """Whether fewer are there than the run needs."""
        return self.number - len(self.away) < self.needed

    @property
    def present(self) -> list[int]:
        """Servers to be told of a new version; all of them where none may be missing, or all are."""
        there = [i for i in range(self.number) if i not in self.away]
        return there if self.is_elastic and there else list(range(self.number))

    def choose(self, number: int) -> int:
        """The server of piece of work `number`; those of one that is away are spread over the others."""
        first = number % self.number
        if not self.is_elastic or first not in self.away:
            return first
        step = number // self.number + 1
        tries = ((number + i * step) % self.number for i in range(1, self.number))
        return next((i for i in tries if i not in self.away), self.present[0])

    async def run(self, number: int, work: Callable[[int], Awaitable[Result]]) -> Result:
        """The result of `work(server)`, begun again with another one whenever its server leaves."""
        while True:
            server = self.choose(number)
            with anyio.CancelScope() as scope:
                self._work[server].add(scope)
                try:
                    return await work(server)
                finally:
                    self._work[server].discard(scope)

    async def run_together(self, servers: Iterable[int], work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of work that takes all these servers; raises `ServerLeft` as soon as one of them leaves."""
        servers = list(servers)
        with anyio.CancelScope() as scope:
            for server in servers:
                self._work[server].add(scope)
            try:
                return await work()
            finally:
                for server in servers:
                    self._work[server].discard(scope)
        raise ServerLeft

    def let_go(self, server: int) -> None:
        """End what a server that left was working on: it would wait for an answer that nobody sends."""
        if self.is_elastic:
            for scope in list(self._work[server]):
                scope.cancel()


class ServerLeft(Exception):
    """A server left while it was needed for something."""


async def prepare_engines(
    config: OrchestratorConfig,
    clients: Sequence[InferenceClient],
    engines: Sequence[PrimeEngine],
    version: int,
    name: str | None = None,
    attendance: Attendance | None = None,
) -> None:
    """Wait until the servers are ready, or as many as needed, and bring these to `version` of `name`
    (unset: the trainer's versions)."""
    attendance = attendance or Attendance(len(engines))
    states: dict[int, Health] = {}

    async def wait(i: int) -> None:
        states[i] = await wait_until_ready(clients[i], config.inference_timeout)
        if len(states) >= attendance.needed:
            raise _EnoughReady

    with contextlib.suppress(_EnoughReady):
        await _at_once(wait, range(len(engines)))
    since = anyio.current_time()
    attendance.away.update({i: (since, "not started yet") for i in range(len(engines)) if i not in states})
    await _at_once(lambda i: bring_to(config, engines[i], states[i], version, name), sorted(states))


class _EnoughReady(Exception):
    """The others need not be waited for."""


async def _at_once(work: Callable[[int], Awaitable[None]], numbers: Iterable[int]) -> None:
    """All at the same time; the first failure ends the others and is raised as it is."""
    failures: list[Exception] = []

    async def run(number: int) -> None:
        try:
            await work(number)
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(run, number)
    if failures:
        raise failures[0]


async def bring_to(
    config: OrchestratorConfig, engine: PrimeEngine, state: Health, version: int, name: str | None = None
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

    When fewer than needed answer for longer than `inference_timeout`, the run ends.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        clients: Sequence[InferenceClient],
        engines: Sequence[PrimeEngine],
        relay: WeightRelay,
        name: str | None = None,
        attendance: Attendance | None = None,
    ) -> None:
        self.config, self.clients, self.engines, self.relay = config, clients, engines, relay
        self.name = name
        self.num_recovered = 0
        self.attendance = attendance or Attendance(len(engines))

    @property
    def away(self) -> dict[int, tuple[float, str]]:
        """Server -> since when it is away, and why."""
        return self.attendance.away

    async def run(self) -> None:
        """Watch until cancelled; raises `TimeoutError` naming a server that does not come back."""
        while True:
            await anyio.sleep(WATCH_EVERY_S)
            await self._look()

    async def wait_back(self, error: WeightSyncError) -> bool:
        """After a failed update: whether the failure was the absence of servers, which are back or not needed."""
        if not all(state == "ok" or any(sign in state for sign in ABSENCE) for _, state in error.states):
            return False
        limit = self.config.inference_timeout
        if not self.attendance.is_elastic:
            logger.warning(f"{error}; trying again when every server answers")
            for client in self.clients:
                await wait_until_ready(client, limit)
            return True
        names = {str(engine): i for i, engine in enumerate(self.engines)}
        for name, state in error.states:
            if state != "ok":
                self._note_absence(names[name], state)
        while self.attendance.is_short:
            await anyio.sleep(CHECK_EVERY_S)
            for i, (since, problem) in list(self.away.items()):
                try:
                    await read_health(self.clients[i])
                except Exception:
                    self._check_patience(i, since, problem)
                else:
                    del self.away[i]  # the update that is tried again brings it to the version
        return True

    async def _look(self) -> None:
        """Ask every server how it is; those that hold another version load ours together."""
        late: list[int] = []

        async def ask(i: int) -> None:
            try:
                state = await read_health(self.clients[i])
            except Exception as error:
                self._note_absence(i, str(error))
                return
            if i in self.away or state.awaits_weights or state.version not in (None, self.relay.version):
                late.append(i)

        await _at_once(ask, range(len(self.engines)))
        # Not in the middle of an update, of which each engine has its own part; nor waiting for its end, which may
        # wait for us to see that a server has left.
        if late and not self.relay.lock.locked():
            async with self.relay.lock:
                await _at_once(self._bring, late)

    async def _bring(self, i: int) -> None:
        try:
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
        if i in self.away:
            self.attendance.let_go(i)  # the second time: one slow answer costs nothing
        else:
            how = "going on without it" if self.attendance.is_elastic else f"waiting up to {limit:g} s for it"
            logger.warning(f"{self.engines[i]} does not answer ({problem}): {how}")
        since, _ = self.away.setdefault(i, (now, problem))
        self._check_patience(i, since, problem)

    def _check_patience(self, i: int, since: float, problem: str) -> None:
        limit = self.config.inference_timeout
        if self.attendance.is_short and anyio.current_time() - since > limit:
            raise TimeoutError(f"{self.engines[i]} has not answered for {limit:g} s ({problem}): see its log")


async def _load_resumed(config: OrchestratorConfig, engine: PrimeEngine, version: int, name: str | None) -> None:
    """Load the version that a resumed trainer publishes once more: it may replace the directory as we look."""
    root = config.versions_dir if name is None else config.output_dir / name
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
