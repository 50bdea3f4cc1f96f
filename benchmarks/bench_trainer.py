"""Training steps, measured against TRL's in one run: same model, tokens, number format, threads and optimizer.

    python benchmarks/bench_trainer.py [--models tiny 3M 25M smollm2] [--dtypes float32 bfloat16] [--seq-len 256]

For every model: a step of SFT over padded rows, of SFT over packed rows, with and without LoRA, and of RL over given
completions (what GRPOTrainer does after generation), ours with its default settings, so RL with exact attention in
float32; and of SFT over one row, against a plain torch loop over transformers' model. In bfloat16 the peer uses
autocast over float32 weights, and ours rounds its weights too. Both sides are real trainers in processes of their own
that step in turn, each with the fastest of several micro-batch sizes; both must report the same gradient norm, or the
comparison fails. TRL is installed into an environment of its own, `.bench/trl`. Prints tokens of real samples per
CPU-second with the threshold, writes `.bench/results/trainer.json`, and exits with 1 when a threshold is missed. CPU-
seconds of one thread are wall seconds on an idle machine, and comparable on a shared one too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from models import SHAPES, write_model  # noqa: E402
from results import Row, describe_machine, finish  # noqa: E402

PEER = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "peft==0.21.2")
MUST = {"float32": 1.5, "bfloat16": 2.0}
AIM = 3.0
LORA_RANK = 16
SEQ_LEN = 256
GROUP_SIZE = 4
LR = 1e-5
NUM_SAMPLES = {"tiny": 64, "3M": 32, "25M": 8}
"""Samples of a step; 8 of other models."""
TASKS = {
    "sft, padded rows": ("sft", False),
    "sft, packed rows": ("sft", True),
    "lora, packed rows": ("lora", True),
    "rl, given completions": ("rl", False),
    "sft, one row": ("plain", False),
}
PLAIN_MUST = 1.1
"""Threshold against a plain torch loop over one row of twice the sequence length, where nothing can be packed."""
OURS = tuple({"micro_tokens": n} for n in (1024, 4096))


@dataclass(frozen=True)
class Result:
    """Tokens per CPU-second of one task, medians over the repeats; `ratios` are of adjacent steps."""

    model: str
    task: str
    dtype: str
    tokens: int
    ours: float
    peer: float
    ratio: float
    ratios: list[float]
    wall_ratio: float
    load: float
    ours_options: dict[str, Any]
    peer_options: dict[str, Any]
    grad_norms: tuple[float, float]

    @property
    def ok(self) -> bool:
        """Whether the threshold holds."""
        return self.ratio >= self.threshold

    @property
    def threshold(self) -> float:
        """Least ratio."""
        return PLAIN_MUST if TASKS[self.task][0] == "plain" else MUST[self.dtype]


class Worker:
    """A process that takes steps on command."""

    def __init__(self, argv: list[str], threads: int, log: Path) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONPATH")
        environment = {k: v for k, v in os.environ.items() if k not in names}
        environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.log = log
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended early:\n{self.log.read_text()[-3000:]}")
        row: dict[str, Any] = json.loads(line)
        return row

    def send(self, command: str | dict[str, Any]) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write((command if isinstance(command, str) else json.dumps(command)) + "\n")
        self.process.stdin.flush()
        return self._read()

    def stop_trainer(self) -> None:
        """End the current trainer, so that another can be built."""
        assert self.process.stdin is not None
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def build_task(
    name: str, kind: str, packed: bool, dtype: str, arguments: argparse.Namespace, out: Path
) -> dict[str, Any]:
    """The samples and settings of one comparison; for RL with the model's own log-probs, so that ratios begin at 1."""
    rng, seq_len = random.Random(0), arguments.seq_len
    samples = []
    for i in range(NUM_SAMPLES.get(name, 8)):
        if i % GROUP_SIZE == 0:
            prompt = [rng.randrange(300) for _ in range(rng.randint(8, 32))]
        typical = rng.lognormvariate(3.9, 0.7) * seq_len / SEQ_LEN
        length = min(seq_len - len(prompt), max(4, round(typical)))
        answer = [rng.randrange(300) for _ in range(length)]
        samples.append(
            {
                "tokens": prompt + answer,
                "loss_mask": [0.0] * len(prompt) + [1.0] * len(answer),
                "advantage": rng.choice([-1.0, -0.5, 0.5, 1.0]),
            }
        )
    if kind == "plain":
        seq_len *= 2
        tokens = [rng.randrange(300) for _ in range(seq_len)]
        samples = [{"tokens": tokens, "loss_mask": [0.0] + [1.0] * (seq_len - 1), "advantage": 1.0}]
    return {
        "kind": "sft" if kind == "lora" else kind,
        "lora_rank": LORA_RANK if kind == "lora" else None,
        "packed": packed,
        "model_dir": str(write_model(name, out / name)),
        "output_dir": str(out / "scratch"),
        "samples": samples,
        "seq_len": seq_len,
        "group_size": GROUP_SIZE,
        "lr": LR,
        "device": "cpu",
        "dtype": dtype,
        "threads": arguments.threads,
    }


def run_worker(task_path: Path) -> None:
    """Our side: the trainer's own packing, backend, losses and optimizer, one step per line."""
    import torch

    from prime_rl.trainer.backend import build_backend
    from prime_rl.trainer.config import SFTConfig, TrainConfig
    from prime_rl.trainer.rl.loss import build_loss
    from rollouts.training.batching import pack_samples
    from rollouts.training.rl_losses import nll_loss
    from rollouts.training.types import Sample

    task = json.loads(task_path.read_text())
    samples = [
        Sample(
            prompt="",
            tokens=s["tokens"],
            loss_mask=s["loss_mask"],
            advantages=[s["advantage"]] * len(s["tokens"]),
            inference_logprobs=s.get("inference_logprobs") or [0.0] * len(s["tokens"]),
        )
        for s in task["samples"]
    ]
    answer({"torch": torch.__version__})
    for line in sys.stdin:
        options = json.loads(line)
        model = {"name": task["model_dir"], "dtype": task["dtype"], "device": task["device"]}
        if task["lora_rank"]:
            model["lora"] = {"rank": task["lora_rank"], "alpha": 2.0 * task["lora_rank"]}
        settings = {"model": model, "optim": {"lr": task["lr"], "weight_decay": 0.0}, "output_dir": task["output_dir"]}
        config = (TrainConfig if task["kind"] == "rl" else SFTConfig).model_validate(settings)
        backend = build_backend(config)
        torch.set_num_threads(task["threads"])
        loss = nll_loss if isinstance(config, SFTConfig) else build_loss(config.loss, task["seq_len"])
        rows = max(1, options["micro_tokens"] // task["seq_len"])

        def pack(rows: int = rows, backend: Any = backend) -> Any:
            cost, sharing = backend.quadratic_cost, backend.shares_prefixes
            [micros] = pack_samples(samples, task["seq_len"], rows=rows, quadratic_cost=cost, share_prefixes=sharing)
            return micros

        if options.get("logprobs"):
            answer({"inference_logprobs": compute_logprobs(backend, samples, pack())})
            continue
        answer({"rows": len(samples)})
        while sys.stdin.readline().strip() == "step":
            start, cpu = time.perf_counter(), time.process_time()
            stats = backend.forward_backward(pack(), loss)
            report = backend.optim_step(stats)
            stats.summary()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
            answer({"seconds": seconds, "cpu_seconds": cpu_seconds, "grad_norm": report.grad_norm})


def compute_logprobs(backend: Any, samples: list[Any], micros: list[Any]) -> list[list[float]]:
    """The initial model's log-prob of every loss token, 0 elsewhere."""
    import torch

    out = [[0.0] * len(sample.tokens) for sample in samples]
    with torch.no_grad():
        for micro in micros:
            values = backend.compute_inputs(micro.to_tensors()).trainer_logprobs.tolist()
            for index in micro.sample_ids:
                for t, mask in enumerate(samples[index].loss_mask):
                    if mask:
                        out[index][t] = values.pop(0)
    return out


def answer(row: dict[str, Any]) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(row), flush=True)


def compare(
    name: str, task_name: str, dtype: str, arguments: argparse.Namespace, out: Path, peer_python: Path
) -> Result:
    """Find the fastest options of both sides, then let them step in turn."""
    kind, packed = TASKS[task_name]
    task = build_task(name, kind, packed, dtype, arguments, out)
    path, slug = out / "task.json", f"{name}_{kind}_{'packed' if packed else 'rows'}"
    path.write_text(json.dumps(task))
    me = [sys.executable, str(Path(__file__)), "--worker", str(path)]
    if kind == "rl":
        worker = Worker(me, arguments.threads, out / f"{slug}_logprobs.log")
        logprobs = worker.send({"micro_tokens": 1024, "logprobs": True})["inference_logprobs"]
        worker.close()
        for sample, values in zip(task["samples"], logprobs, strict=True):
            sample["inference_logprobs"] = values
        path.write_text(json.dumps(task))
    ours = Worker(me, arguments.threads, out / f"{slug}_ours.log")
    peer_argv = [str(peer_python), str(ROOT / "benchmarks" / "trl_peer.py"), str(path)]
    peer = Worker(peer_argv, arguments.threads, out / f"{slug}_trl.log")
    num = count_packed_rows(task) if packed else len(task["samples"])
    # Only divisors: a step is then exactly one epoch, whatever the micro-batch.
    sizes = [b for b in (range(1, num + 1) if packed else (8, 16, num)) if num % b == 0]
    peer_options: list[dict[str, Any]] = [{"batch": b, "num_rows": num} for b in sizes]
    if kind == "sft" and not packed:
        peer_options += [o | {"by_length": True} for o in peer_options if o["batch"] < num]
    best = fastest(ours, OURS)
    peer_best = fastest(peer, peer_options)
    ours.send(best)
    found = peer.send(peer_best)["rows"]
    assert kind == "rl" or found == num, f"the peer trains on {found} rows, expected {num}"
    tokens = sum(len(s["tokens"]) for s in task["samples"])
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for i in range(arguments.repeats + 1):
        order = (ours, peer) if i % 2 else (peer, ours)
        answers = {id(worker): worker.send("step") for worker in order}
        rows.append((answers[id(ours)], answers[id(peer)]))
    for worker in (ours, peer):
        worker.close()
    mine, theirs = ([row[side]["cpu_seconds"] for row in rows[1:]] for side in (0, 1))
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    wall = [b["seconds"] / a["seconds"] for a, b in rows[1:]]
    return Result(
        model=name,
        task=task_name,
        dtype=dtype,
        tokens=tokens,
        ours=tokens / statistics.median(mine),
        peer=tokens / statistics.median(theirs),
        ratio=statistics.median(ratios),
        ratios=ratios,
        wall_ratio=statistics.median(wall),
        load=os.getloadavg()[0],
        ours_options=best,
        peer_options=peer_best,
        grad_norms=(rows[0][0]["grad_norm"], rows[0][1]["grad_norm"]),
    )


def check_norms(result: Result, results: Sequence[Result]) -> str:
    """What is wrong with the norms of the first gradients: both sides must do the same work; empty if nothing is.

    In bfloat16 both are compared with ours in float32, if that was measured. In RL ours is .4 % from it, the peer 4.5 %
    and, with AMX, 6.4 %.
    """
    exact = [r for r in results if (r.model, r.task, r.dtype) == (result.model, result.task, "float32")]
    reference = exact[0].grad_norms[0] if exact else result.grad_norms[1]
    if "lora" in result.task:  # both draw their own adapter
        limits = (0.1, 0.1)
    elif result.dtype == "float32":
        limits = (2e-3, 2e-3)
    else:
        limits = (0.02 if exact else 0.1, 0.1)
    if all(abs(x - reference) <= limit * reference for x, limit in zip(result.grad_norms, limits, strict=True)):
        return ""
    norms = f"ours {result.grad_norms[0]:.4g}, TRL's {result.grad_norms[1]:.4g}, reference {reference:.4g}"
    return f"{result.model}, {result.task}, {result.dtype}: gradient norms differ: {norms}"


def count_packed_rows(task: dict[str, Any]) -> int:
    """Number of rows after best-fit decreasing packing, the peer's method."""
    rows: list[int] = []
    for n in sorted((len(s["tokens"]) for s in task["samples"]), reverse=True):
        fits = [i for i, used in enumerate(rows) if used + n <= task["seq_len"]]
        if fits:
            rows[max(fits, key=lambda i: rows[i])] += n
        else:
            rows.append(n)
    return len(rows)


def fastest(worker: Worker, candidates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The options whose second step costs the least CPU time."""
    seconds = []
    for options in candidates:
        worker.send(options)
        worker.send("step")
        seconds.append(worker.send("step")["cpu_seconds"])
        worker.stop_trainer()
    return candidates[seconds.index(min(seconds))]


def prepare_peer(root: Path) -> Path:
    """An environment with TRL, made once; returns its python."""
    python = root / "bin" / "python"
    if not (root / "installed").exists():
        print(f"==> installing {' '.join(PEER)} into {root} (minutes)", flush=True)
        venv.create(root, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEER], check=True)
        (root / "installed").write_text("\n".join(PEER))
    return python


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Training steps against TRL's, in one run.")
    parser.add_argument(
        "--models", nargs="+", default=list(NUM_SAMPLES), help=f"of {', '.join(SHAPES)}, model directories, smollm2"
    )
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN, help="tokens of a packed row; samples scale with it")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(MUST))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-env", type=Path, default=ROOT / ".bench" / "trl", help="environment with TRL")
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    parser.add_argument("--output", type=Path, default=None, help="default: .bench/results/trainer.json")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        run_worker(arguments.worker)
        return 0
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_trainer_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    peer_python = prepare_peer(arguments.peer_env)
    machine = describe_machine(arguments.threads) | {"packages": PEER, "seq_len": arguments.seq_len}
    results: list[Result] = []
    wrong: list[str] = []
    for name in arguments.models:
        for task_name, dtype in itertools.product(arguments.tasks, arguments.dtypes):
            result = compare(name, task_name, dtype, arguments, out, peer_python)
            results.append(result)
            if message := check_norms(result, results):
                wrong.append(message)
            speed = f"{result.ratio:.2f} of TRL, {result.ours:,.0f} tokens/CPU-s"
            print(f"{name}: {task_name}, {dtype}: {speed}", flush=True)
    rows = [
        Row(
            f"{result.model}: {result.task}" + (f", {result.dtype}" if result.dtype != "float32" else ""),
            result.ratio,
            ">=",
            result.threshold,
            f"{result.ours:,.0f} tokens/CPU-s, TRL {result.peer:,.0f}; {min(result.ratios):.2f} - "
            f"{max(result.ratios):.2f}, by wall {result.wall_ratio:.2f}, aim {AIM}",
        )
        for result in results
    ]
    code = finish("trainer", rows, machine, [asdict(result) for result in results], arguments.output)
    if wrong:
        raise SystemExit("\n".join(wrong))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
