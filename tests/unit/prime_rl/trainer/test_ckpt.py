"""Checkpoints: interrupted and resumed runs end with the bits of uninterrupted ones."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from prime_rl.runtime.process_tree import TOKEN_VARIABLE
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from prime_rl.runtime.run_state import read_run_state
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.checkpointer import Checkpointer
from prime_rl.trainer.ckpt import load_checkpoint, publish_together, save_checkpoint
from prime_rl.trainer.command import build_record, run_trainer
from prime_rl.trainer.config import CkptConfig, SFTConfig, TrainConfig
from prime_rl.trainer.rl.train import train as train_rl
from prime_rl.trainer.sft.train import train as train_sft
from prime_rl.utils.pydantic_config import parse_argv, write_config, write_record
from rollouts.training import steps
from rollouts.training.backends.ranks import Ranks
from rollouts.training.manifests import read_manifest
from rollouts.training.metrics import load_jsonl, load_last_attempts
from rollouts.training.steps import complete_steps, find_damage, prune_commits, publish_dir, step_path

MODEL = {"name": "tiny-qwen3", "debug": {"random_init": True, "num_layers": 1}}


def rl_config(output_dir: Path, **changes: Any) -> TrainConfig:
    values = {
        "model": {**MODEL, "seq_len": 32},
        "optim": {"lr": 1e-2},
        "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 3},
        "data": {"fake": {"batch_size": 4}},
        "max_steps": 6,
        "log": {"file": False},
        "output_dir": output_dir,
    }
    return TrainConfig.model_validate({**values, **changes})


def sft_config(output_dir: Path, **changes: Any) -> SFTConfig:
    rows = output_dir.parent / "rows.jsonl"
    if not rows.exists():
        letters = ["abcdefgh"[i % 8 :] + "xyz"[: i % 3] for i in range(13)]
        rows.write_text("".join(json.dumps({"prompt": s, "completion": s[::-1]}) + "\n" for s in letters))
    values = {
        "model": MODEL,
        "optim": {"type": "sgd", "lr": 1e-2},
        "scheduler": {"type": "cosine", "warmup_steps": 1},
        "data": {"name": str(rows), "seq_len": 32, "batch_size": 3},
        "max_steps": 6,
        "log": {"file": False},
        "output_dir": output_dir,
    }
    return SFTConfig.model_validate({**values, **changes})


def several_updates_config(output_dir: Path, **changes: Any) -> TrainConfig:
    loss = {"type": "ppo", "old_logprobs": "recomputed"}
    return rl_config(output_dir, **{"num_minibatches": 2, "loss": loss, **changes})


@pytest.mark.parametrize(("kind", "cut"), [("rl", 1), ("rl", 4), ("sft", 1), ("sft", 4), ("several updates", 4)])
def test_resumed_runs_are_bit_identical(tmp_path: Path, kind: str, cut: int) -> None:
    make, run = {
        "rl": (rl_config, train_rl),
        "sft": (sft_config, train_sft),
        "several updates": (several_updates_config, train_rl),
    }[kind]
    run(make(tmp_path / "straight"))
    # The interrupted run ends after a later step than its checkpoint, which must not matter.
    broken = tmp_path / "broken"
    run(make(broken, ckpt={"interval": cut}))
    for step in complete_steps(broken / "checkpoints", ("trainer",)):
        if step != cut:
            (step_path(broken / "checkpoints", step) / "trainer" / "STABLE").unlink()
    run(make(broken, ckpt={"interval": cut, "resume_step": -1}))
    a, b = (read_manifest(tmp_path / name / "weights" / "step_6") for name in ("straight", "broken"))
    assert a == b
    losses = {
        name: {r["step"]: r["loss/mean"] for r in load_jsonl(tmp_path / name / "metrics.jsonl") if "loss/mean" in r}
        for name in ("straight", "broken")
    }
    assert losses["straight"] == losses["broken"]
    totals = [r for r in load_jsonl(broken / "metrics.jsonl") if r["step"] == 6 and "loss/mean" in r]
    assert totals[0]["progress/total_tokens"] == totals[1]["progress/total_tokens"]


def test_resume_republishes_and_archives_later_versions(tmp_path: Path) -> None:
    train_rl(rl_config(tmp_path, ckpt={"interval": 2}))
    expected = read_manifest(tmp_path / "weights" / "step_4")
    seen: list[list[int]] = []
    from prime_rl.trainer.rl import data

    class Spy(data.FakeBatches):
        def receive(self, step: int, timeout_s: float | None = None) -> Any:
            seen.append(complete_steps(tmp_path / "weights"))
            return super().receive(step, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "FakeBatches", Spy)
        train_rl(rl_config(tmp_path, ckpt={"interval": 2, "resume_step": 4}))
    assert seen[0] == [2, 3, 4], "versions 5 and 6 of the earlier run are gone before step 5 begins"
    assert complete_steps(tmp_path / "attempts" / "1" / "weights") == [5, 6], "moved away, not removed"
    assert complete_steps(tmp_path / "attempts" / "1" / "checkpoints", ("trainer",)) == [6]
    assert read_manifest(tmp_path / "weights" / "step_4") == expected


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_resume_without_checkpoint_rejects_used_directory(tmp_path: Path, kind: str) -> None:
    make, run = {"rl": (rl_config, train_rl), "sft": (sft_config, train_sft)}[kind]
    run(make(tmp_path / "out", max_steps=5))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"no complete checkpoint(.|\n)*weights/step_5 --output-dir NEW"):
        run(make(tmp_path / "out", ckpt={"interval": 2, "resume_step": -1}))
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    run(make(tmp_path / "new", max_steps=5, ckpt={"interval": 2, "resume_step": -1}))  # a new directory is fine


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_refused_start_keeps_the_recorded_config(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sft_config(tmp_path / "out", max_steps=1)
    train_sft(config)
    write_config(config, tmp_path / "out" / "configs" / "sft.toml")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    argv = ["sft", "--data.name", str(config.data.name), "--model.name", "tiny-qwen3", "--optim.lr", "0.5", *options]
    monkeypatch.setattr("sys.argv", [*argv, "--output-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        run_trainer(
            "sft", "prime_rl.trainer.config:SFTConfig", lambda _: pytest.fail("must not start"), summary="Trains."
        )
    assert caught.value.code == 2 and "holds an earlier run (weights up to step_1)" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {path for path in after if path.name != ".lock-trainer"} == set(before)
    assert all(after[path] == content for path, content in before.items())


def test_a_resume_keeps_the_record_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume with another adapter is refused once the checkpoint is loaded: "use the original model.lora"."""
    first, record = ["sft", "--output-dir", str(tmp_path), "--model.lora.rank", "4"], tmp_path / "configs" / "sft.toml"
    records = []
    other = [*first, "--model.lora.rank", "2"]  # without a checkpoint, such as on the node of a job
    same = [*first, "--resume"]
    for argv in (other, first, first, ["sft", "@", str(record)], same, [*first, "--model.lora.rank", "8", "--resume"]):
        monkeypatch.setattr("sys.argv", argv)
        if argv is same:
            publish_dir(tmp_path / "checkpoints" / "step_1" / "trainer", lambda directory: None, sealed=True)
        with pytest.raises(SystemExit):
            run_trainer("sft", "prime_rl.trainer.config:SFTConfig", lambda _: 2, summary="Trains.")
        records.append(record.read_text())
    assert records[1] == records[3] and "rank = 8" in records[5]
    assert [path.read_text() for path in (tmp_path / "attempts").rglob("sft.toml")] == [records[4]]


@pytest.mark.parametrize(("options", "status"), [((), "finished"), (("--deployment.type", "slurm"), None)])
def test_a_submitted_run_is_not_finished(
    options: tuple[str, ...], status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sft", "--output-dir", str(tmp_path), *options])
    with pytest.raises(SystemExit) as caught:
        run_trainer("sft", "prime_rl.trainer.config:SFTConfig", lambda _: 0, summary="Trains.")
    state = read_run_state(tmp_path)
    assert caught.value.code == 0 and (state and state.status) == status


def test_options_over_the_recorded_config_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "configs" / "sft.toml"

    def start(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["sft", *words])
        with pytest.raises(SystemExit) as caught:
            run_trainer("sft", "prime_rl.trainer.config:SFTConfig", lambda _: 0, summary="Trains.")
        assert caught.value.code == 0
        return record.read_text()

    start("--output-dir", str(tmp_path), "--max-steps", "10", "--optim.lr", "0.5")
    changed = start("@", str(record), "--resume", "--max-steps", "20")
    config = parse_argv(SFTConfig, ["@", str(record)], "sft")[0]
    assert config.max_steps == 20 and config.optim.lr == 0.5 and config.resume
    for options in ((), ("--ckpt.resume-step", "-1")):
        assert (start("@", str(record), *options) == changed) == (not options), "with where its values are from"
    start("--output-dir", str(tmp_path))
    publish_dir(tmp_path / "checkpoints" / "step_5" / "trainer", lambda path: None)
    start("@", str(record), "--ckpt.resume-step", "5")
    assert parse_argv(SFTConfig, ["@", str(record)], "sft")[0].ckpt == CkptConfig(resume_step=-1), "the latest one"


def test_options_of_a_launcher_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rl` writes the file of its trainer, and passes the number of ranks that it found."""
    written = tmp_path / "configs" / "trainer.toml"
    write_config(parse_argv(TrainConfig, ["--output-dir", str(tmp_path)], "trainer")[0], written)
    before = written.read_text()
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    monkeypatch.setattr("sys.argv", ["trainer", "@", str(written), "--parallel.dp", "2"])
    with pytest.raises(SystemExit) as caught:
        run_trainer("trainer", "prime_rl.trainer.config:TrainConfig", lambda _: 0, summary="Trains.")
    assert caught.value.code == 0 and written.read_text() == before and not (tmp_path / "attempts").exists()


def test_a_new_run_keeps_the_checkpoints_of_another(tmp_path: Path) -> None:
    train_sft(sft_config(tmp_path, ckpt={"interval": 3}))
    shutil.rmtree(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"checkpoints up to step_6(.|\n)*continue after step 6"):
        train_sft(sft_config(tmp_path, ckpt={"interval": 2, "keep": 1}))
    assert complete_steps(tmp_path / "checkpoints", ("trainer",)) == [3, 6]


def test_run_survives_deletion_of_model_directory(tmp_path: Path) -> None:
    """For example weights of another run that are pruned later."""
    from prime_rl.runtime.tokenizer import resolve_model_dir

    shutil.copytree(resolve_model_dir("tiny-qwen3"), tmp_path / "start")
    from prime_rl.trainer.rl import data

    class Vanishing(data.FakeBatches):
        def receive(self, step: int, timeout_s: float | None = None) -> Any:
            shutil.rmtree(tmp_path / "start", ignore_errors=True)
            return super().receive(step, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "FakeBatches", Vanishing)
        model = {**MODEL, "name": str(tmp_path / "start"), "seq_len": 32}
        train_rl(rl_config(tmp_path / "out", model=model))
    train_rl(rl_config(tmp_path / "whole"))
    last = [tmp_path / name / "weights" / "step_6" for name in ("out", "whole")]
    assert len({tuple(sorted(path.name for path in part.iterdir())) for part in last}) == 1
    for path in last[0].iterdir():
        assert path.read_bytes() == (last[1] / path.name).read_bytes(), path.name


def test_rows_of_a_resumed_run_have_the_number_of_its_attempt(tmp_path: Path) -> None:
    train_rl(rl_config(tmp_path, ckpt={"interval": 2}))
    for step in (4, 2):
        train_rl(rl_config(tmp_path, ckpt={"interval": 2, "resume_step": step}))
    rows = [row for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    made = [(row["step"], row["attempt"]) for row in rows]
    assert made == [(s, 0) for s in range(1, 7)] + [(5, 1), (6, 1)] + [(s, 2) for s in range(3, 7)]
    current = [row for row in load_last_attempts(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    assert [(row["step"], row["attempt"]) for row in current] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2), (6, 2)]


def test_checkpoints_restore_moments_counters_and_random_state(tmp_path: Path) -> None:
    one = build_backend(rl_config(tmp_path))
    for name, parameter in one.parameters.items():
        parameter.grad = torch.full_like(parameter, 0.1 * len(name))
    one.stepper.step()
    torch.manual_seed(7)
    save_checkpoint(tmp_path, 1, one.parameters, one.stepper, {"position": [1, 2]})
    drawn = torch.rand(3)
    two = build_backend(rl_config(tmp_path, seed=99))
    assert load_checkpoint(tmp_path, 1, two.parameters, two.stepper) == {"position": [1, 2]}
    assert torch.equal(torch.rand(3), drawn) and two.stepper.num_steps == 1
    for backend in (one, two):
        for name, parameter in backend.parameters.items():
            parameter.grad = torch.full_like(parameter, 0.3 / len(name))
        backend.stepper.step()
    for a, b in zip(one.parameters.values(), two.parameters.values(), strict=True):
        assert torch.equal(a, b)


def test_bfloat16_model_resumes_from_masters(tmp_path: Path) -> None:
    config = rl_config(tmp_path, model={**MODEL, "dtype": "bfloat16", "seq_len": 32})
    one, two = build_backend(config), build_backend(config)
    with torch.no_grad():
        for parameter in one.parameters.values():
            parameter.add_(1e-4)
    save_checkpoint(tmp_path, 1, one.parameters, one.stepper, {})
    load_checkpoint(tmp_path, 1, two.parameters, two.stepper)
    for name, parameter in two.model.named_parameters():
        assert torch.equal(parameter.float(), one.parameters[name].bfloat16().float())


def test_nothing_on_disk_is_a_pickle(tmp_path: Path) -> None:
    train_rl(rl_config(tmp_path, max_steps=5, ckpt={}))
    files = [p for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".safetensors", ".json", ""}
    assert {p.name for p in files if not p.suffix} == {"STABLE"}


def test_foreign_checkpoints_are_rejected(tmp_path: Path) -> None:
    model = {**MODEL, "debug": {"random_init": True}}
    backend = build_backend(rl_config(tmp_path, model=model))
    for parameter in backend.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    backend.stepper.step()
    save_checkpoint(tmp_path, 1, backend.parameters, backend.stepper, {})
    smaller = build_backend(rl_config(tmp_path))
    with pytest.raises(
        ValueError, match=r"another model\.name: model\.layers\.1\..* is in it only; use the original model\.name"
    ):
        load_checkpoint(tmp_path, 1, smaller.parameters, smaller.stepper)
    muon = build_backend(rl_config(tmp_path, model=model, optim={"type": "muon", "lr": 1e-2}))
    sgd = build_backend(rl_config(tmp_path, model=model, optim={"type": "sgd", "lr": 1e-2}))
    for other in (muon, sgd):
        with pytest.raises(ValueError, match=r"optim\.type"):
            load_checkpoint(tmp_path, 1, other.parameters, other.stepper)
    skip = CkptConfig(resume_step=1, skip_optimizer=True)
    load_checkpoint(tmp_path, 1, sgd.parameters, sgd.stepper, config=skip)
    assert not sgd.stepper.optimizer.state and sgd.stepper.num_steps == 1
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        load_checkpoint(tmp_path, 2, backend.parameters, backend.stepper)
    state = tmp_path / "step_1" / "trainer" / "state.json"
    state.write_text(state.read_text().replace('"schema": 3', '"schema": 4'))
    with pytest.raises(ValueError, match="schema 4"):
        load_checkpoint(tmp_path, 1, backend.parameters, backend.stepper)


LORA, CRITIC = {"lora": {"rank": 2, "target_modules": ["q_proj"]}}, {"critic": {}, "loss": {"type": "ppo"}}


@pytest.mark.parametrize(
    ("saved", "resumed", "words"),
    [
        ({}, LORA, r"another model\.lora: .* is in it only; use the original model\.lora"),
        (LORA, {}, r"another model\.lora: .* is not in it; use the original model\.lora"),
        (
            LORA,
            {"lora": {**LORA["lora"], "rank": 4}},
            r"another model\.lora: .*\.lora_A\.weight has another shape in it",
        ),
        ({"loss": CRITIC["loss"]}, CRITIC, r"another critic: value\..* is not in it; use the original critic"),
        (LORA | CRITIC, LORA | {"loss": CRITIC["loss"]}, r"another critic: value\..* is in it only"),
    ],
)
def test_a_checkpoint_of_other_parameters_names_the_key(
    saved: dict[str, Any], resumed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    def build(changes: dict[str, Any]) -> Backend:
        model = {**MODEL, "seq_len": 32, "lora": changes.get("lora")}
        return build_backend(rl_config(tmp_path, model=model, **{n: v for n, v in changes.items() if n != "lora"}))

    one, two = build(saved), build(resumed)
    save_checkpoint(tmp_path, 1, one.parameters, one.stepper, {})
    with pytest.raises(ValueError, match=f"is of a run with {words}"):
        load_checkpoint(tmp_path, 1, two.parameters, two.stepper)


def test_checkpoints_of_schema_1_still_load(tmp_path: Path) -> None:
    """Those had no number of ranks, and the random state of every GPU by its number."""
    one, two = build_backend(rl_config(tmp_path)), build_backend(rl_config(tmp_path))
    for parameter in one.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    one.stepper.step()
    save_checkpoint(tmp_path, 1, one.parameters, one.stepper, {"total_tokens": 3})
    part = tmp_path / "step_1" / "trainer"
    names = {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "STABLE"}
    assert {path.name for path in part.iterdir()} == names
    state = json.loads((part / "state.json").read_text())
    del state["num_ranks"], state["stepper"]["schedule_start"]
    (part / "state.json").write_text(json.dumps({**state, "schema": 1}))
    assert load_checkpoint(tmp_path, 1, two.parameters, two.stepper) == {"total_tokens": 3}
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, two.parameters[name])


def test_skip_options_on_resume(tmp_path: Path) -> None:
    first = {"ckpt": {"interval": 3}, "max_steps": 3, "scheduler": {"type": "constant"}}
    train_sft(sft_config(tmp_path, **first))

    def rows(name: str, start: int = 4, **skips: bool) -> list[dict[str, Any]]:
        """What a run logged that was copied from the first and resumed."""
        out = tmp_path.parent / f"{tmp_path.name}-{name}"
        shutil.copytree(tmp_path, out)
        (out / "metrics.jsonl").unlink()
        train_sft(sft_config(out, ckpt={"resume_step": 3, **skips}))
        found = [row for row in load_jsonl(out / "metrics.jsonl") if "loss/mean" in row]
        assert [row["step"] for row in found] == list(range(start, 7))
        return found

    straight = rows("straight")
    assert straight[0]["optim/lr"] < 1e-2, "the fourth of six steps of a cosine"
    restarted = rows("scheduler", skip_scheduler=True)
    assert restarted[0]["optim/lr"] == 1e-2, "a warm-up of one step begins again"
    assert restarted[-1]["optim/lr"] == pytest.approx(straight[-1]["optim/lr"]) == 0, "and the end is that of the run"
    assert rows("optimizer", skip_optimizer=True)[0]["loss/mean"] == straight[0]["loss/mean"]
    first_batch = next(row for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row)
    again = rows("dataloader", skip_dataloader=True)[0]
    assert again["batch/tokens"] == first_batch["batch/tokens"] and again["loss/mean"] < first_batch["loss/mean"]
    stage = rows("progress", start=1, skip_progress=True)[0]
    assert stage["progress/total_tokens"] == stage["batch/tokens"] < straight[0]["progress/total_tokens"]


def test_skips_hold_until_a_later_checkpoint(tmp_path: Path) -> None:
    """An interrupted attempt is repeated, with an optimizer that the checkpoint does not fit."""
    out, straight = tmp_path / "run", tmp_path / "straight"
    skips: dict[str, Any] = {"resume_step": 3, "skip_optimizer": True, "skip_scheduler": True, "skip_dataloader": True}
    train_sft(sft_config(out, ckpt={}, optim={"lr": 1e-2}, max_steps=3))
    shutil.copytree(out, straight)
    train_sft(sft_config(straight, ckpt=skips))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save", interrupt)
        for ckpt in (skips, {"resume_step": -1}):
            with pytest.raises(KeyboardInterrupt):
                train_sft(sft_config(out, ckpt=ckpt))
    with pytest.raises(ValueError, match=r"optim\.type"):
        train_sft(sft_config(out, ckpt={"resume_step": 3}))
    train_sft(sft_config(out, ckpt={"resume_step": -1}))
    assert read_manifest(out / "weights" / "step_6") == read_manifest(straight / "weights" / "step_6")
    for name in (out, straight):
        train_sft(sft_config(name, ckpt={"resume_step": -1}, max_steps=8))
    assert read_manifest(out / "weights" / "step_8") == read_manifest(straight / "weights" / "step_8")


@pytest.mark.parametrize("skip_optimizer", [False, True])
def test_a_new_stage_is_kept_and_resumed_by_itself(skip_optimizer: bool, tmp_path: Path) -> None:
    """Its steps have lower numbers than those of the stage before, of which nothing is lost."""
    out, straight = tmp_path / "run", tmp_path / "straight"
    changes: dict[str, Any] = {"optim": {"lr": 1e-2}, "max_steps": 4}
    ckpt = {"interval": 2, "keep": 1}
    skips = {"resume_step": 6, "skip_progress": True, "skip_optimizer": skip_optimizer}
    train_sft(sft_config(out, ckpt=ckpt, optim={"lr": 1e-2}))
    files = {path.relative_to(out): path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    shutil.copytree(out, straight)
    shutil.copytree(out, tmp_path / "crashed")
    train_sft(sft_config(straight, ckpt={**ckpt, **skips}, **changes))
    assert complete_steps(straight / "checkpoints", ("trainer",)) == [4]
    assert all((straight / "attempts" / "1" / name).read_bytes() == content for name, content in files.items())

    out = tmp_path / "crashed"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpointer, "save", interrupt)
        train_sft(sft_config(out, ckpt={**ckpt, **skips}, **changes))
    assert complete_steps(out / "checkpoints", ("trainer",)) == [0]
    assert all((out / "attempts" / "1" / name).read_bytes() == content for name, content in files.items())
    train_sft(sft_config(out, ckpt={**ckpt, "resume_step": -1}, **changes))
    assert read_manifest(out / "weights" / "step_4") == read_manifest(straight / "weights" / "step_4")
    train_sft(sft_config(out, ckpt={**ckpt, "resume_step": -1}, optim={"lr": 1e-2}))
    assert complete_steps(out / "checkpoints", ("trainer",)) == [6], "the new stage, from its step 4"


@pytest.mark.parametrize("skip_progress", [False, True])
def test_a_refused_resume_moves_nothing(skip_progress: bool, tmp_path: Path) -> None:
    train_sft(sft_config(tmp_path / "run", ckpt={"interval": 2}, max_steps=4))
    before = sorted((tmp_path / "run").rglob("*"))
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    data = {"name": str(tmp_path / "other.jsonl"), "seq_len": 32, "batch_size": 3}
    with pytest.raises(ValueError, match=r"other data(.|\n)*ckpt\.skip_dataloader"):
        train_sft(sft_config(tmp_path / "run", ckpt={"resume_step": 2, "skip_progress": skip_progress}, data=data))
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_the_record_of_a_stage_resumes_that_stage(tmp_path: Path) -> None:
    for step, skip in (("4", "skip-progress"), ("-1", "skip-optimizer")):
        argv = ["--output-dir", str(tmp_path), "--ckpt.resume-step", step, f"--ckpt.{skip}"]
        record = build_record(parse_argv(SFTConfig, argv, "sft")[0])
        assert record is not None
        write_record(record, tmp_path / "sft.toml")
        assert "--ckpt.skip" not in (tmp_path / "sft.toml").read_text()
        later, _ = parse_argv(SFTConfig, ["@", str(tmp_path / "sft.toml"), "--resume"], "sft")
        assert later.ckpt == CkptConfig(resume_step=-1)


@pytest.mark.parametrize(
    ("first", "option"),
    [
        ("--model.lora.rank=8", "--no-model.lora"),
        ("--max-steps=20 --scheduler.type=linear --scheduler.warmup-steps=100", "--max-steps=1000"),
    ],
)
def test_keys_follow_an_option_over_a_record(first: str, option: str, tmp_path: Path) -> None:
    config = parse_argv(SFTConfig, first.split(), "sft")[0]
    record, path = build_record(config), tmp_path / "sft.toml"
    assert record is not None
    write_record(record, path)
    assert parse_argv(SFTConfig, ["@", str(path)], "sft")[0] == config
    fresh = parse_argv(SFTConfig, [*first.split(), option], "sft")[0]
    assert parse_argv(SFTConfig, ["@", str(path), option], "sft")[0] == fresh


def test_resume_replaces_a_step_that_a_file_names(tmp_path: Path) -> None:
    text = "output_dir = 'x'\n[ckpt]\nresume_step = 20\n"
    (tmp_path / "sft.toml").write_text(text)
    argv = ["@", str(tmp_path / "sft.toml"), "--resume"]
    config, _ = parse_argv(SFTConfig, argv, "sft")
    assert config.ckpt == CkptConfig(resume_step=-1)
    assert any(note.startswith("note: resume = True (CLI) replaces ckpt.resume_step = 20") for note in config.notes)
    assert parse_argv(SFTConfig, [*argv, "--ckpt.resume-step", "4"], "sft")[0].ckpt == CkptConfig(resume_step=4)
    (tmp_path / "sft.toml").write_text(text + "skip_progress = true")
    stage = parse_argv(SFTConfig, argv, "sft")[0].ckpt
    assert stage is not None and stage.resume_step == 20
    record = build_record(parse_argv(SFTConfig, ["--ckpt.resume-step", "4", "--open"], "sft")[0])
    assert record is not None and record.ckpt == CkptConfig(resume_step=-1) and not record.open


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_invalid_skips_are_rejected() -> None:
    with pytest.raises(ValueError, match="set resume_step"):
        CkptConfig(skip_optimizer=True)
    with pytest.raises(ValueError, match=r"ckpt\.skip_progress is for sft.*weights/step_N"):
        rl_config(Path("out"), ckpt={"resume_step": 1, "skip_progress": True})


def test_checkpoints_are_due_at_intervals_and_at_the_end() -> None:
    def find_due(config: CkptConfig | None) -> list[int]:
        saver = Checkpointer(Path(), cast(Any, None), config, 10)
        return [step for step in range(1, 11) if saver.is_due(step)]

    assert find_due(CkptConfig(interval=4)) == [4, 8, 10]
    assert find_due(CkptConfig()) == [10] and find_due(None) == []


def commit(root: Path, step: int, *parts: str) -> None:
    for part in parts:
        publish_dir(step_path(root, step) / part, lambda directory: None, sealed=True)


def test_incomplete_checkpoints_do_not_replace_complete_one(tmp_path: Path) -> None:
    both = ("trainer", "orchestrator")
    commit(tmp_path, 10, *both)
    commit(tmp_path, 20, "orchestrator")
    assert prune_commits(tmp_path, 1, both) == [] and complete_steps(tmp_path, both) == [10]
    commit(tmp_path, 20, "trainer")
    commit(tmp_path, 30, "orchestrator")
    assert prune_commits(tmp_path, None, both) == [] and prune_commits(tmp_path, 2, both) == []
    assert prune_commits(tmp_path, 1, both) == [10] and complete_steps(tmp_path, both) == [20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_20", "step_30"], "both halves of step 10 are gone"


def test_replaced_directories_left_by_a_crash_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        for path in (tmp_path / "step_1", tmp_path / "step_2" / "trainer"):
            for _ in range(2):
                publish_dir(path, lambda directory: None)
    steps.remove_unfinished(tmp_path)
    steps.remove_unfinished(tmp_path, "trainer")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["step_1", "step_2", "trainer"]


def test_a_start_removes_unfinished_versions(tmp_path: Path) -> None:
    left = [root / ".tmp-step_1-abc" for root in RunDir(tmp_path).version_dirs]
    for path in left:
        path.mkdir(parents=True)
    train_rl(rl_config(tmp_path, max_steps=1))
    assert not any(path.exists() for path in left)


def test_every_rank_digests_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, digest, compute = [f"model-{n}-of-2.safetensors" for n in (1, 2)], hashlib.blake2b, steps._digest_file
    read: list[str] = []

    class First(Ranks):
        """Rank 0 of two; the other has described its file."""

        def broadcast(self, data: bytes) -> bytes:
            return data

        def run_on_all_ranks(self, work: Callable[[], object]) -> None:
            work()

        def gather_bytes(self, data: bytes) -> list[bytes]:
            return [data, json.dumps({names[1]: (1, digest(b"x", digest_size=16).hexdigest())}).encode()]

    def write(directory: Path) -> None:
        for name in (*names, "state.json"):
            (directory / name).write_text("x")

    def record(path: Path) -> str:
        read.append(path.name)
        return compute(path)

    monkeypatch.setattr(steps, "_digest_file", record)
    final = publish_together(tmp_path / "step_1" / "trainer", write, First(0, 2))
    assert read == [names[0], "state.json"]
    assert find_damage(final) is None and read[2:] == [names[1], names[0], "state.json"]


def test_a_trainer_alone_prunes_its_own_parts(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit(tmp_path, step, "trainer")
    commit(tmp_path, 1, "orchestrator")
    assert prune_commits(tmp_path, 1, ("trainer",)) == [1, 2]
    assert complete_steps(tmp_path, ("trainer",)) == [3] and (tmp_path / "step_1" / "orchestrator").exists()
    assert not (tmp_path / "step_2").exists()


def test_finished_run_has_no_steps_left(tmp_path: Path) -> None:
    train_rl(rl_config(tmp_path, max_steps=5, ckpt={}))
    before = read_manifest(tmp_path / "weights" / "step_5")
    train_rl(rl_config(tmp_path, max_steps=5, ckpt={"resume_step": -1}))
    assert read_manifest(tmp_path / "weights" / "step_5") == before


FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "STABLE")
DAMAGES = [(file, how) for file in FILES for how in ("cut", "emptied", "flipped", "gone")]


@pytest.mark.parametrize(("file", "how"), DAMAGES)
def test_damaged_checkpoint_is_rejected(file: str, how: str, tmp_path: Path) -> None:
    """Complete marker but damaged files, as after disk corruption."""
    run = RunDir(tmp_path)
    part = step_path(run.checkpoints, 4) / "trainer"

    def write(directory: Path) -> None:
        for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"):
            (directory / name).write_bytes(name.encode() * 9)

    publish_dir(part, write, sealed=True)
    assert find_damage(part) is None and run.find_resume_step(-1, ("trainer",), verify=("trainer",)) == 4
    data = (part / file).read_bytes()
    if how == "cut":
        os.truncate(part / file, len(data) // 2)
    elif how == "emptied":
        os.truncate(part / file, 0)
    elif how == "flipped":
        (part / file).write_bytes(bytes([data[0] ^ 1, *data[1:]]))
    else:
        (part / file).unlink()
    if (file, how) == ("STABLE", "gone"):  # not a checkpoint
        assert run.find_resume_step(-1, ("trainer",), verify=("trainer",)) is None
        return
    assert file in (find_damage(part) or "")
    with pytest.raises(ValueError, match=f"(?s)checkpoint 4 is damaged: .*{file}.*ckpt.resume_step"):
        run.find_resume_step(-1, ("trainer",), verify=("trainer",))


def test_rl_resumes_from_newest_valid_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = RunDir(tmp_path).checkpoints
    for step in (1, 2, 3):
        for part in CKPT_PARTS:
            publish_dir(step_path(root, step) / part, lambda path: (path / "x").write_text("x") and None, sealed=True)
    (step_path(root, 3) / "orchestrator" / "x").write_text("")
    (step_path(root, 2) / "trainer" / "x").unlink()
    RunDir(tmp_path).quarantine_corrupt_checkpoints(CKPT_PARTS)
    assert complete_steps(root, CKPT_PARTS) == [1]
    reported = capsys.readouterr().out
    assert (
        "checkpoint 3 is damaged" in reported and "checkpoint 2 is damaged" in reported and "x is missing" in reported
    )
    assert len(list(root.glob("damaged-step_*"))) == 2, "kept, never deleted"


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize("file", ["state.json", "model.safetensors"])
def test_a_trainer_alone_skips_a_damaged_checkpoint(kind: str, file: str, tmp_path: Path) -> None:
    make, train = (sft_config, train_sft) if kind == "sft" else (rl_config, train_rl)
    run = RunDir(tmp_path / "run")
    train(make(run.root, max_steps=4, ckpt={"interval": 2}))
    before = read_manifest(run.weights / "step_4")
    (step_path(run.checkpoints, 4) / "trainer" / file).write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint 4 is damaged(.|\n)*name another step in ckpt\.resume_step"):
        train(make(run.root, max_steps=4, ckpt={"resume_step": 4}))
    train(make(run.root, max_steps=4, ckpt={"resume_step": -1}))
    assert read_manifest(run.weights / "step_4") == before and complete_steps(run.checkpoints, ("trainer",)) == [2, 4]
    assert len(list(run.checkpoints.glob("damaged-step_4-*"))) == 1, "kept, never deleted"
