"""Environments in worker processes: a failure of one costs only its own rollouts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import openai  # noqa: F401 - before its double is on the path
import pytest
import virtual_time
from fake_engine import FakeEngine, serve
from scripted_client import ScriptedClient

from prime_rl.configuration.command import run_command
from prime_rl.configuration.sections import EnvConfig, LogConfig, SamplingConfig
from prime_rl.envs import worker_pool, worker_process
from prime_rl.envs.worker import (
    CLEANUP_LEAVE_S,
    GroupRequest,
    Heartbeat,
    RowsReply,
    Worker,
    decode_finished,
    encode,
    encode_rows,
)
from prime_rl.envs.worker_pool import EnvironmentCrashLoop, EnvironmentWorkers, compute_limit, read_max_rss
from prime_rl.envs.worker_process import WorkerDied, WorkerProcess
from prime_rl.runtime import machine
from prime_rl.runtime.framing import receive_frame, send_frame
from prime_rl.utils.client import InferenceClient, ServerSpec
from prime_rl.utils.vf import build_sampling_args, load_environments, open_environments
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import Environment
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.environments.protocol import fail_rollout

DEADLINE_S = 60
LIGHT_OPENAI = Path(__file__).parents[3] / "fakes" / "light_openai"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with serve(FakeEngine(reply=lambda body: "four")) as engine:
        yield engine


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.latency_s, engine.disconnects = 0.0, 0
    engine.requests.clear()


@contextmanager
def pool(kinds: str, tmp_path: Path, has_openai: bool = False, **options: Any) -> Iterator[EnvironmentWorkers]:
    """Workers that import `openai` only if they should, and so start in a third of the time."""
    args = {"kinds": kinds, "marks": str(tmp_path), **options.pop("args", {})}
    with pytest.MonkeyPatch.context() as patch:
        if not has_openai:
            patch.syspath_prepend(str(LIGHT_OPENAI))
        config = EnvConfig(id="fault_injection:load_environment", name="e", args=args, **options)
        with open_environments([config]) as found:
            environment = found["e"]
            assert isinstance(environment, EnvironmentWorkers)
            yield environment


def run(
    environment: Environment,
    engine: FakeEngine,
    retries: int = 2,
    rows: list[int] | None = None,
    meanwhile: Callable[[], Any] | None = None,
    n: int = 2,
) -> dict[str, list[Rollout]]:
    """All rows at once; answer of the row -> its rollouts."""
    results: dict[str, list[Rollout]] = {}

    async def main() -> None:
        client = InferenceClient(engine.base_url)
        args = [build_sampling_args(SamplingConfig(), seed) for seed in range(n)]

        async def one(row: dict[str, Any]) -> None:
            results[row["answer"]] = await environment.run_group(row, client, "m", args, retries)

        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                for i, row in enumerate(environment.rows()):
                    if rows is None or i in rows:
                        tasks.start_soon(one, row)
                if meanwhile is not None:
                    await meanwhile()

    anyio.run(main)
    return results


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_rollouts_come_back_whole_and_nothing_stays_behind(tmp_path: Path, engine: FakeEngine) -> None:
    with pool("fine also-fine", tmp_path, has_openai=True, num_workers=2) as environment:
        assert [row["answer"] for row in environment.rows("eval")] == ["fine", "also-fine"]
        found = run(environment, engine)
        workers = environment.pids
        assert len(workers) == 2 and all(map(alive, workers)) and environment.scores_groups
    assert not any(map(alive, workers))
    for rollouts in found.values():
        assert [r.reward for r in rollouts] == [4.0, 4.0] and all(r.error is None for r in rollouts)
        [sample] = rollout_to_samples(rollouts[0])
        assert sample.tokens[-4:] == [ord(c) for c in "four"] and sample.versions


def test_a_crashing_group_fails_and_its_neighbors_do_not(tmp_path: Path, engine: FakeEngine) -> None:
    """The killer is known by the pulse, so that the others are not charged, however often they start again."""
    engine.latency_s = 0.05
    with pool("kill fine a b c", tmp_path) as environment:
        found = run(environment, engine, retries=1)
        assert environment.losses == 2
    assert {kind for kind, rollouts in found.items() if any(r.failed for r in rollouts)} == {"kill"}
    assert {(r.error_type, r.reward) for r in found["kill"]} == {("WorkerDied", 0.0)}
    assert "signal SIGKILL" in str(found["kill"][0].error)


def test_a_lost_rollout_may_have_a_textual_example_id() -> None:
    rollout = fail_rollout({"prompt": "p", "example_id": "gsm8k-17"}, {}, "WorkerDied", "gone")
    assert rollout.failed and rollout.example_id == 0


def test_rows_of_array_libraries_are_plain() -> None:
    numpy = pytest.importorskip("numpy")
    rows = [{"prompt": "p", "answer": numpy.int64(3), "info": {"values": numpy.arange(2)}}]
    reply = msgspec.msgpack.decode(encode_rows(rows), type=RowsReply)
    assert reply.rows == [{"prompt": "p", "answer": 3, "info": {"values": [0, 1]}}]


def test_rows_have_sets_in_the_same_order() -> None:
    for answer in ({0, 8}, {8, 0}):
        row = {"prompt": "p", "info": [{"b": answer, "a": frozenset({"x"})}]}
        reply = msgspec.msgpack.decode(encode_rows([row]), type=RowsReply)
        assert reply.rows == [{"prompt": "p", "info": [{"b": [0, 8], "a": ["x"]}]}]
        assert list(reply.rows[0]["info"][0]) == ["b", "a"], "the order of keys stays"
    reply = msgspec.msgpack.decode(encode_rows([{"answer": {9, 10}}]), type=RowsReply)
    assert reply.rows == [{"answer": list({9, 10})}], "numbers as in earlier versions"


@pytest.mark.parametrize("value", [2**70, object()])
def test_rows_that_cannot_be_sent_name_row_and_key(value: Any) -> None:
    with pytest.raises(ValueError, match=r"row 1, key 'answer': .*; use text, numbers of 64 bits, lists and dicts"):
        encode_rows([{"prompt": "p", "answer": 1}, {"prompt": "p", "answer": value}])


FAULTY = """
from rollouts.training.agent_integration import Rollout
class Faulty:
    id, calls = "faulty", 0
    def rows(self, split="train"):
        return [{"prompt": answer, "answer": answer} for answer in ("raise", "surrogate", "type", "fine")]
    async def run_group(self, row, client, model, sampling_args, retries=0):
        if row["answer"] == "raise":
            self.calls += 1
            raise KeyError(f"call {self.calls}")
        text = chr(0xD83D) + "!" if row["answer"] == "surrogate" else "four"
        metrics = {"won": "yes" if row["answer"] == "type" else 1.0}
        return [Rollout(prompt="p", completion=text, feedback=text, reward=4.0, metrics=metrics) for _ in sampling_args]
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_group_that_raises_fails_and_the_run_goes_on(tmp_path: Path, engine: FakeEngine, num_workers: int) -> None:
    (tmp_path / f"faulty{num_workers}.py").write_text(FAULTY + "def load_environment(): return Faulty()\n")
    with open_environments([EnvConfig(id=f"{tmp_path}/faulty{num_workers}.py", num_workers=num_workers)]) as found:
        [environment] = found.values()
        results = run(environment, engine, retries=1)
    for rollout in results["raise"]:
        assert rollout.failed and rollout.error_type == "KeyError"
        assert str(rollout.error).startswith("KeyError: 'call 2' (") and f"faulty{num_workers}.py:10)" in rollout.error
    assert [(r.completion, r.feedback, r.reward) for r in results["surrogate"]] == [("?!", "?!", 4.0)] * 2
    [(error_type, error)] = {(r.error_type, str(r.error)) for r in results["type"] if r.failed}
    assert error_type == "ValidationError" and "Expected `float`, got `str` - at `$.rollouts[0].metrics[...]`" in error
    assert [(r.completion, r.failed) for r in results["fine"]] == [("four", False)] * 2


def test_a_worker_that_somebody_kills_costs_nothing(tmp_path: Path, engine: FakeEngine) -> None:
    engine.latency_s = 0.5
    with pool("a b c d", tmp_path, num_workers=2) as environment:

        async def kill() -> None:
            await anyio.sleep(0.2)
            os.kill(environment.pids[0], signal.SIGKILL)

        found = run(environment, engine, meanwhile=kill)
        assert environment.losses == 1 and len(found) == 4
        assert not any(r.failed for rollouts in found.values() for r in rollouts)


def test_hanging_and_sleeping_code_is_killed(tmp_path: Path, engine: FakeEngine) -> None:
    with pool("hang sleep fine once-hang", tmp_path, num_workers=2, stall_timeout=1.5, timeout=1) as environment:
        found = run(environment, engine, retries=1)
    assert {r.error_type for r in found["hang"]} == {"WorkerStalled"}
    assert {r.error_type for r in found["sleep"]} == {"RolloutTimeout"}
    assert not any(r.failed for kind in ("fine", "once-hang") for r in found[kind])


def test_the_limit_of_a_group_has_time_for_every_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.0)

    async def respond(messages: Any, row: Any, state: Any) -> None:
        await anyio.sleep(9.0)

    async def judge(completion: str) -> float:
        await anyio.sleep(9.0)
        raise ConnectionError("overloaded")

    async def measure() -> float:
        started = anyio.current_time()
        [rollout] = await environment.run_group(environment.rows()[0], client, "m", [{}], retries=2)
        assert rollout.error_type == "RewardError"
        return anyio.current_time() - started

    client = ScriptedClient(lambda messages: "four")
    environment = PlainEnvironment([{"prompt": "p"}], judge, respond=respond)
    environment.timeout_s = 10.0
    assert virtual_time.run(measure) == 3 * (9 + 9) <= compute_limit(10.0, retries=2)


def test_programs_may_wait_long_for_their_start(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the worker knows when they run; the limit of the pool is 0.1 s here."""
    monkeypatch.setattr(worker_pool, "GRACE_S", -2 * 60 + 0.1)
    (tmp_path / "waiting.py").write_text(
        "def load_environment(): return {'dataset': [{'prompt': 'p', 'answer': 'a'}]}\n"
    )
    config = EnvConfig(id=f"{tmp_path}/waiting.py", command=["sleep", "0.3"], timeout=60)
    with open_environments([config]) as found:
        [environment] = found.values()
        assert isinstance(environment, EnvironmentWorkers)
        [rollouts] = run(environment, engine, retries=0).values()
        assert {r.error_type for r in rollouts} == {"ProgramFailed"} and environment.losses == 0


def test_a_raising_reward_is_data(tmp_path: Path, engine: FakeEngine) -> None:
    with pool("raise fine", tmp_path) as environment:
        found = run(environment, engine, retries=0)
        assert environment.losses == 0
    [(error_type, error)] = {(r.error_type, r.error) for r in found["raise"]}
    assert error_type == "RewardError" and re.fullmatch(r"reward: KeyError: 'oops' \(\S+\.py:\d+\)", error)
    assert not any(r.failed for r in found["fine"])


def test_a_leaking_worker_finishes_its_groups_and_is_replaced(tmp_path: Path, engine: FakeEngine) -> None:
    engine.latency_s = 0.3
    with pool("leak a b c pid", tmp_path, max_memory_gb=0.12, args={"leak_mb": 100}) as environment:
        [before] = environment.pids
        assert not any(r.failed for rollouts in run(environment, engine, n=1).values() for r in rollouts)

        async def replaced() -> None:
            while environment.pids == [before]:
                await anyio.sleep(0.05)

        [after] = run(environment, engine, n=1, rows=[4], meanwhile=replaced)["pid"]
        [last] = run(environment, engine, n=1, rows=[4])["pid"]
        assert environment.losses == 1 and last.reward == environment.pids[-1] != before
        assert not after.failed
    assert not alive(before)


def test_memory_limit_is_a_share_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    assert read_max_rss(None) == 250_000 and read_max_rss(0.5) == 2**29


def test_a_draining_worker_that_is_lost_is_replaced_once(tmp_path: Path, engine: FakeEngine) -> None:
    engine.latency_s = 0.3
    with pool("a b", tmp_path) as environment:
        [worker] = environment._workers

        async def drain_and_kill() -> None:
            while not worker.pending:
                await anyio.sleep(0.01)
            environment._drain(worker, worker.rss)
            worker.process.kill()

        found = run(environment, engine, meanwhile=drain_and_kill)
        assert len(environment.pids) == 1 and environment.losses == 1
        assert not any(r.failed for rollouts in found.values() for r in rollouts)


def test_an_environment_that_always_crashes_stops_the_run(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_LOSSES_IN_ROW", 3)
    with pool("kill", tmp_path) as environment:
        with pytest.raises(BaseExceptionGroup) as error:
            run(environment, engine, retries=9)
        assert error.group_contains(EnvironmentCrashLoop, match="3 workers in a row ended without finishing a group")


@pytest.mark.parametrize("num_failures", [1, 99])
def test_a_worker_that_cannot_start_is_started_again(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_LOSSES_IN_ROW", 3)
    failures = [BlockingIOError(11, "Resource temporarily unavailable")] * num_failures
    with pool("once-kill", tmp_path) as environment:
        start = environment._start

        def fail_first() -> WorkerProcess:
            if failures:
                raise failures.pop()
            return start()

        monkeypatch.setattr(environment, "_start", fail_first)
        if num_failures == 1:
            [[rollout]] = run(environment, engine, n=1).values()
            assert rollout.reward == 1.0
            return
        with pytest.raises(BaseExceptionGroup) as error:
            run(environment, engine)
        assert error.group_contains(EnvironmentCrashLoop, match="a new worker did not start: .* unavailable")


def test_workers_go_on_while_a_lost_one_cannot_start(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_LOSSES_IN_ROW", 2)
    monkeypatch.setattr(worker_pool, "LONGEST_PAUSE_S", 0.001)
    starts = list[Any]()

    def fail(*args: Any, **options: Any) -> Any:
        starts.append(args)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def wait() -> None:
        while len(starts) < 20:
            await anyio.sleep(0.001)

    with pool("once-kill fine", tmp_path, num_workers=2) as environment:
        monkeypatch.setattr(worker_process.subprocess, "Popen", fail)
        opened = len(os.listdir("/proc/self/fd"))
        [[rollout], _] = run(environment, engine, n=1, meanwhile=wait).values()
        assert rollout.reward is not None and environment.losses == 1
        assert len(os.listdir("/proc/self/fd")) < opened + 20, "without the pipes of workers that did not start"


def test_cancelling_a_group_reaches_the_engine(tmp_path: Path) -> None:
    requested, gone = [], []

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.append(await reader.readuntil(b"\r\n\r\n"))
        while await reader.read(65536):
            pass
        gone.append(1)
        writer.close()

    async def main(environment: EnvironmentWorkers) -> None:
        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        client = InferenceClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        args = [build_sampling_args(SamplingConfig())] * 3
        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(environment.run_group, environment.rows()[0], client, "m", args)
                while not requested:
                    await anyio.sleep(0.01)
                assert not gone
                tasks.cancel_scope.cancel()
            while not gone:
                await anyio.sleep(0.01)
        assert len(requested) == len(gone) == 1, "a group is one request"
        server.close()

    with pool("fine", tmp_path) as environment:
        anyio.run(main, environment)
        assert environment._workers[0].pending == {} and environment.losses == 0


def test_load_errors_keep_their_message(tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text("import os\ndef bad(): raise OSError('no data')\ndef exit(): os._exit(3)\n")
    path = str(tmp_path / "sick.py")
    with pytest.raises(ValueError, match="did not load: OSError: no data"):
        load_environments([EnvConfig(id=f"{path}:bad")])
    with pytest.raises(WorkerDied, match=r"ended while it loaded the environment \(exit code 3\)"):
        load_environments([EnvConfig(id=f"{path}:exit")])


def test_killed_workers_end_a_command_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2 is for wrong input alone: a launcher does not start such a process again."""
    (tmp_path / "killed.py").write_text("import os\ndef load_environment(): os.kill(os.getpid(), 9)\n")
    config = EnvConfig(id=f"{tmp_path}/killed.py")
    monkeypatch.setattr("sys.argv", ["work"])
    with pytest.raises(SystemExit) as end:
        run_command("work", LogConfig, lambda _: len(load_environments([config])), summary="")
    assert end.value.code == 1
    assert "ended while it loaded the environment (signal SIGKILL)" in capsys.readouterr().err


def test_an_environment_that_loads_for_too_long_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef load_environment(): time.sleep(60)\n")
    monkeypatch.setattr(worker_process, "LOAD_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"did not load within 0\.2 s"):
        load_environments([EnvConfig(id=f"{tmp_path}/slow.py")])


def test_a_worker_that_somebody_kills_while_it_loads_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come from outside, so loading is retried, also for the rows; the last one is reported."""
    kills = 1

    def sick(worker: Any) -> None:
        nonlocal kills
        kills -= 1
        if kills >= 0:
            os.kill(worker.process.pid, signal.SIGKILL)
        loaded(worker)

    loaded = WorkerProcess.wait_loaded
    monkeypatch.setattr(WorkerProcess, "wait_loaded", sick)
    monkeypatch.setattr(worker_pool, "MAX_LOADS", 2)
    with pool("a", tmp_path) as environment:
        assert environment.losses == 1
        os.kill(environment.pids[0], signal.SIGKILL)
        assert [row["answer"] for row in environment.rows()] == ["a"] and environment.losses == 2
    kills = 2
    with pytest.raises(WorkerDied, match=r"ended while it loaded .*SIGKILL"):
        load_environments([EnvConfig(id="fault_injection:load_environment", args={"kinds": "a"})])


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """No worker outlives a killed parent, even if one hangs."""
    import subprocess
    import sys

    code = (
        "from prime_rl.utils.vf import load_environments\nfrom prime_rl.configuration.sections import EnvConfig\n"
        "c = EnvConfig(id='fault_injection:load_environment', args={'kinds': 'a'}, num_workers=2)\n"
        "e = load_environments([c])\n"
        "print(*[w.process.pid for v in e.values() for w in v._workers], flush=True)\ninput()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert parent.stdout is not None and parent.stdin is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    os.kill(workers[0], signal.SIGSTOP)  # cannot see any connection close
    parent.kill()
    parent.wait(20)
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + DEADLINE_S
    while any(map(alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(workers) == 2


def test_a_replaced_worker_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    with pool("a", tmp_path) as environment:
        [worker] = environment._workers
        worker.leave_s = 0.1
        os.kill(worker.process.pid, signal.SIGSTOP)
        environment._leaving.append(worker)
        anyio.run(environment._reap, worker)
        assert not alive(worker.process.pid) and not environment._leaving


@pytest.mark.parametrize("has_cleanup", [False, True])
def test_a_leaving_worker_waits_for_cleanup(tmp_path: Path, has_cleanup: bool) -> None:
    events: list[str] = []

    class Holding:
        async def run_group(self, *arguments: Any) -> None:
            events.append("started")
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(5)
                events.append("freed")

    async def measure() -> float:
        (tmp_path / "beats").write_bytes(bytes(16))
        (work, workers_work), (control, workers_control) = socket.socketpair(), socket.socketpair()
        with workers_work, workers_control, (tmp_path / "beats").open("r+b") as file:
            worker = Worker(environment, Heartbeat(file.fileno()))
            send_frame(work, encode(GroupRequest(1, {}, ServerSpec("http://127.0.0.1:9/v1"), "m", [{}], 0)))
            serving = asyncio.create_task(worker.serve(workers_work, workers_control))
            while not events:
                await asyncio.sleep(0.1)
            work.close()
            control.close()
            started = anyio.current_time()
            await serving
            return anyio.current_time() - started

    environment: Any = Holding()
    environment.has_cleanup = has_cleanup
    assert virtual_time.run(measure) == pytest.approx(5.0 if has_cleanup else 2.0, abs=0.5)
    assert events == (["started", "freed"] if has_cleanup else ["started"])


def test_a_group_that_a_library_cancels_gets_an_answer(tmp_path: Path) -> None:
    class Leaking:
        async def run_group(self, *arguments: Any) -> None:
            current = asyncio.current_task()
            assert current is not None
            current.cancel("Cancelled by cancel scope")  # as a scope of anyio that another task has left
            await asyncio.sleep(10)

    async def main() -> Any:
        (tmp_path / "beats").write_bytes(bytes(16))
        (work, workers_work), (control, workers_control) = socket.socketpair(), socket.socketpair()
        with work, workers_work, control, workers_control, (tmp_path / "beats").open("r+b") as file:
            worker = Worker(Leaking(), Heartbeat(file.fileno()))
            work.settimeout(10)
            send_frame(work, encode(GroupRequest(7, {}, ServerSpec("http://127.0.0.1:9/v1"), "m", [{}], 0)))
            serving = asyncio.create_task(worker.serve(workers_work, workers_control))
            answer = decode_finished(await asyncio.to_thread(receive_frame, work))
            work.close()
            await serving
            return answer

    answer = asyncio.run(main())
    assert answer.number == 7
    assert answer.error is not None and answer.error[0] == "CancelledError"


def test_workers_with_cleanup_have_longer_to_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frees.py").write_text(FAULTY + "    has_cleanup = True\ndef load_environment(): return Faulty()\n")
    limits: list[float | None] = []
    with open_environments([EnvConfig(id=f"{tmp_path}/frees.py")]) as found:
        [environment] = found.values()
        assert isinstance(environment, EnvironmentWorkers)
        [worker] = environment._workers
        wait = worker.process.wait
        monkeypatch.setattr(worker.process, "wait", lambda timeout=None: limits.append(timeout) or wait(timeout))
    assert limits[0] == pytest.approx(CLEANUP_LEAVE_S, abs=1.0) and worker.process.returncode == 0


PLAYS_A_TASKSET = """
import sys
from pathlib import Path
from prime_rl.envs import tasksets
def load_environment(runner):
    tasksets.SCRIPT = Path(runner)
    return tasksets.load_environment({"id": "counting"}, sys.executable)
"""
STOPS_SANDBOXES = """
import json, sys, time
from pathlib import Path
print(json.dumps({"rows": [{"prompt": "a", "task_number": 0}], "eval_rows": []}), flush=True)
sys.stdin.read()
time.sleep(0.5)
Path(sys.argv[0]).with_name("stopped").touch()
"""


def test_a_taskset_has_time_to_stop_its_sandboxes(tmp_path: Path) -> None:
    (tmp_path / "plays.py").write_text(PLAYS_A_TASKSET)
    (tmp_path / "runner.py").write_text(STOPS_SANDBOXES)
    with open_environments([EnvConfig(id=f"{tmp_path}/plays.py", args={"runner": f"{tmp_path}/runner.py"})]) as found:
        assert found and not (tmp_path / "stopped").exists()
    assert (tmp_path / "stopped").exists()


def test_workers_import_from_where_their_parent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry of the path would be the worker's own directory."""
    found: list[str] = []

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> None:
        found.extend(env["PYTHONPATH"].split(os.pathsep))
        raise InterruptedError

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("sys.path", ["", "/somewhere", "/elsewhere"])
    with pytest.raises(InterruptedError):
        EnvironmentWorkers(EnvConfig(id="accidents:load_environment"))
    assert found == ["/somewhere", "/elsewhere"]


STARTS_A_PROGRAM = """
import subprocess, sys
from rollouts.training.agent_integration import Rollout
class Starts:
    id = "starts"
    def rows(self, split="train"):
        return [{"prompt": "p", "answer": "a"}]
    async def run_group(self, row, client, model, sampling_args, retries=0):
        done = subprocess.run([sys.executable, "-S", "-c", CODE], capture_output=True, text=True)
        return [Rollout(prompt="p", completion=done.stdout)]
def load_environment(): return Starts()
CODE = "import os, signal; print(os.environ.get('PYTHONPATH'), signal.getsignal(2) is signal.default_int_handler)"
"""


@pytest.mark.parametrize("path", [None, "/of/the/user"])
def test_programs_of_a_worker_start_as_outside_of_it(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    """The worker's import path would override that of another virtual environment, and an ignored SIGINT stay so."""
    monkeypatch.delenv("PYTHONPATH")
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "starts.py").write_text(STARTS_A_PROGRAM)
    with open_environments([EnvConfig(id=f"{tmp_path}/starts.py")]) as found:
        [[rollout]] = run(*found.values(), engine, n=1).values()
    assert rollout.completion == f"{path} True\n"


def test_a_run_that_ends_waits_for_no_replacement(tmp_path: Path, engine: FakeEngine) -> None:
    """The pool serves several event loops in sequence, also after unfinished work."""
    with pool("once-kill", tmp_path) as environment:

        async def begin() -> None:
            args = [build_sampling_args(SamplingConfig())]
            client = InferenceClient(engine.base_url)
            with anyio.fail_after(DEADLINE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(environment.run_group, environment.rows()[0], client, "m", args, 2)
                    while not environment.losses:
                        await anyio.sleep(0.01)
                    await anyio.sleep(0.05)  # the next worker is being loaded
                    tasks.cancel_scope.cancel()

        anyio.run(begin)
        [[rollout]] = run(environment, engine, n=1).values()
        assert rollout.reward == 1.0


def test_a_worker_gets_no_group_before_somebody_listens_to_it(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded and listened to are two moments: the first is seen by a thread."""
    with pool("once-kill fine", tmp_path) as environment:
        original = WorkerProcess.wait_loaded

        def slowly(worker: Any) -> None:
            original(worker)
            time.sleep(0.3)

        monkeypatch.setattr(WorkerProcess, "wait_loaded", slowly)

        async def main() -> None:
            args, rows = [build_sampling_args(SamplingConfig())], environment.rows()
            client = InferenceClient(engine.base_url)
            with anyio.fail_after(DEADLINE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(environment.run_group, rows[0], client, "m", args, 2)
                    while not (environment.losses and environment._workers and environment._workers[0].ready):
                        await anyio.sleep(0.005)
                    assert environment._workers[0].channel is None
                    [rollout] = await environment.run_group(rows[1], client, "m", args, 2)
                    assert not rollout.failed

        anyio.run(main)
