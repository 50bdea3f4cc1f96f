"""fp32 CPU kernels in C (`cpu.c`): RMSNorm, RoPE, SwiGLU, softmax, attention, GEMM, and a fused decode step.

They are compiled on first use by the machine's C compiler (a few seconds) and cached in the user's cache directory.
Without a compiler, `library` logs one warning and callers fall back to torch operations, which are slower and differ in
the last bits; all processes of a machine take the same path.
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
from jaxtyping import Float, Int
from torch import Tensor, nn

from rollouts.kernels import huge_pages, onednn
from rollouts.kernels.build_cache import user_cache_dir

SOURCE = Path(__file__).with_suffix(".c")
OFF = "ROLLOUTS_NATIVE"
"""Environment variable: 0 disables the kernels."""

FLAGS = "-O3 -march=native -ffp-contract=off -fno-math-errno -std=gnu11 -fPIC -Wno-psabi".split()
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


DELTA_ROWS = 4
"""As in `cpu.c`: rows of an adapter that are computed at once."""


class ShapeStruct(ctypes.Structure):
    """`Shape` of `cpu.c`."""

    _fields_ = [
        (name, _I)
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "size", "inner", "vocab"),
            *("block_hidden", "block_heads", "block_inner"),
            *("narrow", "dots", "format", "threads", "scratch_size", "shared_offset"),
        )
    ]


LAYER_FIELDS = (
    *("norm", "qk_norm", "mlp_norm", "qkv", "out", "gate_up", "down"),
    *("qkv_bias", "out_bias", "gate_up_bias", "down_bias"),
)


class LayerStruct(ctypes.Structure):
    """`Layer` of `cpu.c`: addresses, None for NULL, and whether queries and keys are rotated."""

    _fields_ = [*((name, _P) for name in LAYER_FIELDS), ("has_rope", _I)]


class CausalStruct(ctypes.Structure):
    """`Causal` of `cpu.c`."""

    _fields_ = [
        (name, _I)
        for name in (
            *("seqs", "rows", "heads", "kv_heads", "keys", "size"),
            *(
                "query_stride",
                "seq_stride",
                "key_stride",
                "head_stride",
                "window",
                "block",
                "scratch_size",
                "threads",
                "dots",
                "narrow",
            ),
        )
    ]


class DeltaStruct(ctypes.Structure):
    """`Delta` of `cpu.c`."""

    _fields_ = [("rank", _I), ("width", _I), ("block", _I), ("scale", ctypes.c_double), ("matrices", _P)]


SIGNATURES = {
    "rms_norm": [_P, _I, _P, _P, _I, _F, _P, _P, _I, _I, _I, _I],
    "rms_norm_backward": [_P, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I],
    "rotate": [_P, _I, _P, _P, _F, _P, _I, _I, _I, _I],
    "swiglu": [_P, _I, _P, _I, _P, _I, _I, _I],
    "swiglu_backward": [_P, _P, _P, _P, _P, _I, _I, _I],
    "softmax": [_P, _I, _I],
    "causal_attention": [_P] * 9,
    "paged_attention": [_P, _P, _P, _I, *[_P] * 6],
    "store_in_pages": [_P, _I, _P, _I, _P, _I, _P, _I, _I, _I, _I],
    "causal_attention_backward": [_P] * 12,
    "log_softmax": [_P, _P, _I, _I],
    "sample": [_P, _P, _P, _P, _I, _I],
    "head_forward": [_P, _P, _P, _P, _P, _P, _I, _I, _I],
    "head_backward": [_P, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I],
    "top": [_P, _I, _P, _P, _I, _I],
    "filter_rows": [_P, _P, _P, _P, _I, _I],
    "pack": [_P, _P, _I, _I, _I, _I],
    "unpack": [_P, _P, _I, _I, _I, _I],
    "pack_rounded": [_P, _P, _I, _I, _I],
    "transpose_rounded": [_P, _P, _I, _I, _I],
    "linear": [_P, _P, _P, _I, _P, _P, _I, _I, _I, _I, _I, _I, _I],
    "add_deltas": [_P, _P, _I, _I, _P, _I, _I, _P, _I, _I, _I],
    "decode": [_P, _P, _P, _P, _P, _F, _P, _P, _P, _P, _P, _I, _P, _P, _I, _P, _P, _I, _P, _I, _P, _P, _I],
}
STRUCTS = {
    "shape_struct_size": ShapeStruct,
    "layer_struct_size": LayerStruct,
    "causal_struct_size": CausalStruct,
    "delta_struct_size": DeltaStruct,
}
"""Functions of `cpu.c` that return the size of a struct, and our declaration of it."""
PLAIN = (Tensor, nn.Parameter)
LANES = 16
"""Floats of the widest vector (AVX-512). `cpu.c` uses 8 on other CPUs, so buffers padded to 16 fit both."""
QUERY_ROWS = 96
"""Query rows (positions times heads of a key head) whose scores `causal_attention` holds at once."""
MANY_KEYS = 2048
"""Beyond so many keys it holds a third of the rows, so that their scores stay in the CPU cache."""
KEYS, MAX_HEAD_DIM = 128, 256
"""As in `cpu.c`: keys per block of the cache, largest head."""
FP32, BF16, DOTS, INT8 = range(4)
"""As in `cpu.c`: element format of a packed weight."""
ONE_BY_ONE, PAIRED, GATED = range(3)
"""As in `cpu.c` (`ONE_BY_ONE` is its `PLAIN`): layout of the outputs of a packed weight."""

_logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one warning, if they cannot be compiled. `RuntimeError` for other structs."""
    if os.environ.get(OFF) == "0":
        return None
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        _logger.warning("no C compiler found: norms and decoding run as single torch operations, which is slower")
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(shlex.split(compiler))))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        _logger.warning("%s cannot compile %s, torch's operations are used: %s", compiler, SOURCE.name, reason)
        return None
    _check_struct_sizes(loaded)
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    loaded.packed_size.argtypes, loaded.packed_size.restype = [_I, _I, _I], _I
    loaded.max_rows_at_once.argtypes, loaded.max_rows_at_once.restype = [_I], _I
    loaded.packed_keys_size.argtypes, loaded.packed_keys_size.restype = [_I, _I], _I
    loaded.packed_inputs.argtypes, loaded.packed_inputs.restype = [_I, _I], _I
    loaded.enable_amx.argtypes, loaded.enable_amx.restype = [_I], _I
    loaded.uses_amx.argtypes, loaded.uses_amx.restype = [], _I
    loaded.quantized_size.argtypes, loaded.quantized_size.restype = [_I, _I], _I
    loaded.backward_scratch_size.argtypes, loaded.backward_scratch_size.restype = [_P], _I
    loaded.run_scratch_size.argtypes, loaded.run_scratch_size.restype = [_P, _I], _I
    loaded.decode_work_size.argtypes, loaded.decode_work_size.restype = [_P, _I, _I], _I
    loaded.max_rank.argtypes, loaded.max_rank.restype = [], _I
    loaded.has_dots.argtypes, loaded.has_dots.restype = [], ctypes.c_int
    _enable_amx(loaded)
    return loaded


def _check_struct_sizes(loaded: Any) -> None:
    """Raise `RuntimeError` if a struct has another size in C than in Python: calls would read wrong memory."""
    for name, declared in STRUCTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [], _I
        size, expected = function(), ctypes.sizeof(declared)
        if size != expected:
            raise RuntimeError(
                f"{declared.__name__} has {expected} bytes in {Path(__file__).name} but {size} in {SOURCE.name}: "
                "declare the same fields in both"
            )


def _enable_amx(loaded: Any) -> None:
    """Use AMX for bf16 and int8 products if they equal those by other instructions, and do not depend on the batch."""
    if not loaded.enable_amx(1):
        if "amx_bf16" in _processor():
            _logger.info("the system or the compiler does not support AMX: products use AVX-512")
        return
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(37, 200, generator=draw), torch.randn(70, 200, generator=draw)
    for format, operand in ((DOTS, weight.bfloat16()), (INT8, weight)):
        found, alone = (_multiply(loaded, rows, operand, format) for rows in (x, x[:5]))
        loaded.enable_amx(0)
        expected = _multiply(loaded, x, operand, format)
        is_right = torch.allclose(found, expected, rtol=0, atol=1e-3) and torch.equal(alone, found[:5])
        if not is_right or (format == INT8 and not torch.equal(found, expected)):
            _logger.warning("AMX products of this CPU are wrong, so they are not used: please report this")
            return
        loaded.enable_amx(1)


def _multiply(loaded: Any, x: Tensor, weight: Tensor, format: int) -> Tensor:
    """x weight^T by `loaded`, which may not be `library` yet."""
    (rows, inputs), outputs = x.shape, len(weight)
    size = loaded.packed_size(outputs, loaded.packed_inputs(inputs, format), ONE_BY_ONE)
    packed, scratch, out = torch.zeros(size, dtype=torch.int16), torch.zeros(2 * x.numel()), torch.zeros(rows, outputs)
    loaded.pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs, format, ONE_BY_ONE)
    tensors = (x.data_ptr(), packed.data_ptr(), None, inputs, out.data_ptr(), scratch.data_ptr())
    loaded.linear(*tensors, scratch.numel(), rows, outputs, inputs, format, ONE_BY_ONE, 1)
    return out


def _compiled(compiler: list[str]) -> Path:
    """The library for this source, compiler and CPU; compiled unless it is cached."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    flags = [*compiler[1:], *FLAGS, *_share_threads()]
    made_of = [SOURCE.read_text(), str(flags), str(program), str(program.stat().st_mtime_ns), _processor()]
    home = user_cache_dir("rollouts")
    path = home / f"native-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=home) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of a run compiles, the others wait
        if path.exists():
            return path
        compiled, linked = Path(work) / "native.o", Path(work) / "native.so"
        # Link no library: torch has loaded all that is needed, and a second OpenMP runtime must not be loaded.
        link = ["-shared", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-nostdlib"]
        for step in ([*flags, "-c", "-o", compiled, SOURCE], [*link, "-o", linked, compiled]):
            subprocess.run([str(program), *map(str, step)], check=True, capture_output=True, text=True)
        os.replace(linked, path)
    return path


def _share_threads() -> list[str]:
    """The flag for OpenMP if torch's thread pool can be shared; a second pool would compete for the cores."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    pools = sorted({line[line.index("/") :] for line in lines if "/libgomp" in line})
    if len(pools) != 1:
        return []
    ctypes.CDLL(pools[0], mode=ctypes.RTLD_GLOBAL)  # resolves the symbols of the kernels
    return ["-fopenmp"]


def _processor() -> str:
    """CPU features, which `-march=native` compiles for."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.is_file():
        return f"{sys.platform} {os.uname().machine}"
    return next((line for line in cpus.read_text().splitlines() if line.startswith(("flags", "Features"))), "")


def runs_here(x: Tensor, *others: Tensor, narrow: bool = False) -> bool:
    """Whether the kernels support these tensors: plain fp32 on a CPU, outside of `torch.compile`.

    With `narrow`, for the kernels that have it, also bf16 in rows of whole vectors.
    """
    if torch.compiler.is_compiling() or library() is None:
        return False
    if narrow and x.dtype == torch.bfloat16:
        if x.shape[-1] % (2 * LANES):
            return False
    elif x.dtype != torch.float32:
        return False
    for tensor in (x, *others):
        if tensor.dtype != x.dtype or not tensor.is_cpu or type(tensor) not in PLAIN:
            return False
    return True


def rms_norm(
    x: Float[Tensor, "*rows size"], weight: Float[Tensor, "*heads size"], eps: float, added: Tensor | None = None
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, "*rows 1"]]:
    """weight x / rms(x), and 1 / rms(x) in fp32. `weight` may have a row per head. `added` is added to `x` in place."""
    x, stride, inner = flatten_rows(x)
    out, scales = torch.empty(x.shape, dtype=x.dtype), torch.empty((*x.shape[:-1], 1))
    heads = weight.shape[0] if weight.dim() > 1 else 1
    assert added is None or added.is_contiguous()
    shape = (scales.numel(), inner, x.shape[-1])
    call("rms_norm", x, stride, added, weight.float(), heads, eps, out, scales, *shape, _is_narrow(x))
    return out, scales


def rms_norm_backward(
    grad: Float[Tensor, "*rows size"],
    x: Float[Tensor, "*rows size"],
    weight: Float[Tensor, " size"],
    scales: Float[Tensor, "*rows 1"],
) -> tuple[Float[Tensor, "*rows size"], Float[Tensor, " size"]]:
    """The gradients of x and weight."""
    x, stride, inner = flatten_rows(x)
    grad, grad_x = grad.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    parts = min(torch.get_num_threads(), scales.numel())
    grad_weight = torch.empty(parts, x.shape[-1])
    shape = (parts, scales.numel(), inner, x.shape[-1])
    wide = weight.float()
    call("rms_norm_backward", grad, x, stride, wide, scales, grad_x, grad_weight, *shape, _is_narrow(x))
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def rotate(
    x: Float[Tensor, "tokens heads dim"],
    cos: Float[Tensor, "tokens 1 dim"],
    sin: Float[Tensor, "tokens 1 dim"],
    back: bool = False,
) -> Float[Tensor, "tokens heads dim"]:
    """RoPE of every head by the angles of its token; `back` is the inverse."""
    x, stride, heads = flatten_rows(x)
    out, cos, sin = torch.empty(x.shape, dtype=x.dtype), cos.float(), sin.float()
    sign = -1.0 if back else 1.0
    call("rotate", x, stride, cos, sin, sign, out, x.shape[0], heads, x.shape[2], _is_narrow(x))
    return out


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up; the inputs may be column slices of a wider matrix."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    call("swiglu", gate, gate.stride(0), up, up.stride(0), out, *gate.shape, _is_narrow(gate))
    return out


def swiglu_backward(
    grad: Float[Tensor, "rows size"], gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    call("swiglu_backward", grad, gate, up, grad_gate, grad_up, *gate.shape, _is_narrow(gate))
    return grad_gate, grad_up


def _is_narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def softmax_(scores: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Row-wise softmax in place; padding a row with minus infinity changes no bit."""
    assert scores.is_contiguous()
    call("softmax", scores, scores.numel() // scores.shape[-1], scores.shape[-1])
    return scores


def causal_attention(
    q: Float[Tensor, "seqs rows heads dim"],
    k: Float[Tensor, "seqs keys kv_heads dim"],
    v: Float[Tensor, "seqs keys kv_heads dim"],
    starts: Int[Tensor, " seqs"],
    window: int | None = None,
    rounded: bool = False,
) -> tuple[Float[Tensor, "seqs rows heads dim"], Float[Tensor, "seqs heads rows"]]:
    """Attention of row r of sequence s to the keys up to position `starts[s] + r`, and the log-sum-exp of its scores.

    The bits of the decode step for every position. `keys` is a multiple of LANES, `dim` as in `supports_head_dim`;
    k and v have equal strides. Memory is linear in `keys`. `rounded`: queries, scaled, are rounded to bf16, as k is
    already; see `supports_rounded_queries`.
    """
    assert k.stride() == v.stride()
    strides = (k.stride(0), k.stride(1), k.stride(2))
    q = _in_one_row(q)
    shape, *memory = _allocate(q, k.shape[1], k.shape[2], strides, window, rounded)
    log_sums = torch.empty(q.shape[0], q.shape[2], q.shape[1])
    inputs = (q, k, v, starts.contiguous())
    call("causal_attention", ctypes.addressof(shape), *inputs, *memory, log_sums)
    return memory[-1], log_sums


def _in_one_row(q: Float[Tensor, "seqs rows heads dim"]) -> Float[Tensor, "seqs rows heads dim"]:
    """q, copied unless all of its positions have equal distances in memory, as in a joint projection of q, k and v."""
    rows, dim, stride = q.shape[1], q.shape[3], q.stride()
    in_one = len(q) == 1 or stride[0] == rows * stride[1]
    return q if in_one and stride[2:] == (dim, 1) else q.contiguous()


def _allocate(
    q: Float[Tensor, "seqs rows heads dim"],
    keys: int,
    kv_heads: int,
    strides: tuple[int, int, int],
    window: int | None,
    rounded: bool,
    narrow: bool = False,
) -> tuple[CausalStruct, Tensor, Tensor, Tensor]:
    """The struct of an attention call, and memory for packed keys, scratch and output."""
    kernels = library()
    assert kernels is not None and keys % LANES == 0
    (seqs, rows, heads, dim), group, threads = q.shape, q.shape[2] // kv_heads, torch.get_num_threads()
    block = max(1, QUERY_ROWS // (1 if keys <= MANY_KEYS else 3) // group)
    scratch = torch.empty(threads, block * group * (2 * dim + keys))
    sizes = (seqs, rows, heads, kv_heads, keys, dim, q.stride(1), *strides, window or 0, block)
    packed = torch.empty(seqs * kv_heads, kernels.packed_keys_size(keys, dim))
    return CausalStruct(*sizes, scratch.shape[1], threads, rounded, narrow), packed, scratch, torch.empty(q.shape)


def paged_attention(
    q: Float[Tensor, "seqs rows heads dim"],
    blocks: Int[Tensor, "2 blocks"],
    pages: Int[Tensor, "blocks seqs"],
    counts: Int[Tensor, " seqs"],
    starts: Int[Tensor, " seqs"],
    keys: int,
    kv_heads: int,
    *,
    narrow: bool,
    window: int | None = None,
    rounded: bool = False,
) -> Float[Tensor, "seqs rows heads dim"]:
    """`causal_attention` with keys and values in a cache.

    `blocks` has the addresses of its blocks of keys, then of values, `[pages, kv_heads, KEYS, dim]` in bf16 (`narrow`)
    or fp32; `pages`, in int32, has the page of each sequence in each block. Sequence s has `counts[s]` positions, and
    at most `keys`, a multiple of LANES.
    """
    assert pages.dtype == torch.int32 and all(x.is_contiguous() for x in (blocks, pages, counts, starts))
    q = _in_one_row(q)
    shape, *memory = _allocate(q, keys, kv_heads, (0, 0, 0), window, rounded, narrow)
    inputs = (q, blocks, blocks.shape[1], pages, counts, starts)
    call("paged_attention", ctypes.addressof(shape), *inputs, *memory)
    return memory[-1]


def store_in_pages(
    k: Float[Tensor, "tokens kv_heads dim"],
    v: Float[Tensor, "tokens kv_heads dim"],
    blocks: Int[Tensor, "2 blocks"],
    places: Int[Tensor, "3 tokens"],
    *,
    narrow: bool,
) -> None:
    """Write keys and values to `places`: the block (negative: nowhere), page and position of each token.

    `blocks` and `narrow` as for `paged_attention`.
    """
    assert blocks.is_contiguous() and places.is_contiguous() and places.shape == (3, len(k))
    k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
    call("store_in_pages", k, k.stride(0), v, v.stride(0), blocks, blocks.shape[1], places, *k.shape, narrow)


def causal_attention_backward(
    grad: Float[Tensor, "seqs rows heads dim"],
    q: Float[Tensor, "seqs rows heads dim"],
    k: Float[Tensor, "seqs keys kv_heads dim"],
    v: Float[Tensor, "seqs keys kv_heads dim"],
    out: Float[Tensor, "seqs rows heads dim"],
    log_sums: Float[Tensor, "seqs heads rows"],
    starts: Int[Tensor, " seqs"],
    window: int | None = None,
    rounded: bool = False,
) -> tuple[Float[Tensor, "seqs rows heads dim"], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The gradients of q, k and v of `causal_attention`; memory linear in `keys` (FlashAttention, 2205.14135)."""
    kernels = library()
    assert kernels is not None and k.stride() == v.stride()
    (seqs, rows, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    threads, block = torch.get_num_threads(), max(1, QUERY_ROWS // (heads // kv_heads))
    strides = (k.stride(0), k.stride(1), k.stride(2))
    q = _in_one_row(q)
    sizes = (seqs, rows, heads, kv_heads, keys, dim, q.stride(1), *strides, window or 0, block, 0, threads)
    shape = CausalStruct(*sizes, rounded, 0)
    shape.scratch_size = kernels.backward_scratch_size(ctypes.addressof(shape))
    scratch = torch.empty(threads, shape.scratch_size)
    dq, dk, dv = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    inputs = (grad.contiguous(), q, k, v, out, log_sums, starts.contiguous())
    call("causal_attention_backward", ctypes.addressof(shape), *inputs, scratch, dq, dk, dv)
    return dq, dk, dv


def log_softmax(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Log-softmax over the last dimension, with sums in fp64."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    call("log_softmax", x, out, x.numel() // size, size)
    return out


def sample(
    logits: Float[Tensor, "rows vocab"], noise: Float[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """A token of each row and its log-prob, with the bits of `log_softmax`; the logits are read, not changed.

    It is the first token whose cumulative probability exceeds `noise` (fp64), or the most likely one if that is -1.
    """
    logits = logits.contiguous()
    tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
    call("sample", logits, noise.contiguous(), tokens, logprobs, *logits.shape)
    return tokens, logprobs


def head_forward(
    logits: Float[Tensor, "rows vocab"], labels: Int[Tensor, " rows"], temperature: Float[Tensor, " rows"]
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, "rows 2"]]:
    """Log-prob of each label under softmax(logits / temperature), entropy, and what normalizes each row, all in fp32.

    Logits in fp32 or bf16 (see `runs_here`) are read once. `IndexError` for a label outside of the vocabulary.
    """
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < vocab:
        raise IndexError(f"labels are from {int(labels.min())} to {int(labels.max())}, the vocabulary has {vocab}")
    (logprobs, entropy), norms = torch.empty(2, rows), torch.empty(rows, 2)
    inputs = (labels.contiguous(), temperature.float().contiguous())
    call("head_forward", logits, *inputs, logprobs, entropy, norms, rows, vocab, _is_narrow(logits))
    return logprobs, entropy, norms


def head_backward(
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, " rows"],
    temperature: Float[Tensor, " rows"],
    norms: Float[Tensor, "rows 2"],
    entropy: Float[Tensor, " rows"],
    of_logprob: Float[Tensor, " rows"],
    of_entropy: Float[Tensor, " rows"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "rows vocab"]:
    """The gradient of the logits, which it overwrites, from those of the log-probs and entropies of `head_forward`."""
    assert logits.is_contiguous() and logits.dtype == dtype
    slopes = [None if grad is None else grad.float().contiguous() for grad in (of_logprob, of_entropy)]
    inputs = (labels.contiguous(), temperature.float().contiguous(), norms, entropy.contiguous(), *slopes)
    call("head_backward", logits, *inputs, logits, *logits.shape, _is_narrow(logits))
    return logits


def top(x: Float[Tensor, "rows size"], num: int) -> tuple[Float[Tensor, "rows num"], Int[Tensor, "rows num"]]:
    """The `num` largest values of each row in descending order, and their places; of equal ones the first."""
    x, num = x.contiguous(), min(num, x.shape[1])
    values, places = torch.empty(len(x), num), torch.empty(len(x), num, dtype=torch.long)
    call("top", x, num, values, places, *x.shape)
    return values, places


def filter_logprobs_(
    logprobs: Float[Tensor, "rows vocab"],
    min_p: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
) -> None:
    """Set log-probs to minus infinity by `min_p`, `top_k` (0: all) and then `top_p`, which counts what is left."""
    assert logprobs.is_contiguous()
    call("filter_rows", logprobs, min_p.log(), top_k, top_p, *logprobs.shape)


def transpose_rounded(x: Float[Tensor, "rows columns"], width: int) -> Float[Tensor, "columns width"]:
    """The transpose in bf16, with zeros up to `width`, on a CPU with instructions for bf16."""
    out = torch.empty(x.shape[1], width, dtype=torch.bfloat16)
    call("transpose_rounded", x.contiguous(), out, *x.shape, width)
    return out


class PackedWeight:
    """A weight [outputs, inputs] in fp32, bf16 or int8, packed for the kernels; activations and outputs are fp32.

    Sums are blocked by `block` inputs, by default as in oneDNN. A `paired` weight (gate rows, then as many up rows)
    supports `gated`. With `rounded`, activations may be rounded to bf16 for a bf16 weight, which is twice as fast on
    CPUs with AVX512_BF16; the sum is then not blocked, only those of adapters are. `quantized` rounds an fp32 weight,
    and activations, to int8.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs inputs"],
        block: int | None = None,
        paired: bool = False,
        rounded: bool = False,
        quantized: bool = False,
    ) -> None:
        kernels = library()
        assert kernels is not None and weight.dtype in (torch.float32, torch.bfloat16)
        self.outputs, self.inputs = weight.shape
        self.format, self.kind, self.dtype = INT8 if quantized else FP32, PAIRED if paired else ONE_BY_ONE, weight.dtype
        if weight.dtype == torch.bfloat16:
            self.format = DOTS if rounded and kernels.has_dots() else BF16
        self.block = block or find_block(self.inputs) or self.inputs
        width = kernels.packed_inputs(self.inputs, self.format)
        dtype = torch.int8 if quantized else weight.dtype
        size = kernels.packed_size(self.outputs, width, self.kind)
        self.data = huge_pages.empty(size, dtype)
        self.update(weight)
        panel = kernels.packed_size(1, 1, ONE_BY_ONE)
        of_row = {DOTS: width // 2, INT8: kernels.quantized_size(self.inputs, 0) // 4}.get(self.format, 0)
        self.scratch = (panel * self.inputs if self.format == BF16 else LANES, of_row + (panel if paired else 0))
        """Scratch elements per thread (a widened panel), and per thread and row (rounded activations, paired sums)."""

    def update(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        """Pack another weight of this shape and dtype into the same memory."""
        assert weight.is_cpu and weight.shape == (self.outputs, self.inputs) and weight.dtype == self.dtype
        call("pack", weight.contiguous(), self.data, *weight.shape, self.format, self.kind)

    def unpack(self) -> Float[Tensor, "outputs inputs"]:
        """The weight that was packed last; not of int8, which has lost its precision."""
        assert self.format != INT8
        weight = torch.empty(self.outputs, self.inputs, dtype=self.dtype)
        call("unpack", self.data, weight, *weight.shape, self.format, self.kind)
        return weight

    def __call__(
        self, x: Float[Tensor, "rows inputs"], bias: Tensor | None = None, gated: bool = False
    ) -> Float[Tensor, "rows outputs_or_half"]:
        """y = x weight^T + bias; `gated`: silu(first half of y) second half of y."""
        assert self.kind == PAIRED or not gated
        kind, size = GATED if gated else self.kind, (self.outputs, self.inputs)
        return _multiply_packed(x, self.data, bias, self.block, size, self.format, kind, self.scratch)


def _multiply_packed(
    x: Float[Tensor, "rows inputs"],
    packed: Tensor,
    bias: Tensor | None,
    block: int,
    size: tuple[int, int],
    format: int,
    kind: int,
    scratch: tuple[int, int],
) -> Float[Tensor, "rows outputs_or_half"]:
    """As `PackedWeight`, whose outputs and inputs are `size`."""
    kernels = library()
    assert kernels is not None
    x, bias = x.contiguous(), None if bias is None else bias.float()
    rows, threads = x.shape[0], torch.get_num_threads()
    out = torch.empty(rows, size[0] // 2 if kind == GATED else size[0])
    if not rows:
        return out
    memory = torch.empty(threads, scratch[0] + scratch[1] * min(rows, kernels.max_rows_at_once(threads)))
    call("linear", x, packed, bias, block, out, memory, memory.shape[1], rows, *size, format, kind, threads)
    return out


def multiply_rounded(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Tensor | None,
    memory: Tensor,
    *,
    turned: bool = False,
) -> Float[Tensor, "rows outputs"]:
    """The bits of a `rounded` `PackedWeight` on a CPU with instructions for bf16, for a single product.

    The weight, in fp32, is packed in `memory`, which is resized. `turned`: it is [inputs, outputs].
    """
    kernels = library()
    assert kernels is not None and x.dtype == weight.dtype == torch.float32
    outputs, inputs = reversed(weight.shape) if turned else weight.shape
    width = kernels.packed_inputs(inputs, DOTS)
    memory.resize_(kernels.packed_size(outputs, width, ONE_BY_ONE))
    call("pack_rounded", weight.contiguous(), memory, outputs, inputs, turned)
    return _multiply_packed(x, memory, bias, inputs, (outputs, inputs), DOTS, ONE_BY_ONE, (LANES, width // 2))


def max_rank() -> int:
    """Largest rank of a LoRA delta; 0 without kernels."""
    kernels = library()
    return 0 if kernels is None else int(kernels.max_rank())


def supports_head_dim(size: int) -> bool:
    """Whether the decode step supports heads of this size."""
    return size % LANES == 0 and size <= MAX_HEAD_DIM


def run_scratch_size(shape: ShapeStruct, columns: int) -> int:
    """Floats that a thread needs where AMX computes the attention of rows to up to `columns` columns in common."""
    kernels = library()
    return 0 if kernels is None else int(kernels.run_scratch_size(ctypes.addressof(shape), columns))


def decode_work_size(shape: ShapeStruct, widest: int, rows: int) -> int:
    """Floats of the activations of a decode step, of at most `widest` per row."""
    kernels = library()
    assert kernels is not None
    return int(kernels.decode_work_size(ctypes.addressof(shape), widest, rows))


def supports_rounded_queries(dim: int) -> bool:
    """Whether the scores of a bf16 cache can be bf16 dot products."""
    kernels = library()
    return kernels is not None and bool(kernels.has_dots()) and dim % (2 * LANES) == 0


def name_bf16_instructions() -> str:
    """The instructions that compute `rounded` products, by the name that Linux gives them: their bits differ."""
    kernels = library()
    if kernels is None or not kernels.has_dots():
        return ""
    return "amx_bf16" if kernels.uses_amx() else "avx512_bf16"


@cache
def has_bf16_products() -> bool:
    """Whether oneDNN's bf16 products are faster than those in fp32: measured 2 times with AVX512_BF16."""
    return any(name in _processor() for name in ("avx512_bf16", "amx_bf16"))


def arithmetic_dtype(dtype: torch.dtype, device: torch.device, exact: bool = True) -> torch.dtype:
    """Compute dtype of torch operations for weights stored in `dtype`: on a CPU fp32 for bf16.

    Then weights, keys and values are rounded to bf16, and all arithmetic is in fp32. Without `exact`, a CPU with
    instructions for bf16 products computes in bf16.
    """
    widens = dtype == torch.bfloat16 and device.type == "cpu" and (exact or not has_bf16_products())
    return torch.float32 if widens else dtype


@cache
def find_block(inputs: int) -> int | None:
    """Inputs per partial sum of oneDNN, which the trainer uses; None if no candidate reproduces its bits.

    Measured, because it depends on the CPU: on a Xeon at most 512 of up to 1,024 inputs.
    """
    draw = torch.Generator().manual_seed(inputs)
    x, weight = torch.randn(33, inputs, generator=draw), torch.randn(96, inputs, generator=draw)
    expected = onednn.packed_linear(x, onednn.pack_weight(weight))
    for block in (inputs, 1024, 768, 512, 384, 256, 192, 128, 64):
        if block <= inputs and torch.equal(PackedWeight(weight, block)(x), expected):
            return block
    return None


def call(name: str, *arguments: Any) -> None:
    """Call a kernel by name; tensors are passed by address."""
    kernels = library()
    assert kernels is not None
    torch.get_num_threads()  # applies torch's setting to OpenMP in this thread
    getattr(kernels, name)(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])


def flatten_rows(x: Float[Tensor, "*rows size"]) -> tuple[Tensor, int, int]:
    """x with contiguous inner rows, the stride of its outer rows, and the number of inner rows in each."""
    if not (x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        x = x.contiguous()
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x, x.stride(0) if x.dim() == 3 else inner * x.shape[-1], inner
