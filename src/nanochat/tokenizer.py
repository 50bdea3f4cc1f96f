"""Tokenizes texts, and conversations with a loss mask; user text never becomes a special token."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanochat.common import get_base_dir
from rollouts.training.types import Message

SPECIAL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "bos",
        "user_start",
        "user_end",
        "assistant_start",
        "assistant_end",
        "python_start",
        "python_end",
        "output_start",
        "output_end",
    )
)
SPLIT = (
    r"(?i:'(?:[sdmt]|ll|ve|re))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""GPT-4's pattern with numbers split after two digits, for small vocabularies."""

MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
TOKENIZER_FILE, PUBLISHED_FILE = "tokenizer.json", "tokenizer.pkl"
Part = dict[str, str]


class NanochatTokenizer:
    """A byte-level BPE whose last nine ids are the special tokens."""

    def __init__(self, inner: Tokenizer) -> None:
        inner.encode_special_tokens = True  # special tokens in a text are text
        self.inner = inner
        self._special: dict[str, int] = {}
        for name in SPECIAL_TOKENS:
            if (token := inner.token_to_id(name)) is None:
                raise ValueError(f"the tokenizer has no token {name}: it is not one of nanochat's")
            self._special[name] = token
        # Also if a file does not mark them, else a text could become a special token.
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> NanochatTokenizer:
        """Train `vocab_size` tokens from `texts`, including special ones; fewer if the texts have no more pairs."""
        if vocab_size < MIN_VOCAB:
            raise ValueError(f"vocab_size {vocab_size} must be at least {MIN_VOCAB}, bytes and special tokens")
        inner = _build_pipeline(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
        return cls(inner)

    @classmethod
    def from_ranks(cls, ranks: dict[bytes, int], special: dict[str, int], pattern: str) -> NanochatTokenizer:
        """From a published tokenizer: mergeable tokens by rank, special tokens by id, and the split pattern."""
        names = _byte_names()
        spell = {token: "".join(names[byte] for byte in token) for token in ranks}
        merges = [(spell[left], spell[right]) for left, right in _recover_merges(ranks)]
        vocab = {spell[token]: rank for token, rank in ranks.items()}
        inner = _build_pipeline(models.BPE(vocab=vocab, merges=merges, ignore_merges=True), pattern)
        ordered = sorted(special, key=lambda name: special[name])
        inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ordered])
        if wrong := [name for name in ordered if inner.token_to_id(name) != special[name]]:
            raise ValueError(f"special token {wrong[0]} has id {special[wrong[0]]}, which does not follow the others")
        return cls(inner)

    @classmethod
    def load(cls, directory: Path) -> NanochatTokenizer:
        """Load `tokenizer.json`, or a published `tokenizer.pkl`; `ValueError` without either."""
        directory = Path(directory)
        if (directory / TOKENIZER_FILE).is_file():
            return cls(Tokenizer.from_file(str(directory / TOKENIZER_FILE)))
        if (directory / PUBLISHED_FILE).is_file():
            return read_published((directory / PUBLISHED_FILE).read_bytes())
        raise ValueError(
            f"{directory} has no {TOKENIZER_FILE}: make one with `python -m scripts.tiny_bootstrap`, or copy a "
            f"published {PUBLISHED_FILE} there"
        )

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.inner.save(str(Path(directory) / TOKENIZER_FILE))

    @property
    def digest(self) -> str:
        """SHA-256 of the vocabulary, to tell tokenizers of equal size apart."""
        return hashlib.sha256(json.dumps(sorted(self.inner.get_vocab().items())).encode()).hexdigest()

    def get_vocab_size(self) -> int:
        """Number of ids, including special ones."""
        return int(self.inner.get_vocab_size())

    def get_bos_token_id(self) -> int:
        """Id of the token that starts every sequence."""
        return self._special["<|bos|>"]

    def encode_special(self, name: str) -> int:
        """Id of a special token such as `<|assistant_end|>`."""
        return self._special[name]

    def encode(
        self, text: str | Sequence[str], prepend: int | str | None = None, append: int | str | None = None
    ) -> Any:
        """Ids of a text, or of each of several; `prepend` and `append` are ids or names of special tokens."""
        if not isinstance(text, str):
            return [self.encode(one, prepend, append) for one in text]
        ids = self.inner.encode(text, add_special_tokens=False).ids
        return [*self._end(prepend), *ids, *self._end(append)]

    def _end(self, token: int | str | None) -> list[int]:
        return [] if token is None else [self._special[token] if isinstance(token, str) else token]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; incomplete characters become U+FFFD."""
        return str(self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_conversation(
        self, conversation: dict[str, Any] | Sequence[Message], max_tokens: int | None = 2048
    ) -> tuple[list[int], list[int]]:
        """Ids and loss mask: 1 on the assistant's text, tool calls and end token, 0 elsewhere.

        Users and assistant take turns, the user first; a system message in front is put before the user's first words.
        Assistants' content is text or parts `{"type": "text" | "python" | "python_output", "text"}`. What exceeds
        `max_tokens` is cut off at the end. `ValueError` for any other order, role or part.
        """
        ids, mask = [self.get_bos_token_id()], [0]

        def add(tokens: list[int], weight: int) -> None:
            ids.extend(tokens)
            mask.extend([weight] * len(tokens))

        for number, message in enumerate(merge_system(messages_of(conversation))):
            role = "assistant" if number % 2 else "user"
            if message.get("role") != role:
                raise ValueError(f"message {number + 1} is from {message.get('role')!r}, it is the turn of {role!r}")
            if message.get("content") is None or message.get("tool_calls"):
                raise ValueError(f"message {number + 1} has no content, or tool_calls: nanochat's chats are text alone")
            add([self._special[f"<|{role}_start|>"]], 0)
            if role == "user":
                add(self.encode(_text_of(message["content"])), 0)
            else:
                for kind, text in _parts_of(message["content"]):
                    add(*self._encode_part(kind, text))
            add([self._special[f"<|{role}_end|>"]], int(role == "assistant"))
        return ids[:max_tokens], mask[:max_tokens]

    def render_for_completion(self, conversation: dict[str, Any] | Sequence[Message]) -> list[int]:
        """Ids up to the start of the assistant's turn; a final assistant message is left out."""
        messages = messages_of(conversation)
        if messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        ids, _ = self.render_conversation(messages, None)
        return [*ids, self._special["<|assistant_start|>"]]

    def _encode_part(self, kind: str, text: str) -> tuple[list[int], int]:
        if kind == "text":
            return self.encode(text), 1
        name, weight = ("python", 1) if kind == "python" else ("output", 0)
        return self.encode(text, f"<|{name}_start|>", f"<|{name}_end|>"), weight


CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- set lead = messages[0].content ~ '\\n\\n' if has_system else '' -%}
{%- set rest = messages[1:] if has_system else messages -%}
<|bos|>
{%- for message in rest -%}
<|{{ message.role }}_start|>{{ lead if loop.first }}{{ message.content }}<|{{ message.role }}_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant_start|>{% endif -%}
"""
"""Jinja template equivalent to `render_conversation` for plain texts."""


def find_tokenizers(base_dir: Path) -> list[Path]:
    """Files of the tokenizer of a base directory; the first is loaded."""
    return [*filter(Path.is_file, (base_dir / "tokenizer" / name for name in (TOKENIZER_FILE, PUBLISHED_FILE)))]


def get_tokenizer(base_dir: Path | None = None) -> NanochatTokenizer:
    """The tokenizer of the base directory."""
    return NanochatTokenizer.load((base_dir or get_base_dir()) / "tokenizer")


def messages_of(conversation: dict[str, Any] | Sequence[Message]) -> list[Message]:
    """The messages of a conversation, which may be their list or `{"messages": [...]}`."""
    messages = conversation["messages"] if isinstance(conversation, dict) else conversation
    return [dict(message) for message in messages]


def merge_system(messages: list[Message]) -> list[Message]:
    """Merge the system message into the first user message, separated by a blank line."""
    if not messages or messages[0].get("role") != "system":
        return messages
    if len(messages) < 2 or messages[1].get("role") != "user":
        raise ValueError("a system message must be followed by a user's")
    texts = [_text_of(message.get("content")) for message in messages[:2]]
    return [{**messages[1], "content": "\n\n".join(texts)}, *messages[2:]]


def _text_of(content: Any) -> str:
    """The text of a non-assistant message: a string, or parts of type text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or any(part.get("type") != "text" for part in content):
        raise ValueError(f"the content of a user or system message must be text, got {content!r}")
    return "".join(text for _, text in _parts_of(content))


def _parts_of(content: str | list[Part]) -> list[tuple[str, str]]:
    if isinstance(content, str):
        return [("text", content)]
    parts = [(part.get("type", ""), part.get("text", "")) for part in content]
    if unknown := [kind for kind, _ in parts if kind not in ("text", "python", "python_output")]:
        raise ValueError(f"a part of type {unknown[0]!r}: an assistant's parts are text, python and python_output")
    return parts


def _build_pipeline(model: Any, pattern: str = SPLIT) -> Tokenizer:
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _byte_names() -> list[str]:
    """Byte to character of byte-level vocabularies: the printable character, else one above 255."""
    prints = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


def _recover_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair of tokens that each multi-byte token was merged from, by applying all lower ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) < 2:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            lowest = min(range(len(joined)), key=joined.__getitem__)
            if joined[lowest] >= rank:
                break
            parts[lowest : lowest + 2] = [parts[lowest] + parts[lowest + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


class _PublishedEncoding:
    """Inert replacement of `tiktoken.Encoding` in a pickle: only records its state."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataOnly(pickle.Unpickler):
    """Unpickler that maps the class of published tokenizers to an inert record and rejects everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _PublishedEncoding
        raise ValueError(f"the tokenizer file loads {module}.{name}: only a tiktoken.Encoding is admitted")


def read_published(data: bytes) -> NanochatTokenizer:
    """Load a published `tokenizer.pkl` without executing code; `ValueError` for other contents."""
    try:
        record = _DataOnly(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"this is no published tokenizer: {error}") from error
    state = getattr(record, "state", None)
    wanted = ("mergeable_ranks", "special_tokens", "pat_str")
    if not isinstance(record, _PublishedEncoding) or not isinstance(state, dict) or any(k not in state for k in wanted):
        raise ValueError("this is no published tokenizer: it must hold a tiktoken.Encoding with its tables")
    # Possessive quantifiers are only an optimization here: backtracking could never match.
    pattern = state["pat_str"].replace("?+", "?").replace("++", "+")
    return NanochatTokenizer.from_ranks(state["mergeable_ranks"], state["special_tokens"], pattern)
