"""Digests of many tensors, by a GPU of those that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from rollouts.kernels.select import gpu_kernels
from rollouts.training.manifests import digest_tensor

GROUP_BYTES = 1 << 29
"""Bytes of tensors that a GPU digests at once, and holds if they are converted copies."""


def digest_tensors(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """`digest_tensor` of named tensors. A GPU digests many at once, 30 times as fast as it copies them."""
    digests: dict[str, str] = {}
    group: dict[str, Tensor] = {}
    for name, tensor in tensors:
        digests[name] = ""
        if not _has_kernels(tensor):
            digests[name] = digest_tensor(tensor)
            continue
        if group and sum(each.nbytes for each in (*group.values(), tensor)) > GROUP_BYTES:
            digests |= _digest_group(group)
            group = {}
        group[name] = tensor
    return digests | _digest_group(group) if group else digests


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and gpu_kernels() is not None


def _digest_group(group: Mapping[str, Tensor]) -> dict[str, str]:
    from rollouts.kernels.gpu_digest import digest_on_gpu

    return dict(zip(group, digest_on_gpu(list(group.values())), strict=True))
