"""Evaluations during a run: failures are logged with their cause; lost servers get no requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from loguru import logger

from prime_rl.client.scoring import TokenScorer
from prime_rl.eval.config import EvalConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.baseline_eval import BaselineEvaluator, HeldOutEnvironment
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.teacher import Teacher
from prime_rl.orchestrator.evaluation import (
    EvalKind,
    EvalSchedule,
    Evaluations,
    build_evaluations,
    build_schedules,
    max_concurrent_rollouts,
)
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import PlainEnvironment, load_environment


class BrokenEnvironment:
    id = "world"

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": "q", "example_id": 0}]

    async def run_group(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError("the judge's API key is invalid")


class RecordingEnvironment(BrokenEnvironment):
    """Records the server of every group."""

    def __init__(self) -> None:
        self.urls: list[str] = []

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": "q", "example_id": i} for i in range(4)]

    async def run_group(self, row: Any, client: Any, model: str, sampling_args: Any, retries: int = 0) -> Any:
        self.urls.append(client.base_url)
        return [Rollout(prompt=row["prompt"], reward=1.0) for _ in sampling_args]


class SilentTeacher(Teacher):
    async def score_group(self, samples: list[Any], env: str, row: Any, client: Any) -> list[Any]:
        return []


def build_schedule(environment: Any, out: Path) -> EvalSchedule:
    config = EvalConfig.model_validate({"model": {"name": "m"}, "env": [{"id": "world"}], "output_dir": out})
    return EvalSchedule(EvalKind.EVAL, config, {"world": environment}, 1, last=-1)


async def evaluate(evaluations: Evaluations) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(evaluations.run)
        evaluations.on_version(0)
        await evaluations.wait()
        tasks.cancel_scope.cancel()


def test_a_failed_evaluation_names_its_cause(tmp_path: Path) -> None:
    servers: Any = SimpleNamespace(clients=[SimpleNamespace(base_url="http://s/v1")], reachable=[0])
    monitor: Any = None
    schedule = build_schedule(BrokenEnvironment(), tmp_path)
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    anyio.run(evaluate, Evaluations([schedule], servers, monitor, model="m", max_steps=None))
    logger.remove(sink)
    assert lines == ["eval of version 0 failed in world: RuntimeError: the judge's API key is invalid\n"]


def test_a_failed_environment_leaves_the_others_alone(tmp_path: Path) -> None:
    servers: Any = SimpleNamespace(clients=[SimpleNamespace(base_url="http://s/v1")], reachable=[0])
    logged, finished = dict[str, float](), list[Any]()
    monitor: Any = SimpleNamespace(
        log=lambda metrics, version: logged.update(metrics), log_timeline=lambda *given: finished.append(given)
    )
    values = {"model": {"name": "m"}, "env": [{"id": "broken"}, {"id": "world"}], "output_dir": tmp_path}
    config = EvalConfig.model_validate(values)
    environments: Any = {"broken": BrokenEnvironment(), "world": RecordingEnvironment()}
    schedule = EvalSchedule(EvalKind.EVAL, config, environments, 1, last=-1)
    anyio.run(evaluate, Evaluations([schedule], servers, monitor, model="m", max_steps=None))
    assert logged["eval/world/avg@1"] == 1.0 and "eval/broken/avg@1" not in logged
    assert not finished, "a resumed run repeats it"


def test_unscored_rollouts_of_an_evaluation_warn(tmp_path: Path) -> None:
    class Unscored(BrokenEnvironment):
        async def run_group(self, *given: Any, **options: Any) -> Any:
            return [Rollout(prompt="q", error="bug: KeyError: 'x'", error_type="RewardError")]

    servers: Any = SimpleNamespace(clients=[SimpleNamespace(base_url="http://s/v1")], reachable=[0])
    monitor: Any = SimpleNamespace(log=lambda *given: None, log_timeline=lambda *given: None)
    schedule = build_schedule(Unscored(), tmp_path)
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    anyio.run(evaluate, Evaluations([schedule], servers, monitor, model="m", max_steps=None))
    logger.remove(sink)
    assert lines and lines[-1].startswith("world: reward functions failed in 1 of 1 rollouts, where they count as 0;")


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"context_template": "{{example.answer}} "}, r"context_template, row 1 of world: this row has no answer"),
        ({"context": "C ", "context_key": "answer"}, r"context_key: this row has no answer"),
    ],
)
def test_contexts_of_evaluation_rows_are_checked_first(tmp_path: Path, teacher: dict[str, Any], message: str) -> None:
    values = {"env": [{"id": "world"}], "eval": {}, "teacher_model": {**teacher, "eval_baseline": True}}
    config = OrchestratorConfig.model_validate(values)
    assert config.teacher_model is not None
    scorer = Teacher(ContextProvider(config.teacher_model, config.env, 0), TokenScorer([], "m"), "m")
    rows = [{"prompt": "a", "answer": "1", "example_id": 0}, {"prompt": "b", "example_id": 1}]
    schedule = build_schedule(SimpleNamespace(id="world", rows=lambda split: rows), tmp_path)
    anything: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=message):
        build_evaluations(config, [schedule], anything, anything, scorer)
    game = HeldOutEnvironment(load_environment("nim"), set(), "world")
    with pytest.raises(ValueError, match="eval_baseline cannot insert the context, leave it out"):
        build_evaluations(config, [build_schedule(game, tmp_path)], anything, anything, scorer)


def test_without_a_context_an_evaluation_is_no_baseline(tmp_path: Path) -> None:
    values = {"env": [{"id": "taught", "context": "C "}], "eval": {}, "teacher_model": {"eval_baseline": True}}
    config = OrchestratorConfig.model_validate(values)
    assert config.teacher_model is not None
    contexts = ContextProvider(config.teacher_model, config.env, 0)
    schedule = build_schedule(BrokenEnvironment(), tmp_path)
    anything: Any = SimpleNamespace()
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    build_evaluations(config, [schedule], anything, anything, Teacher(contexts, TokenScorer([], "m"), "m"))
    logger.remove(sink)
    assert contexts.role("world") == "none" and contexts.role("taught") == "context"
    assert "world is evaluated without a context" in lines[0]


def test_a_validation_may_have_many_rollouts_of_an_example(tmp_path: Path) -> None:
    values = {"env": [{"id": "world"}], "val": {"rollouts_per_example": 512}, "output_dir": tmp_path}
    config, world = OrchestratorConfig.model_validate(values), SimpleNamespace(rows=lambda split: [])
    [schedule] = build_schedules(config, {"world": world}, {}, 0)  # type: ignore[dict-item]
    assert schedule.config.max_concurrent == max_concurrent_rollouts(config) == 512


def test_baselines_are_not_measured_on_lost_servers(tmp_path: Path) -> None:
    config = OrchestratorConfig.model_validate(
        {"env": [{"id": "world"}], "eval": {}, "teacher_model": {"context": "C ", "eval_baseline": True}}
    )
    assert config.teacher_model is not None
    clients = [SimpleNamespace(base_url="http://lost/v1"), SimpleNamespace(base_url="http://left/v1")]
    servers: Any = SimpleNamespace(clients=clients, reachable=[1])
    monitor: Any = SimpleNamespace(log=lambda *given: None, log_timeline=lambda *given: None)
    contexts, environment = ContextProvider(config.teacher_model, config.env, 0), RecordingEnvironment()
    evaluator = BaselineEvaluator(SilentTeacher(contexts, TokenScorer([], "m"), "m"), RunDir(tmp_path))
    schedule = build_schedule(environment, tmp_path)
    evaluations = Evaluations([schedule], servers, monitor, model="m", max_steps=None, baseline_evaluator=evaluator)
    anyio.run(evaluate, evaluations)
    assert environment.urls == ["http://left/v1"] * 8, "without and with the context"
    assert evaluator._student.clients == clients[1:]


@pytest.mark.parametrize("name", ["world", "held-out"])
@pytest.mark.parametrize("held_out", [None, [], [{"prompt": "other"}]])
def test_evaluation_on_training_prompts_warns_once(
    held_out: list[dict[str, Any]] | None, name: str, tmp_path: Path
) -> None:
    world = PlainEnvironment([{"prompt": "q"}], lambda completion: 0.0, eval_dataset=held_out)
    values = {"env": [{"id": "world"}], "eval": {}, "val": {}, "output_dir": tmp_path}
    lines = list[str]()
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    build_schedules(OrchestratorConfig.model_validate(values), {"world": world}, {name: world}, 0)
    logger.remove(sink)
    names = [] if held_out else sorted({"world", name}, reverse=True)
    expected = [f"{one} is evaluated on its training prompts: give it an eval_dataset" for one in names]
    assert len(lines) == len(expected) and all(map(str.startswith, lines, expected))


def test_training_prompts_of_any_name_are_skipped(tmp_path: Path) -> None:
    world = PlainEnvironment([{"prompt": "a"}], lambda completion: 0.0, eval_dataset=[{"prompt": "a"}, {"prompt": "b"}])
    teacher = {"context": "C", "eval_baseline": True}
    values = {"env": [{"id": "world"}], "eval": {"env": [{"id": "other"}]}, "output_dir": tmp_path}
    config = OrchestratorConfig.model_validate(values | {"teacher_model": teacher})
    [schedule] = build_schedules(config, {"world": world}, {"other": world}, 0)
    assert [row["prompt"][0]["content"] for row in schedule.environments["other"].rows("eval")] == ["b"]
