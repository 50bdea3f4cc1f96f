"""Log lines with their levels, and the alerts in them."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.logs import MAX_ALERTS, find_alerts, list_logs, pack_logs, read_log

LOG = """\
12:00:01    INFO Step 1
12:00:02 WARNING health check mask: prompts carry loss
12:00:02 WARNING health check mask: prompts carry loss
12:00:03   ERROR worker failed
Traceback (most recent call last):
  File "x.py", line 3
\x1b[32m12:00:04\x1b[0m    INFO \x1b[1mgoes on\x1b[0m
"""


def write_logs(run: Path) -> LocalRun:
    (run / "logs" / "ranks").mkdir(parents=True)
    (run / "logs" / "trainer.log").write_text(LOG)
    (run / "logs" / "ranks" / "1.log").write_text("no time\n")
    (run / "logs" / "outside.log").symlink_to(run.parent / "secret")
    (run.parent / "secret").write_text("12:00:00 WARNING a secret\n")
    return LocalRun(run)


def test_lines_have_levels_and_continuations_that_of_the_line_before(tmp_path: Path) -> None:
    run = write_logs(tmp_path / "run")
    assert list(list_logs(run)) == ["ranks/1", "trainer"], "links are not followed"
    lines = pack_logs(run)["trainer"]
    assert lines[0] == ["12:00:01", "INFO", "Step 1"]
    assert lines[5] == ["", "ERROR", '  File "x.py", line 3'] and lines[6][1:] == ["INFO", "goes on"]
    assert [line.text for line in read_log(run.files.log("trainer"), 50)] == ["goes on"], "cut at a line"


def test_alerts_are_the_newest_first_and_once_each(tmp_path: Path) -> None:
    alerts = find_alerts(write_logs(tmp_path / "run"))
    assert [(alert["level"], alert["count"], alert["time"]) for alert in alerts] == [
        ("ERROR", 1, "12:00:03"), ("WARNING", 2, "12:00:02"),
    ]  # fmt: skip
    assert find_alerts(LocalRun(tmp_path / "none")) == []


def test_alerts_after_midnight_are_newer(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    evening = [f"23:{minute:02}:00 WARNING problem {minute}" for minute in range(MAX_ALERTS + 10)]
    logs = {
        "trainer": ([*evening, "00:10:00    INFO Step 5", "00:12:00   ERROR out of memory"], (13, 30)),
        "inference": (["00:09:30 WARNING later thread", "00:09:10 WARNING slow"], (9, 10)),
        "eval": (["23:59:59 WARNING old"], (0, 1)),
    }
    for process, (lines, (minute, second)) in logs.items():
        path = tmp_path / "logs" / f"{process}.log"
        path.write_text("\n".join(lines) + "\n")
        os.utime(path, (datetime(2026, 3, 2, 0, minute, second).timestamp(),) * 2)
    alerts = find_alerts(LocalRun(tmp_path))
    assert len(alerts) == MAX_ALERTS
    assert [alert["text"] for alert in alerts[:5]] == ["out of memory", "later thread", "slow", "old", "problem 39"]
