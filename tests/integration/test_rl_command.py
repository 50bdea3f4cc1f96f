"""End-to-end: the documented commands as real processes with a tiny model on the CPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from cli_runner import DEADLINE_S, ROOT, THREE_FILES, Command, Runner, metric_rows, runner, until

from prime_rl.runtime.machine import find_free_port
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps, step_path

LETTERS = "tests/integration/letters.toml"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Command]:
    """The output directory of `rl` with the three debug configs, and the command that has ended."""
    root = tmp_path_factory.mktemp("rl")
    with runner(root / "said") as found:
        return root / "out", found.run_well("rl", *THREE_FILES, *rl_options(root / "out"))


def rl_options(output_dir: Path) -> list[object]:
    return ["--output_dir", output_dir, "--inference.server.port", find_free_port()]


def health(port: int) -> dict[str, Any]:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


def assert_wrong_input(command: Command, *words: str) -> None:
    """Exit code 2 and at most three lines with the error and its cure."""
    assert command.process.returncode == 2, command.err
    assert "Traceback" not in command.err
    lines = [line for line in command.err.splitlines() if not line.startswith(("note:", "warning:"))]
    assert 1 <= len(lines) <= 3, command.err
    for word in words:
        assert word in command.err, command.err


# one process alone


@pytest.mark.parametrize(("name", "config"), [("sft", "sft/train.toml"), ("trainer", "rl/train.toml")])
def test_a_trainer_alone_on_fake_data(run: Runner, tmp_path: Path, name: str, config: str) -> None:
    run.run_well(name, "@", f"configs/debug/{config}", "--output-dir", tmp_path / "out")
    assert complete_steps(tmp_path / "out" / "weights")[-1] == 5
    rows = metric_rows(tmp_path / "out", name, "loss/mean")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(row["loss/mean"]) and row["optim/grad_norm"] > 0 for row in rows)


def test_a_trainer_runs_by_its_path(run: Runner, tmp_path: Path) -> None:
    """As `torchrun --nproc-per-node N src/prime_rl/trainer/rl/train.py` starts it."""
    import subprocess
    import sys

    argv = ["src/prime_rl/trainer/rl/train.py", "@", "configs/debug/rl/train.toml", "--max_steps", "1"]
    done = subprocess.run(
        [sys.executable, *argv, "--output-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert complete_steps(tmp_path / "weights") == [1]


def test_three_terminals(run: Runner, tmp_path: Path) -> None:
    """The fake trainer publishes its versions, the relay delivers them, the orchestrator's batches stay unread."""
    out, port = tmp_path / "out", find_free_port()
    directory = ["--output_dir", out]
    server = run.start("inference", "@", "configs/debug/infer.toml", *directory, "--server.port", port)
    trainer = run.start("trainer", "@", "configs/debug/rl/train.toml", *directory)
    orchestrator = run.start(
        *("orchestrator", "@", "configs/debug/orch.toml", *directory),
        *("--client.base-url", f"http://127.0.0.1:{port}/v1"),
    )
    assert trainer.wait() == 0, trainer.err
    assert orchestrator.wait() == 0, orchestrator.out + orchestrator.err
    assert complete_steps(out / "rollouts") == [1, 2, 3, 4, 5]
    assert health(port)["version"] == 5
    assert "unread" in orchestrator.out
    server.process.send_signal(signal.SIGTERM)
    server.wait()


# `rl`


def test_rl_with_three_files(finished: tuple[Path, Command]) -> None:
    out, command = finished
    assert complete_steps(out / "weights")[-1] == 5
    assert {path.name for path in (out / "configs").iterdir()} >= {"rl.toml", "trainer.toml", "orchestrator.toml"}
    batches = metric_rows(out, "orchestrator", "reward/mean")
    assert [row["step"] for row in batches] == [1, 2, 3, 4, 5]
    assert max(row["batch/off_policy_level/max"] for row in batches) <= 2
    steps = metric_rows(out, "trainer", "loss/mean")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    assert len(list(load_jsonl(out / "samples.jsonl"))) == 5 * 16
    for part in ("trainer.data.fake", "off"):
        assert part in command.err
    for part in ("trainer      | ", "orchestrator | ", "inference    | ", "5 in ", str(step_path(out / "weights", 5))):
        assert part in command.out, part
    assert command.pids() == []


@pytest.mark.parametrize("family", ["olmo2", pytest.param("falcon", marks=pytest.mark.slow)])
def test_rl_of_models_that_transformers_computes(run: Runner, tmp_path: Path, family: str) -> None:
    """With weight updates: OLMo 2 has a KV cache in the engine, Falcon is recomputed."""
    import torch
    import transformers

    tiny = ROOT / "src" / "prime_rl" / "assets" / "tiny-qwen3"
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512)
    config = transformers.AutoConfig.for_model(
        family, **shape, vocab_size=320, intermediate_size=128, eos_token_id=258, bos_token_id=None, pad_token_id=256
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, tmp_path / family / file)
    options = ["--model.name", tmp_path / family, "--model.debug.random_init", "false", "--max-steps", 3, "--no-ckpt"]
    run.run_well("rl", "@", LETTERS, *options, *rl_options(tmp_path / "out"))
    rows = metric_rows(tmp_path / "out", "trainer", "mismatch_kl/mean")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["mismatch_kl/mean"] < 1e-6 and row["optim/grad_norm"] > 0 for row in rows)
    log = (tmp_path / "out" / "logs" / "inference.log").read_text()
    assert "runs on transformers' code, slower than the native decoder" in log
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "weights" / "step_3")
    assert type(after.config) is type(config)


def test_the_weights_load_in_transformers(finished: tuple[Path, Command]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(step_path(finished[0] / "weights", 5))
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = AutoTokenizer.from_pretrained(path)("abc", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(tokens).logits).all()


def test_a_second_run_does_not_mix_with_the_first(run: Runner, finished: tuple[Path, Command]) -> None:
    out, _ = finished
    before = sorted(path for path in out.rglob("*") if path.is_file())
    command = run.run("rl", *THREE_FILES, *rl_options(out))
    assert_wrong_input(command, str(out), "--output-dir", "--clean")
    assert sorted(path for path in out.rglob("*") if path.is_file()) == before


def start_endless(run: Runner, out: Path) -> Command:
    """`rl` without an end, once it has published its first version."""
    command = run.start("rl", "@", LETTERS, "--max_steps", 100000, *rl_options(out))
    until(lambda: complete_steps(out / "weights"), "the first version", command)
    return command


@pytest.mark.parametrize("victim", ["trainer", pytest.param("orchestrator", marks=pytest.mark.slow)])
def test_crash_stops_all_processes_and_is_reported(run: Runner, tmp_path: Path, victim: str) -> None:
    command = start_endless(run, tmp_path / "out")
    os.kill(command.find(victim), signal.SIGKILL)
    assert command.wait(60) == 1
    assert f"{victim} ended with signal SIGKILL" in command.err
    assert str(tmp_path / "out" / "logs" / f"{victim}.log") in command.err
    assert "Traceback" not in command.err.split("the end of")[0]
    assert command.pids() == []


def test_ctrl_c_stops_everything(run: Runner, tmp_path: Path) -> None:
    command = start_endless(run, tmp_path / "out")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert "Traceback" not in command.out + command.err
    assert command.pids() == []


@pytest.mark.slow  # test_open_page.py kills a launcher that serves its page as well
def test_killing_the_launcher_leaves_no_orphan(run: Runner, tmp_path: Path) -> None:
    command = start_endless(run, tmp_path / "out")
    command.process.kill()
    command.wait()
    until(lambda: not command.pids(), "the end of all processes")


# wrong input


def test_a_port_in_use(run: Runner, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--output_dir", tmp_path / "out", "--inference.server.port", port]
        command = run.run("rl", *THREE_FILES, *options)
    assert_wrong_input(command, "inference.server.port", str(port))
    assert not (tmp_path / "out" / "logs").exists()


def test_an_unknown_environment(run: Runner, tmp_path: Path) -> None:
    config = tmp_path / "env.toml"
    config.write_text('[[orchestrator.env]]\nid = "reverse-txet"\n')
    command = run.run("rl", *THREE_FILES, "@", config, *rl_options(tmp_path / "out"))
    assert_wrong_input(command, "orchestrator", "reverse-txet")
    assert command.pids() == []


@pytest.mark.parametrize("name", ["rl", "eval"])
def test_a_model_that_is_not_there(run: Runner, tmp_path: Path, name: str) -> None:
    options = ["--model.name", tmp_path / "step_9", "--output-dir", tmp_path / "out"]
    assert_wrong_input(run.run(name, *options), "model.name", "step_9")


def test_a_directory_without_weights(run: Runner, tmp_path: Path) -> None:
    command = run.run("eval", "@", "configs/debug/eval.toml", "--model.name", "tiny-qwen3", "--output-dir", tmp_path)
    assert_wrong_input(command, "random_init")


# `eval`


def test_eval_of_published_weights(run: Runner, finished: tuple[Path, Command], tmp_path: Path) -> None:
    weights = step_path(finished[0] / "weights", 5)
    results = []
    for name in ("one", "two"):
        options = ["--model.name", weights, "--rollouts_per_example", 2, "--sampling.max_tokens", 16]
        command = run.run_well("eval", "@", "configs/debug/eval.toml", *options, "--output-dir", tmp_path / name)
        folder = tmp_path / name / "evals" / "reverse-text"
        results.append([(r["example_id"], r["completion"], r["reward"]) for r in load_jsonl(folder / "results.jsonl")])
        assert command.pids() == []
    assert len(results[0]) == 32
    assert results[0] == results[1]
    for part in ("reverse-text", "avg@k", "pass@k", "exact_match"):
        assert part in command.out
    [row] = metric_rows(tmp_path / "two", "eval", "eval/reverse-text/avg@2")
    assert row["step"] == 5 and 0 <= row["eval/reverse-text/avg@2"] <= 1


def test_eval_of_a_server_that_is_not_there(run: Runner, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{find_free_port()}/v1"
    options = ["--model.name", "tiny-qwen3", "--client.base-url", url, "--output-dir", tmp_path]
    command = run.run("eval", "@", "configs/debug/eval.toml", *options)
    assert command.process.returncode == 1, command.err
    assert f"error: client.base_url {url} does not respond" in command.err and "Traceback" not in command.err
