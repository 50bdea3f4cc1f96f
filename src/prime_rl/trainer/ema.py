"""Exponential moving average of the weights, for an EMA teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from prime_rl.trainer.sharded_checkpoint import local_part


class WeightAverage:
    """m <- decay m + (1 - decay) w after every step, over the optimizer's parameters (this rank's shards).

    Initialized with the weights before training. Stored in float32: in bfloat16, updates of size 1 - decay would round
    to zero.
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
        """Update after an optimizer step."""
        for name, mean in self.by_name.items():
            mean.lerp_(local_part(self._parameters[name]).float(), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average into the model; the weights are restored bit for bit on exit."""
        saved = {name: local_part(p).detach().clone() for name, p in self._parameters.items()}
        self._copy_in(self.by_name)
        try:
            yield
        finally:
            self._copy_in(saved)

    @torch.no_grad()
    def _copy_in(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(values[name])
        if self._write_back is not None:
            self._write_back()
