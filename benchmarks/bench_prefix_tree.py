"""Training on samples that share beginnings: tokens and CPU time of forward and backward, with and without trees.

    python benchmarks/bench_prefix_tree.py [--repeats 3] [--model tiny-qwen3] [--output FILE]

Two batches of random tokens on a model with random weights: rollouts of an agent (20 turns on 8 branches each, one
prompt), and groups of single-turn rollouts. Both sides alternate in one process and one thread; the gradients are
compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from results import ROOT, Row, describe_machine, finish

sys.path.insert(0, str(ROOT / "src"))
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.config import LossConfig
from prime_rl.trainer.rl.loss import build_loss
from rollouts.training.batching import MicroBatch, pack_samples
from rollouts.training.types import Sample

SEQ_LEN, VOCAB = 2048, 300


def build_sample(draw: random.Random, given: list[int], mask: list[float], num_drawn: int) -> Sample:
    """A sample that continues `given`, with one advantage and plausible log-probs."""
    tokens, mask = given + draw.choices(range(VOCAB), k=num_drawn), mask + [1.0] * num_drawn
    n, advantage = len(tokens), draw.gauss(0, 1)
    return Sample(prompt="", tokens=tokens, loss_mask=mask, advantages=[advantage] * n, inference_logprobs=[-5.7] * n)


def make_agents(draw: random.Random, num_rollouts: int = 4) -> list[Sample]:
    """Rollouts of one prompt of 300 tokens: 13 turns in a row and 7 retries of the last ones, 30 + 20 tokens each."""
    samples, prompt = [], draw.choices(range(VOCAB), k=300)
    for _ in range(num_rollouts):
        tokens, mask, starts = list(prompt), [0.0] * len(prompt), []
        for _ in range(12):
            starts.append(list(tokens))
            tokens += draw.choices(range(VOCAB), k=50)
            mask += [1.0] * 20 + [0.0] * 30
        samples.append(build_sample(draw, tokens, mask, 20))
        for number in range(7):
            start = starts[-1 - number % 3]
            samples.append(build_sample(draw, start, [0.0] * len(start), 20))
    return samples


def make_groups(draw: random.Random, num_groups: int = 4, size: int = 8) -> list[Sample]:
    """Groups of rollouts of one prompt: 120 tokens, and 60 drawn ones."""
    prompts = [draw.choices(range(VOCAB), k=120) for _ in range(num_groups)]
    return [build_sample(draw, prompt, [0.0] * 120, 60) for prompt in prompts for _ in range(size)]


def pack(samples: list[Sample], share: bool) -> list[MicroBatch]:
    """The micro-batches of one rank."""
    [micros] = pack_samples(samples, SEQ_LEN, share_prefixes=share)
    return micros


def run_pass(backend: Backend, samples: list[Sample], share: bool) -> tuple[float, torch.Tensor]:
    """CPU seconds of packing, forward and backward, and the gradient."""
    start = time.process_time()
    backend.forward_backward(pack(samples, share), build_loss(LossConfig(), SEQ_LEN))
    seconds = time.process_time() - start
    gradient = torch.cat([p.grad.flatten().clone() for p in backend.parameters.values() if p.grad is not None])
    backend.stepper.optimizer.zero_grad()
    return seconds, gradient


def measure(backend: Backend, name: str, samples: list[Sample], repeats: int, bounds: tuple[float, float]) -> list[Row]:
    """Ratios of tokens and CPU seconds without trees over those with trees, and the difference of the gradients."""
    runs = [[run_pass(backend, samples, share) for share in (True, False)] for _ in range(repeats + 1)][1:]
    shared, alone = (median(run[side][0] for run in runs) for side in (0, 1))
    mine, expected = runs[0][0][1], runs[0][1][1]
    num = sum(len(sample.tokens) for sample in samples)
    micros = pack(samples, True)
    computed, tokens_bound, time_bound = sum(micro.num_computed for micro in micros), *bounds
    detail = f"{num} -> {computed} tokens, {len(pack(samples, False))} -> {len(micros)} micro-batches"
    error = float((mine - expected).norm() / expected.norm())
    return [
        Row(f"{name}: tokens", num / computed, ">=", tokens_bound, detail),
        Row(f"{name}: CPU time", alone / shared, ">=", time_bound, f"{alone:.2f} -> {shared:.2f} s"),
        Row(f"{name}: gradient, relative difference", error, "<=", 1e-5),
    ]


def main() -> int:
    """Measure both batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="tiny-qwen3", help="a model's name or directory")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    machine = describe_machine(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        model = {"name": args.model, "seq_len": SEQ_LEN, "debug": {"random_init": True}}
        backend = build_backend(TrainConfig.model_validate({"model": model, "output_dir": folder}))
        torch.set_num_threads(1)
        draw = random.Random(0)
        rows = [
            *measure(backend, "agents", make_agents(draw), args.repeats, (5.0, 4.0)),
            *measure(backend, "groups", make_groups(draw), args.repeats, (1.5, 1.2)),
        ]
    return finish("prefix_tree", rows, machine, path=args.output)


if __name__ == "__main__":
    sys.exit(main())
