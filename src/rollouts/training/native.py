"""Kernels in C (`native.c`) for a CPU: norms, rotations, gated units, products with few rows, a step of decoding.

They are compiled on first use by the machine's own C compiler (some seconds) and kept in the user's cache. Where there
is none, `library` says so once and callers compute by torch's operations, which is slower and other in the last bits;
all processes of a machine do the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rollouts.training import linear
from rollouts.training.user_cache import user_cache_dir

SOURCE = Path(__file__).with_suffix(".c")
OFF = "ROLLOUTS_NATIVE"
"""Environment variable: 0 computes everything by torch."""

FLAGS = "-O3 -march=native -ffp-contract=off -fno-math-errno -std=gnu11 -fPIC -Wno-psabi".split()
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Shape(ctypes.Structure):
    """As in `native.c`."""

    _fields_ = [
        (name, _I)
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "size", "inner", "vocab"),
            *("block_hidden", "block_heads", "block_inner"),
            *("narrow", "format", "threads", "scratch_size", "kept"),
        )
    ]


LAYER_FIELDS = (
    *("norm", "qk_norm", "mlp_norm", "qkv", "out", "gate_up", "down"),
    *("qkv_bias", "out_bias", "gate_up_bias", "down_bias"),
)


class Layer(ctypes.Structure):
    """As in `native.c`: addresses, None for NULL."""

    _fields_ = [(name, _P) for name in LAYER_FIELDS]


SIGNATURES = {
    "rms_norm": [_P, _I, _P, _P, _I, _F, _P, _P, _I, _I, _I],
    "rms_norm_backward": [_P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I],
    "rotate": [_P, _I, _P, _P, _F, _P, _I, _I, _I],
    "swiglu": [_P, _I, _P, _I, _P, _I, _I],
    "swiglu_backward": [_P, _P, _P, _P, _P, _I, _I],
    "softmax": [_P, _I, _I],
    "pack": [_P, _P, _I, _I, _I, _I],
    "linear": [_P, _P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _I, _I],
    "decode": [_P, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P, _I, _P, _P, _I, _P, _P, _I],
}
PLAIN = (Tensor, nn.Parameter)
LANES, KEYS, MOST_SIZE = 16, 128, 256
"""As in `native.c`: numbers in a vector, keys in a block of the cache, the largest head."""
FP32, BF16, DOTS = range(3)
"""As in `native.c`: how the numbers of a packed weight are kept."""
ONE_BY_ONE, PAIRED, GATED = range(3)
"""As in `native.c`: how outputs lie in a packed weight, and what becomes of them."""

_logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, and one warning, where they cannot be had."""
    if os.environ.get(OFF) == "0":
        return None
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        _logger.warning("no C compiler found: norms and decoding run as single torch operations, which is slower")
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(shlex.split(compiler))))
    except (OSError, subprocess.CalledProcessError) as error:
        told = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        _logger.warning("%s cannot compile %s, torch's operations are used: %s", compiler, SOURCE.name, told)
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.packed_size.argtypes, loaded.packed_size.restype = [_I, _I, _I], _I
    loaded.most_rows.argtypes, loaded.most_rows.restype = [_I], _I
    loaded.has_dots.argtypes, loaded.has_dots.restype = [], ctypes.c_int
    return loaded


def _compiled(compiler: list[str]) -> Path:
    """The library of this source, compiler and processor, compiled unless it is in the cache."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    flags = [*compiler[1:], *FLAGS, *_share_threads()]
    made_of = [SOURCE.read_text(), str(flags), str(program), str(program.stat().st_mtime_ns), _processor()]
    home = user_cache_dir("rollouts")
    path = home / f"native-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=home) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of a run start at once: one compiles, the others wait
        if path.exists():
            return path
        compiled, linked = Path(work) / "native.o", Path(work) / "native.so"
        # Nothing is linked: torch has loaded what is needed, and its OpenMP above all is to be used and no second one.
        link = ["-shared", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-nostdlib"]
        for step in ([*flags, "-c", "-o", compiled, SOURCE], [*link, "-o", linked, compiled]):
            subprocess.run([str(program), *map(str, step)], check=True, capture_output=True, text=True)
        os.replace(linked, path)
    return path


def _share_threads() -> list[str]:
    """Compile for threads where they can be those of torch: a second pool would fight with the first for the cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    pools = sorted({line[line.index("/") :] for line in lines if "/libgomp" in line})
    if len(pools) != 1:
        return []
    ctypes.CDLL(pools[0], mode=ctypes.RTLD_GLOBAL)  # so that the kernels find it
    return ["-fopenmp"]


def _processor() -> str:
    """What `-march=native` stands for here."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.is_file():
        return f"{sys.platform} {os.uname().machine}"
    return next((line for line in cpus.read_text().splitlines() if line.startswith(("flags", "Features"))), "")


def runs_here(x: Tensor, *others: Tensor) -> bool:
    """Whether kernels compute with these: plain fp32 on a CPU, and not under a compiler, which makes its own."""
    if torch.compiler.is_compiling() or library() is None:
        return False
    for tensor in (x, *others):
        if tensor.dtype != torch.float32 or not tensor.is_cpu or type(tensor) not in PLAIN:
            return False
    return True


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float, added: Tensor | None = None
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows 1"]]:
    """weight x / rms(x), and 1 / rms(x). `weight` may have a row for each head. What is `added` goes into `x` first."""
    x, stride, inner = _lay_out(x)
    out, scales = torch.empty(x.shape), torch.empty((*x.shape[:-1], 1))
    heads = weight.shape[0] if weight.dim() > 1 else 1
    assert added is None or added.is_contiguous()
    shape = (scales.numel(), inner, x.shape[-1])
    call("rms_norm", x, stride, added, weight, heads, eps, out, scales, *shape)
    return out, scales


def rms_norm_backward(
    grad: Float[Tensor, "*rows size"],
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, " size"],
    scales: Float[Tensor, "*rows 1"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, " size"]]:
    """The gradients of x and weight."""
    x, stride, inner = _lay_out(x)
    grad, to_x = grad.contiguous(), torch.empty(x.shape)
    parts = min(torch.get_num_threads(), scales.numel())
    to_weight = torch.empty(parts, x.shape[-1])
    shape = (parts, scales.numel(), inner, x.shape[-1])
    call("rms_norm_backward", grad, x, stride, weight, scales, to_x, to_weight, *shape)
    return to_x, to_weight.sum(0)


def rotate(
    x: Float[Tensor, "tokens heads dim"],
    cos: Float[Tensor, "tokens 1 dim"],
    sin: Float[Tensor, "tokens 1 dim"],
    back: bool = False,
) -> Float[Tensor, "tokens heads dim"]:
    """Both halves of every head turned by the angles of its token, forth or back."""
    x, stride, heads = _lay_out(x)
    out = torch.empty(x.shape)
    call("rotate", x, stride, cos, sin, -1.0 if back else 1.0, out, x.shape[0], heads, x.shape[2])
    return out


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up, of contiguous rows or of columns of a wider matrix."""
    out = torch.empty(gate.shape)
    call("swiglu", gate, gate.stride(0), up, up.stride(0), out, *gate.shape)
    return out


def swiglu_backward(
    grad: Float[Tensor, "rows size"], gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    to_gate, to_up = torch.empty(gate.shape), torch.empty(gate.shape)
    call("swiglu_backward", grad, gate, up, to_gate, to_up, *gate.shape)
    return to_gate, to_up


def softmax_(scores: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """The softmax of every row, in place; numbers of minus infinity behind a row's end change no bit."""
    assert scores.is_contiguous()
    call("softmax", scores, scores.numel() // scores.shape[-1], scores.shape[-1])
    return scores


class PackedWeight:
    """The weight [outputs, inputs] of a product, fp32 or bf16, as the kernels read it; fp32 goes in and comes out.

    Sums are taken over `block` inputs at a time, as oneDNN takes them where that is known. A weight that is `paired`,
    a gate's and then as many of what it gates, can do that too. With `rounded`, what bf16 is multiplied with may be
    rounded to bf16 itself, where the processor is twice as fast then; in one sum over all inputs.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs inputs"],
        block: int | None = None,
        paired: bool = False,
        rounded: bool = False,
    ) -> None:
        kernels = library()
        assert kernels is not None and weight.dtype in (torch.float32, torch.bfloat16)
        self.outputs, self.inputs = weight.shape
        self.format, self.kind = FP32, PAIRED if paired else ONE_BY_ONE
        if weight.dtype == torch.bfloat16:
            self.format = DOTS if rounded and kernels.has_dots() and self.inputs % 2 == 0 else BF16
        self.block = self.inputs if self.format == DOTS else block or find_block(self.inputs) or self.inputs
        self.data = torch.empty(kernels.packed_size(*weight.shape, self.kind), dtype=weight.dtype)
        call("pack", weight.contiguous(), self.data, *weight.shape, self.format, self.kind)
        panel = kernels.packed_size(1, 1, ONE_BY_ONE)
        of_row = self.inputs // 2 if self.format == DOTS else 0
        self.scratch = (panel * self.inputs if self.format == BF16 else LANES, of_row + (panel if paired else 0))
        """Numbers that each thread needs: for a panel that is widened; for each row, rounded, and pairs not gated."""

    def __call__(
        self, x: Float[Tensor, "rows inputs"], bias: Tensor | None = None, gated: bool = False
    ) -> Float[Tensor, "rows outputs_or_half"]:
        """y = x weight^T + bias; `gated`: silu(first half of y) second half of y."""
        assert self.kind == PAIRED or not gated
        kernels = library()
        assert kernels is not None
        x, bias = x.contiguous(), None if bias is None else bias.float()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty(rows, self.outputs // 2 if gated else self.outputs)
        scratch = torch.empty(threads, self.scratch[0] + self.scratch[1] * min(rows, kernels.most_rows(threads)))
        shape, kind = (rows, self.outputs, self.inputs), GATED if gated else self.kind
        settings = (self.format, kind, threads)
        call("linear", x, self.data, bias, self.block, out, scratch, scratch.shape[1], *shape, *settings)
        return out


def takes_heads(size: int) -> bool:
    """Whether a step of decoding knows heads of this size."""
    return size % LANES == 0 and size <= MOST_SIZE


@cache
def has_bf16_unit() -> bool:
    """Whether the processor has a unit for matrices in bf16, which oneDNN uses and these kernels do not."""
    return "amx_bf16" in _processor()


def arithmetic_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What numbers kept in `dtype` are computed in: fp32 for bf16 on a CPU that would have to emulate it.

    Weights, keys and values are rounded to bf16 then; products of such numbers, and all between, are not.
    """
    return torch.float32 if dtype == torch.bfloat16 and device.type == "cpu" and not has_bf16_unit() else dtype


@cache
def find_block(inputs: int) -> int | None:
    """After how many inputs oneDNN, which the trainer multiplies with, begins a sum anew; None where none fits.

    It is tried, because it depends on the processor: at most 512 of up to 1,024 inputs on a Xeon.
    """
    draw = torch.Generator().manual_seed(inputs)
    x, weight = torch.randn(33, inputs, generator=draw), torch.randn(96, inputs, generator=draw)
    expected = linear.packed_linear(x, linear.pack_weight(weight))
    for block in (inputs, 1024, 768, 512, 384, 256, 192, 128, 64):
        if block <= inputs and torch.equal(PackedWeight(weight, block)(x), expected):
            return block
    return None


def call(name: str, *arguments: Any) -> None:
    """A kernel by name; a tensor is handed over by its address."""
    kernels = library()
    assert kernels is not None
    torch.get_num_threads()  # tells OpenMP, which keeps a number for each thread, what torch was told
    getattr(kernels, name)(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def _lay_out(x: Float[Tensor, "*rows size"]) -> tuple[Tensor, int, int]:
    """x as kernels read it, the stride of its outer rows, and how many inner rows follow each other in each of them."""
    if not (x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        x = x.contiguous()
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x, x.stride(0) if x.dim() == 3 else inner * x.shape[-1], inner
