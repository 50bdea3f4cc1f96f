"""Our trainer and engine in one process on the demo's task, a line for every step: our side of bench_grpo.py.

`python grpo_loop.py task.json` answers as `trl_grpo.py` does: the mean reward of every batch and the CPU seconds of its
process so far; it stops when the reward is reached. The parts are those that `rl` runs in processes of their own; here
they take turns, and weights go from one to the other in memory.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.utils.tokenizer import load_tokenizer
from rollouts.training.advantages import compute_group_advantages
from rollouts.training.batching import pack_samples
from rollouts.training.datasets.chat import render_chat
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.types import Sample

SEQ_LEN = 64
ANSWER = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def train(task: dict[str, Any]) -> None:
    """Draw, score, train, hand over; until the reward is reached or the steps are spent."""
    tokenizer = load_tokenizer(task["model_dir"])
    trainer = build_trainer(task)
    loss = build_loss(trainer_config(task).loss, SEQ_LEN)
    size = task["batch_size"]
    engine = EmbeddedEngine(
        load_decoder(Path(task["model_dir"])),
        eos_ids=[tokenizer.eos_token_id],
        max_model_len=SEQ_LEN,
        max_running=size,
        exact=False,
    )
    texts, rewards = draw_texts(task), []
    answer({"start": time.process_time()})
    for step in range(1, task["max_steps"] + 1):
        groups = [
            draw_group(tokenizer, engine, text, step * size + i, task)
            for i, text in enumerate(next(texts) for _ in range(size // task["group_size"]))
        ]
        samples = score(tokenizer, run(engine), groups)
        rewards.append(sum(sample.reward for sample in samples) / size)
        [micros] = pack_samples(samples, SEQ_LEN, rows=size, quadratic_cost=trainer.quadratic_cost)
        trainer.optim_step(trainer.forward_backward(micros, loss))
        engine.load_weights(trainer.publishable(), step)
        answer({"step": step, "reward": rewards[-1], "cpu": time.process_time()})
        last = rewards[-task["window"] :]
        if len(last) == task["window"] and sum(last) / len(last) >= task["target"]:
            return


def trainer_config(task: dict[str, Any]) -> TrainConfig:
    """The settings that both sides have."""
    values = {
        "model": {"name": task["model_dir"], "seq_len": SEQ_LEN, "attn": "sdpa", "device": "cpu"},
        "optim": {"lr": task["lr"], "weight_decay": 0.0, "max_norm": task["max_norm"]},
        "scheduler": {"type": "linear", "warmup_steps": task["warmup_steps"], "decay_steps": 0},
        "loss": {"type": "dapo"},
        "output_dir": task["output_dir"],
        "max_steps": task["max_steps"],
    }
    return TrainConfig.model_validate(values)


def build_trainer(task: dict[str, Any]) -> Backend:
    return build_backend(trainer_config(task))


def draw_texts(task: dict[str, Any]) -> Iterator[str]:
    """Texts in random order, again and again."""
    draw = random.Random(task["seed"])
    while True:
        yield from draw.sample(task["texts"], len(task["texts"]))


def draw_group(tokenizer, engine, text, index, task):
    prompt = render_chat(tokenizer, [{"role": "user", "content": text}])
    requests = [
        GenerationRequest(prompt, SamplingParams(task["max_tokens"], seed=sample_seed(task["seed"], index, i)))
        for i in range(task["group_size"])
    ]
    for request in requests:
        engine.add(request)
    return text, requests


def run(engine: EmbeddedEngine) -> dict[GenerationRequest, Output]:
    """Every completion."""
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return outputs


def score(tokenizer, outputs, groups) -> list[Sample]:
    """Samples with their rewards and advantages."""
    samples = []
    for text, requests in groups:
        found = [outputs[request] for request in requests]
        answers = [ANSWER.search(tokenizer.decode(o.token_ids, skip_special_tokens=False)) for o in found]
        rewards = [
            SequenceMatcher(None, match.group(1).strip() if match else "", text[::-1], autojunk=False).ratio()
            for match in answers
        ]
        advantages = compute_group_advantages(rewards, std=True)
        for output, reward, advantage in zip(found, rewards, advantages, strict=True):
            prompt = output.request.prompt
            num = len(output.token_ids)
            samples.append(
                Sample(
                    prompt="",
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
