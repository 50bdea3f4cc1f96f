"""`scripts.prime_rl_train` on two ranks equals one rank; killed and resumed, it ends with equal bits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_docs_nanochat import ROOT, save_model

from nanochat.gpt import GPT
from rollouts.training.backends.checkpoint import read_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ARGUMENTS = (
    "--env_id=letters --model_tag=d1 --run=dummy --examples_per_step=4 --num_samples=4 --max_new_tokens=6 "
    "--eval_examples=2 --eval_samples=2 --save_every=1 --matrix_lr=0.02 --embedding_lr=0.004 --unembedding_lr=0.0008 "
    "--init_lr_frac=1"
).split()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.fixture(autouse=True)
def no_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained head is 0, and rounding alone decides which of equal tokens are among the top k: give it values."""
    begin = GPT.init_weights

    def init_weights(self: GPT, seed: int = 0) -> None:
        begin(self, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in self.named_parameters():
            if name == "lm_head.weight" or name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)

    monkeypatch.setattr(GPT, "init_weights", init_weights)


def start(base: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Train the model of `base`, which is made where there is none."""
    if not base.exists():
        save_model(base, "sft", "d1", 2)
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, Path(__file__).parent)))
    environ = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *launcher, "-m", "scripts.prime_rl_train", *(["--"] if launcher else []), *ARGUMENTS]
    return subprocess.Popen([*words, *options], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, text=True)


def step_dir(base: Path, step: int) -> Path:
    return base / "prime_rl_checkpoints" / "d1" / f"step_{step}"


def read_rewards(base: Path) -> list[float]:
    lines = (base / "prime_rl_runs" / "dummy" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["rollout/mean_reward"] for line in lines[1:]]


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert start(one, "--max_steps=3").wait() == 0
    assert start(two, "--max_steps=3", launcher=TORCHRUN).wait() == 0
    assert read_rewards(one) == read_rewards(two) and len(set(read_rewards(one))) > 1
    before = read_tensors(next((one / "chatsft_checkpoints").rglob("model*.pt")))
    alone, together = (read_tensors(step_dir(base, 3) / "model.pt") for base in (one, two))
    for name, start_value in before.items():
        change = (alone[name] - start_value).norm()
        # AdamW's epsilon of 1e-10 makes whole steps of the rounding of gradients near 0. Measured: up to 4e-4 on one
        # processor, 3e-3 on another.
        assert change > 0 and (alone[name] - together[name]).norm() < 1e-2 * change, name


def test_resume_after_kill_is_bit_identical(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert start(straight, "--max_steps=8").wait() == 0
    first = start(broken, "--max_steps=8")
    deadline = time.monotonic() + 300
    while not step_dir(broken, 3).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert step_dir(broken, 3).exists() and not step_dir(broken, 8).exists()
    assert start(broken, "--max_steps=8", "--resume").wait() == 0
    assert digests(step_dir(broken, 8)) == digests(step_dir(straight, 8))
    assert read_rewards(broken)[-1] == read_rewards(straight)[-1]


def digests(directory: Path) -> dict[str, str]:
    """Of weights, moments and counters; the metadata contains the command line, with `--resume`."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "metadata.json"]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
