"""Models of other families, sizes and tokenizers through every command (slow; downloads tokenizers)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import Runner, metric_rows, runner
from foreign_models import FOREIGN_MODELS, save_foreign_model

from prime_rl.pretrained.gguf_writer import write_gguf
from prime_rl.runtime.machine import find_free_port
from rollouts.training.steps import complete_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
BASE_MODELS = ["llama2", "gptoss"]
CHAT_MODELS = [name for name in FOREIGN_MODELS if name not in BASE_MODELS]
RL = """
max_steps = 2
seq_len = 160

[orchestrator]
batch_size = 8
rollouts_per_example = 4

[orchestrator.sampling]
max_tokens = 8

[[orchestrator.env]]
id = "distillation_world:load_world"
name = "world"
"""
TEACHER = """
[orchestrator.teacher_model]
context = "Say only a, b, c and d.\\n"
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def finish(run: Runner, name: str, *options: object) -> str:
    """Run a command to its end; returns what it printed, in one line."""
    command = run.start(name, *options)
    command.wait(900)
    text = " ".join(f"{command.out}\n{command.err}".split())
    assert "Traceback" not in text, text
    assert command.process.returncode in (0, 1, 2), text
    return f"{command.process.returncode} {text}"


def write_config(path: Path, *sections: str) -> Path:
    path.write_text("".join(sections))
    return path


def run_rl(run: Runner, config: Path, model: Path, out: Path) -> str:
    port = find_free_port()
    return finish(run, "rl", "@", config, "--model.name", model, "--output-dir", out, "--inference.server.port", port)


def pass_through_all_commands(run: Runner, model: Path, directory: Path) -> None:
    """`sft`, `rl`, distillation (two steps each), `eval` of the model and of the result, each with its own server."""
    rows = [{"prompt": f"What is {i}? ", "completion": f" It is {i}. é"} for i in range(8)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data.name", directory / "rows.jsonl", "--data.seq-len", 256, "--data.batch-size", 4]
    assert (
        finish(run, "sft", "--model.name", model, *data, "--max-steps", 2, "--output-dir", directory / "sft")[0] == "0"
    )
    configs = {"rl": (RL,), "distill": (RL, TEACHER)}
    for kind, sections in configs.items():
        out = directory / kind
        assert run_rl(run, write_config(directory / "rl.toml", *sections), model, out)[0] == "0"
        assert complete_steps(out / "weights")[-1] == 2
        first, _ = metric_rows(out, "trainer", "mismatch_kl/mean")
        assert first["mismatch_kl/mean"] == 0
    check = ["--env.0.id", "letters", "--num-examples", 4, "--sampling.max-tokens", 8]
    for source in (model, directory / "rl" / "weights" / "step_2"):
        assert finish(run, "eval", "--model.name", source, *check, "--output-dir", directory / "eval")[0] == "0"


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_chat_models_pass_through_all_commands(run: Runner, tmp_path: Path, name: str) -> None:
    pass_through_all_commands(run, save_foreign_model(name, tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("name", BASE_MODELS)
def test_base_models_train_on_text_and_chats_name_the_cure(run: Runner, tmp_path: Path, name: str) -> None:
    model = save_foreign_model(name, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1?", "completion": " It is 1."}\n' * 8)
    data = ["--data.name", tmp_path / "rows.jsonl", "--data.seq-len", 64, "--data.batch-size", 4]
    assert (
        finish(run, "sft", "--model.name", model, *data, "--max-steps", 2, "--output-dir", tmp_path / "sft")[0] == "0"
    )
    refusal = run_rl(run, write_config(tmp_path / "rl.toml", RL), model, tmp_path / "rl")
    assert refusal[0] != "0" and "add one to its directory (chat_template.jinja)" in refusal
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert run_rl(run, tmp_path / "rl.toml", model, tmp_path / "again")[0] == "0"


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "smollm3"])
def test_gguf_files_pass_through_all_commands(run: Runner, tmp_path: Path, name: str) -> None:
    model = save_foreign_model(name, tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf", "q8_0" if name == "qwen2" else "f16")
    shutil.rmtree(model)
    pass_through_all_commands(run, tmp_path / "model.gguf", tmp_path)
