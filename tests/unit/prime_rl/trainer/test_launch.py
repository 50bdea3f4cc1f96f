"""Launching several ranks: number of ranks and console output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from prime_rl.trainer.command import count_missing_ranks
from prime_rl.trainer.launch import FirstRank
from prime_rl.trainer.parallel_config import ParallelDims


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


@pytest.mark.parametrize(
    ("world_size", "way", "code"),
    [("1", "filesystem", -signal.SIGABRT), ("2", "filesystem", 3), ("1", "gloo", 3), ("1", "nccl", 3)],
)
def test_rank_exits_without_interpreter_shutdown(world_size: str, way: str, code: int, tmp_path: Path) -> None:
    """Threads of gloo unwound at interpreter shutdown can abort finished ranks, see `run_trainer`."""
    program = textwrap.dedent("""
        import atexit, os, sys
        from prime_rl.trainer import command
        from prime_rl.trainer.config import TrainConfig

        class Fuse:
            def __del__(self):
                os.abort()

        def run(prog, config_cls, run, **options):
            run(TrainConfig.model_validate({"weight_broadcast": {"type": sys.argv[1]}, "output_dir": sys.argv[2]}))

        def finished(config):
            raise SystemExit(3)

        command.fuse, command.run_command = Fuse(), run
        atexit.register(print, "said at exit")
        command.run_trainer("trainer", None, finished, summary="")
    """)
    environ = {**os.environ, "WORLD_SIZE": world_size, "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, way, str(tmp_path)], env=environ, capture_output=True, text=True
    )
    assert done.stdout.endswith("said at exit\n") and done.returncode == code, done.stderr
