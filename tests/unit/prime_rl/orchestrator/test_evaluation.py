"""Evaluations during a run: failures are logged with their cause."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
from loguru import logger

from prime_rl.eval.config import EvalConfig
from prime_rl.orchestrator.evaluation import EvalKind, EvalSchedule, Evaluations


class BrokenEnvironment:
    id = "world"

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": "q", "example_id": 0}]

    async def run_group(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError("the judge's API key is invalid")


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
