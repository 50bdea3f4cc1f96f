"""A plain-Python environment with faults: each row selects what its reward function does to the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from rollouts.training.environments import PlainEnvironment

LEAKED: list[bytearray] = []


def load_environment(kinds: str, marks: str = "", leak_mb: int = 64) -> PlainEnvironment:
    """One row per word of `kinds`; `once-X` does X the first time only, known by a file in `marks`."""

    async def reward(row: dict[str, Any], completion: str) -> float:
        kind = row["answer"]
        if kind.startswith("once-"):
            mark = Path(marks) / kind
            if mark.exists():
                return 1.0
            mark.touch()
            kind = kind.removeprefix("once-")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hang":
            while True:
                time.sleep(0.01)
        elif kind == "sleep":
            await asyncio.sleep(600)
        elif kind == "raise":
            raise KeyError("oops")
        elif kind == "leak":
            LEAKED.append(block := bytearray(leak_mb << 20))
            block[::4096] = b"x" * (len(block) // 4096)  # memory counts once it is touched
        elif kind == "pid":
            return float(os.getpid())
        return float(len(completion))

    rows = [{"prompt": f"{number} {kind}", "answer": kind} for number, kind in enumerate(kinds.split())]
    environment = PlainEnvironment(rows, reward)
    environment.scores_groups = True
    return environment
