"""`plan`: the configuration of a run and a cluster --> memory, seconds of a step, who waits, and what to change."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from prime_rl.plan.config import PlanConfig


def plan(config: PlanConfig) -> int:
    """Show the plan; 0 when everything fits, 1 when something does not."""
    from prime_rl.plan.report import describe
    from prime_rl.plan.shapes import read_shape
    from prime_rl.plan.split import choose_split

    shape = read_shape(config.model.name)
    split = choose_split(config, shape)
    lines = list(describe(config, shape, split))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if split.memory.fits and math.isfinite(split.seconds) else 1


def main() -> None:
    """Console script `plan`."""
    run_command(
        "plan",
        "prime_rl.plan.config:PlanConfig",
        plan,
        summary="Say what fits on a cluster, how long a step takes, who waits for whom, and what to change.",
    )


if __name__ == "__main__":
    main()
