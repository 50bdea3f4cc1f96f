"""Texts of completions with the decoders of Llama 2, which drop the first space of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import CHATML, build_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from prime_rl.inference.detokenizer import Detokenizer, StopStringMatcher, TokenNames, build_decode, find_context
from prime_rl.inference.engine import GenerationRequest, Output, StreamUpdate
from prime_rl.inference.request_parsing import ParsedRequest, build_requests, parse_request
from prime_rl.inference.responses import ChoiceStream, EchoedPrompt, Writer
from prime_rl.inference.tool_parser import MessageParser


def build_llama2() -> Any:
    """A tokenizer with spaces at the beginning of words and byte fallback."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        "▁The",
        "▁is",
        "▁Paris",
        "is",
        "▁",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "a",
    ]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    core.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


TOKENIZER = build_llama2()
DECODE = build_decode(TOKENIZER)
PROMPT, PARIS = TOKENIZER.convert_tokens_to_ids(["<s>", "▁The", "▁is"]), TOKENIZER.convert_tokens_to_ids("▁Paris")
EURO = TOKENIZER.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])


def encode_bytes(text: str) -> list[int]:
    """Byte tokens of a text."""
    return [int(TOKENIZER.convert_tokens_to_ids(f"<0x{byte:02X}>")) for byte in text.encode()]


def parse(body: dict[str, Any], *, chat: bool = False) -> ParsedRequest:
    return parse_request(body, chat=chat, max_new_tokens=99, vocab=999, default_seed=lambda: 0)


def build_writer() -> Writer:
    return Writer("m", DECODE, TokenNames(TOKENIZER))


def finish(request: GenerationRequest, ids: list[int]) -> Output:
    return Output(request, ids, [-1.0] * len(ids), [[(token, -1.0)] for token in ids], [(0, 0)], "length")


def test_a_completion_keeps_its_first_space() -> None:
    parsed, ids = parse({}), [PARIS, *EURO, PARIS]
    [request] = build_requests(PROMPT, parsed, 99, find_context(DECODE, PROMPT))
    output = finish(request, ids)
    (choice,) = build_writer().completion([PROMPT], [output], parsed, [EchoedPrompt("The is", [])])["choices"]
    assert choice["text"] == "The is Paris€ Paris" == DECODE(PROMPT + ids, True)
    stream = ChoiceStream(build_writer(), 0, parsed, chat=False)
    pieces = [stream.progress(StreamUpdate(request, i, [token], [-1.0], [])) for i, token in enumerate(ids)]
    assert [piece["text"] for piece in [*pieces, stream.end(output)]] == [" Paris", "", "", "€", " Paris", ""]
    watch = StopStringMatcher(Detokenizer(DECODE, True, request.context), (" Par",))
    assert watch.add(PARIS, True) == " Par"


@pytest.mark.parametrize("start", ["", "😁"])
@pytest.mark.parametrize("text", ["", "a", "€€", "a😀😁"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_characters_before_an_incomplete_one_are_kept(start: str, text: str, num_parts: int) -> None:
    """With byte fallback, in the text of a completion and in its stream."""
    prompt, ids = [*PROMPT, *encode_bytes(start)], encode_bytes(text + "🤣")[: num_parts - 4]
    parsed = parse({"logprobs": 0})
    [request] = build_requests(prompt, parsed, 99, find_context(DECODE, prompt))
    output = finish(request, ids)
    (choice,) = build_writer().completion([prompt], [output], parsed)["choices"]
    assert choice["text"] == text + num_parts * "�"
    stream = ChoiceStream(build_writer(), 0, parsed, chat=False)
    pieces = [stream.progress(StreamUpdate(request, i, [token], [-1.0], [])) for i, token in enumerate(ids)]
    assert "".join(piece["text"] for piece in pieces) == text
    assert stream.end(output)["text"] == num_parts * "�"


def test_only_a_prompt_with_text_is_continued() -> None:
    assert find_context(DECODE, PROMPT[:1]) == []
    assert find_context(DECODE, [*PROMPT, EURO[0]]) == [], "it ends in a part of a character"
    assert parse({}).continues and not parse({"messages": []}, chat=True).continues


def test_tokens_of_a_completion_join_to_its_text() -> None:
    parsed = parse({"logprobs": 2})
    ids = [PARIS, *EURO, *TOKENIZER.convert_tokens_to_ids(["▁is", "is", "</s>"])]
    [request] = build_requests(PROMPT, parsed, 99, find_context(DECODE, PROMPT))
    output = finish(request, ids)
    output.top_logprobs[4].append((ids[5], -2.0))
    (choice,) = build_writer().completion([PROMPT], [output], parsed)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == " Paris€ isis" and logprobs["text_offset"] == [0, 6, 6, 6, 7, 10, 12]
    assert logprobs["tokens"][0] == " Paris" and logprobs["top_logprobs"][4] == {" is": -1.0, "is": -2.0}
    stream = ChoiceStream(build_writer(), 0, parsed, chat=False)
    pieces = [stream.progress(StreamUpdate(request, i, [ids[i]], [-1.0], [])) for i in range(5)] + [stream.end(output)]
    assert [at for piece in pieces for at in piece["logprobs"]["text_offset"]] == logprobs["text_offset"]
    plain = finish(request, [PARIS, ids[4]])
    (choice,) = build_writer().completion([PROMPT], [plain], parsed)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 6]


def test_tags_that_are_special_tokens_are_text(tmp_path: Path) -> None:
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer = build_tokenizer(tmp_path, CHATML, ["<|im_end|>", *tags], [], {"eos_token": "<|im_end|>"})
    parser = MessageParser("hermes", reasoning=True)
    text = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    decode = build_decode(tokenizer, parser.tags)
    assert decode(ids, True) == text and decode(ids, False) == f"{text}<|im_end|>"
    assert "<tool_call>" not in build_decode(tokenizer)(ids, True)
    assert parser.tags == {*tags}, "not the line breaks around calls, which may end a turn"
    parsed = parse({"messages": [], "tools": [{}]}, chat=True)
    [request] = build_requests([1], parsed, 99, [])
    writer = Writer("m", decode, TokenNames(tokenizer), parser)
    (choice,) = writer.chat([1], [finish(request, ids)], parsed)["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("ok", "hm")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
