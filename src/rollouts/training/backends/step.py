"""The optimizer step: scaling by the global count, accumulation, clipping, schedule, and skipping bad gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollouts.training.numerics import using_threads

MAX_SKIPPED = 5
"""Training stops after this many consecutive skipped steps."""


@dataclass(frozen=True)
class StepReport:
    """Result of a step: gradient norm before clipping, learning rate, and the reason if it was skipped."""

    step: int
    grad_norm: float
    lr: float
    skipped: str | None = None


class OptimizerStep:
    """Accumulates gradients of one optimizer's parameters and applies them.

    `schedule(n)` is the factor on each group's base learning rate in step n, counted from 1. `max_norm` bounds the
    global gradient norm (None: no clipping), computed by `compute_norm`. `after_step` runs after every update, for
    example to copy parameters. `num_threads` compute all but the norm, whose bits would depend on them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Callable[[int], float] | None = None,
        max_norm: float | None = None,
        after_step: Callable[[], None] | None = None,
        max_skipped: int = MAX_SKIPPED,
        compute_norm: Callable[[Sequence[Tensor]], Tensor] | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_norm = max_norm
        self.after_step = after_step
        self.max_skipped = max_skipped
        self.compute_norm = compute_norm or compute_total_norm
        self.num_threads = num_threads
        self.num_steps = 0
        self.num_skipped = 0
        self.schedule_start = 0
        """Step after which the schedule (re)started."""
        self.base_lrs: list[float] = [group["lr"] for group in optimizer.param_groups]
        self._skipped_in_a_row = 0

    @property
    def parameters(self) -> list[Tensor]:
        """All optimized parameters, in the optimizer's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self, loss_sum: Tensor, global_count: float) -> None:
        """Add the gradient of `loss_sum / global_count`; the count is that of the whole step, over all ranks."""
        if not global_count > 0:
            raise ValueError(f"a step needs at least one token with loss, the global count is {global_count}")
        torch.autograd.backward(loss_sum / global_count)

    def step(self, *, begins_step: bool = True) -> StepReport:
        """Clip, step and clear the gradients.

        `begins_step`: false for further updates on the same batch, which have the number and the learning rate of its
        first one. With a gradient that is not finite the update is skipped; `FloatingPointError` after `max_skipped`
        consecutive steps whose updates were all skipped.
        """
        norm = self.compute_norm(self.parameters)
        grad_norm = float(norm)
        if not torch.isfinite(norm):
            return self.skip(f"the gradient is not finite (norm {grad_norm})", grad_norm, begins_step=begins_step)
        lr = self._begin(begins_step)
        with using_threads(self.num_threads):
            if self.max_norm is not None:
                clip_gradients(self.parameters, self.max_norm, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.after_step is not None:
                self.after_step()
        self._skipped_in_a_row = 0
        return StepReport(self.num_steps, grad_norm, lr)

    def skip(
        self, reason: str, grad_norm: float = 0.0, *, begins_step: bool = True, is_failure: bool = True
    ) -> StepReport:
        """Count a skipped update; the schedule advances with the step, and so does the limit: further updates on a bad
        batch fail for the same reason. `is_failure`: false for a batch without any gradient, which has no limit.
        """
        lr = self._begin(begins_step)
        self.optimizer.zero_grad(set_to_none=True)
        self.num_skipped += 1
        self._skipped_in_a_row += begins_step and is_failure
        if self._skipped_in_a_row >= self.max_skipped:
            raise FloatingPointError(
                f"{self._skipped_in_a_row} steps in a row were skipped, the last because {reason}: "
                "look at the data, lower optim.lr or optim.max_norm"
            )
        return StepReport(self.num_steps, grad_norm, lr, reason)

    def state(self) -> dict[str, int]:
        """Counters to save in a checkpoint."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "schedule_start": self.schedule_start,
        }

    def load_state(self, state: dict[str, int]) -> None:
        """The inverse of `state`."""
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.schedule_start = state.get("schedule_start", 0)

    def _begin(self, begins_step: bool) -> float:
        """Count the step and set its learning rate; returns that of the first group."""
        self.num_steps += begins_step
        factor = 1.0 if self.schedule is None else self.schedule(self.num_steps - self.schedule_start)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        return float(self.optimizer.param_groups[0]["lr"])


def compute_total_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Global norm of all gradients, also for sharded ones."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # A DTensor for sharded gradients. Checked by a method: importing the class is slow.
    whole: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
    return norm if whole is None else whole()


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply all gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grads_with_norm_` does.

    Each rank scales its local shards: DTensor dispatch would take seconds in the first step.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        local: Callable[[], Tensor] | None = getattr(gradient, "to_local", None)
        by_device.setdefault(gradient.device, []).append(gradient if local is None else local())
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))
