"""Samples to micro-batches: label shift, packing and load balancing over ranks; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from rollouts.training.numerics import MIN_TOKENS, round_up
from rollouts.training.prefix_tree import order_by_prefix
from rollouts.training.sampling_support import Support, join_supports
from rollouts.training.transfers import send
from rollouts.training.types import Sample, TeacherTable

T = TypeVar("T")

QUADRATIC_COST = 1 / 12288
"""Attention FLOPs per token pair over matrix-product FLOPs per token: 1 / (12 hidden size), here for 1024."""

UNITS = ("token", "sequence", "observation")
"""Units over which losses average, see `MicroBatch.count`."""

MIN_SHARED_FRACTION = 0.1
"""Samples and packs that share a smaller fraction of their tokens share none, because indexing costs time."""

MAX_RECOMPUTED = 1 / 4
"""Maximum cost of the beginning of a part of a prefix tree, of the part's, where a tree is cut to balance ranks."""

SHARED_SIZE = 1 / 8
"""Memory of a shared token, whose keys and values each sequence gathers, over that of a token that is computed."""

MIN_BALANCE_GAIN = 0.02
"""Least decrease of the cost of the busiest rank, of the mean cost, for which samples leave their prefix tree."""

FILLER = 16
"""Maximum length of a padding sequence: many short ones need less attention compute than a long one."""


@dataclass
class MicroBatch:
    """Complete sequences packed into one row of tokens; every stream is aligned to `labels`.

        tokens of two samples    5 9 7 3 | 4 6
        input_ids                5 9 7 3   4 6
        positions                0 1 2 3   0 1
        labels                   9 7 3 0   6 0      the next token; 0 after the last one
        loss_mask                0 1 1 0   1 0      of the label, so 0 at the last position

    `sample_ids` are indices into the packed list; empty for a dummy micro-batch that keeps ranks in sync.
    """

    input_ids: list[int]
    positions: list[int]
    labels: list[int]
    loss_mask: list[float]
    advantages: list[float]
    inference_logprobs: list[float]
    temperature: list[float]
    teacher_logprobs: list[float] | None
    lengths: list[int]
    sample_ids: list[int]
    has_teacher: list[bool] | None = None
    """Tokens with teacher log-probs; None: all."""
    is_reference: list[bool] | None = None
    """Tokens of reference samples; None: there are none in the batch."""
    teacher_tables: list[TeacherTable | None] | None = None
    """One entry per sample."""
    objectives: tuple[str | None, ...] | None = None
    """Name of each sample's objective; None: all have that of the run."""
    sampling_supports: list[bytes] | None = None
    """One entry per sample, see `Sample.sampling_support`; None: nothing in the batch was filtered."""
    shared: list[int] | None = None
    """First tokens that each sample shares with the one before, see `prefix_tree`; None: every sample stands alone."""
    skipped: dict[str, float] = field(default_factory=dict)
    """Contribution of samples that are not computed to the global count of each unit."""

    @property
    def num_tokens(self) -> int:
        """Tokens of real samples."""
        return len(self.input_ids) if self.sample_ids else 0

    @property
    def num_computed(self) -> int:
        """Tokens of real samples that pass through the layers: shared ones once."""
        return self.num_tokens - sum(self.shared or ())

    @property
    def loss_count(self) -> float:
        """Sum of the loss mask: this micro-batch's share of the global count."""
        return sum(self.loss_mask)

    @property
    def num_sequences(self) -> float:
        """Sequences with loss, by the maximum of their mask: this micro-batch's share of the global count."""
        starts = accumulate(self.lengths, initial=0)
        masks = (self.loss_mask[start : start + n] for start, n in zip(starts, self.lengths, strict=False))
        return sum(max(mask, default=0.0) for mask in masks)

    @property
    def num_observed(self) -> int:
        """Tokens without loss between the first and the last token of a response, such as tool results, and after."""
        starts = accumulate(self.lengths, initial=0)
        masks = (self.loss_mask[start : start + n - 1] for start, n in zip(starts, self.lengths, strict=False))
        return sum(sum(not m for m in mask[find_first_loss(mask) :]) for mask in masks)

    def count(self, unit: str) -> float:
        """Contribution to the global count of a loss that averages over `unit`, one of `UNITS`."""
        if unit == "observation":
            return self.num_observed + self.skipped.get(unit, 0.0)
        num = self.num_sequences if unit == "sequence" else self.loss_count
        return num + self.skipped.get(unit, 0.0)

    def to_tensors(self, device: torch.device | str = "cpu", num_tokens: int = 0) -> TensorBatch:
        """Convert to tensors, padded to `num_tokens` and `MIN_TOKENS` by masked sequences at the end."""

        def ints(values: list[int]) -> Tensor:
            return send(torch.tensor(values + [0] * pad, dtype=torch.int64), device)

        def floats(values: list[float], fill: float = 0.0) -> Tensor:
            return send(torch.tensor(values + [fill] * pad, dtype=torch.float32), device)

        def flags(values: list[bool], fill: bool) -> Tensor:
            return send(torch.tensor(values + [fill] * pad), device)

        pad = max(num_tokens, MIN_TOKENS, len(self.input_ids)) - len(self.input_ids)
        lengths = [*self.lengths, *(min(FILLER, pad - start) for start in range(0, pad, FILLER))]
        return TensorBatch(
            input_ids=ints(self.input_ids),
            positions=send(torch.cat([torch.arange(n) for n in lengths]), device),
            labels=ints(self.labels),
            loss_mask=floats(self.loss_mask),
            loss_rows=send(torch.tensor(self.loss_mask).nonzero().squeeze(1), device),
            advantages=floats(self.advantages),
            inference_logprobs=floats(self.inference_logprobs),
            temperature=floats(self.temperature, 1.0),
            teacher_logprobs=None if self.teacher_logprobs is None else floats(self.teacher_logprobs),
            has_teacher=None if self.has_teacher is None else flags(self.has_teacher, True),
            is_reference=None if self.is_reference is None else flags(self.is_reference, False),
            teacher_table=None if self.teacher_tables is None else self._join_tables(device),
            sequence=send(torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), device),
            lengths=lengths,
            objectives=self.objectives,
            support=None
            if self.sampling_supports is None
            else join_supports(self.sampling_supports, self.lengths, len(self.input_ids) + pad).to(device),
            shared=None if self.shared is None else self.shared + [0] * (len(lengths) - len(self.lengths)),
        )

    def _join_tables(self, device: torch.device | str) -> tuple[Tensor | None, Tensor]:
        """Token ids `[loss tokens, k]` (None: the whole vocabulary) and log-probs `[loss tokens, k + 1]`."""
        assert self.teacher_tables is not None
        tables = [table for table in self.teacher_tables if table is not None]
        k, is_full = (tables[0].k, not tables[0].ids) if tables else (1, False)
        ids, logprobs = [], []
        starts = accumulate(self.lengths, initial=0)
        for start, length, table in zip(starts, self.lengths, self.teacher_tables, strict=False):
            num = sum(mask > 0 for mask in self.loss_mask[start : start + length])
            if table is None or not num:  # not used in the loss: any distinct outcomes
                ids.append(torch.arange(k).expand(num, k))
                logprobs.append(torch.zeros(num, k + (not is_full)))
                continue
            if (table.k, not table.ids) != (k, is_full):
                raise ValueError(
                    f"teacher tables have {k} tokens for one sample and {table.k} for another: use the same k"
                )
            values = torch.frombuffer(bytearray(table.logprobs), dtype=torch.float32).view(num, k)
            if not is_full:
                tail = torch.frombuffer(bytearray(table.tail_mass), dtype=torch.float32).log()
                values = torch.cat((values, tail[:, None]), dim=1)
                ids.append(torch.frombuffer(bytearray(table.ids), dtype=torch.int32).view(num, k).long())
            logprobs.append(values)
        return None if is_full else send(torch.cat(ids), device), send(torch.cat(logprobs), device)


def find_first_loss(mask: Sequence[float]) -> int:
    """Index of the first token with loss; the length without one."""
    return next((i for i, weight in enumerate(mask) if weight), len(mask))


@dataclass(frozen=True)
class TensorBatch:
    """A `MicroBatch` on a device: `loss_rows` are the indices of loss tokens, `sequence` those of sequences."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor
    loss_rows: Tensor
    advantages: Tensor
    inference_logprobs: Tensor
    temperature: Tensor
    teacher_logprobs: Tensor | None
    sequence: Tensor
    lengths: list[int]
    has_teacher: Tensor | None = None
    is_reference: Tensor | None = None
    teacher_table: tuple[Tensor | None, Tensor] | None = None
    objectives: tuple[str | None, ...] | None = None
    support: Support | None = None
    shared: list[int] | None = None

    def find_observed(self) -> Tensor:
        """Mask of the labels that the environment wrote after the first response, see `MicroBatch.num_observed`."""
        has_loss = self.loss_mask > 0
        seen = has_loss.cumsum(0)
        ends = torch.tensor(self.lengths, device=seen.device).cumsum(0)
        before = torch.cat((seen.new_zeros(1), seen[ends - 1][:-1]))
        observed = (seen > before[self.sequence]) & ~has_loss
        observed[ends - 1] = False  # the last position has no label
        return observed


@dataclass(frozen=True)
class Share:
    """The micro-batches of one rank, with statistics of the whole batch.

    lengths        tokens of each sample of the whole batch
    padding_ratio  share of dummy tokens (which keep ranks in sync) in the tokens of all ranks
    imbalance      cost of the busiest rank over the mean cost of a rank, minus 1
    passes         times that a step trains on the batch
    skipped_ratio  share of samples without gradient, which are not computed, in the tokens of the batch
    """

    micros: list[MicroBatch]
    lengths: list[int]
    padding_ratio: float = 0.0
    imbalance: float = 0.0
    passes: int = 1
    skipped_ratio: float = 0.0

    @property
    def shared_ratio(self) -> float:
        """Share of the rank's tokens that are computed in another sample of their micro-batch."""
        num = sum(micro.num_tokens for micro in self.micros)
        return 1 - sum(micro.num_computed for micro in self.micros) / num if num else 0.0

    @property
    def micro_batch_tokens(self) -> float:
        """Mean number of tokens that a micro-batch of the rank computes."""
        return sum(micro.num_computed for micro in self.micros) / max(len(self.micros), 1)


def pack_samples(
    samples: Sequence[Sample],
    seq_len: int,
    num_ranks: int = 1,
    *,
    rows: int = 1,
    quadratic_cost: float = QUADRATIC_COST,
    share_prefixes: bool = False,
) -> list[list[MicroBatch]]:
    """Micro-batches per rank, the same number for each, of at most `rows * seq_len` tokens; sequences are not split.

    Samples are assigned to ranks greedily, the most expensive first, each to the rank with the least cost so far; each
    rank packs by length, which minimizes padding. With `share_prefixes` samples with a common beginning are packed
    together, see `_join_units` and `_even_out`, and only computed tokens count. Deterministic. `ValueError` for a
    sample longer than `seq_len`, without tokens, or with a temperature that is not above 0.
    """
    packs, _ = _plan_packs(samples, seq_len, num_ranks, rows, quadratic_cost, share_prefixes)
    out = [_build_rank(samples, rank, rows * seq_len if share_prefixes else None) for rank in packs]
    num_tokens = sum(len(sample.tokens) for sample in samples)
    assert sum(micro.num_tokens for rank in out for micro in rank) == num_tokens, "packing changed the number of tokens"
    return out


def pack_share(
    samples: Sequence[Sample],
    seq_len: int,
    num_ranks: int = 1,
    rank: int = 0,
    *,
    rows: int = 1,
    quadratic_cost: float = QUADRATIC_COST,
    share_prefixes: bool = False,
    num_threads: int = 1,
) -> Share:
    """`pack_samples(...)[rank]` without building the micro-batches of other ranks, and load-balance statistics.

    The micro-batches of a single rank are planned for `num_threads`, as if each were a rank, and take turns.
    """
    assert num_threads == 1 or num_ranks == 1
    packs, loads = _plan_packs(samples, seq_len, num_ranks * num_threads, rows, quadratic_cost, share_prefixes)
    if num_ranks == 1:
        packs, loads = [[pack for turn in zip(*packs, strict=True) for pack in turn if pack]], [sum(loads)]
    lengths = [len(sample.tokens) for sample in samples]
    num_fillers = sum(not pack for packs_of in packs for pack in packs_of)
    return Share(
        micros=_build_rank(samples, packs[rank], rows * seq_len if share_prefixes else None),
        lengths=lengths,
        padding_ratio=num_fillers * MIN_TOKENS / max(1, sum(lengths) + num_fillers * MIN_TOKENS),
        imbalance=max(loads) * num_ranks / sum(loads) - 1 if sum(loads) else 0.0,
    )


def _plan_packs(
    samples: Sequence[Sample], seq_len: int, num_ranks: int, rows: int, quadratic_cost: float, share_prefixes: bool
) -> tuple[list[list[list[int]]], list[float]]:
    """Sample indices per micro-batch per rank, after checking every sample, and the cost of each rank."""
    if seq_len < 1 or num_ranks < 1 or rows < 1:
        raise ValueError(f"seq_len {seq_len}, num_ranks {num_ranks} and rows {rows} must be at least 1")
    for i, sample in enumerate(samples):
        _check_sample(i, sample, seq_len)
    units = [_Unit([i], n := len(sample.tokens), _cost(n, quadratic_cost)) for i, sample in enumerate(samples)]
    if share_prefixes:
        units = _join_units(units, [sample.tokens for sample in samples], rows * seq_len, num_ranks, quadratic_cost)
    shares = [[units[u] for u in share] for share in assign_ranks([unit.cost for unit in units], num_ranks)]
    _even_out(shares, rows * seq_len)
    packs = [_pack_units(share, rows * seq_len) for share in shares]
    _equalize_num_micro_batches(packs, [len(sample.tokens) for sample in samples])
    return packs, list(map(_sum_costs, shares))


@dataclass(frozen=True)
class _Unit:
    """Samples of one micro-batch, their memory in tokens, and their cost in tokens.

    `parts` are the units of the single samples of a prefix tree, in its order: alone, and behind the sample before it.
    """

    samples: list[int]
    size: float
    cost: float
    parts: tuple[tuple[_Unit, _Unit], ...] = ()

    def cut(self, k: int) -> tuple[_Unit, _Unit]:
        """The first `k` samples, and the others, which compute their common beginning again."""
        return _chain(self.parts[:k]), _chain(self.parts[k:])


def _chain(parts: tuple[tuple[_Unit, _Unit], ...]) -> _Unit:
    """The unit of consecutive samples of a prefix tree."""
    units = [parts[0][0], *(behind for _, behind in parts[1:])]
    samples = [i for unit in units for i in unit.samples]
    return _Unit(samples, sum(unit.size for unit in units), _sum_costs(units), parts)


def _sum_costs(units: Sequence[_Unit]) -> float:
    return sum(unit.cost for unit in units)


def _join_units(
    alone: list[_Unit], tokens: list[list[int]], capacity: int, num_ranks: int, quadratic_cost: float
) -> list[_Unit]:
    """Join samples with a common beginning, in the order of their prefix tree, while they fit in a micro-batch.

    A tree that does not fit is cut, and each part computes its beginning again. A tree that costs more than the mean of
    a rank is cut too, where the beginning costs at most MAX_RECOMPUTED of a part.
    """
    order, shared = order_by_prefix(tokens)
    behind = [
        _Unit([i], len(tokens[i]) - common * (1 - SHARED_SIZE), alone[i].cost - _cost(common, quadratic_cost))
        for i, common in zip(order, shared, strict=True)
    ]
    mean = _sum_costs(behind) / num_ranks if num_ranks > 1 else inf
    trees: list[list[tuple[_Unit, _Unit]]] = []
    size = cost = 0.0
    for i, common, unit in zip(order, shared, behind, strict=True):
        limit = max(mean, _cost(common, quadratic_cost) / MAX_RECOMPUTED)
        is_joined = bool(trees) and common >= max(1, MIN_SHARED_FRACTION * len(tokens[i]))
        if is_joined and size + unit.size <= capacity and cost + unit.cost <= limit:
            trees[-1].append((alone[i], unit))
            size, cost = size + unit.size, cost + unit.cost
        else:
            trees.append([(alone[i], unit)])
            size, cost = alone[i].size, alone[i].cost
    return [_chain(tuple(tree)) for tree in trees]


def _even_out(shares: list[list[_Unit]], capacity: int) -> None:
    """Move samples of a prefix tree from the busiest rank to the idlest one, in place, while that evens their costs.

    Only where this saves the busiest rank more than the beginning costs, which both then compute, and no rank needs
    another micro-batch.
    """
    for _ in range(len(shares) - 1):
        loads = [_sum_costs(share) for share in shares]
        busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
        saved = MIN_BALANCE_GAIN * sum(loads) / len(loads)
        num_packs = max(len(_pack_units(share, capacity)) for share in shares)
        best: tuple[list[_Unit], list[_Unit]] | None = None
        for unit in shares[busiest]:
            for k in range(1, len(unit.parts)):
                stays, moves = unit.cut(k)
                after = max(loads[busiest] - unit.cost + stays.cost, loads[idlest] + moves.cost)
                again = stays.cost + moves.cost - unit.cost
                if loads[busiest] - after <= max(saved, again):
                    continue
                new = [stays if other is unit else other for other in shares[busiest]], [*shares[idlest], moves]
                if max(len(_pack_units(share, capacity)) for share in new) <= num_packs:
                    saved, best = loads[busiest] - after, new
        if best is None:
            return
        shares[busiest], shares[idlest] = best


def assign_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Indices per rank with nearly equal cost."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], len(shares[r]), r))
        shares[rank].append(i)
        load[rank] += costs[i]
    return shares


def _cost(length: int, quadratic_cost: float) -> float:
    """Cost of a sequence: matrix products, and attention relative to them."""
    return length + quadratic_cost * length**2


def _check_sample(index: int, sample: Sample, seq_len: int) -> None:
    if not sample.tokens:
        raise ValueError(f"sample {index} has no tokens: omit it, or fill `tokens` with prompt and response ids")
    sample.validate()
    if len(sample.tokens) > seq_len:
        raise ValueError(
            f"sample {index} has {len(sample.tokens)} tokens but seq_len is {seq_len}: "
            "raise seq_len, or generate fewer tokens (sampling.max_tokens)"
        )
    _check_temperature(index, sample)


def _check_temperature(index: int, sample: Sample) -> None:
    if not sample.temperature > 0:
        raise ValueError(
            f"sample {index} has temperature {sample.temperature}, whose log-probs cannot be trained on: "
            "set sampling.temperature above 0"
        )


def _pack_units(units: list[_Unit], capacity: int) -> list[list[int]]:
    """Next-fit packing by decreasing size; sample indices per micro-batch."""
    packs: list[list[int]] = []
    remaining = 0.0
    for unit in sorted(units, key=lambda unit: -unit.size):
        if not packs or unit.size > remaining:
            packs.append([])
            remaining = capacity
        packs[-1] += unit.samples
        remaining -= unit.size
    return packs


def _equalize_num_micro_batches(packs: list[list[list[int]]], lengths: Sequence[int]) -> None:
    """Give every rank the same number of packs, in place: split the fullest, or add empty ones.

    Ranks run collectives per micro-batch, so their numbers must agree.
    """
    most = max(len(rank) for rank in packs)
    for rank in packs:
        while len(rank) < most:
            widest = max(
                range(len(rank)), key=lambda k: (len(rank[k]) > 1, sum(lengths[i] for i in rank[k])), default=-1
            )
            if widest < 0 or len(rank[widest]) < 2:
                rank.append([])
                continue
            pack = rank[widest]
            rank[widest : widest + 1] = [pack[: len(pack) // 2], pack[len(pack) // 2 :]]


def _build_rank(samples: Sequence[Sample], packs: list[list[int]], sharing_from: int | None) -> list[MicroBatch]:
    """Micro-batches of one rank; those of more than `sharing_from` tokens share beginnings even if few."""
    has_teacher = any(sample.teacher_logprobs is not None or not sample.has_teacher for sample in samples)
    is_partial = has_teacher and any(sample.teacher_logprobs is None for sample in samples)
    has_table = any(sample.teacher_table is not None for sample in samples)
    ordered = [_order_pack(samples, pack, sharing_from) for pack in packs]
    micros = [_build(samples, pack, has_teacher) for pack, _ in ordered]
    for micro, (_, shared) in zip(micros, ordered, strict=True):
        micro.shared = shared
    if any(sample.objective is not None for sample in samples):
        for micro in micros:
            micro.objectives = tuple(samples[i].objective for i in micro.sample_ids)
    has_reference = any(sample.reference_weight for sample in samples)
    has_support = any(sample.sampling_support for sample in samples)
    for micro in micros if is_partial else ():
        micro.has_teacher = _spread(micro, [samples[i].teacher_logprobs is not None for i in micro.sample_ids])
    for micro in micros if has_reference else ():
        micro.is_reference = _spread(micro, [samples[i].reference_weight > 0 for i in micro.sample_ids])
    for micro in micros if has_table else ():
        micro.teacher_tables = [samples[i].teacher_table for i in micro.sample_ids] or [None]
    for micro in micros if has_support else ():
        micro.sampling_supports = [samples[i].sampling_support for i in micro.sample_ids] or [b""]
    return micros


def _order_pack(
    samples: Sequence[Sample], pack: list[int], sharing_from: int | None
) -> tuple[list[int], list[int] | None]:
    """The pack in the order of its prefix tree, and `MicroBatch.shared`."""
    if sharing_from is None or len(pack) < 2:
        return pack, None
    order, shared = order_by_prefix([samples[i].tokens for i in pack])
    num = sum(len(samples[i].tokens) for i in pack)
    if num <= sharing_from and sum(shared) < MIN_SHARED_FRACTION * num:
        return pack, None
    return [pack[k] for k in order], shared


def _spread(micro: MicroBatch, values: list[bool]) -> list[bool]:
    """Expand one value per sample to its tokens; False for padding tokens."""
    spread = [value for value, length in zip(values, micro.lengths, strict=False) for _ in range(length)]
    return spread + [False] * (len(micro.input_ids) - len(spread))


def _build(samples: Sequence[Sample], pack: list[int], has_teacher: bool) -> MicroBatch:
    """Concatenate the samples of one pack; an empty pack becomes one masked token."""
    micro = MicroBatch([], [], [], [], [], [], [], [] if has_teacher else None, [], list(pack))
    for sample in [samples[i] for i in pack] or [Sample(prompt="", tokens=[0], loss_mask=[0.0])]:
        n = len(sample.tokens)
        micro.input_ids += sample.tokens
        micro.positions += range(n)
        micro.labels += _shift_left(sample.tokens, 0)
        micro.loss_mask += _shift_left(sample.loss_mask or [0.0] * n, 0.0)
        micro.advantages += _shift_left(sample.advantages or [0.0] * n, 0.0)
        micro.inference_logprobs += _shift_left(sample.inference_logprobs or [0.0] * n, 0.0)
        micro.temperature += [sample.temperature] * n
        micro.lengths.append(n)
        if micro.teacher_logprobs is not None:
            micro.teacher_logprobs += _shift_left(sample.teacher_logprobs or [0.0] * n, 0.0)
    return micro


def build_filler(like: MicroBatch) -> MicroBatch:
    """A dummy micro-batch with the same streams as `like`."""
    return _build([], [], like.teacher_logprobs is not None)


def _shift_left(stream: list[T], last: T) -> list[T]:
    """Shift the stream left by one position; `last` fills the end."""
    return [*stream[1:], last]


def pad_samples(samples: Sequence[Sample], *, pad_id: int = 0, multiple: int = 1) -> dict[str, Tensor]:
    """Right-padded rows of samples; labels are shifted here and nowhere else.

        tokens of two samples    5 9 7 3     4 6
        input_ids                5 9 7 3     4 6 . .
        labels                   9 7 3 .     6 . . .
        loss_mask                0 1 1 0     1 0 0 0     of the label
        attention_mask           1 1 1 1     1 1 0 0
        position_ids             0 1 2 3     0 1 2 3

    All are [batch, seq], seq a multiple of `multiple`. Streams that all samples have are included, shifted like labels:
    `old_log_probs` (of the sampler) and `advantages`. `temperature` [batch] is included if one is not 1.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    for i, sample in enumerate(samples):
        sample.validate()
        _check_temperature(i, sample)
        if sample.sampling_support:
            raise ValueError(
                f"sample {i} was sampled with top_p, top_k or min_p, and padded batches have log-probs of the whole "
                "vocabulary: sample without them, or train with pack_samples"
            )
    width = round_up(max(len(sample.tokens) for sample in samples), multiple)

    def rows(streams: list[list[T]], fill: T, dtype: torch.dtype) -> Tensor:
        return torch.tensor([stream + [fill] * (width - len(stream)) for stream in streams], dtype=dtype)

    masks = [s.loss_mask or [0.0] * len(s.tokens) for s in samples]
    batch = {
        "input_ids": rows([s.tokens for s in samples], pad_id, torch.int64),
        "labels": rows([_shift_left(s.tokens, 0) for s in samples], 0, torch.int64),
        "loss_mask": rows([_shift_left(mask, 0.0) for mask in masks], 0.0, torch.float32),
        "attention_mask": rows([[1] * len(s.tokens) for s in samples], 0, torch.int64),
        "position_ids": torch.arange(width).repeat(len(samples), 1),
    }
    for name, source in (("old_log_probs", "inference_logprobs"), ("advantages", "advantages")):
        streams = [getattr(sample, source) for sample in samples]
        if all(stream is not None for stream in streams):
            batch[name] = rows([_shift_left(stream, 0.0) for stream in streams], 0.0, torch.float32)
    if any(sample.temperature != 1.0 for sample in samples):
        batch["temperature"] = torch.tensor([sample.temperature for sample in samples])
    return batch
