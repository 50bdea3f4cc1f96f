"""Log lines with their levels, and the alerts in them."""

from __future__ import annotations

from pathlib import Path

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.logs import find_alerts, list_logs, pack_logs, read_log

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
