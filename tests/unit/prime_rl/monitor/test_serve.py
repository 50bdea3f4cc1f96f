"""Live page: run state and server routes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_runs import index_of, write_context_search, write_evaluation, write_page_run

from prime_rl.monitor.local_runs import LocalRun, open_run
from prime_rl.monitor.rollout_index import Query
from prime_rl.monitor.serve import LiveRun, _events, build_app, read_query
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.run_state import StateRecorder, _start_ticks
from rollouts.training.metrics import append_jsonl, load_jsonl


def test_live_page_notices_that_a_run_was_killed(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        live = LiveRun(open_run(run_dir))
        with StateRecorder(run_dir, "rl"):
            state = json.loads(RunDir(run_dir).state.read_text())
        state |= {"status": "running", "ended": None}
        state["process"] |= {"pid": process.pid, "started": _start_ticks(process.pid)}
        RunDir(run_dir).state.write_text(json.dumps(state))
        before = live._state()
        assert live.page_data()["run"]["status"] == "running"
        assert live.update(0)["run"]["state"] == "running"
        process.kill()
    assert live._state() != before, "no file has changed, but the process has gone"
    assert live.update(0)["run"]["status"] == "stopped at step 12 (killed)"


def test_routes_answer_this_machine_only(run_dir: Path) -> None:
    from starlette.testclient import TestClient

    live = LiveRun(open_run(run_dir))
    live.index.grow()
    client = TestClient(build_app(live), base_url="http://127.0.0.1:8050")  # without its life cycle: nothing is watched
    page = client.get("/")
    assert page.status_code == 200 and page.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/run").json()["facts"]["count"] == 144
    found = client.get(
        "/api/rollouts", params={"text": "question 3 2", "limit": 2, "sort": "reward", "descending": "false"}
    ).json()
    assert found["total"] == 4 and len(found["rows"]) == 2 and found["rows"][0]["reward"] <= found["rows"][1]["reward"]
    detail = client.get(f"/api/rollouts/{found['rows'][0]['id']}").json()
    assert detail["detail"]["group"] == 302 and detail["vocab"]["900"] == "<end>"
    assert len(client.get(f"/api/rollouts/{found['rows'][0]['id']}/group").json()) == 4
    for wrong in (
        "/api/rollouts?sort=color",
        "/api/rollouts?step=x",
        "/api/rollouts?nonsense=1",
        "/api/rollouts/999999",
        f"/api/rollouts?step={10**20}",
    ):
        assert client.get(wrong).status_code == 400
    assert client.get("/api/update?offset=-5").json() == {"is_replaced": True}
    assert client.post("/api/run").status_code == 405
    equal = client.get("/api/rollouts?equal=true").json()["total"]
    assert equal + client.get("/api/rollouts?equal=false").json()["total"] == 144
    [only] = client.get("/api/rollouts?step=3&group=302&index=1").json()["rows"]
    assert (only["group"], only["index"]) == (302, 1)
    assert client.get(f"/api/rollouts/{only['id']}/history").json()[0]["step"] == 3
    assert client.get("/api/logs").json() == {}
    assert client.get("/api/run", headers={"host": "rebound.example"}).status_code == 403
    assert read_query({"min": "0.5"}) == Query(min_reward=0.5)


def test_a_run_that_has_not_started_is_awaited(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    live = LiveRun(LocalRun(tmp_path / "later"))
    with TestClient(build_app(live), base_url="http://127.0.0.1:8050") as client:
        assert client.get("/api/run").json()["run"]["state"] == "waiting"
        changes = live.changes
        write_page_run(tmp_path / "later", num_steps=2)
        until = time.monotonic() + 30
        while not (live.changes > changes and len(live.index) == 24):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert client.get("/api/run").json()["facts"]["count"] == 24


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_start_while_the_pages_are_told_is_noticed(tmp_path: Path) -> None:
    run_dir = tmp_path / "later"
    run_dir.mkdir()
    live = LiveRun(LocalRun(run_dir))
    told: list[str] = []

    def tell() -> None:
        told.append(live.update(0)["run"]["state"])
        if len(told) == 1:
            write_page_run(run_dir, num_steps=2)

    live.listen(tell)
    live.start()
    try:
        wait_until(lambda: told[-1:] not in ([], ["waiting"]))
    finally:
        live.close()
    assert told[0] == "waiting"


def test_pages_are_notified_of_findings(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run", num_steps=2)
    live = LiveRun(open_run(run_dir))
    live.start()
    try:
        wait_until(lambda: len(live.index) == 24 and live.changes > 1)
        live.update(0)
        live._due = time.monotonic() + 0.5
        live._notify()
        assert live._is_behind is False
        live.update(0)
        assert live._is_behind, "these findings are older than the change"
        changes = live.changes
        wait_until(lambda: live.changes > changes)
        assert time.monotonic() >= live._due
        live.update(0)
        assert not live._is_behind
    finally:
        live.close()


def test_the_page_goes_on_after_a_failed_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_page_run(tmp_path / "run", num_steps=2)
    failures, catch_up, warned = iter([1, 2]), LiveRun._catch_up, list[str]()

    def fail_twice(live: LiveRun) -> None:
        if next(failures, None) is not None:
            raise KeyError("a row")
        catch_up(live)

    monkeypatch.setattr(LiveRun, "_catch_up", fail_twice)
    monkeypatch.setattr("prime_rl.monitor.serve.logger.warning", warned.append)
    live = LiveRun(open_run(run_dir))
    live.start()
    try:
        wait_until(lambda: len(live.index) == 24)
    finally:
        live.close()
    [text] = warned
    assert text.endswith("run cannot be read, and its page is not up to date: KeyError: 'a row'")


def test_the_page_goes_on_without_notifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        raise OSError("OS file watch limit reached")
        yield

    monkeypatch.setattr("watchfiles.watch", fail)
    monkeypatch.setattr("prime_rl.monitor.serve.POLL_S", 0.01)
    run_dir = write_page_run(tmp_path / "run", num_steps=2)
    live = LiveRun(open_run(run_dir))
    live.start()
    try:
        wait_until(lambda: len(live.index) == 24)
        changes = live.changes
        append_jsonl(run_dir / "metrics.jsonl", [{"step": 3, "process": "trainer", "loss/mean": 1.0}])
        wait_until(lambda: live.changes > changes)
    finally:
        live.close()


def test_updates_have_the_contexts_of_a_search(tmp_path: Path) -> None:
    live = LiveRun(open_run(write_context_search(tmp_path)))
    assert live.update(0)["contexts"] == live.page_data()["contexts"] != []


def test_a_page_that_connects_is_told_at_once(run_dir: Path) -> None:
    async def read() -> list[bytes]:
        stream = _events(LiveRun(open_run(run_dir))).body_iterator
        return [await anext(stream) for _ in range(2)]  # type: ignore[misc, call-overload]

    assert asyncio.run(asyncio.wait_for(read(), 3)) == [b": open\n\n", b"event: change\ndata: 0\n\n"]


def test_the_same_prompt_at_several_steps(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run", num_steps=3)
    write_evaluation(run_dir, 0, [0.0, 0.0, 1.0, 0.0])
    write_evaluation(run_dir, 3, [1.0, 0.5, 1.0, 1.0])
    index = index_of(run_dir)
    prompts = [prompt for prompt in index.prompts(10) if prompt["kind"] == "evaluation"]
    assert [(p["first"], p["last"], p["steps"]) for p in prompts] == [(0.0, 0.75, 2), (0.5, 1.0, 2)]
    assert [row["step"] for row in index.brief(index.history(prompts[0]["id"]))] == [0, 0, 3, 3]


def test_a_new_run_in_the_same_directory_replaces_the_page(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run", num_steps=6)
    live = LiveRun(open_run(run_dir))
    live._catch_up()
    offset = live.page_data()["offset"]
    shutil.rmtree(run_dir)
    write_page_run(run_dir, num_steps=2)
    live._catch_up()
    assert live.update(offset) == {"is_replaced": True}
    assert live.page_data()["facts"]["count"] == 24


def test_a_longer_new_run_replaces_the_page_too(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run", num_steps=2)
    live = LiveRun(open_run(run_dir))
    live._catch_up()
    begin = live.page_data()
    assert "is_replaced" not in live.update(begin["offset"], begin["first"])
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = list(load_jsonl(run_dir / name))
        (run_dir / name).unlink()
        append_jsonl(run_dir / name, [{**row, "timestamp": 9000.0} for row in [*rows, *rows]])
    live._catch_up()
    assert live.update(begin["offset"], begin["first"]) == {"is_replaced": True}
    assert live.page_data()["facts"]["count"] == 48
