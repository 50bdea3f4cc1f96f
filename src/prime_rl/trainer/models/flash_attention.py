"""Attention over flat packs in half precision on a GPU: FlashAttention of torch, and cuDNN for long sequences."""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rollouts.training.transfers import send

CUDNN_LENGTH = 4096
"""Length from which cuDNN computes a sequence: 1.4 times as fast as FlashAttention 2 on an H100, 1.9 times at 8,192."""

CUDNN_SIZES = 8
"""Sizes per power of two to which cuDNN's sequences are padded, because each new size takes a tenth of a second."""

CUDNN_HEAD = 128
"""Largest head size given to cuDNN."""

FLASH_HEAD = 256
"""Largest head size of FlashAttention; layers with a larger one are computed as padded rows."""

FLASH_MULTIPLE = 8
"""FlashAttention takes head sizes that are multiples of this; others are padded with zeros."""

HOPPER = (9, 0)
"""Compute capability from which cuDNN is the faster one."""


@dataclass(frozen=True)
class PackPart:
    """Neighboring sequences of a pack that are computed at once: one by cuDNN, or several by FlashAttention."""

    size: int
    """Tokens."""
    ends: Int[Tensor, " seqs_and_one"] | None
    """Where its sequences end, for FlashAttention."""
    longest: int


class FlashPack:
    """Causal attention within each sequence of a flat pack."""

    def __init__(self, lengths: list[int], device: torch.device | str) -> None:
        self.longest = max(lengths)
        # Computed here: inside compiled code it would specialize on the number of sequences.
        self.ends = _list_ends(lengths, device)
        self.parts: list[PackPart] = []
        if self.longest >= CUDNN_LENGTH and has_cudnn(self.ends.device):
            self.parts = split_pack(lengths, device)

    def attend(
        self,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
        window: int | None,
    ) -> Float[Tensor, "tokens heads dim"]:
        """Attend to the last `window` tokens of the sequence; None for all."""
        # Compiled code must not read the parts: it would specialize on their number and lengths.
        is_split = not torch.compiler.is_compiling() and bool(self.parts) and window is None
        if not is_split or q.shape[-1] > CUDNN_HEAD:
            return flash_attention(q, k, v, self.ends, self.longest, window)
        if len(self.parts) == 1:
            return self._attend_part(self.parts[0], q, k, v)
        sizes = [part.size for part in self.parts]
        rows = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        return torch.cat([self._attend_part(part, *x) for part, x in zip(self.parts, rows, strict=True)])

    def _attend_part(self, part: PackPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cudnn_attention(q, k, v) if part.ends is None else flash_attention(q, k, v, part.ends, part.longest)


def split_pack(lengths: list[int], device: torch.device | str) -> list[PackPart]:
    """Each long sequence is a part, and so are the sequences between two long ones."""
    parts = []
    for is_long, group in itertools.groupby(lengths, lambda length: length >= CUDNN_LENGTH):
        own = list(group)
        for members in [[length] for length in own] if is_long else [own]:
            parts.append(PackPart(sum(members), None if is_long else _list_ends(members, device), max(members)))
    return parts


def _list_ends(lengths: list[int], device: torch.device | str) -> Int[Tensor, " seqs_and_one"]:
    return send(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


def cudnn_size(length: int) -> int:
    """The size to which cuDNN's sequences of this length are padded, by at most an eighth."""
    step = max(1, 2 ** ((length - 1).bit_length() - 1) // CUDNN_SIZES)
    return -(-length // step) * step


def cudnn_attention(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
) -> Float[Tensor, "tokens heads dim"]:
    """Causal attention of one sequence by cuDNN, or by FlashAttention if cuDNN does not support it."""
    length = len(q)
    if padding := cudnn_size(length) - length:
        # Causal: no token attends to the padding behind it, and its gradients are 0.
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    out = out.transpose(1, 2).squeeze(0)
    return out[:length] if padding else out


def flash_attention(
    q: Float[Tensor, "tokens heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads dim"],
    ends: Int[Tensor, " seqs_and_one"],
    longest: int,
    window: int | None = None,
    key_ends: Int[Tensor, " seqs_and_one"] | None = None,
    longest_key: int | None = None,
) -> Float[Tensor, "tokens heads dim"]:
    """Causal attention over the flat pack with torch's FlashAttention, in half precision on a GPU.

    With `key_ends`, a sequence has more keys than queries, which are its last tokens.
    """
    from torch.nn.attention.varlen import varlen_attn

    dim, group = q.shape[-1], q.shape[1] // k.shape[1]
    options: dict[str, Any] | None = None
    scaled: dict[str, Any] = {}
    if padding := -dim % FLASH_MULTIPLE:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
        scaled = {"scale": dim**-0.5}
    if group > 1:
        options = None if torch.compiler.is_compiling() else find_grouped_options(q.device)
        if options is None:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    key_ends, longest_key = ends if key_ends is None else key_ends, longest_key or longest
    window_size = (-1 if window is None else window - 1, 0)
    options = {"window_size": window_size, **scaled, **(options or {})}
    out = varlen_attn(q, k, v, ends, key_ends, longest, longest_key, **options)
    assert isinstance(out, Tensor)
    return out[..., :dim]


@functools.cache
def find_grouped_options(device: torch.device) -> dict[str, Any] | None:
    """Options with which torch's FlashAttention takes fewer key heads than heads, with gradients; None: it does not.

    torch 2.11 takes them without an option, which is not documented: so compared with repeated heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    takes_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if takes_option else {}
    found = []
    try:
        with torch.inference_mode(False), torch.enable_grad():
            ends = _list_ends([5, 40], device)
            q, k, v = _draw(45, (4, 2, 2), 64, device)
            for group, chosen in ((2, {}), (1, options)):
                keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
                out = varlen_attn(q, keys, values, ends, ends, 40, 40, window_size=(-1, 0), **chosen)
                assert isinstance(out, Tensor)
                found.append(_differentiate(out, [q, k, v]))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return options if _are_close(*found) else None


@functools.cache
def has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN computes long sequences on this device as FlashAttention does, with gradients; takes 2 seconds."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < HOPPER:
        return False
    length = CUDNN_LENGTH - 1  # with padding
    try:
        with torch.inference_mode(False), torch.enable_grad():
            ends = _list_ends([length], device)
            q, k, v = _draw(length, (4, 2, 2), CUDNN_HEAD, device)
            outs = cudnn_attention(q, k, v), flash_attention(q, k, v, ends, length)
            found = [_differentiate(out, [q, k, v]) for out in outs]
    except (RuntimeError, TypeError):
        return False
    return _are_close(*found)


def _draw(tokens: int, heads: tuple[int, ...], dim: int, device: torch.device) -> list[Tensor]:
    draw = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "device": device, "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(tokens, num, dim, **options) for num in heads]


def _differentiate(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def _are_close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(bool((a - b).norm() <= 0.03 * b.norm()) for a, b in zip(found, expected, strict=True))
