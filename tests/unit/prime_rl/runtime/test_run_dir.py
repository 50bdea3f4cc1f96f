"""The run directory: files of an earlier run, moving them, and attempt numbers."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from prime_rl import __main__
from prime_rl.runtime import run_dir
from prime_rl.runtime.run_dir import CKPT_PARTS, Attempts, RunDir, find_used, lock_output_dir
from prime_rl.utils.monitor import Monitor, build_monitor
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps, publish_dir, publish_step


def publish(root: Path, *steps: int) -> None:
    for step in steps:
        publish_step(root, step, lambda directory: None)


def commit(out: Path, step: int, *parts: str) -> None:
    for part in parts:
        publish_dir(out / "checkpoints" / f"step_{step}" / part, lambda directory: None)


@pytest.mark.parametrize("name", ["weights", "average", "broadcasts"])
def test_trained_steps_without_a_checkpoint_are_not_overwritten(name: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.find_resume_step(-1, CKPT_PARTS) is None
    publish(tmp_path / "rollouts", 1)
    commit(tmp_path, 1, "orchestrator")
    assert run.find_resume_step(-1, CKPT_PARTS) is None
    publish(tmp_path / name, 1)
    with pytest.raises(ValueError, match=rf"{name} up to step_1(.|\n)*no complete checkpoint"):
        run.find_resume_step(-1, CKPT_PARTS)
    commit(tmp_path, 1, "trainer")
    assert run.find_resume_step(-1, CKPT_PARTS) == 1


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, parts in {2: CKPT_PARTS, 9: CKPT_PARTS, 10: ("trainer",)}.items():
        commit(tmp_path, step, *parts)
    (run.checkpoints / "step_11" / "trainer").mkdir(parents=True)
    assert run.find_resume_step(-1, ("trainer",)) == 10
    assert run.find_resume_step(-1, CKPT_PARTS) == 9
    assert RunDir(tmp_path / "nowhere").find_resume_step(-1, ("trainer",)) is None
    assert run.find_resume_step(None, CKPT_PARTS) is None
    assert run.find_resume_step(2, ("trainer",)) == 2
    with pytest.raises(ValueError, match=r"resume_step = 11: .*step_11 .*complete: 2, 9, 10\n  name one of them"):
        run.find_resume_step(11, ("trainer",))


def test_paths_of_a_run_are_only_built_here() -> None:
    """Join none of the names of `RunDir` to a path elsewhere."""
    root = Path(run_dir.__file__).parents[1]
    names = {path.name for path in vars(RunDir).values() if isinstance(path, run_dir._Entry)}
    assert len(names) > 15
    quoted = re.compile(rf"[\"'](?:{'|'.join(map(re.escape, names))})[\"'/]")  # quicker than the tree
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(root.rglob("*.py"))}
    found = [
        f"{file.relative_to(root)}:{node.lineno} {node.right.value}"
        for file, text in texts.items()
        if file != Path(run_dir.__file__) and quoted.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and isinstance(node.right, ast.Constant)
        and str(node.right.value).split("/")[0] in names
    ]
    assert found == [], "use prime_rl.runtime.run_dir.RunDir"


def test_parts_of_other_processes_stay(tmp_path: Path) -> None:
    commit(tmp_path, 1, *CKPT_PARTS)
    commit(tmp_path, 2, *CKPT_PARTS)
    commit(tmp_path, 3, "trainer")
    publish(tmp_path / "weights", 1, 2)
    run = RunDir(tmp_path)
    archive = run.archive_steps({run.checkpoints: 1, run.weights: 1}, "trainer")
    assert archive is not None
    assert archive == tmp_path / "attempts" / "1"
    assert complete_steps(archive / "checkpoints", ("trainer",)) == [2, 3]
    assert complete_steps(tmp_path / "checkpoints", ("orchestrator",)) == [1, 2]
    assert not (tmp_path / "checkpoints" / "step_3").exists()
    assert find_used(run.step_dirs) == {run.weights: [1], run.checkpoints: [1, 2]}


def test_archived_files_get_a_new_folder(tmp_path: Path) -> None:
    assert RunDir(tmp_path).archive([tmp_path / "missing"]) is None
    for number in ("1", "2"):
        (tmp_path / "notes").write_text(number)
        assert RunDir(tmp_path).archive([tmp_path / "notes"]) == tmp_path / "attempts" / number
    assert (tmp_path / "attempts" / "1" / "notes").read_text() == "1"


def test_two_processes_archive_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator moves whole checkpoints, a trainer that has loaded an older one its parts."""
    run, move = RunDir(tmp_path), shutil.move
    for step in (2, 3):
        commit(tmp_path, step, "trainer")

    def move_later(path: Path, target: Path) -> None:
        monkeypatch.setattr("shutil.move", move)
        run.archive_steps({run.checkpoints: 1})
        move(path, target)

    monkeypatch.setattr("shutil.move", move_later)
    run.archive_steps({run.checkpoints: 1}, "trainer")
    assert complete_steps(tmp_path / "attempts" / "2" / "checkpoints", ("trainer",)) == [2, 3]


def test_a_step_belongs_to_the_last_attempt_started_before_it(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, "trainer")
    assert attempts.find(3) == 0
    assert [RunDir(tmp_path).begin_attempt("trainer", step) for step in (0, 10, 5)] == [0, 1, 2]
    assert [attempts.find(step) for step in (1, 5, 6, 10, 11)] == [0, 0, 2, 2, 2]
    assert RunDir(tmp_path).begin_attempt("trainer", 20) == 3
    assert [attempts.find(step) for step in (0, 20, 21)] == [0, 2, 3], "the file is read again when it has grown"


def test_step_0_belongs_to_the_last_attempt_from_there(tmp_path: Path) -> None:
    """Each start without a checkpoint evaluates the first weights."""
    assert [RunDir(tmp_path).begin_attempt("trainer", step) for step in (0, 0, 10)] == [0, 1, 2]
    assert [Attempts(tmp_path, "trainer").find(step) for step in (0, 1, 11)] == [1, 1, 2]


def test_a_run_of_an_older_version_was_attempt_0(tmp_path: Path) -> None:
    assert RunDir(tmp_path).begin_attempt("sft", 10) == 1


def test_every_row_has_the_attempt_of_its_step(tmp_path: Path) -> None:
    monitors = [build_monitor(tmp_path, name) for name in ("orchestrator", "inference", "trainer")]
    assert all(isinstance(monitor, Monitor) for monitor in monitors)
    for start in (0, 2):
        RunDir(tmp_path).begin_attempt("orchestrator", start)
        for monitor in monitors:
            monitor.log({"a": 1}, start)
            monitor.log_timeline("x", 0, 1, start + 1)
    rows = [(row["process"], row["step"], row["attempt"]) for row in load_jsonl(tmp_path / "metrics.jsonl")]
    first = [(name, step, 0) for name in ("orchestrator", "inference", "trainer") for step in (0, 1)]
    again = [(name, step, step - 2) for name in ("orchestrator", "inference") for step in (2, 3)]
    assert rows == [*first, *again, ("trainer", 2, 0), ("trainer", 3, 0)], "servers follow the orchestrator"


@pytest.mark.parametrize(
    ("attempts", "has_resumed"),
    [
        (["orchestrator 0", "trainer 0", "trainer 4", "row", "orchestrator 4"], False),
        (["orchestrator 0", "trainer 0", "trainer 4", "row", "orchestrator 4", "trainer 4"], True),
        (["orchestrator 0", "trainer 0", "row", "trainer 4", "orchestrator 4"], True),
        (["orchestrator 0", "trainer 0", "row", "orchestrator 4", "row", "orchestrator 4", "trainer 4"], True),
        (["orchestrator 0", "trainer 0", "row", "orchestrator 4"], False),
        (["orchestrator 0", "row", "orchestrator 4"], True),
    ],
)
def test_a_trainer_has_resumed_since_the_last_attempt(attempts: list[str], has_resumed: bool, tmp_path: Path) -> None:
    """Trainer and orchestrator start on their own: one may have been restarted alone, or have failed to load."""
    run, monitor, stopped = RunDir(tmp_path), build_monitor(tmp_path, "orchestrator"), 0.0
    for event in attempts:
        process, _, step = event.partition(" ")
        if process == "row":
            monitor.log({"a": 1}, 4)
        else:
            stopped = run.find_last_record("orchestrator") if process == "orchestrator" else stopped
            run.begin_attempt(process, int(step))
    assert run.has_resumed("trainer", 4, stopped) == has_resumed


def test_a_part_of_a_run_directory_has_one_writer(tmp_path: Path) -> None:
    with lock_output_dir(tmp_path, "trainer"), lock_output_dir(tmp_path, "orchestrator"):
        for parts in (("trainer",), ("orchestrator",), CKPT_PARTS):
            with pytest.raises(ValueError, match=r"output_dir .* in use"), lock_output_dir(tmp_path, *parts):
                pass
    with lock_output_dir(tmp_path, *CKPT_PARTS):
        pass


@pytest.mark.parametrize("command", ["trainer", "sft", "orchestrator", "rl", "evolve"])
def test_a_command_refuses_a_directory_in_use(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--model.name", "tiny-qwen3", "--output-dir", str(tmp_path)]
    argv += {
        "sft": ["--data.type", "fake"],
        "rl": ["--model.debug.random-init"],
        "evolve": ["--env.0.id", "facts"],
    }.get(command, [])
    monkeypatch.setattr("sys.argv", ["prime_rl", *argv])
    with lock_output_dir(tmp_path, *CKPT_PARTS, "evolve"), pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 2 and "is in use by another run" in capsys.readouterr().err
    assert not RunDir(tmp_path).configs.exists()
