"""Our side of bench_grpo.py: the trainer and the engine that `rl` runs in processes of their own, in one process.

`python grpo_peer.py task.json` answers as `trl_grpo.py` does: the mean reward of every batch, CPU seconds and peak
memory of its process so far; it stops when the reward is reached. Weights go from one to the other in memory.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.updates import pack_minibatches, run_updates, split_batch
from rollouts.training.advantages import compute_group_advantages
from rollouts.training.batching import Share, pack_share
from rollouts.training.datasets.chat import render_chat
from rollouts.training.types import Sample

SEQ_LEN = 64
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)
Task = dict[str, Any]


def train(task: Task) -> None:
    """Draw, score, train, hand over; until the reward is reached or the steps are spent."""
    tokenizer = load_tokenizer(task["model_dir"])
    config = build_config(task)
    trainer, loss = build_backend(config), build_loss(config.loss, SEQ_LEN)
    engine = EmbeddedEngine(
        load_decoder(Path(task["model_dir"])),
        eos_ids=[tokenizer.eos_token_id],
        max_model_len=SEQ_LEN,
        max_running=task["batch_size"],
        exact=False,
    )
    requests, rewards = draw_requests(tokenizer, task), []
    answer({"start": time.process_time()})
    for step in range(1, task["max_steps"] + 1):
        groups = [next(requests) for _ in range(task["batch_size"] // task["group_size"])]
        outputs = generate(engine, [request for _, group in groups for request in group])
        samples = [s for text, group in groups for s in score(tokenizer, text, [outputs[request] for request in group])]
        rewards.append(sum(sample.reward for sample in samples) / len(samples))
        parts = split_batch(samples, config.num_minibatches, f"{config.seed}:{step}")
        minibatches, _ = pack_minibatches(samples, parts, partial(pack, trainer))
        run_updates(trainer, minibatches, loss, config.num_epochs)
        engine.load_weights(trainer.export_state_dict(), step)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer({"step": step, "reward": rewards[-1], "cpu": time.process_time(), "peak_mb": peak_mb})
        last = rewards[-task["window"] :]
        if len(last) == task["window"] and sum(last) / len(last) >= task["target"]:
            return


def pack(trainer: Backend, samples: Sequence[Sample]) -> Share:
    """One micro-batch."""
    cost, sharing = trainer.quadratic_cost, trainer.shares_prefixes
    return pack_share(samples, SEQ_LEN, rows=len(samples), quadratic_cost=cost, share_prefixes=sharing)


def build_config(task: Task) -> TrainConfig:
    """The settings that both sides have, and TRL's loss."""
    return TrainConfig.model_validate(
        {
            "model": {"name": task["model_dir"], "seq_len": SEQ_LEN, "attn": "sdpa", "device": "cpu"},
            "optim": {"lr": task["lr"], "weight_decay": 0.0, "max_norm": task["max_norm"]},
            "scheduler": {"type": "linear", "warmup_steps": task["warmup_steps"], "decay_steps": 0},
            "loss": {"type": "dapo"},
            "output_dir": task["output_dir"],
            "max_steps": task["max_steps"],
            "num_minibatches": task.get("num_minibatches", 1),
            "num_epochs": task.get("num_epochs", 1),
        }
    )


def draw_requests(tokenizer: Any, task: Task) -> Iterator[tuple[str, list[GenerationRequest]]]:
    """A text and its group of requests, in random order, again and again."""
    draw = random.Random(task["seed"])
    while True:
        for text in draw.sample(task["texts"], len(task["texts"])):
            prompt = render_chat(tokenizer, [{"role": "user", "content": text}])
            params = [SamplingParams(task["max_tokens"], seed=draw.getrandbits(63)) for _ in range(task["group_size"])]
            yield text, [GenerationRequest(prompt, given) for given in params]


def generate(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> dict[GenerationRequest, Output]:
    """Every completion."""
    for request in requests:
        engine.add(request)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return outputs


def score(tokenizer: Any, text: str, group: Sequence[Output]) -> list[Sample]:
    """Samples of one group with their rewards and advantages."""
    found = [ANSWER.search(tokenizer.decode(output.token_ids, skip_special_tokens=False)) for output in group]
    rewards = [
        SequenceMatcher(None, match.group(1).strip() if match else "", text[::-1], autojunk=False).ratio()
        for match in found
    ]
    samples = []
    for output, reward, advantage in zip(group, rewards, compute_group_advantages(rewards, std=True), strict=True):
        prompt, num = output.request.prompt, len(output.token_ids)
        samples.append(
            Sample(
                prompt=text,
                tokens=[*prompt, *output.token_ids],
                loss_mask=[0.0] * len(prompt) + [1.0] * num,
                inference_logprobs=[0.0] * len(prompt) + output.logprobs,
                advantages=[0.0] * len(prompt) + [advantage] * num,
                reward=reward,
            )
        )
    return samples


def answer(row: dict[str, Any]) -> None:
    """One line of JSON to the parent."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(json.loads(Path(sys.argv[1]).read_text()))
