"""Which of many texts hold some words: signatures rule most texts out, the rest are read."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
"""Texts that are signed together; the last ones wait unsigned, and are read at every search."""

BITS = 256 + 4096
"""Of a signature: one for each byte, the others shared by pairs and triples of bytes by a hash of 12 bits."""

_HASH = (40503, 30011, 52711)
"""Odd numbers that spread neighbouring letters over 16 bits."""


class TextIndex:
    """Texts in order of arrival, searched without regard to case.

    A text can only hold a needle if it holds every byte, pair and triple of bytes of it. Each block keeps for every
    such bit a bitmap over its texts (544 bytes per text), so a needle is a handful of ANDs; whoever is left is read.
    Signing costs about 30 ns per byte, once.
    """

    def __init__(self) -> None:
        self._text, self._starts = bytearray(), array("q", [0])
        self._blocks: list[NDArray[np.uint8]] = []  # [BITS, BLOCK / 8] each

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, text: str) -> None:
        """Take in one text."""
        self._text += text.lower().encode(errors="replace") + b"\0"
        self._starts.append(len(self._text))
        if len(self) % BLOCK == 0:
            self._sign()

    def search(self, needle: str) -> NDArray[np.bool_]:
        """For every text, whether it holds the needle."""
        wanted = needle.lower().encode(errors="replace")
        fits = self._candidates(wanted)
        if len(wanted) == 1 and wanted != b"\0":  # a single byte has a bit of its own: only the unsigned are read
            unsigned = len(self._blocks) * BLOCK
            candidates = unsigned + np.flatnonzero(fits[unsigned:])
        else:
            candidates = np.flatnonzero(fits)
        find, starts = self._text.find, self._starts
        missed = [n for n in candidates.tolist() if find(wanted, starts[n], starts[n + 1] - 1) < 0]
        fits[missed] = False
        return fits

    def _candidates(self, wanted: bytes) -> NDArray[np.bool_]:
        fits = np.ones(len(self), dtype=bool)
        if wanted and self._blocks:
            bits = np.unique(np.concatenate(_bits(np.frombuffer(wanted, dtype=np.uint8))))
            signed = [np.bitwise_and.reduce(block[bits], axis=0) for block in self._blocks]
            fits[: len(signed) * BLOCK] = np.unpackbits(np.concatenate(signed)).astype(bool)
        return fits

    def _sign(self) -> None:
        """Sign the last BLOCK texts; what spans two texts sets a bit too many, which costs a look and no more."""
        starts = np.array(self._starts[-BLOCK - 1 :])
        data = np.frombuffer(bytes(self._text[starts[0] : starts[-1]]), dtype=np.uint8)
        rows = np.repeat(np.arange(0, BLOCK * BITS, BITS, dtype=np.int32), np.diff(starts))
        held = np.zeros(BLOCK * BITS, dtype=bool)  # by text, so that writing stays in one place of memory
        for bits in _bits(data):
            held[rows[: len(bits)] + bits] = True
        self._blocks.append(np.packbits(np.ascontiguousarray(held.reshape(BLOCK, BITS).T), axis=1))


def _bits(data: NDArray[np.uint8]) -> list[NDArray[np.int32]]:
    """Numbers of the bits that every byte, pair and triple of bytes sets, by where it begins."""
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
