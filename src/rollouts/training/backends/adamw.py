"""AdamW of torch that starts as fast as its arithmetic."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` to the bit, without torch's compiler.

    torch marks these methods so that its compiler leaves them out, and imports the compiler to do so, in every
    process that makes an optimizer: as long as importing torch itself. Nothing of ours compiles a step.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch."""
        inspect.unwrap(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See torch."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
