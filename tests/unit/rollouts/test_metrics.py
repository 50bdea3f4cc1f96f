"""Metrics: line format, concurrent writers, summaries and pass@k."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.training.metrics import (
    AttemptSteps,
    CompositeLogger,
    JSONLLogger,
    WandbLogger,
    append_jsonl,
    compute_interval,
    compute_pass_at_k,
    compute_stats,
    compute_stats_from_jsonl,
    keep_last_attempts,
    load_jsonl,
    load_last_attempts,
    reaches,
)


class _Recorder:
    """A logger, or a run, that records calls."""

    def __init__(self, broken: bool = False) -> None:
        self.rows: list[tuple] = []
        self.finished = False
        self.broken = broken

    def log(self, *args: object) -> None:
        self.rows.append(args)

    def finish(self) -> None:
        self.finished = True
        if self.broken:
            raise RuntimeError("no network")


def test_documented_snippet(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path / "logs" / "experiment_001")
    logger.log({"loss": 0.5, "reward": 1.0, "step": 42}, step=42)
    logger.finish()
    (line,) = (tmp_path / "logs" / "experiment_001" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert isinstance(row.pop("timestamp"), float)
    assert row == {"step": 42, "loss": 0.5, "reward": 1.0}


def test_not_finite_is_null_and_array_scalars_are_numbers(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log({"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.float64("nan"), "e": np.int64(3)}, step=1)
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert [row[k] for k in "abcde"] == [None, None, 0.5, None, 3]


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_a_step_that_is_no_count_is_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="step"):
        JSONLLogger(tmp_path).log({"loss": 1.0}, step=step)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'reward/mean'.*log a number"):
        JSONLLogger(tmp_path).log({"reward/mean": "high"}, step=1)


def test_an_existing_file_is_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        JSONLLogger(tmp_path).log({"loss": 1.0 / step}, step=step)
    assert [row["step"] for row in load_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def _write_lines(path: Path, writer: int) -> None:
    for i in range(200):
        append_jsonl(path, [{"writer": writer, "i": i, "filler": "x" * 5000}])


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_lines, args=(path, w)) for w in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    assert all(path.read_bytes().splitlines()), "no empty lines"
    rows = [(row["writer"], row["i"]) for row in load_jsonl(path)]
    assert sorted(rows) == list(itertools.product(range(3), range(200)))


def test_writers_that_meet_leave_no_empty_lines(tmp_path: Path) -> None:
    """A line that another process is writing is not treated as truncated."""
    path = tmp_path / "many.jsonl"

    def write() -> None:
        for i in range(150):
            append_jsonl(path, [{"i": i, "filler": "x" * 9000}])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 600 and all(lines)


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    assert list(load_jsonl(path)) == [{"step": 1}]
    assert list(load_jsonl(tmp_path / "absent.jsonl")) == []
    append_jsonl(path, [{"step": 3}])
    assert list(load_jsonl(path)) == [{"step": 1}, {"step": 3}], "what follows is not glued to it"


def test_rows_are_whole_where_one_write_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call writes at most 2 GiB; here, 5 bytes."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    rows = [{"step": step, "text": "x" * 20} for step in range(3)]
    append_jsonl(tmp_path / "rows.jsonl", rows)
    assert list(load_jsonl(tmp_path / "rows.jsonl")) == rows


def made(process: str, attempt: int | None, *steps: int) -> list[dict[str, Any]]:
    """Rows of steps; of attempt None: as an older version wrote them."""
    number = {} if attempt is None else {"attempt": attempt}
    return [{"step": step, "process": process, **number} for step in steps]


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    """Attempt 1 resumed after step 2 and fell in step 4; attempt 2 resumed after step 3 and is at step 4."""
    rows = made("a", None, 1, 2, 3, 4, 5, 6) + made("b", 0, 1, 6) + made("a", 1, 3, 4) + made("a", 2, 4)
    append_jsonl(tmp_path / "rows.jsonl", [{"note": "no step"}, *rows])
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('"not a row"\n{"step": "3", "attempt": 9}\n{"cut')
    found = list(load_last_attempts(tmp_path / "rows.jsonl"))
    expected = made("a", None, 1, 2) + made("b", 0, 1, 6) + made("a", 1, 3) + made("a", 2, 4)
    assert found == [{"note": "no step"}, *expected, {"step": "3", "attempt": 9}]
    assert keep_last_attempts(rows) == expected, "steps 5 and 6 are of no attempt that continues"
    assert list(load_last_attempts(tmp_path / "missing.jsonl")) == []


def test_filtering_row_by_row_ends_with_the_same_rows() -> None:
    for seed in range(50):
        draw, rows, start = random.Random(seed), list[dict[str, Any]](), 0
        for attempt in range(draw.randrange(1, 5)):
            end = start + draw.randrange(4)
            rows += made("a", attempt, *range(start + 1, end + 1))
            start = draw.randrange(end + 1)
        attempts = AttemptSteps()
        for row in rows:
            attempts.add("a", row["attempt"], row["step"])
        kept = [row for row in rows if not attempts.is_abandoned("a", row["attempt"], row["step"])]
        assert kept == keep_last_attempts(rows)
        steps = [row["step"] for row in kept]
        assert steps == sorted(set(steps)), "no step twice, none before another"


def test_an_unknown_object_in_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place in a JSON line"):
        append_jsonl(tmp_path / "samples.jsonl", [{"x": _Recorder()}])


def test_composite_logs_in_order_and_finishes_all() -> None:
    first, second = _Recorder(broken=True), _Recorder()
    logger = CompositeLogger([first, second])
    logger.log({"loss": 1.0}, 3)
    with pytest.raises(RuntimeError, match="no network"):
        logger.finish()
    assert first.rows == second.rows == [({"loss": 1.0}, 3)]
    assert first.finished and second.finished


def test_wandb_rows_carry_the_step_as_a_column() -> None:
    run = _Recorder()
    logger = WandbLogger(run)
    logger.log({"loss": 1.0}, 7)
    logger.finish()
    assert run.rows == [({"step": 7, "loss": 1.0},)] and run.finished


def test_stats_of_known_numbers(tmp_path: Path) -> None:
    stats = compute_stats([1.0, 2.0, 3.0, 6.0, math.nan])
    assert stats == {"mean": 3.0, "median": 2.5, "std": math.sqrt(3.5), "min": 1.0, "max": 6.0}
    assert set(compute_stats([]).values()) == {0.0}
    logger = JSONLLogger(tmp_path)
    for step, loss in enumerate([4.0, math.nan, 2.0]):
        logger.log({"loss": loss}, step)
    logger.log({"reward": 9.0}, 3)
    file = tmp_path / "metrics.jsonl"
    assert compute_stats_from_jsonl(file, "loss") == {"mean": 3.0, "min": 2.0, "max": 4.0, "std": 1.0}
    assert compute_stats_from_jsonl(file, "absent") == {"mean": 0.0, "min": 0.0, "max": 0.0, "std": 0.0}


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 6) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_counts_the_draws(n: int, c: int, k: int) -> None:
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert compute_pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        compute_pass_at_k(n, c, k)


def test_a_sum_that_is_rounded_reaches_its_threshold() -> None:
    assert 0.7 + 0.2 + 0.1 < 1 and reaches(0.7 + 0.2 + 0.1, 1) and reaches(1.0, 1)
    assert not reaches(1 - 1e-6, 1) and not reaches(math.nan, 1)


def test_public_api_is_lazy_and_complete() -> None:
    code = """if True:
        import sys
        import rollouts.training, rollouts.training.types
        assert not {"torch", "transformers", "verifiers"} & set(sys.modules), "importing a word woke a giant"
        for name in rollouts.training.__all__:
            getattr(rollouts.training, name)
        try:
            rollouts.training.Nothing
        except AttributeError as error:
            assert "Sample" in str(error)
        else:
            raise SystemExit("an unknown name was found")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_interval_of_shares_is_wilsons() -> None:
    # 8 of 10: s^2 = 0.1778 is the spread of 9 draws; (p + z^2/2n -+ z sqrt(p q/n + z^2/4n^2)) / (1 + z^2/n) at n = 9
    assert compute_interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4738, 0.9467), abs=1e-4)
    assert compute_interval([0.0] * 10) == pytest.approx((0.0, 3.8415 / 13.8415), abs=1e-4)
    assert compute_interval([1.0] * 10) == pytest.approx((10 / 13.8415, 1.0), abs=1e-4)
    assert all(map(math.isnan, compute_interval([])))


def test_the_interval_of_any_values_is_students() -> None:
    for n, t in ((2, 12.7062), (3, 4.3027), (4, 3.1824), (11, 2.2281), (101, 1.9840)):
        values = [float(i) for i in range(-n, 0)]
        low, high = compute_interval(values)
        assert (low + high) / 2 == pytest.approx(statistics.fmean(values))
        assert (high - low) / 2 == pytest.approx(t * statistics.stdev(values) / math.sqrt(n), rel=3e-3)
    assert all(map(math.isnan, compute_interval([5.0])))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.7), (2.0, 2.0), (8.0, 0.5)])
def test_confidence_interval_coverage(a: float, b: float) -> None:
    """Chances of examples are drawn from Beta(a, b), each is tried four times: their mean is a / (a + b)."""
    draw, hits, rounds = random.Random(7), 0, 600
    for _ in range(rounds):
        chances = [draw.betavariate(a, b) for _ in range(40)]
        low, high = compute_interval([statistics.fmean(draw.random() < p for _ in range(4)) for p in chances])
        hits += low <= a / (a + b) <= high
    assert 0.92 <= hits / rounds <= 0.985
