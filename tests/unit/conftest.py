"""Fixtures of several packages' tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Commands that run in this process install their own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One compute thread: two that wait for each other on busy cores may take a minute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slow_engine(server: Any) -> Iterator[None]:
    """The engine of the module's `server` takes longer for each step."""
    from running_server import slow_down

    engine = server.service.engine.engine
    slow_down(engine)
    yield
    del engine.step
