"""SFT data: subsets and splits, mixing, role masks, dropped rows, validation loss, exact resume."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger
from small_tokenizers import CHATML, UNMARKED, build_llama3, build_smollm2, build_tokenizer
from tokenizers.processors import TemplateProcessing

from prime_rl.configuration.errors import ConfigError
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.sft import validation
from prime_rl.trainer.sft.data import Position, SFTBatches, build_sft_batches, find_eos_ids, name_parts
from prime_rl.trainer.sft.samples import TokenizationStats, TokenizedSamples, tokenize_data, tokenize_rows
from prime_rl.trainer.sft.train import train
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.datasets.chat import TemplateRenderer
from rollouts.training.datasets.mixing import build_epoch_order
from rollouts.training.datasets.rows import find_files, load_rows
from rollouts.training.metrics import load_jsonl, load_last_attempts
from rollouts.training.types import Sample

ROOT = Path(__file__).parents[4]
QUESTION, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "1"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny-qwen3")


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(letter: str, num: int) -> list[dict[str, str]]:
    return [{"prompt": letter * (i % 5 + 1), "completion": letter} for i in range(num)]


def make_config(data: dict[str, Any], **changes: Any) -> SFTConfig:
    values = {
        "model": {"name": "tiny-qwen3", "debug": {"random_init": True, "num_layers": 1}},
        "optim": {"lr": 3e-3},
        "data": {"seq_len": 64, "batch_size": 4, **data},
        "log": {"file": False},
        "max_steps": 6,
    }
    return SFTConfig.model_validate({**values, **changes})


def trained_text(sample: Sample, tokenizer: Any) -> list[str]:
    """Text spans with loss."""
    edges = [i for i, (a, b) in enumerate(pairwise([0.0, *sample.loss_mask, 0.0])) if a != b]
    return [tokenizer.decode(sample.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def tokenize(rows: list[Any], tokenizer: Any, account: TokenizationStats | None = None, **data: Any) -> list[Sample]:
    config = make_config({"seq_len": 512, **data}).data
    return list(tokenize_rows(rows, config, tokenizer, 320, account or TokenizationStats()))


def test_tool_calls_are_trained(tokenizer: Any) -> None:
    for tools in (TOOLS, json.dumps(TOOLS)):
        row = {"messages": [QUESTION, CALL, RESULT, ANSWER], "tools": tools}
        [sample] = tokenize([row], tokenizer)
        call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
        assert trained_text(sample, tokenizer) == [call, "ba<|im_end|>"]
        assert "add(" in tokenizer.decode(sample.tokens) and "<|im_start|>tool\n3" in tokenizer.decode(sample.tokens)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({}, ["ba<|im_end|>", "ba<|im_end|>"]),
        ({"assistant": False, "tool": True}, ["<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>"]),
        ({"assistant": False, "user": True}, ["<|im_start|>user\nab<|im_end|>"]),
        ({"assistant": False, "system": True}, ["<|im_start|>system\ns<|im_end|>"]),
        ({"user": True}, ["<|im_start|>user\nab<|im_end|>", "ba<|im_end|>", "ba<|im_end|>"]),
    ],
)
def test_loss_mask_enables_roles(mask: dict[str, bool], expected: list[str], tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, QUESTION, ANSWER, RESULT, RESULT, ANSWER]
    [sample] = tokenize([{"messages": messages}], tokenizer, loss_mask=mask)
    assert trained_text(sample, tokenizer) == expected


def test_a_default_system_message_has_no_loss(tmp_path: Path) -> None:
    tokenizer = build_smollm2(tmp_path)
    turn = "<|im_start|>user\nab<|im_end|>"
    for messages, expected in (
        ([QUESTION, ANSWER], [turn, "ba<|im_end|>"]),
        ([QUESTION, QUESTION, ANSWER], [f"{turn}\n{turn}", "ba<|im_end|>"]),
        ([{"role": "system", "content": "s"}, QUESTION, ANSWER], [turn, "ba<|im_end|>"]),
    ):
        [sample] = tokenize([{"messages": messages}], tokenizer, loss_mask={"user": True})
        assert trained_text(sample, tokenizer) == expected
    [sample] = tokenize([{"messages": messages}], tokenizer, loss_mask={"assistant": False, "system": True})
    assert trained_text(sample, tokenizer) == ["<|im_start|>system\ns<|im_end|>"]


def test_a_default_system_message_may_end_unlike_a_turn(tmp_path: Path) -> None:
    """As under the templates of Mistral Small, and of GLM-4 with tools."""
    template = (
        "<s>[SYSTEM]be short[/SYSTEM]{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}"
        "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    special = ["<s>", "</s>", "[SYSTEM]", "[/SYSTEM]", "[INST]", "[/INST]"]
    mistral = build_tokenizer(tmp_path / "mistral", template, special, [], {"eos_token": "</s>"})
    glm = build_glm(tmp_path / "glm", "{% if tools %}<|system|>\n{{ tools }}{% endif %}")
    rows = [{"messages": [QUESTION, ANSWER], "tools": TOOLS}]
    [sample] = tokenize([{"messages": [QUESTION, ANSWER]}], mistral, loss_mask={"user": True})
    assert trained_text(sample, mistral) == ["[INST]ab[/INST]ba</s>"]
    [sample] = tokenize(rows, glm, loss_mask={"user": True})
    assert trained_text(sample, glm)[0] == "<|user|>\nab"


def build_glm(directory: Path, opening: str = "") -> Any:
    """A tokenizer and template as GLM's, which appends nothing to an answer: the role of the next message ends it."""
    template = (
        opening + "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    return build_tokenizer(directory, template, special, UNMARKED, {"eos_token": "<|endoftext|>"})


def test_the_next_role_ends_answers_without_an_end_token(tmp_path: Path) -> None:
    tokenizer, messages = build_glm(tmp_path), [QUESTION, CALL, RESULT, ANSWER, QUESTION, ANSWER]
    call, answer = "\n<tool_call>add</tool_call><|observation|>", "\nba<|user|>"
    for split_turns in (False, True):
        samples = tokenize([{"messages": messages}], tokenizer, split_turns=split_turns)
        assert [t for sample in samples for t in trained_text(sample, tokenizer)] == [call, answer, answer]
    [sample] = tokenize([{"messages": messages}], tokenizer, loss_mask={"user": True})
    assert trained_text(sample, tokenizer) == ["<|user|>\nab", call, "\nba<|user|>\nab", answer]
    [sample] = tokenize([{"messages": messages[:2]}], tokenizer)
    assert trained_text(sample, tokenizer) == [call]
    (tmp_path / "config.json").write_text('{"eos_token_id": 256}')
    assert find_eos_ids(tokenizer, tmp_path) == [256, 258, 260], "also those of a base model"


def test_an_end_token_that_only_precedes_turns_is_trained() -> None:
    """As that of Qwen 1.5, whose last answer has none."""
    end = "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}"
    template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{end}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer("tiny-qwen3", template)
    [sample] = tokenize([{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}], tokenizer)
    assert trained_text(sample, tokenizer) == ["ba<|im_end|>"] * 2


@pytest.mark.parametrize("has_begin", [False, True])
@pytest.mark.parametrize("adds_end", [False, True])
def test_plain_text_has_one_end_token(has_begin: bool, adds_end: bool) -> None:
    """Also if the tokenizer adds one to every text, as those of Llama's type may."""
    tokenizer = load_tokenizer("tiny-qwen3")
    tokenizer.chat_template = None
    begin, end = "<|endoftext|>" * has_begin, "<|im_end|>"
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|endoftext|>", end)]
    single = [*[begin] * has_begin, "$A", *[end] * adds_end]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.bos_token = "<|endoftext|>"
    rows = [{"prompt": "ab", "completion": "ba"}, {"text": "ab"}, {"prompt": f"a{end}", "completion": f"b{end}"}]
    rows += [{"text": f"{begin}ab{end}"}, {"prompt": f"{begin}a", "completion": "b"}]
    samples = tokenize(rows, tokenizer)
    found = [(tokenizer.decode(sample.tokens), *trained_text(sample, tokenizer)) for sample in samples]
    parts = [("ab", f"ba{end}"), ("", f"ab{end}"), (f"a{end}", f"b{end}"), ("", f"ab{end}"), ("a", f"b{end}")]
    assert found == [(begin + prompt + completion, completion) for prompt, completion in parts]


def test_a_begin_token_that_is_the_end_token_has_no_loss() -> None:
    tokenizer, end = load_tokenizer("tiny-qwen3"), "<|endoftext|>"
    tokenizer.bos_token = tokenizer.eos_token = end
    ids = [(end, tokenizer.convert_tokens_to_ids(end))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=[end, "$A", end], special_tokens=ids)
    for sample in tokenize([{"text": "ab"}, {"text": f"{end}ab{end}"}], tokenizer):
        assert tokenizer.decode(sample.tokens) == f"{end}ab{end}" and sample.loss_mask == [0, 1, 1, 1]


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_template_arguments_of_a_row_are_used(form: Any, tokenizer: Any) -> None:
    template = "{% if not enable_thinking|default(true) %}/no_think {% endif %}" + str(tokenizer.chat_template)
    other = load_tokenizer("tiny-qwen3", template)
    options = {"chat_template_kwargs": form({"enable_thinking": False})}
    formats: list[dict[str, Any]] = [
        {"messages": [QUESTION, ANSWER]},
        {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "ba"}]},
        {"question": "ab", "answer": "ba"},
        {"instruction": "ab", "output": "ba"},
    ]
    for row in formats:
        for split_turns in (False, True):
            plain, chosen = tokenize([row, row | options], other, split_turns=split_turns)
            assert tokenizer.decode(chosen.tokens) == "/no_think " + tokenizer.decode(plain.tokens)
            assert trained_text(chosen, tokenizer) == trained_text(plain, tokenizer) == ["ba<|im_end|>"]


def test_turns_of_weight_zero_have_no_loss(tokenizer: Any) -> None:
    left_out, learned = ANSWER | {"weight": 0}, ANSWER | {"content": "c", "weight": 1}
    row = {"messages": [QUESTION, left_out, QUESTION, learned, QUESTION, left_out]}
    for split_turns in (False, True):
        [sample] = tokenize([row], tokenizer, split_turns=split_turns)
        assert trained_text(sample, tokenizer) == ["c<|im_end|>"]
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[m["role"]], "value": m["content"], "weight": m.get("weight")} for m in row["messages"]]
    [sample] = tokenize([{"conversations": turns}], tokenizer)
    assert trained_text(sample, tokenizer) == ["c<|im_end|>"]
    assert tokenize([{"messages": [QUESTION, left_out]}], tokenizer) == []


def test_a_turn_with_other_keys_only_is_empty(tokenizer: Any) -> None:
    stats, noted = TokenizationStats(), ANSWER | {"content": "", "id": "m1", "refusal": "no"}
    assert tokenize([{"messages": [QUESTION, noted]}], tokenizer, stats) == [] and stats.empty_turns == 1
    for number, content in enumerate((" \n", [{"type": "text", "text": " \n"}]), start=2):
        blank = ANSWER | {"content": content, "reasoning_content": "\n"}
        assert tokenize([{"messages": [QUESTION, blank]}], tokenizer, stats) == [] and stats.empty_turns == number


def test_split_turns_supports_rewriting_templates(tokenizer: Any) -> None:
    """A template with reasoning in the last turn only: rejected as a whole, trained turn by turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rewriting = load_tokenizer("tiny-qwen3", template)
    thinking = ANSWER | {"reasoning_content": "hm"}
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, thinking, QUESTION, thinking]}]
    with pytest.raises(ValueError, match=r"row 1 .*not prefix-stable at message 3.*data\.split_turns"):
        tokenize(rows, rewriting)
    first, second, third = tokenize(rows, rewriting, split_turns=True)
    assert trained_text(first, rewriting) == ["ba<|im_end|>"]
    assert trained_text(second, rewriting) == ["<think>hm</think>ba<|im_end|>"] == trained_text(third, rewriting)
    assert rewriting.decode(third.tokens).count("<think>") == 1


@pytest.mark.parametrize("split_turns", [False, True])
def test_split_turns_is_no_cure_for_a_changed_prompt(split_turns: bool, tokenizer: Any) -> None:
    """As the template of DeepSeek-R1, whose generation prompt opens the reasoning that it drops from answers."""
    opening = load_tokenizer("tiny-qwen3", tokenizer.chat_template + "{% if add_generation_prompt %}<think>{% endif %}")
    with pytest.raises(ValueError, match=r"row 0 .*not prefix-stable at message 1.*its answer follows") as error:
        tokenize([{"messages": [QUESTION, ANSWER]}], opening, split_turns=split_turns)
    assert str(error.value).endswith("set tokenizer.chat_template to one that is")


def test_reasoning_that_the_template_drops_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    rows: list[Any] = [
        ({"content": "ba", "reasoning_content": "hm"}, "reasoning_content"),
        ({"content": "", "reasoning_content": "hm"}, "reasoning_content"),
        ({"content": "ba", "reasoning": "hm"}, "reasoning_content"),
        ({"content": "ba", "thinking": "hm"}, "reasoning_content"),
        ({"content": "<think>hm</think>ba"}, "content"),
        ({"content": "4 + 4", "reasoning_content": "4"}, "reasoning_content"),
        ({"content": "<think>ba</think>ba"}, "content"),
    ]
    template = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
    dropping = load_tokenizer("tiny-qwen3", template)
    for answer, key in rows:
        row = {"messages": [QUESTION, {"role": "assistant", **answer}]}
        for split_turns in (False, True):
            with pytest.raises(ValueError, match=f"row 0 .*drops the reasoning in `{key}` of message 1.*template"):
                tokenize([row], dropping, split_turns=split_turns)
    assert trained_text(tokenize([row], tokenizer)[0], tokenizer) == ["<think>ba</think>ba<|im_end|>"]
    row["messages"][1]["weight"] = 0
    assert tokenize([{"messages": [*row["messages"], QUESTION, ANSWER]}], dropping), "of turns without loss it may"
    llama = build_llama3(tmp_path / "llama")
    for name in ("reasoning", "thinking"):
        [sample] = tokenize([{"messages": [QUESTION, ANSWER | {name: "hm"}]}], llama)
        assert trained_text(sample, llama) == ["<think>hm</think>ba<|eot_id|>"]
    llama.chat_template = llama.chat_template.replace("reasoning_content", "thinking")
    [sample] = tokenize([{"messages": [QUESTION, ANSWER | {"thinking": "hm"}]}], llama)
    assert trained_text(sample, llama) == ["<think>hm</think>ba<|eot_id|>"], "as that of gpt-oss"


def test_text_that_the_template_drops_beside_calls_is_refused(tokenizer: Any) -> None:
    """As those of Llama 3.1 to 3.3."""
    written = "(message.tool_calls | string if message.tool_calls else message.content)"
    dropping = load_tokenizer("tiny-qwen3", CHATML.replace("message.content", written))
    for content in ("ok", [{"type": "text", "text": "ok"}], "<think></think>ok", "add"):
        rows = [{"messages": [QUESTION, CALL]}, {"messages": [QUESTION, CALL | {"content": content}, RESULT, ANSWER]}]
        with pytest.raises(ValueError, match=r"row 1 .*drops the text beside tool calls in `content` of message 1"):
            tokenize(rows, dropping)
        assert len(tokenize(rows, tokenizer)) == 2
    prompt = {"prompt": rows[1]["messages"][:3], "completion": [ANSWER]}
    assert tokenize([prompt], dropping), "of turns without loss it may"


@pytest.mark.parametrize("reasoning", ["", None, "hm"])
def test_content_with_reasoning_stays_as_it_is(reasoning: str | None) -> None:
    """Templates such as Qwen3's look for reasoning in the content only without `reasoning_content`."""
    thought = "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content is string else '')"
    tokenizer = load_tokenizer("tiny-qwen3", CHATML.replace("message.content", f"{thought} + message.content"))
    row = {"messages": [QUESTION, ANSWER | {"content": "<think>hm</think>ba", "reasoning": reasoning}]}
    assert trained_text(tokenize([row], tokenizer)[0], tokenizer) == ["<think>hm</think>ba<|im_end|>"]


def test_reasoning_that_is_in_the_content_too_may_be_dropped() -> None:
    row = {"messages": [QUESTION, ANSWER | {"content": "<think>hm</think>ba", "reasoning_content": "hm"}]}
    tokenizer = load_tokenizer("tiny-qwen3", CHATML)
    assert trained_text(tokenize([row], tokenizer)[0], tokenizer) == ["<think>hm</think>ba<|im_end|>"]


def test_an_empty_thought_may_be_dropped() -> None:
    tokenizer = load_tokenizer("tiny-qwen3", CHATML.replace("message.content", "message.content.split('</think>')[-1]"))
    row = {"messages": [QUESTION, ANSWER | {"content": "<think>\n\n</think>ba", "reasoning": " "}]}
    assert trained_text(tokenize([row], tokenizer)[0], tokenizer) == ["ba<|im_end|>"]


def test_an_empty_thought_of_the_template_is_named(tmp_path: Path) -> None:
    """As that of Qwen3-Thinking, whose line breaks before and after the thought become one token if it is empty."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    special, named = ["<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}
    thinking = build_tokenizer(tmp_path, template, special, ["<think>", "</think>", "\n\n"], named)
    for answer, words in (
        (ANSWER, r"writes an empty thought into message 1, .*`reasoning_content`, .*enable_thinking.*chat_template"),
        (ANSWER | {"reasoning_content": "\nhm"}, "message 1 begins with white space .*; strip the text"),
    ):
        with pytest.raises(ValueError, match=f"row 0 .*{words}"):
            tokenize([{"messages": [QUESTION, answer]}], thinking)
    [sample] = tokenize([{"messages": [QUESTION, ANSWER | {"reasoning_content": "hm"}]}], thinking)
    assert trained_text(sample, thinking) == ["hm\n</think>\n\nba<|im_end|>"]


def test_dropped_rows_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    empty = {"role": "assistant", "content": ""}
    rows: list[Any] = [
        *pairs("a", 2),
        {"messages": [QUESTION]},  # no assistant turn
        {"messages": [QUESTION, empty, QUESTION, ANSWER]},  # an empty and a non-empty turn
        {"prompt": "a", "completion": ""},
        {"prompt": "a" * 99, "completion": "b"},
        {"messages": [ANSWER, QUESTION, ANSWER]},  # an assistant turn without a prompt
        {"messages": [ANSWER]},
    ]
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)), level="INFO")
    try:
        config = make_config({"name": str(write(tmp_path / "rows.jsonl", rows))})
        samples = tokenize_data(config.data, tokenizer, 320)
    finally:
        logger.remove(handler)
    log = "".join(lines)
    assert len(samples) == 4 and samples.sizes == [4]
    assert "8 rows, 4 samples" in log and "1 samples exceed" in log and "first is row 5" in log
    assert "3 rows have no loss tokens" in log and "first is row 2" in log
    assert "2 empty assistant turns" in log and "2 assistant turns without a message before them" in log
    [cut] = tokenize([{"prompt": "a" * 20, "completion": "b" * 99}], tokenizer, seq_len=64, truncate=True)
    assert len(cut.tokens) == 64 and cut.loss_mask[-1] == 1
    short = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 4}
    with pytest.raises(ValueError, match=r"no loss tokens, every sample is longer than data\.seq_len = 4"):
        tokenize_data(make_config(short).data, tokenizer, 320)


def test_truncated_prompts_are_reported_with_their_cure(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a" * 99, "completion": "b"}]
    data = {"name": str(write(tmp_path / "rows.jsonl", rows)), "truncate": True}
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)))
    try:
        assert len(tokenize_data(make_config(data).data, tokenizer, 320)) == 1
    finally:
        logger.remove(handler)
    log = "".join(lines)
    assert "1 samples have no loss tokens within data.seq_len = 64" in log and "is row 1): raise it" in log
    assert "data.truncate" not in log
    with pytest.raises(ValueError, match=r"no loss tokens, every sample is longer than data\.seq_len = 4"):
        tokenize_data(make_config(data | {"seq_len": 4}).data, tokenizer, 320)


WRONG_ROWS: list[Any] = [
    ({"input": "a"}, "row 1 .*columns input"),
    ({"messages": [QUESTION, {"content": "x"}]}, "row 1 .*neither text nor a list of messages with a role"),
    ({"messages": [QUESTION, ANSWER], "tools": "[{"}, "row 1 .*`tools` is text, but not JSON"),
    ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "image"}]}]}, "row 1 .*'image'"),
    ({"messages": [QUESTION, {"role": "assistant", "content": "x \ud83d"}]}, "row 1 .*is not valid Unicode"),
    ({"text": "x \ud83d"}, "row 1 .*is not valid Unicode"),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": None, "function_call": {"name": "add"}}]},
        r"row 1 .*messages\[1\]\.function_call .* write it as tool_calls",
    ),
    ({"messages": [QUESTION, ANSWER], "functions": [{"name": "add"}]}, "row 1 .*`functions` .* rename it"),
    (
        {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"tokenize": True}},
        "row 1 .*`chat_template_kwargs` must not set tokenize",
    ),
    ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": 1}, "row 1 .*must be an object"),
    ({"messages": [QUESTION, ANSWER | {"weight": 0.5}]}, r"row 1 .*messages\[1\]\.weight is 0\.5: it must be 0"),
]


@pytest.mark.parametrize(("row", "words"), WRONG_ROWS)
def test_invalid_rows_are_reported(row: dict[str, Any], words: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=words):
        tokenize([{"messages": [QUESTION, ANSWER]}, row], tokenizer)


def test_subsets_and_splits_of_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", pairs("a", 1))
    write(tmp_path / "test-00000-of-00001.jsonl", pairs("b", 1))
    write(tmp_path / "math.jsonl", pairs("c", 1))
    write(tmp_path / "code/train/part.jsonl", pairs("d", 1))
    write(tmp_path / "code/val/part.jsonl", pairs("e", 1))
    write(tmp_path / "loose/x.jsonl", pairs("f", 1))
    name = str(tmp_path)

    def letter(*arguments: Any) -> str:
        return "".join(row["completion"] for row in load_rows(*arguments))

    assert letter(name) == "a" and letter(name, "test") == "b" and letter(name, "train", "math") == "c"
    assert letter(name, "train", "code") == "d" and letter(name, "val", "code") == "e"
    assert letter(f"{name}/loose") == "f" == letter(name, "train", "loose")
    write(tmp_path / "held" / "test.jsonl", pairs("g", 1))
    write(tmp_path / "held" / "gsm8k_validation.jsonl", pairs("h", 1))
    with pytest.raises(ValueError, match="holds no split 'train'"):
        find_files(f"{name}/held")
    write(tmp_path / "held" / "latest.jsonl", pairs("i", 1))
    assert letter(f"{name}/held") == "i"
    write(tmp_path / "held" / "gsm8k_train.jsonl", pairs("j", 1))
    assert letter(f"{name}/held") == "j" and letter(f"{name}/held", "test") == "g"
    for arguments, words in (
        ((name, "dev"), "holds no split 'dev'"),
        ((name, "train", "none"), "has no subset 'none'"),
        ((f"{name}/math.jsonl", "test"), "which has no split 'test'"),
        ((f"{name}/math.jsonl", "train", "x"), "no subset 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            find_files(*arguments)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (tmp_path / "no.parquet").write_bytes(b"PAR")
    for file, words in (("latin.jsonl", "line 1 is not valid JSON"), ("no.parquet", "is no parquet file")):
        with pytest.raises(ValueError, match=words):
            load_rows(str(tmp_path / file))


sizes_of_sources = st.lists(st.integers(1, 12), min_size=2, max_size=4)


def read_epoch(sizes: list[int], **options: Any) -> list[int]:
    order, out = build_epoch_order(sizes, **options), []
    while (index := order.at(len(out))) is not None:
        out.append(index)
    return out


@settings(max_examples=100, deadline=None)
@given(sizes_of_sources, st.booleans(), st.booleans(), st.integers(0, 5))
def test_epoch_end_follows_stopping_strategy(sizes: list[int], shuffle: bool, weighted: bool, epoch: int) -> None:
    options = {"shuffle": shuffle, "epoch": epoch, "seed": 1}
    if weighted:
        options["probabilities"] = [(s + 1) / sum(range(1, len(sizes) + 1)) for s in range(len(sizes))]
    starts = [sum(sizes[:s]) for s in range(len(sizes))]
    for stopping in ("first_exhausted", "all_exhausted"):
        read = read_epoch(sizes, stopping=stopping, **options)
        assert read == read_epoch(sizes, stopping=stopping, **options), "a pure function"
        counts = [sum(start <= i < start + size for i in read) for start, size in zip(starts, sizes, strict=True)]
        if stopping == "first_exhausted":
            assert len(set(read)) == len(read), "nothing comes twice"
            assert any(c == size for c, size in zip(counts, sizes, strict=True))
        else:
            assert set(read) == set(range(sum(sizes))), "everything has been read"
            assert any(c == size for c, size in zip(counts, sizes, strict=True)) or not weighted
            repeats = Counter(read).values()
            for start, size in zip(starts, sizes, strict=True):
                times = [n for i, n in Counter(read).items() if start <= i < start + size]
                assert max(times) - min(times) <= 1, "no sample of a source is ahead of the others by two rounds"
            assert sum(repeats) == len(read)


def test_subsets_are_sampled_by_probability() -> None:
    read = read_epoch([30_000, 30_000], probabilities=[0.2, 0.8], stopping="first_exhausted")
    assert sum(i < 30_000 for i in read) / len(read) == pytest.approx(0.2, abs=0.01)
    assert read_epoch([2, 4], shuffle=False, stopping="all_exhausted") == [0, 2, 1, 3, 0, 4, 1, 5]
    assert read_epoch([2, 4], shuffle=False, stopping="first_exhausted") == [0, 2, 1]
    assert name_parts([("a", "train"), ("b", "train")]) == ["a", "b"]
    assert name_parts([("a", "train"), ("a", "test")]) == ["a-train", "a-test"]
    assert name_parts([(None, "train"), (None, "test")]) == ["train", "test"]


WRONG_SETTINGS: list[Any] = [
    (["--data.subsets", "a", "b", "--data.probabilities", "0.5"], "1 entries for 2 subsets"),
    (["--data.subsets", "a", "b", "--data.probabilities", "0.5", "0.6"], "add up to 1"),
    (["--data.subsets", "a", "b", "--data.splits", "x"], "1 entries for 2 data.subsets"),
    (["--data.loss-mask.assistant", "false"], "disables all roles"),
    (["--data.split-turns", "--data.loss-mask.user"], "assistant only"),
    (["--data.type", "fake", "--val.interval", "3"], "val needs conversations"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_SETTINGS)
def test_invalid_settings_are_rejected(options: list[str], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        parse_argv(SFTConfig, options, "sft", environ={})


@pytest.mark.parametrize(
    ("batch_size", "pack_function", "warns"), [(40, "stack", False), (50, "stack", True), (40, "cat", True)]
)
def test_a_step_of_several_epochs_warns(
    batch_size: int, pack_function: str, warns: bool, tmp_path: Path, tokenizer: Any
) -> None:
    name = str(write(tmp_path / "rows.jsonl", pairs("a", 40)))
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)))
    data = {"name": name, "pack_function": pack_function, "batch_size": batch_size}
    build_sft_batches(make_config(data), 320, tokenizer)
    logger.remove(handler)
    assert any("A step trains on every sample" in line for line in lines) == warns
    assert any(f"A step takes {batch_size} rows" in line and "samples, of 40" in line for line in lines)


def test_stack_has_one_conversation_per_row(tmp_path: Path, tokenizer: Any) -> None:
    name = str(write(tmp_path / "rows.jsonl", pairs("a", 40)))
    for pack_function, least, most in (("stack", 4, 4), ("cat", 5, 40)):
        batches = build_sft_batches(make_config({"name": name, "pack_function": pack_function}), 320, tokenizer)
        position = batches.restore({})
        for _ in range(3):
            samples, position = batches.take(position)
            assert least <= len(samples) <= most


def test_held_out_samples_are_never_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "data/x.jsonl", pairs("x", 30))
    write(tmp_path / "data/y.jsonl", pairs("y", 10))
    data = {"name": str(tmp_path / "data"), "subsets": ["x", "y"]}
    batches = build_sft_batches(make_config(data, val={"num_samples": 8}), 320, tokenizer)
    assert len(batches.held_out) == 8 and sum(batches.source.sizes) == 32 and len(batches.source.sizes) == 2
    everything = tokenize_data(make_config(data).data, tokenizer, 320)
    again, _ = everything.hold_out(8, 42)
    assert isinstance(batches.source, TokenizedSamples) and again.digest() == batches.source.digest()
    for num, words in ((40, "would hold out all 40"), (39, "without samples")):
        with pytest.raises(ValueError, match=words):
            everything.hold_out(num, 0)


def test_split_turns_of_a_conversation_are_held_out_together(tmp_path: Path, tokenizer: Any) -> None:
    def find_letters(samples: Iterable[Sample]) -> set[str]:
        texts = [tokenizer.decode(sample.tokens) for sample in samples]
        return {letter for letter in "abcdefgh" for text in texts if f"-{letter}" in text}

    turns = [[{"role": "user", "content": f"-{c}"}, {"role": "assistant", "content": "x"}] * 3 for c in "abcdefgh"]
    data = {"name": str(write(tmp_path / "rows.jsonl", [{"messages": row} for row in turns])), "split_turns": True}
    batches = build_sft_batches(make_config(data, val={"num_samples": 4}), 320, tokenizer)
    trained = find_letters(batches.source.sample(i) for i in range(len(batches.source)))
    assert len(batches.held_out) == 6 and len(batches.source) == 18
    assert trained.isdisjoint(find_letters(batches.held_out)) and len(trained) == 6


MIXED = {"subsets": ["x", "y"], "probabilities": [0.25, 0.75], "stopping_strategy": "first_exhausted"}


def test_resume_with_mixing_is_exact(tmp_path: Path) -> None:
    write(tmp_path / "data/x.jsonl", pairs("x", 9))
    write(tmp_path / "data/y.jsonl", pairs("y", 7))
    data = {"name": str(tmp_path / "data"), **MIXED}
    val = {"num_samples": 3, "interval": 4}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(make_config(data, output_dir=straight, val=val, ckpt={}))
    train(make_config(data, output_dir=stopped, val=val, max_steps=3, ckpt={}))
    resume = {"ckpt": {"resume_step": -1}}
    train(make_config(data, output_dir=stopped, val=val, **resume))
    one, other = (path / "weights/step_6/model.safetensors" for path in (straight, stopped))
    assert one.read_bytes() == other.read_bytes()
    rows = list(load_jsonl(straight / "metrics.jsonl"))
    assert [row["step"] for row in rows if "val_loss/mean" in row] == [0, 4, 6]
    [last] = [row for row in rows if row["step"] == 6 and "loss/mean" in row]
    assert last["progress/x/ratio_samples"] + last["progress/y/ratio_samples"] == pytest.approx(1)
    assert last["progress/num_samples"] == last["progress/total_samples"] > 0
    assert last["progress/num_tokens"] == last["progress/total_tokens"]
    write(tmp_path / "data/y.jsonl", pairs("z", 7))
    with pytest.raises(ValueError, match="trained on other data"):
        train(make_config(data, output_dir=stopped, val=val, max_steps=8, **{"ckpt": {"resume_step": -1}}))


def test_a_resume_may_add_validation_on_other_data_only(tmp_path: Path, tokenizer: Any) -> None:
    data = {"name": str(write(tmp_path / "rows.jsonl", pairs("x", 9)))}
    other = str(write(tmp_path / "other.jsonl", pairs("y", 3)))
    saved = build_sft_batches(make_config(data), 320, tokenizer).restore({}).state()
    build_sft_batches(make_config(data, val={"name": other}), 320, tokenizer).restore({"position": saved})
    held_out = build_sft_batches(make_config(data, val={"num_samples": 3}), 320, tokenizer)
    with pytest.raises(ValueError, match=r"other samples held out by \[val\]: .*val\.name, may be added"):
        held_out.restore({"position": saved})


class NextDay(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.now(tz) + timedelta(days=1)


def test_a_resumed_run_writes_the_date_of_its_start(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ strftime_now('%d %B %Y') }}" + str(tokenizer.chat_template)
    chat = TemplateRenderer(load_tokenizer("tiny-qwen3", template), datetime(2001, 2, 3))
    assert chat.decode(chat.render([QUESTION], None, True)).startswith("03 February 2001")
    data = {"name": str(write(tmp_path / "rows.jsonl", pairs("x", 9)))}
    options = {"output_dir": tmp_path / "out", "tokenizer": {"chat_template": template}}
    train(make_config(data, max_steps=1, ckpt={}, **options))
    monkeypatch.setattr("prime_rl.trainer.sft.data.datetime", NextDay)
    assert train(make_config(data, max_steps=2, resume=True, **options)) == 0


def test_validation_loss_decreases(tmp_path: Path) -> None:
    name = str(write(tmp_path / "rows.jsonl", pairs("a", 40)))
    held = str(write(tmp_path / "val.jsonl", pairs("a", 5)))
    config = make_config({"name": name}, val={"name": held, "interval": 5}, output_dir=tmp_path / "out", max_steps=12)
    train(config)
    rows = [row for row in load_jsonl(tmp_path / "out/metrics.jsonl") if "val_loss/mean" in row]
    assert [row["step"] for row in rows] == [0, 5, 10, 12] and rows[0]["val/samples"] == 5
    assert rows[-1]["val_loss/mean"] < rows[0]["val_loss/mean"] / 2


def test_a_resume_makes_up_for_a_lost_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was killed between a checkpoint and the end of the validation of its step."""
    name = str(write(tmp_path / "rows.jsonl", pairs("a", 40)))
    options = {"val": {"num_samples": 4, "interval": 2}, "output_dir": tmp_path / "out", "max_steps": 4}
    run_validation = validation.run_validation

    def die_at(step: int) -> None:
        def run(*args: Any) -> None:
            assert args[-1] != step, "killed"
            run_validation(*args)

        monkeypatch.setattr(validation, "run_validation", run)

    for step, resume in ((2, False), (4, True), (-1, True), (-1, True)):
        die_at(step)
        with nullcontext() if step == -1 else pytest.raises(AssertionError, match="killed"):
            train(make_config({"name": name}, ckpt={"interval": 2}, resume=resume, **options))
    rows = load_last_attempts(tmp_path / "out/metrics.jsonl")
    assert [row["step"] for row in rows if "val_loss/mean" in row] == [0, 2, 4]


def test_validation_data_may_be_a_subset(tmp_path: Path, tokenizer: Any) -> None:
    for subset, size in (("main", 3), ("other", 2)):
        write(tmp_path / f"data/{subset}/train.jsonl", pairs("a", 4))
        write(tmp_path / f"data/{subset}/test.jsonl", pairs("b", size))
    name = str(tmp_path / "data")
    for subset, size in ((None, 3), ("other", 2)):
        val = {"name": name, "subset": subset, "split": "test"}
        config = make_config({"name": name, "subsets": ["main"]}, val=val)
        assert len(build_sft_batches(config, 320, tokenizer).held_out) == size
    for part in ("subset", "split"):
        with pytest.raises(ValueError, match=rf"val\.{part} is one of a validation dataset: set val\.name, too"):
            make_config({"name": name}, val={part: "test"})
    with pytest.raises(ValueError, match=r"\[val\] selects training data"):
        build_sft_batches(make_config({"name": name, "subsets": ["main"]}, val={"name": name}), 320, tokenizer)


def test_docs_snippets_work(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/sft.md: parse rows, settings and commands; run the mixing example."""
    page = (ROOT / "docs/sft.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    rows = [json.loads(line) for kind, text in blocks if kind == "json" for line in text.splitlines()]
    assert len(rows) == 8 and len(tokenize(rows, tokenizer, seq_len=1024)) == 8
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "my_data/math.jsonl", pairs("m", 20))
    write(tmp_path / "my_data/code/train.jsonl", pairs("c", 20))
    parsed = 0
    for kind, text in blocks:
        if kind == "toml":
            values = tomllib.loads(text)
            config = make_config(values.get("data", {}), val=values.get("val"), output_dir=tmp_path / f"out{parsed}")
            if "subsets" in values.get("data", {}):
                assert train(config.model_copy(update={"max_steps": 1})) == 0
            parsed += 1
    assert parsed == 3
    monkeypatch.chdir(ROOT)
    commands = [line.split("#")[0].split() for kind, text in blocks if kind == "bash" for line in text.splitlines()]
    assert len(commands) == 5
    for words in commands:
        assert words[0] == "sft"
        ends = "--num-epochs" in words or ("@" in words and "--trace-path" not in words)
        short = [] if ends else ["--max-steps", "3"]
        parse_argv(SFTConfig, [*words[1:], *short], "sft", environ={})


def test_positions_survive_json() -> None:
    position = Position(1, 2, 3, (4, 5), (6, 7), "x")
    batches = SFTBatches(TokenizedSamples(), 8, 1, False, 0)
    state = json.loads(json.dumps({"position": position.state()}))
    with pytest.raises(ValueError, match="other data"):
        batches.restore(state)
    state["position"]["digest"] = TokenizedSamples().digest()
    assert batches.restore(state).tokens == (6, 7)


def test_positions_belong_to_one_order_of_the_data() -> None:
    source = TokenizedSamples(sizes=[2, 3])
    mixed = SFTBatches(source, 8, 1, shuffle=True, seed=1, probabilities=[0.5, 0.5])
    state = {"position": mixed.restore({}).state()}
    assert mixed.restore(state) == mixed.restore({})
    others: list[dict[str, Any]] = [
        {"seed": 2},
        {"shuffle": False},
        {"probabilities": [0.25, 0.75]},
        {"stopping": "first_exhausted"},
    ]
    for change in others:
        with pytest.raises(ValueError, match=r"another order: resume with the original seed, data\.shuffle"):
            replace(mixed, **change).restore(state)
    plain = SFTBatches(TokenizedSamples(sizes=[5]), 8, 1, shuffle=False, seed=1)
    assert replace(plain, seed=2).restore({"position": plain.restore({}).state()})
    of_earlier_version = {"position": Position(digest=source.digest()).state()}
    assert mixed.restore(of_earlier_version) == mixed.restore({})
