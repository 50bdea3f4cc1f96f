"""Invalid input of every kind ends with exit code 2 and at most three lines that name the key and the cure."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from prime_rl.configuration.command import run_command
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.pydantic_config import BaseConfig

COMMANDS = {
    "rl": ("prime_rl.config", "RLConfig"),
    "trainer": ("prime_rl.trainer.config", "TrainConfig"),
    "sft": ("prime_rl.trainer.config", "SFTConfig"),
    "orchestrator": ("prime_rl.orchestrator.config", "OrchestratorConfig"),
    "inference": ("prime_rl.inference.config", "InferenceConfig"),
}
FILES = {
    "good.toml": "max_steps = 5\n",
    "typo.toml": "max_steps = 5\n[optim]\nlearning_rate = 1\n",
    "typo_section.toml": "[optimizer]\nlr = 1\n",
    "sub.toml": "[optim]\nlr = 1\n",
    "type.toml": 'max_steps = "many"\n',
    "switch.toml": "max_steps = true\n",
    "nan.toml": "[optim]\nlr = nan\n",
    "inf.toml": "[optim]\nlr = inf\n",
    "syntax.toml": "max_steps = 5\nname = no quotes\n",
    "section.toml": 'optim = "adamw"\n',
    "bases.toml": 'toml_files = ["gone.toml"]\n',
    "bases_type.toml": "toml_files = 3\n",
    "trainer.toml": "max_steps = 5\n",
    "orchestrator.toml": "\nmax_steps = 6\n",
    "binary.toml": "",
    "list.toml": "[[env]]\nargs = {xs = [1, 2]}\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.toml").write_bytes(b"\x80\x81\xff")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(argv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_errors: int = 1) -> str:
    """The errors of a command for this line; the command must reject it."""
    prog, *words = argv.split(" ")
    module, name = COMMANDS[prog]
    monkeypatch.setattr("sys.argv", [prog, *words])
    with pytest.raises(SystemExit) as stop:
        run_command(prog, getattr(importlib.import_module(module), name), _must_not_run, summary="")
    shown = capsys.readouterr()
    assert stop.value.code == 2, shown
    assert shown.out == "" and shown.err.startswith("error: ")
    assert [line[:7] == "error: " for line in shown.err.splitlines()].count(True) == num_errors
    assert len(shown.err.splitlines()) <= 3 * num_errors and "Traceback" not in shown.err
    return shown.err


def _must_not_run(_: BaseConfig) -> None:
    raise AssertionError("the command ran")


CASES = [
    # a key that does not exist
    ("trainer --optim.lrr 1", ["--optim.lrr", "did you mean --optim.lr?"]),
    ("trainer --zzzz 1", ["--zzzz", "`trainer --help all` lists every key"]),
    ("trainer --max-step 1", ["--max-step", "--max_steps"]),
    ("trainer --optimm.lr 1", ["--optimm.lr", "--optim.lr"]),
    ("trainer @ typo.toml", ["optim.learning_rate", "typo.toml:3", "did you mean optim.lr?"]),
    ("trainer @ typo_section.toml", ["optimizer", "typo_section.toml:1", "optim"]),
    ("rl @ sub.toml", ["optim", "sub.toml:1", "trainer.optim"]),
    ("orchestrator --env.0.idd x", ["--env.0.idd", "--env.0.id?"]),
    ("trainer --optim.momentum 0.5", ["--optim.momentum", "optim.type = adamw", "it needs optim.type = sgd"]),
    ("sft --nonsense-without-neighbor 1", ["--nonsense", "sft --help"]),
    # a value of the wrong type
    ("trainer --max-steps five", ["--max_steps 'five'", "a whole number", "--max_steps 10"]),
    ("trainer --max-steps 1.5", ["--max_steps '1.5'", "a whole number"]),
    ("trainer --optim.lr fast", ["--optim.lr 'fast'", "a number", "--optim.lr 0.1"]),
    ("trainer @ type.toml", ["max_steps = 'many' (type.toml:1)", "a whole number", '"None"']),
    ("trainer @ switch.toml", ["max_steps", "switch.toml:1", "number"]),
    ("trainer @ nan.toml", ["optim.lr", "nan.toml:2", "number"]),
    ("trainer @ section.toml", ["optim = 'adamw' (section.toml:1)", "key by key: optim.type"]),
    ("trainer --optim adamw", ["--optim 'adamw'", "key by key: --optim.type"]),
    ("trainer --model None", ["--model 'None'", "is a section"]),
    ("orchestrator --client.headers word", ["--client.headers 'word'", "--client.headers name=value"]),
    ("orchestrator --env reverse-text", ["--env 'reverse-text'", "JSON", "--env.0.id"]),
    ("orchestrator --client.headers {a:1}", ["--client.headers", "not valid JSON", "double quotes"]),
    ("rl --trainer_gpu_ids a,b", ["--trainer_gpu_ids 'a'", "a whole number"]),
    # a value out of bounds or not among the choices
    ("trainer --max-steps 0", ["--max_steps '0'", "at least 1"]),
    ("inference --server.port 99999", ["--server.port '99999'", "at most 65535"]),
    ("orchestrator --sampling.top_p 0", ["--sampling.top_p '0'", "greater than 0"]),
    ("trainer --loss.type aippo", ["--loss.type 'aippo'", "did you mean aipo?"]),
    ("trainer --optim.type adam", ["--optim.type 'adam'", "adamw, sgd", "did you mean adamw?"]),
    ("trainer --scheduler.type step", ["--scheduler.type 'step'", "constant, linear, cosine"]),
    ("orchestrator --client.base-url []", ["--client.base_url", "at least 1 entry"]),
    # files
    ("trainer @ god.toml", ["no file god.toml", "good.toml?"]),
    ("trainer @ nowhere/good.toml", ["nowhere/good.toml", "nowhere does not exist"]),
    ("trainer @ .", ["is a directory", ".toml"]),
    # numbers that are none
    ("trainer @ inf.toml", ["lr", "inf.toml:2", "finite"]),
    ("trainer --optim.lr inf", ["--optim.lr", "finite"]),
    ("orchestrator --sampling.temperature nan", ["--sampling.temperature", "nan"]),
    ("orchestrator --inference-timeout inf", ["inference", "finite"]),
    ("trainer @ syntax.toml", ["syntax.toml", "line 2", "quotes"]),
    ("trainer @ binary.toml", ["binary.toml", "UTF-8"]),
    ("trainer @ bases.toml", ["gone.toml", "bases.toml"]),
    ("trainer @ bases_type.toml", ["toml_files = 3", 'toml_files = ["base.toml"]']),
    # the line itself
    ("trainer @good.toml", ["@good.toml", "`@ good.toml`"]),
    ("trainer --model @good.toml --seed 1", ["@good.toml", "`@ good.toml`"]),
    ("trainer @", ["`@` must be followed by a file", "trainer @ path"]),
    ("trainer good.toml", ["good.toml", "`@ good.toml`"]),
    ("trainer --max-steps", ["--max-steps needs a value", "int"]),
    ("trainer --max-steps 1 2", ["'2'", "--max_steps before it takes one value"]),
    ("trainer max_steps=3", ["max_steps=3", "--max_steps"]),
    ("trainer -lr 3", ["-lr", "two dashes"]),
    ("trainer --max-steps @ good.toml", ["--max-steps", "single value"]),
    ("trainer --no-seed", ["--no-seed", "--seed VALUE"]),
    ("trainer --no-ckpt=1", ["--no-ckpt", "takes no value"]),
    ("inference --model.trust_remote_code maybe", ["'maybe'", "true or false"]),
    ("orchestrator --env.2.id x", ["--env.2", "next free index is 1"]),
    ("orchestrator @ list.toml --env.0.args.xs.foo 1", ["xs.foo", "'foo' is no index", "next free index is 2"]),
    ("orchestrator @ list.toml --env.0.args.xs.-1 1", ["--env.0.args.xs.-1", "'-1' is no index"]),
    ("trainer --output-dir=", ["--output_dir ''", "is an empty path"]),
    # values that contradict each other
    ("orchestrator --batch-size 6 --rollouts-per-example 4", ["batch_size = 6", "rollouts_per_example = 4"]),
    ("trainer --scheduler.type cosine", ["scheduler.type cosine", "set max_steps"]),
    ("rl --trainer @ trainer.toml --orchestrator @ orchestrator.toml",
     ["trainer.max_steps = 5 (trainer.toml:1)", "orchestrator.max_steps = 6 (orchestrator.toml:2)", "max_steps alone"]),
    ("rl --no-inference --inference_gpu_ids 0", ["inference_gpu_ids", "inference is off"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "words"), CASES, ids=[argv for argv, _ in CASES])
def test_wrong_arguments(
    argv: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refuse(argv, monkeypatch, capsys)
    assert all(word in shown for word in words), shown


def test_wrong_variable(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PRIME_OPTIM__LR", "fast")
    assert "optim.lr = 'fast' (env PRIME_OPTIM__LR): must be a number" in refuse("trainer", monkeypatch, capsys)


def test_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def deny(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", deny)  # the tests may run as root, without permission errors
    shown = refuse("trainer @ good.toml", monkeypatch, capsys)
    assert "good.toml cannot be read" in shown and "permission" in shown


def test_all_missing_keys_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Strict(BaseConfig):
        one: int
        two: int

    monkeypatch.setattr("sys.argv", ["strict"])
    with pytest.raises(SystemExit) as stop:
        run_command("strict", Strict, _must_not_run, summary="")
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and len(shown.splitlines()) == 4
    assert "error: one is required" in shown and "--one VALUE" in shown and "error: two is required" in shown


def test_all_wrong_keys_and_values_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "two.toml").write_text("max_stepz = 3\n[trainer.model]\nseq_len = 0\n")
    monkeypatch.setenv("PRIME_SEED", "x")
    shown = refuse("rl @ two.toml --max-step 3 --trainer.optim.lr fast --batch-size 4 7", monkeypatch, capsys, 6)
    words = [
        "--max-step",
        "--batch-size",
        "seed = 'x' (env PRIME_SEED)",
        "max_stepz (two.toml:1)",
        "seq_len = 0",
        "fast",
    ]
    assert all(word in shown for word in [*words, "'fast'"])


def test_all_misfits_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "rl --trainer.scheduler.type cosine --orchestrator.batch_size 6 --orchestrator.rollouts_per_example 4"
    shown = refuse(command, monkeypatch, capsys, 2)
    assert "set max_steps" in shown and "whole groups" in shown


@pytest.mark.parametrize(("key", "level"), [("LOGGING_LEVEL", None), ("log.level", "loud")])
def test_wrong_log_level(key: str, level: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_rl.configuration.sections import LogConfig

    monkeypatch.setenv("LOGGING_LEVEL", "loud")
    with pytest.raises(ValueError, match=rf"{key} = 'loud' is not a level; choose one of .*debug.*"):
        setup_logger("test", LogConfig(level=level))


@pytest.mark.parametrize("where", ["/proc/nowhere", "a_file", "a_file/below"])
def test_an_output_dir_that_cannot_be_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reported before any process starts, for every command, and not as an errno."""
    (tmp_path / "a_file").touch()
    target = where if where.startswith("/") else str(tmp_path / where)
    monkeypatch.setattr("sys.argv", ["trainer", "--output-dir", target])
    with pytest.raises(SystemExit) as end:
        run_command("trainer", TrainConfig, lambda config: pytest.fail("must not start"), summary="")
    reported = capsys.readouterr().err
    assert end.value.code == 2 and len(reported.splitlines()) <= 3, reported
    assert f"output_dir {target}" in reported and "--output-dir" in reported
