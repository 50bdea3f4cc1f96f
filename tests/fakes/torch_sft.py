"""SFT with transformers and torch alone, an oracle for the `sft` command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.sft.train import train
from rollouts.training.metrics import load_jsonl

NUM_STEPS, LR, MAX_NORM = 10, 1e-3, 0.5
FACTORS = [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
"""Of the learning rate, by step: two steps of warmup, four of decay."""
FIRST_LOSS, FIRST_NORM, LATER = 1e-5, 1e-4, 1e-3
"""Largest differences: loss and relative gradient norm of the first step, loss of the later ones."""


def run_sft(model_dir: Path, rows: Path, output_dir: Path, *, lr: float = LR, **data: Any) -> list[dict[str, Any]]:
    """Ten steps of the `sft` command over rows in file order; returns the metrics of the steps."""
    micro_bs = data.pop("micro_bs", 1)
    config = {
        "model": {"name": str(model_dir), "dtype": "float32"},
        "data": {"name": str(rows), "shuffle": False, **data},
        "optim": {"lr": lr, "weight_decay": 0.1, "max_norm": MAX_NORM, "betas2": 0.95},
        "scheduler": {"type": "linear", "warmup_steps": 2, "decay_steps": 4},
        "micro_bs": micro_bs,
        "max_steps": NUM_STEPS,
        "output_dir": str(output_dir),
        "log": {"file": False},
    }
    assert train(SFTConfig.model_validate(config)) == 0
    return [row for row in load_jsonl(output_dir / "metrics.jsonl") if "loss/mean" in row]


def run_torch(
    model_dir: Path, rows: Path, batch_sizes: Iterable[int], lr: float = LR
) -> Iterator[tuple[float, float, int]]:
    """Loss, gradient norm and number of tokens of each step, over rows in file order in padded batches."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None  # torch drops the gradient of this row, which may be an end token
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (*FACTORS, 0)[step])
    examples = iter([encode(json.loads(line), tokenizer) for line in rows.read_text().splitlines()])
    for size in batch_sizes:
        batch = [next(examples) for _ in range(size)]
        inputs = pad([tokens for tokens, _ in batch], 0)
        mask = pad([[1] * len(tokens) for tokens, _ in batch], 0)
        labels = pad([labels for _, labels in batch], -100)
        loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item(), int(mask.sum())


def encode(row: dict[str, str], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens and labels of a row with `prompt` and `completion`; what follows the last end token is not trained."""
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokens[: len(prompt)] == prompt
    while tokens[-1] != tokenizer.eos_token_id:
        tokens.pop()
    return tokens, [-100] * len(prompt) + tokens[len(prompt) :]


def pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """[rows, longest] with `value` at the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def check_parity(model_dir: Path, rows: Path, output_dir: Path, *, lr: float = LR, **data: Any) -> None:
    """Run both, print the differences with their thresholds, and check them."""
    ours = run_sft(model_dir, rows, output_dir, lr=lr, **data)
    theirs = list(run_torch(model_dir, rows, [row["batch/samples"] for row in ours], lr))
    assert len(ours) == len(theirs) == NUM_STEPS
    assert [row["batch/tokens"] for row in ours] == [num_tokens for _, _, num_tokens in theirs]
    assert [row["optim/lr"] for row in ours] == [lr * factor for factor in FACTORS]
    assert max(norm for _, norm, _ in theirs) > MAX_NORM, "clipping is part of the comparison"
    losses = [abs(row["loss/mean"] - loss) for row, (loss, _, _) in zip(ours, theirs, strict=True)]
    norms = [abs(row["optim/grad_norm"] / norm - 1) for row, (_, norm, _) in zip(ours, theirs, strict=True)]
    print(
        f"sft against torch: loss {theirs[0][0]:.4f} -> {theirs[-1][0]:.4f}; differences: first loss {losses[0]:.1e} "
        f"(at most {FIRST_LOSS}), first gradient norm {norms[0]:.1e} ({FIRST_NORM}), loss of ten steps "
        f"{max(losses):.1e} ({LATER})"
    )
    assert losses[0] <= FIRST_LOSS and norms[0] <= FIRST_NORM and max(losses) <= LATER
