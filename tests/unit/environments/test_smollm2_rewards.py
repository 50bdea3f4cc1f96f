"""Rewards and splits of the environments in examples/smollm2/{length,format}."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples/smollm2"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_length_rewards_the_distance_to_the_target() -> None:
    env = load("length").load_environment(target=20, num_train_examples=30, num_eval_examples=10)
    closeness, (distance, _), (within_10, _), (words, _) = env["rewards"]
    assert [closeness("x" * n) for n in (20, 30, 0, 60)] == pytest.approx([1, 2 / 3, 1 / 2, 1 / 3])
    assert distance("x" * 30) == 10 and within_10("x" * 30) == 1 and within_10("x" * 31) == 0
    row = {"info": {"post": "My roommate forgot my birthday."}}
    assert words("Roommate forgot everything", row) == pytest.approx(2 / 3) and words("a b", row) == 0
    with pytest.raises(ValueError, match="target 0 must be at least 1"):
        load("length").load_environment(target=0)
    with pytest.raises(ValueError, match="only 10240 different ones"):
        load("length").load_environment(num_train_examples=20000)


def test_posts_differ_and_held_out_events_are_new() -> None:
    module = load("length")
    env = module.load_environment(num_train_examples=300, num_eval_examples=64)
    train, held_out = ([row["prompt"] for row in env[split]] for split in ("dataset", "eval_dataset"))
    assert len(set(train)) == 300 and len(set(held_out)) == 64
    assert not any(event in prompt for prompt in train for event in module.HELD_OUT_EVENTS)
    assert all(any(event in prompt for event in module.HELD_OUT_EVENTS) for prompt in held_out)


@pytest.mark.parametrize(
    ("rule", "value", "good", "bad"),
    [
        (
            "lower_case",
            None,
            ["honey bees live in hives.", "wörter in kleinbuchstaben"],
            ["Bees live here", "ok", "..."],
        ),
        (
            "bullets",
            2,
            ["- a\n- b", "Here:\n* one\n* two\n", "\u2022 a\n\u2022 b"],
            ["- a", "- a\n- b\n- c", "- a\n-", "a b"],
        ),
        (
            "json_keys",
            ["name", "fact"],
            ['{"name": "x", "fact": "y"}', '```json\n{"fact": 1, "name": ["z"]}\n```'],
            ['{"name": "x"}', '{"name": "x", "fact": ""}', '["name", "fact"]', "name: x", '{"name": 1, "fact": 2} end'],
        ),
        (
            "end_phrase",
            "Good luck!",
            ["Snow is cold water. Good luck!", 'It is very cold. "good luck."'],
            ["Good luck!", "Good luck! It is very cold.", "It is very cold.", "Good luck good luck"],
        ),
    ],
)
def test_format_rules(rule: str, value: Any, good: list[str], bad: list[str]) -> None:
    reward = load("format").follows_rule
    info = {"rule": rule, "value": value}
    assert [text for text in good if reward(text, info) != 1] == []
    assert [text for text in bad if reward(text, info) != 0] == []


@pytest.mark.parametrize(
    ("rule", "value", "text", "expected"),
    [
        ("lower_case", None, "Honey bees live in Hives.", 1 / 7),
        ("lower_case", None, "ok", 0),
        ("bullets", 3, "- a\n- b", 1 / 2),
        ("bullets", 3, "1. a\n2. b\n3. c", 1 / 2),
        ("bullets", 3, "a, b", 0),
        ("json_keys", ["name"], '{"title": "x"}', 1 / 2),
        ("json_keys", ["name"], '{"name": "x', 1 / 4),
        ("json_keys", ["name"], '["name"]', 0),
        ("end_phrase", "The end.", "The end. But not yet", 1 / 2),
        ("end_phrase", "The end.", "It is cold.", 0),
        ("end_phrase", "The end.", "The end.", 0),
        ("end_phrase", "The end.", "So: the end.", 0),
    ],
)
def test_format_gives_partial_credit(rule: str, value: Any, text: str, expected: float) -> None:
    assert load("format").score(text, {"rule": rule, "value": value}) == pytest.approx(expected)


def test_rules_are_mixed_and_held_out_prompts_are_new() -> None:
    module = load("format")
    env = module.load_environment()
    assert [row["info"]["rule"] for row in env["dataset"][:4]] == list(module.RULES)
    train, held_out = ([row["prompt"] for row in env[split]] for split in ("dataset", "eval_dataset"))
    assert not set(train) & set(held_out)
    assert not set(module.TOPICS) & set(module.HELD_OUT_TOPICS)
    for rule in module.RULES.values():
        assert not set(rule.wordings) & set(rule.held_out_wordings)
    one = module.load_environment(rules=["bullets"])
    assert {row["info"]["rule"] for row in one["eval_dataset"]} == {"bullets"}
    with pytest.raises(ValueError, match="'rhyme' is unknown, use some of lower_case"):
        module.load_environment(rules=["rhyme"])
