"""Servers that leave and join during a run: requests restart on other servers, reachable servers are updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from prime_rl.orchestrator import server_monitor as module
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.server_monitor import ServerMonitor
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import prepare_engines
from prime_rl.orchestrator.weight_relay import MAX_ATTEMPTS, WeightRelay
from rollouts.training.steps import publish_step
from rollouts.training.weight_sync import EngineError, WeightSyncError


class Server:
    """Client and engine of one server in one: it is there or not, and holds a version."""

    def __init__(self, number: int) -> None:
        self.root_url = self.base_url = f"http://server{number}"
        self.there, self.version, self.awaits_weights, self.silent = True, 0, False, False
        self.loads: list[int] = []

    def __str__(self) -> str:
        return self.root_url

    def copy(self, *, base_url: str) -> Server:
        return self

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        await anyio.lowlevel.checkpoint()
        if not self.there:
            raise ConnectionError("connection refused")
        return msgspec.json.encode({"version": self.version, "awaits_weights": self.awaits_weights})

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        if self.silent:
            await anyio.sleep_forever()
        if not self.there:
            raise EngineError("unreachable", "connection refused")
        self.version, self.awaits_weights = int(Path(checkpoint_path).name.removeprefix("step_")), False
        self.loads.append(self.version)
        return {"success": True}

    async def reload_weights(self) -> dict[str, Any]:
        self.version, self.awaits_weights = 0, False
        self.loads.append(0)
        return {"success": True}

    def restart(self) -> None:
        self.there, self.version, self.awaits_weights = True, 0, True


class Fleet:
    """Servers with the orchestrator components around them."""

    def __init__(self, out: Path, number: int, needed: int | None, timeout_s: float = 30.0) -> None:
        self.servers = [Server(i) for i in range(number)]
        self.config = OrchestratorConfig(output_dir=out, inference_timeout=timeout_s, min_servers=needed)
        self.server_pool = ServerPool(number, needed)
        self.relay = WeightRelay(
            out / "weights", self.servers, version=0, on_live=lambda _: None, is_received=lambda _: True,
            timeout_s=60, log_timeline=lambda *_: None, server_pool=self.server_pool,
        )  # fmt: skip
        self.server_monitor = ServerMonitor(
            self.config, self.servers, self.servers, self.relay, server_pool=self.server_pool
        )  # type: ignore[arg-type]
        self.relay.wait_for_recovery = self.server_monitor.wait_for_recovery
        self.weights = out / "weights"

    async def publish(self, step: int) -> None:
        publish_step(self.weights, step, lambda path: None)
        await self.relay.load(step)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEALTH_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)


async def until(ready: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not ready():
            await anyio.sleep(0.005)


def test_work_of_lost_servers_is_redistributed() -> None:
    server_pool = ServerPool(10, 1)
    assert [server_pool.choose(i) for i in range(20)] == [*range(10), *range(10)]
    server_pool.unreachable[3] = server_pool.unreachable[4] = (0.0, "gone")
    chosen = [server_pool.choose(i) for i in range(1000)]
    shares = [chosen.count(i) for i in range(10)]
    assert shares[3] == shares[4] == 0 and sum(shares) == 1000
    assert max(shares) < 200, "no neighbor gets it all"
    assert server_pool.reachable == [0, 1, 2, 5, 6, 7, 8, 9]
    for i in range(10):
        server_pool.unreachable[i] = (0.0, "gone")
    assert (
        server_pool.choose(7) in range(10) and server_pool.is_below_minimum and server_pool.reachable == list(range(10))
    )


def test_a_server_that_stays_but_fails_is_tried_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, tries = Fleet(tmp_path, 1, None), 0

    async def fail(checkpoint_path: str) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        raise EngineError("rejected", "does not load")

    async def is_back(error: WeightSyncError) -> bool:
        return True

    monkeypatch.setattr(fleet.servers[0], "update_weights_from_checkpoint", fail)
    fleet.relay.wait_for_recovery = is_back
    with pytest.raises(WeightSyncError, match="does not load"):
        anyio.run(fleet.publish, 1)
    assert tries == MAX_ATTEMPTS


def test_required_servers_are_waited_for() -> None:
    server_pool = ServerPool(2)
    server_pool.unreachable[1] = (0.0, "gone")
    assert server_pool.choose(1) == 1 and server_pool.reachable == [0, 1] and server_pool.is_below_minimum
    with pytest.raises(ValueError, match=r"min_servers = 3 but client\.base_url lists 2"):
        ServerPool(2, 3)


@pytest.mark.anyio
async def test_work_restarts_on_another_server() -> None:
    server_pool, seen = ServerPool(2, 1), list[int]()

    async def work(server: int) -> str:
        seen.append(server)
        if server == 1:
            await anyio.sleep_forever()
        return "done"

    async with anyio.create_task_group() as tasks:
        results = []

        async def run() -> None:
            results.append(await server_pool.run(1, work))

        tasks.start_soon(run)
        await until(lambda: seen == [1])
        server_pool.unreachable[1] = (0.0, "gone")
        server_pool.cancel_server_work(1)
    assert seen == [1, 0] and results == ["done"]


@pytest.mark.anyio
async def test_rejoining_server_loads_current_version(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.server_monitor.run)
        await fleet.publish(1)
        assert [server.version for server in fleet.servers] == [1, 1, 1]
        fleet.servers[2].there = False
        await fleet.publish(2)  # the update itself notices
        assert [server.loads for server in fleet.servers[:2]] == [[1, 2], [1, 2]], (
            "updated servers are not updated again"
        )
        await fleet.publish(3)
        assert [server.version for server in fleet.servers] == [3, 3, 1] and fleet.relay.version == 3
        fleet.servers[2].restart()
        await until(lambda: not fleet.server_monitor.unreachable)
        assert (
            fleet.servers[2].version == 3
            and fleet.servers[2].loads == [1, 3]
            and fleet.server_monitor.num_recovered == 1
        )
        await fleet.publish(4)
        assert [server.version for server in fleet.servers] == [4, 4, 4]
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_too_few_servers_end_run(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2, timeout_s=0.3)
    fleet.servers[0].there = fleet.servers[1].there = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.publish, 1)
        await until(lambda: fleet.server_pool.is_below_minimum)
        assert fleet.relay.version == 0
        fleet.servers[1].restart()
        await until(lambda: fleet.relay.version == 1)
    assert [server.version for server in fleet.servers] == [0, 1, 1]
    fleet.servers[1].there = False
    with pytest.raises(TimeoutError, match="has not responded for"):
        await fleet.publish(2)


@pytest.mark.anyio
async def test_run_starts_with_min_servers(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2)
    late = fleet.servers[1]
    late.there = False
    for server in fleet.servers:
        server.awaits_weights = True
    servers: Any = fleet.servers
    with anyio.fail_after(10):
        await prepare_engines(fleet.config, servers, servers, 0, server_pool=fleet.server_pool)
    assert list(fleet.server_pool.unreachable) == [1] and not fleet.servers[0].awaits_weights
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.server_monitor.run)
        await fleet.publish(1)
        late.restart()
        await until(lambda: late.version == 1)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_update_skips_lost_server(tmp_path: Path) -> None:
    """A host without network does not refuse connections: its update would hang until the time limit."""
    fleet = Fleet(tmp_path, 3, 2)
    gone = fleet.servers[1]
    gone.there, gone.silent = False, True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.server_monitor.run)
        with anyio.fail_after(10):
            await fleet.publish(1)
        assert [server.version for server in fleet.servers] == [1, 0, 1] and list(fleet.server_monitor.unreachable) == [
            1
        ]
        gone.silent = False
        gone.restart()
        await until(lambda: gone.version == 1)
        tasks.cancel_scope.cancel()
