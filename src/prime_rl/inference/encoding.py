"""Tokenization for the server: length limits are checked before tokenizing, which runs without the GIL."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from typing import Any

from prime_rl.inference.detokenizer import accumulate_offsets, build_decode, byte_alphabet
from prime_rl.inference.request_parsing import prompt_too_long
from rollouts.training.datasets.chat import RenderedChat
from rollouts.training.datasets.chat_template import inspect_template

CACHED_TOKENS = 2**22
ENTRY_TOKENS = 64
"""Overhead of a cache entry, in tokens (4 bytes each)."""

NFC_SHRINKS = 4
"""NFC shortens UTF-8 text at most to a quarter (the extreme is 7 bytes to 2, for U+0390)."""
LOSSLESS_NORMALIZERS = {"NFC": NFC_SHRINKS, "NFD": 1, "Prepend": 1, "ByteLevel": 1}
LOSSLESS_SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


class Encoder:
    """A tokenizer's `encode`. Texts that cannot fit into `max_model_len` tokens are rejected before tokenizing."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # tokenizers without a Rust core are not thread-safe
        self.max_model_len = max_model_len
        self.bytes_per_token = None if self._core is None else find_bytes_per_token(self._core)
        inspect_template(tokenizer)  # before threads share the tokenizer, whose state it changes temporarily
        if self._core is not None:
            self._core.encode_special_tokens = False  # as set by `split_special_tokens`
            self._core.no_truncation()
            self._core.no_padding()

    def check(self, *texts: str, max_len: int | None = None) -> None:
        """`ApiError` if the texts certainly exceed `max_len` (default `max_model_len`) tokens in total."""
        if self.bytes_per_token is None:
            return
        min_tokens = -(-sum(len(text.encode()) for text in texts) // self.bytes_per_token)
        if min_tokens > (longest := max_len or self.max_model_len):
            raise prompt_too_long(longest, min_tokens, at_least=True)

    def encode(self, text: str, add_special_tokens: bool = True, max_len: int | None = None) -> list[int]:
        """Tokenize plain text."""
        self.check(text, max_len=max_len)
        return self._encode(text, add_special_tokens)

    def find_offsets(self, text: str, add_special_tokens: bool) -> list[int]:
        """Where in the text each of its tokens begins; those that the tokenizer adds are empty."""
        if self._core is None:
            tokens = self._encode(text, add_special_tokens)
            return accumulate_offsets(build_decode(self._tokenizer), tokens, skip_special=True)
        offsets, position = [], 0
        for start, end in self._core.encode(text, add_special_tokens=add_special_tokens).offsets:
            # Byte-level tokenizers leave the space before a word out, and give parts of a character the same place.
            offsets.append(min(start, position) if start < end else position)
            position = max(position, end)
        return offsets

    def encode_chat(self, chat: RenderedChat, max_len: int | None = None) -> list[int]:
        """Tokenize a rendered chat."""
        self.check(*(piece for piece in chat.pieces if isinstance(piece, str)), max_len=max_len)
        min_tokens = sum(len(piece) for piece in chat.pieces if not isinstance(piece, str))
        if min_tokens > (longest := max_len or self.max_model_len):
            raise prompt_too_long(longest, min_tokens, at_least=True)
        ids: list[int] = []
        for piece in chat.pieces:
            ids += self._encode(piece, False) if isinstance(piece, str) else piece
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._core is None:
            with self._lock:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        # The variant that releases the GIL and computes no offsets.
        return list(self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


class PromptCache:
    """Thread-safe LRU cache of tokenized prompts, up to `CACHED_TOKENS` in total."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> list[int] | None:
        """Cached tokens of `key`, or None."""
        with self._lock:
            tokens = self._prompts.get(key)
            if tokens is None:
                return None
            self._prompts.move_to_end(key)
            return tokens.tolist()

    def put(self, key: bytes, tokens: list[int]) -> None:
        """Add tokens and evict the least recently used entries."""
        with self._lock:
            if key in self._prompts:
                return
            self._prompts[key] = array("i", tokens)
            self._num_tokens += len(tokens) + ENTRY_TOKENS
            while self._num_tokens > CACHED_TOKENS and len(self._prompts) > 1:
                _, dropped = self._prompts.popitem(last=False)
                self._num_tokens -= len(dropped) + ENTRY_TOKENS


def find_bytes_per_token(core: Any) -> int | None:
    """Maximum number of text bytes per token; None if unbounded.

    A tokenizer is bounded if no stage drops text or merges unknown parts into one token: byte-level BPE, or BPE with
    byte fallback, with normalizers and pre-tokenizers that preserve every byte.
    """
    vocab = core.get_vocab()
    stages = [*_stages(core.normalizer, "normalizers"), *_stages(core.pre_tokenizer, "pretokenizers")]
    byte_level = any(stage["type"] == "ByteLevel" for stage in stages) and all(c in vocab for c in byte_alphabet())
    falls_back = bool(getattr(core.model, "byte_fallback", False)) and all(f"<0x{i:02X}>" in vocab for i in range(256))
    if type(core.model).__name__ != "BPE" or not (byte_level or falls_back):
        return None
    added = core.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # these absorb any number of adjacent spaces
        return None
    shrinks = 1
    for stage in _stages(core.normalizer, "normalizers"):
        if not _keeps_length(stage):
            return None
        shrinks *= LOSSLESS_NORMALIZERS.get(stage["type"], 1)
    for stage in _stages(core.pre_tokenizer, "pretokenizers"):
        if stage["type"] not in LOSSLESS_SPLITTERS and stage.get("behavior", "Removed") == "Removed":
            return None
    ordinary = max(len(word) if byte_level else len(word.encode()) for word in vocab)
    return shrinks * max([ordinary, *(len(token.content.encode()) for token in added)])


def _stages(part: Any, members: str) -> list[dict[str, Any]]:
    """Settings of a normalizer or pre-tokenizer, with sequences flattened."""
    if part is None:
        return []
    settings = json.loads(part.__getstate__())
    return list(settings[members]) if settings["type"] == "Sequence" else [settings]


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer shortens text at most by a known factor."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in LOSSLESS_NORMALIZERS
