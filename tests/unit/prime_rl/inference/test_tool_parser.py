"""Reasoning and tool calls in generated text, complete and streamed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.inference.tool_parser import MessageParser

PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"}',
    '{"name": "f", "arguments": {}}',
    "a <",
    ";",
    " ",
]


def calls(parser: MessageParser, text: str) -> list[tuple[str, dict[str, object]]]:
    found = parser.parse(text, has_tools=True).calls
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


def test_hermes_calls() -> None:
    parser = MessageParser("hermes")
    first = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    text = first + '\n<tool_call>{"name": "g"}</tool_call>'
    assert calls(parser, text) == [("f", {"x": 1}), ("g", {})]
    assert parser.parse(text, has_tools=True).content == "Let me see.\n"
    assert parser.parse(text).content == text, "without tools nothing is a call"
    assert parser.parse('<tool_call>{"name": "f"}</tool_call>', has_tools=True).content is None


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_arguments_may_contain_the_tags_of_calls(tag: str) -> None:
    one = f'<tool_call>\n{{"name": "f", "arguments": {{"text": "a {tag} b"}}}}\n</tool_call>'
    assert calls(MessageParser("hermes"), f"{one}\n{one}") == [("f", {"text": f"a {tag} b"})] * 2


@pytest.mark.parametrize(
    ("name", "arguments"), [("f", '{"x": "\\ud83d"}'), ("\\ude00", "{}"), ("f", '"\\ud83dx\\ude00"')]
)
def test_calls_with_half_a_surrogate_pair_are_text(name: str, arguments: str) -> None:
    """A response in UTF-8 cannot have them."""
    for dialect, key in (("hermes", "arguments"), ("llama", "parameters")):
        call = f'{{"name": "{name}", "{key}": {arguments}}}'
        text = f"<tool_call>{call}</tool_call>" if dialect == "hermes" else call
        found = MessageParser(dialect).parse(text, has_tools=True)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_calls_with_numbers_that_json_lacks_are_text(number: str) -> None:
    call = f'{{"name": "f", "arguments": {{"x": {number}}}}}'
    for dialect, text in (("hermes", f"<tool_call>{call}</tool_call>"), ("llama", call)):
        found = MessageParser(dialect).parse(text, has_tools=True)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "f", "arg', "<tool_call>[1]</tool_call>", '{"name": 3}', "plain"]
)
@pytest.mark.parametrize("dialect", ["hermes", "llama"])
def test_what_is_no_call_stays_text(dialect: str, text: str) -> None:
    found = MessageParser(dialect).parse(text, has_tools=True)
    assert (found.content, found.calls) == (text, [])


def test_llama_calls() -> None:
    parser = MessageParser("llama")
    text = '<|python_tag|>{"name": "f", "parameters": {"x": "é"}}; {"name": "g", "parameters": {}}'
    assert calls(parser, text) == [("f", {"x": "é"}), ("g", {})]
    assert calls(parser, '{"name": "f", "arguments": {"y": 2}}\n') == [("f", {"y": 2})]
    assert calls(parser, 'I call {"name": "f", "parameters": {}}') == []


@pytest.mark.parametrize(
    "text", ['{"name": "Bob", "age": 5}', '{"name": "Bob"}', '{"name": "f", "parameters": {}, "x": 1}']
)
def test_structured_output_with_a_name_is_no_llama_call(text: str) -> None:
    found = MessageParser("llama").parse(text, has_tools=True)
    assert (found.content, found.calls) == (text, [])


def test_null_arguments_are_none() -> None:
    assert calls(MessageParser("llama"), '{"type": "function", "name": "f", "parameters": null}') == [("f", {})]
    assert calls(MessageParser("hermes"), '<tool_call>{"name": "f", "arguments": null}</tool_call>') == [("f", {})]


def test_reasoning_is_separated() -> None:
    parser = MessageParser("hermes", reasoning=True)
    found = parser.parse('<think>hm</think>\n\nok <tool_call>{"name": "f"}</tool_call>', has_tools=True)
    assert (found.reasoning, found.content, len(found.calls)) == ("hm", "\n\nok ", 1)
    assert parser.parse("hm</think>ok", opened=True).reasoning == "hm"
    assert parser.parse("never ends", opened=True).content == ""
    assert parser.parse("no tags").reasoning is None
    assert parser.parse("late <think>x</think>").content == "late <think>x</think>"
    assert MessageParser().parse("<think>x</think>y").content == "<think>x</think>y"


@given(
    st.lists(st.one_of(st.sampled_from(PIECES), st.text("ab<{/", max_size=4)), max_size=6).map("".join),
    st.sampled_from(["hermes", "llama"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_growing_answer_never_takes_anything_back(
    text: str, dialect: str, reasoning: bool, tools: bool, opened: bool
) -> None:
    parser = MessageParser(dialect, reasoning)
    final = parser.parse(text, has_tools=tools, opened=opened)
    shown = ("", "")
    for end in range(len(text) + 1):
        now = parser.parse_open(text[:end], has_tools=tools, opened=opened)
        assert now[0].startswith(shown[0]) and now[1].startswith(shown[1])
        shown = now
    assert (final.reasoning or "").startswith(shown[0])
    assert (final.content or "").startswith(shown[1].rstrip() if final.calls else shown[1])
