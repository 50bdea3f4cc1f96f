"""Tasksets of verifiers 0.4 in the configuration of an environment."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prime_rl.configuration.sections import EnvConfig
from prime_rl.evolve.config import EvolveConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.utils.vf import check_environments

TASKSET = {"id": "reverse-text-v1", "split": "train"}


def test_a_taskset_names_its_environment() -> None:
    config = EnvConfig(taskset=TASKSET, python="python3", args={"num_examples": 5})
    assert config.id == config.name == "reverse-text-v1"
    assert EnvConfig(**config.plain()).factory == config.factory
    _, args = config.factory
    assert args == {"num_examples": 5, "taskset": TASKSET, "harness": None, "python": "python3"}
    check_environments([config])


def test_other_environments_are_made_by_their_id() -> None:
    assert EnvConfig(id="gsm8k", args={"a": 1}).factory == ("gsm8k", {"a": 1})


def test_unknown_arguments_of_a_taskset_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes no argument 'rows'.*num_examples, num_eval_examples"):
        check_environments([EnvConfig(taskset=TASKSET, python="python3", args={"rows": 5})])


def test_a_missing_interpreter_is_found_before_the_start() -> None:
    with pytest.raises(ValueError, match=r"env.python: there is no program 'no/such/python'"):
        check_environments([EnvConfig(taskset=TASKSET, python="no/such/python")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"taskset": TASKSET}, "taskset needs python"),
        ({"taskset": {}, "python": "python3"}, "taskset needs an id"),
        ({"harness": {"id": "null"}}, "harness and python belong to a taskset"),
        ({"taskset": TASKSET, "python": "python3", "id": "gsm8k"}, "keep one of them"),
        ({"taskset": TASKSET, "python": "python3", "command": ["a"]}, "exclude each other"),
        ({"taskset": TASKSET, "python": "python3", "harness": {"retries": {}}}, "harness.retries would repeat"),
        ({"taskset": TASKSET, "python": "python3", "harness": {"client": {}}}, "harness.client would replace"),
        ({"taskset": TASKSET, "python": "python3", "harness": {"model": "m"}}, "harness.model would replace"),
        ({"taskset": TASKSET, "python": "python3", "install": True}, "install does not install tasksets"),
    ],
)
def test_contradictions_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvConfig(**fields)


def test_contexts_cannot_be_inserted_into_tasksets() -> None:
    env = {"taskset": TASKSET, "python": "python3"}
    with pytest.raises(ValidationError, match=r"env\.taskset builds its prompts in verifiers"):
        EvolveConfig.model_validate({"env": [env]})
    distillation = {"env": [env], "teacher_model": {"context": "c", "eval_baseline": True}}
    with pytest.raises(ValidationError, match=r"cannot insert the context into taskset 'reverse-text-v1'"):
        OrchestratorConfig.model_validate({**distillation, "eval": {}})
    OrchestratorConfig.model_validate({**distillation, "eval": {"env": [{"id": "reverse-text"}]}})
    OrchestratorConfig.model_validate({"env": [env], "teacher_model": {"context": "c"}})
