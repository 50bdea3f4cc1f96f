"""The peer of bench_trainer.py: TRL's own trainers, one optimizer step per line that arrives on standard input.

Runs in an environment of its own, without this project's packages: `python trl_peer.py task.json`.
"""

from __future__ import annotations

import json
import os
import sys
import time
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


class OnCommand(transformers.TrainerCallback):
    """Waits for a line before each step and answers with its seconds, from the batch's assembly to the update."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms
        self.start, self.cpu = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu
        reply({"seconds": seconds, "cpu_seconds": cpu_seconds, "grad_norm": self.norms[-1]})
        self._wait(control)

    def _wait(self, control: Any) -> None:
        if sys.stdin.readline().strip() != "step":
            control.should_training_stop = True
        self.start, self.cpu = time.perf_counter(), time.process_time()


def reply(row: dict[str, Any]) -> None:
    """One line of JSON to the parent, which reads the descriptor that print no longer reaches."""
    os.write(OUT, json.dumps(row).encode() + b"\n")


def build_sft(task: dict[str, Any], options: dict[str, Any]) -> transformers.Trainer:
    """SFTTrainer over the task's tokens."""
    rows = [
        {"input_ids": s["tokens"], "completion_mask": [int(m) for m in s["loss_mask"]], "labels": labels(s)}
        for s in task["samples"]
    ]
    columns = ("input_ids", "labels") if task["packed"] else ("input_ids", "completion_mask")
    data = datasets.Dataset.from_list([{key: row[key] for key in columns} for row in rows])
    packing = {"packing": True, "packing_strategy": "bfd", "max_length": task["seq_len"]} if task["packed"] else {}
    config = trl.SFTConfig(
        **common(task, options),
        **packing,
        **({} if task["packed"] else {"max_length": None, "completion_only_loss": True}),
        dataset_num_proc=None,
    )
    model = load_model(task)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task["model_dir"])
    rank = task["lora_rank"]
    lora = None
    if rank:
        import peft

        lora = peft.LoraConfig(
            r=rank, lora_alpha=2.0 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    return trl.SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora)


def labels(sample: dict[str, Any]) -> list[int]:
    """Tokens where there is loss, -100 elsewhere."""
    return [t if m else -100 for t, m in zip(sample["tokens"], sample["loss_mask"], strict=True)]


def build_rl(task: dict[str, Any], options: dict[str, Any]) -> transformers.Trainer:
    """GRPOTrainer that finds its completions already generated and scored."""
    rows = task["samples"]
    group = task["group_size"]
    accumulation = len(rows) // options["batch"]

    class Given(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return given(rows)

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(task["model_dir"])
    config = trl.GRPOConfig(
        **common(task, options),
        num_generations=group,
        steps_per_generation=accumulation,
        max_completion_length=task["seq_len"],
        beta=0.0,
        loss_type="dapo",
    )
    data = datasets.Dataset.from_list([{"prompt": "a"}] * (len(rows) // group))
    return Given(
        model=load_model(task),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )


def given(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right, as GRPOTrainer lays them out."""
    starts = [s["loss_mask"].index(1.0) for s in rows]
    prompts = [s["tokens"][:k] for s, k in zip(rows, starts, strict=True)]
    answers = [s["tokens"][k:] for s, k in zip(rows, starts, strict=True)]
    old = [s["inference_logprobs"][k:] for s, k in zip(rows, starts, strict=True)]
    left, right = max(map(len, prompts)), max(map(len, answers))

    def pad(values: list[list[float]], width: int, on_left: bool, dtype: torch.dtype) -> torch.Tensor:
        fill = [[0] * (width - len(v)) for v in values]
        rows = [f + list(v) if on_left else list(v) + f for v, f in zip(values, fill, strict=True)]
        return torch.tensor(rows, dtype=dtype)

    mask = pad([[1] * len(a) for a in answers], right, False, torch.int64)
    return {
        "prompt_ids": pad(prompts, left, True, torch.int64),
        "prompt_mask": pad([[1] * len(p) for p in prompts], left, True, torch.int64),
        "completion_ids": pad(answers, right, False, torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor([s["advantage"] for s in rows]),
        "old_per_token_logps": pad(old, right, False, torch.float32),
        "num_items_in_batch": mask.sum(),
    }


def common(task: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The settings that both sides share: AdamW without decay, clipping at 1, no logging, no recomputation."""
    return {
        "output_dir": task["output_dir"],
        "use_cpu": task["device"] == "cpu",
        "bf16": task["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": options["batch"],
        "gradient_accumulation_steps": options["num_rows"] // options["batch"],
        "max_steps": 1_000_000,
        "learning_rate": task["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        **({"train_sampling_strategy": "group_by_length"} if options.get("by_length") else {}),
    }


def load_model(task: dict[str, Any]) -> transformers.PreTrainedModel:
    """The task's model, with transformers' fused attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        task["model_dir"], dtype=torch.float32, attn_implementation="sdpa"
    )


def train_plainly(task: dict[str, Any]) -> None:
    """A torch loop over one row, without TRL; steps on command."""
    model = load_model(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"], weight_decay=0.0, fused=True)
    [sample] = task["samples"]
    ids, wanted = torch.tensor([sample["tokens"]]), torch.tensor([labels(sample)])
    model.train()
    while sys.stdin.readline().strip() == "step":
        start, cpu = time.perf_counter(), time.process_time()
        with torch.autocast(task["device"], dtype=torch.bfloat16, enabled=task["dtype"] == "bfloat16"):
            loss = model(input_ids=ids, labels=wanted).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        reply({"seconds": seconds, "cpu_seconds": cpu_seconds, "grad_norm": float(norm)})


def main() -> None:
    """Build a trainer for each line of options, then step it on command."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(task["threads"])
    reply({"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__})
    for line in sys.stdin:
        options = json.loads(line)
        if options.get("quit"):
            return
        if task["kind"] == "plain":
            reply({"rows": 1})
            train_plainly(task)
            continue
        trainer = (build_sft if task["kind"] == "sft" else build_rl)(task, options)
        norms: list[float] = []
        clip = trainer.accelerator.clip_grad_norm_

        def record(*args: Any, clip: Any = clip, norms: list[float] = norms, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            norms.append(float(norm))
            return norm

        trainer.accelerator.clip_grad_norm_ = record
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(OnCommand(norms))
        reply({"rows": len(trainer.train_dataset)})
        trainer.train()


if __name__ == "__main__":
    OUT = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    main()
