"""Sampling supports: the tokens that remain after `top_p`, `top_k` and `min_p`, per sampled token.

Log-probs of engine, trainer and teacher are those of the same distribution if all renormalize over the support that
the token was sampled from. Encoded, a token takes a header h and then h // 2 gaps between increasing ids, as LEB128
numbers:

    h = 0          not filtered: the log-prob is that of the whole vocabulary
    h = 2 n        the support consists of n ids
    h = 2 n + 1    the support consists of all but n ids

    ids 3 4 9 of 320    ->  6  3 0 4       the first id, then the differences minus 1
    all but id 2        ->  3  2

The shorter list is used, so a token takes at most about vocabulary / 2 bytes, and 1 byte if nothing is excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.types import UNFILTERED

EXCLUDED = -1e5
"""Log-prob of excluded tokens before renormalization: its exponential is 0, and products with it are finite."""

Normalize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Support:
    """The supports of several tokens: their headers, and the ids of all of them, concatenated."""

    headers: Int[Tensor, " tokens"]
    ids: Int[Tensor, " ids"]

    @property
    def sizes(self) -> Int[Tensor, " tokens"]:
        """Number of ids of each token."""
        return self.headers >> 1

    def select(self, rows: Int[Tensor, " rows"]) -> Support:
        """The supports of the tokens `rows`."""
        sizes = self.sizes
        starts, counts = (sizes.cumsum(0) - sizes)[rows], sizes[rows]
        within = torch.arange(int(counts.sum()), device=rows.device)
        within -= torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return Support(self.headers[rows], self.ids[torch.repeat_interleave(starts, counts) + within])

    def split(self, num: int) -> list[Support]:
        """`num` parts of nearly equal length, as `Tensor.tensor_split`."""
        return [self.select(rows) for rows in torch.arange(len(self.headers), device=self.ids.device).tensor_split(num)]

    def renormalize(
        self,
        logprobs: Float[Tensor, "tokens vocab"],
        normalize: Normalize | None = None,
        start: int = 0,
    ) -> Float[Tensor, "tokens vocab"]:
        """Log-probs over the supports; excluded tokens have probability 0 and a finite log-prob.

        The bits of the engine's sampler: `log_softmax` of the log-probs over the support. `start` is the id of the
        first column, `normalize` replaces `log_softmax`.
        """
        normalize = normalize or log_softmax
        rows = self.headers.nonzero().squeeze(1)
        if not len(rows):
            return logprobs
        part = self if len(rows) == len(self.headers) else self.select(rows)
        chosen = logprobs if part is self else logprobs[rows]
        within = normalize(chosen.masked_fill(part._excluded(logprobs.shape[1], start), EXCLUDED))
        return within if part is self else logprobs.index_copy(0, rows, within)

    def _excluded(self, width: int, start: int) -> Bool[Tensor, "tokens width"]:
        """Whether the ids from `start` on are outside of the supports, none of which is unfiltered."""
        lists_excluded = (self.headers & 1).bool()
        excluded = (~lists_excluded)[:, None].repeat(1, width)
        rows = torch.repeat_interleave(torch.arange(len(self.headers), device=self.ids.device), self.sizes)
        columns = self.ids - start
        mine = (columns >= 0) & (columns < width)
        rows, columns = rows[mine], columns[mine]
        excluded[rows, columns] = lists_excluded[rows]
        return excluded

    def contains(self, tokens: Int[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
        """Whether each token is in its support."""
        sizes = self.sizes
        rows = torch.repeat_interleave(torch.arange(len(tokens)), sizes)
        is_listed = torch.zeros(len(tokens), dtype=torch.bool)
        is_listed[rows[self.ids == torch.repeat_interleave(tokens, sizes)]] = True
        return (self.headers == 0) | (is_listed ^ (self.headers & 1).bool())

    def to(self, device: torch.device | str) -> Support:
        """The supports on a device."""
        return Support(self.headers.to(device), self.ids.to(device))


def encode_supports(kept: Bool[Tensor, "rows vocab"]) -> list[bytes]:
    """The encoded support of each row."""
    num_kept = kept.sum(-1, keepdim=True)
    lists_excluded = num_kept > kept.shape[1] - num_kept
    listed = (kept ^ lists_excluded).cpu().numpy()
    num_listed = np.count_nonzero(listed, axis=1)
    columns = np.flatnonzero(listed) % max(kept.shape[1], 1)
    firsts = np.cumsum(num_listed) - num_listed
    gaps = np.diff(columns, prepend=-1) - 1
    has_ids = num_listed > 0
    gaps[firsts[has_ids]] = columns[firsts[has_ids]]
    headers = 2 * num_listed + lists_excluded.squeeze(1).cpu().numpy()
    numbers = np.insert(gaps, firsts, headers)
    data, ends = _write_numbers(numbers)
    stops = ends[np.cumsum(num_listed + 1) - 1].tolist()
    return [data[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def decode_supports(data: bytes, num_tokens: int) -> Support:
    """The inverse of joining the supports of `num_tokens` tokens; `ValueError` for other data."""
    numbers = _read_numbers(data)
    heads: list[int] = []
    place = 0
    while place < len(numbers):
        heads.append(place)
        place += 1 + (int(numbers[place]) >> 1)
    if place != len(numbers) or len(heads) != num_tokens:
        raise ValueError(f"sampling_support has entries of {len(heads)} tokens, not of {num_tokens}")
    headers = numbers[heads]
    gaps = np.delete(numbers, heads)
    sizes = headers >> 1
    sums = np.cumsum(gaps + 1)
    before = np.concatenate(([0], sums))[np.cumsum(sizes) - sizes]
    ids = sums - 1 - np.repeat(before, sizes)
    return Support(torch.from_numpy(headers), torch.from_numpy(ids))


def join_supports(encoded: Sequence[bytes], lengths: Sequence[int], num_tokens: int) -> Support:
    """The supports of the labels of a pack: sequences of `lengths` with entries per token (b"": unfiltered), shifted
    left by one, and padded to `num_tokens`."""
    headers, ids = [], []
    for data, length in zip(encoded, lengths, strict=False):
        support = decode_supports(data or UNFILTERED * length, length)
        if length and support.headers[0]:
            raise ValueError("sampling_support of a sample has ids for its first token, which no log-prob refers to")
        headers += [support.headers[1:], support.headers.new_zeros(min(length, 1))]
        ids.append(support.ids)
    found = torch.cat(headers) if headers else torch.zeros(0, dtype=torch.int64)
    padding = found.new_zeros(num_tokens - len(found))
    return Support(torch.cat((found, padding)), torch.cat(ids) if ids else padding[:0])


def check_supports(data: bytes, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise `ValueError` unless `data` has a valid support for each of the tokens, which contains it."""
    support = decode_supports(data, len(tokens))
    if len(support.ids) and int(support.ids.max()) >= vocab_size:
        raise ValueError(f"sampling_support has id {int(support.ids.max())}, but the vocabulary size is {vocab_size}")
    if not bool(support.contains(torch.tensor(tokens)).all()):
        raise ValueError("sampling_support does not contain the sampled token")


def _write_numbers(numbers: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """LEB128: 7 bits per byte, lowest first; the end of each number."""
    widths = np.ones(len(numbers), dtype=np.int64)
    for shift in (7, 14, 21):
        widths += (numbers >> shift) > 0
    ends = np.cumsum(widths)
    data = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for i in range(int(widths.max(initial=0))):
        wide = widths > i
        more = np.where(widths[wide] > i + 1, 0x80, 0)
        data[(ends - widths)[wide] + i] = ((numbers[wide] >> 7 * i) & 0x7F) | more
    return data.tobytes(), ends


def _read_numbers(data: bytes) -> NDArray[np.int64]:
    """The inverse of `_write_numbers`."""
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise ValueError("sampling_support ends within a number")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    widths = ends + 1 - starts
    if widths.max(initial=1) > 4:
        raise ValueError("sampling_support has a number of more than 28 bits")
    within = np.arange(len(raw)) - np.repeat(starts, widths)
    parts = (raw & 0x7F).astype(np.int64) << 7 * within
    return np.add.reduceat(parts, starts) if len(starts) else parts
