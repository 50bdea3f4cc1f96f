"""Settings of every test: one compute thread, no hub, no tracker, no network, no deadline."""

from __future__ import annotations

import gc
import logging
import os
import random
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from inspect import getmembers
from pathlib import Path
from typing import Any

import pytest
from _pytest import logging as pytest_logging
from hypothesis import settings

# No deadline: the time of an example depends on the load of the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Before anything imports torch or a hub client; processes that a test starts inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# As in the Makefile: every worker would rewrite the asserts of all tests, every child compile all sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Children find the sources of this checkout, whatever is installed.
_SRC = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SRC, os.environ.get("PYTHONPATH")]))

_LOCAL = ("127.", "::1", "localhost", "0.0.0.0")


def _local_only(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and not str(address[0]).startswith(_LOCAL):
            raise PermissionError(f"a test tried to reach {address[0]}: tests talk to this machine only")
        return connect(self, address)

    return guarded


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _local_only(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", _local_only(socket.socket.connect_ex))


@pytest.fixture(autouse=True)
def _same_random_numbers(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers whichever tests ran before it: its failure can be repeated alone."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        # Until CUDA is used, `torch.manual_seed` only keeps a stack trace of each call, which takes milliseconds.
        (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(seed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores for `-n auto`: tests that start processes wait for them."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude imported modules and collected tests from garbage collection: a full one scans them for half a second.

    Collect seldom afterwards: tests parse sources and build models, which the default scans every 700 objects.
    Then compile the CPU kernels, if they have changed: half a minute beside other tests, whose servers would be late.
    The peak of the CPU is measured once, and the builtins of Triton's language are listed once.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    if "torch" in sys.modules:
        from rollouts.kernels import native

        native.library()
    if "prime_rl.trainer.perf" in sys.modules:  # a tenth of a second in each training run
        from prime_rl.trainer import perf

        perf.measure_peak_flops = cache(perf.measure_peak_flops)
    if "triton" in sys.modules:  # milliseconds in each launch of a kernel, and in each `tl.sum` and the like in it
        _list_triton_builtins_once()


def _list_triton_builtins_once() -> None:
    """Triton's interpreter replaces them, and looks for them among all members of its modules, again and again."""
    from triton.runtime import interpreter

    is_builtin = interpreter.tl.core.is_builtin

    @cache  # asked for the first time before anything is replaced
    def list_builtins(module: Any) -> list[str]:
        return [name for name, member in getmembers(module) if is_builtin(member)]

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        for name in list_builtins(module):
            member = getattr(module, name)
            if is_builtin(member):  # else it is replaced already
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@pytest.hookimpl(trylast=True)  # after `-m` has deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start real processes get more time than the two minutes of `pyproject.toml`; GPU tests need one."""
    for item in items:
        if "integration" in item.path.parts and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(400))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU; cure: a machine with CUDA"))


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, also from the processes of tests, which expect what a CPU computes; `-m gpu` shows them.

    Triton's interpreter then runs its kernels: it must be on before anything imports triton.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"


class _RootLogs(pytest_logging.catching_logs[Any]):
    """Captures what reaches the root logger.

    The class of pytest also captures loggers that do not propagate: six times per test, it looks for them among
    thousands.
    """

    def __enter__(self) -> Any:
        root = logging.getLogger()
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        return self.handler


pytest_logging.catching_logs = _RootLogs  # type: ignore[misc]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason of a skip; the reason ends with its cure."""
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    for reason, count in sorted(Counter(reasons).items()):
        terminalreporter.write_line(f"{count} skipped: {reason}")
