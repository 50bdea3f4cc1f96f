"""CPU kernels by tensors: RMSNorm, RoPE, SwiGLU, softmax, attention, sampling, and products with packed weights.

They call the C functions of `rollouts.kernels.native`; see `library` there for machines without a compiler.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rollouts.kernels import huge_pages, native, onednn
from rollouts.kernels.native import (
    BF16,
    DOTS,
    FP32,
    GATED,
    INT8,
    LANES,
    MAX_HEAD_DIM,
    ONE_BY_ONE,
    PAIRED,
    CausalStruct,
    ShapeStruct,
)

PLAIN = (Tensor, nn.Parameter)
QUERY_ROWS = 96
"""Query rows (positions times heads of a key head) whose scores `causal_attention` holds at once."""
MANY_KEYS = 2048
"""Beyond so many keys it holds a third of the rows, so that their scores stay in the CPU cache."""


def runs_here(x: Tensor, *others: Tensor, narrow: bool = False) -> bool:
    """Whether the kernels support these tensors: plain fp32 on a CPU, outside of `torch.compile`.

    With `narrow`, for the kernels that have it, also bf16 in rows of whole vectors.
    """
    if torch.compiler.is_compiling() or native.library() is None:
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
    native.call("rms_norm", x, stride, added, weight.float(), heads, eps, out, scales, *shape, _is_narrow(x))
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
    native.call("rms_norm_backward", grad, x, stride, wide, scales, grad_x, grad_weight, *shape, _is_narrow(x))
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
    native.call("rotate", x, stride, cos, sin, sign, out, x.shape[0], heads, x.shape[2], _is_narrow(x))
    return out


def swiglu(gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]) -> Float[Tensor, "rows size"]:
    """silu(gate) up; the inputs may be column slices of a wider matrix."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    native.call("swiglu", gate, gate.stride(0), up, up.stride(0), out, *gate.shape, _is_narrow(gate))
    return out


def swiglu_backward(
    grad: Float[Tensor, "rows size"], gate: Float[Tensor, "rows size"], up: Float[Tensor, "rows size"]
) -> tuple[Float[Tensor, "rows size"], Float[Tensor, "rows size"]]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(gate)
    native.call("swiglu_backward", grad, gate, up, grad_gate, grad_up, *gate.shape, _is_narrow(gate))
    return grad_gate, grad_up


def _is_narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def softmax_(scores: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Row-wise softmax in place; padding a row with minus infinity changes no bit."""
    assert scores.is_contiguous()
    native.call("softmax", scores, scores.numel() // scores.shape[-1], scores.shape[-1])
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
    native.call("causal_attention", ctypes.addressof(shape), *inputs, *memory, log_sums)
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
    kernels = native.library()
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
    native.call("paged_attention", ctypes.addressof(shape), *inputs, *memory)
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
    native.call("store_in_pages", k, k.stride(0), v, v.stride(0), blocks, blocks.shape[1], places, *k.shape, narrow)


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
    kernels = native.library()
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
    native.call("causal_attention_backward", ctypes.addressof(shape), *inputs, scratch, dq, dk, dv)
    return dq, dk, dv


def log_softmax(x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
    """Log-softmax over the last dimension, with sums in fp64."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    native.call("log_softmax", x, out, x.numel() // size, size)
    return out


def sample(
    logits: Float[Tensor, "rows vocab"], noise: Float[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """A token of each row and its log-prob, with the bits of `log_softmax`; the logits are read, not changed.

    It is the first token whose cumulative probability exceeds `noise` (fp64), or the most likely one if that is -1.
    """
    logits = logits.contiguous()
    tokens, logprobs = torch.empty(len(logits), dtype=torch.long), torch.empty(len(logits))
    native.call("sample", logits, noise.contiguous(), tokens, logprobs, *logits.shape)
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
    native.call("head_forward", logits, *inputs, logprobs, entropy, norms, rows, vocab, _is_narrow(logits))
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
    native.call("head_backward", logits, *inputs, logits, *logits.shape, _is_narrow(logits))
    return logits


def top(x: Float[Tensor, "rows size"], num: int) -> tuple[Float[Tensor, "rows num"], Int[Tensor, "rows num"]]:
    """The `num` largest values of each row in descending order, and their places; of equal ones the first."""
    x, num = x.contiguous(), min(num, x.shape[1])
    values, places = torch.empty(len(x), num), torch.empty(len(x), num, dtype=torch.long)
    native.call("top", x, num, values, places, *x.shape)
    return values, places


def filter_logprobs_(
    logprobs: Float[Tensor, "rows vocab"],
    min_p: Float[Tensor, " rows"],
    top_k: Int[Tensor, " rows"],
    top_p: Float[Tensor, " rows"],
) -> None:
    """Set log-probs to minus infinity by `min_p`, `top_k` (0: all) and then `top_p`, which counts what is left."""
    assert logprobs.is_contiguous()
    native.call("filter_rows", logprobs, min_p.log(), top_k, top_p, *logprobs.shape)


def transpose_rounded(x: Float[Tensor, "rows columns"], width: int) -> Float[Tensor, "columns width"]:
    """The transpose in bf16, with zeros up to `width`, on a CPU with instructions for bf16."""
    out = torch.empty(x.shape[1], width, dtype=torch.bfloat16)
    native.call("transpose_rounded", x.contiguous(), out, *x.shape, width)
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
        kernels = native.library()
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
        native.call("pack", weight.contiguous(), self.data, *weight.shape, self.format, self.kind)

    def unpack(self) -> Float[Tensor, "outputs inputs"]:
        """The weight that was packed last; not of int8, which has lost its precision."""
        assert self.format != INT8
        weight = torch.empty(self.outputs, self.inputs, dtype=self.dtype)
        native.call("unpack", self.data, weight, *weight.shape, self.format, self.kind)
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
    kernels = native.library()
    assert kernels is not None
    x, bias = x.contiguous(), None if bias is None else bias.float()
    rows, threads = x.shape[0], torch.get_num_threads()
    out = torch.empty(rows, size[0] // 2 if kind == GATED else size[0])
    if not rows:
        return out
    memory = torch.empty(threads, scratch[0] + scratch[1] * min(rows, kernels.max_rows_at_once(threads)))
    native.call("linear", x, packed, bias, block, out, memory, memory.shape[1], rows, *size, format, kind, threads)
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
    kernels = native.library()
    assert kernels is not None and x.dtype == weight.dtype == torch.float32
    outputs, inputs = reversed(weight.shape) if turned else weight.shape
    width = kernels.packed_inputs(inputs, DOTS)
    memory.resize_(kernels.packed_size(outputs, width, ONE_BY_ONE))
    native.call("pack_rounded", weight.contiguous(), memory, outputs, inputs, turned)
    return _multiply_packed(x, memory, bias, inputs, (outputs, inputs), DOTS, ONE_BY_ONE, (LANES, width // 2))


def max_rank() -> int:
    """Largest rank of a LoRA delta; 0 without kernels."""
    kernels = native.library()
    return 0 if kernels is None else int(kernels.max_rank())


def supports_head_dim(size: int) -> bool:
    """Whether the decode step supports heads of this size."""
    return size % LANES == 0 and size <= MAX_HEAD_DIM


def run_scratch_size(shape: ShapeStruct, columns: int) -> int:
    """Floats that a thread needs where AMX computes the attention of rows to up to `columns` columns in common."""
    kernels = native.library()
    return 0 if kernels is None else int(kernels.run_scratch_size(ctypes.addressof(shape), columns))


def decode_work_size(shape: ShapeStruct, widest: int, rows: int) -> int:
    """Floats of the activations of a decode step, of at most `widest` per row."""
    kernels = native.library()
    assert kernels is not None
    return int(kernels.decode_work_size(ctypes.addressof(shape), widest, rows))


def supports_rounded_queries(dim: int) -> bool:
    """Whether the scores of a bf16 cache can be bf16 dot products."""
    kernels = native.library()
    return kernels is not None and bool(kernels.has_dots()) and dim % (2 * LANES) == 0


def name_bf16_instructions() -> str:
    """The instructions that compute `rounded` products, by the name that Linux gives them: their bits differ."""
    kernels = native.library()
    if kernels is None or not kernels.has_dots():
        return ""
    return "amx_bf16" if kernels.uses_amx() else "avx512_bf16"


@cache
def has_bf16_products() -> bool:
    """Whether oneDNN's bf16 products are faster than those in fp32: measured 2 times with AVX512_BF16."""
    return any(name in native.processor() for name in ("avx512_bf16", "amx_bf16"))


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


def flatten_rows(x: Float[Tensor, "*rows size"]) -> tuple[Tensor, int, int]:
    """x with contiguous inner rows, the stride of its outer rows, and the number of inner rows in each."""
    if not (x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        x = x.contiguous()
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x, x.stride(0) if x.dim() == 3 else inner * x.shape[-1], inner
