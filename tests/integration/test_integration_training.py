"""SFT and RL with the library: `dev/integration_training/train.py` on one and two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEV = Path("dev/integration_training")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train(config: str | Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(DEV / "train.py"), str(DEV / config), *args]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(rows: list[dict[str, float]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def test_sft_then_rl_raises_the_reward_and_two_ranks_agree(tmp_path: Path) -> None:
    one = train("config.py", "--output-dir", str(tmp_path / "one"))
    assert one.returncode == 0, one.stderr[-3000:]
    sft, rl = read(tmp_path / "one/sft/metrics.jsonl"), read(tmp_path / "one/rl/metrics.jsonl")
    assert sft[-1]["loss"] < sft[0]["loss"] - 3
    assert mean(rl[-5:], "mean_reward") > mean(rl[:5], "mean_reward") + 0.2
    assert rl[0]["step"] == sft[-1]["step"] + 1  # from the checkpoint of the stage before
    last = tmp_path / "one/checkpoints" / f"step_{int(rl[-1]['step'])}"
    assert {"pytorch_model.bin", "optimizer.bin", "metadata.json"} <= {p.name for p in last.iterdir()}

    # The reward rises within half of the steps of RL, which take twice as long on two ranks.
    (tmp_path / "two.py").write_text(
        "from dataclasses import replace\nfrom config_fsdp import config\n"
        "config = replace(config, rl=replace(config.rl, num_steps=16))\n"
    )
    two = train(tmp_path / "two.py", "--output-dir", str(tmp_path / "two"), launcher=TORCHRUN)
    assert two.returncode == 0, two.stderr[-3000:]
    for mine, theirs in zip(sft, read(tmp_path / "two/sft/metrics.jsonl"), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=0.02)
    again = read(tmp_path / "two/rl/metrics.jsonl")
    assert again[0]["mean_reward"] == pytest.approx(rl[0]["mean_reward"], abs=0.1)
    assert mean(again[-5:], "mean_reward") > mean(again[:5], "mean_reward") + 0.05


def test_wrong_starts_give_a_short_error(tmp_path: Path) -> None:
    alone = train("config_fsdp.py", "--output-dir", str(tmp_path))
    assert alone.returncode == 2 and "Traceback" not in alone.stderr
    assert "name 1 in gpu_ranks, or run torchrun --nproc-per-node=2" in alone.stderr
    missing = train("nothing.py")
    assert missing.returncode == 2 and "nothing.py is not a file" in missing.stderr
