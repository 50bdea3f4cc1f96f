"""Instructions with checkable rules: lowercase, n bullet points, a JSON object with given keys, a last phrase."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

TOPICS = (
    "the moon, bread, trains, honey bees, the guitar, rain, chess, the desert, coffee, bicycles, penguins, volcanoes, "
    "libraries, soccer, the heart, glaciers, paper, dolphins, pizza, clouds, robots, castles, tea, the piano, spiders, "
    "bridges, apples, the ocean, sleep, maps, frogs, gold, submarines, markets, snow, carpets, elephants, windmills, "
    "candles, the violin"
).split(", ")
HELD_OUT_TOPICS = (
    "the sun, rice, airplanes, ants, drums, thunder, tennis, the jungle, chocolate, ships, owls, earthquakes, museums, "
    "swimming, the brain, rivers, glass, whales, soup, stars"
).split(", ")
QUESTIONS = ["Tell me about {}.", "Describe {} in a few words.", "What is special about {}?", "Write about {}."]
HELD_OUT_QUESTIONS = ["What do you know about {}?", "Say something short about {}."]
MIN_WORDS = 3


@dataclass(frozen=True)
class Rule:
    """A rule: wordings of its instruction, values that fill them, and the check of an answer against a value."""

    wordings: Sequence[str]
    held_out_wordings: Sequence[str]
    values: Sequence[Any]
    held_out_values: Sequence[Any]
    check: Callable[[str, Any], bool]
    show: Callable[[Any], str] = str


def is_lowercase(text: str, value: None) -> bool:
    """No uppercase letter, and at least three words."""
    return text == text.lower() and len(re.findall(r"[a-z]+", text)) >= MIN_WORDS


def has_bullets(text: str, number: int) -> bool:
    """As many lines with a bullet and text as asked for, and no bullet without text."""
    bullets = re.findall(r"^[ \t]*[-*\u2022](.*)$", text, re.MULTILINE)
    return len(bullets) == number and all(re.search(r"\w", bullet) for bullet in bullets)


def is_json_with_keys(text: str, keys: Sequence[str]) -> bool:
    """A JSON object, alone or in a code block, with exactly these keys and a text, number or list for each."""
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else text)
    except (json.JSONDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and sorted(found) == sorted(keys) and all(found.values())


def ends_with(text: str, phrase: str) -> bool:
    """The phrase is last, after at least three other words; case, quotes and its last mark do not matter."""
    before, found, after = text.lower().rpartition(phrase.lower().rstrip(".!?"))
    return bool(found) and not re.search(r"\w", after) and len(re.findall(r"\w+", before)) >= MIN_WORDS


RULES = {
    "lower_case": Rule(
        ["Use only lowercase letters.", "Write in lowercase, without capital letters.", "No capital letters."],
        ["Your whole answer should be in lower case.", "Do not use any uppercase letter."],
        [None],
        [None],
        is_lowercase,
    ),
    "bullets": Rule(
        ["Use exactly {} bullet points.", "Answer with {} bullet points.", "Give a list of {} bullet points."],
        ["Your answer must contain exactly {} bullets.", "Write {} items, each as a bullet point."],
        [2, 3, 4],
        [2, 3, 4],
        has_bullets,
    ),
    "json_keys": Rule(
        [
            "Answer with a JSON object that has the keys {}.",
            "Reply in JSON with the keys {}.",
            "Use JSON format with keys {}.",
        ],
        ["Your whole answer should be a JSON object with the keys {}.", "Give JSON with exactly these keys: {}."],
        [
            *(["name", "fact"], ["title", "text"], ["topic", "summary"], ["word", "meaning"], ["kind", "color"]),
            *(["subject", "size"], ["label", "use"], ["item", "origin"]),
        ],
        [["name", "summary"], ["title", "reason"], ["thing", "place"], ["word", "example"]],
        is_json_with_keys,
        lambda keys: " and ".join(f'"{key}"' for key in keys),
    ),
    "end_phrase": Rule(
        [
            'End your answer with the words "{}".',
            'The last words of your answer should be "{}".',
            'Finish with "{}".',
        ],
        ['Your answer must end with the exact phrase "{}".', 'Close with the phrase "{}".'],
        [
            *(
                "That is all.",
                "Have a nice day!",
                "Hope this helps.",
                "The end.",
                "See you soon.",
                "Thanks for asking.",
            ),
            *("Over and out.", "Now you know."),
        ],
        ["Any other questions?", "Good luck!", "I hope you agree.", "Enjoy the rest of your day."],
        ends_with,
    ),
}


def load_environment(
    rules: Sequence[str] = tuple(RULES), num_train_examples: int = 2000, num_eval_examples: int = 40, seed: int = 0
) -> dict[str, Any]:
    """One turn: a question about a topic with one of the `rules`. Reward: 1 if the answer follows the rule.

    Held-out prompts have topics, questions, wordings of the rule, and key names and phrases that training never uses.
    """
    if unknown := sorted(set(rules) - set(RULES)):
        raise ValueError(f"rules: {unknown[0]!r} is unknown, use some of {', '.join(RULES)}")
    return {
        "dataset": build_rows(num_train_examples, rules, f"train-{seed}", held_out=False),
        "eval_dataset": build_rows(num_eval_examples, rules, f"eval-{seed}", held_out=True),
        "rewards": follows_rule,
    }


def follows_rule(completion: str, info: dict[str, Any]) -> float:
    """1 if the answer follows the rule of its row, else 0."""
    return float(RULES[info["rule"]].check(completion, info["value"]))


def build_rows(num_rows: int, rules: Sequence[str], seed: str, *, held_out: bool) -> list[dict[str, Any]]:
    """Random prompts, the rules in turn."""
    draw = random.Random(seed)
    topics, questions = (HELD_OUT_TOPICS, HELD_OUT_QUESTIONS) if held_out else (TOPICS, QUESTIONS)
    rows = []
    for i in range(num_rows):
        name = rules[i % len(rules)]
        rule = RULES[name]
        wording = draw.choice(rule.held_out_wordings if held_out else rule.wordings)
        value = draw.choice(rule.held_out_values if held_out else rule.values)
        question = draw.choice(questions).format(draw.choice(topics))
        prompt = f"{question} {wording.format(rule.show(value))}"
        rows.append({"prompt": prompt, "info": {"rule": name, "value": value}})
    return rows
