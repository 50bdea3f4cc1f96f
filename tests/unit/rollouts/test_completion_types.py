"""Completions that reward functions can use as a list of messages or as text."""

from __future__ import annotations

import copy
import json

import pytest
import verifiers as vf
from datasets import Dataset
from scripted_client import Message, call_tool, play

from rollouts.training.environments import PlainEnvironment
from rollouts.training.environments.completion import ChatCompletion, plain_completion
from rollouts.training.environments.verifiers_adapter import VerifiersEnvironment

SAID = [
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Because?"},
    {"role": "assistant", "content": "Therefore Yes"},
    {"role": "user", "content": "thanks"},
]


def test_it_is_a_list_and_a_text() -> None:
    output = ChatCompletion(SAID)
    assert output == SAID and output[-1]["content"] == "thanks" and len(output) == 4 and SAID[0] in output
    assert [m["role"] for m in output] == ["assistant", "user"] * 2
    assert str(output) == f"{output}" == "Therefore Yes" and output.lower() == "therefore yes"
    assert (
        "Yes" in output
        and "Because" not in output
        and output.startswith("There")
        and output.split() == str(output).split()
    )
    assert json.loads(json.dumps(output)) == SAID and copy.deepcopy(output) == SAID
    assert type(plain_completion(output)) is list and plain_completion("text") == "text"


def test_text_and_messages_are_compared_and_counted() -> None:
    output = ChatCompletion(SAID)
    assert output == "Therefore Yes" and "Therefore Yes" == output and output != "Yes" and output in ["Therefore Yes"]
    assert (output != "Therefore Yes", output != SAID, output != SAID[1:]) == (False, False, True)
    assert (output.count("e"), output.count("e", 3), output.count(SAID[0])) == (4, 3, 1)
    assert (output.index("Yes"), output.index("e", 3), output.index(SAID[2])) == (10, 4, 2)
    with pytest.raises(ValueError, match="substring not found"):
        output.index("First")
    with pytest.raises(TypeError, match="unhashable"):
        hash(output)


def test_completion_without_assistant_is_empty_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert ChatCompletion([]).text == ChatCompletion([call]).text == ChatCompletion(SAID[1:2]).text == ""
    assert ChatCompletion([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]).text == "a"
    with pytest.raises(AttributeError, match="'shout'"):
        ChatCompletion(SAID).shout()


def environment(*rewards: object, cls: type = vf.SingleTurnEnv, **arguments: object) -> vf.Environment:
    rows = Dataset.from_list([{"question": "Is it?", "answer": "Yes"}])
    return cls(dataset=rows, rubric=vf.Rubric(funcs=list(rewards)), **arguments)


def test_rewards_of_the_documents_are_not_silently_zero() -> None:
    """Snippets of the nanochat document: one function that calls lower(), one that uses `in`."""

    def custom_format_reward(completion, parser, **kwargs):  # type: ignore[no-untyped-def]
        if "because" in completion.lower() or "therefore" in completion.lower():
            return 0.2
        return 0.0

    def custom_reward(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
        return 1.0 if answer in completion else 0.0

    def as_messages(completion: list[dict[str, str]]) -> float:
        return float(completion[-1]["role"] == "assistant")

    env = environment(custom_reward)
    early = VerifiersEnvironment("mine", env)
    env.rubric.add_reward_func(custom_format_reward, weight=0.2)  # also after loading
    env.rubric.add_reward_func(as_messages, weight=10.0)
    for door in (early, VerifiersEnvironment("mine", env)):
        [good] = play(door, door.rows(), lambda _: lambda __: "Therefore: Yes.")
        [bad] = play(door, door.rows(), lambda _: lambda __: "no")
        assert good.reward == pytest.approx(10 + 1 + 0.2 * 0.2) and bad.reward == 10.0
        assert good.metrics == {"custom_reward": 1.0, "custom_format_reward": 0.2, "as_messages": 1.0, "num_turns": 1.0}
        assert not good.error and type(good.completion) is list


def test_only_the_last_words_are_text() -> None:
    def add(x: int) -> int:
        """Add one.

        Args:
            x: a number
        """
        return x + 1

    def says_yes(completion):  # type: ignore[no-untyped-def]
        return float("Yes" in completion) + 10 * float("Yes" in completion[0]["content"])

    env = VerifiersEnvironment("mine", environment(says_yes, cls=vf.ToolEnv, tools=[add], max_turns=3))
    replies = iter([{**call_tool("add", x=1), "content": "Yes"}, "no"])
    [rollout] = play(env, env.rows(), lambda _: lambda __: next(replies))
    assert rollout.reward == 10.0


def test_reward_errors_are_recorded() -> None:
    def broken(completion):  # type: ignore[no-untyped-def]
        return completion.shout()

    env = VerifiersEnvironment("mine", environment(broken))
    [rollout] = play(env, env.rows(), lambda _: lambda __: "x")
    assert rollout.reward == 0.0 and rollout.error_type == "RewardError" and "'shout'" in (rollout.error or "")


class Asking(vf.MultiTurnEnv):
    async def env_response(self, messages: object, state: object, **kwargs: object) -> list[Message]:
        return [{"role": "user", "content": "sure?"}]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("kind", ["plain", "verifiers"])
def test_completions_have_reasoning_that_is_not_sent_again(kind: str, key: str) -> None:
    seen: list[list[Message]] = []

    def reply(messages: list[Message]) -> Message:
        seen.append(messages)
        return {"content": "Yes", key: f"thought {len(seen)}"}

    env = VerifiersEnvironment("e", environment(lambda completion: 1.0, cls=Asking, max_turns=2))
    if kind == "plain":
        question = {"role": "user", "content": "sure?"}
        env = PlainEnvironment([{"prompt": "Is it?"}], lambda: 1.0, respond=lambda *args: [question], max_turns=2)
    [rollout] = play(env, env.rows(), lambda row: reply)
    answers = [message for message in rollout.completion if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in answers] == ["thought 1", "thought 2"]
    assert [message["content"] for message in answers] == ["Yes", "Yes"]
    assert len(seen) == 2 and not any(key in message for message in seen[1])
