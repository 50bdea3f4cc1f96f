"""Gap closed: the arithmetic, the baselines, and held-out examples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from loguru import logger

from prime_rl.client.scoring import ScoredTokens, TokenScorer
from prime_rl.configuration.sections import SamplingConfig
from prime_rl.generation.rollout_jobs import ModelEndpoint
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.baseline_eval import (
    Baseline,
    BaselineEvaluator,
    ContextEnvironment,
    HeldOutEnvironment,
    find_collapse,
    fingerprint,
)
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.teacher import SkipReason, Teacher, UnscorableSample
from prime_rl.runtime.run_dir import RunDir
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import Environment
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.metrics import compute_gap_closed, load_jsonl
from rollouts.training.types import Sample, Status


def test_gap_closed() -> None:
    before, teacher = [0.0] * 40, [1.0] * 40
    assert compute_gap_closed(teacher, before, teacher) == (1.0, 1.0, 1.0)
    assert compute_gap_closed(before, before, teacher) == (0.0, 0.0, 0.0)
    half = [float(i % 2) for i in range(40)]
    closed = compute_gap_closed(half, before, teacher)
    assert closed is not None
    value, low, high = closed
    assert value == pytest.approx(0.5) and low < 0.45 and high > 0.55
    wider = compute_gap_closed(half[:10], before[:10], teacher[:10])
    assert wider is not None and wider[2] - wider[1] > high - low, "fewer examples, less certainty"
    assert compute_gap_closed(half, before, teacher) == closed, "the same draws every time"


def test_insignificant_gap_is_not_reported() -> None:
    before = [float(i % 2) for i in range(40)]
    teacher = [float(i % 2 == (i < 22)) for i in range(40)]
    assert compute_gap_closed(before, before, teacher) is None
    assert compute_gap_closed(before, before, before) is None
    assert compute_gap_closed([], [], []) is None
    with pytest.raises(ValueError, match="not of the same examples"):
        compute_gap_closed([1.0], [1.0, 0.0], [1.0])


def build_environment(train: Sequence[str], held_out: Sequence[str]) -> PlainEnvironment:
    def rows(prompts: Sequence[str]) -> list[dict[str, Any]]:
        return [{"prompt": prompt} for prompt in prompts]

    return PlainEnvironment(rows(train), lambda completion: 0.0, eval_dataset=rows(held_out))


def test_evaluation_examples_exclude_training_prompts() -> None:
    trained = build_environment(["a", "b", "c"], ["c", "d"])
    held = HeldOutEnvironment(trained, {*map(fingerprint, trained.rows("train"))}, "world")
    assert [row["prompt"][0]["content"] for row in held.rows("eval")] == ["d"]
    assert len(held.rows("train")) == 3
    everything = build_environment(["a", "b"], [])
    with pytest.raises(ValueError, match="held-out split"):
        HeldOutEnvironment(everything, {*map(fingerprint, everything.rows("train"))}, "world")


@pytest.mark.parametrize("key", ["answer", "info"])
def test_games_with_one_prompt_are_told_apart_by_answers(key: str) -> None:
    train, held_out = ([{"prompt": "Guess.", key: {"word": word}} for word in words] for words in ("ab", "bc"))
    game = PlainEnvironment(train, lambda completion: 0.0, eval_dataset=held_out)
    held = HeldOutEnvironment(game, {*map(fingerprint, game.rows("train"))}, "game")
    assert [row[key] for row in held.rows("eval")] == [{"word": "c"}]


class ScriptedTeacher(Teacher):
    async def score_group(self, samples: list[Any], env: str, row: Any, client: Any) -> list[Any]:
        return []


class TeacherOfOneSample(Teacher):
    async def score_group(self, samples: list[Any], env: str, row: Any, client: Any) -> list[Any]:
        return [
            Sample(
                prompt="",
                tokens=[5, 6, 7, 8],
                loss_mask=[0.0, 1.0, 0.0, 1.0],
                inference_logprobs=[0.0, -1.0, 0.0, -2.0],
                teacher_logprobs=[0.0, -1.5, 0.0, -1.0],
            )
        ]


def test_divergences_are_over_the_tokens_with_loss(tmp_path: Path) -> None:
    config = OrchestratorConfig.model_validate(
        {
            "env": [{"id": "world"}],
            "eval": {},
            "model": {"name": "m"},
            "teacher_model": {"context": "C ", "eval_baseline": True, "client": {"base_url": ["http://t/v1"]}},
        }
    )
    assert config.teacher_model is not None
    teacher = TeacherOfOneSample(
        ContextProvider(config.teacher_model, config.env, config.seed), TokenScorer([], "m"), "m"
    )
    baseline_evaluator = BaselineEvaluator(teacher, RunDir(tmp_path))
    baseline_evaluator.teacher, baseline_evaluator.clients = teacher, ["student"]
    row = build_environment(["a"], ["b"]).rows("eval")[0]
    rollouts = [[Rollout(prompt=row["prompt"], reward=1.0), Rollout(prompt="", status=Status.FAILED)]]
    found = anyio.run(baseline_evaluator._divergences, "world", [row], rollouts, Baseline())
    assert found["kl_rev_sequence"] == pytest.approx(0.5 - 1.0), "of the one answer that was scored"
    assert found["kl_rev"] == pytest.approx((0.5 - 1.0) / 2) and found["entropy"] == pytest.approx((1.0 + 2.0) / 2)


@pytest.mark.parametrize(
    ("sampling", "is_measured"),
    [
        ({}, True),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"top_k": 5}, False),
        ({"min_tokens": 5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"extra_body": {"logit_bias": {"5": 1.0}}}, False),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, False),
    ],
)
def test_changed_distributions_have_no_divergences(tmp_path: Path, sampling: dict[str, Any], is_measured: bool) -> None:
    """Their log-probs are of the tokens that are left or reweighted, the teacher's of its whole distribution."""
    config = OrchestratorConfig.model_validate(
        {"env": [{"id": "world"}], "eval": {}, "teacher_model": {"context": "C ", "eval_baseline": True}}
    )
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(TeacherOfOneSample(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    evaluator.teacher = TeacherOfOneSample(contexts, TokenScorer([], "m"), "m")
    world = build_environment(["a"], ["b"])

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        return [[Rollout(prompt="", reward=1.0)]]

    values = ("world", world, world.rows("eval"), ModelEndpoint(["s"], "m"), [[Rollout(prompt="", reward=0.0)]])
    found = anyio.run(evaluator.measure, *values, SamplingConfig(**sampling), run)
    assert ("distill/world/kl_rev" in found) == ("distill/world/entropy" in found) == is_measured


def test_rollouts_under_a_grammar_have_no_divergences(tmp_path: Path) -> None:
    """An environment may send one itself."""
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": {"context": "C "}})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    evaluator.teacher, evaluator.clients = ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), ["s"]
    turn = Turn([1], [7], [-0.5], chat_request={"messages": []}, constrained_by="response_format")
    rows, groups = [{"prompt": [{"content": "b"}]}], [[Rollout(prompt="", reward=1.0, turns=[turn])]]
    assert anyio.run(evaluator._swap_prompts, groups, rows, rows) == []
    assert anyio.run(evaluator._divergences, "world", rows, groups, Baseline()) == {}


def test_baselines_over_time(tmp_path: Path) -> None:
    """Teacher baselines are measured once, failures count as 0, and a collapse is reported."""
    config = OrchestratorConfig.model_validate(
        {
            "env": [{"id": "world"}, {"id": "elsewhere", "teacher": "reference"}],
            "eval": {},
            "model": {"name": "m"},
            "teacher_model": {"context": "C ", "eval_baseline": True, "client": {"base_url": ["http://t/v1"]}},
        }
    )
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    teacher = ScriptedTeacher(contexts, TokenScorer([], "m"), "m")
    world = build_environment(["a"], [str(i) for i in range(30)])
    requests: list[tuple[str, bool]] = []
    rewards = {"plain": 0.2, "context": 1.0}

    def answer(environment: Environment, reward: float) -> list[list[Rollout]]:
        rows = environment.rows("eval")
        failed = Rollout(prompt="", status=Status.FAILED, error="no")
        return [[failed if i == 0 else Rollout(prompt=row["prompt"], reward=reward)] for i, row in enumerate(rows)]

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        has_context = str(environment.rows("eval")[0]["prompt"][0]["content"]).startswith("C ")
        requests.append((model, has_context))
        return answer(environment, rewards["context" if has_context else "plain"])

    def measure(version: int, name: str = "world") -> dict[str, float]:
        groups = answer(world, rewards["plain"])
        values = (name, world, world.rows("eval"), ModelEndpoint(["student"], "m", version), groups)
        return anyio.run(baseline_evaluator.measure, *values, SamplingConfig(), run)

    baseline_evaluator, name = BaselineEvaluator(teacher, RunDir(tmp_path)), "world"
    first = measure(0)
    before, with_context = 0.2 * 29 / 30, 29 / 30
    assert first[f"eval/{name}/baseline_student/avg"] == pytest.approx(before)
    assert first[f"eval/{name}/baseline_teacher/avg"] == pytest.approx(with_context)
    assert first[f"eval/{name}/baseline_diff"] == pytest.approx(with_context - before)
    assert first[f"distill/{name}/gap_closed"] == 0 and requests == [("m", True)], "before training it is one model"
    rewards["plain"], rewards["context"] = 0.6, 0.4
    second = measure(5)
    assert second[f"distill/{name}/gap_closed"] == pytest.approx(0.5)
    assert second[f"distill/{name}/teacher_context/avg"] == pytest.approx(with_context)
    assert second[f"distill/{name}/collapsed"] == 1.0 and first[f"distill/{name}/collapsed"] == 0.0
    assert not [key for key in second if "baseline" in key], "logged once"
    line = list(load_jsonl(tmp_path / "evals" / "step_5" / name / "answers.jsonl"))[1]
    assert line["prompt"] == [{"role": "user", "content": "1"}] and list(line)[3:] == [
        "student",
        "student_context",
        "teacher_context",
    ]
    rewards_of = [line[role][0]["reward"] for role in ("student", "student_context", "teacher_context")]
    assert rewards_of == [0.6, 0.4, 1.0], "the teacher's answers are those before training"
    baseline_evaluator = BaselineEvaluator(teacher, RunDir(tmp_path))  # the run is resumed
    rewards["context"] = 1.0
    resumed = measure(6)
    assert resumed[f"distill/{name}/gap_closed"] == pytest.approx(0.5), "the student before training is remembered"
    rewards["plain"] = 0.2
    assert measure(0, "elsewhere")["distill/elsewhere/retention"] == 1.0
    rewards["plain"] = 0.1
    other = measure(6, "elsewhere")
    assert other["distill/elsewhere/retention"] == pytest.approx(0.5) and "distill/elsewhere/gap_closed" not in other


@pytest.mark.parametrize("url", ["http://student/v1", "http://teacher/v1"])
def test_a_context_beyond_the_window_is_no_zero(tmp_path: Path, url: str) -> None:
    """Where the context does not fit the student's server, the teacher is measured on its own one, if there is one."""
    config = OrchestratorConfig.model_validate(
        {"env": [{"id": "world"}], "eval": {}, "teacher_model": {"context": "C ", "eval_baseline": True}}
    )
    assert config.teacher_model is not None
    clients: list[Any] = [SimpleNamespace(base_url="http://student/v1")]
    own: list[Any] = [SimpleNamespace(base_url=url)]
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer(own, "m"), "m"), RunDir(tmp_path))
    world = build_environment(["a"], ["b", "c"])

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        too_long = Rollout(prompt="", status=Status.FAILED, error="the prompt is too long")
        fits = clients[0].base_url == "http://teacher/v1" or not isinstance(environment, ContextEnvironment)
        return [[Rollout(prompt="", reward=1.0) if fits else too_long] for _ in environment.rows("eval")]

    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING")
    groups = [[Rollout(prompt="", reward=0.0)]] * 2
    values = ("world", world, world.rows("eval"), ModelEndpoint(clients, "m"), groups)
    found = anyio.run(evaluator.measure, *values, SamplingConfig(), run)
    logger.remove(sink)
    assert found["eval/world/baseline_teacher/avg"] == float(url == "http://teacher/v1")
    assert any("100% of the student's rollouts with the context failed" in line for line in lines)
    assert any("the prompt is too long" in line for line in lines)


@pytest.mark.parametrize("content", ['{"student": [0.1', "[]", ""])
def test_a_damaged_file_of_baselines_is_unknown(tmp_path: Path, content: str) -> None:
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": {"context": "C "}})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    rows = [{"prompt": "a"}]
    evaluator._save_baseline("world", rows, Baseline([0.1], [0.9], history={0: {"": 0.1}, 4: {"": 0.6}, 8: {"": 0.7}}))
    [path] = (tmp_path / "evals").iterdir()
    known = Baseline([0.1], history={0: {"": 0.1}, 4: {"": 0.6}})
    assert evaluator._load_baseline("world", rows, 8, [0.5]) == (known, [0.9])
    path.write_text(content)
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING")
    unknown, teacher = evaluator._load_baseline("world", rows, 8, [0.5])
    logger.remove(sink)
    assert len(lines) == 1 and "baseline_world.json is damaged" in lines[0]
    assert (unknown, teacher) == (Baseline([0.5], is_known=False), [])
    evaluator._save_baseline("world", rows, unknown)
    assert path.read_text() == content, "a later version's scores are not those before training"


def test_baselines_of_an_older_release_are_read(tmp_path: Path) -> None:
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": {"context": "C "}})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    (tmp_path / "evals").mkdir()
    content = {"student": [0.1], "teacher": [0.9], "best": {"": 0.7}}
    (tmp_path / "evals" / "baseline_world.json").write_text(json.dumps(content))
    known = Baseline([0.1], history={0: {"": 0.7}})
    assert evaluator._load_baseline("world", [{"prompt": "a"}], 8, [0.5]) == (known, [0.9])
    unknown, _ = evaluator._load_baseline("world", [{"prompt": "a"}] * 2, 8, [0.5, 0.5])
    assert not unknown.is_known


@pytest.mark.parametrize("weights", ["frozen", "ema"])
def test_baseline_of_other_examples_is_kept(tmp_path: Path, weights: str) -> None:
    teacher = {"context": "C ", "eval_baseline": True, "weights": weights}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "eval": {}, "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    world = build_environment(["a"], [str(i) for i in range(30)])

    def measure(version: int, number: int, reward: float) -> dict[str, float]:
        rows = world.rows("eval")[:number]

        async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
            return [[Rollout(prompt="", reward=1.0)] for _ in rows]

        evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
        groups = [[Rollout(prompt="", reward=reward)] for _ in rows]
        values = ("world", world, rows, ModelEndpoint(["s"], "m", version), groups)
        return anyio.run(evaluator.measure, *values, SamplingConfig(), run)

    assert measure(0, 30, 0.2)["eval/world/baseline_diff"] == pytest.approx(0.8)
    unknown, known = measure(4, 20, 0.6), measure(6, 30, 0.6)
    assert unknown["distill/world/gap_closed"] == 0.0, "compared with version 4"
    assert unknown["distill/world/teacher/avg"] == 1.0, "the teacher's score, not that of version 4"
    assert known["distill/world/gap_closed"] == pytest.approx(0.5), "compared with version 0"
    assert not [key for key in (*unknown, *known) if "baseline" in key], "of the weights before training only"


class RenderingTeacher(ScriptedTeacher):
    async def render(self, chat_request: Mapping[str, Any], client: Any) -> list[int]:
        return [*"".join(message["content"] for message in chat_request["messages"]).encode()]


@pytest.mark.parametrize("weights", ["frozen", "ema", "live"])
def test_samples_of_the_teacher_follow_its_weights(tmp_path: Path, weights: str) -> None:
    """They have the student's prompt; later prompts of a conversation are not that of the row."""
    teacher = {"context": "C ", "eval_baseline": True, "weights": weights}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "eval": {}, "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    evaluator.teacher = RenderingTeacher(contexts, TokenScorer([], "m"), "m")
    world = build_environment(["a"], ["b"])
    scored: list[list[int]] = []

    async def score(tokens: list[int], start: int, support: bytes) -> ScoredTokens:
        scored.append(tokens)
        return ScoredTokens([-1.0] * (len(tokens) - start), 0)

    evaluator._student.score = score  # type: ignore[method-assign, assignment]

    def measure(version: int) -> list[list[int]]:
        async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
            [row] = environment.rows("eval")
            later = [{"role": "user", "content": "later"}]
            turns = [
                Turn([*messages[0]["content"].encode()], [version], [-0.5], chat_request={"messages": messages})
                for messages in (row["prompt"], later)
            ]
            for branch in (1, 2):  # both continue the first turn as tokens
                turns.append(Turn([*turns[0].prompt_ids, version, branch], [version], [-0.5]))
            return [[Rollout(prompt="", reward=1.0, turns=turns)]]

        scored.clear()
        groups = [[Rollout(prompt="", reward=0.0)]]
        values = ("world", world, world.rows("eval"), ModelEndpoint(["s"], "m", version), groups)
        anyio.run(evaluator.measure, *values, SamplingConfig(), run)
        return list(scored)

    assert measure(0) == [[*b"b", 0, 1, 0]]
    last = 0 if weights == "frozen" else 4
    assert measure(4) == [[*b"b", last, 1, last]]


def test_prompts_beyond_the_students_window_are_left_out(tmp_path: Path) -> None:
    """The window of the teacher's own server may be larger."""

    class SmallWindow(RenderingTeacher):
        async def render(self, chat_request: Mapping[str, Any], client: Any) -> list[int]:
            ids = await super().render(chat_request, client)
            if len(ids) > 3:
                raise UnscorableSample(SkipReason.OVERLONG, "/tokenize failed")
            return ids

    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": {"context": "C "}})
    assert config.teacher_model is not None
    teacher = SmallWindow(ContextProvider(config.teacher_model, config.env, 0), TokenScorer([], "m"), "m")
    evaluator = BaselineEvaluator(teacher, RunDir(tmp_path))
    evaluator.teacher, evaluator.clients = teacher, ["s"]
    rows, shown = ([{"prompt": [{"content": f"{context}{i}"}]} for i in ("b", "bb")] for context in ("", "C "))
    groups = [
        [Rollout(prompt="", turns=[Turn([*b"C b"], [7], [-0.5], chat_request={"messages": row["prompt"]})])]
        for row in shown
    ]
    found = anyio.run(evaluator._swap_prompts, groups, rows, shown)
    assert [tokens for _, tokens, _ in found] == [[*b"b", 7]]


def test_answers_beyond_the_students_window_are_left_out(tmp_path: Path) -> None:
    """Its server scores the student's prompt with the teacher's answer."""
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": {"context": "C "}})
    assert config.teacher_model is not None
    teacher = ScriptedTeacher(ContextProvider(config.teacher_model, config.env, 0), TokenScorer([], "m"), "m")
    evaluator = BaselineEvaluator(teacher, RunDir(tmp_path))

    async def score(tokens: list[int], start: int, support: bytes) -> ScoredTokens:
        if len(tokens) > 8:
            raise RuntimeError("the maximum context length is 8 tokens")
        return ScoredTokens([-1.0] * (len(tokens) - start))

    evaluator._student.score = score  # type: ignore[method-assign, assignment]
    answers = {n: Sample("", loss_mask=[0.0, *[1.0] * n], inference_logprobs=[0.0, *[-0.5] * n]) for n in (2, 20)}
    samples = [(sample, [5] * (1 + n), 1) for n, sample in answers.items()]
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING")
    found = anyio.run(evaluator._divergences, "world", [], [], Baseline(teacher_samples=samples))
    logger.remove(sink)
    assert found == {"kl_fwd": 0.5}
    assert "kl_fwd leaves out 1 of 2 samples of the teacher: scoring 21 tokens failed" in lines[0]


def test_context_environment_uses_outcomes_of_the_student() -> None:
    config = OrchestratorConfig.model_validate(
        {"env": [{"id": "world"}], "teacher_model": {"context_from": "feedback", "context_template": "{{feedback}}: "}}
    )
    assert config.teacher_model is not None
    contexts, world = ContextProvider(config.teacher_model, config.env, 0), build_environment(["a"], ["b", "c", "d"])
    failed = Rollout(prompt="", status=Status.FAILED, feedback="of a failed one")
    groups = [[Rollout(prompt="", feedback="no"), Rollout(prompt="", feedback="not")], [failed, Rollout(prompt="")]]
    rows = ContextEnvironment(world, contexts, "world", groups).rows("eval")
    assert [row["prompt"][0]["content"] for row in rows] == ["no: b", "c"]


def test_evaluated_contexts_extend_the_students_default(tmp_path: Path) -> None:
    """The default system message of a template may depend on its arguments, as that of SmolLM3."""

    class TeacherOfDefaults(ScriptedTeacher):
        async def render(self, chat_request: Mapping[str, Any], client: Any, given: Sequence[int] = ()) -> list[int]:
            first, *_ = messages = chat_request["messages"]
            default = "think" if chat_request.get("chat_template_kwargs", {}).get("enable_thinking", True) else "answer"
            system = first["content"] if first["role"] == "system" else default
            return [*f"<s>{system}</s>{messages[-1]['content']}".encode()]

        async def _read_text(self, tokens: list[int], client: Any) -> str:
            return bytes(tokens).decode()

    teacher = {"context": "C", "separator": " ", "context_position": "system_append", "eval_baseline": True}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "eval": {}, "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    evaluator.teacher = TeacherOfDefaults(contexts, TokenScorer([], "m"), "m")
    world, prompts = build_environment(["a"], ["b"]), list[Any]()

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        prompts.append(environment.rows("eval")[0]["prompt"])
        return [[Rollout(prompt="", reward=1.0)]]

    request = {"messages": world.rows("eval")[0]["prompt"], "chat_template_kwargs": {"enable_thinking": False}}
    groups = [[Rollout(prompt="", turns=[Turn([1], [7], [-0.5], chat_request=request)])]]
    values = ("world", world, world.rows("eval"), ModelEndpoint(["s"], "m"), groups)
    anyio.run(evaluator.measure, *values, SamplingConfig(), run)
    assert [prompt[0] for prompt in prompts] == [{"role": "system", "content": "answer C"}]


def test_contexts_are_built_for_evaluated_rows_only() -> None:
    """Rows beyond `eval.num_examples` are not checked, so that theirs may be missing."""
    teacher = {"context_template": "{{example.answer}}: "}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, 0)
    world = PlainEnvironment([{"prompt": "a", "answer": "1"}, {"prompt": "b"}], lambda completion: 0.0)
    rows = ContextEnvironment(world, contexts, "world", [[Rollout(prompt="")]]).rows("eval")
    assert [row["prompt"][0]["content"] for row in rows] == ["1: a"]


def test_prompts_of_the_environment_itself_have_no_gap(tmp_path: Path) -> None:
    """They do not show the context, so that rollouts with it are as those without."""
    config = OrchestratorConfig.model_validate(
        {"env": [{"id": "world"}], "eval": {}, "teacher_model": {"context": "C ", "eval_baseline": True}}
    )
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    world = build_environment(["a"], ["b", "c"])
    turn = Turn([1], [7], [-0.5], chat_request={"messages": [{"role": "user", "content": "mine"}]})
    groups, num_runs = [[Rollout(prompt="", reward=0.5, turns=[turn])]] * 2, 0

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        nonlocal num_runs
        num_runs += 1
        return groups

    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING")
    for version in (0, 4):
        values = ("world", world, world.rows("eval"), ModelEndpoint(["s"], "m", version), groups)
        found = anyio.run(evaluator.measure, *values, SamplingConfig(), run)
        assert found == {"distill/world/student/avg": 0.5, "distill/world/retention": 1.0}
    logger.remove(sink)
    assert num_runs == len(lines) == 1 and "world does not send the prompts of its rows" in lines[0]


def test_planted_bad_context_triggers_the_alarm() -> None:
    """The teacher is wrong, so the student loses what it could do; forgetting the context is an alarm as well."""
    assert find_collapse(student=0.6, student_context=0.9, before=0.5, teacher=0.9) is None
    planted = find_collapse(student=0.1, student_context=0.0, before=0.5, teacher=0.0)
    assert planted is not None and "before training 0.5000: the context teaches it wrong answers" in planted
    forgotten = find_collapse(student=0.9, student_context=0.3, before=0.1, teacher=0.9)
    assert forgotten is not None and "the teacher scored 0.9000" in forgotten
    assert find_collapse(student=0.0, student_context=0.0, before=0.0, teacher=0.0) is None


def test_contexts_of_rows_are_compared(tmp_path: Path) -> None:
    """Two rule sheets by row; the second round of training costs the first sheet what it had learned."""
    teacher = {"context_template": "{{example.info.sheet}} ", "context_key": "info.sheet", "eval_baseline": True}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "eval": {}, "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)
    rows = [{"prompt": f"{i}", "info": {"sheet": "ab"[i % 2]}} for i in range(40)]
    world = PlainEnvironment(rows, lambda completion: 0.0, eval_dataset=rows)
    student = {"a": 0.0, "b": 0.0}

    def answer(environment: Environment, reward: dict[str, float]) -> list[list[Rollout]]:
        return [[Rollout(prompt="", reward=reward[row["info"]["sheet"]])] for row in environment.rows("eval")]

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        return answer(environment, {"a": 1.0, "b": 0.8})

    def measure(version: int) -> dict[str, float]:
        groups, rows = answer(world, student), world.rows("eval")
        values = ("world", world, rows, ModelEndpoint(["s"], "m", version), groups)
        found = anyio.run(evaluator.measure, *values, SamplingConfig(), run)
        return {key.removeprefix("distill/world/"): value for key, value in found.items()}

    evaluator = BaselineEvaluator(ScriptedTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    measure(0)
    student |= {"a": 0.9}
    found = measure(1)
    assert (found["a/gap_closed"], found["b/gap_closed"]) == (pytest.approx(0.9), 0.0)
    assert found["a/student/avg"] == pytest.approx(0.9) and found["b/teacher_context/avg"] == pytest.approx(0.8)
    evaluator = BaselineEvaluator(evaluator.teacher, RunDir(tmp_path))  # the run is resumed
    student |= {"a": 0.6, "b": 0.8}
    found = measure(2)
    assert found["a/interference"] == pytest.approx(0.3) and found["b/interference"] == 0.0
    assert found["interference"] == 0.0 and found["b/gap_closed"] == pytest.approx(1.0)
    rows = [{"info": {"sheet": sheet}} for sheet in ("", "", "a")]
    scores = {"student": [0.0, 0.0, 0.9]}
    baseline = Baseline([0.0] * 3, [1.0] * 3, history={0: {"": 0.4}})
    found = evaluator._compare_contexts(rows, 3, scores, baseline)
    assert found["a/student/avg"] == 0.9
    assert found["interference"] == pytest.approx(0.1), "rows without a sheet count once"
    with pytest.raises(ValueError, match=r"this row has no info.sheet \(available: sheets\)"):
        contexts.label({"info": {"sheets": 1}})


def test_context_names_that_are_one_in_metrics_are_refused() -> None:
    teacher = {"context": "C ", "context_key": "info.sheet"}
    config = OrchestratorConfig.model_validate({"env": [{"id": "world"}], "teacher_model": teacher})
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, config.seed)

    def check(*names: str) -> None:
        contexts.check_eval_rows("world", [{"prompt": "a", "info": {"sheet": name}} for name in names])

    check("a b", "a c", "", "a b")
    with pytest.raises(ValueError, match=r"context_key info\.sheet: '\+' and '\*' of world are both '_' in metrics"):
        check("+", "a", "+", "*")
