"""What the commands `trainer` and `sft` have in common before either does any work, so nothing heavy is imported."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from prime_rl.trainer.config import ParallelDims


def run_trainer(
    prog: str,
    config_cls: str,
    train: Callable[[Any], int],
    *,
    summary: str,
    preview: Callable[[Any], str | None] = lambda _: None,
) -> NoReturn:
    """`run_command` for a trainer: one rank of several leaves without taking the interpreter down.

    Threads of gloo and NCCL can outlive the process group; one that still has a tensor to release while Python
    shuts down is unwound by force, and the finished rank dies of SIGABRT ("terminate called without an active
    exception"). What was registered with `atexit` runs as ever.
    """
    try:
        run_command(prog, config_cls, train, summary=summary, preview=preview, record=True)
    except SystemExit as left:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else 1)


def count_missing_ranks(parallel: ParallelDims, environ: Mapping[str, str]) -> int:
    """How many ranks this process has to start: as `parallel` asks for, or none when it is a rank or the only one."""
    return 0 if "WORLD_SIZE" in environ or parallel.num_ranks == 1 else parallel.num_ranks
