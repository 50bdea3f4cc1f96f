"""Launcher: GPU assignment, output directory, written configs and failure reports."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from prime_rl import rl
from prime_rl.config import RLConfig
from prime_rl.launcher.summary import summarize
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.runtime.tokenizer import ASSETS_DIR
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.steps import publish_step


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


def publish(root: Path, step: int) -> Path:
    return publish_step(root, step, lambda directory: (directory / "file").write_text("x"))


def test_invalid_input_of_a_process_is_reported_verbatim(tmp_path: Path) -> None:
    says = "import sys; print('loading'); print('error: env \"x\" was not found\\n  try y'); sys.exit(2)"
    with pytest.raises(ChildFailed) as failure, Supervisor(tmp_path, handle_signals=False) as run:
        run.start("orchestrator", [sys.executable, "-c", says])
        run.wait(["orchestrator"])
    with pytest.raises(ValueError, match=r'^orchestrator: env "x" was not found\n  try y$'):
        rl.report_failure(failure.value)


def test_commands_that_we_print_can_be_typed_into_a_shell() -> None:
    """`eval` alone is a shell builtin, so documents and summaries must not print it bare."""
    root = Path(__file__).resolve().parents[3]
    files = [root / "README.md", *root.glob("examples/**/*.md"), *root.glob("examples/**/*.toml")]
    files += [*root.glob("configs/**/*.toml"), root / "scripts" / "demo.py"]
    bare = re.compile(r"(?<!env )(?<!run )\beval +@")
    found = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if bare.search(line)]
    assert found == []
    assert bare.search("next  eval @ x.toml") and not bare.search("env eval @ x.toml")
    assert "env eval @" in summarize(parse(), 1.0, cpu_seconds=1.0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--orchestrator.log.level", "loud"], "log.level = 'loud' is not a level"),
        (["--tensorboard.enabled"], "tensorboardX is not installed: pip install tensorboardX"),
        (["--trainer.loss.import_path", "my_loss:absent"], "loss.import_path = 'my_loss:absent' cannot be imported"),
        (["--trainer.loss.import_path", "nowhere:loss"], "cannot be imported"),
        (["--trainer.loss.import_path", "my_loss:two"], r"does not take the arguments \(inputs\): .*'other'"),
        (
            ["--trainer.loss.import_path", "my_loss:one", "--trainer.loss.kwargs", '{"x": 1}'],
            r"does not take the arguments \(inputs, x\)",
        ),
    ],
)
def test_mistakes_are_found_before_anything_loads(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_loss.py").write_text("def one(inputs): ...\ndef two(inputs, other): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "my_loss", raising=False)
    monkeypatch.setattr("prime_rl.runtime.tokenizer.resolve_model_dir", lambda name: pytest.fail("the model is loaded"))
    custom = ["--trainer.loss.type", "custom"] if "--trainer.loss.import_path" in argv else []
    with pytest.raises(ValueError, match=words):
        rl.check_inputs(parse(*custom, *argv))


@pytest.mark.parametrize("process", ["trainer", "orchestrator"])
def test_a_taken_port_of_prometheus_is_named_by_its_key(process: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        key = f"--{process}.prometheus.port"
        with pytest.raises(ValueError, match=f"choose another one, e.g. {key}"):
            rl.check_inputs(parse(key, str(server.getsockname()[1])))


def test_a_port_of_prometheus_serves_one_process() -> None:
    with pytest.raises(ValueError, match="are both 9401: choose two ports"):
        rl.check_inputs(parse("--trainer.prometheus", "--orchestrator.prometheus.port", "9401"))


@pytest.mark.parametrize(
    ("message_type", "options", "is_refused"),
    [
        ("chat", [], True),
        ("completion", [], False),
        ("chat", ["--inference.backend", "vllm", "--inference.vllm.chat-template", "turns.jinja"], False),
        ("chat", ["--inference.model.trust_remote_code", "true"], False),
    ],
)
def test_base_models_are_refused_before_the_start(
    message_type: str, options: list[str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without a chat template, in an environment that writes messages."""
    model, environment = tmp_path / "base", tmp_path / f"writes_{message_type}.py"
    shutil.copytree(ASSETS_DIR / "tiny-qwen3", model, ignore=shutil.ignore_patterns("*.jinja"))
    environment.write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\ndef load_environment():\n"
        "    rows = Dataset.from_list([{'question': 'a', 'prompt': 'a', 'answer': 'b'}])\n"
        f"    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(), message_type='{message_type}')\n"
    )
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("prime_rl.rl.check_port_free", lambda *_: None)
    given = ["--model.name", str(model), "--model.debug.random_init", "--orchestrator.env.0.id", str(environment)]
    config = parse(*given, *options)
    with pytest.raises(ValueError, match="has no chat template") if is_refused else nullcontext():
        rl.check_inputs(config)
