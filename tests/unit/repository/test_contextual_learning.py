"""The loop of contextual learning: stages in order, resuming, the report."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from prime_rl.evolve.evolve import SOLVED
from prime_rl.runtime.process import ChildFailed

ROOT = Path(__file__).parents[3]


class WrongInput(ChildFailed):
    """A command that ended with an error message."""

    def __init__(self, wrong_input: str) -> None:
        super().__init__([])
        self._wrong_input = wrong_input

    @property
    def wrong_input(self) -> str:
        return self._wrong_input


class FakeStages:
    """Writes the files of each command instead of running it; fails once at the command number `fail_at`."""

    def __init__(
        self,
        scores: list[float],
        fail_at: int = -1,
        is_adapter: bool = False,
        failure: Exception | None = None,
        contexts: Sequence[str] = (),
    ) -> None:
        self.contexts = contexts or [f"rule {number}" for number in range(1, 9)]
        self.scores, self.fail_at, self.is_adapter = scores, fail_at, is_adapter
        self.failure = failure or RuntimeError("interrupted")
        self.commands: list[tuple[str, str, tuple[str, ...]]] = []

    def run(self, title: str, command: str, *options: str) -> None:
        if len(self.commands) == self.fail_at:
            self.fail_at = -1
            raise self.failure
        self.commands.append((title, command, options))
        if command == "convert":
            Path(options[1]).mkdir()
            return
        out = Path(options[options.index("--output-dir") + 1])
        number = len([one for one in self.commands if one[1] == command])
        if command == "evolve":
            write(out / "evolve" / "summary.json", {"initial_mean": 0.1, "mean": 0.5 + number / 10, "rollouts": 9})
            (out / "evolve" / "best.md").write_text(self.contexts[number - 1])
        elif command == "rl":
            (out / "weights" / "step_3").mkdir(parents=True)
            (out / "weights" / "step_3" / "STABLE").touch()
            if self.is_adapter:
                (out / "weights" / "step_3" / "adapter_config.json").touch()
            metrics = {"eval/./facts.py/baseline_teacher/avg": 0.9, "distill/./facts.py/gap_closed": 0.8 + number / 100}
            metrics |= {"distill/./facts.py/gap_closed/ci_low": 0.7, "distill/./facts.py/gap_closed/ci_high": 1.0}
            write(out / "metrics.jsonl", {"step": 0, **metrics, "distill/other/retention": 0.95})
        else:
            mean = self.scores[number - 1]
            summary = {"avg@1": mean, "avg@1/ci_low": mean - 0.1, "avg@1/ci_high": mean + 0.1}
            write(out / "evals" / "facts" / "summary.json", summary)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def run(
    tmp_path: Path,
    stages: FakeStages,
    rounds: int = 2,
    folder: Path = ROOT / "experiments/contextual_learning",
) -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    script = importlib.import_module("contextual_learning")
    loop = script.Loop(folder, tmp_path, "m", rounds, 7, stages)
    loop.run()
    return loop


def test_rounds_continue_from_weights_and_context(tmp_path: Path) -> None:
    stages = FakeStages([0.0, 0.4, 0.8])
    run(tmp_path, stages)
    assert [command for _, command, _ in stages.commands] == ["eval", "evolve", "rl", "eval", "evolve", "rl", "eval"]
    second = dict(zip(stages.commands[4][2], stages.commands[4][2][1:], strict=False))
    assert second["--examples"] == "failed" and second["--context"] == "rule 1"
    assert second["--context-file"] == "None", "evolve.toml may set the context of the first round by either key"
    assert second["--model.name"] == str(tmp_path / "round_1/rl/weights/step_3")
    report = (tmp_path / "report.md").read_text()
    assert "| 1 | 0.100 -> 0.600 | 9 | 0.000 (-0.100 to 0.100) | 0.900 | 0.400 (0.300 to 0.500) |" in report
    assert "| 0.82 (0.70 to 1.00) | 0.95 |" in report and "-rule 1\n+rule 2" in report


def test_distillation_measures_what_the_report_shows(tmp_path: Path) -> None:
    stages, folder = FakeStages([0.0, 1.0]), tmp_path / "files"
    shutil.copytree(ROOT / "experiments/contextual_learning", folder)
    text = (folder / "evolve.toml").read_text()
    (folder / "evolve.toml").write_text(f'context_position = "system_replace"\n{text}')
    run(tmp_path, stages, folder=folder)
    options = stages.commands[2][2]
    given = dict(itertools.pairwise(options))
    assert given["--orchestrator.teacher_model.eval-baseline"] == "true"
    assert given["--orchestrator.teacher_model.context_position"] == "system_replace", "as in the search"
    assert given["--orchestrator.teacher_model.separator"] == "\n"
    results = json.loads((tmp_path / "loop.json").read_text())
    del results["settings"]
    results["round 1: distillation"] = {}
    report = importlib.import_module("contextual_learning").format_report(results, "m")
    assert "| 0.000 (-0.100 to 0.100) | - | 1.000 (0.900 to 1.100) | - | - |" in report


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_interrupted_loop_repeats_no_finished_stage(tmp_path: Path, fail_at: int) -> None:
    whole = FakeStages([0.0, 0.4, 0.8])
    run(tmp_path / "a", whole)
    stages = FakeStages([0.0, 0.4, 0.8], fail_at)
    with pytest.raises(RuntimeError, match="interrupted"):
        run(tmp_path / "b", stages)
    run(tmp_path / "b", stages)
    assert [one[:2] for one in stages.commands] == [one[:2] for one in whole.commands]
    assert (tmp_path / "a/report.md").read_text() == (tmp_path / "b/report.md").read_text()


def test_stages_of_other_settings_are_not_reused(tmp_path: Path) -> None:
    stages, folder = FakeStages([0.0, 0.4, 0.8]), tmp_path / "files"
    loop = run(tmp_path / "out", stages, rounds=1)
    shutil.copytree(loop.folder, folder)
    make, out = type(loop), tmp_path / "out"
    for model, seed, words in (("other", 7, "another model: m"), ("m", 8, "another seed: 7")):
        with pytest.raises(SystemExit, match=words):
            make(loop.folder, out, model, 1, seed, stages).run()
    number = len(stages.commands)
    text = (folder / "evolve.toml").read_text()
    assert "budget = 400" in text
    (folder / "evolve.toml").write_text(text.replace("budget = 400", "budget = 800"))
    make(folder, out, "m", 1, 7, stages).run()  # the second round may need more
    (folder / "rl.toml").write_text("")
    with pytest.raises(SystemExit, match=r"another rl\.toml(.|\n)*choose another --output-dir"):
        make(folder, out, "m", 1, 7, stages).run()
    assert len(stages.commands) == number


def test_stages_of_earlier_versions_are_reused(tmp_path: Path) -> None:
    """Their digests are those of the whole files."""
    stages = FakeStages([0.0, 0.4, 0.8])
    loop = run(tmp_path, stages, rounds=1)
    results = json.loads((tmp_path / "loop.json").read_text())
    for file in loop.folder.glob("*.toml"):
        results["settings"][file.name] = sha256(file.read_bytes()).hexdigest()
    write(tmp_path / "loop.json", results)
    number = len(stages.commands)
    run(tmp_path, stages, rounds=2)
    assert [command for _, command, _ in stages.commands[number:]] == ["evolve", "rl", "eval"]


def test_a_file_that_is_no_toml_reaches_its_command(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    digest_settings = importlib.import_module("stages").digest_settings
    for content in (b"budget = ", b"\xff"):
        (tmp_path / "evolve.toml").write_bytes(content)
        assert digest_settings(tmp_path / "evolve.toml") == sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("parts", "option"), [(["orchestrator"], "--clean"), (["orchestrator", "trainer"], "--resume")]
)
def test_a_killed_distillation_resumes_if_it_can(parts: list[str], option: str, tmp_path: Path) -> None:
    for part in parts:
        write(tmp_path / "round_1/rl/checkpoints/step_20" / part / "STABLE", "")
    stages = FakeStages([0.0, 1.0])
    run(tmp_path, stages)
    assert stages.commands[2][1] == "rl" and stages.commands[2][2][-1] == option


def test_the_path_of_a_model_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    find_model = importlib.import_module("contextual_learning").find_model
    monkeypatch.chdir(ROOT)
    assert find_model("tests/unit") == "tests/unit" and find_model(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(ROOT / "tests")
    assert find_model("unit") == str(ROOT / "tests" / "unit") and find_model("a/name") == "a/name"


def test_loop_ends_when_everything_is_solved(tmp_path: Path) -> None:
    stages = FakeStages([0.0, 1.0])
    run(tmp_path, stages, rounds=5)
    assert len(stages.commands) == 4


def test_loop_ends_when_training_examples_are_solved(tmp_path: Path) -> None:
    stages = FakeStages([0.0, 0.4], 4, failure=WrongInput(f"evolve: {SOLVED}: set examples"))
    for _ in range(2):  # the second time nothing is left to do
        run(tmp_path, stages, rounds=3)
        assert [command for _, command, _ in stages.commands] == ["eval", "evolve", "rl", "eval"]
    report = (tmp_path / "report.md").read_text()
    assert "| 1 | 0.100 -> 0.600 |" in report and "Before round 2 every training example is solved" in report
    with pytest.raises(ChildFailed):
        run(tmp_path / "b", FakeStages([0.0], 1, failure=WrongInput("evolve: budget = 1 is less than")))


@pytest.mark.parametrize("second", ["", "rule 1"])
def test_loop_ends_when_no_context_is_found(tmp_path: Path, second: str) -> None:
    stages = FakeStages([0.0, 0.4], contexts=["rule 1", second])
    for _ in range(2):  # the second time nothing is left to do
        run(tmp_path, stages, rounds=3)
        assert [command for _, command, _ in stages.commands] == ["eval", "evolve", "rl", "eval", "evolve"]
    report = (tmp_path / "report.md").read_text()
    assert "| 1 | 0.100 -> 0.600 |" in report and "No context improved the score in round 2." in report


def test_adapters_are_merged_for_the_next_round(tmp_path: Path) -> None:
    stages = FakeStages([0.0, 0.4, 0.8], is_adapter=True)
    run(tmp_path, stages)
    merges = [options for _, command, options in stages.commands if command == "convert"]
    models = [str(tmp_path / f"round_{n}/model") for n in (1, 2)]
    assert merges == [(str(tmp_path / f"round_{n}/rl/weights/step_3"), models[n - 1]) for n in (1, 2)]
    used = [o[o.index("--model.name") + 1] for _, command, o in stages.commands if command != "convert"]
    assert used == ["m"] * 3 + [models[0]] * 3 + [models[1]]
