"""The output directory: earlier runs, resumption, configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl.config import RLConfig
from prime_rl.eval.config import EvalConfig
from prime_rl.generation.model_server import build_server_argv
from prime_rl.inference.config import InferenceConfig
from prime_rl.launcher import output_dir
from prime_rl.rl import prepare_output_dir
from prime_rl.runtime.run_dir import CKPT_PARTS
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import append_jsonl
from rollouts.training.steps import complete_steps, publish_dir, publish_step


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


def publish(root: Path, step: int) -> Path:
    return publish_step(root, step, lambda directory: (directory / "file").write_text("x"))


def test_an_earlier_run_is_neither_mixed_in_nor_deleted(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    publish(tmp_path / "rollouts", 4)
    with pytest.raises(ValueError, match=r"rollouts up to step_4, weights up to step_3") as error:
        output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    for cure in (f"--model.name {tmp_path}/weights/step_3 --output-dir NEW", "--clean"):
        assert cure in str(error.value)
    assert "--resume" not in str(error.value), "there is no checkpoint to resume from"
    assert len(str(error.value).splitlines()) <= 3
    commit(tmp_path, 2)
    with pytest.raises(ValueError, match=r"continue after step 2 with --resume, .*--output-dir, .*--clean"):
        output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert complete_steps(tmp_path / "weights") == [3] and complete_steps(tmp_path / "rollouts") == [4]


def commit(out: Path, step: int, *parts: str) -> None:
    for part in parts or CKPT_PARTS:
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
        output_dir.prepare_output_dir(config)
    assert listed(tmp_path) == before


def test_resuming_in_a_directory_without_trained_steps_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a scheduler does that always passes --resume: nothing there, or a run that ended before its first step."""
    config = parse("--output_dir", str(tmp_path / "out"), "--resume")
    output_dir.prepare_output_dir(config)
    for name in ("configs", "logs"):
        (tmp_path / "out" / name).mkdir(parents=True)
    output_dir.prepare_output_dir(config)
    publish(tmp_path / "out" / "rollouts", 1)
    commit(tmp_path / "out", 1, "orchestrator")
    output_dir.prepare_output_dir(config)
    assert capsys.readouterr().out.count("starting from the beginning") == 3
    assert not list((tmp_path / "out").glob("*/step_1"))
    moved = listed(tmp_path / "out" / "attempts" / "1")
    assert "rollouts/step_1/file" in moved and "checkpoints/step_1/orchestrator/STABLE" in moved


def test_resuming_moves_later_steps_away(tmp_path: Path) -> None:
    """Later checkpoints stay: trainer and orchestrator move them once they have loaded the named one."""
    for step in (10, 20):
        publish(tmp_path / "weights", step)
        commit(tmp_path, step)
    publish(tmp_path / "weights", 21)
    config = parse("--output_dir", str(tmp_path), "--ckpt.resume_step", "10")
    seal = tmp_path / "checkpoints" / "step_10" / "trainer" / "STABLE"
    sealed = seal.read_text()
    seal.write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint 10 is damaged(.|\n)*name another step in ckpt\.resume_step"):
        output_dir.prepare_output_dir(config)
    assert complete_steps(tmp_path / "weights") == [10, 20, 21]
    seal.write_text(sealed)
    output_dir.prepare_output_dir(config)
    assert complete_steps(tmp_path / "weights") == [10]
    assert complete_steps(tmp_path / "checkpoints", CKPT_PARTS) == [10, 20]
    assert complete_steps(tmp_path / "attempts" / "1" / "weights") == [20, 21]


@pytest.mark.parametrize("wanted, left", [("-1", [1, 2]), ("2", [1, 2]), ("3", None), ("9", None)])
def test_resuming_takes_back_batches_after_the_checkpoint(wanted: str, left: list[int] | None, tmp_path: Path) -> None:
    """Step 3 is committed by one half only, so it is no checkpoint to go back to, and nothing is removed for it."""
    for step in (1, 2, 3, 4):
        publish(tmp_path / "rollouts", step)
    for step, parts in ((2, ("trainer", "orchestrator")), (3, ("trainer",))):
        for part in parts:
            publish_dir(tmp_path / "checkpoints" / f"step_{step}" / part, lambda directory: None, sealed=True)
    config = parse("--output_dir", str(tmp_path), "--ckpt.resume_step", wanted)
    if left is None:
        with pytest.raises(ValueError, match=rf"resume_step = {wanted}: .*; complete: 2\n  name one of them"):
            output_dir.prepare_output_dir(config)
    else:
        output_dir.prepare_output_dir(config)
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
    with pytest.raises(ValueError, match=r"clean would remove the steps that ckpt\.resume_step"):
        prepare_output_dir(parse("--output-dir", str(tmp_path), "--ckpt.resume_step", "4", "--clean"))


def test_a_recorded_run_skips_nothing_again(tmp_path: Path) -> None:
    config = parse("--output-dir", str(tmp_path), "--resume", "--trainer.ckpt.skip-optimizer", "true")
    paths = output_dir.write_configs(config)
    recorded = parse("@", str(paths["rl"]))
    assert recorded.trainer.ckpt is not None and not recorded.trainer.ckpt.skip_optimizer
    trainer = parse_argv(TrainConfig, ["@", str(paths["trainer"])], "trainer")[0]
    assert trainer.ckpt is not None and trainer.ckpt.skip_optimizer, "this start skips it"


def test_evaluations_load_adapters_with_their_base(tmp_path: Path) -> None:
    options = ["--output-dir", str(tmp_path), "--model.debug.random-init", "--model.debug.seed", "3"]
    for lora, expected in (([], False), (["--trainer.model.lora.merge"], False), (["--trainer.model.lora"], True)):
        path = output_dir.write_configs(parse(*options, *lora))["eval"]
        debug = parse_argv(EvalConfig, ["@", str(path)], "eval")[0].model.debug
        assert (debug.random_init, debug.seed) == (expected, 3 if expected else 0), lora


def test_the_written_evaluation_samples_as_rollouts() -> None:
    """The server of an evaluation does not have the settings of that of the run."""
    config = parse(
        *(
            "--seq-len",
            "64",
            "--inference.model.tool-call-parser",
            "llama",
            "--inference.model.reasoning-parser",
            "think",
        ),
        *("--inference.sampling.extra-body", '{"ignore_eos": true, "chat_template_kwargs": {"a": 1}}'),
        *("--inference.sampling.max-tokens", "9", "--inference.sampling.stop", '["x"]'),
        *("--orchestrator.sampling.extra-body", '{"ignore_eos": false}', "--orchestrator.sampling.temperature", "0.7"),
    )
    evaluation = output_dir.build_eval_config(config)
    argv = build_server_argv(evaluation, {})
    options = ("max_model_len", "tool_call_parser", "reasoning_parser")
    assert [argv[argv.index(f"--model.{key}") + 1] for key in options] == ["64", "llama", "think"]
    found = evaluation.sampling
    assert (found.max_tokens, found.stop, found.temperature) == (9, ["x"], 0.7)
    assert found.extra_body == {"ignore_eos": False, "chat_template_kwargs": {"a": 1}}


def test_a_recorded_run_has_the_group_of_its_directory(tmp_path: Path) -> None:
    config = parse("--output-dir", str(tmp_path), "--wandb", "--orchestrator.wandb", "None")
    path = output_dir.write_configs(config)["rl"]
    assert parse("@", str(path)) == config
    later = parse("@", str(path), "--output-dir", "other")
    assert later.wandb and later.trainer.wandb and later.wandb.group == later.trainer.wandb.group == "other"
    for own in (["--wandb.group", "g"], ["--wandb", "--trainer.wandb.group", "g"]):
        path = output_dir.write_configs(parse("--output-dir", str(tmp_path), *own))["rl"]
        later = parse("@", str(path), "--output-dir", "other")
        assert later.wandb and later.trainer.wandb and later.wandb.group == later.trainer.wandb.group == "g"


@pytest.mark.parametrize(
    "given",
    [
        ["--trainer.log.level", "debug"],
        ["--wandb", "--trainer.wandb.project", "p", "--orchestrator.wandb.tags", "a,b"],
        ["--wandb", "--trainer.wandb.group", "a", "--orchestrator.wandb.group", "b"],
        ["--wandb", "--trainer.wandb.enabled", "false"],
    ],
)
def test_a_record_keeps_the_keys_of_one_process(given: list[str], tmp_path: Path) -> None:
    config = parse("--output-dir", str(tmp_path), *given)
    path = output_dir.write_configs(config)["rl"]
    assert parse("@", str(path)) == config
    assert parse("@", str(path), "--log.level", "warning").trainer.log.level == "warning"


TEACHER = "--orchestrator.teacher_model.context=x --trainer.loss.adv_tau=0"


@pytest.mark.parametrize(
    ("first", "option"),
    [
        ("--trainer.loss.type=grpo", "--trainer.loss.type=ppo"),
        ("--trainer.loss.type=grpo --orchestrator.sampling.max_tokens=256", "--trainer.loss.type=dapo"),
        ("--trainer.loss.type=grpo --orchestrator.sampling.max_tokens=256", "--trainer.loss.type=dr_grpo"),
        ("", "--trainer.loss.type=grpo"),
        ("--orchestrator.rollouts_per_example=8", "--trainer.loss.type=sdpo"),
        ("--trainer.loss.type=dapo --orchestrator.sampling.max_tokens=256", "--orchestrator.sampling.max_tokens=1024"),
        ("", "--seq-len=4096"),
        ("", TEACHER),
        (TEACHER, "--seq-len=4096"),
        (TEACHER, "--model.name=other"),
        ("--trainer.model.lora.rank=16", "--trainer.model.lora.rank=32"),
        ("--trainer.model.lora.rank=16", "--no-trainer.model.lora"),
        (
            "--trainer.model.lora --teacher_inference --trainer.loss.kl_coef=0.1 --orchestrator.teacher_model",
            "--seed=1",
        ),
        ("--max-steps=20 --trainer.scheduler.type=linear --trainer.scheduler.warmup_steps=100", "--max-steps=1000"),
        ("--max-steps=5 --trainer.scheduler.type=linear --trainer.scheduler.warmup_steps=10", "--max-steps=1000"),
        ("", "--inference.server.port=9123 --inference.server.host=0.0.0.0"),
        (TEACHER, "--teacher_inference.server.port=9123"),
        ("", "--orchestrator.env.0.id=gsm8k"),
        ("--orchestrator.env.0.loss.type=grpo", "--orchestrator.env.0.loss.type=ppo"),
    ],
)
def test_keys_follow_an_option_over_a_record(
    first: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.config_sharing.check_port_free", lambda host, port: None)
    argv = ["--output-dir", str(tmp_path), *first.split()]
    config = parse(*argv)
    path = str(output_dir.write_configs(config)["rl"])
    recorded = parse_argv(RLConfig, ["@", path], "rl")[0]
    assert recorded == config
    path = str(output_dir.write_configs(recorded)["rl"])  # the record of a start from a record is no different
    assert parse_argv(RLConfig, ["@", path, *option.split()], "rl")[0] == parse(*argv, *option.split())


@pytest.mark.parametrize("first", ["--ckpt.interval=2", "--no-ckpt", "--ckpt.resume-step=-1", "--ckpt.resume-step=4"])
def test_a_recorded_run_is_resumed(first: str, tmp_path: Path) -> None:
    path = output_dir.write_configs(parse("--output-dir", str(tmp_path), first))["rl"]
    config = parse("@", str(path), "--resume")
    assert config.ckpt is not None and config.orchestrator.ckpt is not None and config.trainer.ckpt is not None
    assert [c.resume_step for c in (config.ckpt, config.orchestrator.ckpt, config.trainer.ckpt)] == [-1, -1, -1]


def test_a_recorded_run_continues_after_the_step_it_named(tmp_path: Path) -> None:
    recorded = parse(
        "@", str(output_dir.write_configs(parse("--output-dir", str(tmp_path), "--ckpt.resume-step=4"))["rl"])
    )
    assert recorded.ckpt is not None and recorded.orchestrator.ckpt is not None and recorded.trainer.ckpt is not None
    assert (
        recorded.ckpt.resume_step == recorded.orchestrator.ckpt.resume_step == recorded.trainer.ckpt.resume_step == -1
    )


def test_resume_replaces_a_step_that_a_file_names(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("[ckpt]\nresume_step = 20")
    config = parse("@", str(tmp_path / "rl.toml"), "--resume")
    assert config.ckpt is not None and config.trainer.ckpt is not None
    assert config.ckpt.resume_step == config.trainer.ckpt.resume_step == -1
    assert any(note.startswith("note: resume = True (CLI) replaces ckpt.resume_step = 20") for note in config.notes)
    named = parse("@", str(tmp_path / "rl.toml"), "--resume", "--ckpt.resume-step", "4")
    assert named.ckpt is not None and named.ckpt.resume_step == 4


def test_resume_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("resume = true")
    with pytest.raises(ValueError, match=r"ckpt = off \(CLI\) but resume needs checkpoints"):
        parse("@", str(tmp_path / "rl.toml"), "--no-ckpt")
    with pytest.raises(ValueError, match=r"ckpt = off \(CLI\) but resume needs checkpoints"):
        parse("--no-ckpt", "--resume")


def test_clean_removes_steps_and_keeps_records(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    (tmp_path / "weights" / "notes.txt").write_text("mine")
    for reward in (0.25, 0.5):
        append_jsonl(tmp_path / "metrics.jsonl", [{"reward": reward}])
        output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path), "--clean"))
        assert not (tmp_path / "metrics.jsonl").exists()
    assert complete_steps(tmp_path / "weights") == []
    assert (tmp_path / "weights" / "notes.txt").read_text() == "mine"
    kept = sorted((tmp_path / "attempts").rglob("metrics.jsonl"))
    assert [path.read_text() for path in kept] == ['{"reward":0.25}\n', '{"reward":0.5}\n']


def write_evals(out: Path, *names: str) -> None:
    for name in names:
        path = out / "evals" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_evaluations_of_an_earlier_run_are_put_aside(tmp_path: Path) -> None:
    """Those of a model that is no version of the run stay."""
    names = ["baseline_gsm8k.json", "step_0/gsm8k/summary.json", "step_100/gsm8k/summary.json"]
    publish(tmp_path / "weights", 100)
    write_evals(tmp_path, *names, "gsm8k/summary.json")
    events = tmp_path / "tensorboard" / "trainer" / "events.out.tfevents.1"
    events.parent.mkdir(parents=True)
    events.write_text("x")
    output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path), "--clean"))
    assert listed(tmp_path / "evals") == ["gsm8k/summary.json"] and not events.exists()
    moved = listed(tmp_path / "attempts" / "1")
    assert moved == [*(f"evals/{name}" for name in names), "tensorboard/trainer/events.out.tfevents.1"]


def test_resuming_moves_evaluations_after_the_checkpoint(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    kept = ["baseline_gsm8k.json", "gsm8k/summary.json", "step_0/gsm8k/summary.json", "step_10/gsm8k/summary.json"]
    write_evals(tmp_path, *kept, "step_15/gsm8k/summary.json")
    output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path), "--resume"))
    assert listed(tmp_path / "evals") == kept
    assert listed(tmp_path / "attempts" / "1") == ["evals/step_15/gsm8k/summary.json"]


def test_logs_that_a_job_has_open_stay_in_place(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("job-17.log", "rl-0.log", "inference.log"):
        (tmp_path / "logs" / name).touch()
    output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["job-17.log", "rl-0.log"]
    assert (tmp_path / "attempts" / "1" / "logs" / "inference.log").exists()


@pytest.mark.parametrize("key", ["model.name", "orchestrator.teacher_model.model.name"])
def test_clean_spares_the_weights_it_starts_from(tmp_path: Path, key: str) -> None:
    model = publish(tmp_path / "weights", 3)
    config = parse("--output_dir", str(tmp_path), "--clean", f"--{key}", str(model))
    with pytest.raises(ValueError, match=r"model\.name .* is in .*, which --clean would empty"):
        output_dir.prepare_output_dir(config)
    assert complete_steps(tmp_path / "weights") == [3]


def test_a_refused_start_leaves_steps_that_are_being_written(tmp_path: Path) -> None:
    publish(tmp_path / "weights", 3)
    written = tmp_path / "weights" / ".tmp-step_4-abc"
    written.mkdir()
    with pytest.raises(ValueError, match="earlier run"):
        output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert written.exists()


def test_half_written_steps_are_swept_away(tmp_path: Path) -> None:
    left = tmp_path / "weights" / ".tmp-step_3-abc"
    left.mkdir(parents=True)
    output_dir.prepare_output_dir(parse("--output_dir", str(tmp_path)))
    assert not left.exists()


def test_each_process_reads_back_what_rl_resolved(tmp_path: Path) -> None:
    config = parse("--output_dir", str(tmp_path), "--max_steps", "7", "--trainer.optim.max_norm", "None")
    paths = output_dir.write_configs(config)
    trainer = parse_argv(TrainConfig, ["@", str(paths["trainer"])], "trainer")[0]
    inference = parse_argv(InferenceConfig, ["@", str(paths["inference"])], "inference")[0]
    assert trainer == config.trainer and trainer.max_steps == 7 and trainer.optim.max_norm is None
    assert inference == config.inference
    assert parse_argv(RLConfig, ["@", str(paths["rl"])], "rl")[0] == config


def test_a_resume_keeps_the_record_before_it(tmp_path: Path) -> None:
    first = output_dir.write_configs(parse("--output_dir", str(tmp_path)))["rl"].read_text()
    commit(tmp_path, 2)
    output_dir.write_configs(parse("--output_dir", str(tmp_path), "--trainer.model.lora.rank", "8", "--resume"))
    assert (tmp_path / "attempts" / "1" / "configs" / "rl.toml").read_text() == first


def test_a_recorded_configuration_removes_no_steps(tmp_path: Path) -> None:
    paths = output_dir.write_configs(parse("--output_dir", str(tmp_path), "--clean", "--open"))
    model = publish(tmp_path / "weights", 3)
    recorded = parse_argv(RLConfig, ["@", str(paths["rl"])], "rl")[0]
    assert not recorded.open
    with pytest.raises(ValueError, match="earlier run"):
        output_dir.prepare_output_dir(recorded)
    assert model.is_dir()
