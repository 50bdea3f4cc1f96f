"""Runs tests in forks of this process, which has imported the large libraries, and later the project and its tests."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch", "transformers", "pydantic", "httpx", "openai", "starlette.applications", "uvicorn", "verifiers", "pytest",
    "hypothesis", "numpy", "zmq", "msgspec", "safetensors.torch", "jinja2", "rich.console", "anyio", "orjson",
)  # fmt: skip
PR_SET_CHILD_SUBREAPER = 36
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class _Notes:
    """Pytest plugin: writes down the tests that failed, or (`collected`) all."""

    def __init__(self, path: Path, collected: bool) -> None:
        self.path, self.collected = path, collected

    def _write(self, *tests: str) -> None:
        with self.path.open("a") as file:
            file.writelines(test + "\n" for test in tests)

    def pytest_collection_finish(self, session: Any) -> None:
        if self.collected:
            self._write(*(item.nodeid for item in session.items))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid)


def warm_up(tree: Path) -> None:
    """Import the libraries that tests need, and make `tree` the place that the project is imported from."""
    with suppress(OSError, AttributeError):  # what tests leave running in sessions of their own becomes a child of ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.update(SETTINGS, PYTHONPATH=str(tree / "src"))
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    sys.path[:1] = [str(tree / "src"), str(tree)]
    sys.dont_write_bytecode = True
    os.chdir(tree)


def import_tests(files: list[str]) -> None:
    """Import test files and their subjects before forking."""
    import pytest

    with redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-W", "ignore", *files])


def collect_tests(tree: Path, suites: tuple[str, ...]) -> set[str]:
    """The names of all tests."""
    return set(run_tests(tree, [*suites], 3600, "--collect-only", collected=True)[1])


def run_tests(
    tree: Path,
    tests: list[str],
    limit_s: float,
    *options: str,
    before: Callable[[], None] = lambda: None,
    collected: bool = False,
) -> tuple[int | None, list[str]]:
    """Exit code of pytest (None: over `limit_s`) and the tests that failed, or all that were `collected`.

    `before` is called in the fork.
    """
    notes = tree.parent / "notes.txt"
    notes.write_text("")

    def child() -> int:
        import pytest

        before()
        return int(pytest.main([*options, "-q", "-p", "no:cacheprovider", *tests], plugins=[_Notes(notes, collected)]))

    code = _fork(child, tree.parent / "pytest.log", limit_s)
    return code, notes.read_text().splitlines()


def _fork(work: Callable[[], int], log: Path, limit_s: float) -> int | None:
    """The exit code of `work` in a forked process group with its output in `log`, None when it took too long."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = work()
            sys.stdout.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
    finally:
        _kill_children()


def _kill_children() -> None:
    """End all processes below this one; orphans become children when their parents end."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
