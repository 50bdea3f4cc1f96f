"""Builds optimizers and learning-rate schedules; float32 master weights for low-precision models."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.trainer.models.value import without_critic
from prime_rl.trainer.optim_config import (
    AdamConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimConfig,
    SchedulerConfig,
)
from rollouts.training.backends.muon import Muon

Schedule = Callable[[int], float]

FREQUENCIES = "inv_freq"
"""Part of the names of the buffers of rotary embeddings in transformers' models."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, bit for bit, without the import of torch's compiler, which takes as long as that of torch.

    The decorators of these methods import it in order to exclude them from compilation.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(
    config: OptimConfig,
    parameters: Mapping[str, Tensor],
    critic_lr: float | None = None,
    embeddings: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Build AdamW, SGD or Muon over named `parameters`, with the fused implementation where torch supports it.

    `critic_lr` is the learning rate of the critic's parameters, by default that of all; `embeddings` as for `Muon`.
    """
    policy = without_critic(parameters)
    groups = group_by_mesh(policy.values())
    own = [parameter for name, parameter in parameters.items() if name not in policy]
    groups += [group | {"lr": critic_lr or config.lr} for group in group_by_mesh(own)]
    if isinstance(config, MuonConfig):
        matrices = {"momentum": config.momentum, "nesterov": config.nesterov, "adjust_lr": config.adjust_lr}
        shared = {"lr": config.lr, "weight_decay": config.weight_decay}
        adamw = {"betas": (config.betas1, config.betas2), **shared}
        return Muon(parameters, muon=matrices | shared, adamw=adamw, embeddings=embeddings)
    if isinstance(config, AdamConfig):
        return AdamW(
            groups,
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        groups,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=not any(hasattr(p, "full_tensor") for p in parameters.values()),
    )


def group_by_mesh(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """One parameter group per device mesh: fused kernels do not support several meshes."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def build_schedule(config: SchedulerConfig, lr: float, max_steps: int | None) -> Schedule:
    """Learning-rate multiplier at step n = 1, 2, ..., max_steps, with min = min_lr / lr.

    Warmup: min + (1 - min) n / warmup_steps. linear: 1, then linear decay to min over the last `decay_steps` steps.
    cosine: min + (1 - min) (1 + cos(pi p)) / 2 with p from 0 after warmup to 1 at the last step.
    The only step of a run has the full rate: it is the last one, too, and would change nothing.
    """
    if isinstance(config, ConstantSchedulerConfig) or max_steps == 1:
        return lambda step: 1.0
    low = config.min_lr / lr if lr else 1.0
    warmup = config.warmup_steps
    last = max_steps if max_steps is not None else math.inf
    decay = config.decay_steps if isinstance(config, LinearSchedulerConfig) else last - warmup

    def factor(step: int) -> float:
        if step <= warmup:
            return low + (1 - low) * step / warmup
        progress = min(1.0, 1 - (last - step) / decay) if decay and last - step < decay else 0.0
        if isinstance(config, LinearSchedulerConfig):
            return 1 - (1 - low) * progress
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2

    return factor


class MasterWeights:
    """float32 master weights for a low-precision model or for optimizer offload.

    Each gradient is accumulated into the master gradient in float32 as soon as it is available, so that accumulation
    is exact and low-precision gradients are freed immediately. `device`: of the masters; unset: the model's. The
    model's weights are rounded to `dtype` and stored in `arithmetic`; unset: `dtype`. Tensors whose names have one of
    the model's `float32_names` are neither.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device | None = None,
        arithmetic: torch.dtype | None = None,
    ) -> None:
        self.by_name: dict[str, Tensor] = {
            name: torch.empty_like(p, dtype=torch.float32, device=device).copy_(p.detach()).requires_grad_()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        # Engines keep these in fp32, too: rounded frequencies would turn late positions by whole radians.
        kept = (FREQUENCIES, *getattr(model, "float32_names", ()))
        buffers = model.named_buffers(remove_duplicate=False)
        kept_buffers = {name: buffer for name, buffer in buffers if any(part in name for part in kept)}
        kept_parameters = [(p, p.data) for name, p in model.named_parameters() if any(part in name for part in kept)]
        model.to(dtype).to(arithmetic or dtype)
        for name, buffer in kept_buffers.items():
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, buffer)
        for parameter, data in kept_parameters:
            parameter.data = data
        wide = {id(parameter) for parameter, _ in kept_parameters}
        self._pairs = [
            (p, self.by_name[name], torch.float32 if id(p) in wide else dtype)
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        for parameter, master, _ in self._pairs:
            parameter.register_post_accumulate_grad_hook(_add_gradient_to(master))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the rounded masters into the model."""
        for parameter, master, dtype in self._pairs:
            parameter.copy_(master.to(dtype))


def _add_gradient_to(master: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(master.device).float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
