"""Incremental detokenization and stop string matching."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

Decode = Callable[[list[int], bool], str]
"""`decode(token_ids, skip_special_tokens)`."""

UNFINISHED = "�"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Byte tokens of vocabularies with byte fallback."""

MAX_CONTEXT = 32
"""Tokens that are decoded again with the next one; a model may sample tokens without a text forever."""
MAX_PARTS = 8
"""Tokens of one character, at least: those before them end no character that later tokens may complete."""


def build_decode(tokenizer: Any, tags: Collection[str] = ()) -> Decode:
    """Build the decoder; calls the Rust core directly where there is one. `tags` are text, special tokens or not."""
    special = find_special(tokenizer) if tags else {}
    if not special.keys().isdisjoint(tags):
        skipped, plain = {token for name, token in special.items() if name not in tags}, build_decode(tokenizer)
        return lambda ids, skip: plain([token for token in ids if token not in skipped] if skip else ids, False)
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None and not tokenizer.clean_up_tokenization_spaces:
        return lambda ids, skip: str(core.decode(ids, skip_special_tokens=skip))
    return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))


def find_special(tokenizer: Any) -> dict[str, int]:
    """The added tokens of a tokenizer that are special, with their ids."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def byte_alphabet() -> dict[str, int]:
    """Character-to-byte table of byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


class TokenNames:
    """Text and bytes of single tokens for log-prob entries; bytes distinguish parts of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = build_decode(tokenizer)
        words = (token for token in range(len(tokenizer)) if self._decode([token], False).isalnum())
        self._context = list(itertools.islice(words, 1))  # the first token of a text may lose its space
        self._alphabet = byte_alphabet()
        self._cache: dict[int, tuple[str, list[int]]] = {}

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """`(text, bytes)` of a token."""
        name = self._cache.get(token)
        if name is None:
            text = decode_after(self._decode, self._context, [token], False)
            name = self._cache[token] = (text, self._bytes(token, text))
        return name

    def _bytes(self, token: int, text: str) -> list[int]:
        if UNFINISHED in text:  # part of a character: byte-level vocabularies encode its bytes as characters
            word = self._tokenizer.convert_ids_to_tokens(token) or ""
            if byte := _FALLBACK.fullmatch(word):
                return [int(byte[1], 16)]
            if all(char in self._alphabet for char in word):
                return [self._alphabet[char] for char in word]
        return list(text.encode())


@dataclass
class Detokenizer:
    """Decodes tokens incrementally; a character split across tokens is emitted once it is complete.

    The concatenated pieces equal the text of all tokens (except for incomplete characters at its end), `decode_after`.
    """

    decode: Decode
    skip_special: bool = True
    context: InitVar[Sequence[int]] = ()
    _context: list[int] = field(init=False)
    _fresh: list[int] = field(default_factory=list)
    _shown: int = 0

    def __post_init__(self, context: Sequence[int]) -> None:
        self._context = list(context)
        self._shown = len(self.decode(self._context, self.skip_special)) if context else 0

    def add(self, token: int) -> str:
        """Return the text completed by `token`."""
        self._fresh.append(token)
        text = self.decode(self._context + self._fresh, self.skip_special)
        # An incomplete character decodes to replacement characters at the end; with byte fallback to one for each byte.
        kept = len(text.rstrip(UNFINISHED))
        whole = kept == len(text)
        piece = text[self._shown : kept]
        self._shown += len(piece)
        if whole:
            # Decoders that join words depend on the previous text, so the last piece is kept as context, and with it
            # what follows without a text, such as special tokens.
            if piece:
                self._context = self._fresh
            elif len(self._context) < MAX_CONTEXT:
                self._context = self._context + self._fresh
            self._fresh = []
            self._shown = len(self.decode(self._context, self.skip_special))
        elif len(self._fresh) > MAX_CONTEXT:
            piece += self._drop_invalid(text)
        return piece

    def _drop_invalid(self, text: str) -> str:
        """Return the end of `text` except for what may become a character; a model may sample invalid bytes forever."""
        self._context, self._fresh = [], self._fresh[-MAX_PARTS:]
        rest = self.decode(self._fresh, self.skip_special)
        num_held = min(len(rest) - len(rest.rstrip(UNFINISHED)), len(text) - self._shown)
        piece = text[self._shown : len(text) - num_held]
        self._shown = len(rest) - num_held
        return piece


def find_context(decode: Decode, prompt: list[int]) -> list[int]:
    """The last tokens of a prompt that its completion is decoded after; decoders drop the first space of a text."""
    context = prompt[-MAX_CONTEXT:]
    text = decode(context, True)
    return context if text and not text.endswith(UNFINISHED) else []


def decode_after(decode: Decode, context: Sequence[int], token_ids: list[int], skip_special: bool) -> str:
    """What the tokens add to the text of `context`."""
    before = len(decode(list(context), skip_special)) if context else 0
    text = decode([*context, *token_ids], skip_special)[before:]
    if text.endswith(2 * UNFINISHED):
        # With byte fallback, an incomplete character makes the whole run of byte tokens before it invalid.
        for end in reversed(range(max(len(token_ids) - MAX_PARTS, 0), len(token_ids))):
            whole = decode([*context, *token_ids[:end]], skip_special)[before:]
            if not whole.endswith(UNFINISHED):
                return whole + decode(token_ids[end:], skip_special)
    return text


def accumulate_offsets(
    decode: Decode, token_ids: Sequence[int], skip_special: bool = False, context: Sequence[int] = ()
) -> list[int]:
    """Where in the text of all tokens (after `context`) each one begins; parts of a character begin where it does."""
    detokenizer, offsets, position = Detokenizer(decode, skip_special, context), list[int](), 0
    for token in token_ids:
        offsets.append(position)
        position += len(detokenizer.add(token))
    return offsets


@dataclass
class StopStringMatcher:
    """Detects stop strings in the text of one completion."""

    detokenizer: Detokenizer
    stops: tuple[str, ...]
    include_stop: bool = False
    text: str = ""

    def add(self, token: int, active: bool) -> str | None:
        """Return the stop string completed by `token` while `active`; `text` is then truncated to the final text."""
        piece = self.detokenizer.add(token)
        old = len(self.text)
        self.text += piece
        if not piece or not active:
            return None
        hits = []
        for stop in self.stops:
            at = self.text.find(stop, max(old - len(stop) + 1, 0))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) if self.include_stop else at]
        return stop
