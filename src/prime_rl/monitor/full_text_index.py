"""Substring search over many texts: signatures exclude most texts, the rest are scanned."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Texts per signature block; the last, incomplete block is scanned at every search."""

BITS = 256 + 4096
"""Bits of a signature: one per byte value, the others for hashed (12 bits) pairs and triples of bytes."""

_HASH = (40503, 30011, 52711)
"""Odd multipliers that spread neighboring letters over 16 bits."""


class TextIndex:
    """Texts in insertion order, with case-insensitive search.

    A text can only hold a needle if it holds every byte, pair and triple of bytes of it. Each block keeps for every
    such bit a bitmap over its texts (544 bytes per text), so a search is a few ANDs; the remaining texts are read.
    Signing costs about 30 ns per byte, once.
    """

    def __init__(self) -> None:
        self._text, self._starts = bytearray(), array("q", [0])
        self._blocks: list[NDArray[np.uint8]] = []  # [BITS, BLOCK / 8] each

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, text: str) -> None:
        """Add one text."""
        self._text += text.lower().encode(errors="replace") + b"\0"
        self._starts.append(len(self._text))
        if len(self) % BLOCK == 0:
            self._sign()

    def search(self, needle: str) -> NDArray[np.bool_]:
        """For every text, whether it contains the needle."""
        pattern = needle.lower().encode(errors="replace")
        fits = self._candidates(pattern)
        if len(pattern) == 1 and pattern != b"\0":  # a single byte has its own bit: scan only the incomplete block
            unsigned = len(self._blocks) * BLOCK
            candidates = unsigned + np.flatnonzero(fits[unsigned:])
        else:
            candidates = np.flatnonzero(fits)
        find, starts = self._text.find, self._starts
        missed = [n for n in candidates.tolist() if find(pattern, starts[n], starts[n + 1] - 1) < 0]
        fits[missed] = False
        return fits

    def _candidates(self, pattern: bytes) -> NDArray[np.bool_]:
        fits = np.ones(len(self), dtype=bool)
        if pattern and self._blocks:
            bits = np.unique(np.concatenate(_bits(np.frombuffer(pattern, dtype=np.uint8))))
            signed = [np.bitwise_and.reduce(block[bits], axis=0) for block in self._blocks]
            fits[: len(signed) * BLOCK] = np.unpackbits(np.concatenate(signed)).astype(bool)
        return fits

    def _sign(self) -> None:
        """Sign the last BLOCK texts; n-grams that span two texts only cause false positives."""
        starts = np.array(self._starts[-BLOCK - 1 :])
        data = np.frombuffer(bytes(self._text[starts[0] : starts[-1]]), dtype=np.uint8)
        rows = np.repeat(np.arange(0, BLOCK * BITS, BITS, dtype=np.int32), np.diff(starts))
        table = np.zeros(BLOCK * BITS, dtype=bool)  # text-major, for local writes
        for bits in _bits(data):
            table[rows[: len(bits)] + bits] = True
        self._blocks.append(np.packbits(np.ascontiguousarray(table.reshape(BLOCK, BITS).T), axis=1))


def _bits(data: NDArray[np.uint8]) -> list[NDArray[np.int32]]:
    """Bit numbers of every byte, pair and triple of bytes, by start position."""
    wide = data.astype(np.uint16)
    mixed = wide * np.uint16(_HASH[0])
    found = [data.astype(np.int32)]
    for length in (2, 3):
        if len(data) < length:
            break
        mixed = mixed[:-1] ^ (wide[length - 1 :] * np.uint16(_HASH[length - 1]))
        mixed ^= mixed >> 7
        found.append(256 + (mixed >> 4).astype(np.int32))
    return found
