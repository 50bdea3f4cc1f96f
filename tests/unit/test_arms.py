"""How much of the gap is closed: the arithmetic, the arms, and examples that training has never seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from prime_rl.orchestrator.arms import Arms, HeldOutEnvironment
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.context import Contexts
from prime_rl.orchestrator.teacher import Teacher
from prime_rl.utils.scoring import TokenScorer
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import Environment
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.metrics import compute_gap_closed
from rollouts.training.types import Status


def test_the_share_of_the_gap_that_is_closed() -> None:
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


def test_a_gap_that_may_be_chance_is_not_told() -> None:
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


def test_evaluation_examples_are_none_of_training() -> None:
    trained = build_environment(["a", "b", "c"], ["c", "d"])
    held = HeldOutEnvironment(trained, trained, "world")
    assert [row["prompt"][0]["content"] for row in held.rows("eval")] == ["d"]
    assert len(held.rows("train")) == 3
    everything = build_environment(["a", "b"], [])
    with pytest.raises(ValueError, match="held-out split"):
        HeldOutEnvironment(everything, everything, "world")


class ScriptedTeacher(Teacher):
    async def teach(self, samples: list[Any], env: str, row: Any, client: Any) -> list[Any]:
        return []


def test_arms_over_time(tmp_path: Path) -> None:
    """The teacher's arms are measured once, failures count as 0, and a student that forgets to be told is noticed."""
    config = OrchestratorConfig.model_validate(
        {
            "env": [{"id": "world"}, {"id": "elsewhere", "teacher": "anchor"}],
            "eval": {},
            "model": {"name": "m"},
            "teacher_model": {"context": "C ", "eval_baseline": True, "client": {"base_url": ["http://t/v1"]}},
        }
    )
    assert config.teacher_model is not None
    contexts = Contexts(config, config.teacher_model)
    teacher = ScriptedTeacher(contexts, TokenScorer([], "m"), "m")
    world = build_environment(["a"], [str(i) for i in range(30)])
    asked: list[tuple[str, bool]] = []
    earned = {"plain": 0.2, "told": 1.0}

    def answer(environment: Environment, reward: float) -> list[list[Rollout]]:
        rows = environment.rows("eval")
        failed = Rollout(prompt="", status=Status.FAILED, error="no")
        return [[failed if i == 0 else Rollout(prompt=row["prompt"], reward=reward)] for i, row in enumerate(rows)]

    async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
        is_told = str(environment.rows("eval")[0]["prompt"][0]["content"]).startswith("C ")
        asked.append((model, is_told))
        return answer(environment, earned["told" if is_told else "plain"])

    def measure(version: int, name: str = "world") -> dict[str, float]:
        groups = answer(world, earned["plain"])
        return anyio.run(arms.measure, name, world, world.rows("eval"), version, groups, 1.0, run)

    arms, name = Arms(config, teacher, ["student"], tmp_path), "world"
    first = measure(0)
    before, told = 0.2 * 29 / 30, 29 / 30
    assert first[f"eval/{name}/baseline_student/avg"] == pytest.approx(before)
    assert first[f"eval/{name}/baseline_teacher/avg"] == pytest.approx(told)
    assert first[f"eval/{name}/baseline_diff"] == pytest.approx(told - before)
    assert first[f"distill/{name}/gap_closed"] == 0 and asked == [("m", True)], "before training it is one model"
    earned["plain"], earned["told"] = 0.6, 0.4
    second = measure(5)
    assert second[f"distill/{name}/gap_closed"] == pytest.approx(0.5)
    assert second[f"distill/{name}/teacher_context/avg"] == pytest.approx(told)
    assert second[f"distill/{name}/collapsed"] == 1.0 and first[f"distill/{name}/collapsed"] == 0.0
    assert not [key for key in second if "baseline" in key], "told once"
    arms = Arms(config, teacher, ["student"], tmp_path)  # the run is resumed
    earned["told"] = 1.0
    resumed = measure(6)
    assert resumed[f"distill/{name}/gap_closed"] == pytest.approx(0.5), "the student before training is remembered"
    earned["plain"] = 0.2
    assert measure(0, "elsewhere")["distill/elsewhere/retention"] == 1.0
    earned["plain"] = 0.1
    other = measure(6, "elsewhere")
    assert other["distill/elsewhere/retention"] == pytest.approx(0.5) and "distill/elsewhere/gap_closed" not in other
