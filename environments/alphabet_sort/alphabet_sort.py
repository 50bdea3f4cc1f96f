"""Sort a growing list of names over several turns; synthetic, no download."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset, load_dataset

FIRST_NAMES = """Ada Amir Anouk Ben Bo Carla Chen Dalia Dev Elif Emeka Farah Felix Gita Goran Hana Hugo Ines Ivan Jada
Jonas Kaya Kofi Lena Luca Mara Milo Nadia Nils Olga Omar Paula Pavel Quinn Rosa Ravi Sami Selma Tariq Tess Uma Urs Vera
Viktor Wanda Wim Xenia Yara Yusuf Zoe""".split()
LAST_NAMES = """Abara Acker Bauer Bello Castro Cruz Dietz Duarte Eide Esposito Fabre Foley Garcia Gruber Haas Hossain
Ito Ivanov Jansen Joshi Kato Keller Lopez Lund Marin Moreau Nagy Novak Okafor Oliveira Park Petit Quist Quiroga Rahman
Rossi Sato Silva Tanaka Toth Ueda Urban Varga Vogel Weber Wolff Xu Yamada Yilmaz Zhang Ziegler""".split()
EVAL_SHARE = 8  # one list in eight belongs to the eval split, whatever the seed
NEW_MARK = " // new name!"
TAGS = ("alphabetical_sorted", "combined_alphabetical_sorted")  # of the first answer, of all later ones


def load_environment(
    max_turns: int = 3,
    min_turns: int = 1,
    min_names_per_turn: int = 1,
    max_names_per_turn: int = 5,
    similarity_power: float = 4,
    power_per_turn: bool = True,
    dataset_name: str | None = None,
    dataset_split: str = "train",
    names: Sequence[str] | None = None,
    short: bool = False,
    num_train_examples: int = 1000,
    num_eval_examples: int = 100,
    seed: int = 1337420,
) -> vf.Environment:
    """Each turn brings names to sort, together with those of the turns before; later answers mark the new ones.

    Names are FirstLast. They come from `names`, from the `names` column of `dataset_name` (a hub dataset or a JSON
    lines file), or from a built-in list. `short` asks in few words, for models that learn on a CPU. Reward: similarity
    to the right lists, 0 to 1.
    """
    if not 1 <= min_turns <= max_turns:
        raise ValueError(f"min_turns {min_turns} and max_turns {max_turns}: need 1 <= min_turns <= max_turns")
    if not 1 <= min_names_per_turn <= max_names_per_turn:
        raise ValueError(
            f"min_names_per_turn {min_names_per_turn} and max_names_per_turn {max_names_per_turn}: need 1 <= min <= max"
        )
    pool = _read_names(names, dataset_name, dataset_split)
    limits = (min_turns, max_turns, min_names_per_turn, max_names_per_turn)
    train = build_tasks(num_train_examples, pool, limits, split="train", seed=seed)
    held_out = build_tasks(num_eval_examples, pool, limits, split="eval", seed=seed)

    def weighted_reward(completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
        return compute_reward(completion, info["answers"], similarity_power, power_per_turn)

    return AlphabetSortEnv(
        dataset=_to_dataset(train, short),
        eval_dataset=_to_dataset(held_out, short),
        rubric=vf.Rubric(funcs=[weighted_reward]),
        env_id="alphabet-sort",
    )


class AlphabetSortEnv(vf.MultiTurnEnv):
    """Asks for one list after the other, whatever was answered."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """The next list to sort in."""
        return [{"role": "user", "content": state["info"]["follow_ups"][len(state["trajectory"]) - 1]}]

    @vf.stop
    async def all_lists_sorted(self, state: vf.State) -> bool:
        """The last list has been answered."""
        return len(state["trajectory"]) > len(state["info"]["follow_ups"])


def compute_reward(
    completion: list[dict[str, Any]], answers: Sequence[Sequence[str]], power: float, power_per_turn: bool
) -> float:
    """Mean over the turns of similarity ** power, or (mean similarity) ** power; a turn that never came counts 0."""
    replies = [str(message["content"] or "") for message in completion if message["role"] == "assistant"]
    scores = [
        compute_similarity(reply, TAGS[min(turn, 1)], answer)
        for turn, (reply, answer) in enumerate(zip(replies, answers, strict=False))
    ]
    if power_per_turn:
        return sum(score**power for score in scores) / len(answers)
    return float((sum(scores) / len(answers)) ** power)


def compute_similarity(reply: str, tag: str, answer: Sequence[str]) -> float:
    """Ratio of matching characters (difflib) of the tagged list and the right one, upper and lower case alike.

    Several lists in one reply count only if each is better than the one before; then the last counts.
    """
    expected = "\n".join(answer).lower()
    attempts = [_lines(text).lower() for text in re.findall(rf"<{tag}>(.*?)</{tag}>", reply, re.DOTALL)]
    scores = [
        SequenceMatcher(None, attempt, expected, autojunk=False).ratio() if attempt else 0.0 for attempt in attempts
    ]
    if any(later <= earlier for earlier, later in itertools.pairwise(scores)):
        return 0.0
    return scores[-1] if scores else 0.0


def build_tasks(
    num_tasks: int, pool: Sequence[str], limits: tuple[int, int, int, int], *, split: str, seed: int
) -> list[dict[str, Any]]:
    """`num_tasks` different tasks of one split, a pure function of the arguments: {"key", "turns"}.

    `limits` are least and most turns, least and most names per turn. Names of a task differ in what they are sorted
    by, so the order is never in doubt. A hash of its names decides the split of a task.
    """
    draw = random.Random(f"{split}-{seed}")
    min_turns, max_turns, min_names, max_names = limits
    tasks: dict[str, dict[str, Any]] = {}
    for _ in range(100 * num_tasks + 1000):
        if len(tasks) == num_tasks:
            return list(tasks.values())
        key = draw.choice(("FIRST", "LAST"))
        sizes = [draw.randint(min_names, max_names) for _ in range(draw.randint(min_turns, max_turns))]
        drawn = _draw_names(draw, pool, key, sum(sizes))
        turns = [[drawn.pop() for _ in range(size)] for size in sizes]
        text = json.dumps([key, turns])
        if _split_of(json.dumps(turns)) == split:
            tasks[text] = {"key": key, "turns": turns}
    raise ValueError(f"{len(pool)} names give fewer than {num_tasks} {split} tasks: ask for fewer, or give more names")


def build_answers(task: dict[str, Any]) -> list[list[str]]:
    """The right list of each turn; from the second on with a mark behind each new name."""
    answers: list[list[str]] = []
    known: list[str] = []
    for turn, new in enumerate(task["turns"]):
        known = sorted([*known, *new], key=lambda name: _sort_key(name, task["key"]))
        answers.append([name + NEW_MARK * (turn > 0 and name in new) for name in known])
    return answers


def build_questions(task: dict[str, Any], short: bool = False) -> list[str]:
    """What the user says in each turn."""
    questions = []
    for turn, new in enumerate(task["turns"]):
        tag = TAGS[min(turn, 1)]
        if short:
            questions.append(f"{'sort' if turn == 0 else 'add'} {task['key'].lower()}: {', '.join(new)}")
        elif turn == 0:
            questions.append(
                f"Put these names into alphabetical order by {task['key']} name: {', '.join(new)}\n\n"
                f"Answer in exactly this form, one name per line:\n<{tag}>\nFirstName\nSecondName\n</{tag}>"
            )
        else:
            form = "As before, answer" if turn > 1 else "Answer"
            questions.append(
                f"Now put ALL names into alphabetical order by {task['key']} name, these new ones included: "
                f"{', '.join(new)}\n\nWrite `{NEW_MARK.strip()}` behind each name that is NEW in this turn. "
                f"{form} in exactly this form:\n<{tag}>\nFirstName\nSecondName{NEW_MARK}\n</{tag}>"
            )
    return questions


def build_reply(answer: Sequence[str], turn: int) -> str:
    """An assistant's right reply of a turn, counted from 0."""
    tag = TAGS[min(turn, 1)]
    return "\n".join([f"<{tag}>", *answer, f"</{tag}>"])


def build_sft_examples(
    num_examples: int,
    limits: tuple[int, int, int, int] = (1, 3, 1, 5),
    names: Sequence[str] | None = None,
    short: bool = False,
    seed: int = 1337420,
) -> list[dict[str, Any]]:
    """Whole conversations with right answers, from the train split, as rows for supervised fine-tuning."""
    rows = []
    for task in build_tasks(num_examples, _read_names(names, None, ""), limits, split="train", seed=seed):
        messages = []
        for turn, (question, answer) in enumerate(zip(build_questions(task, short), build_answers(task), strict=True)):
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": build_reply(answer, turn)},
            ]
        rows.append({"messages": messages})
    return rows


def _lines(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines() if line.strip())


def _sort_key(name: str, key: str) -> str:
    """First or last part of a FirstLast name: it is cut before the first capital that is not its first letter."""
    cut = next((i for i, letter in enumerate(name) if i and letter.isupper()), len(name))
    return (name[:cut] if key == "FIRST" else name[cut:]).lower()


def _draw_names(draw: random.Random, pool: Sequence[str], key: str, count: int) -> list[str]:
    """`count` names of the pool, no two alike in what they are sorted by."""
    chosen: dict[str, str] = {}
    for _ in range(100 * count + 100):
        name = draw.choice(pool)
        chosen.setdefault(_sort_key(name, key), name)
        if len(chosen) == count:
            return list(chosen.values())
    raise ValueError(
        f"a task needs {count} names that differ in their {key} name, the list has only {len(chosen)}: give more names "
        "or lower max_turns or max_names_per_turn"
    )


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"


def _read_names(names: Sequence[str] | None, dataset_name: str | None, split: str) -> list[str]:
    if names is not None and dataset_name is not None:
        raise ValueError("names and dataset_name both say where names come from: give one of them")
    if dataset_name is not None:
        path = Path(dataset_name).expanduser()
        rows = load_dataset("json", data_files=str(path), split="train") if path.is_file() else None
        rows = load_dataset(dataset_name, split=split) if rows is None else rows
        if "names" not in rows.column_names:
            raise ValueError(f"dataset_name {dataset_name}: need a column names, found {', '.join(rows.column_names)}")
        column = rows["names"]
        names = [name for cell in column for name in ([cell] if isinstance(cell, str) else cell)]
    if names is None:
        names = [first + last for first in FIRST_NAMES for last in LAST_NAMES]
    for name in names:
        if not re.fullmatch(r"[^\W\d_]+", name) or not name[0].isupper():
            raise ValueError(f"name {name!r}: write names like AdaPark, letters only, a capital where each part begins")
    return list(dict.fromkeys(names))


def _to_dataset(tasks: list[dict[str, Any]], short: bool) -> Dataset:
    questions = [build_questions(task, short) for task in tasks]
    infos = [
        {"follow_ups": asked[1:], "answers": build_answers(task)} for asked, task in zip(questions, tasks, strict=True)
    ]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": asked[0]}] for asked in questions],
            "answer": ["\n".join(info["answers"][-1]) for info in infos],
            "info": [json.dumps(info) for info in infos],  # as text, because Arrow would make all rows one shape
            "example_id": list(range(len(tasks))),
            "task": ["alphabet-sort"] * len(tasks),
        }
    )
