"""Reverse a short random text character by character; no download."""

from __future__ import annotations

import hashlib
import random
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

SYSTEM_PROMPT = "Write the user's text backwards, character by character, between <reversed_text> and </reversed_text>."
LETTERS_AND_SPACE = "abcdefghijklmnopqrstuvwxyz "
EVAL_SHARE = 8  # one text in eight belongs to the eval split, whatever the seed
MAX_WORD_LENGTH = 8


def load_environment(
    dataset_name: str | None = None,
    dataset_split: str = "train",
    system_prompt: str | None = SYSTEM_PROMPT,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    min_length: int = 8,
    max_length: int = 32,
    alphabet: str = LETTERS_AND_SPACE,
    seed: int = 0,
) -> vf.Environment:
    """One turn: the user gives a text, the model answers with it reversed, in a tag.

    Texts are random words (1000 to train, unless a number is given) unless `dataset_name` names a hub dataset or a
    JSON lines file with a `prompt` column, of which the last `num_eval_examples` rows are held out, but never all;
    by default 256, at most half. Reward: similarity to the true reversal, 0 to 1.
    """
    if dataset_name is None:
        generator = {"min_length": min_length, "max_length": max_length, "alphabet": alphabet, "seed": seed}
        train = build_texts(1000 if num_train_examples < 0 else num_train_examples, split="train", **generator)
        held_out = build_texts(256 if num_eval_examples < 0 else num_eval_examples, split="eval", **generator)
    else:
        train, held_out = _read_texts(dataset_name, dataset_split, num_eval_examples)
        train = train if num_train_examples < 0 else train[:num_train_examples]
    parser = vf.XMLParser(["reversed_text"], answer_field="reversed_text")
    rubric = vf.Rubric(parser=parser)
    rubric.add_reward_func(lcs_reward_func)
    rubric.add_reward_func(exact_match, weight=0.0)
    return vf.SingleTurnEnv(
        dataset=_to_dataset(train, system_prompt),
        eval_dataset=_to_dataset(held_out, system_prompt),
        parser=parser,
        rubric=rubric,
        env_id="reverse-text",
    )


def lcs_reward_func(parser: vf.Parser, completion: list[dict[str, Any]], answer: str) -> float:
    """Ratio of characters in matching blocks, 2 M / T (difflib): 1 for the exact reversal."""
    return SequenceMatcher(None, parser.parse_answer(completion) or "", answer, autojunk=False).ratio()


def exact_match(parser: vf.Parser, completion: list[dict[str, Any]], answer: str) -> float:
    """1 when every character is right."""
    return float(parser.parse_answer(completion) == answer)


def build_texts(num_texts: int, *, split: str, min_length: int, max_length: int, alphabet: str, seed: int) -> list[str]:
    """Different random texts of one split, a pure function of the arguments.

    A hash of the text decides its split, so no text of "train" is ever one of "eval", across seeds and sizes too.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length {min_length} and max_length {max_length}: need 1 <= min_length <= max_length")
    if not alphabet.strip() or set(alphabet) & set("<>"):
        raise ValueError(f"alphabet {alphabet!r} needs letters, and none of the tag's < and >")
    draw = random.Random(f"{split}-{seed}")
    texts: dict[str, None] = {}
    for _ in range(100 * num_texts + 1000):
        if len(texts) == num_texts:
            return list(texts)
        text = _random_text(draw, draw.randint(min_length, max_length), alphabet)
        if _split_of(text) == split:
            texts[text] = None
    raise ValueError(
        f"alphabet {alphabet!r} at {min_length} to {max_length} characters has fewer than {num_texts} {split} texts: "
        "ask for fewer examples or allow longer texts"
    )


def build_sft_examples(num_examples: int, system_prompt: str | None = SYSTEM_PROMPT, **generator: Any) -> list[dict]:
    """Prompts with their right answers, from the train split, as rows for supervised fine-tuning."""
    texts = build_texts(num_examples, split="train", **generator)
    return [
        {
            "prompt": _prompt(text, system_prompt),
            "completion": [{"role": "assistant", "content": f"<reversed_text>{text[::-1]}</reversed_text>"}],
        }
        for text in texts
    ]


def _random_text(draw: random.Random, length: int, alphabet: str) -> str:
    """`length` letters; where the alphabet has a space, it separates words of 1 to 8 letters, never at either end."""
    letters = alphabet.replace(" ", "")
    text = [draw.choice(letters) for _ in range(length)]
    if " " in alphabet:
        space = draw.randint(2, MAX_WORD_LENGTH)
        while space < length - 1:
            text[space] = " "
            space += 1 + draw.randint(2, MAX_WORD_LENGTH)
    return "".join(text)


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _read_texts(name: str, split: str, num_eval: int) -> tuple[list[str], list[str]]:
    path = Path(name).expanduser()
    dataset = load_dataset("json", data_files=str(path), split=split) if path.is_file() else None
    dataset = load_dataset(name, split=split) if dataset is None else dataset
    texts = [str(text).strip() for text in dataset["prompt"]]  # as the parser strips answers
    cut = len(texts) - (min(256, len(texts) // 2) if num_eval < 0 else min(num_eval, max(len(texts) - 1, 0)))
    return texts[:cut], texts[cut:]


def _prompt(text: str, system_prompt: str | None) -> list[dict[str, str]]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": text}]


def _to_dataset(texts: list[str], system_prompt: str | None) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_prompt(text, system_prompt) for text in texts],
            "answer": [text[::-1] for text in texts],
            "example_id": list(range(len(texts))),
            "task": ["reverse-text"] * len(texts),
        }
    )
