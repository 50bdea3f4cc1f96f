"""Servers that leave and join during a run: work begins again elsewhere, versions go to those that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from prime_rl.orchestrator import engines as module
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.engines import Attendance, EngineKeeper, prepare_engines
from prime_rl.orchestrator.weight_relay import WeightRelay
from rollouts.training.steps import publish_step
from rollouts.training.weight_sync import EngineError


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
            raise ConnectionError("nobody listens")
        return msgspec.json.encode({"version": self.version, "awaits_weights": self.awaits_weights})

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        if self.silent:
            await anyio.sleep_forever()
        if not self.there:
            raise EngineError("unreachable", "nobody listens")
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
    """Servers, and what the orchestrator has around them."""

    def __init__(self, out: Path, number: int, needed: int | None, timeout_s: float = 30.0) -> None:
        self.servers = [Server(i) for i in range(number)]
        self.config = OrchestratorConfig(output_dir=out, inference_timeout=timeout_s, min_servers=needed)
        self.attendance = Attendance(number, needed)
        self.relay = WeightRelay(
            out / "weights", self.servers, version=0, on_live=lambda _: None, is_received=lambda _: True,
            timeout_s=60, log_timeline=lambda *_: None, attendance=self.attendance,
        )  # fmt: skip
        self.keeper = EngineKeeper(self.config, self.servers, self.servers, self.relay, attendance=self.attendance)  # type: ignore[arg-type]
        self.relay.wait_back = self.keeper.wait_back
        self.weights = out / "weights"

    async def publish(self, step: int) -> None:
        publish_step(self.weights, step, lambda path: None)
        await self.relay.load(step)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.01)


async def until(ready: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not ready():
            await anyio.sleep(0.005)


def test_work_of_servers_that_are_away_is_spread_over_the_others() -> None:
    attendance = Attendance(10, 1)
    assert [attendance.choose(i) for i in range(20)] == [*range(10), *range(10)]
    attendance.away[3] = attendance.away[4] = (0.0, "gone")
    chosen = [attendance.choose(i) for i in range(1000)]
    shares = [chosen.count(i) for i in range(10)]
    assert shares[3] == shares[4] == 0 and sum(shares) == 1000
    assert max(shares) < 200, "no neighbour gets it all"
    assert attendance.present == [0, 1, 2, 5, 6, 7, 8, 9]
    for i in range(10):
        attendance.away[i] = (0.0, "gone")
    assert attendance.choose(7) in range(10) and attendance.is_short and attendance.present == list(range(10))


def test_where_all_are_needed_work_waits_for_its_own_server() -> None:
    attendance = Attendance(2)
    attendance.away[1] = (0.0, "gone")
    assert attendance.choose(1) == 1 and attendance.present == [0, 1] and attendance.is_short
    with pytest.raises(ValueError, match=r"min_servers = 3 but client\.base_url names 2"):
        Attendance(2, 3)


@pytest.mark.anyio
async def test_work_on_a_server_that_leaves_begins_again_on_another() -> None:
    attendance, seen = Attendance(2, 1), list[int]()

    async def work(server: int) -> str:
        seen.append(server)
        if server == 1:
            await anyio.sleep_forever()
        return "done"

    async with anyio.create_task_group() as tasks:
        results = []

        async def run() -> None:
            results.append(await attendance.run(1, work))

        tasks.start_soon(run)
        await until(lambda: seen == [1])
        attendance.away[1] = (0.0, "gone")
        attendance.let_go(1)
    assert seen == [1, 0] and results == ["done"]


@pytest.mark.anyio
async def test_a_server_leaves_and_joins_and_holds_the_version_in_use(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.keeper.run)
        await fleet.publish(1)
        assert [server.version for server in fleet.servers] == [1, 1, 1]
        fleet.servers[2].there = False
        await fleet.publish(2)  # the update itself notices
        assert [server.loads for server in fleet.servers[:2]] == [[1, 2], [1, 2]], "who holds it is not told again"
        await fleet.publish(3)
        assert [server.version for server in fleet.servers] == [3, 3, 1] and fleet.relay.version == 3
        fleet.servers[2].restart()
        await until(lambda: not fleet.keeper.away)
        assert fleet.servers[2].version == 3 and fleet.servers[2].loads == [1, 3] and fleet.keeper.num_recovered == 1
        await fleet.publish(4)
        assert [server.version for server in fleet.servers] == [4, 4, 4]
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_with_too_few_an_update_waits_and_then_the_run_ends(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2, timeout_s=0.3)
    fleet.servers[0].there = fleet.servers[1].there = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.publish, 1)
        await until(lambda: fleet.attendance.is_short)
        assert fleet.relay.version == 0
        fleet.servers[1].restart()
        await until(lambda: fleet.relay.version == 1)
    assert [server.version for server in fleet.servers] == [0, 1, 1]
    fleet.servers[1].there = False
    with pytest.raises(TimeoutError, match="has not answered for"):
        await fleet.publish(2)


@pytest.mark.anyio
async def test_the_run_begins_with_those_that_are_needed_and_others_join_later(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, 2)
    late = fleet.servers[1]
    late.there = False
    for server in fleet.servers:
        server.awaits_weights = True
    servers: Any = fleet.servers
    with anyio.fail_after(10):
        await prepare_engines(fleet.config, servers, servers, 0, attendance=fleet.attendance)
    assert list(fleet.attendance.away) == [1] and not fleet.servers[0].awaits_weights
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.keeper.run)
        await fleet.publish(1)
        late.restart()
        await until(lambda: late.version == 1)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_an_update_does_not_wait_for_an_answer_that_nobody_sends(tmp_path: Path) -> None:
    """A host without network refuses nothing: its load would hang until the limit of an update."""
    fleet = Fleet(tmp_path, 3, 2)
    gone = fleet.servers[1]
    gone.there, gone.silent = False, True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.keeper.run)
        with anyio.fail_after(10):
            await fleet.publish(1)
        assert [server.version for server in fleet.servers] == [1, 0, 1] and list(fleet.keeper.away) == [1]
        gone.silent = False
        gone.restart()
        await until(lambda: gone.version == 1)
        tasks.cancel_scope.cancel()
