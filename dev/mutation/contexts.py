"""Pytest plugin of `mutate.py record`: names the running test as the coverage context, also for its subprocesses."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

OUTCOMES: dict[str, list[str]] = {}


def _switch(context: str) -> None:
    os.environ["MUTATE_CONTEXT"] = context
    if current := coverage.Coverage.current():
        current.switch_context(context)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Append the test, its seconds and its outcomes to a file of this process."""
    _switch(item.nodeid)
    started = time.monotonic()
    result = yield
    _switch("")
    line = {"test": item.nodeid, "s": round(time.monotonic() - started, 3), "outcomes": OUTCOMES.pop(item.nodeid, [])}
    with Path(os.environ["MUTATE_TESTS"], f"tests-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the outcome of each phase."""
    OUTCOMES.setdefault(report.nodeid, []).append(report.outcome)
