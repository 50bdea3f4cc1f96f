"""Evaluations during a run: failures are logged with their cause; lost servers get no requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
from loguru import logger

from prime_rl.client.scoring import TokenScorer
from prime_rl.eval.config import EvalConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.baseline_eval import BaselineEvaluator
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.teacher import Teacher
from prime_rl.orchestrator.evaluation import EvalKind, EvalSchedule, Evaluations
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.agent_integration import Rollout


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
    assert lines == ["eval of version 0 failed: RuntimeError: the judge's API key is invalid\n"]


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
