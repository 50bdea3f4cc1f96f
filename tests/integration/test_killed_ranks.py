"""Trainers killed at a random step and resumed on one and two ranks, and crashed ranks: real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import Command, Runner, digests, metric_rows, runner, until

from prime_rl.runtime.machine import find_free_port
from prime_rl.trainer.rl.config import FakeDataConfig
from prime_rl.trainer.rl.data import FakeBatches
from prime_rl.transport.batches import FilesystemBatchSender
from rollouts.training.steps import complete_steps, publish_dir, step_path

NUM_STEPS = 8
pytestmark = pytest.mark.timeout(600)  # each command has a deadline of its own
MODEL = ("--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.debug.num-layers", 2)
OPTIM = ("--optim.lr", 1e-2, "--scheduler.type", "linear", "--scheduler.warmup-steps", 2, "--scheduler.decay-steps", 3)
COMMON = (*MODEL, *OPTIM, "--max-steps", NUM_STEPS)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def prepare_rl(out: Path) -> tuple[object, ...]:
    """Recorded batches, and the orchestrator's half of each checkpoint."""
    sender = FilesystemBatchSender(out / "rollouts")
    recorded = FakeBatches(FakeDataConfig(batch_size=5), 32, 320, seed=7)
    for step in range(1, NUM_STEPS + 1):
        sender.send(step, recorded.receive(step))
        publish_dir(step_path(out / "checkpoints", step) / "orchestrator", lambda directory: None)
    return ("--model.seq-len", 32)


def prepare_sft(out: Path) -> tuple[object, ...]:
    """Rows that take more than one epoch."""
    rows = out.parent / "rows.jsonl"
    letters = ["abcdefgh"[i % 8 :] + "xyz"[: i % 3] for i in range(13)]
    rows.write_text("".join(json.dumps({"prompt": s, "completion": s[::-1]}) + "\n" for s in letters))
    return ("--data.name", rows, "--data.seq-len", 32, "--data.batch-size", 3)


def start(run: Runner, kind: str, num_ranks: int, out: Path, *options: object) -> Command:
    prepared = {"trainer": prepare_rl, "sft": prepare_sft}[kind](out)
    ranks = ("--parallel.dp", num_ranks) if num_ranks > 1 else ()
    return run.start(kind, *COMMON, *prepared, *ranks, "--output-dir", out, *options)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param("trainer", 1, marks=pytest.mark.slow),
        ("trainer", 2),
        pytest.param("sft", 1, marks=pytest.mark.slow),
        pytest.param("sft", 2, marks=pytest.mark.slow),
    ],
)
def test_resume_after_kill_is_bit_identical(run: Runner, tmp_path: Path, kind: str, num_ranks: int) -> None:
    """SIGKILL to every process after a random step; checkpoints after every second one."""
    straight = start(run, kind, num_ranks, tmp_path / "straight", "--ckpt.interval", 2)
    assert straight.wait() == 0, straight.out + straight.err
    broken = tmp_path / "broken"
    moment = random.randrange(3, NUM_STEPS - 2)  # after the first checkpoint; later ones may end before they are killed
    first = start(run, kind, num_ranks, broken, "--ckpt.interval", 2)
    until(lambda: moment in logged_steps(broken, kind), f"step {moment}", first)
    kill_all(first)
    assert first.wait() != 0
    again = start(run, kind, num_ranks, broken, "--ckpt.interval", 2, "--ckpt.resume-step", -1)
    assert again.wait() == 0, again.out + again.err
    assert "Resuming after step" in again.out
    last = f"step_{NUM_STEPS}"
    assert digests(broken / "weights" / last) == digests(tmp_path / "straight" / "weights" / last)
    ends = [read_parts(tmp_path / name / "checkpoints" / last / "trainer") for name in ("straight", "broken")]
    assert ends[0] == ends[1], "parameters, moments, random states, counters and position in the data"
    losses = [
        {row["step"]: row["loss/mean"] for row in metric_rows(tmp_path / name, kind, "loss/mean")}
        for name in ("straight", "broken")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == NUM_STEPS
    assert not list((broken / "checkpoints").glob("step_*/.tmp-*")), "what the killed run left unfinished is gone"


def logged_steps(out: Path, kind: str) -> list[int]:
    """Steps that have been reported so far."""
    return [row["step"] for row in metric_rows(out, kind, "loss/mean")] if (out / "metrics.jsonl").exists() else []


def kill_all(command: Command) -> None:
    """End launcher and ranks in no order that a program could make use of."""
    for pid in random.sample(pids := command.pids(), len(pids)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def read_parts(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_killed_rank_ends_the_others_with_a_message(run: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = run.start(
        *("trainer", "@", "configs/debug/rl/train.toml", "--max-steps", 100_000, "--parallel.dp", 2),
        *("--output-dir", out, "--ckpt"),
    )
    until(lambda: complete_steps(out / "weights"), "a first step", command)
    [second] = [pid for pid in command.pids() if rank_of(pid) == "1"]
    os.kill(second, signal.SIGKILL)
    assert command.wait(60) == 1
    assert "trainer_rank1 failed (signal SIGKILL), so the other ranks were stopped" in command.err
    assert "Traceback" not in command.out + command.err
    until(lambda: not command.pids(), "the end of every process")


def rank_of(pid: int) -> str | None:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((entry[5:].decode() for entry in environ if entry.startswith(b"RANK=")), None)


def test_invalid_input_of_many_ranks_is_reported_once(run: Runner, tmp_path: Path) -> None:
    command = run.run(
        *("sft", "--model.name", "tiny-qwen3", "--data.type", "fake", "--parallel.dp", 2, "--output-dir", tmp_path)
    )
    assert command.process.returncode == 2
    assert command.err.count("error: ") == 1 and "model.debug.random_init" in command.err


def test_rl_with_two_trainer_ranks_is_exact(run: Runner, tmp_path: Path) -> None:
    """Engine and every rank agree to the last bit, on versions that two ranks have stepped and published."""
    port = ("--inference.server.port", find_free_port())
    letters = ("rl", "@", "tests/integration/letters.toml", "--max_steps", 3, *port)
    command = run.run_well(*letters, "--trainer.parallel.dp", 2, "--output_dir", tmp_path)
    steps = metric_rows(tmp_path, "trainer", "mismatch_kl/max")
    assert [(row["step"], row["mismatch_kl/min"], row["mismatch_kl/max"]) for row in steps] == [
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
    ]
    assert all(row["optim/grad_norm"] > 0 and row["batch/rank_imbalance"] < 0.2 for row in steps)
    assert {path.name for path in (tmp_path / "checkpoints" / "step_2").iterdir()} == {"trainer", "orchestrator"}
    assert command.pids() == []


def test_torchrun_starts_ranks_too(run: Runner, tmp_path: Path) -> None:
    import subprocess

    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += ["src/prime_rl/trainer/sft/train.py", "@", "configs/debug/sft/train.toml", "--max-steps", "2"]
    done = subprocess.run(
        [sys.executable, *argv, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert complete_steps(tmp_path / "weights") == [2]
    assert [row["step"] for row in metric_rows(tmp_path, "sft", "loss/mean")] == [1, 2]
    assert done.stdout.count("Step 2 |") == 1, "only the first rank logs"
