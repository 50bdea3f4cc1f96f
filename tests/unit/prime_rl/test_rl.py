"""Launcher: GPU assignment, output directory, written configs and failure reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl import rl
from prime_rl.config import RLConfig
from prime_rl.inference.config import InferenceConfig
from prime_rl.rl import prepare_output_dir
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import append_jsonl
from rollouts.training.steps import complete_steps, publish_dir, publish_step


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


def publish(root: Path, step: int) -> Path:
    return publish_step(root, step, lambda directory: (directory / "file").write_text("x"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(rl, "find_gpus", lambda: found)
    return found


def test_without_gpus_everything_is_on_the_cpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert rl.choose_placement(parse()) == rl.GpuAssignment(None, None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(rl, "num_cores", lambda: 2)
    assert rl.compute_environment(None, 2) == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(rl, "num_cores", lambda: 1)
    assert rl.compute_environment(None, 2)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(rl, "num_cores", lambda: 16)
    assert rl.compute_environment(None, 2)["OMP_NUM_THREADS"] == "8"


def test_gpu_ids_without_a_gpu_are_rejected_by_name(gpus: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trainer_gpu_ids .* leave it out"):
        rl.choose_placement(parse("--trainer_gpu_ids", "0"))


def test_gpus_are_shared_out(gpus: list[int]) -> None:
    gpus[:] = [3]
    assert rl.choose_placement(parse()) == rl.GpuAssignment((3,), (3,))
    gpus[:] = [0, 1, 2]
    assert rl.choose_placement(parse()) == rl.GpuAssignment((1,), (0,))
    assert rl.choose_placement(parse("--trainer_gpu_ids", "0,1")) == rl.GpuAssignment((0, 1), (0,))
    assert rl.choose_placement(parse("--inference_gpu_ids", "2")) == rl.GpuAssignment((0,), (2,))
    assert rl.compute_environment((0, 1), 3)["CUDA_VISIBLE_DEVICES"] == "0,1"
    with pytest.raises(ValueError, match=r"inference_gpu_ids"):
        rl.choose_placement(parse("--inference_gpu_ids", "1,2"))


def test_the_trainer_starts_a_rank_per_gpu(gpus: list[int]) -> None:
    gpus[:] = [0, 1, 2]
    one, two = parse(), parse("--trainer_gpu_ids", "0,1")
    assert rl.count_trainer_ranks(one, rl.choose_placement(one)) == 1
    assert rl.build_trainer_argv(Path("t.toml"), 1)[-2:] == ["@", "t.toml"]
    assert rl.count_trainer_ranks(two, rl.choose_placement(two)) == 2
    assert rl.build_trainer_argv(Path("t.toml"), 2)[-4:] == ["@", "t.toml", "--parallel.dp", "2"]
    assert rl.choose_placement(parse("--trainer.parallel.dp", "2")) == rl.GpuAssignment((1, 2), (0,))
    with pytest.raises(ValueError, match=r"trainer_gpu_ids = \[0, 1\], .*: trainer\.parallel\.dp is 3 but 2"):
        rl.choose_placement(parse("--trainer_gpu_ids", "0,1", "--trainer.parallel.dp", "3"))
    with pytest.raises(ValueError, match=r"trainer\.parallel needs 3 ranks but inference leaves 2 of 3"):
        rl.choose_placement(parse("--trainer.parallel.dp", "3"))
    assert rl.choose_placement(parse("--trainer.parallel.tp", "2")) == rl.GpuAssignment((1, 2), (0,))
    gpus.clear()
    many = parse("--trainer.parallel.dp", "4")
    assert rl.count_trainer_ranks(many, rl.choose_placement(many)) == 4


def test_an_earlier_run_is_neither_mixed_in_nor_deleted(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    publish(tmp_path / "rollouts", 4)
    with pytest.raises(ValueError, match=r"rollouts up to step_4, weights up to step_3") as error:
        rl.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    for cure in (f"--model.name {tmp_path}/weights/step_3 --output-dir NEW", "--clean"):
        assert cure in str(error.value)
    assert "--resume" not in str(error.value), "there is no checkpoint to resume from"
    assert len(str(error.value).splitlines()) <= 3
    commit(tmp_path, 2)
    with pytest.raises(ValueError, match=r"continue after step 2 with --resume, .*--output-dir, .*--clean"):
        rl.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert complete_steps(tmp_path / "weights") == [3] and complete_steps(tmp_path / "rollouts") == [4]


def commit(out: Path, step: int, *parts: str) -> None:
    for part in parts or rl.CKPT_PARTS:
        publish_dir(out / "checkpoints" / f"step_{step}" / part, lambda directory: None, sealed=True)


def listed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_resuming_without_a_checkpoint_removes_nothing(tmp_path: Path) -> None:
    """The run was killed between the two halves of its only checkpoint."""
    for step in (10, 17, 18, 19):
        publish(tmp_path / "weights", step)
    publish(tmp_path / "rollouts", 20)
    commit(tmp_path, 10, "trainer")
    commit(tmp_path, 20, "orchestrator")
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 19}])
    before = listed(tmp_path)
    config = parse("--output_dir", str(tmp_path), "--resume")
    with pytest.raises(ValueError, match=r"no complete checkpoint(.|\n)*weights/step_19 --output-dir NEW.*--clean"):
        rl.prepare_output_dir(config)
    assert listed(tmp_path) == before


def test_resuming_in_a_directory_without_trained_steps_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a scheduler does that always passes --resume: nothing there, or a run that ended before its first step."""
    config = parse("--output_dir", str(tmp_path / "out"), "--resume")
    rl.prepare_output_dir(config)
    for name in ("configs", "logs"):
        (tmp_path / "out" / name).mkdir(parents=True)
    rl.prepare_output_dir(config)
    publish(tmp_path / "out" / "rollouts", 1)
    commit(tmp_path / "out", 1, "orchestrator")
    rl.prepare_output_dir(config)
    assert capsys.readouterr().out.count("starting from the beginning") == 3
    assert not list((tmp_path / "out").glob("*/step_1"))
    moved = listed(tmp_path / "out" / "attempts" / "1")
    assert "rollouts/step_1/file" in moved and "checkpoints/step_1/orchestrator/STABLE" in moved


def test_resuming_moves_later_steps_away(tmp_path: Path) -> None:
    """A checkpoint after the named one would else be mixed with halves of the continued run."""
    for step in (10, 20):
        publish(tmp_path / "weights", step)
        commit(tmp_path, step)
    publish(tmp_path / "weights", 21)
    rl.prepare_output_dir(parse("--output_dir", str(tmp_path), "--ckpt.resume_step", "10"))
    assert complete_steps(tmp_path / "weights") == [10]
    assert complete_steps(tmp_path / "checkpoints", rl.CKPT_PARTS) == [10]
    archive = tmp_path / "attempts" / "1"
    assert complete_steps(archive / "weights") == [20, 21]
    assert complete_steps(archive / "checkpoints", rl.CKPT_PARTS) == [20]


@pytest.mark.parametrize("expected, left", [("-1", [1, 2]), ("2", [1, 2]), ("3", None), ("9", None)])
def test_resuming_takes_back_batches_after_the_checkpoint(
    expected: str, left: list[int] | None, tmp_path: Path
) -> None:
    """Step 3 is committed by one half only, so it is no checkpoint to go back to, and nothing is removed for it."""
    for step in (1, 2, 3, 4):
        publish(tmp_path / "rollouts", step)
    for step, parts in ((2, ("trainer", "orchestrator")), (3, ("trainer",))):
        for part in parts:
            publish_dir(tmp_path / "checkpoints" / f"step_{step}" / part, lambda directory: None, sealed=True)
    config = parse("--output_dir", str(tmp_path), "--ckpt.resume_step", expected)
    if left is None:
        with pytest.raises(ValueError, match=rf"resume_step = {expected}: .* \(complete: 2\)\n  name one of them"):
            rl.prepare_output_dir(config)
    else:
        rl.prepare_output_dir(config)
    assert complete_steps(tmp_path / "rollouts") == (left or [1, 2, 3, 4])


def test_resume_is_the_latest_commit(tmp_path: Path) -> None:
    assert parse("--output-dir", str(tmp_path)).ckpt is None
    config = parse("--output-dir", str(tmp_path), "--resume", "--ckpt.interval", "3")
    assert config.ckpt is not None and config.orchestrator.ckpt is not None and config.trainer.ckpt is not None
    assert [c.resume_step for c in (config.ckpt, config.orchestrator.ckpt, config.trainer.ckpt)] == [-1, -1, -1]
    named = parse("--output-dir", str(tmp_path), "--resume", "--ckpt.resume_step", "4")
    assert named.ckpt is not None and named.ckpt.resume_step == 4
    with pytest.raises(ValueError, match="clean would remove the steps that resume"):
        prepare_output_dir(parse("--output-dir", str(tmp_path), "--resume", "--clean"))


def test_clean_removes_steps_and_keeps_records(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    (tmp_path / "weights" / "notes.txt").write_text("mine")
    for reward in (0.25, 0.5):
        append_jsonl(tmp_path / "metrics.jsonl", [{"reward": reward}])
        rl.prepare_output_dir(parse("--output_dir", str(tmp_path), "--clean"))
        assert not (tmp_path / "metrics.jsonl").exists()
    assert complete_steps(tmp_path / "weights") == []
    assert (tmp_path / "weights" / "notes.txt").read_text() == "mine"
    kept = sorted((tmp_path / "attempts").rglob("metrics.jsonl"))
    assert [path.read_text() for path in kept] == ['{"reward":0.25}\n', '{"reward":0.5}\n']


def test_clean_spares_the_weights_it_starts_from(tmp_path: Path) -> None:
    model = publish(tmp_path / "weights", 3)
    config = parse("--output_dir", str(tmp_path), "--clean", "--model.name", str(model))
    with pytest.raises(ValueError, match=r"model\.name"):
        rl.prepare_output_dir(config)
    assert complete_steps(tmp_path / "weights") == [3]


def test_half_written_steps_are_swept_away(tmp_path: Path) -> None:
    left = tmp_path / "weights" / ".tmp-step_3-abc"
    left.mkdir(parents=True)
    rl.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert not left.exists()


def test_one_directory_serves_one_run(tmp_path: Path) -> None:
    in_use = pytest.raises(ValueError, match=r"output_dir .* in use")
    with rl.lock_output_dir(tmp_path), in_use, rl.lock_output_dir(tmp_path):
        pass
    with rl.lock_output_dir(tmp_path):
        pass


def test_each_process_reads_the_config_rl_resolved(tmp_path: Path) -> None:
    config = parse("--output_dir", str(tmp_path), "--max_steps", "7", "--trainer.optim.max_norm", "None")
    paths = rl.write_configs(config)
    trainer = parse_argv(TrainConfig, ["@", str(paths["trainer"])], "trainer")[0]
    inference = parse_argv(InferenceConfig, ["@", str(paths["inference"])], "inference")[0]
    assert trainer == config.trainer and trainer.max_steps == 7 and trainer.optim.max_norm is None
    assert inference == config.inference
    assert parse_argv(RLConfig, ["@", str(paths["rl"])], "rl")[0] == config


def test_invalid_input_of_a_process_is_reported_verbatim(tmp_path: Path) -> None:
    import sys

    says = "import sys; print('loading'); print('error: env \"x\" was not found\\n  try y'); sys.exit(2)"
    with pytest.raises(ChildFailed) as failure, Supervisor(tmp_path, handle_signals=False) as run:
        run.start("orchestrator", [sys.executable, "-c", says])
        run.wait(["orchestrator"])
    with pytest.raises(ValueError, match=r'^orchestrator: env "x" was not found\n  try y$'):
        rl.report_failure(failure.value)


def test_summary_names_outputs(tmp_path: Path) -> None:
    for step, reward in ((1, 0.25), (2, 0.75)):
        append_jsonl(tmp_path / "metrics.jsonl", [{"step": step, "process": "orchestrator", "reward/mean": reward}])
    weights = publish(tmp_path / "weights", 2)
    text = rl.summarize(parse("--output_dir", str(tmp_path)), 12.34)
    for part in ("2 in 12.3 s", "0.2500 -> 0.7500", str(weights), "metrics.jsonl", "samples.jsonl", "eval @ "):
        assert part in text, part


def test_summary_of_a_distillation_shows_gap_and_retention(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "process": "orchestrator", "reward/mean": 0.0, "teacher/skipped/overlong": 2.0},
        {"step": 1, "process": "trainer", "teacher_kl/mean": 1.5},
        {"step": 2, "process": "trainer", "teacher_kl/mean": 0.25},
    ]
    closed = {"gap_closed": 0.8, "gap_closed/ci_low": 0.5, "gap_closed/ci_high": 1.1, "teacher_context/avg": 0.9}
    facts = {"student/avg": 0.7, "student_context/avg": 0.8, **closed}
    rows.append({"step": 2, "process": "orchestrator", **{f"distill/facts/{k}": v for k, v in facts.items()}})
    other = {"distill/other/student/avg": 0.4, "distill/other/retention": 0.95}
    rows.append({"step": 2, "process": "orchestrator", **other})
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    teacher = ["--output_dir", str(tmp_path), "--orchestrator.teacher_model.context", "x"]
    text = rl.summarize(parse(*teacher, "--trainer.loss.adv_tau", "0", "--trainer.loss.teacher_tau", "1"), 9.0)
    assert "reward" not in text
    assert "teacher KL 1.5000 -> 0.2500" in text and "2 samples were not scored" in text
    assert re.search(r"facts +gap closed 0.80, 0.50 to 1.10 \(teacher 0.9000, student 0.7000, step 2\)", text)
    assert re.search(r"other +retention 0.95", text)
    assert "reward" in rl.summarize(parse(*teacher), 9.0), "with adv_tau the reward matters too"


def test_stopped_run_reports_progress_and_how_to_resume(tmp_path: Path) -> None:
    assert "Stopped after step 0; no checkpoint" in rl.describe_stop(tmp_path)
    publish(tmp_path / "weights", 7)
    assert f"--model.name {tmp_path}/weights/step_7" in rl.describe_stop(tmp_path)
    for part in rl.CKPT_PARTS:
        publish_dir(tmp_path / "checkpoints" / "step_5" / part, lambda directory: None)
    text = rl.describe_stop(tmp_path)
    assert "step 7" in text and "checkpoint of step 5" in text and "--resume" in text


def test_commands_that_we_print_can_be_typed_into_a_shell() -> None:
    """`eval` alone is a shell builtin, so documents and summaries must not print it bare."""
    root = Path(__file__).resolve().parents[3]
    files = [root / "README.md", *root.glob("examples/**/*.md"), *root.glob("examples/**/*.toml")]
    files += [*root.glob("configs/**/*.toml"), root / "scripts" / "demo.py"]
    bare = re.compile(r"(?<!env )(?<!run )\beval +@")
    found = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if bare.search(line)]
    assert found == []
    assert bare.search("next  eval @ x.toml") and not bare.search("env eval @ x.toml")
    assert "env eval @" in rl.summarize(parse(), 1.0)
