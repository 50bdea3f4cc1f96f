"""Where the RL trainer's batches come from: the orchestrator, or a random number generator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prime_rl.trainer.config import FakeDataConfig, LossConfig, TrainConfig
from prime_rl.transport.wires import build_receiver
from rollouts.training.types import Sample, Status

ROLLOUTS_DIR = "rollouts"


class Batches(Protocol):
    """A source of training batches."""

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """The batch that trains version `step - 1` into version `step`; waits until it is there."""


@dataclass(frozen=True)
class FakeBatches:
    """Groups of random samples, a pure function of (seed, step)."""

    config: FakeDataConfig
    seq_len: int
    vocab_size: int
    seed: int

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """The batch of `step`, at once."""
        rng = random.Random(f"{self.seed}:{step}")
        samples: list[Sample] = []
        while len(samples) < self.config.batch_size:
            prompt = [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, self.seq_len // 2))]
            size = min(self.config.group_size, self.config.batch_size - len(samples))
            samples += self._group(rng, prompt, size, group_index=len(samples) // self.config.group_size)
        return samples

    def _group(self, rng: random.Random, prompt: list[int], size: int, group_index: int) -> list[Sample]:
        rewards = [rng.random() for _ in range(size)]
        mean = sum(rewards) / size
        samples = []
        for index, reward in enumerate(rewards):
            num_new = rng.randint(1, self.seq_len - len(prompt))
            before = [0.0] * len(prompt)
            samples.append(
                Sample(
                    prompt="",
                    tokens=prompt + [rng.randrange(self.vocab_size) for _ in range(num_new)],
                    loss_mask=before + [1.0] * num_new,
                    inference_logprobs=before + [-rng.expovariate(1.0) for _ in range(num_new)],
                    advantages=before + [reward - mean] * num_new,
                    reward=reward,
                    group_index=group_index,
                    index=index,
                    status=Status.COMPLETED,
                )
            )
        return samples


def build_batches(config: TrainConfig, vocab_size: int) -> Batches:
    """The batches of a run: fake ones when `data.fake` asks for them, else what the orchestrator publishes."""
    if config.data.fake is not None:
        return FakeBatches(config.data.fake, config.model.seq_len, vocab_size, config.seed)
    wire = config.transport
    return build_receiver(wire.type, config.output_dir / ROLLOUTS_DIR, wire.host, wire.port)


def apply_anchors(samples: Sequence[Sample]) -> list[Sample]:
    """The batch with its anchors weighed and without their rewards."""
    from rollouts.training.rl_losses import anchor_samples

    return [anchor_samples([sample], sample.anchor)[0] if sample.anchor else sample for sample in samples]


def check_batch(samples: Sequence[Sample], loss: LossConfig, vocab_size: int) -> None:
    """Raise `ValueError` for a batch that cannot be trained on as configured."""
    if not samples:
        raise ValueError("the batch holds no samples")
    for i, sample in enumerate(samples):
        if sample.inference_logprobs is None or sample.advantages is None:
            lacking = "inference_logprobs" if sample.inference_logprobs is None else "advantages"
            raise ValueError(f"sample {i} of the batch carries no `{lacking}`, which the policy loss needs")
        if len(sample.loss_mask) != len(sample.tokens):
            raise ValueError(f"sample {i} of the batch has {len(sample.loss_mask)} mask entries, not one per token")
        if min(sample.tokens) < 0 or max(sample.tokens) >= vocab_size:
            raise ValueError(
                f"sample {i} of the batch holds token {max(sample.tokens)}, but the model knows {vocab_size}: "
                "give orchestrator, inference and trainer the same model.name"
            )
    check_teacher(samples, loss)


def check_teacher(samples: Sequence[Sample], loss: LossConfig) -> None:
    """Raise `ValueError` where what the teacher said is not what the loss compares."""
    num_taught = sum(sample.teacher_logprobs is not None for sample in samples)
    need = loss.needs_teacher
    if num_taught and need is None:
        raise ValueError(
            "the batch carries teacher log-probs but loss.teacher_tau is 0: set trainer.loss.teacher_tau above 0, "
            "or run without a teacher"
        )
    num_missing = sum(sample.teacher_logprobs is None and sample.taught for sample in samples)
    if need is not None and num_missing:
        raise ValueError(
            f"loss.{need} is {getattr(loss, need)} but {num_missing} of {len(samples)} samples carry no "
            f"teacher log-probs: set orchestrator.teacher_model, or loss.{need} = 0"
        )
    wanted = loss.distill.top_logprobs if loss.teacher_tau else 0
    for sample in samples:
        if not wanted or sample.teacher_logprobs is None:
            continue
        table = sample.teacher_table
        if table is None and loss.distill.estimator == "auto":
            continue
        if table is None or (wanted == -1) != (not table.ids) or wanted not in (-1, table.k):
            told = "sampled tokens only" if table is None else f"{table.k} tokens of each position"
            raise ValueError(
                f'loss.distill.estimator is "{loss.distill.estimator}" but the teacher told {told}: set '
                f"orchestrator.teacher_model.top_logprobs = {wanted}, or start both by rl"
            )
