"""The same training with transformers and torch alone, beside the curves of a run of `sft`.

    python examples/smollm2/gsm8k_sft/torch_loop.py outputs/examples/gsm8k_sft/seed_0/sft [--plot curve.svg]

Rows, their order and the learning rates are those of the run; model, batches (padded), loss, clipping and optimizer are
transformers' and torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.sft.data import Position, build_sft_batches, build_tokenizer
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import load_jsonl
from rollouts.training.types import Sample

Curve = list[tuple[int, float]]


def main() -> None:
    """Train, print the largest differences, and draw both curves with `--plot`."""
    parser = argparse.ArgumentParser(description="Repeat a run of sft with transformers and torch alone.")
    parser.add_argument("run_dir", type=Path, help="output directory of the run")
    parser.add_argument("--plot", type=Path, help="file for the curves of both")
    options = parser.parse_args()
    config, _ = parse_argv(SFTConfig, ["@", str(options.run_dir / "configs" / "sft.toml")], "sft", environ={})
    rows = list(load_jsonl(options.run_dir / "metrics.jsonl"))
    ours = {name: [(row["step"], row[name]) for row in rows if name in row] for name in ("loss/mean", "val_loss/mean")}
    learning_rates = [row["optim/lr"] for row in rows if "optim/lr" in row]
    theirs = train(config, learning_rates, [step for step, _ in ours["val_loss/mean"]])
    for name, curve in ours.items():
        pairs = zip(curve, theirs[name], strict=True)
        difference = max(abs(a - b) for (_, a), (_, b) in pairs)
        sys.stdout.write(f"{name}: {curve[0][1]:.4f} -> {curve[-1][1]:.4f}, largest difference {difference:.1e}\n")
    if options.plot:
        save_curves({"sft": ours, "torch": theirs}, options.plot)


def train(config: SFTConfig, learning_rates: Sequence[float], val_steps: Sequence[int]) -> dict[str, Curve]:
    """Training and held-out loss by step."""
    tokenizer, adam = build_tokenizer(config), config.optim
    assert tokenizer is not None and adam.type == "adamw"
    model = AutoModelForCausalLM.from_pretrained(resolve_model_dir(config.model.name), dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # torch drops the gradient of this row, here the end token's
    betas = (adam.betas1, adam.betas2)
    optimizer = torch.optim.AdamW(model.parameters(), adam.lr, betas, weight_decay=adam.weight_decay)
    batches, position = build_sft_batches(config, model.config.vocab_size, tokenizer), Position()
    curves: dict[str, Curve] = {"loss/mean": [], "val_loss/mean": []}

    def evaluate(step: int) -> None:
        if step in val_steps:
            with torch.no_grad():
                curves["val_loss/mean"].append((step, compute_loss(model, batches.held_out, config.micro_bs)))

    evaluate(0)
    for step, lr in enumerate(learning_rates, start=1):
        optimizer.param_groups[0]["lr"] = lr
        samples, position = batches.take(position)
        optimizer.zero_grad()
        loss = compute_loss(model, samples, config.micro_bs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), adam.max_norm or torch.inf)
        optimizer.step()
        curves["loss/mean"].append((step, loss))
        sys.stderr.write(f"step {step}: loss {loss:.4f}\n")
        evaluate(step)
    return curves


def compute_loss(model: Any, samples: Sequence[Sample], num_rows: int) -> float:
    """Mean loss over the trained tokens, from padded batches of `num_rows`; adds its gradient where enabled."""
    num_trained = sum(sum(sample.loss_mask) for sample in samples)
    total = 0.0
    for i in range(0, len(samples), num_rows):
        part = samples[i : i + num_rows]
        width = max(len(sample.tokens) for sample in part)
        tokens = torch.zeros(len(part), width, dtype=torch.long)
        labels, attention = torch.full_like(tokens, -100), torch.zeros_like(tokens)
        for row, sample in enumerate(part):
            n = len(sample.tokens)
            tokens[row, :n], attention[row, :n] = torch.tensor(sample.tokens), 1
            labels[row, :n] = torch.where(torch.tensor(sample.loss_mask) > 0, tokens[row, :n], -100)
        mean = model(input_ids=tokens, attention_mask=attention, labels=labels).loss
        loss = mean * ((labels[:, 1:] != -100).sum() / num_trained)
        if torch.is_grad_enabled():
            loss.backward()
        total += loss.item()
    return total


def save_curves(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """A panel for the training loss and one for the held-out loss."""
    from matplotlib.figure import Figure

    figure = Figure((8.8, 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("loss/mean", "val_loss/mean"), strict=True):
        for (label, metrics), style in zip(curves.items(), ("-", "--"), strict=True):
            axes.plot(*zip(*metrics[name], strict=True), style, label=label)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
