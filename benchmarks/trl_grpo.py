"""The peer of bench_grpo.py: TRL's GRPOTrainer on the demo's task, a line for every step.

Runs in an environment of its own, without this project's packages: `python trl_grpo.py task.json`. It answers with the
mean reward of every batch, CPU seconds and peak memory of its process so far, and stops when the reward is reached.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import torch
import transformers
import trl

datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class Report(transformers.TrainerCallback):
    """A line for every step; ends the training when the last `window` rewards have the wanted mean."""

    def __init__(self, target: float, window: int) -> None:
        self.target, self.window = target, window
        self.rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reply({"start": time.process_time()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self.rewards.append(float(logs["reward"]))
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        reply({"step": state.global_step, "reward": self.rewards[-1], "cpu": time.process_time(), "peak_mb": peak_mb})
        last = self.rewards[-self.window :]
        if len(last) == self.window and sum(last) / self.window >= self.target:
            control.should_training_stop = True


def reply(row: dict[str, Any]) -> None:
    """One line of JSON to the parent, which reads the descriptor that print no longer reaches."""
    os.write(OUT, json.dumps(row).encode() + b"\n")


def main() -> None:
    """Train until the reward is reached or the steps are spent."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task["model_dir"])

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in completion_ids]
        found = [ANSWER.search(text) for text in texts]
        return [
            SequenceMatcher(None, match.group(1).strip() if match else "", expected, autojunk=False).ratio()
            for match, expected in zip(found, answer, strict=True)
        ]

    config = trl.GRPOConfig(
        output_dir=task["output_dir"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=task["batch_size"],
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=task["group_size"],
        max_completion_length=task["max_tokens"],
        temperature=1.0,
        beta=0.0,
        max_steps=task["max_steps"],
        learning_rate=task["lr"],
        warmup_steps=task["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=task["max_norm"],
        optim="adamw_torch_fused",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=task["seed"],
    )
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": text[::-1]} for text in task["texts"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task["model_dir"], dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Report(task["target"], task["window"])],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    OUT = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    main()
