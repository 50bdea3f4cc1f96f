"""CPU kernels in C (`kernels.c`): norms, RoPE, SwiGLU, attention, sampling, packed products, and a decode step.

They are compiled on first use by the machine's C compiler (a few seconds) and cached in the user's cache directory.
Without a compiler, `library` logs one warning and callers fall back to torch operations, which are slower and differ in
the last bits; all processes of a machine take the same path. `rollouts.kernels.cpu` calls them with tensors.
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
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.kernels.build_cache import user_cache_dir

SOURCE = Path(__file__).with_name("kernels.c")
OFF = "ROLLOUTS_NATIVE"
"""Environment variable: 0 disables the kernels."""

FLAGS = "-O3 -march=native -ffp-contract=off -fno-math-errno -std=gnu11 -fPIC -Wno-psabi".split()
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

DELTA_ROWS = 4
"""As in C: rows of an adapter that are computed at once."""


class ShapeStruct(ctypes.Structure):
    """The struct `Shape` in C."""

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
    """The struct `Layer` in C: addresses, None for NULL, and whether queries and keys are rotated."""

    _fields_ = [*((name, _P) for name in LAYER_FIELDS), ("has_rope", _I)]


class CausalStruct(ctypes.Structure):
    """The struct `Causal` in C."""

    _fields_ = [
        (name, _I)
        for name in (
            *("seqs", "rows", "heads", "kv_heads", "keys", "size"),
            *("query_stride", "seq_stride", "key_stride", "head_stride"),
            *("window", "block", "scratch_size", "threads", "dots", "narrow"),
        )
    ]


class DeltaStruct(ctypes.Structure):
    """The struct `Delta` in C."""

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
"""Arguments of C functions without a result."""
NUMBERS = {
    "packed_size": [_I, _I, _I],
    "packed_inputs": [_I, _I],
    "packed_keys_size": [_I, _I],
    "quantized_size": [_I, _I],
    "max_rows_at_once": [_I],
    "max_rank": [],
    "has_threads": [],
    "enable_amx": [_I],
    "uses_amx": [],
    "backward_scratch_size": [_P],
    "run_scratch_size": [_P, _I],
    "decode_work_size": [_P, _I, _I],
}
"""Arguments of C functions that return an int64_t."""
STRUCTS = {
    "shape_struct_size": ShapeStruct,
    "layer_struct_size": LayerStruct,
    "causal_struct_size": CausalStruct,
    "delta_struct_size": DeltaStruct,
}
"""C functions that return the size of a struct, and our declaration of it."""
LANES = 16
"""Floats of the widest vector (AVX-512). C has 8 on other CPUs, so buffers padded to 16 fit both."""
KEYS, MAX_HEAD_DIM = 128, 256
"""As in C: keys per block of the cache, largest head."""
FP32, BF16, DOTS, INT8 = range(4)
"""As in C: element format of a packed weight."""
ONE_BY_ONE, PAIRED, GATED = range(3)
"""As in C (`ONE_BY_ONE` is its `PLAIN`): layout of the outputs of a packed weight."""

_logger = logging.getLogger(__name__)
_loading = threading.Lock()
"""Held while the kernels are loaded: `_enable_amx` switches AMX off and on, and other threads must not compute then."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, after one warning, if they cannot be compiled. `RuntimeError` for other structs."""
    with _loading:
        return _load()


@cache  # as well: a thread that has waited takes what the other one has loaded
def _load() -> ctypes.CDLL | None:
    if os.environ.get(OFF) == "0":
        return None
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc", "clang"]
    compiler = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if compiler is None:
        _logger.warning(
            "no C compiler found (%s): norms and decoding run as single torch operations, which is slower",
            ", ".join(names),
        )
        return None
    try:
        loaded = _open_library(shlex.split(compiler))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()
        _logger.warning("%s cannot compile %s, torch's operations are used: %s", compiler, SOURCE.name, reason)
        return None
    except OSError as error:
        _logger.warning(
            "cannot store or load the compiled %s, torch's operations are used; XDG_CACHE_HOME sets the directory: %s",
            SOURCE.name,
            error,
        )
        return None
    _check_struct_sizes(loaded)
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    for name, arguments in NUMBERS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _I
    loaded.has_dots.argtypes, loaded.has_dots.restype = [], ctypes.c_int
    if not loaded.has_threads():
        _logger.warning("the CPU kernels use one thread: more need gcc (here: %s) and torch's own libgomp", compiler)
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
                f"{declared.__name__} has {expected} bytes in Python but {size} in C: declare the same fields in both"
            )


def _enable_amx(loaded: Any) -> None:
    """Use AMX for bf16 and int8 products if they equal those by other instructions, and do not depend on the batch."""
    if not loaded.enable_amx(1):
        if "amx_bf16" in processor():
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


def _open_library(compiler: list[str]) -> ctypes.CDLL:
    """The library for this source, compiler and CPU; compiled unless it is cached."""
    command = [shutil.which(compiler[0]) or compiler[0], *compiler[1:]]
    program = Path(command[0]).resolve()  # to be run by the given name, though: a link to ccache names the compiler
    flags = [*FLAGS, *_share_threads()]
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    made_of = [source.read_text() for source in sources]
    made_of += [str(command), str(flags), str(program), str(program.stat().st_mtime_ns), processor()]
    home = user_cache_dir("rollouts")
    path = home / f"native-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}.so"
    with suppress(OSError):  # missing or damaged
        return ctypes.CDLL(str(path))
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (home / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=home) as work:
        with suppress(OSError):  # without locks, each process compiles
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of a run compiles, the others wait
        with suppress(OSError):
            return ctypes.CDLL(str(path))
        compiled, linked = Path(work) / "native.o", Path(work) / "native.so"
        # Link no library: torch has loaded all that is needed, and a second OpenMP runtime must not be loaded.
        link = ["-shared", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared", "-nostdlib"]
        for step in ([*flags, "-c", "-o", compiled, SOURCE], [*link, "-o", linked, compiled]):
            subprocess.run([*command, *map(str, step)], check=True, capture_output=True, text=True)
        with linked.open("rb") as file:
            os.fsync(file.fileno())  # before it gets its name, or that of an empty file could outlast a power loss
        os.replace(linked, path)
    return ctypes.CDLL(str(path))


def _share_threads() -> list[str]:
    """The flag for OpenMP if torch's thread pool can be shared; a second pool would compete for the cores."""
    maps = Path("/proc/self/maps")
    pool = _find_pool(maps.read_text()) if maps.is_file() else None
    if pool is None:
        return []
    ctypes.CDLL(pool, mode=ctypes.RTLD_GLOBAL)  # resolves the symbols of the kernels
    return ["-fopenmp"]


def _find_pool(maps: str) -> str | None:
    """The libgomp of torch among the files that this process has loaded; scikit-learn, for one, brings another."""
    pools = sorted({line[line.index("/") :] for line in maps.splitlines() if "/libgomp" in line})
    if len(pools) > 1:
        pools = [pool for pool in pools if Path(pool).is_relative_to(Path(torch.__file__).resolve().parent)]
    return next(iter(pools), None)


def processor() -> str:
    """CPU features, which `-march=native` compiles for."""
    cpus = Path("/proc/cpuinfo")
    if not cpus.is_file():
        return f"{sys.platform} {os.uname().machine}"
    return next((line for line in cpus.read_text().splitlines() if line.startswith(("flags", "Features"))), "")


def call(name: str, *arguments: Any) -> None:
    """Call a kernel by name; tensors are passed by address."""
    kernels = library()
    assert kernels is not None
    torch.get_num_threads()  # applies torch's setting to OpenMP in this thread
    getattr(kernels, name)(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
