"""Speculative decoding without a draft model: drafts are copied from earlier text of the same prompt.

A draft is what followed the last `NGRAM` tokens where they occurred before: in the sequence, its prompt, or another
completion of the prompt, running or finished. A decode step computes all positions of a draft as rows of its batch, and
every row samples the token that it would sample without drafts; drafted tokens are kept as long as they equal these.
The result is that of decoding without drafts, token for token, because noise and logits of a row do not depend on the
batch. So drafts and their lengths may depend on anything.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import repeat

from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.inference.embedded.step_costs import MAX_ROWS, StepCosts

NGRAM = 2
MAX_DRAFT = 16
MAX_NGRAMS = 1 << 17
"""N-grams per generation of the index; two are kept, about 200 bytes for each n-gram."""

MAX_SEQUENCES = 32
"""No drafts for more sequences: even if all were accepted, a step would be little faster."""
MIN_GAIN = 1.15
"""Least expected speedup of a step with drafts: costs are estimates, and drafts take time outside the kernel, too."""
MAX_WAIT = 6
"""After steps without drafts, up to half as many are not even considered: for many sequences this takes time, too."""
MIN_PROBABILITY = 0.1
"""Less likely tokens are not considered, which bounds the work of a proposal."""

UNCERTAINTY = 1 / 16
"""Difference of the tokens left, as a share of them, within which either of two sequences may end last."""

MEMORY = 0.95
"""Part of the sums of expected and accepted tokens that a step with drafts keeps."""
IDLE_MEMORY = 0.99
"""The same of a step without: after some hundred of them, drafts are tried again."""

FIRST_RATE, FIRST_COUNT, MAX_COUNT = 0.3, 2, 64
"""How often a source is right before it was measured, as so many samples, and the samples that count in all."""
LEVELS = 6
"""Numbers of tokens that a source predicted in a row are distinguished up to `2 ** (LEVELS - 2)`."""

Occurrence = tuple[list[int], int, bool]
"""Tokens, the position after the n-gram, and whether the occurrence before it was followed by the same token."""

Drafts = list[list[int]]
"""For each sequence, tokens that may follow."""


class Drafter:
    """Index of n-grams by prompt, and the choice of drafts that are worth their rows.

    A sequence follows its source while the source predicts its tokens, whether they are drafted or not. This measures
    at no cost how often a source is right, which depends on how many tokens it has predicted in a row, and on whether
    the last occurrences of the n-gram before the token continued alike. Samples of a group differ at few positions,
    and do so again and again. As drafts begin where these were good, they turn out worse: `trust` corrects the
    probabilities by how many of the expected tokens were accepted.
    """

    def __init__(self, adapters: Adapters, costs: StepCosts) -> None:
        self.costs, self._adapters = costs, adapters
        self._rates = [FIRST_RATE] * (2 * LEVELS)  # how often a source was right, by `find_level`
        self._counts = [FIRST_COUNT] * (2 * LEVELS)
        self._expected = self._accepted = 0.0  # tokens of past drafts, decayed
        self._failures = self._wait = 0  # steps in which nothing was worth it, and those until it is tried again
        self._recent: dict[int, Occurrence] = {}
        self._older: dict[int, Occurrence] = {}

    def propose(self, running: list[Sequence], is_closed: bool = False) -> Drafts:
        """A draft for each sequence, possibly empty; an empty list if none is worth it.

        Drafted tokens are added by their expected value; of all such steps, the one with the most value for its cost is
        taken. `is_closed`: no sequence is expected to follow these, so that the time until all have ended counts.
        """
        if len(running) > MAX_SEQUENCES:
            return []
        if self._wait > 0:
            self._wait -= 1
            return self._propose_nothing()
        found: list[tuple[float, int]] = []
        trust = min(1.0, (1 + self._accepted) / (1 + self._expected))
        for i, seq in enumerate(running):
            if seq.can_draft:
                self._follow(seq)
                if seq.source:
                    found += zip(self._expect(seq, trust), repeat(i))
        chosen = self._choose(running, found, is_closed) if found and not self.costs.needs_plain else []
        if not chosen or not self._adapters.are_packed({seq.request.adapter for seq in running}):
            self._failures += 1
            self._wait = min(self._failures, len(running), MAX_WAIT) // 2
            return self._propose_nothing()
        self._failures = 0
        lengths = Counter(i for _, i in chosen)
        self._expected = MEMORY * self._expected + sum(probability for probability, _ in chosen) / trust
        return [seq.source[seq.source_at : seq.source_at + lengths[i]] for i, seq in enumerate(running)]

    def _propose_nothing(self) -> Drafts:
        self._expected, self._accepted = IDLE_MEMORY * self._expected, IDLE_MEMORY * self._accepted
        return []

    def learn(self, accepted: int) -> None:
        """Count the accepted tokens of the drafts that were proposed last."""
        self._accepted = MEMORY * self._accepted + accepted

    def index(self, seq: Sequence) -> None:
        """Make the tokens of a sequence available as drafts."""
        if not seq.num_indexed:
            self._index_prompt(seq)
        self._index(seq, len(seq.tokens))

    def _index_prompt(self, seq: Sequence) -> None:
        """Index the prompt, unless that of another sample is."""
        if hash((seq.prompt_key, *seq.tokens[: seq.num_prompt][-NGRAM - 1 : -1])) not in self._recent:
            self._index(seq, seq.num_prompt)
        seq.num_indexed = seq.num_prompt

    def _index(self, seq: Sequence, end: int) -> None:
        tokens, key = seq.tokens, seq.prompt_key
        for at in range(max(seq.num_indexed, NGRAM), end):
            self._add(hash((key, *tokens[at - NGRAM : at])), tokens, at)
        seq.num_indexed = max(seq.num_indexed, end)
        if len(self._recent) > MAX_NGRAMS:
            self._older, self._recent = self._recent, {}

    def _add(self, gram: int, tokens: list[int], at: int) -> Occurrence | None:
        """Add the occurrence of an n-gram that ends before position `at`; returns the one before."""
        last = self._recent.get(gram) or self._older.get(gram)
        self._recent[gram] = (tokens, at, last is None or last[0][last[1]] == tokens[at])
        return last

    def _follow(self, seq: Sequence) -> None:
        """Compare new tokens with the source, and find another one where they differ."""
        tokens, key = seq.tokens, seq.prompt_key
        if not seq.num_indexed:
            self._index_prompt(seq)
        for at in range(seq.num_indexed, len(tokens)):
            last = self._add(hash((key, *tokens[max(at - NGRAM, 0) : at])), tokens, at)
            if seq.source_at >= len(seq.source):
                continue
            predicted = seq.source[seq.source_at]
            is_right, level = predicted == tokens[at], find_level(seq.num_predicted, last, predicted)
            self._counts[level] = count = min(self._counts[level] + 1, MAX_COUNT)
            self._rates[level] += (is_right - self._rates[level]) / count
            if is_right:
                seq.source_at += 1
                seq.num_predicted += 1
            else:
                seq.source = []
        seq.num_indexed = len(tokens)
        if seq.source_at >= len(seq.source):
            gram = hash((key, *tokens[-NGRAM:]))
            seq.source, seq.source_at, _ = self._recent.get(gram) or self._older.get(gram) or ([], 0, True)
            seq.num_predicted = 0

    def _expect(self, seq: Sequence, probability: float) -> list[float]:
        """Probabilities that the next tokens of the source follow, each with all before it.

        The limits are the source, the block in which the next token is stored, and the end of the sequence.
        """
        source, start, key = seq.source, seq.source_at, seq.prompt_key
        num = len(seq.tokens) + 1
        limit = min(len(source) - start, MAX_DRAFT, -num % BLOCK + 1, seq.max_tokens - num)
        found: list[float] = []
        for at in range(start, start + limit):
            gram = hash((key, *source[at - NGRAM : at]))
            last = self._recent.get(gram) or self._older.get(gram)
            probability *= self._rates[find_level(seq.num_predicted + at - start, last, source[at])]
            if probability < MIN_PROBABILITY:
                break
            found.append(probability)
        return found

    def _choose(
        self, running: list[Sequence], candidates: list[tuple[float, int]], is_closed: bool
    ) -> list[tuple[float, int]]:
        """Those of the (probability, sequence) that make the step with the most value for its cost."""
        num, costs = len(running), self.costs.by_rows()
        having = {i for _, i in candidates}
        values = find_values(running, having, costs) if is_closed and num > 1 else [1.0] * num
        ordered = sorted(candidates, key=lambda each: (each[0] * values[each[1]], each), reverse=True)
        expected, most, chosen = float(num), MIN_GAIN * num / costs[num], 0
        for rows, (probability, i) in enumerate(ordered[: MAX_ROWS - num], num + 1):
            expected += probability * values[i]
            if expected / costs[rows] > most:
                most, chosen = expected / costs[rows], rows - num
        return ordered[:chosen]


def find_values(running: list[Sequence], having: set[int], costs: list[float]) -> list[float]:
    """Value of a token of each sequence: what it saves of the time until all sequences have ended, in steps / `num`.

    It saves one of the rows of a later step. If the sequence is one of the last to end, it also saves a part of a step,
    unless others of the last do not get ahead: only those in `having` have drafts.
    """
    num = len(running)
    left = [seq.max_tokens - len(seq.tokens) for seq in running]
    most = max(left)
    lasts = [math.exp((each - most) / (1 + most * UNCERTAINTY)) for each in left]
    total = sum(lasts)
    together = sum(lasts[i] for i in having) / total
    of_rows = (costs[num] - costs[1]) * num / (num - 1) / costs[num]
    of_last = (1 - of_rows) * num / total * together
    return [of_rows + of_last * last for last in lasts]


def find_level(num_predicted: int, last: Occurrence | None, predicted: int) -> int:
    """Index of the rate at which the next token of a source is right."""
    is_consistent = last is None or (last[2] and last[0][last[1]] == predicted)
    return min(num_predicted.bit_length(), LEVELS - 1) * 2 + is_consistent
