"""All runs below a folder: cards that grow, comparisons, and nothing outside the folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_runs import metric_rows, write_page_run
from starlette.testclient import TestClient

from prime_rl.monitor.live_runs import LiveRuns, RunCard
from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.page_data import build_page_data
from prime_rl.monitor.serve import OpenRuns, build_app
from rollouts.training.metrics import append_jsonl


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "outputs"
    write_page_run(folder / "a", num_steps=3)
    write_page_run(folder / "b" / "rl", num_steps=5)
    write_page_run(folder.parent / "elsewhere", num_steps=3)
    return folder


def test_cards_read_only_what_is_new(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    card = RunCard(LocalRun(run))
    first = card.read("run")
    assert (first["step"], first["max_steps"], first["metric"], first["value"]) == (3, 3, "reward/mean", 0.15)
    offset = card._offset
    append_jsonl(run / "metrics.jsonl", [{**row, "timestamp": time.time()} for row in metric_rows(4)])
    second = card.read("run")
    assert card._offset > offset and len(second["spark"]) == 4 and second["value"] == 0.2


def test_a_card_shows_the_last_attempt(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    card = RunCard(LocalRun(run))
    assert card.read("run")["value"] == 0.15
    resumed = [{**row, "timestamp": time.time(), "attempt": 1, "reward/mean": 0.7} for row in metric_rows(2)]
    append_jsonl(run / "metrics.jsonl", resumed)
    found = card.read("run")
    assert (found["value"], found["spark"][-1]) == (0.7, [2, 0.7])
    assert RunCard(LocalRun(run)).read("run")["spark"] == found["spark"]


def test_a_resume_without_metrics_has_a_time(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    card = RunCard(LocalRun(run))
    before = card.read("run")
    append_jsonl(
        run / "attempts.jsonl", [{"process": "trainer", "attempt": 1, "step": 3, "timestamp": before["until"] + 9000}]
    )
    for found in (card.read("run"), build_page_data(LocalRun(run))["run"]):
        assert (found["seconds"], found["until"]) == (before["seconds"], before["until"] + 9000)


def test_a_card_shows_a_longer_new_run(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    card = RunCard(LocalRun(run))
    assert card.read("run")["value"] == 0.15
    (run / "metrics.jsonl").unlink()
    rows = [{**row, "timestamp": 9000.0, "reward/mean": 0.7} for step in range(1, 5) for row in metric_rows(step)]
    append_jsonl(run / "metrics.jsonl", rows)
    assert card.read("run")["spark"] == [[step, 0.7] for step in range(1, 5)]


def test_unreadable_files_do_not_hide_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_page_run(tmp_path / "a", num_steps=3)
    write_page_run(tmp_path / "b", num_steps=3)
    write_page_run(tmp_path / "secret" / "c", num_steps=3)
    (tmp_path / "a" / "configs" / "trainer.toml").write_bytes(b"max_steps = 4  # \xff\n")
    denied = {tmp_path / "b" / "metrics.jsonl", tmp_path / "secret"}

    def deny(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            if path in denied:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **options)

        return call

    for name in ("open", "iterdir"):
        monkeypatch.setattr(Path, name, deny(getattr(Path, name)))
    cards = LiveRuns(tmp_path).cards()
    assert [(card["key"], card["max_steps"]) for card in cards] == [("a", 4)]
    denied.add(tmp_path / "a" / "configs" / "trainer.toml")
    assert LiveRuns(tmp_path).cards()[0]["max_steps"] != 4


def test_routes_list_open_and_compare_runs(root: Path) -> None:
    folder = OpenRuns(LiveRuns(root))
    client = TestClient(build_app(runs=folder), base_url="http://127.0.0.1:8050")
    assert 'data-view="runs"' in client.get("/").text
    listed = client.get("/api/runs").json()["runs"]
    assert {run["key"]: run["step"] for run in listed} == {"a": 3, "b/rl": 5}
    curves = client.get("/api/curves?run=a&run=b/rl&metric=loss/mean").json()
    assert curves["metric"] == "loss/mean" and len(curves["curves"]["b/rl"]) == 5
    differences = client.get("/api/differences?run=a&run=b/rl").json()
    assert {"process": "trainer", "key": "max_steps", "values": ["3", "5"]} in differences
    opened = client.get("/runs/b/rl/api/run").json()
    assert opened["home"] is True and opened["run"]["max_steps"] == 5
    assert client.get("/runs/b/rl/").status_code == 200
    assert client.get("/runs/b/rl/metrics.csv").text.startswith("process,step,")
    folder.close()


@pytest.mark.parametrize("key", ["..", "../elsewhere", "%2e%2e/elsewhere", "c", "/etc", "a/../../elsewhere"])
def test_only_runs_below_the_folder_can_be_opened(root: Path, key: str) -> None:
    folder = OpenRuns(LiveRuns(root))
    client = TestClient(build_app(runs=folder), base_url="http://127.0.0.1:8050")
    with pytest.raises(ValueError, match="there is no run"):
        folder.find(key)
    for path in (f"/runs/{key}/api/run", f"/runs/{key}/api/logs"):
        assert client.get(path).status_code in (400, 404), path
    assert client.get("/api/curves", params={"run": key}).status_code == 400


def test_runs_without_pages_are_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.monitor.serve.MAX_OPEN", 1)
    folder = OpenRuns(LiveRuns(root))
    first = folder.find("a")
    assert folder.find("a") is first
    second = folder.find("b/rl")
    assert first.closing and not second.closing
    folder.close()
