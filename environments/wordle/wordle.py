"""Wordle over several turns: a hidden word of a shipped list, colored hints, no download."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = (
    "You play word games to win and keep to the rules and formats you are given.\n\n"
    "In each turn think step by step, then write your guess inside <guess>...</guess> tags."
)
RULES = (
    "Let us play Wordle. I have chosen a secret word of {length} letters, and you may guess {max_guesses} times.\n"
    "Write a guess as a word in square brackets, such as [{example}]. After each one I mark every letter:\n"
    "  G (green): the letter is right and in the right place\n"
    "  Y (yellow): the letter is in the word, in another place\n"
    "  X (grey): the letter is not in the word, or not so often\n"
    "Your first guess, please."
)
EVAL_SHARE = 8  # one word in eight is a secret of the eval split only, whatever the seed
GUESS = re.compile(r"<guess>(.*?)</guess>", re.DOTALL)
WORD = re.compile(r"\[(\w+)\]")


def load_environment(
    num_train_examples: int = 2000,
    num_eval_examples: int = 20,
    system_prompt: str | None = SYSTEM_PROMPT,
    seed: int = 0,
    words: Sequence[str] | str | None = None,
    only_known_words: bool = False,
    held_out_words: bool = True,
    max_guesses: int = 6,
    rules: str = RULES,
) -> vf.Environment:
    """A secret word is guessed in up to `max_guesses` turns with a hint after each.

    Secrets come from `words` (a list, or a file with one word a line; default: the shipped list of five-letter words).
    `held_out_words` keeps the words of training and evaluation apart; without it both draw from all. A guess may be
    any word of the right length, or one of `words` only with `only_known_words`. `rules` is the first message of the
    user; it may use {length}, {max_guesses} and {example}.
    """
    known = _read_words(words)
    if max_guesses < 1:
        raise ValueError(f"max_guesses {max_guesses}: need at least 1")
    first = rules.format(length=len(known[0]), max_guesses=max_guesses, example=known[0])
    train = build_secrets(num_train_examples, known, split="train" if held_out_words else None, seed=seed)
    held_out = build_secrets(num_eval_examples, known, split="eval" if held_out_words else None, seed=seed + 1)
    rubric = vf.Rubric(
        funcs=[correct_answer, partial_answer, length_bonus, format_reward], weights=[1.0, 1.0, 1.0, 0.2]
    )
    return WordleEnv(
        known_words=frozenset(known) if only_known_words else None,
        max_guesses=max_guesses,
        dataset=_to_dataset(train, system_prompt, first),
        eval_dataset=_to_dataset(held_out, system_prompt, first),
        rubric=rubric,
        env_id="wordle",
    )


class WordleEnv(vf.MultiTurnEnv):
    """Answers each guess with a hint; a second invalid guess in a row ends the game."""

    def __init__(self, known_words: frozenset[str] | None, max_guesses: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.known_words = known_words
        self.max_guesses = max_guesses

    async def setup_state(self, state: vf.State) -> vf.State:
        """A game begins: no guess yet."""
        state["guesses"], state["was_invalid"] = [], False
        return state

    async def add_trajectory_step(self, state: vf.State, trajectory_step: Any) -> None:
        """Judge the guess as soon as it is made, so that the last one of a game counts too."""
        await super().add_trajectory_step(state, trajectory_step)
        text = str(trajectory_step["completion"][-1]["content"] or "")
        guess, problem = read_guess(text, len(state["answer"]), state["guesses"], self.known_words)
        state["problem"], state["game_over"] = problem, None
        if problem is None:
            state["guesses"].append(guess)
            if guess == state["answer"]:
                state["game_over"] = "You found the word."
            elif len(state["guesses"]) == self.max_guesses:
                state["game_over"] = f"No guesses left. The word was [{state['answer']}]."
        elif state["was_invalid"]:
            state["game_over"] = f"Two invalid guesses in a row: {problem} The game is over."
        state["was_invalid"] = problem is not None

    @vf.stop
    async def game_is_over(self, state: vf.State) -> bool:
        """The word was found, the guesses are used up, or two in a row were invalid."""
        return bool(state.get("game_over"))

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """The hint for the last guess, or what was wrong with it."""
        if state["problem"] is not None:
            content = f"{state['problem']} Please try again."
        else:
            left = self.max_guesses - len(state["guesses"])
            hint = render_hint(state["guesses"][-1], state["answer"])
            content = f"{hint}\n\nYou have {left} guess{'' if left == 1 else 'es'} left."
        return [{"role": "user", "content": content}]


def correct_answer(state: vf.State) -> float:
    """1 when the word was found."""
    return float(bool(state["guesses"]) and state["guesses"][-1] == state["answer"])


def partial_answer(state: vf.State) -> float:
    """0.2 for each green and 0.1 for each yellow letter of the last valid guess; 0 when the word was found."""
    if not state["guesses"] or correct_answer(state):
        return 0.0
    hint = compute_hint(state["guesses"][-1], state["answer"])
    return 0.2 * hint.count("G") + 0.1 * hint.count("Y")


def length_bonus(state: vf.State) -> float:
    """1 / number of guesses when the word was found, else 0."""
    return correct_answer(state) / max(len(state["guesses"]), 1)


def format_reward(completion: list[dict[str, Any]]) -> float:
    """Share of the model's messages that hold exactly one tagged guess, with nothing behind it."""
    replies = [str(message["content"] or "") for message in completion if message["role"] == "assistant"]
    good = [
        len(found) == 1 and bool(WORD.fullmatch(found[0].strip())) and reply.rstrip().endswith("</guess>")
        for reply in replies
        for found in [GUESS.findall(reply)]
    ]
    return sum(good) / len(good) if good else 0.0


def read_guess(
    text: str, length: int, earlier: Sequence[str], known: frozenset[str] | None
) -> tuple[str, None] | tuple[None, str]:
    """The guess of a reply (its last tagged one), or None and what is wrong with it."""
    tagged = GUESS.findall(text)
    words = WORD.findall(tagged[-1]) if tagged else []
    if len(words) != 1:
        return None, "I need one word in square brackets inside <guess> tags."
    word = words[0].lower()
    if not re.fullmatch(rf"[a-z]{{{length}}}", word):
        return None, f"The word must have {length} letters."
    if word in earlier:
        return None, f"You have already guessed [{word}]."
    if known is not None and word not in known:
        return None, f"I do not know the word [{word}]."
    return word, None


def compute_hint(guess: str, answer: str) -> str:
    """A letter of G, Y, X per letter of the guess: greens first, then yellows from left to right while some remain."""
    hint = ["G" if g == a else "X" for g, a in zip(guess, answer, strict=True)]
    left = Counter(a for a, mark in zip(answer, hint, strict=True) if mark == "X")
    for i, letter in enumerate(guess):
        if hint[i] == "X" and left[letter]:
            hint[i] = "Y"
            left[letter] -= 1
    return "".join(hint)


def render_hint(guess: str, answer: str) -> str:
    """Two lines: the guess in capitals, its hint below, letters apart."""
    return f"{' '.join(guess.upper())}\n{' '.join(compute_hint(guess, answer))}"


def build_secrets(num_secrets: int, words: Sequence[str], *, split: str | None, seed: int) -> list[str]:
    """`num_secrets` words of a split, each as often as the next one; a pure function of the arguments."""
    mine = [word for word in words if split is None or _split_of(word) == split]
    if num_secrets and not mine:
        raise ValueError(
            f"none of the {len(words)} words belongs to the {split} split: give more words or held_out_words = false"
        )
    draw = random.Random(f"{split}-{seed}")
    secrets: list[str] = []
    while len(secrets) < num_secrets:
        secrets += draw.sample(mine, len(mine))
    return secrets[:num_secrets]


def build_sft_examples(
    num_examples: int,
    words: Sequence[str] | str | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
    rules: str = RULES,
    max_guesses: int = 6,
    held_out_words: bool = True,
    attention: float = 0.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Games of a careless player as rows for supervised fine-tuning.

    The player never repeats a guess, and reads the hints before this share of guesses: `attention`, 0 to 1.
    """
    known = _read_words(words)
    draw = random.Random(f"sft-{seed}")
    first = rules.format(length=len(known[0]), max_guesses=max_guesses, example=known[0])
    rows = []
    for answer in build_secrets(num_examples, known, split="train" if held_out_words else None, seed=seed):
        messages = _prompt(system_prompt, first)
        guesses: list[str] = []
        while True:
            guess = _guess(draw, known, guesses, answer, reads_hints=draw.random() < attention)
            guesses.append(guess)
            messages.append({"role": "assistant", "content": f"<guess>[{guess}]</guess>"})
            left = min(max_guesses, len(known)) - len(guesses)
            if guess == answer or not left:
                break
            content = f"{render_hint(guess, answer)}\n\nYou have {left} guess{'' if left == 1 else 'es'} left."
            messages.append({"role": "user", "content": content})
        rows.append({"messages": messages})
    return rows


def _guess(draw: random.Random, known: list[str], guesses: list[str], answer: str, *, reads_hints: bool) -> str:
    """A new word; one that all hints so far allow, for a player who reads them."""
    hints = [(guess, compute_hint(guess, answer)) for guess in guesses] if reads_hints else []
    allowed = [
        word
        for word in known
        if word not in guesses and all(compute_hint(guess, word) == hint for guess, hint in hints)
    ]
    return draw.choice(allowed)


def _split_of(word: str) -> str:
    digest = hashlib.blake2b(word.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _read_words(words: Sequence[str] | str | None) -> list[str]:
    if words is None or isinstance(words, str):
        path = Path(words).expanduser() if words else Path(__file__).with_name("words.txt")
        if not path.is_file():
            raise ValueError(f"words {words!r}: no such file; give a list, or a file with one word a line")
        words = path.read_text(encoding="utf-8-sig").split()
    known = list(dict.fromkeys(word.lower() for word in words))
    if not known or any(len(word) != len(known[0]) or not re.fullmatch("[a-z]+", word) for word in known):
        raise ValueError("words must all have the same number of letters a-z, and there must be at least one")
    return known


def _prompt(system_prompt: str | None, first: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": first}]


def _to_dataset(secrets: list[str], system_prompt: str | None, first: str) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(system_prompt, first)] * len(secrets),
            "answer": secrets,
            "info": [json.dumps({})] * len(secrets),
            "example_id": list(range(len(secrets))),
            "task": ["wordle"] * len(secrets),
        }
    )
