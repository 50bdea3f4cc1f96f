"""Summarize a short post in a given number of characters: the exercise of Hugging Face's LLM course, chapter 12.5."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

PEOPLE = (
    "My roommate, My sister, My brother, My boss, My neighbor, My best friend, My cousin, My coworker, My landlord, "
    "My dad, My aunt, My teammate, My manager, My uncle, My old classmate, My mother-in-law"
).split(", ")
EVENTS = [
    "keeps eating my lunch from the fridge",
    "borrowed my car and gave it back without gas",
    "invited thirty people to our small party",
    "forgot my birthday for the second year",
    "plays loud music after midnight",
    "sold the bike that I had lent out",
    "told everyone about my new job before I could",
    "painted the kitchen green without asking me",
    "never answers my messages",
    "canceled our trip one day before the flight",
    "broke my laptop and blamed the cat",
    "takes credit for my work in every meeting",
    "adopted a puppy although I am allergic to dogs",
    "lost the keys to our apartment again",
    "wants me to pay for a wedding I cannot attend",
    "moved my desk next to the noisy printer",
    "keeps parking in my spot",
    "owes me two hundred dollars since March",
    "cooks fish every single evening",
    "threw away my collection of old comics",
]
HELD_OUT_EVENTS = [
    "read my diary and laughed about it at dinner",
    "washed my white shirts with a red sock",
    "left me alone with all the packing on moving day",
    "gave my concert ticket to somebody else",
    "cut down the tree in front of my window",
]
SEQUELS = [
    "I asked about it twice and got no real answer.",
    "We have hardly talked since then.",
    "My friends say that I should just let it go.",
    "Yesterday it happened again and I lost my temper.",
    "I wrote a long letter but did not send it.",
    "Now the whole family is involved.",
    "I have been awake all night because of it.",
    "An apology would be enough for me.",
]
QUESTIONS = [
    "What should I do?",
    "Am I wrong to be angry?",
    "How do I bring this up without a fight?",
    "Has anyone been through something like this?",
]


def load_environment(
    target: int = 50, num_train_examples: int = 2000, num_eval_examples: int = 64, seed: int = 0
) -> dict[str, Any]:
    """One turn: a post, and the request for a summary.

    Reward: 1 / (1 + |target - characters| / target), plus half of the share of the words that are from the post.
    Posts are made of parts; the events of held-out posts occur in no training post. Metrics: `distance` in characters
    and `within_10` characters.
    """
    if target < 1:
        raise ValueError(f"target {target} must be at least 1 character")

    def closeness(completion: str) -> float:
        return 1 / (1 + distance(completion) / target)

    def distance(completion: str) -> float:
        return abs(target - len(completion))

    def within_10(completion: str) -> float:
        return float(distance(completion) <= 10)

    return {
        "dataset": build_rows(num_train_examples, EVENTS, f"train-{seed}"),
        "eval_dataset": build_rows(num_eval_examples, HELD_OUT_EVENTS, f"eval-{seed}"),
        "rewards": [closeness, (distance, 0.0), (within_10, 0.0), (words_from_post, 0.5)],
    }


def words_from_post(completion: str, row: dict[str, Any]) -> float:
    """Share of the answer's words of four letters or more that occur in the post."""
    words, post = (set(re.findall(r"[a-z]{4,}", text.lower())) for text in (completion, row["info"]["post"]))
    return len(words & post) / len(words) if words else 0.0


def build_rows(num_rows: int, events: Sequence[str], seed: str) -> list[dict[str, Any]]:
    """Different random posts about the events; `ValueError` if there are not as many."""
    draw = random.Random(seed)
    choices = (PEOPLE, events, SEQUELS, QUESTIONS)
    num_posts = len(PEOPLE) * len(events) * len(SEQUELS) * len(QUESTIONS)
    if num_rows > num_posts:
        raise ValueError(f"{num_rows} posts: only {num_posts} different ones can be made, ask for fewer examples")
    rows = []
    for number in draw.sample(range(num_posts), num_rows):
        parts = []
        for options in choices:
            number, index = divmod(number, len(options))
            parts.append(options[index])
        person, event, sequel, question = parts
        post = f"{person} {event}. {sequel} {question}"
        rows.append({"prompt": f"Write a TL;DR of this post, one short sentence:\n\n{post}", "info": {"post": post}})
    return rows
