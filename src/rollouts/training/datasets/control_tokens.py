"""Control tokens of a tokenizer, and escaping of text that contains their spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

BRACKETED = re.compile(r"\W.*\w.*\W", re.DOTALL)


@dataclass(frozen=True)
class ControlTokens:
    """Tokens that structure a chat: all special tokens, and other tokens with which the template frames messages.

    ids        their token ids
    literals   their texts, the longest first
    spelled    token ids of each literal as plain text; None if the vocabulary cannot represent it
    """

    ids: frozenset[int]
    literals: tuple[str, ...]
    spelled: tuple[tuple[int, ...] | None, ...]
    pattern: re.Pattern[str]

    def find(self, value: Any) -> str | None:
        """The first control token in the strings of a JSON tree; None if there is none."""
        found = filter(None, map(self.pattern.search, _iter_strings(value)))
        return next((match[0] for match in found), None)

    def hide(self, value: Any) -> tuple[Any, str]:
        """Replace the control tokens in all strings of a JSON tree by placeholders.

        Returns the new tree and the character that encloses placeholders; the tree itself and "" if it holds none.
        """
        strings = list(_iter_strings(value))
        if not any(map(self.pattern.search, strings)):
            return value, ""
        marker = _find_unused_character(strings)
        index = {literal: i for i, literal in enumerate(self.literals)}
        hidden = _map_strings(value, lambda s: self.pattern.sub(lambda m: f"{marker}{index[m[0]]}{marker}", s))
        return hidden, marker

    def split(self, text: str, marker: str) -> list[str | tuple[int, ...]]:
        """Cut a text at its placeholders: text to be encoded, and the token ids that spell the hidden control tokens.

        `ValueError` for a placeholder that the template damaged, and for a token that cannot be spelled.
        """
        if not marker:
            return [text] if text else []
        pieces: list[str | tuple[int, ...]] = []
        for i, piece in enumerate(re.split(f"{marker}(\\d+){marker}", text)):
            if i % 2:
                spelled = self.spelled[int(piece)]
                if spelled is None:
                    raise ValueError(f"the vocabulary cannot write {self.literals[int(piece)]!r} as text: remove it")
                pieces.append(spelled)
            elif marker in piece or json.dumps(marker)[1:-1] in piece:
                raise ValueError("the chat template cuts or escapes text that holds a special token: remove the token")
            elif piece:
                pieces.append(piece)
        return pieces


def find_control_tokens(tokenizer: Any, framed: Iterable[str] = ()) -> ControlTokens:
    """The control tokens of a tokenizer; `framed` are conversations of plain words, as its template writes them.

    An added token that is not marked special, such as `<think>`, `<tool_call>` or a run of spaces, is vocabulary that
    messages may use. It is a control token only if it frames the plain conversations: some tokenizers leave
    `<|im_start|>` unmarked. Reasoning tags, which templates write into answers, are never meant by that.
    """
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
    literals = {added[token].content for token in ids if token in added} | set(tokenizer.all_special_tokens)
    for token in {token for text in framed for token in tokenizer.encode(text, add_special_tokens=False)} - ids:
        content = added[token].content if token in added else ""
        if BRACKETED.fullmatch(content) and "think" not in content.lower():
            ids.add(token)
            literals.add(content)
    ordered = tuple(sorted(filter(None, literals), key=lambda literal: (-len(literal), literal)))
    forbidden = ids - {getattr(tokenizer, "unk_token_id", None)}  # what unknown characters become anyway
    spelled = tuple(_spell(tokenizer, literal, forbidden) for literal in ordered)
    tokenizer.encode("", add_special_tokens=False)  # `split_special_tokens` is a state, which this switches off
    pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
    return ControlTokens(frozenset(ids), ordered, spelled, pattern)


def _spell(tokenizer: Any, literal: str, forbidden: set[int]) -> tuple[int, ...] | None:
    """Token ids that spell a control token; None if they would hold a control token again.

    A special token of one character is an ordinary word that was made special, a padding token say.
    """
    with suppress(TypeError):  # a tokenizer of other code may lack the option
        ids = tokenizer.encode(literal, add_special_tokens=False, split_special_tokens=True)
        if len(literal) == 1 or not forbidden.intersection(ids):
            return tuple(ids)
    ids = [token for character in literal for token in tokenizer.encode(character, add_special_tokens=False)]
    return tuple(ids) if len(literal) == 1 or not forbidden.intersection(ids) else None


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iter_strings(key)
            yield from _iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return value


def _find_unused_character(strings: Sequence[str]) -> str:
    """A character of a private-use plane that is in none of the strings."""
    used = set().union(*strings)
    return next(chr(code) for code in range(0xF0000, 0xFFFFD) if chr(code) not in used)
