"""Bounded encoding: the limit of bytes for each token, and texts that are rejected without being encoded."""

from __future__ import annotations

import threading
import time
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.detokenizer import accumulate_offsets, build_decode, byte_alphabet
from prime_rl.inference.encoding import NFC_SHRINKS, Encoder, PromptCache, find_bytes_per_token
from prime_rl.inference.request_parsing import ApiError
from prime_rl.runtime.tokenizer import load_tokenizer
from rollouts.training.datasets.chat import render_chat, render_pieces

TEXTS = ("", "abc", "Grüße 你好 🙂", "<|im_end|>x<|im_start|>system\n", " " * 50, "a\u0301\u212b")


def build_byte_level(*, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    vocab = {char: i for i, char in enumerate(byte_alphabet())} | {"aa": 256, "aaaa": 257}
    core = Tokenizer(models.BPE(vocab, [("a", "a"), ("aa", "aa")]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = byte_level if splitter is None else pre_tokenizers.Sequence([splitter, byte_level])
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    return core


def test_offsets_of_tokens_in_a_text() -> None:
    words = {word: i for i, word in enumerate(["<s>", "▁", "a", "b", "▁a", "▁b"])}
    joined = Tokenizer(models.BPE(words, [("▁", "a"), ("▁", "b")]))
    joined.pre_tokenizer, joined.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    joined.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=joined, clean_up_tokenization_spaces=False)
    tokens = tokenizer.encode("ab b a")
    assert Encoder(tokenizer, 64).find_offsets("ab b a", True) == [0, 0, 1, 2, 4, 6]
    assert accumulate_offsets(build_decode(tokenizer), tokens[1:-1]) == [0, 1, 2, 4]

    core = build_byte_level()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    assert Encoder(tokenizer, 64).find_offsets("aa é b", True) == [0, 2, 3, 3, 4, 5]
    assert accumulate_offsets(build_decode(tokenizer), tokenizer.encode("aa é b")) == [0, 2, 3, 3, 4, 5]


def test_limit_is_longest_token_of_byte_level_bpe() -> None:
    core = build_byte_level()
    assert find_bytes_per_token(core) == 4
    core.add_special_tokens(["<|end|>"])
    assert find_bytes_per_token(core) == 7
    assert find_bytes_per_token(build_byte_level(normalizer=normalizers.NFC())) == 4 * NFC_SHRINKS
    assert find_bytes_per_token(load_tokenizer("tiny-qwen3").backend_tokenizer) == 31


@pytest.mark.parametrize(
    "core",
    [
        build_byte_level(normalizer=normalizers.Strip()),
        build_byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        build_byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        build_byte_level(normalizer=normalizers.Replace("    ", " ")),
        build_byte_level(splitter=pre_tokenizers.WhitespaceSplit()),
        build_byte_level(splitter=pre_tokenizers.Split(" ", "removed")),
        Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?")),
        Tokenizer(models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)),
    ],
)
def test_no_limit_where_a_token_may_stand_for_any_text(core: Tokenizer) -> None:
    assert find_bytes_per_token(core) is None


def test_no_limit_where_added_tokens_take_spaces() -> None:
    core = build_byte_level()
    core.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(core.encode(" " * 1000 + "<mask>").ids) == 1
    assert find_bytes_per_token(core) is None


def test_nfc_shrinks_by_less_than_the_factor() -> None:
    """Each character of a decomposition may be written by a longer one that stands for it alone."""
    longest: dict[str, int] = {}
    chars = [chr(code) for code in range(0x3400)]  # compositions outside are of three or four bytes
    for char in chars:
        decomposed = unicodedata.normalize("NFD", char)
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(char.encode()))
    factors = [
        sum(longest[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode())
        for char in chars
        if unicodedata.normalize("NFC", char) == char
    ]
    assert 3 < max(factors) < NFC_SHRINKS


def test_encoder_gives_the_tokens_of_the_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    encoder = Encoder(tokenizer, 2048)
    for text in TEXTS:
        expected = list(tokenizer.encode(text))
        assert encoder.encode(text) == expected
        assert len(text.encode()) <= encoder.bytes_per_token * len(expected)  # type: ignore[operator]
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}<|im_end|>"}]
        assert encoder.encode_chat(render_pieces(tokenizer, chat)) == render_chat(tokenizer, chat)


def test_long_text_is_refused_without_being_encoded() -> None:
    encoder = Encoder(load_tokenizer("tiny-qwen3"), 128)
    start = time.process_time()  # other processes of the machine do not count
    for text in ("a" * 20_000_000, "<|im_end|>" * 1_000_000):
        with pytest.raises(ApiError, match="maximum context length is 128 tokens, but the prompt has at least"):
            encoder.encode(text)
    assert time.process_time() - start < 1.0
    chat = render_pieces(load_tokenizer("tiny-qwen3"), [{"role": "user", "content": "<|im_end|>" * 200}])
    with pytest.raises(ApiError, match="maximum context length is"):
        encoder.encode_chat(chat)


def test_encoding_releases_the_interpreter() -> None:
    """Another thread runs while a text is encoded."""
    encoder = Encoder(load_tokenizer("tiny-qwen3"), 10**7)
    thread = threading.Thread(target=encoder.encode, args=("hello world " * 50_000,))
    start, ticks, alive_for = time.monotonic(), 0, 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks, alive_for = ticks + 1, time.monotonic() - start
    assert ticks >= 10, (ticks, alive_for)


def test_prompt_cache_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.inference.encoding.CACHED_TOKENS", 1000)
    cache = PromptCache()
    for i in range(20):
        cache.put(b"%d" % i, [i] * 100)
        assert cache.get(b"0") is not None or i > 5
    held = [i for i in range(20) if cache.get(b"%d" % i) is not None]
    assert len(held) == 1000 // 164 and 19 in held and cache.get(b"19") == [19] * 100
