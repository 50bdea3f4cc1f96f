"""Live page: run state and server routes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from page_runs import (
    write_page_run,
)

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.rollout_index import Query
from prime_rl.monitor.serve import LiveRun, build_app, read_query
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.run_state import StateRecorder, _start_ticks


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
    ):
        assert client.get(wrong).status_code == 400
    assert client.post("/api/run").status_code == 405
    assert client.get("/api/run", headers={"host": "rebound.example"}).status_code == 403
    assert read_query({"min": "0.5"}) == Query(min_reward=0.5)
