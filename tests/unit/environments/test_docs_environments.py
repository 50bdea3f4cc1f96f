"""The examples of docs/environments.md are written to a folder, loaded by id and run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from scripted_client import call_tool, play

from prime_rl.configuration.sections import EnvConfig
from rollouts.training.environments import Environment, load_environment

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("docs_add_up", "docs_own_data", "docs_tools", "docs_higher_lower", "docs_day_after", "docs_highest", "agent")


def load(tmp_path: Path, number: int, **args: object) -> Environment:
    folder = tmp_path / NAMES[number]
    folder.mkdir()
    (folder / f"{NAMES[number]}.py").write_text(SNIPPETS[number])
    return load_environment(NAMES[number], args, search_dirs=[tmp_path])


def test_docs_list_the_environments() -> None:
    assert len(SNIPPETS) == len(NAMES)
    assert all(len(snippet.splitlines()) < 60 for snippet in SNIPPETS)
    config, agent = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    EnvConfig(**tomllib.loads(agent)["orchestrator"]["env"][0])
    env = tomllib.loads(config)["orchestrator"]["env"][0]
    assert load_environment(env["id"], env["args"]).rows()


def test_a_complete_environment(tmp_path: Path) -> None:
    env = load(tmp_path, 0, num_examples=30)
    rollouts = play(env, env.rows(), lambda row: lambda _: f"<sum>{row['answer']}</sum>")
    assert {rollout.reward for rollout in rollouts} == {1.1}
    assert {r.reward for r in play(env, env.rows(), lambda row: lambda _: row["answer"])} == {0.0}


def test_data_from_a_file(tmp_path: Path) -> None:
    rows = [{"question": f"Opposite of {i}?", "answer": "Yes"} for i in range(10)]
    rows.append({"question": "Two\u2028lines?", "answer": "Yes"})
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8-sig")
    env = load(tmp_path, 1, data=str(tmp_path / "rows.jsonl"), num_eval_examples=4)
    assert (len(env.rows()), len(env.rows("eval"))) == (7, 4)
    few = load_environment("docs_own_data", {"data": str(tmp_path / "rows.jsonl")}, search_dirs=[tmp_path])
    assert (len(few.rows()), len(few.rows("eval"))) == (6, 5)
    assert {r.reward for r in play(env, env.rows(), lambda _: lambda __: " yes ")} == {1.0}


def test_tools(tmp_path: Path) -> None:
    env = load(tmp_path, 2)
    replies = [call_tool("look_up", word="sky"), call_tool("look_up", word="sea"), "It is blue."]
    turn = iter(replies)
    [rollout] = play(env, env.rows()[:1], lambda _: lambda __: next(turn))
    assert rollout.reward == 1.0
    assert [m["content"] for m in rollout.completion if m["role"] == "tool"] == ["blue", "'sea'"]


def test_several_turns(tmp_path: Path) -> None:
    env = load(tmp_path, 3, num_examples=20)

    def halve(messages: list[dict[str, str]]) -> str:
        low, high, guess = 1, 30, 15
        for message in messages[1:]:
            if message["role"] == "assistant":
                guess = int(message["content"])
            else:
                low, high = (guess + 1, high) if message["content"] == "higher" else (low, guess - 1)
        return str((low + high) // 2)

    for rollout in play(env, env.rows(), lambda _: halve):
        assert rollout.reward == pytest.approx(1 + 0.5 / rollout.num_turns) and rollout.num_turns <= 5


def test_plain_python(tmp_path: Path) -> None:
    env = load(tmp_path, 4, weight=0.5)
    assert [row["answer"] for row in env.rows()][-1] == "Monday"
    assert {r.reward for r in play(env, env.rows(), lambda row: lambda _: row["answer"])} == {1.25}
    [wrong] = play(env, env.rows()[:1], lambda _: lambda __: "Monday or so")
    assert wrong.reward == 0.125


def test_several_players(tmp_path: Path) -> None:
    env = load(tmp_path, 5)
    moves = iter(["7", "3", "no", "2"])
    won, lost = play(env, env.rows()[:2], lambda _: lambda __: next(moves))
    assert [won.reward, won.metrics["reward_second"]] == [1.0, 0.0]
    assert [lost.reward, lost.metrics["reward_second"]] == [0.0, 1.0]
