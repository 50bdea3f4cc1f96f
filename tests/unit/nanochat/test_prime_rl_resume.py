"""Runs of scripts.prime_rl_train with checkpoints of an earlier run: moved aside, or compared before a resume."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.prime_rl_config import PROG, PrimeRLTrainConfig, normalize_argv
from scripts.prime_rl_train import run
from torch import nn

from nanochat.checkpoint_manager import save_checkpoint
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import NanochatTokenizer
from prime_rl.runtime import redaction
from prime_rl.runtime.run_dir import lock_file
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.steps import complete_steps

ENVIRONMENT = """
import itertools

def load_environment(num_rows=4, seed=0, fails=False, api_key=None):
    rows = [{"prompt": f"Say {number}", "answer": ""} for number in range(num_rows)]
    calls = itertools.count()

    def reward(completion):
        if fails and next(calls) % 2:
            raise KeyError("no score")
        return float("a" in completion)

    return {"dataset": rows, "rewards": reward}
"""
ARGUMENTS = (
    "--env_id=own_letters --model_tag=d1 --run=dummy --trainer.args.report_to=none --device=cpu "
    "--examples_per_step=2 --num_samples=2 --max_new_tokens=2 --eval_examples=1 --eval_samples=1 --save_every=1"
).split()
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base directory with a model and its tokenizer, and an environment on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    (tmp_path / "own_letters.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_letters", raising=False)
    tokenizer = NanochatTokenizer.train(["Say something about letters and numbers"] * 4, 280)
    tokenizer.save(tmp_path / "base" / "tokenizer")
    model = GPT(GPTConfig(64, tokenizer.get_vocab_size(), 1, 1, 1, 16))
    model.init_weights()
    nn.init.normal_(model.lm_head.weight, 0, 0.5, generator=torch.Generator().manual_seed(1))
    save_checkpoint("sft", "d1", 2, model, {})
    return tmp_path / "base"


def train(*options: str) -> None:
    config, _ = parse_argv(PrimeRLTrainConfig, normalize_argv([*ARGUMENTS, *options]), PROG, {})
    assert run(config) == 0


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_new_run_moves_earlier_checkpoints_aside(base: Path) -> None:
    own = base / "prime_rl_checkpoints" / "d1"
    train("--max_steps=3")
    weights = (own / "step_3" / "model.pt").read_bytes()
    (own / ".tmp-step_4-abc").mkdir()  # of a crash
    train("--max_steps=2", "--seed=7")
    assert not list(own.glob(".tmp-*"))
    assert complete_steps(own) == [1, 2], "the last step is that of the new run"
    assert complete_steps(own / "attempts" / "1") == [1, 2, 3]
    assert (own / "attempts" / "1" / "step_3" / "model.pt").read_bytes() == weights
    train("--max_steps=2", "--seed=7", "--resume", "--eval_every=1", "--device_batch_size=1")
    assert complete_steps(own) == [1, 2] and complete_steps(own / "attempts" / "1") == [1, 2, 3]


def test_a_smaller_device_batch_decodes_fewer_at_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = Engine._decode, []

    def record(engine: Engine, rows: list[Any]) -> Any:
        decoded.append(len(rows))
        return decode(engine, rows)

    monkeypatch.setattr(Engine, "_decode", record)
    train("--max_steps=1", "--device_batch_size=1", "--num_samples=20", "--eval_samples=33")
    assert decoded == [32, 1, 32, 8, 32, 1], "evaluation, rollouts, evaluation"


def test_checkpoints_have_the_evaluation_of_their_weights(base: Path) -> None:
    own, runs = base / "prime_rl_checkpoints" / "d1", base / "prime_rl_runs" / "dummy"
    train("--max_steps=3", "--eval_every=2")
    saved = [json.loads((own / f"step_{step}" / "metadata.json").read_text())["evaluation"] for step in (1, 2, 3)]
    rows = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()[1:]]
    logged = [{k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")} for row in rows]
    assert saved == logged and [bool(scores) for scores in saved] == [False, True, True]


def test_runs_do_not_mix_their_metrics(base: Path) -> None:
    own = base / "prime_rl_runs" / "dummy"

    train("--max_steps=3")
    train("--max_steps=3", "--seed=7")
    assert steps(own) == steps(own / "attempts" / "1") == [0, 1, 2, 3]
    assert (own / "attempts" / "1" / "summary.json").is_file() and (own / "attempts" / "1" / "viz").is_dir()
    before = (own / "metrics.jsonl").read_text().splitlines()[:3]
    shutil.rmtree(base / "prime_rl_checkpoints" / "d1" / "step_3")
    train("--max_steps=3", "--seed=7", "--resume")
    assert steps(own) == [0, 1, 2, 3] and (own / "metrics.jsonl").read_text().splitlines()[:3] == before


def test_a_resume_under_another_name_begins_new_metrics(base: Path) -> None:
    runs = base / "prime_rl_runs"
    train("--max_steps=2", "--run=b", "--seed=7")
    train("--max_steps=2", "--run=a")
    shutil.rmtree(base / "prime_rl_checkpoints" / "d1" / "step_2")
    train("--max_steps=2", "--run=b", "--resume")
    assert steps(runs / "b") == [2] and steps(runs / "b" / "attempts" / "1") == [0, 1, 2]
    assert steps(runs / "a") == [0, 1, 2]


@pytest.mark.parametrize(
    ("directory", "option"), [("prime_rl_checkpoints/d1", "--model_tag"), ("prime_rl_runs/dummy", "--run")]
)
def test_two_runs_do_not_write_to_one_directory(base: Path, directory: str, option: str) -> None:
    train("--max_steps=1")
    with lock_file(base / directory / ".lock-run", ""):
        with pytest.raises(ValueError, match=f"{directory}: choose another {option} or NANOCHAT_BASE_DIR"):
            train("--max_steps=1", "--seed=7")
        assert not (base / directory / "attempts").exists()
    train("--max_steps=1", "--seed=7")


def test_a_resume_of_another_run_is_refused(base: Path) -> None:
    own = base / "prime_rl_checkpoints" / "d1"
    train("--max_steps=1")
    metadata = json.loads((own / "step_1" / "metadata.json").read_text())
    shutil.copytree(base / "chatsft_checkpoints" / "d1", base / "mid_checkpoints" / "d1")
    for options, words in (
        (
            ["--temperature=0.5"],
            r"\(temperature was 1\.0, now 0\.5\): resume with the same arguments, or begin a new run",
        ),
        (["--source=mid"], r"source was 'sft', now 'mid'"),
        (["--env.args", "num_rows=6"], r"env\.args\.num_rows was None, now 6"),
        (
            ["--matrix_lr=0.5", "--seed=3"],
            r"matrix_lr was 0\.02, now 0\.5, seed was 42, now 3, env\.args\.seed was None, now 3",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            train("--max_steps=1", "--resume", *options)
    assert json.loads((own / "step_1" / "metadata.json").read_text()) == metadata


@pytest.mark.parametrize("option", ["--temperature=0.5", "--temperature=1.0"])
def test_a_resume_without_steps_leaves_the_metrics(base: Path, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = base / "prime_rl_runs" / "dummy"
    train("--max_steps=1")
    before = {name: (own / name).read_bytes() for name in ("summary.json", "metrics.jsonl")}
    monkeypatch.setattr("scripts.prime_rl_watch.setup_prime_rl_wandb", None)  # must not be called
    with nullcontext() if option.endswith("1.0") else pytest.raises(ValueError, match="belongs to another run"):
        train("--max_steps=1", "--resume", "--trainer.args.report_to=wandb", option)
    assert {name: (own / name).read_bytes() for name in before} == before


def test_a_resume_with_another_tokenizer_is_refused(base: Path) -> None:
    train("--max_steps=1")
    NanochatTokenizer.train(["quite other words that make other pairs 88 77"] * 4, 280).save(base / "tokenizer")
    with pytest.raises(ValueError, match="was trained with another tokenizer than that of"):
        train("--max_steps=1", "--resume")


def test_the_first_error_of_a_rollout_is_printed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--max_steps=1", "--env.args", "fails=true")
    assert re.search(r"warning: step 1: 2 rollouts failed, the first: reward: KeyError", capsys.readouterr().out)


def test_secrets_of_the_environment_are_not_saved(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_values", set())
    monkeypatch.setattr(redaction, "_current", None)
    redaction.register_config({"api_key": "sk-made-up-123456"})
    secret = ("--env.args", "api_key=sk-made-up-123456")
    train("--max_steps=1", *secret)
    path = base / "prime_rl_checkpoints" / "d1" / "step_1" / "metadata.json"
    text = path.read_text()
    assert "made-up" not in text and json.loads(text)["env_args"]["api_key"] == "***"
    train("--max_steps=1", "--resume", *secret)
    path.write_text(text.replace("***", "sk-made-up-123456"))  # of a version that saved it
    train("--max_steps=1", "--resume", *secret)


def test_training_questions_are_no_silent_evaluation(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, note = base / "prime_rl_runs" / "dummy" / "metrics.jsonl", "evaluations are on training questions"
    train("--max_steps=1")
    assert note in capsys.readouterr().out and "eval/accuracy" in path.read_text()
    train("--max_steps=1", "--env_id=nanochatAquaRat", "--num_train_examples=3", "--num_eval_examples=0")
    assert note not in capsys.readouterr().out and "eval/" not in path.read_text()


def test_a_run_does_not_begin_in_its_own_directory(base: Path) -> None:
    train("--max_steps=1")
    with pytest.raises(ValueError, match=r"copy it to .*chatrl_checkpoints/d1 and use --source=rl"):
        train("--max_steps=1", "--source=prime_rl")
    target = base / "chatrl_checkpoints" / "d1"
    shutil.copytree(base / "prime_rl_checkpoints" / "d1" / "step_1", target / "step_1")
    train("--max_steps=1", "--source=rl")
