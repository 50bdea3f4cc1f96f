"""Plain Python environments: rows and reward functions, single-turn, multi-turn, with tools."""

from __future__ import annotations

import asyncio
import functools
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_transport import END, Wire, check, encode, turn

from prime_rl.configuration.sections import SamplingConfig
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import PlainEnvironment, load_environment
from rollouts.training.types import Status

ROWS = [{"question": "2 + 3?", "answer": "5", "info": {"level": 1}}]


def run(environment: Any, *script: str, n: int = 1, retries: int = 0) -> tuple[Wire, list[Rollout]]:
    wire = Wire(script=[turn([*encode(text), END]) for text in script])
    args = [build_sampling_args(SamplingConfig(), seed) for seed in range(n)]
    return wire, anyio.run(environment.run_group, environment.rows()[0], wire, "m", args, retries)


def test_rewards_get_named_arguments_and_weights() -> None:
    async def exact(completion: str, answer: str) -> bool:
        return completion == answer

    def level(info: dict[str, int], **rest: Any) -> float:
        assert set(rest) == {"completion", "messages", "prompt", "answer", "row", "state"}
        return info["level"]

    environment = PlainEnvironment(ROWS, [exact, (level, 0.5)], system_prompt="Be brief.")
    assert [m["role"] for m in environment.rows("eval")[0]["prompt"]] == ["system", "user"]
    wire, [rollout] = run(environment, "5")
    assert (rollout.reward, rollout.metrics, rollout.status) == (1.5, {"exact": 1.0, "level": 1.0}, Status.COMPLETED)
    check(wire, rollout_to_samples(rollout))


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.4, 0.3, 0.2, 0.1)])
def test_weights_of_sum_1_give_a_reward_of_1(weights: tuple[float, ...]) -> None:
    rewards = [(functools.partial(lambda answer, i: 1.0, i=i), weight) for i, weight in enumerate(weights)]
    _, [rollout] = run(PlainEnvironment(ROWS, rewards), "5")
    assert rollout.reward == 1.0


def test_a_textual_example_id_becomes_the_source_id() -> None:
    rows = [{"prompt": "p", "example_id": given} for given in ("gsm8k-17", None, 5)]
    environment = PlainEnvironment([*rows, {"prompt": "p"}], lambda row: len(row["src_id"]))
    found = [(row["example_id"], row.get("src_id")) for row in environment.rows()]
    assert found == [(0, "gsm8k-17"), (1, None), (5, None), (3, None)]
    _, [rollout] = run(environment, "5")
    assert (rollout.example_id, rollout.reward) == (0, 8.0)
    args = [build_sampling_args(SamplingConfig(), 1)]
    wire = Wire(script=[turn([*encode("5"), END])])
    [rollout] = anyio.run(environment.run_group, {**environment.rows()[0], "example_id": "x"}, wire, "m", args, 0)
    assert (rollout.example_id, rollout.failed) == (0, False), "a row that the caller has made"


def test_conversation_ends_on_empty_reply_or_max_turns() -> None:
    def respond(messages: list[Any], row: Any, state: dict[str, Any]) -> list[Any]:
        state["asked"] = state.get("asked", 0) + 1
        return [] if messages[-1]["content"] == "5" else [{"role": "user", "content": "no"}]

    environment = PlainEnvironment(ROWS, lambda state: state["asked"], respond=respond, max_turns=3)
    wire, [rollout] = run(environment, "3", "5")
    assert (rollout.num_turns, rollout.reward, rollout.status) == (2, 2.0, Status.COMPLETED)
    assert [m["role"] for m in rollout.completion] == ["assistant", "user", "assistant"]
    [sample] = rollout_to_samples(rollout)
    check(wire, [sample])
    _, [rollout] = run(environment, "3")
    assert (rollout.num_turns, rollout.status, rollout.stop_reason) == (3, Status.TRUNCATED, "max_turns")


def test_scoring_has_a_timeout_of_its_own() -> None:
    deadlines = list[float]()

    def respond(messages: list[Any], row: dict[str, Any], state: dict[str, Any]) -> list[Any]:
        deadlines.append(anyio.current_effective_deadline())
        return []

    async def reward(completion: str) -> float:
        deadlines.append(anyio.current_effective_deadline())
        return 1.0

    environment = PlainEnvironment(ROWS, reward, respond=respond)
    environment.timeout_s = 100.0
    _, [rollout] = run(environment, "5")
    assert rollout.reward == 1.0 and deadlines[0] < deadlines[1]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_task_that_an_environment_cancels_fails_its_rollout(timeout_s: float | None, n: int) -> None:
    async def lost() -> float:
        tool = asyncio.ensure_future(asyncio.sleep(10))
        tool.cancel()
        await tool
        return 1.0

    environment = PlainEnvironment(ROWS, lambda answer: 1.0, respond=lambda messages, row, state: lost())
    environment.timeout_s = timeout_s
    _, rollouts = run(environment, "5", n=n)
    scored = PlainEnvironment(ROWS, lambda answer: lost())
    scored.timeout_s = timeout_s
    _, scorings = run(scored, "5", n=n)
    assert [rollout.error_type for rollout in (*rollouts, *scorings)] == ["RuntimeError"] * 2 * n
    assert "the rollout awaited a task" in str(rollouts[0].error)


def test_rewards_have_stable_and_distinct_names() -> None:
    class Judge:
        def __call__(self, answer: str) -> float:
            return float(answer)

    def times(answer: str, factor: float) -> float:
        return float(answer) * factor

    _, [rollout] = run(PlainEnvironment(ROWS, [Judge(), functools.partial(times, factor=2)]), "5")
    assert rollout.metrics == {"Judge": 5.0, "times": 10.0}
    rewards = [Judge(), functools.partial(times, factor=2), Judge(), functools.partial(times, factor=3)]
    _, [rollout] = run(PlainEnvironment(ROWS, rewards), "5")
    assert rollout.metrics == {"Judge": 5.0, "times": 10.0, "Judge_2": 5.0, "times_2": 15.0}
    with pytest.raises(ValueError, match="reward <built-in function max> does not name its parameters: wrap it"):
        PlainEnvironment(ROWS, max)
    with pytest.raises(ValueError, match="two reward functions have the name '<lambda>': give each its own"):
        PlainEnvironment(ROWS, [lambda completion: 1.0, lambda completion: 5.0])


def test_a_mistake_in_a_reward_is_no_reward_of_zero() -> None:
    calls = []

    def reward(completion: str) -> float:
        calls.append(1)
        return float(completion) if len(calls) > 1 else float("?")

    environment = PlainEnvironment(ROWS, reward)
    _, [rollout] = run(environment, "5")
    assert rollout.failed and (rollout.error_type, rollout.turns) == ("RewardError", [])
    assert rollout.num_sampled == len([*encode("5"), END]), "its tokens are not trained, but counted"
    line = reward.__code__.co_firstlineno + 2
    assert rollout.error == f"reward: ValueError: could not convert string to float: '?' ({__file__}:{line})"
    calls.clear()
    _, [rollout] = run(environment, "5", retries=1)
    assert rollout.reward == 5.0, "tried again"
    assert rollout.num_sampled == 2 * len(rollout.turns[0].completion_ids) == 4, "the failed attempt is counted"


def test_one_by_path_and_by_module_and_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_env.py").write_text(
        "def sums(n=1):\n    return dict(dataset=[{'prompt': str(i)} for i in range(n)], rewards=[len_of])\n"
        "def len_of(completion): return len(completion)\n"
        "def load_environment(): return 3\n"
    )
    environment = load_environment(f"{tmp_path}/sums_env.py:sums", {"n": 4})
    assert len(environment.rows()) == 4 and run(environment, "abc")[1][0].reward == 3.0
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load_environment("sums_env:sums").rows()) == 1
    with pytest.raises(ValueError, match="made a int: return a verifiers environment, a PlainEnvironment, or a dict"):
        load_environment("sums_env")
    with pytest.raises(ValueError, match="has no function missing"):
        load_environment("sums_env:missing")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("{'dataset': [{'answer': '1'}], 'rewards': len}", "row 0 of the dataset has no prompt"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': []}", "rewards must be a function, or a list of functions"),
        ("{'dataset': [{'prompt': '1'}], 'reward': len}", "unexpected keyword argument 'reward'"),
        ("{'dataset': [{'prompt': ['1']}], 'rewards': agent}", "row 0 of the dataset has a prompt whose items are no"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': column}", "reward column takes 'target': its parameters can be"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': batch}", "reward batch takes 'completions': its parameters can be"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': [(agent, float('nan'))]}", "the weight of reward agent is nan"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': [(agent, '1')]}", "the weight of reward agent is '1'"),
        ("{'dataset': [{'prompt': '1'}], 'rewards': agent, 'tools': [len]}", "tools must be a list of OpenAI tool"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, made: str, words: str) -> None:
    path = tmp_path / f"made_{abs(hash(words))}.py"
    path.write_text(
        f"def build(): return {made}\n"
        "def agent(state): return 1.0\n"
        "def column(completion, target): return 1.0\n"
        "def batch(completions, **kwargs): return [1.0]\n"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        load_environment(f"{path}:build")


@pytest.mark.parametrize("reply", ["go on", {"role": "user", "content": "go on"}, [{"content": "go on"}]])
def test_respond_must_return_messages(reply: Any) -> None:
    environment = PlainEnvironment(ROWS, lambda: 1.0, respond=lambda messages, row, state: reply)
    _, [rollout] = run(environment, "5")
    assert rollout.failed and "respond must return a list of messages" in str(rollout.error)
