"""Speculative decoding without a draft model: drafts are copied from earlier text of the same prompt.

A draft is what followed the last `NGRAM` tokens where they occurred before: in the sequence, its prompt, or another
completion of the prompt, running or finished. A decode step computes all positions of a draft as rows of its batch, and
every row samples the token that it would sample without drafts; drafted tokens are kept as long as they equal these.
The result is that of decoding without drafts, token for token, because noise and logits of a row do not depend on the
batch. So drafts and their lengths may depend on anything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from itertools import repeat

import numpy as np
import torch

from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.sequence import Sequence
from rollouts.kernels.cpu import PackedWeight

NGRAM = 2
MAX_DRAFT = 16
MAX_NGRAMS = 1 << 17
"""N-grams per generation of the index; two are kept, about 200 bytes for each n-gram."""

MAX_SEQUENCES = 32
"""No drafts for more sequences: even if all were accepted, a step would be little faster."""
MAX_ROWS = 48
"""Maximum rows of a step with drafts."""
MIN_GAIN = 1.05
"""Least expected speedup of a step with drafts: costs are estimates, and drafts take time outside the kernel, too."""
MIN_PROBABILITY = 0.1
"""Less likely tokens are not considered, which bounds the work of a proposal."""

UNCERTAINTY = 1 / 16
"""Difference of the tokens left, as a share of them, within which either of two sequences may end last."""

FREE_ROWS = 3.0
"""Where it is not measured, a step of n rows takes the time of `FREE_ROWS + n`."""
MEASURED_ROWS = (1, 4, 8, 12, 16, 24, 32, MAX_ROWS)
MEASUREMENTS = 5
MIN_MEASURED_BYTES = 1 << 24
"""A smaller output head stays in the CPU's cache, other than the weights of a step."""
OTHER_COST = 1 / 64
"""Attention and sampling of a row, as a share of the step of one row."""

SMOOTHING = 1 / 8
MEMORY = 0.95
"""Part of the sums of expected and accepted tokens that a step with drafts keeps."""
IDLE_MEMORY = 0.99
"""The same of a step without: after some hundred of them, drafts are tried again."""

Drafts = list[list[int]]
"""For each sequence, tokens that may follow."""


def estimate_costs(head: PackedWeight) -> list[float]:
    """Relative time of a decode step of 0 to `MAX_ROWS` rows, from that of the output head, which is measured.

    Few rows take the time in which the weights are read, many the time of their products; where the one becomes the
    other depends on CPU, number format and threads.
    """
    if head.data.nbytes < MIN_MEASURED_BYTES:
        return [FREE_ROWS + rows for rows in range(MAX_ROWS + 1)]
    seconds = dict.fromkeys(MEASURED_ROWS, float("inf"))
    for _ in range(MEASUREMENTS):  # in turns and the least of each: other processes may disturb them
        for num in MEASURED_ROWS:
            x, start = torch.ones(num, head.inputs), time.perf_counter()
            head(x)
            seconds[num] = min(seconds[num], time.perf_counter() - start)
    least = np.maximum.accumulate(list(seconds.values()))
    rows = np.arange(MAX_ROWS + 1)
    costs: list[float] = (np.interp(rows, MEASURED_ROWS, least) + least[0] * OTHER_COST * rows).tolist()
    return costs


class Drafter:
    """Index of n-grams by prompt, and the choice of drafts that are worth their rows.

    `costs[n]` is the relative time of a step of n rows. A sequence follows its source while the source predicts its
    tokens, whether they are drafted or not, which measures `acceptance` at no cost. As drafts begin where these were
    good, they turn out worse: `trust` corrects the probabilities by how many of the expected tokens were accepted.
    """

    def __init__(self, adapters: Adapters, costs: Seq[float]) -> None:
        self._adapters, self._costs = adapters, costs
        self._expected = self._accepted = 0.0  # tokens of past drafts, decayed
        self._recent: dict[int, tuple[list[int], int]] = {}
        self._older: dict[int, tuple[list[int], int]] = {}

    def propose(self, running: list[Sequence], is_closed: bool = False) -> Drafts:
        """A draft for each sequence, possibly empty; an empty list if none is worth it.

        Drafted tokens are added by their expected value; of all such steps, the one with the most value for its cost is
        taken. `is_closed`: no sequence is expected to follow these, so that the time until all have ended counts.
        """
        num = len(running)
        if num > MAX_SEQUENCES:
            return []
        found: list[tuple[float, int]] = []
        trust = min(1.0, (1 + self._accepted) / (1 + self._expected))
        for i, seq in enumerate(running):
            probability = trust
            for _ in range(self._follow(seq) if seq.can_draft else 0):
                probability *= seq.acceptance
                if probability < MIN_PROBABILITY:
                    break
                found.append((probability, i))
        chosen = self._choose(running, found, is_closed) if found else []
        if not chosen or not self._adapters.are_packed({seq.request.adapter for seq in running}):
            self._expected, self._accepted = IDLE_MEMORY * self._expected, IDLE_MEMORY * self._accepted
            return []
        lengths = Counter(i for _, i in chosen)
        self._expected = MEMORY * self._expected + sum(probability for probability, _ in chosen) / trust
        return [seq.source[seq.source_at : seq.source_at + lengths[i]] for i, seq in enumerate(running)]

    def _choose(
        self, running: list[Sequence], candidates: list[tuple[float, int]], is_closed: bool
    ) -> list[tuple[float, int]]:
        """Those of the (probability, sequence) that make the step with the most value for its cost."""
        num = len(running)
        values = self._find_values(running) if is_closed and num > 1 else [1.0] * num
        ordered = sorted(candidates, key=lambda each: (each[0] * values[each[1]], each), reverse=True)
        expected, most, chosen = float(num), MIN_GAIN * num / self._costs[num], 0
        for rows, (probability, i) in enumerate(ordered[: MAX_ROWS - num], num + 1):
            expected += probability * values[i]
            if expected / self._costs[rows] > most:
                most, chosen = expected / self._costs[rows], rows - num
        return ordered[:chosen]

    def _find_values(self, running: list[Sequence]) -> list[float]:
        """Value of a token of each sequence, 1 on average: what it saves of the time until all sequences have ended.

        It saves one of the rows of a later step. If the sequence is one of the last to end, it also saves a part of a
        step.
        """
        num = len(running)
        left = np.array([seq.max_tokens - len(seq.tokens) for seq in running])
        lasts = np.exp((left - left.max()) / (1 + left.max() * UNCERTAINTY))
        of_rows = (self._costs[num] - self._costs[1]) * num / (num - 1) / self._costs[num]
        values: list[float] = (of_rows + (1 - of_rows) * num * lasts / lasts.sum()).tolist()
        return values

    def learn(self, accepted: int) -> None:
        """Count the accepted tokens of the drafts that were proposed last."""
        self._accepted = MEMORY * self._accepted + accepted

    def index(self, seq: Sequence, end: int) -> None:
        """Make the tokens below `end` available as drafts."""
        start = max(seq.num_indexed, NGRAM)
        columns = (seq.tokens[start - NGRAM + i : end - NGRAM + i] for i in range(NGRAM))
        keys = map(hash, zip(repeat(seq.prompt_key), *columns))  # a collision costs a draft
        self._recent.update(zip(keys, zip(repeat(seq.tokens), range(start, end))))  # noqa: B905
        seq.num_indexed = max(seq.num_indexed, end)
        if len(self._recent) > MAX_NGRAMS:
            self._older, self._recent = self._recent, {}

    def _follow(self, seq: Sequence) -> int:
        """Compare new tokens with the source, find another one where they differ, and return how many it can draft.

        The limits are the source, the block in which the next token is stored, and the end of the sequence.
        """
        tokens, key = seq.tokens, seq.prompt_key
        if not seq.num_indexed:
            if hash((key, *tokens[: seq.num_prompt][-NGRAM - 1 : -1])) not in self._recent:  # of another sample
                self.index(seq, seq.num_prompt)
            seq.num_indexed = seq.num_prompt
        follows = bool(seq.source)
        for end in range(seq.num_indexed, len(tokens)):
            self._recent[hash((key, *tokens[max(end - NGRAM, 0) : end]))] = (tokens, end)
            follows = follows and seq.source_at < len(seq.source)
            if follows:
                follows = seq.source[seq.source_at] == tokens[end]
                seq.source_at += 1
                seq.acceptance += SMOOTHING * (follows - seq.acceptance)
        seq.num_indexed = len(tokens)
        if not follows or seq.source_at >= len(seq.source):
            gram = hash((key, *tokens[-NGRAM:]))
            seq.source, seq.source_at = self._recent.get(gram) or self._older.get(gram) or ([], 0)
        left = seq.max_tokens - len(tokens) - 1
        return min(len(seq.source) - seq.source_at, MAX_DRAFT, -(len(tokens) + 1) % BLOCK + 1, left)
