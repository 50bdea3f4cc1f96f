"""Servers that leave and join during a run: requests restart on other servers, reachable servers are updated."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from prime_rl.client.scoring import PackedScores, TokenScorer
from prime_rl.configuration.sections import ClientConfig
from prime_rl.orchestrator import server_pool as module
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import build_engines
from prime_rl.orchestrator.weight_relay import MAX_ATTEMPTS, WeightRelay
from prime_rl.transport.broadcast import BROADCAST_FILE
from rollouts.training.steps import publish_step
from rollouts.training.weight_sync import EngineError, FailureKind, WeightSyncError


class Server:
    """Client and engine of one server in one: it is there or not, and holds a version."""

    def __init__(self, number: int) -> None:
        self.root_url = self.base_url = f"http://server{number}"
        self.there, self.version, self.awaits_weights, self.silent = True, 0, False, False
        self.is_paused = self.refuses = False
        self.loads: list[int] = []
        self.refused: list[str] = []
        self.numerics: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.root_url

    def copy(self, *, base_url: str) -> Server:
        return self

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        await anyio.lowlevel.checkpoint()
        if not self.there:
            raise ConnectionError("connection refused")
        states = {"awaits_weights": self.awaits_weights, "is_paused": self.is_paused}
        return msgspec.json.encode({"version": self.version} | states | self.numerics)

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        if self.silent:
            await anyio.sleep_forever()
        if not self.there:
            raise EngineError(FailureKind.UNREACHABLE, "connection refused")
        if self.refuses:
            self.refused.append(checkpoint_path)
            raise EngineError(FailureKind.REFUSED, "no such file", 400)
        self.version, self.awaits_weights = int(Path(checkpoint_path).name.removeprefix("step_")), False
        self.loads.append(self.version)
        return {"success": True}

    async def reload_weights(self) -> dict[str, Any]:
        self.version, self.awaits_weights = 0, False
        self.loads.append(0)
        return {"success": True}

    async def post(self, path: str) -> dict[str, Any]:
        assert path == "/resume" and self.loads, "not with the weights of another run"
        self.is_paused = False
        return {}

    def restart(self) -> None:
        self.there, self.version, self.awaits_weights = True, 0, True


def make_pool(number: int, needed: int | None) -> ServerPool:
    servers: Any = [Server(i) for i in range(number)]
    return ServerPool(servers, servers, PolicyVersion(), Path("weights"), min_servers=needed)


class ScoringServer(Server):
    """Answers requests of scores, unless it hangs."""

    async def request_scores(self, body: dict[str, Any]) -> bytes:
        self.loads.append(1)
        if not self.there:
            await anyio.sleep_forever()
        return msgspec.msgpack.encode(PackedScores(array("f", [-1.0]).tobytes()))


def test_a_teacher_on_the_students_servers_leaves_lost_ones() -> None:
    servers: Any = [ScoringServer(i) for i in range(2)]
    pool = ServerPool(servers, servers, PolicyVersion(), Path("weights"), min_servers=1)
    scorer = TokenScorer(servers, "base", servers=pool)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            servers[1].there = False
            tasks.start_soon(scorer.score, [1, 2], 1)  # begins on server 1, which does not answer
            await anyio.wait_all_tasks_blocked()
            pool.unreachable[1] = (0.0, "connection refused")
            pool.cancel_server_work(1)
        for _ in range(3):
            assert (await scorer.score([1, 2], 1)).logprobs == [-1.0]
        with pytest.raises(ValueError, match="returned 1 log-probs of 2 tokens"):
            await scorer.score([1, 2, 3], 1)

    anyio.run(main)
    assert scorer.reachable == [servers[0]] and (len(servers[0].loads), len(servers[1].loads)) == (5, 1)


class Servers:
    """Servers with the orchestrator components around them."""

    def __init__(self, out: Path, number: int, needed: int | None, timeout_s: float = 30.0) -> None:
        self.servers = [Server(i) for i in range(number)]
        servers: Any = self.servers
        self.version, self.weights = PolicyVersion(), out / "weights"
        self.server_pool = ServerPool(
            servers, servers, self.version, self.weights, min_servers=needed, ready_timeout_s=timeout_s
        )
        self.relay = WeightRelay(
            self.server_pool, is_received=lambda _: True, timeout_s=60, log_timeline=lambda *_: None
        )

    async def publish(self, step: int) -> None:
        publish_step(self.weights, step, lambda path: None)
        await self.relay.load(step)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEALTH_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "LOAD_RETRY_S", 0.01)


async def until(ready: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not ready():
            await anyio.sleep(0.005)


def test_work_of_lost_servers_is_redistributed() -> None:
    server_pool = make_pool(10, 1)
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
    pool, tries = Servers(tmp_path, 1, None), 0

    async def fail(checkpoint_path: str) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        raise EngineError(FailureKind.REFUSED, "does not load")

    async def is_back(error: WeightSyncError) -> bool:
        return True

    monkeypatch.setattr(pool.servers[0], "update_weights_from_checkpoint", fail)
    monkeypatch.setattr(pool.server_pool, "wait_for_recovery", is_back)
    with pytest.raises(WeightSyncError, match="does not load"):
        anyio.run(pool.publish, 1)
    assert tries == MAX_ATTEMPTS


def test_required_servers_are_waited_for() -> None:
    server_pool = make_pool(2, None)
    server_pool.unreachable[1] = (0.0, "gone")
    assert server_pool.choose(1) == 1 and server_pool.reachable == [0, 1] and server_pool.is_below_minimum
    with pytest.raises(ValueError, match=r"min_servers = 3 but client\.base_url lists 2"):
        make_pool(2, 3)


@pytest.mark.anyio
async def test_work_restarts_on_another_server() -> None:
    server_pool, seen = make_pool(2, 1), list[int]()

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
    pool = Servers(tmp_path, 3, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.server_pool.monitor)
        await pool.publish(1)
        assert [server.version for server in pool.servers] == [1, 1, 1]
        pool.servers[2].there = False
        await pool.publish(2)  # the update itself notices
        assert [server.loads for server in pool.servers[:2]] == [[1, 2], [1, 2]], (
            "updated servers are not updated again"
        )
        await pool.publish(3)
        assert [server.version for server in pool.servers] == [3, 3, 1] and pool.version.live == 3
        pool.servers[2].restart()
        await until(lambda: not pool.server_pool.unreachable)
        assert pool.servers[2].version == 3 and pool.servers[2].loads == [1, 3] and pool.server_pool.num_recovered == 1
        await pool.publish(4)
        assert [server.version for server in pool.servers] == [4, 4, 4]
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_too_few_servers_end_run(tmp_path: Path) -> None:
    pool = Servers(tmp_path, 3, 2, timeout_s=0.3)
    pool.servers[0].there = pool.servers[1].there = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.publish, 1)
        await until(lambda: pool.server_pool.is_below_minimum)
        assert pool.version.live == 0
        pool.servers[1].restart()
        await until(lambda: pool.version.live == 1)
    assert [server.version for server in pool.servers] == [0, 1, 1]
    pool.servers[1].there = False
    with pytest.raises(TimeoutError, match="has not recovered for"):
        await pool.publish(2)


@pytest.mark.anyio
async def test_the_limit_counts_from_the_loss_of_one_too_many(tmp_path: Path) -> None:
    """The first server was lost long ago, and the run went on without it."""
    servers = Servers(tmp_path, 3, 2)
    pool, second = servers.server_pool, servers.servers[1]
    servers.servers[0].there = second.there = False
    pool.unreachable[0] = (anyio.current_time() - 1000, "connection refused")
    await pool.check_servers()
    await pool.check_servers()
    assert pool.is_below_minimum and pool.decisive_loss[0] == 1
    second.there = True
    await pool.recover(await pool.check_servers())
    assert not pool.is_below_minimum

    second.there = False
    pool.unreachable[1] = (anyio.current_time() - 31, "connection refused")
    with pytest.raises(TimeoutError, match="server1 has not recovered for 30 s"):
        await pool.check_servers()


@pytest.mark.anyio
async def test_run_starts_with_min_servers(tmp_path: Path) -> None:
    pool = Servers(tmp_path, 3, 2)
    late = pool.servers[1]
    late.there = False
    for server in pool.servers:
        server.awaits_weights = True
    with anyio.fail_after(10):
        await pool.server_pool.start()
    assert list(pool.server_pool.unreachable) == [1] and not pool.servers[0].awaits_weights
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.server_pool.monitor)
        await pool.publish(1)
        late.restart()
        await until(lambda: late.version == 1)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_late_server_loads_whatever_it_has(tmp_path: Path) -> None:
    """Another run may have left weights with the number of the version that is live by then."""
    pool = Servers(tmp_path, 3, 2)
    late = pool.servers[1]
    late.there = False
    await pool.server_pool.start()
    await pool.publish(1)
    late.there, late.version = True, 1
    for _ in range(2):
        await pool.server_pool.recover(await pool.server_pool.check_servers())
    assert late.loads == [1] and not pool.server_pool.unreachable


@pytest.mark.anyio
async def test_server_lost_in_its_first_load_may_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Servers(tmp_path, 3, 2)
    lost, absent = pool.servers[1:]
    absent.there = False
    publish_step(pool.weights, 10, lambda path: None)
    pool.version.update(live=10, released=10)
    load, failures = lost.update_weights_from_checkpoint, [FailureKind.UNREACHABLE] * 3

    async def fail_first(checkpoint_path: str) -> dict[str, Any]:
        if failures:
            raise EngineError(failures.pop(), "the connection broke")
        return await load(checkpoint_path)

    monkeypatch.setattr(lost, "update_weights_from_checkpoint", fail_first)
    await pool.server_pool.start()
    assert [server.version for server in pool.servers] == [10, 10, 0] and list(pool.server_pool.unreachable) == [2]
    failures[:] = [FailureKind.REFUSED] * 3
    with pytest.raises(WeightSyncError, match="the connection broke"):
        await pool.server_pool.start()


@pytest.mark.anyio
async def test_a_short_fault_at_the_start_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of the file system. Later, a load is tried once per check: updates of other servers wait for it."""
    monkeypatch.setattr(module, "LOAD_RETRY_S", 0.05)
    pool, tries, end = Servers(tmp_path, 1, None), 0, 0.0
    server = pool.servers[0]
    publish_step(pool.weights, 10, lambda path: None)
    pool.version.update(live=10, released=10)
    load = server.update_weights_from_checkpoint

    async def fail_first(checkpoint_path: str) -> dict[str, Any]:
        nonlocal tries, end
        tries, end = tries + 1, end or anyio.current_time() + 0.02
        if anyio.current_time() < end:
            raise EngineError(FailureKind.REFUSED, "no such file")
        return await load(checkpoint_path)

    monkeypatch.setattr(server, "update_weights_from_checkpoint", fail_first)
    await pool.server_pool.start()
    assert (server.version, tries) == (10, 2)
    server.restart()
    end = math.inf
    await pool.server_pool.recover(await pool.server_pool.check_servers())
    assert tries == 3 and list(pool.server_pool.unreachable) == [0] and not pool.version.lock.locked()


@pytest.mark.anyio
@pytest.mark.parametrize("needed", [1, 2])
async def test_a_short_fault_in_an_update_is_survived(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot read the weights answers 400 and keeps the earlier ones; other answers are final, and 400
    after some attempts, if all servers are needed."""
    pool, answers = Servers(tmp_path, 2, needed), [400, 400]
    server = pool.servers[0]
    load = server.update_weights_from_checkpoint

    async def fail_first(checkpoint_path: str) -> dict[str, Any]:
        if answers:
            raise EngineError(FailureKind.REFUSED, "cannot be read", answers.pop())
        return await load(checkpoint_path)

    monkeypatch.setattr(server, "update_weights_from_checkpoint", fail_first)
    await pool.publish(1)
    assert [server.version for server in pool.servers] == [1, 1] and not pool.server_pool.unreachable
    for status, left in [(400, 10 - MAX_ATTEMPTS)] * (needed == 2) + [(403, 9)]:
        answers[:] = [status] * 10
        with pytest.raises(WeightSyncError, match="cannot be read"):
            await pool.publish(2)
        assert len(answers) == left


@pytest.mark.anyio
async def test_canary_of_a_current_server_has_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run, and a check during an update: nothing is loaded, so only /health names the dtype."""
    pool, compared = Servers(tmp_path, 1, None), []
    numerics = {"exact": True, "dtype": "bfloat16", "arithmetic": "amx_bf16"}
    pool.servers[0].numerics = numerics

    async def record(path: Path, engine: Any, answer: dict[str, Any]) -> None:
        compared.append(answer)

    monkeypatch.setattr(pool.server_pool.canary, "check_restarted", record)
    await pool.server_pool.start()
    assert compared == [numerics] and not pool.servers[0].loads


@pytest.mark.anyio
async def test_a_resumed_run_loads_its_weights_once(tmp_path: Path) -> None:
    """Servers may have the same version of another run, those that are ready at the start and later ones."""
    pool = Servers(tmp_path, 2, 1)
    first, late = pool.servers
    late.there = False
    first.version = late.version = 10
    publish_step(pool.weights, 10, lambda path: None)
    pool.version.update(live=10, released=10)
    await pool.server_pool.start()
    assert first.loads == [10] and not late.loads
    late.there = True
    await pool.server_pool.recover(await pool.server_pool.check_servers())
    assert late.loads == [10] and not pool.server_pool.unreachable
    for _ in range(2):  # a short failure of the network: the server keeps its weights
        late.there = not late.there
        await pool.server_pool.recover(await pool.server_pool.check_servers())
    assert first.loads == late.loads == [10] and not pool.server_pool.unreachable


@pytest.mark.anyio
@pytest.mark.parametrize("live", [0, 10])
async def test_a_server_left_paused_by_another_run_is_resumed(tmp_path: Path, live: int) -> None:
    """Log-probs that do not match the trainer's end a run and leave the server paused."""
    pool = Servers(tmp_path, 2, 1)
    for server in pool.servers:
        server.version, server.is_paused = 3, True
    late = pool.servers[1]
    late.there = False
    publish_step(pool.weights, live, lambda path: None)
    pool.version.update(live=live, released=live)
    await pool.server_pool.start()
    late.there = True
    await pool.server_pool.recover(await pool.server_pool.check_servers())
    assert [(server.loads, server.is_paused) for server in pool.servers] == [([live], False)] * 2


@pytest.mark.anyio
async def test_announcements_of_an_exited_trainer_are_not_loaded(tmp_path: Path) -> None:
    """An orchestrator that starts before the trainer waits for its new address."""
    pool = Servers(tmp_path, 1, None)
    loaded_before: list[list[int]] = []

    def has_resumed() -> bool:
        loaded_before.append(list(pool.servers[0].loads))
        return len(loaded_before) > 2

    pool.server_pool.has_resumed = has_resumed
    publish_step(pool.weights, 10, lambda path: (path / BROADCAST_FILE).touch())
    pool.version.update(live=10, released=10)
    await pool.server_pool.start()
    assert loaded_before == [[]] * 3 and pool.servers[0].loads == [10]


@pytest.mark.anyio
async def test_update_skips_lost_server(tmp_path: Path) -> None:
    """A host without network does not refuse connections: its update would hang until the time limit."""
    pool = Servers(tmp_path, 3, 2)
    gone = pool.servers[1]
    gone.there, gone.silent = False, True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.server_pool.monitor)
        with anyio.fail_after(10):
            await pool.publish(1)
        assert [server.version for server in pool.servers] == [1, 0, 1] and list(pool.server_pool.unreachable) == [1]
        gone.silent = False
        gone.restart()
        await until(lambda: gone.version == 1)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_an_update_leaves_out_a_server_that_refuses_it(tmp_path: Path) -> None:
    """As one whose disk is gone, until it loads versions again; the others must be enough."""
    pool = Servers(tmp_path, 3, 2)
    bad = pool.servers[1]
    bad.refuses = True
    await pool.publish(1)
    assert [server.loads for server in pool.servers] == [[1], [], [1]] and len(bad.refused) == MAX_ATTEMPTS
    assert list(pool.server_pool.unreachable) == [1] and pool.server_pool.choose(1) != 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.server_pool.monitor)
        await until(lambda: len(bad.refused) > MAX_ATTEMPTS + 1)
        await pool.publish(2)
        bad.refuses = False
        await until(lambda: bad.version == 2 and not pool.server_pool.unreachable)
        tasks.cancel_scope.cancel()
    for server in pool.servers[:2]:
        server.refuses = True
    with pytest.raises(WeightSyncError, match="no such file"):
        await pool.publish(3)


@pytest.mark.anyio
async def test_recovery_of_a_server_lost_again_stops(tmp_path: Path) -> None:
    """Its load would hang until the time limit, and updates of all servers wait for it."""
    pool = Servers(tmp_path, 3, 2)
    await pool.publish(1)
    gone = pool.servers[1]
    gone.silent = True
    gone.restart()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.server_pool.monitor)
        await until(pool.version.lock.locked)
        gone.there = False
        with anyio.fail_after(10):
            await pool.publish(2)
        assert [server.version for server in pool.servers] == [2, 0, 2] and list(pool.server_pool.unreachable) == [1]
        gone.silent = False
        gone.restart()
        await until(lambda: gone.version == 2)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_recovery_ignores_servers_of_another_pool(tmp_path: Path) -> None:
    """The update of an EMA teacher failed: the policy's own servers are reachable."""
    pool = Servers(tmp_path, 3, 2)
    error = WeightSyncError("step_1", [("http://teacher", "unreachable: gone")], is_transient=True)
    assert await pool.server_pool.wait_for_recovery(error) and not pool.server_pool.unreachable
    lasting = WeightSyncError("step_1", [(str(pool.servers[0]), "refused: no memory")])
    assert not await pool.server_pool.wait_for_recovery(lasting)


@pytest.mark.parametrize(("given", "limit"), [({}, 1200), ({"timeout": 7200}, 7200), ({"timeout": 5}, 300)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_loading_weights_may_take_as_long_as_a_request(given: dict[str, float], limit: float, broadcast: bool) -> None:
    [engine] = build_engines(ClientConfig.model_validate(given), broadcast=broadcast)
    assert engine.timeout == limit
