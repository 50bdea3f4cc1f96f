"""The first runs of a new user: an environment written by `rl init`, and `train` from a script of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_runner import metric_rows

from prime_rl.launcher.new_environment import write_environment

SCRIPT = """
from prime_rl import train

def letters():
    return {"dataset": [{"prompt": c * 3, "answer": c} for c in "abcdefgh"], "rewards": share}

def share(completion, answer):
    return completion.count(answer) / max(len(completion), 1)

if __name__ == "__main__":
    small = {"model.debug.random_init": True, "orchestrator.batch_size": 16, "seq_len": 64}
    result = train("tiny-qwen3", letters, steps=2, settings=small | {"orchestrator.sampling.max_tokens": 8})
    print(f"{result.weights} {len(result.metrics['reward/mean'])} {len(result.metrics['loss/mean'])}")
"""


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_written_environment_trains_at_the_first_try(tmp_path: Path) -> None:
    write_environment("my_task", tmp_path)
    options = ["--max_steps", "2", "--no-orchestrator.eval", "--orchestrator.batch_size", "32"]
    run(tmp_path, "-m", "prime_rl.rl", "@", "environments/my_task/rl.toml", *options)
    rows = metric_rows(tmp_path / "outputs" / "my_task", "orchestrator", "reward/mean")
    assert [row["step"] for row in rows] == [1, 2] and max(row["reward/mean"] for row in rows) > 0


def test_a_script_trains_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    last = run(tmp_path, "script.py").splitlines()[-1]
    assert last == "outputs/weights/step_2 2 2"
    assert (tmp_path / "outputs/weights/step_2/model.safetensors").is_file()
