"""FSDP backend: parameters, gradients and optimizer state sharded over ranks, with the checkpoints of one device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollouts.training.backends.checkpoint import unwrap_compiled
from rollouts.training.backends.pytorch import PyTorchTrainingBackend
from rollouts.training.backends.ranks import Ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@dataclass(frozen=True)
class FSDPConfig:
    """Sharding options.

    sharding_strategy      FULL_SHARD gathers parameters for each pass; SHARD_GRAD_OP keeps them gathered from forward
                           to backward; NO_SHARD replicates them and averages gradients
    mixed_precision        compute in bfloat16; parameters, moments and gradient sums keep their dtype
    cpu_offload            parameters, moments and the optimizer step in host memory
    auto_wrap_min_params   minimum parameters of a module that is gathered separately
    gradient_checkpointing recompute layer activations in the backward
    clip_grad              maximum global gradient norm; None: no clipping
    """

    sharding_strategy: str = "FULL_SHARD"
    mixed_precision: bool = True
    cpu_offload: bool = False
    auto_wrap_min_params: int = 1_000_000
    gradient_checkpointing: bool = False
    clip_grad: float | None = 1.0

    def __post_init__(self) -> None:
        if self.sharding_strategy not in STRATEGIES:
            raise ValueError(f"sharding_strategy {self.sharding_strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.auto_wrap_min_params < 1:
            raise ValueError(f"auto_wrap_min_params {self.auto_wrap_min_params} must be at least 1")
        if self.clip_grad is not None and not self.clip_grad > 0:
            raise ValueError(f"clip_grad {self.clip_grad} must be above 0, or None for no bound")
        if self.cpu_offload and self.sharding_strategy == "NO_SHARD":
            raise ValueError("cpu_offload moves shards, and NO_SHARD has none: use FULL_SHARD or SHARD_GRAD_OP")


class FSDPTrainingBackend(PyTorchTrainingBackend):
    """`PyTorchTrainingBackend` with its state spread over the ranks of the default process group.

    Every rank calls the same methods in the same order, `forward_backward` with its own rows; losses and norms are
    those of the whole batch. The model comes whole, and rank 0's parameters are taken on all ranks; the optimizer is
    made by `optimizer_fn(model)` once the parameters are sharded. `checkpoint_path` is loaded at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer],
        loss_fn: Callable[..., Any],
        checkpoint_dir: Path,
        config: FSDPConfig | None = None,
        checkpoint_path: Path | None = None,
        device: torch.device | str | None = None,
        *,
        scheduler_fn: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "FSDP needs a process group: start with torchrun and call torch.distributed.init_process_group() first"
            )
        self.config = config or FSDPConfig()
        device = torch.device(device) if device is not None else _default_device()
        architecture = type(unwrap_compiled(model)).__name__
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), device)
        shard_model(model, self.config, ranks)
        optimizer = optimizer_fn(model)
        super().__init__(
            model,
            optimizer,
            loss_fn,
            checkpoint_dir,
            device,
            max_grad_norm=self.config.clip_grad,
            scheduler=scheduler_fn(optimizer) if scheduler_fn else None,
            tokenizer=tokenizer,
            ranks=ranks,
            architecture=architecture,
        )
        if checkpoint_path is not None:
            self.start_from(checkpoint_path)


def shard_model(model: nn.Module, config: FSDPConfig, ranks: Ranks) -> None:
    """Shard `model` over the ranks in place, starting from rank 0's parameters and buffers."""
    kind = ranks.device.type
    model.to(ranks.device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)
    if config.gradient_checkpointing:
        _recompute_activations(model)
    if config.sharding_strategy == "NO_SHARD":
        mesh = init_device_mesh(kind, (ranks.size, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (ranks.size,))
    shard_units(
        (*find_units(model, config.auto_wrap_min_params), model),
        mesh,
        param_dtype=torch.bfloat16 if config.mixed_precision else None,
        reshard_after_forward=config.sharding_strategy == "FULL_SHARD",
        cpu_offload=config.cpu_offload,
    )


def shard_units(
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    sum_gradients: bool = False,
    keep: nn.Module | None = None,
) -> None:
    """Shard the parameters of `units` over `mesh` in place; inner units come first.

    `param_dtype` is the dtype of gathered parameters and of compute, `reduce_dtype` (default fp32 with a `param_dtype`)
    that of gradient reduction; the shards keep their dtype. Gradients are averaged over the ranks, or summed with
    `sum_gradients`. `cpu_offload` keeps shards, gradients and optimizer state in host memory. The parameters of `keep`
    itself stay gathered after its forward, so that its head can be applied outside of it.
    """
    # Imported here because it imports torch's compiler, a third of the start-up time of a single process.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if param_dtype is not None and reduce_dtype is None:
        reduce_dtype = torch.float32
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype)}
    if cpu_offload and mesh.device_type != "cpu":
        if "cpu:" not in dist.get_backend_config():
            raise ValueError(
                "cpu_offload sums gradient norms on the CPU, which this process group cannot: "
                'call init_process_group("cpu:gloo,cuda:nccl")'
            )
        options["offload_policy"] = CPUOffloadPolicy()
    for module in units:
        reshard = reshard_after_forward and module is not keep
        unit: Any = fully_shard(module, reshard_after_forward=reshard, **options)
        if sum_gradients:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def find_units(model: nn.Module, min_params: int) -> list[nn.Module]:
    """FSDP units, inner ones first: modules with at least `min_params` parameters that are not in another unit.

    Layers in `_no_split_modules` are not divided. Shared parameters, such as tied embeddings, stay with the root.
    """
    atoms = set(getattr(model, "_no_split_modules", None) or ())
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> tuple[int, bool]:
        """Number of parameters below `module` that are in no unit, and whether one of them is shared."""
        if type(module).__name__ in atoms:
            left = list(module.parameters())
            size, shared = sum(p.numel() for p in left), any(uses[id(p)] > 1 for p in left)
        else:
            below = [visit(child) for child in module.children()]
            own = list(module.parameters(recurse=False))
            size = sum(p.numel() for p in own) + sum(n for n, _ in below)
            shared = any(uses[id(p)] > 1 for p in own) or any(s for _, s in below)
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if size >= min_params and not shared and not is_container and module is not model:
            units.append(module)
            return 0, False
        return size, shared

    visit(model)
    return units


def _recompute_activations(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"gradient_checkpointing: {type(model).__name__} has no gradient_checkpointing_enable(), leave it off"
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _default_device() -> torch.device:
    """The GPU of this rank if the process group uses NCCL, else the CPU."""
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
