"""Progress on a terminal: a bar below the lines, none in files and CI, colors unless disabled."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loguru import logger

from prime_rl.telemetry.progress import Progress, format_seconds, show_progress

SCRIPT = """
import sys, time
from loguru import logger
from prime_rl.configuration.sections import LogConfig
from prime_rl.utils.logger import setup_logger
from prime_rl.telemetry.progress import show_progress
setup_logger("eval", LogConfig(file=False))
with show_progress("work", 4) as progress:
    for i in range(4):
        logger.warning(f"line {i} [bold]said[/bold]")
        print(f"printed {i}")
        progress.advance(1, f"[note {i}]")
        time.sleep(0.15)
print("the end")
"""
COLOR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9;]*)?m")


def run_in_terminal(**environ: str) -> str:
    """What a person would have been sent."""
    inside, outside = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR", "TERM", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=outside,
        stderr=outside,
        env={**kept, "TERM": "xterm-256color", **environ},
    ) as process:
        os.close(outside)
        output = b""
        while True:
            try:
                part = os.read(inside, 65536)
            except OSError:  # the other end has closed
                break
            if not part:
                break
            output += part
        os.close(inside)
        assert process.wait(30) == 0, output.decode()
    return output.decode()


def words(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)


def test_a_terminal_has_a_bar_below_the_lines() -> None:
    output = run_in_terminal()
    assert COLOR.search(output) and "━" in output and "/4" in output and "0:00:0" in output and "[note 2]" in output
    for i in range(4):
        assert words(output).count(f"WARNING line {i} [bold]said[/bold]") == 1
        assert words(output).count(f"printed {i}") == 1
    assert output.rstrip().endswith("the end") and "\x1b[?25h" in output, "the cursor is back"


def test_no_color_is_respected() -> None:
    output = run_in_terminal(NO_COLOR="1")
    assert not COLOR.search(output) and "/4" in output


@pytest.mark.parametrize("environ", [{"CI": "true"}, {"TERM": "dumb"}])
def test_no_bar_without_an_interactive_terminal(environ: dict[str, str]) -> None:
    output = run_in_terminal(**environ, NO_COLOR="1")
    assert "\x1b" not in output and "/4" not in output
    assert output.count("line ") == 4 == output.count("printed ")


def test_a_pipe_gets_lines_only() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert "\x1b" not in done.stdout and "/4" not in done.stdout and done.stdout.endswith("the end\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("prime_rl.telemetry.progress.time.monotonic", lambda: now[0])
    return now


def test_without_a_bar_progress_is_logged_periodically(clock: list[float]) -> None:
    output = list[str]()
    handler = logger.add(lambda message: output.append(str(message.record["message"])), level="INFO")
    with show_progress("reverse-text", 100, 20) as progress:
        for _ in range(8):
            clock[0] += 16
            progress.advance(10, "reward 0.5")
    logger.remove(handler)
    assert output[0] == "reverse-text: 40 of 100, about 2 min left | reward 0.5"
    assert output[1] == "reverse-text: 60 of 100, about 64 s left | reward 0.5"
    assert len(output) == 3, "every second piece, and none at the end"


def seconds_left(progress: Progress) -> float | None:
    return progress.bars.tasks[0].time_remaining


def test_time_left_excludes_start_up(clock: list[float]) -> None:
    progress = Progress("steps", 100, lines=False)
    clock[0] = 60.0  # engines load
    for step in range(1, 6):
        clock[0] += 1.2
        progress.set_done(step)
        assert (seconds_left(progress) is None) == (step == 1), "the first step is no evidence"
    assert seconds_left(progress) == pytest.approx(95 * 1.2, abs=1)


def test_time_left_follows_recent_steps(clock: list[float]) -> None:
    progress = Progress("steps", 2000, lines=False)
    for step in range(1, 1100):
        clock[0] += 30.0 if step < 100 else 2.0
        progress.set_done(step)
        progress.set_done(step)
    assert seconds_left(progress) == pytest.approx(901 * 2.0, rel=0.01)


def test_resumed_work_counts_from_its_first_new_piece(clock: list[float]) -> None:
    progress = Progress("steps", 100, lines=False)
    progress.set_done(50)  # found on disk
    for step in range(51, 55):
        clock[0] += 10.0
        progress.set_done(step)
    assert seconds_left(progress) == pytest.approx(46 * 10.0)


def test_times_are_readable() -> None:
    assert [format_seconds(s) for s in (12.4, 200, 9000)] == ["12 s", "3 min", "2.5 h"]
    assert seconds_left(Progress("x", 5)) is None and seconds_left(Progress("x")) is None


@pytest.mark.parametrize("command", ["eval", "synthesize"])
def test_dry_run_shows_every_value_with_its_source(command: str, tmp_path: Path) -> None:
    module = {"eval": "prime_rl.eval.eval", "synthesize": "prime_rl.synthesize.synthesize"}[command]
    file = tmp_path / "a.toml"
    file.write_text("num_examples = 3\n")
    options = ["@", str(file), "--sampling.temperature", "0.5", "--dry-run"]
    environ = {**os.environ, "PRIME_SEED": "7"}
    done = subprocess.run(
        [sys.executable, "-m", module, *options], capture_output=True, text=True, timeout=60, env=environ, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r"\s+", " ", line) for line in done.stdout.splitlines()]
    assert any(line.startswith("num_examples = 3 # ") and "a.toml:1" in line for line in lines)
    assert "temperature = 0.5 # CLI" in lines and "seed = 7 # env PRIME_SEED" in lines
    assert any(line.startswith("max_retries = 2") for line in lines)
    assert not (tmp_path / "outputs").exists()
