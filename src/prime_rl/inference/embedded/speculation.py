"""Speculative decoding without a draft model: drafts are copied from earlier text of the same prompt.

A draft is what followed the last `NGRAM` tokens where they occurred before: in the sequence, its prompt, or another
completion of the prompt, running or finished. A decode step computes all positions of a draft as rows of its batch, and
every row samples the token that it would sample without drafts; drafted tokens are kept as long as they equal these.
The result is that of decoding without drafts, token for token, because noise and logits of a row do not depend on the
batch. So drafts and their lengths may depend on anything.
"""

from __future__ import annotations

from itertools import repeat

from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.sequence import Sequence

NGRAM = 2
MAX_DRAFT = 16
MAX_NGRAMS = 1 << 17
"""N-grams per generation of the index; two are kept, about 200 bytes for each n-gram."""

FREE_ROWS = 3.0
"""Cost of reading the weights in a decode step, in rows: a step of n rows takes the time of `FREE_ROWS + n`.

Half of what was measured on a CPU with AVX-512 and without AMX (5 to 8 for SmolLM2-135M in fp32 and bf16): after a run
of accepted tokens the next ones are accepted less often than estimated."""
MAX_SEQUENCES = 32
"""No drafts for more sequences: even if all were accepted, a step would be little faster."""

SMOOTHING = 1 / 8

Drafts = list[list[int]]
"""For each sequence, tokens that may follow."""


class Drafter:
    """Index of n-grams by prompt, and the choice of drafts that are worth their rows.

    A sequence follows its source while the source predicts its tokens, whether they are drafted or not, which measures
    `acceptance` at no cost.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._recent: dict[int, tuple[list[int], int]] = {}
        self._older: dict[int, tuple[list[int], int]] = {}

    def propose(self, running: list[Sequence]) -> Drafts:
        """A draft for each sequence, possibly empty; an empty list if none is worth it.

        A row is added where its token is accepted with a probability above the tokens that the step would otherwise
        gain per row.
        """
        rows, expected = len(running), float(len(running))
        if rows > MAX_SEQUENCES:
            return []
        candidates: list[tuple[float, int]] = []
        for i, seq in enumerate(running):
            probability = 1.0
            for _ in range(self._follow(seq) if seq.can_draft else 0):
                probability *= seq.acceptance
                if probability * (FREE_ROWS + rows) <= expected:
                    break
                candidates.append((probability, i))
        if not candidates or not self._adapters.are_packed({seq.request.adapter for seq in running}):
            return []
        lengths = [0] * rows
        for probability, i in sorted(candidates, reverse=True):
            if probability * (FREE_ROWS + rows) <= expected:
                break
            lengths[i], rows, expected = lengths[i] + 1, rows + 1, expected + probability
        return [seq.source[seq.source_at : seq.source_at + n] for seq, n in zip(running, lengths, strict=True)]

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
