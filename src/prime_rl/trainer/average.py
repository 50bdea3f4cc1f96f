"""A moving average of the weights, for a teacher that follows its student slowly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from prime_rl.trainer.shards import local_part


class WeightAverage:
    """m <- decay m + (1 - decay) w after every step, of what the optimizer steps: in float32, each rank its own part.

    It begins as the weights before training. In a narrower format it would stand still: 1 - decay is less than what
    bfloat16 can tell apart.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], decay: float, write_back: Callable[[], None] | None = None
    ) -> None:
        self.decay = decay
        self._parameters = parameters
        self._write_back = write_back
        self.by_name: dict[str, Tensor] = {
            name: local_part(p).detach().float().clone() for name, p in parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Count a step."""
        for name, mean in self.by_name.items():
            mean.lerp_(local_part(self._parameters[name]).float(), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the average instead of its weights, which come back bit for bit."""
        held = {name: local_part(p).detach().clone() for name, p in self._parameters.items()}
        self._put(self.by_name)
        try:
            yield
        finally:
            self._put(held)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(values[name])
        if self._write_back is not None:
            self._write_back()
