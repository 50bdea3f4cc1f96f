"""`plan`: configuration of a run and a cluster --> memory, time per step, bottlenecks and recommendations."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from prime_rl.configuration.command import run_command

if TYPE_CHECKING:
    from prime_rl.plan.config import PlanConfig


def plan(config: PlanConfig) -> int:
    """Print the plan; returns 0 if everything fits, else 1."""
    from prime_rl.plan.report import describe
    from prime_rl.plan.shapes import read_shape
    from prime_rl.plan.split import choose_split

    shape = read_shape(config.model.name)
    if config.cluster.is_cpu:
        from prime_rl.plan.cpu import describe_cpu, estimate_cpu, measure_machine, uses_bfloat16

        machine = measure_machine(shape.hidden, shape.inner, uses_bfloat16(config))
        estimate = estimate_cpu(config, shape, machine)
        sys.stdout.write("\n".join(describe_cpu(config, shape, machine, estimate)) + "\n")
        return 0 if estimate.fits else 1
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
        summary="Estimate memory, time per step and bottlenecks of a configuration on a cluster.",
        writes=lambda _: False,
    )


if __name__ == "__main__":
    main()
