"""Selects the kernels for tensors: those of the CPU, those of a GPU, or none."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any, Protocol, cast

import torch
from jaxtyping import Float
from torch import Tensor

from rollouts.kernels import cpu, native


class Kernels(Protocol):
    """What `rollouts.kernels.cpu` and `rollouts.kernels.gpu` have in common."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, added: Tensor | None = None
    ) -> tuple[Tensor, Float[Tensor, "*rows 1"]]:
        """weight x / rms(x), and 1 / rms(x) in fp32."""

    def rms_norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and weight."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
        """RoPE of every head by the angles of its token."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) up."""

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up."""


def find_kernels(x: Tensor, *others: Tensor, narrow: bool = True) -> Kernels | None:
    """The kernels that support these tensors; None for torch operations. `narrow`: on a CPU, bf16 as well."""
    if x.is_cuda:
        return cast(Kernels | None, gpu_kernels()) if _is_supported(x, *others) else None
    return cast(Kernels, cpu) if cpu.runs_here(x, *others, narrow=narrow) else None


@cache
def gpu_kernels() -> Any:
    """The module `rollouts.kernels.gpu`; None without triton, which the GPU builds of torch for Linux bring along.

    Also None, with a warning, where triton cannot run: it needs a C compiler and a GPU that it supports.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    from rollouts.kernels import gpu

    try:
        gpu.swiglu(*torch.zeros(2, 1, 16, device="cuda"))
    except Exception as error:  # a missing compiler and an old GPU raise errors of many kinds
        logging.getLogger(__name__).warning(
            "Triton does not run here, so that torch operations replace its kernels and are slower: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        )
        return None
    return gpu


def _is_supported(*tensors: Tensor) -> bool:
    """Whether the GPU kernels support these tensors: of one data type, plain, and outside of `torch.compile`."""
    dtype = tensors[0].dtype
    if torch.compiler.is_compiling() or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    return all(tensor.is_cuda and tensor.dtype == dtype and type(tensor) in cpu.PLAIN for tensor in tensors)


class HeadKernels(Protocol):
    """What `rollouts.kernels.cpu` and `rollouts.kernels.gpu_head` have in common."""

    def head_forward(self, logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of each label, entropy, and what normalizes each row."""

    def head_backward(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: Tensor,
        norms: Tensor,
        entropy: Tensor,
        of_logprob: Tensor,
        of_entropy: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The gradient of the logits in a data type; logits of this type are overwritten."""


def find_head_kernels(hidden: Tensor, weight: Tensor) -> HeadKernels | None:
    """The kernels for the logits of a whole head; None for torch operations."""
    if hidden.is_cpu:
        is_narrow = hidden.dtype == torch.bfloat16
        fits = not is_narrow or weight.shape[0] % (2 * native.LANES) == 0
        return cast(HeadKernels, cpu) if fits and cpu.runs_here(hidden, weight, narrow=True) else None
    if not _is_supported(hidden, weight) or gpu_kernels() is None:
        return None
    from rollouts.kernels import gpu_head

    return cast(HeadKernels, gpu_head)
