"""Tokenizers of GGUF files as files of Hugging Face's `tokenizers`, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.training.json_files import read_json_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens: name in `tokenizer_config.json` --> name in GGUF."""

END_TOKENS = ("eot_token_id", "eom_token_id")
"""Keys of end tokens besides `eos_token_id`: end of turn, end of message."""

TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|eom_id|>")
"""End tokens that need no key: llama.cpp finds them by their text, and many files, such as Gemma 3's, rely on it."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE tokenizer splits text into words: `tokenizer.ggml.pre`."""

    split: str | None = None
    """Pattern of words; None: GPT-2's."""
    separate_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a word in the vocabulary is a token, whatever the merges."""
    adds_bos: bool = False
    """Whether texts start with the begin token in llama.cpp if the file does not specify it."""


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(separate_digits=True),
    "qwen2": PreTokenizer(QWEN_SPLIT, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(QWEN_SPLIT),
    "llama-bpe": PreTokenizer(LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
}


def build_tokenizer_files(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """`tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` from the metadata of a GGUF file."""
    from tokenizers import AddedToken

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    builders: dict[str | None, Callable[..., Tokenizer]] = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if kind not in builders:
        raise ValueError(f"tokenizer {kind!r} is not supported, only gpt2 (byte-level BPE) and llama (SentencePiece)")
    tokenizer = builders[kind](metadata, tokens)
    for i, token in enumerate(tokens):
        if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN):
            special = types[i] != TokenType.USER_DEFINED
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    _add_template(tokenizer, metadata, tokens)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, key in SPECIAL_TOKENS.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    files: dict[str, Any] = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config}
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files


def find_end_tokens(metadata: dict[str, Any]) -> list[int]:
    """Ids of the end tokens of texts and turns, by their keys and by `TURN_ENDS`."""
    keys = (f"tokenizer.ggml.{name}" for name in ("eos_token_id", *END_TOKENS))
    ends: list[int] = [metadata[key] for key in keys if key in metadata]
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    for i, kind in enumerate(metadata.get("tokenizer.ggml.token_type") or ()):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and tokens[i] in TURN_ENDS:
            ends.append(i)
    return list(dict.fromkeys(ends))


def _build_byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"pre-tokenizer {name!r} is not supported, only {', '.join(PRE_TOKENIZERS)}; "
            "give a Hugging Face directory instead"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.separate_digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _build_sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE with merges recovered from scores: a pair merges if its union is a token, best scores first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[i], vocab[left], vocab[right], (left, right)))
    merges = [pair for *_, pair in sorted(pairs)]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_template(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Add the begin and end tokens that the tokenizer itself puts around a text."""
    from tokenizers import processors

    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    pre = None if is_sentencepiece else PRE_TOKENIZERS[metadata.get("tokenizer.ggml.pre", "gpt-2")]
    adds_bos = pre is None or (pre.adds_bos and "tokenizer.ggml.bos_token_id" in metadata)
    before, after = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        before = [tokens[metadata["tokenizer.ggml.bos_token_id"]]]
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        after = [tokens[metadata["tokenizer.ggml.eos_token_id"]]]
    if before or after:
        specials = [(token, tokens.index(token)) for token in {*before, *after}]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=specials
        )


def read_tokenizer_metadata(directory: Path, vocab_size: int) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The keys of a GGUF file for the tokenizer of a Hugging Face directory: key -> value and GGUF types.

    `ValueError` if it is not a byte-level BPE tokenizer, or splits text in a way that GGUF has no name for.
    """
    import gguf
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no tokenizer.json")
    tokenizer, settings = read_json_file(path), read_json_file(directory / "tokenizer_config.json")
    pre = find_pre_tokenizer(tokenizer, path)
    tokens, types = _list_tokens(tokenizer, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    if not merges:
        raise ValueError(f"{path} has no merges, without which llama.cpp reads no model: train a tokenizer with some")
    kinds = gguf.GGUFValueType
    values: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "model": ("gpt2", (kinds.STRING,)),
        "pre": (pre, (kinds.STRING,)),
        "tokens": (tokens, (kinds.ARRAY, kinds.STRING)),
        "token_type": (types, (kinds.ARRAY, kinds.INT32)),
        "merges": (merges, (kinds.ARRAY, kinds.STRING)),
    }
    ids = {token: i for i, token in enumerate(tokens)}
    for name, key in SPECIAL_TOKENS.items():
        token = settings.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token in ids:
            values[f"{key}_token_id"] = ids[token], (kinds.UINT32,)
    end = values.get("eos_token_id", (None,))[0]
    turn_ends = {ids[token] for token in TURN_ENDS if token in ids}
    for name, token_id in zip(END_TOKENS, _read_further_ends(directory, end, turn_ends), strict=False):
        values[name] = token_id, (kinds.UINT32,)
    begin = values.get("bos_token_id", (None,))[0]
    first = Tokenizer.from_file(str(path)).encode("a").ids[:1]
    values["add_bos_token"] = begin is not None and first == [begin], (kinds.BOOL,)
    result = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    for name, template in _read_chat_templates(directory, settings).items():
        key = "tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}"
        result[key] = template, (kinds.STRING,)
    return result


def _read_chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: that of chat_template.jinja, else those of `tokenizer_config.json`, one or a list."""
    file = directory / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {} if found is None else {"default": found}


def _read_further_ends(directory: Path, end: int | None, turn_ends: set[int]) -> list[int]:
    """End tokens of `generation_config.json` besides `end`, those of `turn_ends`, which need no key, last.

    `ValueError` for more than GGUF has keys.
    """
    path = directory / "generation_config.json"
    ids = read_json_file(path).get("eos_token_id") if path.is_file() else None
    ends = [ids] if isinstance(ids, int) else list(ids or [])
    further = sorted((token_id for token_id in ends if token_id != end), key=turn_ends.__contains__)
    if len([token_id for token_id in further if token_id not in turn_ends]) > len(END_TOKENS):
        raise ValueError(f"{path} has {len(ends)} end tokens, GGUF has room for {1 + len(END_TOKENS)}: remove some")
    return further


def _list_tokens(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Tokens by id with their types; ids without a token are filled up to the rows of the embedding."""
    names = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(names, TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        names[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if max(names) >= vocab_size:
        raise ValueError(f"the tokenizer has token {max(names)}, but the model's vocab_size is {vocab_size}")
    tokens = [names.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    return tokens, [int(types.get(i, TokenType.UNUSED)) for i in range(vocab_size)]


def find_pre_tokenizer(tokenizer: dict[str, Any], source: object = "tokenizer.json") -> str:
    """The GGUF name of the way in which a `tokenizer.json` splits text; `ValueError` if it has none."""
    for name, pre in PRE_TOKENIZERS.items():
        metadata = {"tokenizer.ggml.pre": name, "tokenizer.ggml.merges": []}
        candidate = json.loads(_build_byte_level(metadata, []).to_str())
        ignores_merges = bool(tokenizer["model"].get("ignore_merges"))
        if _describe_splits(candidate) == _describe_splits(tokenizer) and pre.ignore_merges == ignores_merges:
            return name
    known = ", ".join(PRE_TOKENIZERS)
    raise ValueError(f"{source} splits text in a way that has no GGUF name here; supported are those of {known}")


def _describe_splits(tokenizer: dict[str, Any]) -> list[Any]:
    """Normalizer, patterns and digits: what decides the words of a text."""
    pre = tokenizer.get("pre_tokenizer") or {}
    keys = ("type", "pattern", "individual_digits", "use_regex", "add_prefix_space")
    steps = [tuple(str(step.get(key)) for key in keys) for step in pre.get("pretokenizers", [pre])]
    return [(tokenizer.get("normalizer") or {}).get("type"), tokenizer["model"]["type"], *steps]
