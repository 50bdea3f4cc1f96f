"""Launching several ranks: number of ranks and console output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

from prime_rl.trainer.command import count_missing_ranks
from prime_rl.trainer.config import ParallelDims
from prime_rl.trainer.launch import FirstRank


def test_count_missing_ranks() -> None:
    assert count_missing_ranks(ParallelDims(dp=3), {}) == 3
    assert count_missing_ranks(ParallelDims(dp=3), {"WORLD_SIZE": "3"}) == 0, "a rank starts none"
    assert count_missing_ranks(ParallelDims(dp=1), {}) == count_missing_ranks(ParallelDims(), {}) == 0


def test_console_shows_rank_0_until_failure() -> None:
    console = FirstRank("trainer_rank0")
    assert console("trainer_rank1", "12:00:00    INFO Step 1") is None
    assert console("trainer_rank0", "12:00:00    INFO Step 1") == "12:00:00    INFO Step 1"
    assert console("trainer_rank0", "12:00:00 FAILURE Traceback (most recent call last):") is None
    assert console("trainer_rank0", "  File ...") is None, "the launcher reports the error"


def test_rank_exits_without_interpreter_shutdown() -> None:
    """Threads of gloo unwound at interpreter shutdown can abort finished ranks, see `run_trainer`."""
    program = textwrap.dedent("""
        import atexit, os
        from prime_rl.trainer import command

        class Fuse:
            def __del__(self):
                os.abort()

        def finished(*_, **__):
            raise SystemExit(3)

        command.fuse, command.run_command = Fuse(), finished
        atexit.register(print, "said at exit")
        command.run_trainer("trainer", None, None, summary="")
    """)
    ends = {}
    for world_size in ("1", "2"):
        environ = {**os.environ, "WORLD_SIZE": world_size}
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
        assert done.stdout == "said at exit\n"
        ends[world_size] = done.returncode
    assert ends == {"1": -signal.SIGABRT, "2": 3}
