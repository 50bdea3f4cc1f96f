"""Supervision of real processes: output, exit, and no remaining processes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prime_rl.runtime.process import (
    ChildFailed,
    Supervisor,
    tail,
)

DEADLINE_S = 30.0
SLEEPER = "import time; print('ready'); time.sleep(300)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(300)"
# Like torchrun: the worker leads a session of its own, out of reach of its parent's process group.
WITH_WORKER = f"""
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print("worker", worker.pid)
time.sleep(300)
"""
LAUNCHER = f"""
import sys
from pathlib import Path
from prime_rl.runtime.process import Supervisor
with Supervisor(Path(sys.argv[1]), console=sys.stdout, grace_s=float(sys.argv[2])) as supervisor:
    supervisor.start("tree", [sys.executable, "-c", {WITH_WORKER!r}])
    supervisor.start("stubborn", [sys.executable, "-c", {STUBBORN!r}])
    supervisor.wait(["tree", "stubborn"])
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def says(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.exists() and text in path.read_text()


def start_launcher(logs: Path, grace_s: float = 10.0) -> tuple[subprocess.Popen[str], list[int]]:
    """The launcher above, once both children and the worker run, and the pids of the three."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(logs), str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # also where the tests run in the background
    )
    until(says(logs / "tree.log", "worker "), "the worker")
    until(says(logs / "stubborn.log", "ready"), "the stubborn child")
    worker = int((logs / "tree.log").read_text().split("worker ")[1].split()[0])
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return launcher, [worker, *map(int, children)]


def test_a_failed_child_is_reported_and_the_others_stop(tmp_path: Path) -> None:
    fails = "import sys\nfor i in range(40): print('line', i)\nsys.exit(3)"
    with pytest.raises(ChildFailed) as failure, Supervisor(tmp_path, handle_signals=False) as supervisor:
        other = supervisor.start("other", python(SLEEPER))
        supervisor.start("fragile", python(fails))
        supervisor.wait(["other", "fragile"])
    message = str(failure.value)
    assert "fragile ended with exit code 3" in message
    assert str(tmp_path / "fragile.log") in message
    assert "line 39" in message and "line 25" in message and "line 24" not in message
    assert other.code == -signal.SIGTERM and not is_alive(other.process.pid)


def test_a_child_has_time_to_end_by_itself(tmp_path: Path) -> None:
    """Between SIGTERM and SIGKILL; it writes what it must and leaves with its own exit code."""
    code = "import signal, sys, time\ndef leave(*_):\n    time.sleep(0.3)\n    print('saved')\n    sys.exit(7)\n"
    code += "signal.signal(signal.SIGTERM, leave)\nprint('ready', flush=True)\ntime.sleep(300)"
    with Supervisor(tmp_path, handle_signals=False, grace_s=DEADLINE_S) as run:
        child = run.start("child", python(code))
        until(says(tmp_path / "child.log", "ready"), "the child")
    assert child.code == 7 and "saved" in (tmp_path / "child.log").read_text()


def test_a_killed_child_is_reported_with_its_signal(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"SIGKILL") as failure, Supervisor(tmp_path, handle_signals=False) as run:
        victim = run.start("victim", python(SLEEPER))
        os.kill(victim.process.pid, signal.SIGKILL)
        run.wait(["victim"])
    assert "victim ended with signal SIGKILL" in str(failure.value)
    assert "out-of-memory" in str(failure.value)


def test_a_server_that_exits_with_0_while_needed_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"server ended with exit code 0"), Supervisor(tmp_path) as run:
        run.start("server", python("pass"))
        run.start("work", python(SLEEPER))
        run.wait(["work"])


def test_a_failed_server_is_restarted_a_limited_number_of_times(tmp_path: Path) -> None:
    """Its log continues, the reason is reported each time, and the restart count is passed on."""
    console = io.StringIO()
    server = python("import sys; print('ready as', sys.argv[1:], flush=True); sys.exit(3)")
    with Supervisor(tmp_path, console=console, handle_signals=False) as supervisor:
        supervisor.start("server", server, max_restarts=2, restart_options=["--again"])
        with pytest.raises(ChildFailed, match="server ended with exit code 3"):
            supervisor.wait_for(lambda: False, timeout_s=DEADLINE_S, what="nothing")
    output = (tmp_path / "server.log").read_text().splitlines()
    assert output == ["ready as []", "ready as ['--again']", "ready as ['--again']"]
    shown = console.getvalue()
    assert shown.count("server ended with exit code 3") == 2 and "Restarting server (0 restarts left)" in shown
    assert shown.count("server       | ready as []") == 1


def test_a_process_with_invalid_input_is_not_restarted(tmp_path: Path) -> None:
    with Supervisor(tmp_path, handle_signals=False) as supervisor:
        supervisor.start("server", python("import sys; print('error: no'); sys.exit(2)"), max_restarts=2)
        with pytest.raises(ChildFailed) as failed:
            supervisor.wait_for(lambda: False, timeout_s=DEADLINE_S, what="nothing")
    assert failed.value.wrong_input == "server: no"
    assert (tmp_path / "server.log").read_text() == "error: no\n"


def test_the_run_ends_well_when_the_awaited_exit_with_0(tmp_path: Path) -> None:
    console = io.StringIO()
    with Supervisor(tmp_path, console=console, handle_signals=False) as supervisor:
        server = supervisor.start("server", python(SLEEPER))
        supervisor.start("work", python("print('step 1'); print('50%\\r100%'); print('half', end='')"))
        supervisor.wait(["work"])
    assert [line for line in console.getvalue().splitlines() if line.startswith("work ")] == [
        "work         | step 1",
        "work         | 100%",
        "work         | half",
    ]
    assert server.code == -signal.SIGTERM


def test_children_get_their_environment_and_logs_are_kept(tmp_path: Path) -> None:
    for attempt in ("one", "two"):
        with Supervisor(tmp_path, handle_signals=False) as supervisor:
            supervisor.start("work", python("import os; print(os.environ['ATTEMPT'])"), env={"ATTEMPT": attempt})
            supervisor.wait(["work"])
    assert (tmp_path / "work.log").read_text() == "one\ntwo\n"


def test_sigkill_follows_an_ignored_sigterm(tmp_path: Path) -> None:
    with Supervisor(tmp_path, handle_signals=False, grace_s=0.2) as supervisor:
        child = supervisor.start("stubborn", python(STUBBORN))
        until(says(tmp_path / "stubborn.log", "ready"), "the child")
    assert child.code == -signal.SIGKILL


def test_workers_in_sessions_of_their_own_are_ended_too(tmp_path: Path) -> None:
    with Supervisor(tmp_path, handle_signals=False) as supervisor:
        supervisor.start("tree", python(WITH_WORKER))
        until(says(tmp_path / "tree.log", "worker "), "the worker")
        worker = int((tmp_path / "tree.log").read_text().split()[1])
        assert is_alive(worker)
    until(lambda: not is_alive(worker), "the worker's end")


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "outer", handle_signals=False) as outer:
        mine = outer.start("mine", python(SLEEPER))
        with Supervisor(tmp_path / "inner", handle_signals=False) as inner:
            inner.start("theirs", python(SLEEPER))
        assert mine.code is None
        assert outer.find_pids() == [mine.process.pid]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_cleanly(tmp_path: Path, number: int, code: int) -> None:
    launcher, pids = start_launcher(tmp_path, grace_s=0.5)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=DEADLINE_S)
    # A Python program that dies of KeyboardInterrupt ends by SIGINT; `run_command` turns that into 130.
    assert launcher.returncode == (-number if number == signal.SIGINT else code), errors
    assert not any(map(is_alive, pids))


def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, grace_s=10 * DEADLINE_S)
    launcher.send_signal(signal.SIGINT)
    until(lambda: not all(map(is_alive, pids)), "the first child to stop")
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    assert not any(map(is_alive, pids))


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    """As SIGHUP does under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor(tmp_path) as supervisor:
            os.kill(os.getpid(), signal.SIGHUP)
            supervisor.check()
            assert signal.getsignal(signal.SIGTERM) == supervisor._on_signal
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_ctrl_c_while_sigterm_is_being_sent_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Supervisor(tmp_path, handle_signals=False, grace_s=10 * DEADLINE_S) as supervisor:

        def signal_group(pid: int, number: int) -> None:
            os.killpg(pid, number)
            supervisor._signals.append(signal.SIGINT)

        monkeypatch.setattr("prime_rl.runtime.process.signal_group", signal_group)
        child = supervisor.start("stubborn", python(STUBBORN))
        until(says(tmp_path / "stubborn.log", "ready"), "the child")
        started = time.monotonic()
    assert child.code == -signal.SIGKILL and time.monotonic() - started < DEADLINE_S


def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path)
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    for pid in pids:
        until(lambda pid=pid: not is_alive(pid), f"the end of process {pid}")


def test_a_closed_console_does_not_end_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Supervisor(tmp_path, console=Closed(), handle_signals=False) as supervisor:
        supervisor.start("work", python("print('hello')"))
        supervisor.wait(["work"])
    assert (tmp_path / "work.log").read_text() == "hello\n"


def test_a_console_that_lacks_a_character_goes_on(tmp_path: Path) -> None:
    console = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    supervisor = Supervisor(tmp_path, console=console)
    for line in ("caf\u00e9 \u2713", "next"):
        supervisor.print(line)
    assert console.buffer.getvalue().decode("latin-1") == "rl           | caf\u00e9 ?\nrl           | next\n"  # type: ignore[attr-defined]


def test_a_removed_or_truncated_log_does_not_end_the_run(tmp_path: Path) -> None:
    console = io.StringIO()
    with Supervisor(tmp_path, console=console, handle_signals=False) as supervisor:
        child = supervisor.start("work", ["sleep", "60"])
        child.log_path.write_text("a long first line\n")
        supervisor.check()
        child.log_path.write_text("second\n")
        supervisor.check()
        child.log_path.unlink()
        supervisor.check()
        assert tail(child.log_path) == []
    assert console.getvalue().split("\n")[:2] == ["work         | a long first line", "work         | second"]


def test_wait_timeout_names_the_condition(tmp_path: Path) -> None:
    with Supervisor(tmp_path, handle_signals=False) as supervisor:
        supervisor.start("server", python(SLEEPER))
        with pytest.raises(TimeoutError, match=r"for the moon"):
            supervisor.wait_for(lambda: False, timeout_s=0.2, what="the moon")


def test_waiting_ends_when_the_child_does(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"no such model"), Supervisor(tmp_path, handle_signals=False) as supervisor:
        supervisor.start("server", python("import sys; sys.exit('no such model')"))
        supervisor.wait_for(lambda: False, timeout_s=DEADLINE_S, what="the server")


def test_tail_skips_blank_lines_and_earlier_attempts(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\nnew 1\n\nnew 2\n")
    assert tail(log, 5, start=4) == ["new 1", "new 2"]
    assert tail(log, 1) == ["new 2"]
