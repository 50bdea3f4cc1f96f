"""The environments of examples/smollm2: oracles get the reward, wrong answers do not, held-out questions are new."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_client import Message, Reply, play

from rollouts.training.environments import Environment, load_environment

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "smollm2"


def load(name: str) -> Environment:
    return load_environment(str(FOLDER / name / f"{name}.py"), {})


def call(*items: str) -> str:
    return f"<tool_call>{json.dumps([{'name': 'prices', 'arguments': {'items': items}}])}</tool_call>"


def in_turns(*answers: str) -> Reply:
    return lambda messages: answers[sum(message["role"] == "assistant" for message in messages)]


def shop(row: Message) -> Reply:
    return in_turns(call(*row["info"]), f"Together they cost {row['answer']}.")


ORACLES: dict[str, Callable[[Message], Reply]] = {
    "sums": lambda row: in_turns(f"The answer is {row['answer']}."),
    "words": lambda row: in_turns(f" {row['answer']}\n"),
    "tool": shop,
}
WRONG: dict[str, list[Callable[[Message], Reply]]] = {
    "sums": [
        lambda row: in_turns(""),
        lambda row: in_turns(row["prompt"][-1]["content"]),
        lambda row: in_turns(f"{row['answer']}, or 7"),
        lambda row: in_turns(f"1{row['answer']}"),
    ],
    "words": [
        lambda row: in_turns(row["prompt"][-1]["content"].split(": ")[1] + "."),
        lambda row: in_turns(f"{row['answer']}. Reversed."),
        lambda row: in_turns(", ".join(row["answer"].split(", ")[:3])),
    ],
    "tool": [
        lambda row: in_turns(row["answer"]),  # without a call
        lambda row: in_turns(f"Sure! {call(*row['info'])}", row["answer"]),
        lambda row: in_turns("<tool_call>[{}]</tool_call>", row["answer"]),
        lambda row: in_turns(call(*row["info"]), "Nothing."),
        lambda row: in_turns(call("moon"), "unknown"),
    ],
}


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_gets_every_reward(name: str) -> None:
    env = load(name)
    assert {rollout.reward for rollout in play(env, env.rows("eval")[:50], ORACLES[name])} == {1.0}


@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, players in WRONG.items() for i in range(len(players))]
)
def test_wrong_answers_earn_nothing(name: str, number: int) -> None:
    env = load(name)
    assert {rollout.reward for rollout in play(env, env.rows("eval")[:50], WRONG[name][number])} == {0.0}


def contents(row: dict[str, Any]) -> tuple[str, ...]:
    """What a question is about, whatever the order."""
    text = row["prompt"][-1]["content"] if isinstance(row["prompt"], list) else row["prompt"]
    return tuple(sorted(re.findall(r"\d+|\b[a-z]+\b", text)))


@pytest.mark.parametrize("name", ORACLES)
def test_held_out_questions_are_not_trained_on(name: str) -> None:
    env = load(name)
    held_out, train = ({contents(row) for row in env.rows(split)} for split in ("eval", "train"))
    assert len(held_out) == len(env.rows("eval")) == 256 and not held_out & train


@pytest.mark.parametrize("name", ["words", "tool"])
def test_warm_up_rows_are_right_and_not_held_out(name: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(FOLDER / name / "data.py")], check=True, cwd=tmp_path)
    lines = (tmp_path / "outputs" / f"smollm2_{name}" / "sft.jsonl").read_text().splitlines()
    chats = [read_chat(json.loads(line)) for line in lines]
    env = load(name)
    rows = {row["prompt"][-1]["content"]: row for row in env.rows("train")}
    asked = [next(m["content"] for m in chat if m["role"] == "user") for chat in chats]
    assert len(lines) == len(set(asked)) and set(asked) <= set(rows)
    answers = {
        question: [m["content"] for m in chat if m["role"] == "assistant"]
        for question, chat in zip(asked, chats, strict=True)
    }
    rollouts = play(env, [rows[q] for q in asked[:50]], lambda row: in_turns(*answers[row["prompt"][-1]["content"]]))
    assert {rollout.reward for rollout in rollouts} == {1.0}
    for chat, rollout in zip(chats, rollouts, strict=False):
        assert [*rollout.prompt, *rollout.completion] == chat


def read_chat(row: dict[str, Any]) -> list[Message]:
    roles = {"user": row.get("prompt"), "assistant": row.get("completion")}
    return row.get("messages") or [{"role": role, "content": text} for role, text in roles.items()]
