"""Logits to label log-probs and entropies; from hidden states in chunks, so that the full logits are never stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rollouts.kernels.linear import input_gradient, linear, linear_wide, weight_gradient, widens
from rollouts.kernels.log_softmax import log_softmax
from rollouts.kernels.select import HeadKernels, find_head_kernels
from rollouts.training.numerics import count_chunks
from rollouts.training.sampling_support import Support

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOGITS_PER_CHUNK, GPU_LOGITS_PER_CHUNK, FUSED_LOGITS_PER_CHUNK = 1 << 24, 1 << 26, 1 << 27
"""Logits computed at once in fp32; more tokens are processed in chunks.

64 MiB on a CPU; 256 MiB on a GPU, where products need more rows; 512 MiB with the GPU kernels, which need no copy but
the gradient in the model's precision.
"""

MAX_SAVED_CHUNKS = 4
"""Chunks of log-probs stored for the backward pass without kernels; of more tokens they are recomputed."""

CPU_LOGITS_BYTES = 1 << 28
"""Bytes of the logits that are computed at once with the kernels of a CPU, which need no copy of them."""


@dataclass(frozen=True)
class VocabPart:
    """Vocabulary-parallel output head: this rank has the rows from `start`, the ranks of `group` have the others.

    Softmax needs one maximum and three sums per token over the ranks, never the other ranks' logits.
    """

    start: int
    widest: int
    """Largest number of rows of any rank; it determines the chunks on all ranks."""
    group: ProcessGroup

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce sum, in place."""
        torch.distributed.all_reduce(values, group=self.group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """All-reduce maximum, in place."""
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.group)
        return values

    def local_rows(self, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Row of each label in this part (0 for labels of other parts), and whether the label is in this part."""
        mine = (labels >= self.start) & (labels < self.start + rows)
        return torch.where(mine, labels - self.start, 0), mine


def compute_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    temperature: Float[Tensor, " tokens"],
    support: Support | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each label under softmax(logits / temperature), and the entropy of that distribution (no gradient).

    With truncated sampling, both are over the `support` of each label. Computed in fp32 and in the sampler's order of
    operations: both agree bit for bit.
    """
    table = _log_softmax(logits, temperature, support=support)
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
    return table.gather(-1, labels[:, None]).squeeze(-1), entropy


def compute_head_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, " tokens"],
    temperature: Float[Tensor, " tokens"],
    logits_per_chunk: int | None = None,
    cap: float | None = None,
    part: VocabPart | None = None,
    support: Support | None = None,
    *,
    rounded: bool = False,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`compute_logprobs` of `hidden @ weight.T`, both results with gradients, in bounded memory.

    With `cap`, logits are first replaced by cap tanh(logits / cap). Forward and backward store about
    `logits_per_chunk` logits at a time (None: a number for the device). Between them stay the logits of a single chunk
    on a CPU, or without kernels the log-probs of up to MAX_SAVED_CHUNKS chunks in fp32; of more the backward recomputes
    the logits. On a CPU the bits do not depend on the number of chunks. If `weight` is a `part` of the head, all ranks
    of its group pass the same tokens and get the same results; the gradient of `hidden` is summed over the group.
    `rounded`: products are those of `rollouts.kernels.linear`.
    """
    kernels = find_head_kernels(hidden, weight) if cap is None and part is None and support is None else None
    if kernels is not None:
        copies = 2 if rounded else 1  # of the gradient, in bf16
        default = FUSED_LOGITS_PER_CHUNK if hidden.is_cuda else CPU_LOGITS_BYTES // hidden.itemsize // copies
        size = logits_per_chunk or default
        return _FusedHeadLogprobs.apply(hidden, weight, labels, temperature, size, kernels, rounded)  # type: ignore[no-untyped-call]
    size = logits_per_chunk or _default_chunk(hidden)
    return _HeadLogprobs.apply(hidden, weight, labels, temperature, size, cap, part, support, rounded)  # type: ignore[no-untyped-call]


def compute_head_table(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    temperature: Float[Tensor, " tokens"],
    ids: Int[Tensor, "tokens k"] | None = None,
    logits_per_chunk: int | None = None,
    cap: float | None = None,
    *,
    rounded: bool = False,
    has_rest: bool = True,
) -> Float[Tensor, "tokens outcomes"]:
    """Log-probs of `hidden @ weight.T` over the vocabulary, with a gradient; in chunks, recomputed for the backward.

    With `ids`, over k + 1 outcomes: these tokens, then the sum of all others. The ids of a token must be distinct and
    fewer than the vocabulary, unless `has_rest` is false, which leaves out the sum. `cap` and `rounded` as for
    `compute_head_logprobs`.
    """
    if ids is not None and has_rest and ids.shape[-1] >= weight.shape[0]:
        raise ValueError(f"{ids.shape[-1]} outcomes of {weight.shape[0]} tokens leave no others: omit ids")
    num = count_chunks(len(hidden), weight.shape[0], logits_per_chunk or _default_chunk(hidden))
    rows = zip(*(x.tensor_split(num) for x in (hidden, temperature)), strict=True)
    chosen = [None] * num if ids is None else ids.tensor_split(num)
    parts = [
        _table(h, weight, t, i, cap, rounded, has_rest)
        if num == 1
        else checkpoint(_table, h, weight, t, i, cap, rounded, has_rest, use_reentrant=False, preserve_rng_state=False)
        for (h, t), i in zip(rows, chosen, strict=True)
    ]
    return torch.cat(parts)


def _table(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    ids: Tensor | None,
    cap: float | None,
    rounded: bool,
    has_rest: bool,
) -> Tensor:
    table = _log_softmax(_multiply(hidden, weight, rounded), temperature, cap)
    if ids is None:
        return table
    if not has_rest:
        return table.gather(-1, ids)
    # log(1 - sum) would lose all precision where the others have little mass.
    others = table.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((table.gather(-1, ids), others), -1)


def compute_label_logprobs(
    logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Log-prob of each label, in fp32 or better; 0 for the ignored label -100."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels have shape {list(labels.shape)}, logits {list(logits.shape)}: they must agree")
    rows = torch.where(labels == -100, 0, labels)
    logprobs = log_softmax(_wide(logits)).gather(-1, rows[..., None]).squeeze(-1)
    return logprobs.masked_fill(labels == -100, 0.0)


def compute_entropy(logits: Float[Tensor, "batch seq vocab"]) -> Float[Tensor, "batch seq"]:
    """Entropy of each position's distribution, in nats."""
    logprobs = torch.log_softmax(_wide(logits), dim=-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def _multiply(hidden: Tensor, weight: Tensor, rounded: bool) -> Tensor:
    """Logits, with gradients; on a GPU in fp32 at least."""
    return linear_wide(hidden, weight) if widens(hidden) else linear(hidden, weight, rounded=rounded)


def _default_chunk(hidden: Tensor) -> int:
    return GPU_LOGITS_PER_CHUNK if hidden.is_cuda else LOGITS_PER_CHUNK


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in fp32 at least; None: unchanged."""
    return logits if cap is None else cap * torch.tanh(_wide(logits) / cap)


def _log_softmax(
    logits: Tensor,
    temperature: Tensor,
    cap: float | None = None,
    part: VocabPart | None = None,
    support: Support | None = None,
) -> Tensor:
    table = _normalize(_wide(cap_logits(logits, cap)) / temperature[:, None], part)
    if support is None:
        return table
    return support.renormalize(table, lambda chosen: _normalize(chosen, part), 0 if part is None else part.start)


def _normalize(scaled: Tensor, part: VocabPart | None) -> Tensor:
    if part is None:
        return log_softmax(scaled)
    scaled = scaled - part.max(scaled.amax(-1, keepdim=True))
    return scaled - part.sum(scaled.exp().sum(-1, keepdim=True)).log()


def _of_label(table: Tensor, labels: Tensor, part: VocabPart | None) -> Tensor:
    if part is None:
        return table.gather(-1, labels[:, None]).squeeze(-1)
    rows, mine = part.local_rows(labels, table.shape[-1])
    return part.sum(torch.where(mine, table.gather(-1, rows[:, None]).squeeze(-1), 0.0))


class _HeadLogprobs(torch.autograd.Function):
    """Log-probs and entropies of labels under a linear head.

    With z = h W^T / T, p = softmax(z), l = log p and H the entropy, for the label y:

        d l_y / d z = onehot(y) - p         d H / d z = -p (l + H)

    Over a support, p is 0 for the excluded tokens, and so are both derivatives. A cap c of the logits u multiplies both
    by d (c tanh(u / c)) / d u = 1 - tanh(u / c)^2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: Tensor,
        logits_per_chunk: int,
        cap: float | None,
        part: VocabPart | None,
        support: Support | None,
        rounded: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, vocab = len(labels), weight.shape[0] if part is None else part.widest
        ctx.part, ctx.support, ctx.rounded = part, support, rounded
        ctx.num_chunks = count_chunks(num_tokens, vocab, logits_per_chunk)
        ctx.set_materialize_grads(False)
        ctx.cap = cap
        logprobs, entropies = [], []
        keeps = cap is None and ctx.num_chunks <= MAX_SAVED_CHUNKS
        tables: list[Tensor] = []
        supports = _split_support(support, ctx.num_chunks)
        for (h, y, t), chosen in zip(_chunks(ctx.num_chunks, hidden, labels, temperature), supports, strict=True):
            table = _log_softmax(_multiply(h, weight, rounded), t, cap, part, chosen)
            tables += [table] if keeps else []
            logprobs.append(_of_label(table, y, part))
            own = -table.exp().mul_(table).sum(-1)
            entropies.append(own if part is None else part.sum(own))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, labels, temperature, entropy, *tables)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, labels, temperature, entropy, *tables = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None and of_entropy is None:
            return (None,) * 9
        part: VocabPart | None = ctx.part
        of_logprob = torch.zeros_like(entropy) if of_logprob is None else of_logprob

        def differentiate() -> Iterator[Tensor]:
            """The gradients of the logits."""
            chunks = _chunks(ctx.num_chunks, hidden, labels, temperature, entropy, of_logprob, of_entropy)
            supports = _split_support(ctx.support, ctx.num_chunks)
            for i, ((h, y, t, e, g, entropy_grad), chosen) in enumerate(zip(chunks, supports, strict=True)):
                logits = None if tables else _multiply(h, weight, ctx.rounded)
                table = tables[i] if logits is None else _log_softmax(logits, t, ctx.cap, part, chosen)
                g = g / t
                scale = -g[:, None]
                if entropy_grad is not None:
                    scale = scale - (entropy_grad / t)[:, None] * (table + e[:, None])
                of_logits = table.exp().mul_(scale)
                if part is not None:
                    y, mine = part.local_rows(y, weight.shape[0])
                    g = torch.where(mine, g, 0.0)
                of_logits.scatter_add_(-1, y[:, None], g[:, None])
                if ctx.cap is not None and logits is not None:
                    of_logits *= 1 - torch.tanh(_wide(logits) / ctx.cap).square()
                of_logits = of_logits.to(hidden.dtype)
                yield of_logits

        grad_hidden, grad_weight = _propagate(
            differentiate(), hidden, weight, ctx.needs_input_grad, bool(tables), ctx.rounded
        )
        if grad_hidden is not None and part is not None:
            part.sum(grad_hidden)
        return grad_hidden, grad_weight, *(None,) * 7


class _FusedHeadLogprobs(torch.autograd.Function):
    """`_HeadLogprobs` of a whole head with kernels that read the logits once, in the forward and the backward pass.

    On a CPU, where the product takes most of the time, the logits of a single chunk are kept between both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: Tensor,
        logits_per_chunk: int,
        kernels: HeadKernels,
        rounded: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.num_chunks = count_chunks(len(labels), weight.shape[0], logits_per_chunk)
        ctx.kernels, ctx.rounded = kernels, rounded
        ctx.set_materialize_grads(False)
        results = []
        for h, y, t in _chunks(ctx.num_chunks, hidden, labels, temperature):
            logits = _multiply(h, weight, rounded)
            results.append(kernels.head_forward(logits, y, t))
            ctx.logits = logits if hidden.is_cpu and ctx.num_chunks == 1 else None
        logprobs, entropy, norms = (torch.cat(chunks) for chunks in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, labels, temperature, norms, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, labels, temperature, norms, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        if of_logprob is None and of_entropy is None:
            return (None,) * 7
        of_logprob = torch.zeros_like(entropy) if of_logprob is None else of_logprob
        kept, ctx.logits = ctx.logits, None  # overwritten: a second backward pass computes them again
        rounded, is_whole = ctx.rounded, ctx.num_chunks == 1
        of_logits = (
            ctx.kernels.head_backward(_multiply(h, weight, rounded) if kept is None else kept, *rest, hidden.dtype)
            for h, *rest in _chunks(ctx.num_chunks, hidden, labels, temperature, norms, entropy, of_logprob, of_entropy)
        )
        return *_propagate(of_logits, hidden, weight, ctx.needs_input_grad, is_whole, rounded), *(None,) * 5


def _propagate(
    of_logits: Iterable[Tensor], hidden: Tensor, weight: Tensor, needs: tuple[bool, ...], joins: bool, rounded: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden states and weight, if needed, from those of the logits in chunks.

    `joins`: the chunks are joined for the weight, since they fit in memory together.
    """
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight: Tensor | None = None
    # Accumulated over chunks in fp32: bfloat16 would round after every chunk.
    wide = torch.promote_types(weight.dtype, torch.float32)
    kept: list[Tensor] = []
    done = 0
    for chunk in of_logits:
        rows = slice(done, done + len(chunk))
        if grad_hidden is not None:
            grad_hidden[rows] = input_gradient(chunk, weight.to(hidden.dtype), rounded=rounded)
        if needs[1] and joins:
            kept.append(chunk)
        elif needs[1]:
            share = weight_gradient(chunk, hidden[rows], rounded=rounded)
            grad_weight = share.to(wide) if grad_weight is None else grad_weight.add_(share)
        done = rows.stop
        del chunk  # else it would stay in memory while the next one is computed
    if kept:
        grad_weight = weight_gradient(torch.cat(kept) if len(kept) > 1 else kept[0], hidden, rounded=rounded)
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _chunks(num: int, *streams: Tensor | None) -> Any:
    """The streams split into `num` nearly equal chunks, zipped; None stays None."""
    return zip(*([None] * num if stream is None else stream.tensor_split(num) for stream in streams), strict=True)


def _split_support(support: Support | None, num: int) -> list[Support] | list[None]:
    return [None] * num if support is None else support.split(num)
