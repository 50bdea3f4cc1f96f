"""Forward and backward passes of several requests in one pack, each with the bits that it has alone.

Frozen weights have no gradient, so a row's gradient depends on other rows only through attention and through sums over
rows. Attention, loss, and the gradients of an adapter's matrices are computed for each request over its own rows, in
the shapes that they have alone; all other operations are row by row and batch-invariant (`rollouts.training.numerics`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from prime_rl.trainer.forward import compute_head
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.multi_lora import AdapterTable
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.training_api.losses import INPUTS, LOSSES, check_loss
from prime_rl.training_api.wire import Datum, PassRequest
from rollouts.training.numerics import MIN_TOKENS
from rollouts.training.rl_losses import compute_head_table

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class PassResult:
    """Log-probs of the targets of every datum, in the shape of its targets, and the loss summed over all tokens."""

    logprobs: list[Tensor]
    loss: float


@dataclass(eq=False)
class RunningPass:
    """A pass of one adapter, and the micro-batches that are left, as indices of its data."""

    name: str
    request: PassRequest
    inputs: list[Inputs]
    loss_config: dict[str, float]
    parts: deque[list[int]]
    _logprobs: list[Tensor] = field(default_factory=list)
    _loss: float = 0.0

    @property
    def next_size(self) -> int:
        """Tokens of the next micro-batch."""
        return sum(len(self.request.data[i].tokens) for i in self.parts[0])

    @property
    def result(self) -> PassResult:
        """The result of a finished pass."""
        assert not self.parts
        return PassResult(self._logprobs, self._loss)

    def add(self, logprobs: Sequence[Tensor], loss: Tensor) -> None:
        """Store the results of the next micro-batch."""
        self.parts.popleft()
        self._logprobs += [x.detach() for x in logprobs]
        self._loss += float(loss.detach())


def start_pass(name: str, request: PassRequest, vocab: int, max_len: int, micro_batch_tokens: int) -> RunningPass:
    """Validate a pass and split it into micro-batches; `ValueError` in the words of the client."""
    config = check_loss(request.loss_fn, request.loss_config)
    if not request.data:
        raise ValueError("forward_backward needs at least one datum")
    inputs = [check_datum(d, request.loss_fn, f"data[{i}]", vocab, max_len) for i, d in enumerate(request.data)]
    parts: deque[list[int]] = deque([[]])
    size = 0
    for i, datum in enumerate(request.data):
        if parts[-1] and size + len(datum.tokens) > micro_batch_tokens:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += len(datum.tokens)
    return RunningPass(name, request, inputs, config, parts)


def check_datum(datum: Datum, loss_fn: str, where: str, vocab: int, max_len: int) -> Inputs:
    """The tensors of the loss; `ValueError` in the words of the client."""
    num = len(datum.tokens)
    if not 1 <= num <= max_len:
        raise ValueError(f"{where}.model_input has {num} tokens; this model takes 1 to {max_len}")
    if not 0 <= min(datum.tokens) <= max(datum.tokens) < vocab:
        raise ValueError(f"{where}.model_input has a token id outside of the vocabulary of {vocab}")
    given = {name: torch.from_numpy(array.copy()) for name, array in datum.inputs.items()}
    targets = given.get("target_tokens")
    if targets is None or targets.dtype != torch.int64:
        raise ValueError(f"{where}: loss_fn_inputs needs target_tokens as int64")
    if targets.dim() not in (1, 2) or len(targets) != num:
        raise ValueError(f"{where}.target_tokens has shape {list(targets.shape)}, model_input {num} tokens")
    lowest = 0 if targets.dim() == 1 else -1
    if targets.numel() and not lowest <= int(targets.min()) <= int(targets.max()) < vocab:
        raise ValueError(f"{where}.target_tokens has a token id outside of the vocabulary of {vocab}")
    if unknown := sorted(given.keys() - {"target_tokens", *INPUTS[loss_fn]}):
        raise ValueError(f"{where}: loss_fn_inputs.{unknown[0]} is not an input of {loss_fn}")
    if loss_fn == "cross_entropy":
        given.setdefault("weights", torch.ones(targets.shape) if datum.listed is None else torch.tensor(datum.listed))
    for name in INPUTS[loss_fn]:
        if name not in given:
            raise ValueError(f"{where}: {loss_fn} needs loss_fn_inputs.{name}")
        if given[name].shape != targets.shape:
            raise ValueError(f"{where}.{name} has shape {list(given[name].shape)}, not {list(targets.shape)}")
    if loss_fn == "gspo" and not given["sequence_ratio_mask"].any():
        raise ValueError(f"{where}.sequence_ratio_mask has no token other than 0: gspo needs their mean")
    return given


class SeparateAttention:
    """Attention of each micro-batch of a pack by itself."""

    def __init__(self, lengths: Sequence[list[int]]) -> None:
        self._sizes = [sum(each) for each in lengths]
        self._attends = [PackedAttention(each, "cpu", "exact") for each in lengths]

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "tokens heads dim"],
        k: Float[Tensor, "tokens kv_heads dim"],
        v: Float[Tensor, "tokens kv_heads dim"],
        window: int | None = None,
    ) -> Float[Tensor, "tokens heads dim"]:
        rows = zip(self._attends, *(x.split(self._sizes) for x in (q, k, v)), strict=True)
        outs = [attend(layer, *own, window) for attend, *own in rows]
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def compute_pack(model: CausalLM, table: AdapterTable, passes: Sequence[RunningPass]) -> None:
    """Compute the next micro-batch of every pass, of different adapters; all with backward pass, or none."""
    backward = not passes[0].request.forward_only
    assert all(p.request.forward_only != backward for p in passes) and len({p.name for p in passes}) == len(passes)
    ids: list[int] = []
    positions: list[int] = []
    lengths: list[list[int]] = []
    for p in passes:
        data = [p.request.data[i].tokens for i in p.parts[0]]
        lengths.append([len(tokens) for tokens in data])
        padding = max(MIN_TOKENS - sum(lengths[-1]), 0)
        if padding:  # a sequence of its own
            data, lengths[-1] = [*data, [0] * padding], [*lengths[-1], padding]
        ids += [token for tokens in data for token in tokens]
        positions += [i for tokens in data for i in range(len(tokens))]
    ends = torch.tensor([0, *(sum(each) for each in lengths)]).cumsum(0).tolist()
    slices = {p.name: place for p, place in zip(passes, itertools.pairwise(ends), strict=True)}
    with torch.set_grad_enabled(backward):
        with table.route_slices(slices):
            hidden = model(torch.tensor(ids), torch.tensor(positions), SeparateAttention(lengths))
        logprobs = [_compute_logprobs(model, hidden[slice(*slices[p.name])], p) for p in passes]
        losses = [_compute_loss(p, own) for p, own in zip(passes, logprobs, strict=True)]
    if backward:
        torch.autograd.backward(losses)
    for p, own, loss in zip(passes, logprobs, losses, strict=True):
        p.add(own, loss)


def _compute_loss(running: RunningPass, logprobs: Sequence[Tensor]) -> Tensor:
    loss_fn, config = LOSSES[running.request.loss_fn], running.loss_config
    inputs = ({name: _as_float(x, logprobs[0]) for name, x in running.inputs[i].items()} for i in running.parts[0])
    return torch.stack([loss_fn(x, own, config) for x, own in zip(logprobs, inputs, strict=True)]).sum()


def _as_float(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype) if x.is_floating_point() else x


def _compute_logprobs(model: CausalLM, hidden: Float[Tensor, "rows hidden"], running: RunningPass) -> list[Tensor]:
    """Log-probs of the targets of the data of the next micro-batch, whose rows are `hidden`, and perhaps padding."""
    targets = [running.inputs[i]["target_tokens"] for i in running.parts[0]]
    lengths = [len(each) for each in targets]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    results: list[Tensor | None] = [None] * len(targets)
    flat = [i for i, each in enumerate(targets) if each.dim() == 1]
    if flat:
        own = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in flat])
        labels = torch.zeros(len(hidden), dtype=torch.long)
        labels[own] = torch.cat([targets[i] for i in flat])
        temperature = torch.ones(len(hidden), dtype=hidden.dtype)
        logprobs, _ = compute_head(hidden, own, labels, temperature, model, Mesh())
        for i, part in zip(flat, logprobs.split([lengths[i] for i in flat]), strict=True):
            results[i] = part
    rows = (hidden[start:end] for start, end in itertools.pairwise(starts))
    pairs = zip(results, targets, rows, strict=True)
    return [_compute_many(model, x, each) if known is None else known for known, each, x in pairs]


def _compute_many(
    model: CausalLM, hidden: Float[Tensor, "tokens hidden"], targets: Tensor
) -> Float[Tensor, "tokens targets"]:
    """Log-probs of several targets per row; 0 for the target -1."""
    temperature = torch.ones(len(hidden), dtype=hidden.dtype)
    weight, cap = model.lm_head.weight, model.config.logit_cap
    logprobs = compute_head_table(hidden, weight, temperature, targets.clamp(min=0), cap=cap, has_rest=False)
    return logprobs.masked_fill(targets < 0, 0.0)
