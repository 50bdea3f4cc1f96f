"""Contexts from outcomes: answers, successful siblings, feedback; their templates; rollouts without a context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest

from prime_rl.client.scoring import ScoredTokens, TokenScorer
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.outcomes import (
    MIN_WITHOUT_FEEDBACK,
    RolloutOutcome,
    read_outcomes,
    to_outcomes,
)
from prime_rl.orchestrator.distillation.teacher import Teacher
from prime_rl.orchestrator.rollout_manager import GroupGenerator
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout, describe_completion
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.environments.protocol import read_feedback
from rollouts.training.types import Sample

ROW = {"example_id": 3, "prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "info": {"unit": "apples"}}
GROUP = [
    RolloutOutcome(0, "3", 0.0, "too large"),
    RolloutOutcome(1, "2", 0.7 + 0.2 + 0.1),  # 1, rounded
    RolloutOutcome(2, "2!", 1.0, ""),
    RolloutOutcome(3, "5", 0.5, "no"),
]


def build_config(teacher: dict[str, Any], **keys: Any) -> OrchestratorConfig:
    teacher = {"client": {"base_url": ["http://t/v1"]}, **teacher}
    values = {"env": [{"id": "world"}], "batch_size": 8, "rollouts_per_example": 4, "teacher_model": teacher}
    return OrchestratorConfig.model_validate({**values, **keys})


def build_contexts(teacher: dict[str, Any], **keys: Any) -> ContextProvider:
    config = build_config(teacher, **keys)
    assert config.teacher_model is not None
    return ContextProvider(config.teacher_model, config.env, config.seed)


def contexts_of(teacher: dict[str, Any], **keys: Any) -> list[Any]:
    provider = build_contexts(teacher, **keys)
    return [provider.context_for("world", ROW, one, GROUP) for one in GROUP]


def test_answer_is_shown_to_every_rollout() -> None:
    assert contexts_of({"context_from": "answer"}) == ["The correct answer to the following task is: 2\n\n"] * 4
    provider = build_contexts({"context_from": "answer"})
    assert provider.context_for("world", {"answer": None}) is None
    listed = provider.context_for("world", {"answer": ["é", None]})
    assert listed == 'The correct answer to the following task is: ["é", null]\n\n', "as {{example.answer}}"
    with pytest.raises(ValueError, match="no row of world has an answer: use another context_from"):
        provider.check_rows("world", [{"answer": ""}, {}], "m")
    provider.check_rows("world", [{}, ROW], "m")


def test_sibling_is_successful_and_never_the_rollout_itself() -> None:
    template = "{{ demonstration }} ({{reward}} {{example.info.unit}})"
    teacher = {"context_from": "sibling", "context_template": template}
    drawn = {tuple(contexts_of(teacher, seed=seed)) for seed in range(20)}
    two, other = "2 (1 apples)", "2! (1 apples)"
    assert drawn == {(a, other, two, b) for a in (two, other) for b in (two, other)}
    assert contexts_of(teacher, seed=5) == contexts_of(teacher, seed=5)
    assert contexts_of({**teacher, "success_reward": 2.0}) == [None] * 4
    provider = build_contexts(teacher)
    assert provider.context_for("world", ROW, GROUP[1], GROUP[:2]) is None, "the only success is its own"
    assert provider.context_for("world", ROW, None, GROUP[:2]) == two, "in evaluation any success is shown"


def test_feedback_is_that_of_the_rollout() -> None:
    template = "{{completion}}: {{feedback}}"
    assert contexts_of({"context_from": "feedback", "context_template": template}) == [
        "3: too large",
        None,
        None,
        "5: no",
    ]
    shown = "{{feedback}} {{example.answer}} {{reward}}"
    group = [RolloutOutcome(0, "{{reward}} \\1", 0.25, "{{example.info}}")]
    provider = build_contexts({"context_from": "feedback", "context_template": shown})
    assert provider.context_for("world", ROW, None, group) == "{{example.info}} 2 0.25", "values are not templates"


def hint(example: dict[str, Any], rng: random.Random, rollout: Any = None, group: Any = None) -> str | None:
    if rollout is None:
        return None
    return f"{rollout.completion} of {len(group)}, best {max(one.reward for one in group)}, {rng.random():.3f}"


def test_context_fn_may_read_the_rollout_and_its_group() -> None:
    found = contexts_of({"context_fn": f"{__name__}:hint"})
    assert [text.split(",")[0] for text in found] == ["3 of 4", "2 of 4", "2! of 4", "5 of 4"]
    assert len({text[-5:] for text in found}) == 4 and found == contexts_of({"context_fn": f"{__name__}:hint"})


@pytest.mark.parametrize(
    ("teacher", "keys", "message"),
    [
        (
            {"context_from": "feedback", "context_template": "{{feedbak}}"},
            {},
            r"unknown field \{\{feedbak\}\}: .*\{\{feedb",
        ),
        ({"context_template": "{{answer}} {{example.a}}"}, {}, r"unknown field \{\{answer\}\}"),
        ({"context_from": "sibling", "context_template": "Do well."}, {}, r"no \{\{demonstration\}\}.*: add it"),
        ({"context_from": "answer", "context": "x "}, {}, "both set the context: remove one"),
        ({"context_from": "row"}, {}, "needs one of context, context_file"),
        ({"context_from": "sibling"}, {"buffer": {"skip_verification": True}}, "no rewards: remove it"),
        ({"context_from": "feedback"}, {"buffer": {"skip_verification": True}}, "no feedback, .*: remove it"),
        ({"context_from": "sibling"}, {"rollouts_per_example": 1}, "set rollouts_per_example above 1"),
    ],
)
def test_invalid_contexts_name_the_cure(teacher: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(teacher, **keys)


@pytest.mark.parametrize(
    "teacher",
    [
        {"context_template": "{{example.hint}}\n"},
        {"context_from": "answer", "context_template": "{{example.hint}} {{answer}}\n"},
        {"context_from": "sibling", "context_template": "{{example.hint}} {{demonstration}}\n"},
        {"context_from": "feedback", "context_template": "{{example.hint}} {{feedback}}\n"},
    ],
)
def test_keys_of_templates_are_looked_up_in_all_rows(teacher: dict[str, Any]) -> None:
    provider = build_contexts(teacher)
    hinted = {**ROW, "hint": "h"}
    provider.check_rows("world", [hinted, hinted], "m")
    with pytest.raises(ValueError, match=r"row 1 of world: this row has no hint \(available: answer, "):
        provider.check_rows("world", [hinted, ROW], "m")


class PromptClient:
    """Renders a chat as the characters of its messages."""

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        return [ord(character) for message in body["messages"] for character in str(message["content"])]


class PromptScorer(TokenScorer):
    """Records the teacher's prompts."""

    async def score(self, tokens: list[int], start: int, support: bytes = b"") -> ScoredTokens:
        PROMPTS.append("".join(map(chr, tokens[:start])))
        return ScoredTokens([-0.5] * (len(tokens) - start))


PROMPTS: list[str] = []


def score(teacher: dict[str, Any], outcomes: Sequence[RolloutOutcome], copies: int = 1) -> list[Sample]:
    samples = []
    for one in outcomes:
        metadata = {"chat_request": {"messages": ROW["prompt"]}, "feedback": one.feedback}
        prompt = [ord(character) for character in "1+1?"]
        sample = Sample("", one.completion, [*prompt, 9], [0.0] * 4 + [1.0], one.reward, 0, one.index, metadata)
        samples.append(sample)
    PROMPTS.clear()
    judge = Teacher(build_contexts(teacher), PromptScorer([], "m"), "m")

    async def run() -> list[Sample]:
        for _ in range(copies - 1):
            await judge.score_group(list(samples), "world", ROW, PromptClient())
        return await judge.score_group(samples, "world", ROW, PromptClient())

    found = anyio.run(run)
    assert judge.last_error is None
    assert judge.take_metrics()["teacher/with_context"] == sum(s.has_teacher for s in found) / len(found)
    return found


def test_rollouts_without_a_context_are_kept_unscored() -> None:
    found = score({"context_from": "feedback", "context_template": "{{feedback}} "}, GROUP)
    assert [(s.index, s.has_teacher, s.teacher_logprobs is None) for s in found] == [
        (0, True, False),
        (1, False, True),
        (2, False, True),
        (3, True, False),
    ]
    assert sorted(PROMPTS) == ["no 1+1?", "too large 1+1?"]


def test_branches_have_the_context_in_their_first_prompt() -> None:
    """A prompt sent as tokens: a rendered one, its completion, and the next turn."""
    judge = Teacher(build_contexts({"context": "C "}), PromptScorer([], "m"), "m")
    tokens = [ord(character) for character in "1+1?2+3?"]
    sample = Sample("", "5", [*tokens, 9, 8, 7], [0.0] * 8 + [1.0, 0.0, 1.0], index=0)
    sample.metadata = {"chat_request": {"messages": ROW["prompt"]}}
    PROMPTS.clear()
    assert anyio.run(judge.score_group, [sample], "world", ROW, PromptClient()) == [sample]
    assert PROMPTS == ["C 1+1?2+3?"] and sample.teacher_logprobs == [0.0] * 8 + [-0.5, 0.0, -0.5]


def test_seats_of_a_game_have_contexts_of_their_own() -> None:
    """A seat is shown the games that it won."""
    samples = []
    for index, winner in ((0, "a"), (1, "b"), (2, "b")):
        for seat in "ab":
            sample = Sample("", f"{index}{seat}", [*b"1+1?", 9], [0.0] * 4 + [1.0], float(seat == winner), 0, index)
            sample.seat, sample.metadata = seat, {"chat_request": {"messages": ROW["prompt"]}}
            samples.append(sample)
    contexts = build_contexts({"context_from": "sibling", "context_template": "{{demonstration}} "})
    judge = Teacher(contexts, PromptScorer([], "m"), "m")
    found = judge._build_contexts(samples, "world", ROW)
    assert found == [None, found[1], "0a ", "2b ", "0a ", "1b "] and found[1] in ("1b ", "2b ")


class DatedClient(PromptClient):
    """Renders every chat with the date first."""

    date = "1"

    async def tokenize(self, body: dict[str, Any]) -> list[int]:
        return [ord(self.date), *await super().tokenize(body)]


def test_prompts_with_the_date_are_rendered_again() -> None:
    judge, client = Teacher(build_contexts({"context": "C "}), PromptScorer([], "m"), "m"), DatedClient()
    PROMPTS.clear()

    async def count_scored(date: str) -> int:
        tokens = [ord(character) for character in f"{date}1+1?"]
        sample = Sample("", "3", [*tokens, 9], [0.0] * 5 + [1.0], index=0)
        sample.metadata = {"chat_request": {"messages": ROW["prompt"]}}
        return len(await judge.score_group([sample], "world", ROW, client))

    for client.date in "123":
        assert anyio.run(count_scored, client.date) == 1
    assert PROMPTS == ["1C 1+1?", "2C 1+1?", "3C 1+1?"], "the teacher's date is the student's"
    assert anyio.run(count_scored, "4") == 0 and "other tokens than the student's" in str(judge.last_error)


def test_feedback_missing_everywhere_ends_the_run() -> None:
    silent = [RolloutOutcome(i, "3", 0.0) for i in range(4)]
    score({"context_from": "feedback"}, silent, MIN_WITHOUT_FEEDBACK // 4 - 1)
    message = r'none of 32 unsuccessful rollouts of world has state\["feedback"\]: set it in a reward function'
    with pytest.raises(ValueError, match=message):
        score({"context_from": "feedback"}, silent, MIN_WITHOUT_FEEDBACK // 4)
    solved = [RolloutOutcome(i, "2", 0.7 + 0.2 + 0.1) for i in range(4)]
    score({"context_from": "feedback"}, solved, MIN_WITHOUT_FEEDBACK)
    score({"context_from": "feedback"}, [*silent, RolloutOutcome(4, "3", 0.0, "no")], MIN_WITHOUT_FEEDBACK)


def test_parts_of_one_rollout_share_their_outcome() -> None:
    samples = [Sample("", text, index=index, reward=reward) for text, index, reward in (("b", 1, 1.0), ("a", 0, 0.0))]
    samples.append(Sample("", "b", index=1, reward=1.0))
    assert list(read_outcomes(samples).values()) == [RolloutOutcome(0, "a", 0.0), RolloutOutcome(1, "b", 1.0)]


CALLING = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def test_contexts_show_tool_calls() -> None:
    rollout = Rollout(prompt="", completion=CALLING, reward=1.0, turns=[Turn([1], [7], [-0.5])])
    maker = GroupGenerator(OrchestratorConfig(), {}, cast(Any, None), teacher=cast(Any, object()))
    [sample] = maker._to_samples(rollout, "world", 0, 0, 0)
    shown = 'call add: {"a": 1}\ntool: 2\nIt is 2.'
    [outcome] = read_outcomes([sample]).values()
    assert [outcome] == to_outcomes([rollout]) == [RolloutOutcome(0, shown, 1.0)]
    assert describe_completion([*CALLING[2:], {"role": "user", "content": "no"}]) == "It is 2."


def test_blank_completions_are_no_demonstrations() -> None:
    provider = build_contexts({"context_from": "sibling"})
    group = [RolloutOutcome(0, "\n", 1.0), RolloutOutcome(1, "2", 1.0)]
    assert provider.context_for("world", ROW, group[1], group) is None
    assert "\n2\n" in str(provider.context_for("world", ROW, group[0], group))


def test_environments_pass_feedback_on() -> None:
    assert (
        read_feedback({}) is None and read_feedback({"feedback": ""}) is None and read_feedback({"feedback": 3}) == "3"
    )

    def judge(completion: str, state: dict[str, Any]) -> float:
        state["feedback"] = f"{completion!r} is wrong"
        return 0.0

    environment = PlainEnvironment([{"prompt": "1+1?"}], judge)
    (rollout,) = anyio.run(environment.run_group, environment.rows()[0], FakeChat(), "m", [{}])
    assert rollout.feedback == "'3' is wrong"


class FakeChat:
    """A client whose model answers "3"."""

    def __init__(self) -> None:
        self.chat = self.completions = self

    async def create(self, **request: Any) -> Any:
        message = type("Message", (), {"content": "3", "tool_calls": None})
        choice = type("Choice", (), {"message": message, "finish_reason": "stop", "logprobs": None})
        return type("Answer", (), {"choices": [choice]})
