"""Ranks as forks of one process with all imports done, which would dominate the time of each rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from prime_rl.runtime.machine import find_free_port

HERE = Path(__file__).parent


def run_program(program: str | Path, *args: object, timeout_s: float) -> None:
    """Run a file of this folder, or one by its path, which calls `run_ranks`; on failure its output is shown."""
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE)])
    process = subprocess.Popen(
        [sys.executable, str(HERE / program), *map(str, args)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        raise
    assert process.returncode == 0, output[-6000:]


def run_ranks(num: int, work: Callable[[int], None]) -> int:
    """Run `work` in `num` processes with the environment that torchrun gives them; returns the exit code.

    One that fails ends the others, which may be waiting for it.
    """
    for module in ("torch.distributed.fsdp", "torch.distributed.pipelining"):  # which each rank would import on use
        import_module(module)
    os.environ.update(WORLD_SIZE=str(num), MASTER_ADDR="localhost", MASTER_PORT=str(find_free_port()))
    running = set()
    for rank in range(num):
        pid = os.fork()
        if not pid:
            os._exit(_run_rank(rank, work))
        running.add(pid)
    code = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not code:
            code = 1
            for other in running:
                os.kill(other, signal.SIGKILL)
    return code


def _run_rank(rank: int, work: Callable[[int], None]) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        work(rank)
        return 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    finally:
        sys.stdout.flush()
