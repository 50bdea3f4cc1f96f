"""Decoding without a cache, for models that run on whole sequences only: every step computes all tokens again."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from prime_rl.inference.embedded.attention import AttentionMetadata, DecodeBackend
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.trainer.models.attention import PackedAttention

MAX_TOKENS = 8192
"""Maximum padded tokens of a forward pass, which bounds its memory; a longer sequence is computed alone."""


def compute_hidden(decoder: PreparedDecoder, texts: Seq[list[int]]) -> Iterator[Float[Tensor, "tokens hidden"]]:
    """Hidden states of every sequence."""
    start = 0
    while start < len(texts):
        end = start + 1
        longest = len(texts[start])
        while end < len(texts) and (end + 1 - start) * max(longest, len(texts[end])) <= MAX_TOKENS:
            longest = max(longest, len(texts[end]))
            end += 1
        lengths = [len(tokens) for tokens in texts[start:end]]
        flat = torch.tensor([token for tokens in texts[start:end] for token in tokens], device=decoder.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(decoder.device)
        hidden: Tensor = decoder.model(flat, positions, PackedAttention(lengths, decoder.device))
        yield from hidden.split(lengths)
        start = end


class RecomputeDecode(DecodeBackend):
    """A decode step of `running`, from all of their tokens."""

    def __init__(
        self, decoder: PreparedDecoder, cache: KVCache, metadata: AttentionMetadata, running: list[Sequence]
    ) -> None:
        super().__init__(cache, metadata, len(metadata.block_tables) * BLOCK, reach=None)
        self._decoder, self._running = decoder, running

    def __call__(self, tokens: Int[Tensor, " rows"], positions: NDArray[np.int64]) -> Float[Tensor, "rows vocab"]:
        """Next-token logits; `tokens` are the last ones of the sequences."""
        texts = [seq.tokens for seq in self._running]
        return self._decoder.logits(torch.stack([hidden[-1] for hidden in compute_hidden(self._decoder, texts)]))
