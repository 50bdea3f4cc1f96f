"""`train`: the configuration that it builds, the environments that it accepts, the result that it returns."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from prime_rl import train
from prime_rl.config import RLConfig
from prime_rl.training import check_guard, find_id
from rollouts.training.steps import publish_step


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RLConfig]:
    """Configurations of the runs that were started; each leaves two steps behind."""
    configs: list[RLConfig] = []

    def run(config: RLConfig) -> int:
        configs.append(config)
        assert not [name for name in os.environ if name.startswith("PRIME_MAX")], "would be read again by processes"
        for step in (1, 2):
            publish_step(config.output_dir / "weights", step, lambda path: None)
        own = {"orchestrator": {"reward/mean": 0.25, "time/step": 9.0}, "trainer": {"time/step": 1.0}}
        rows = [{"process": name, "step": n, **own[name]} for n in (1, 2) for name in own]
        rows.append({"process": "trainer", "step": 2, "timeline/what": "load_data", "timeline/start": 0.5})
        (config.output_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    monkeypatch.setattr("prime_rl.rl.rl", run)
    return configs


def test_the_result_has_weights_and_metrics(
    started: list[RLConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_MAX_ASYNC_LEVEL", "0")
    out = tmp_path / "run"
    settings = {"orchestrator.batch_size": 64, "orchestrator.env.0.args": {"min_length": 3}}
    result = train("tiny-qwen3", "reverse-text", 20, output_dir=out, settings=settings)
    assert result.run_dir == out and result.weights == out / "weights" / "step_2"
    assert result.metrics == {"reward/mean": [(1, 0.25), (2, 0.25)], "time/step": [(1, 1.0), (2, 1.0)]}
    [config] = started
    assert (config.model.name, config.max_steps, config.max_async_level) == ("tiny-qwen3", 20, 0)
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (64, 8)
    assert (config.orchestrator.env[0].id, config.orchestrator.env[0].args) == ("reverse-text", {"min_length": 3})
    assert os.environ["PRIME_MAX_ASYNC_LEVEL"] == "0"


def test_files_and_settings_override_in_order(started: list[RLConfig], tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(f'seed = 1\noutput_dir = "{tmp_path}/out"\n[orchestrator]\nbatch_size = 32\n')
    train("tiny-qwen3", "reverse-text", 3, files=[file], settings={"seed": 2})
    [config] = started
    assert (config.seed, config.max_steps, config.orchestrator.batch_size) == (2, 3, 32)
    assert config.output_dir == tmp_path / "out"


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("", 8),
        ("rollouts_per_example = 1", 1),
        ("teacher_model = {context = 'x'}", 1),
        ("teacher_model = {context = 'x'}\nrollouts_per_example = 2", 2),
        ("[orchestrator.teacher_model]\n[trainer.loss]\nkl_coef = 0.1", 8),
        ("[orchestrator.advantage]\nbaseline = 'role'", 1),
        ("[trainer.critic]", 1),
    ],
)
def test_a_file_leaves_groups_on(lines: str, number: int, started: list[RLConfig], tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(f"[orchestrator]\nbatch_size = 32\n{lines}\n")
    train("tiny-qwen3", "reverse-text", 3, files=[tmp_path / "rl.toml"], output_dir=tmp_path)
    assert started[0].orchestrator.rollouts_per_example == number


def test_settings_may_name_arguments_before_the_environment(started: list[RLConfig], tmp_path: Path) -> None:
    settings = {"orchestrator.env.1.args": {"x": 1}, "orchestrator.env.1.id": "wordle"}
    train("tiny-qwen3", "reverse-text", 3, output_dir=tmp_path, settings=settings)
    assert started[0].orchestrator.env[1].args == {"x": 1}


def test_a_failed_run_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("prime_rl.rl.rl", lambda config: 1)
    with pytest.raises(RuntimeError, match=r"exit code 1; logs: .*logs"):
        train("tiny-qwen3", "reverse-text", 3, output_dir=tmp_path)


def script(path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function `letters` of a script that was run as `__main__`."""
    path.write_text(code)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    exec(compile("def letters(): return {}", str(path), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module.letters  # type: ignore[attr-defined]


CALL = "train('tiny-qwen3', letters, 5)\n"
DEFINITION = "from prime_rl import train\ndef letters(): return {}\n"


def test_a_function_of_a_guarded_script_is_named_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.py"
    for code in (f"if __name__ == '__main__':\n    result = {CALL}", f"def main():\n    {CALL}"):
        function = script(path, DEFINITION + code, monkeypatch)
        assert find_id(function) == f"{path}:letters"
    for code in (f"result = {CALL}", f"if True:\n    {CALL}", f"import prime_rl\nprime_rl.{CALL}"):
        path.write_text(DEFINITION + code)
        with pytest.raises(
            ValueError, match=r"would train again \(run\.py:\d\): put the call of train below `if __name"
        ):
            check_guard(path)


def test_a_function_without_a_name_in_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> dict[str, Any]:
        return {}

    for function in (inner, lambda: {}, print):
        with pytest.raises(ValueError, match=r"top of a module|in a session"):
            find_id(function)
    assert find_id(json.dumps) == "json:dumps"
