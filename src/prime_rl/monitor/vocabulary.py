"""Token ids to bytes, from `tokenizer.json` without loading a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.runtime.run_dir import RunDir

TOKENIZER_FILE = "tokenizer.json"


def find_tokenizer(run_dir: Path, model: str | None) -> Path | None:
    """The tokenizer of the newest weights, else of the initial model, else None."""
    steps = sorted(RunDir(run_dir).weights.glob(f"step_*/{TOKENIZER_FILE}"), key=lambda path: path.stat().st_mtime)
    if steps:
        return steps[-1]
    if model:
        bundled = Path(__file__).parents[1] / "assets" / model
        for folder in (Path(model), bundled):
            if (folder / TOKENIZER_FILE).exists():
                return folder / TOKENIZER_FILE
    return None


class Vocabulary:
    """Token id -> bytes. A character may be spread over several tokens, so texts are joined before they are decoded."""

    def __init__(self, path: Path) -> None:
        try:
            content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        model = content.get("model", {})
        table = model.get("vocab", {})
        words = table.items() if isinstance(table, dict) else ((entry[0], i) for i, entry in enumerate(table))
        self.words: dict[int, str] = {number: word for word, number in words}
        self.added: dict[int, str] = {token["id"]: token["content"] for token in content.get("added_tokens", [])}
        kinds = msgspec.json.encode([content.get("decoder"), content.get("pre_tokenizer")])
        self.byte_level = b'"ByteLevel"' in kinds
        self._bytes = _byte_table() if self.byte_level else {}

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; empty for unknown ids."""
        if token in self.added:
            return self.added[token].encode()
        word = self.words.get(token, "")
        if self.byte_level:
            return bytes(self._bytes.get(letter, 63) for letter in word)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", word):
            return bytes([int(match[1], 16)])
        return word.replace("\u2581", " ").encode()

    def table(self, tokens: Iterable[int]) -> dict[str, str]:
        """Id -> its bytes, each as the character of that number, for the page."""
        return {str(token): self.bytes_of(token).decode("latin-1") for token in sorted(set(tokens))}


def _byte_table() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies, in which every byte is a printable letter.

    Bytes that print stand for themselves, the others for the letters from 256 on.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
