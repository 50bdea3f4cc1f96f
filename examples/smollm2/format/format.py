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
    """A rule: wordings of its instruction, values that fill them, and the score of an answer for a value, 0 to 1.

    With `is_lowercase` the whole prompt is written in lowercase.
    """

    wordings: Sequence[str]
    held_out_wordings: Sequence[str]
    values: Sequence[Any]
    held_out_values: Sequence[Any]
    score: Callable[[str, Any], float]
    show: Callable[[Any], str] = str
    is_lowercase: bool = False


def score_lowercase(text: str, value: None) -> float:
    """1 / (1 + 3 uppercase letters); 0 for less than three words."""
    num_uppercase = sum(letter != letter.lower() for letter in text)
    return 1 / (1 + 3 * num_uppercase) if len(re.findall(r"[^\W\d_]+", text)) >= MIN_WORDS else 0.0


def score_bullets(text: str, number: int) -> float:
    """1 / (1 + difference of the number of bullets), half of it for a numbered list; 0 with an item without text."""
    bullets, numbered = (re.findall(rf"^[ \t]*{mark}(.*)$", text, re.MULTILINE) for mark in (r"[-*\u2022]", r"\d+[.)]"))
    items = bullets or numbered
    if not items or not all(re.search(r"\w", item) for item in items):
        return 0.0
    return (1.0 if bullets else 0.5) / (1 + abs(len(items) - number))


def score_json(text: str, keys: Sequence[str]) -> float:
    """1 for a JSON object, alone or in a code block, with exactly these keys and no empty value.

    1/2 for any other object, 1/4 for a text that begins like one.
    """
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL)
    body = fenced[1] if fenced else text.strip()
    try:
        found = json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        return 0.25 if body.startswith("{") else 0.0
    if not isinstance(found, dict):
        return 0.0
    return 1.0 if sorted(found) == sorted(keys) and all(found.values()) else 0.5


def score_end(text: str, phrase: str) -> float:
    """1 if the phrase is last, after at least three other words; 1/2 if such words are around it or after it.

    Case, quotes and its last mark do not matter. The phrase alone scores 0: it is no answer.
    """
    before, found, after = text.lower().rpartition(phrase.lower().rstrip(".!?"))
    words_before, words_after = (len(re.findall(r"\w+", part)) for part in (before, after))
    if not found or words_before + words_after < MIN_WORDS:
        return 0.0
    return 1.0 if words_before >= MIN_WORDS and not words_after else 0.5


RULES = {
    "lower_case": Rule(
        ["Use only lowercase letters.", "Write in lowercase, without capital letters.", "No capital letters."],
        ["Your whole answer should be in lower case.", "Do not use any uppercase letter."],
        [None],
        [None],
        score_lowercase,
        is_lowercase=True,
    ),
    "bullets": Rule(
        ["Use exactly {} bullet points.", "Answer with {} bullet points.", "Give a list of {} bullet points."],
        ["Your answer must contain exactly {} bullets.", "Write {} items, each as a bullet point."],
        [2, 3, 4],
        [2, 3, 4],
        score_bullets,
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
        score_json,
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
        score_end,
    ),
}


def load_environment(
    rules: Sequence[str] = tuple(RULES), num_train_examples: int = 2000, num_eval_examples: int = 40, seed: int = 0
) -> dict[str, Any]:
    """One turn: a question about a topic with one of the `rules`. Reward: 1 if the answer follows the rule, less
    if it does so in part.

    Held-out prompts have topics, questions, wordings of the rule, and key names and phrases that training never uses.
    """
    if unknown := sorted(set(rules) - set(RULES)):
        raise ValueError(f"rules: {unknown[0]!r} is unknown, use some of {', '.join(RULES)}")
    return {
        "dataset": build_rows(num_train_examples, rules, f"train-{seed}", held_out=False),
        "eval_dataset": build_rows(num_eval_examples, rules, f"eval-{seed}", held_out=True),
        "rewards": [score, (follows_rule, 0.0)],
    }


def score(completion: str, info: dict[str, Any]) -> float:
    """How far the answer follows the rule of its row, 0 to 1."""
    return RULES[info["rule"]].score(completion, info["value"])


def follows_rule(completion: str, info: dict[str, Any]) -> float:
    """1 if the answer follows the rule of its row, else 0."""
    return float(score(completion, info) == 1)


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
        rows.append({"prompt": prompt.lower() if rule.is_lowercase else prompt, "info": {"rule": name, "value": value}})
    return rows
