"""The real commands: `sft`, and `rl` with all its processes, killed and resumed. This process uses no device."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from dev.gpu.context import Context, Measured, measure_error
from dev.gpu.runner import ROOT

from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.process_tree import TOKEN_VARIABLE, kill_run_processes
from prime_rl.trainer.models.registry import read_files
from rollouts.training.metrics import METRICS_FILE, load_jsonl
from rollouts.training.steps import complete_steps, step_path

CACHE_TOKENS = 65536
"""The embedded engine's share of the device's memory, as tokens of its cache."""
MODULES = {"sft": "prime_rl.trainer.sft.train", "rl": "prime_rl.rl"}
SFT, RL = "dev/gpu/sft.toml", "dev/gpu/letters.toml"
SFT_ROWS = ROOT / "examples" / "reverse_text" / "tiny" / "sft.jsonl"


class Command:
    """A running command with its processes."""

    def __init__(self, context: Context, name: str, config: str, out: Path, options: Sequence[object]) -> None:
        self._token = uuid.uuid4().hex
        self._log = context.scratch / f"{self._token}.log"
        argv = [sys.executable, "-m", MODULES[name], "@", config, "--output-dir", str(out), *map(str, options)]
        sections = {"sft": ["model"], "rl": ["trainer.model"]}[name]
        if name == "sft" and context.tiny:
            argv += ["--data.name", str(write_few_rows(context))]
        if name == "rl":
            argv += ["--inference.server.port", str(find_free_port())]
            if "vllm" not in argv:  # vLLM has its own options for device and memory
                argv += ["--inference.cache.max-tokens", str(CACHE_TOKENS)]
                sections.append("inference.model")
        if context.device.type == "cuda":  # fails where "auto" would take the CPU
            argv += [word for section in sections for word in (f"--{section}.device", "cuda")]
        environment = {**os.environ, TOKEN_VARIABLE: self._token}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def wait(self) -> None:
        """Wait for the end; `RuntimeError` with the last line of the output if it fails."""
        if code := self._process.wait():
            lines = self._log.read_text().splitlines()
            print(*lines[-200:], sep="\n", file=sys.stderr)
            problems = [line for line in lines if "rror" in line] or lines
            raise RuntimeError(f"exit code {code}: {problems[-1].strip() if problems else 'no output'}")

    def kill_after_checkpoint(self, out: Path, parts: Sequence[str]) -> int:
        """SIGKILL all processes at the first complete checkpoint; returns its step."""
        while not (steps := complete_steps(out / "checkpoints", parts)) and self._process.poll() is None:
            time.sleep(0.01)
        if self._process.poll() is not None:
            self.wait()
            raise RuntimeError("the command ended before it was killed")
        kill_run_processes(self._token)
        self._process.wait()
        return steps[-1]


def run(context: Context, name: str, config: str, out: Path, *options: object) -> None:
    """Run a command to its end."""
    Command(context, name, config, out, options).wait()


def load_metric(out: Path, name: str) -> dict[int, float]:
    """A metric by step; of a repeated step the last value."""
    return {row["step"]: row[name] for row in load_jsonl(out / METRICS_FILE) if name in row}


def write_few_rows(context: Context) -> Path:
    """The first rows of the SFT data; tokenizing all of them takes longer than tiny runs."""
    path = context.scratch / "rows.jsonl"
    with SFT_ROWS.open() as rows:
        path.write_text("".join(islice(rows, 500)))
    return path


def count_sft_steps(context: Context) -> int:
    """Steps of the SFT runs."""
    return 12 if context.tiny else 100


def run_sft(context: Context) -> Measured:
    """Last loss over the first one."""
    out = context.folder("sft")
    run(context, "sft", SFT, out, "--max-steps", count_sft_steps(context))
    losses = load_metric(out, "loss/mean")
    peak = max(load_metric(out, "perf/peak_memory").values())
    first, last = losses[1], losses[max(losses)]
    return Measured(last / first, f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps, peak {peak:.2f} GiB")


def resume_sft(context: Context) -> Measured:
    """Weights of a run that was killed and resumed, against those of an uninterrupted one."""
    num_steps, whole, out = count_sft_steps(context), context.scratch / "sft", context.folder("sft_resume")
    if complete_steps(whole / "weights")[-1:] != [num_steps]:
        run_sft(context)
    command = Command(context, "sft", SFT, out, ["--max-steps", num_steps])
    killed = command.kill_after_checkpoint(out, ["trainer"])
    run(context, "sft", SFT, out, "--max-steps", num_steps, "--ckpt.resume-step", -1)
    found, expected = (read_files(step_path(root / "weights", num_steps)) for root in (out, whole))
    error = measure_error(list(found.values()), [expected[name] for name in found])
    return Measured(error, f"killed after checkpoint {killed} of {num_steps}{', bitwise equal' if not error else ''}")


def profile_sft(context: Context) -> Measured:
    """Number of files of a trace and of a memory snapshot."""
    out = context.folder("profile")
    options = ["--trace-path", out / "profile", "--memory-profiler-path", out / "profile"]
    run(context, "sft", SFT, out, "--max-steps", 3, *options)
    return Measured(len(list((out / "profile").iterdir())))


def run_rl(context: Context, num_steps: int = 40, options: Sequence[object] = ()) -> Measured:
    """Mean reward of the last quarter of the steps minus that of the first quarter."""
    out = context.folder("rl")
    run(context, "rl", RL, out, "--max-steps", num_steps, "--ckpt.interval", num_steps, *options)
    rewards = list(load_metric(out, "reward/mean").values())
    quarter = max(len(rewards) // 4, 1)
    first, last = statistics.fmean(rewards[:quarter]), statistics.fmean(rewards[-quarter:])
    seconds = statistics.median(load_metric(out, "time/step").values())
    return Measured(
        last - first, f"reward {first:.3f} -> {last:.3f}, {seconds:.2f} s per step, {_describe_mismatch(out)}"
    )


def resume_rl(context: Context) -> Measured:
    """Number of steps after killing all processes at a checkpoint, and resuming."""
    out = context.folder("rl_resume")
    killed = Command(context, "rl", RL, out, []).kill_after_checkpoint(out, ["trainer", "orchestrator"])
    run(context, "rl", RL, out, "--resume", "true")
    steps = load_metric(out, "loss/mean")
    if list(sorted(steps)) != list(range(1, len(steps) + 1)):
        raise RuntimeError(f"metrics of steps {sorted(steps)}")
    return Measured(len(steps), f"killed after checkpoint {killed}, {_describe_mismatch(out)}")


def _describe_mismatch(out: Path) -> str:
    mismatch = list(load_metric(out, "mismatch_kl/mean").values())
    peak = max(load_metric(out, "perf/peak_memory").values(), default=math.nan)
    return f"mismatch_kl {statistics.fmean(mismatch) if mismatch else math.nan:.2g}, trainer peak {peak:.2f} GiB"


def compare_ranks(context: Context) -> Measured:
    """Last loss of two ranks (FSDP over NCCL) against that of one."""
    losses = []
    for num_ranks in (1, 2):
        out = context.folder(f"ranks_{num_ranks}")
        run(context, "sft", SFT, out, "--max-steps", 20, "--parallel.dp", num_ranks)
        losses.append(load_metric(out, "loss/mean")[20])
    return Measured(abs(losses[1] / losses[0] - 1), f"loss {losses[0]:.4f}, {losses[1]:.4f}")
