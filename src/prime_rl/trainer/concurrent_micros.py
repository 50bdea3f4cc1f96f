"""Micro-batches of one rank computed by several threads, with the bits of one after another.

Products of one thread and of several round differently, so a trainer cannot change its number of threads during a run.
Micro-batches are independent: a further thread takes the next one. Losses are computed and gradients are added in the
order of the micro-batches, whichever thread computes them, so that no bit depends on the load of the machine. While an
engine computes beside the trainer, the system divides the cores among the threads, and none is idle before the steps
that only one thread can compute (the norm of the gradient, publishing) are reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from prime_rl.runtime.core_lease import MIN_PARAMETERS
from prime_rl.runtime.machine import num_cores
from prime_rl.trainer.model import DeviceConfig
from prime_rl.trainer.model_config import ModelConfig
from prime_rl.trainer.models.causal_lm import CausalLM
from rollouts.training.batching import MicroBatch
from rollouts.training.rl_losses import LossInputs

THREADS = "a trainer with several threads per product (the default on more than four cores)"


class _Stopped(Exception):
    """Another thread has failed."""


class _Turns:
    """Lets numbered sections run one at a time in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._is_stopped = False

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._next == number)
            if self._is_stopped:
                raise _Stopped
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class ConcurrentMicros:
    """Runs micro-batches in this thread and in `num_threads - 1` others."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def run(
        self,
        micros: Sequence[MicroBatch],
        compute: Callable[[MicroBatch], LossInputs],
        finish: Callable[[MicroBatch, LossInputs], Tensor],
        parameters: Sequence[Tensor],
        masters: Sequence[Tensor],
    ) -> None:
        """Add the gradients of `parameters` in all micro-batches to `masters`, which may be `parameters` itself.

        Each busy thread holds the activations and gradients of one micro-batch. Raises the first error of any thread.
        """
        numbers, losses, sums = iter(range(len(micros))), _Turns(), _Turns()
        taken, errors = threading.Lock(), list[BaseException]()
        num_inner = torch.get_num_threads()

        def work_one() -> bool:
            with taken:
                number = next(numbers, None)
            if number is None or errors:
                return False
            micro = micros[number]
            try:
                inputs = compute(micro)
                with losses.turn(number):
                    loss = finish(micro, inputs)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                with sums.turn(number):
                    add_gradients(masters, gradients)
            except _Stopped:
                return False
            except BaseException as error:
                errors.append(error)
                losses.stop()
                sums.stop()
                return False
            return True

        def help_out() -> None:
            torch.set_num_threads(num_inner)  # a new thread has the default of the libraries
            while work_one():
                pass

        helpers = [
            threading.Thread(target=help_out, name=f"micro-batches-{i}")
            for i in range(1, min(self.num_threads, len(micros)))
        ]
        for helper in helpers:
            helper.start()
        while work_one():
            pass
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]


def build_concurrent_micros(
    wanted: int | None, config: ModelConfig, placement: DeviceConfig, model: CausalLM, num_ranks: int
) -> ConcurrentMicros | None:
    """Build for at most `wanted` threads, None for the default; None where micro-batches run one after another.

    `ValueError` if more than one is wanted and not supported.
    """
    if wanted == 1:
        return None
    obstacle = find_obstacle(config, placement, model, num_ranks)
    if wanted is not None and obstacle is not None:
        cure = "set OMP_NUM_THREADS=1 in the environment, or leave it out" if obstacle == THREADS else "leave it out"
        raise ValueError(f"max_concurrent_micro_batches is {wanted}, which {obstacle} does not support: {cure}")
    num = min(wanted or 2, num_cores())
    is_small = wanted is None and sum(p.numel() for p in model.parameters()) < MIN_PARAMETERS
    return None if obstacle is not None or is_small or num < 2 else ConcurrentMicros(num)


def find_obstacle(config: ModelConfig, placement: DeviceConfig, model: CausalLM, num_ranks: int) -> str | None:
    """The setting that excludes concurrent micro-batches; None: they are possible."""
    has_dropout = config.lora is not None and config.lora.dropout > 0
    reasons = {
        f"device {placement.device.type}": placement.device.type != "cpu",
        "a run of several ranks": num_ranks > 1,
        THREADS: torch.get_num_threads() > 1,
        "this model class": type(model) is not CausalLM or model.config.num_experts > 0,
        "model.ac or model.compile": config.ac is not None or config.compile is not None,
        "model.lora.dropout": has_dropout,  # random numbers are drawn in the order of execution
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@torch.no_grad()
def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate gradients, in the precision of `parameters`, as the backward pass does: the first as is."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient.to(parameter.dtype)
        else:
            parameter.grad.add_(gradient)
