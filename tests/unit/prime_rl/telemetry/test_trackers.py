"""Tracker output: W&B and TensorBoard files, trackio calls, a Prometheus scrape."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from wandb_files import history_of, read_whole_run

from prime_rl.configuration.sections import (
    LogExtrasConfig,
    PrometheusConfig,
    TensorboardConfig,
    TrackersConfig,
    TrackioConfig,
    WandbConfig,
)
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.run_dir import RunDir
from prime_rl.telemetry.prometheus import PrometheusTracker, metric_name, render_samples
from prime_rl.telemetry.trackers import spread_by_reward
from prime_rl.utils.monitor import Monitor, build_monitor

# Names of the documents' summary, and some of each process.
METRICS = {
    "loss/mean": 0.25, "entropy/mean": 1.5, "mismatch_kl/mean": 1e-4, "optim/lr": 3e-6, "optim/grad_norm": math.nan,
    "perf/throughput": 1200.0, "perf/mfu": 11.0, "reward/mean": 0.5, "val_reward/mean": 0.75, "time/step": 1.25,
    "eval/reverse-text/avg@4": 0.5, "batch/async_level": 1,
}  # fmt: skip


def rollouts(count: int = 5) -> list[dict[str, Any]]:
    return [
        {
            "env": "reverse-text",
            "group_index": 0,
            "index": i,
            "prompt": [{"role": "user", "content": f"text {i}"}],
            "completion": f"answer {i}",
            "reward": i / 4,
            "advantage": i / 4 - 0.5,
            "status": "completed",
            "loss_mask": [0, 0] + [1] * i,
        }
        for i in range(count)
    ]


def log_a_run(monitor: Monitor) -> None:
    for step in (1, 2, 3):
        monitor.log(METRICS, step)
        monitor.log_samples(rollouts(), step)
    monitor.finish()


# Weights & Biases


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Any]]:
    """The directory of an offline run, and its records."""
    pytest.importorskip("wandb", reason="wandb is not installed; cure: make test-extras")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    extras = LogExtrasConfig(interval=2, max_samples=3)
    config = WandbConfig(offline=True, project="p", name="n", group="g", tags=["t"], log_extras=extras)
    log_a_run(build_monitor(tmp_path, "orchestrator", TrackersConfig(wandb=config)))
    [run_file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    return run_file.parent, read_whole_run(run_file)


def test_an_offline_wandb_run_holds_the_documented_names(offline: tuple[Path, list[Any]]) -> None:
    rows = [row for row in history_of(offline[1]) if "loss/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert set(METRICS) <= set(row)
        assert {n: row[n] for n, v in METRICS.items() if v == v} == {n: v for n, v in METRICS.items() if v == v}
    [run] = [record.run for record in offline[1] if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_group, run.job_type, list(run.tags)) == (
        "p", "n", "g", "orchestrator", ["t"],
    )  # fmt: skip


def test_wandb_tables_of_samples_and_distributions(offline: tuple[Path, list[Any]]) -> None:
    folder, records = offline
    found = [row for row in history_of(records) if any(key.startswith(("samples", "distributions")) for key in row)]
    assert [row["step"] for row in found] == [1, 2], "the first step, and every second"
    tables = {}
    for path in folder.glob("files/media/table/*.json"):
        tables.setdefault(path.name.split("_")[0], []).append(json.loads(path.read_text()))
    assert {name: len(each) for name, each in tables.items()} == {"samples": 2, "distributions": 2}
    samples = tables["samples"][0]
    rows = [dict(zip(samples["columns"], cells, strict=True)) for cells in samples["data"]]
    assert [row["reward"] for row in rows] == [0.0, 0.5, 1.0], "three, from the lowest to the highest"
    assert json.loads(rows[1]["prompt"])[0]["content"] == "text 2" and rows[1]["completion"] == "answer 2"
    spread = tables["distributions"][0]
    assert spread["columns"] == ["step", "env", "rewards", "advantages", "completion_len"]
    assert [cells[2:] for cells in spread["data"]] == [[i / 4, i / 4 - 0.5, float(i)] for i in range(5)]


def test_missing_wandb_package_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sections = {"wandb": WandbConfig(), "tensorboardX": TensorboardConfig(), "trackio": TrackioConfig()}
    for package, section in sections.items():
        monkeypatch.setitem(sys.modules, package, None)
        name = package.removesuffix("X")
        with pytest.raises(ValueError, match=rf"{name}\.enabled is true but {package} is not installed") as caught:
            build_monitor(tmp_path, "trainer", TrackersConfig.model_validate({name: section}))
        assert "\n" not in str(caught.value)


def test_wandb_mode_disabled_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    build_monitor(tmp_path, "trainer", TrackersConfig(wandb=WandbConfig())).finish()


def test_a_few_rollouts_from_low_to_high() -> None:
    rows = [{"reward": reward} for reward in (3, 1, 2, 0, None)]
    assert [row["reward"] for row in spread_by_reward(rows, 3)] == [0, 1, 3]
    assert len(spread_by_reward(rows, 9)) == 5 and len(spread_by_reward(rows, 1)) == 1


# TensorBoard and trackio

TENSORBOARD = TrackersConfig(tensorboard=TensorboardConfig())


def read_events(folder: Path) -> list[Any]:
    """The events of the only file."""
    from tensorboardX.proto.event_pb2 import Event

    [path] = folder.iterdir()
    data, position, events = path.read_bytes(), 0, []
    while position < len(data):  # TFRecord: length, its checksum, the event, its checksum
        [length] = struct.unpack_from("<Q", data, position)
        events.append(Event.FromString(data[position + 12 : position + 12 + length]))
        position += length + 16
    return events


def test_tensorboard_events_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed; cure: make test-extras")
    log_a_run(build_monitor(tmp_path, "trainer", TENSORBOARD))
    scalars, histograms = dict[tuple[str, int], float](), set()
    for event in read_events(tmp_path / "tensorboard" / "trainer"):
        for value in event.summary.value:
            if value.HasField("histo"):
                histograms.add((value.tag, event.step))
            else:
                scalars[value.tag, event.step] = value.simple_value
    # TensorBoard's tags know no @: avg@4 is avg_4 there
    known = {name.replace("@", "_"): value for name, value in METRICS.items() if value == value}
    expected = {(name, step): value for name, value in known.items() for step in (1, 2, 3)}
    assert scalars == pytest.approx(expected)
    names = ("rewards", "advantages", "completion_len")
    assert histograms == {(f"distributions/{name}", step) for name in names for step in (1, 2, 3)}


def test_tensorboard_hides_the_steps_that_an_attempt_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed; cure: make test-extras")
    run = RunDir(tmp_path)
    run.begin_attempt("trainer", 0)
    monitor = build_monitor(tmp_path, "trainer", TENSORBOARD)
    run.begin_attempt("trainer", 2)  # the orchestrator begins its attempt after this, too
    log_a_run(monitor)
    events = read_events(run.tensorboard / "trainer")
    assert [event.step for event in events if event.HasField("session_log")] == [3]
    build_monitor(tmp_path / "other", "trainer", TENSORBOARD).finish()
    assert not RunDir(tmp_path / "other").tensorboard.exists(), "nothing was logged"


def test_trackio_gets_every_finite_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that it is made of; the package itself starts a server, which is not for a unit test."""

    class Run:
        def __init__(self) -> None:
            self.rows: list[tuple[int | None, dict[str, float]]] = []
            self.finished = False

        def log(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append((step, metrics))

        def finish(self) -> None:
            self.finished = True

    run, wishes = Run(), {}
    module = type(sys)("trackio")
    module.init = lambda **expected: wishes.update(expected) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    log_a_run(build_monitor(tmp_path, "trainer", TrackersConfig(trackio=TrackioConfig(project="p", name="n"))))
    assert (wishes["project"], wishes["name"], wishes["group"]) == ("p", "n-trainer", "n") and run.finished
    assert [step for step, _ in run.rows] == [1, 2, 3]
    assert run.rows[0][1] == {name: value for name, value in METRICS.items() if value == value}


WITH_TRACKIO = """
import sys
from pathlib import Path
from prime_rl.configuration.sections import TrackersConfig, TrackioConfig
from prime_rl.utils.monitor import build_monitor
monitor = build_monitor(Path(sys.argv[1]), "trainer", TrackersConfig(trackio=TrackioConfig(project="p", name="n")))
for step in (1, 2):
    monitor.log({"loss/mean": 0.5 / step}, step)
monitor.finish()
"""


@pytest.mark.slow
def test_the_real_trackio_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed; cure: make test-extras")
    import sqlite3

    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept"), "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[4] / "src")
    subprocess.run([sys.executable, "-c", WITH_TRACKIO, str(tmp_path)], env=environ, check=True, timeout=300)
    with sqlite3.connect(tmp_path / "kept" / "p.db") as kept:
        rows = kept.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("n-trainer", 1, {"loss/mean": 0.5}),
        ("n-trainer", 2, {"loss/mean": 0.25}),
    ]


# Prometheus

LINE = re.compile(
    r"# HELP [a-zA-Z_:][a-zA-Z0-9_:]* [^\n]*"
    r"|# TYPE [a-zA-Z_:][a-zA-Z0-9_:]* (gauge|counter)"
    r"|[a-zA-Z_:][a-zA-Z0-9_:]*\{[a-zA-Z_]\w*=\"[^\"\n]*\"\} (NaN|[+-]Inf|[0-9.eE+-]+)"
)


def scrape(port: int) -> dict[str, float]:
    """The values by name; every line must be of the text format."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    values = {name.partition("{")[0]: float(value) for name, value in pairs}
    assert len(values) == len(pairs), "a name twice"
    return values


def test_prometheus_serves_the_latest_metrics(tmp_path: Path) -> None:
    port = find_free_port()
    monitor = build_monitor(tmp_path, "trainer", TrackersConfig(prometheus=PrometheusConfig(port=port)))
    assert scrape(port)["prime_rl_step"] == 0
    monitor.log(METRICS, 1)
    monitor.log({"loss/mean": 0.125}, 2)
    values = scrape(port)
    assert (values["prime_rl_step"], values["prime_rl_loss_mean"], values["prime_rl_reward_mean"]) == (2, 0.125, 0.5)
    assert math.isnan(values["prime_rl_optim_grad_norm"])
    assert values["prime_rl_eval_reverse_text_avg_at_4"] == 0.5
    with pytest.raises(HTTPError):
        urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    monitor.finish()
    with pytest.raises(OSError):
        scrape(port)


def test_prometheus_listens_on_loopback_only() -> None:
    tracker = PrometheusTracker("trainer", 0)
    assert tracker._server.server_address[0] == "127.0.0.1"
    tracker.finish()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        section = PrometheusConfig(port=taken.getsockname()[1])
        with pytest.raises(ValueError, match=r"prometheus\.port"):
            build_monitor(tmp_path, "trainer", TrackersConfig(prometheus=section))


def test_names_and_values_are_valid_prometheus() -> None:
    assert metric_name("eval/a-b/pass@16/ci_low") == "eval_a_b_pass_at_16_ci_low"
    text = render_samples([("x", "gauge", 'say "hi"\nthere', math.inf)], {"process": 'a"b'})
    assert 'prime_rl_x{process="a\\"b"} +Inf' in text and len(text.splitlines()) == 3
