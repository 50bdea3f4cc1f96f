"""Batch sources of the RL trainer: orchestrator or fake data."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.config import FakeDataConfig, LossConfig
from prime_rl.transport.factory import build_receiver
from rollouts.training.types import Sample, Status, TeacherTable


class Batches(Protocol):
    """A source of training batches."""

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """Block until the batch of `step` is available, which updates version `step - 1` to `step`."""


@dataclass(frozen=True)
class FakeBatches:
    """Groups of random samples, a pure function of (seed, step), with a teacher if `loss` needs one."""

    config: FakeDataConfig
    seq_len: int
    vocab_size: int
    seed: int
    loss: LossConfig = field(default_factory=LossConfig)

    def receive(self, step: int, timeout_s: float | None = None) -> list[Sample]:
        """Return the batch of `step` without waiting."""
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
            num_completion = rng.randint(1, self.seq_len - len(prompt))
            zeros = [0.0] * len(prompt)
            samples.append(
                Sample(
                    prompt="",
                    tokens=prompt + [rng.randrange(self.vocab_size) for _ in range(num_completion)],
                    loss_mask=zeros + [1.0] * num_completion,
                    inference_logprobs=zeros + [-rng.expovariate(1.0) for _ in range(num_completion)],
                    advantages=zeros + [reward - mean] * num_completion,
                    reward=reward,
                    group_index=group_index,
                    index=index,
                    status=Status.COMPLETED,
                )
            )
            if self.loss.needs_teacher is not None:
                self._add_teacher(samples[-1], num_completion)
        return samples

    def _add_teacher(self, sample: Sample, num_completion: int) -> None:
        """Add the log-probs, and the table, of a teacher to which all tokens are equally likely."""
        logprob = -math.log(self.vocab_size)
        sample.teacher_logprobs = [logprob if mask else 0.0 for mask in sample.loss_mask]
        top = self.loss.top_logprobs
        if not top:
            return
        k = self.vocab_size if top == -1 else top
        logprobs = np.full((num_completion, k), logprob, np.float32).tobytes()
        sample.teacher_table = TeacherTable(k, logprobs)
        if top != -1:
            ids = np.arange(num_completion * k, dtype=np.int32) % self.vocab_size
            tail = np.full(num_completion, 1 - k / self.vocab_size, np.float32)
            sample.teacher_table = TeacherTable(k, logprobs, ids.tobytes(), tail.tobytes())


def build_batches(config: TrainConfig, vocab_size: int, max_positions: int | None = None) -> Batches:
    """Batch source of a run: fake data with `data.fake`, else the orchestrator.

    `ValueError` for fake samples longer than the positions of the model; see `CausalLM.max_positions`.
    """
    if config.data.fake is not None:
        seq_len = config.model.seq_len
        if max_positions is not None and seq_len > max_positions:
            raise ValueError(
                f"fake samples have up to {seq_len:,} tokens, but this model has {max_positions:,} positions: lower "
                f"model.seq_len to {max_positions}"
            )
        return FakeBatches(config.data.fake, seq_len, vocab_size, config.seed, config.loss)
    transport = config.transport
    return build_receiver(transport.type, RunDir(config.output_dir).rollouts, transport.host, transport.port)


def apply_reference_regularization(samples: Sequence[Sample]) -> list[Sample]:
    """Weight the reference samples and remove their rewards."""
    from rollouts.training.rl_losses import reference_samples

    return [
        reference_samples([sample], sample.reference_weight)[0] if sample.reference_weight else sample
        for sample in samples
    ]


def check_batch(samples: Sequence[Sample], loss: LossConfig, vocab_size: int, env_losses: Collection[str] = ()) -> None:
    """Raise `ValueError` for a batch that cannot be trained on as configured."""
    from rollouts.training.sampling_support import check_supports

    if not samples:
        raise ValueError("the batch is empty")
    for i, sample in enumerate(samples):
        if not sample.tokens:
            raise ValueError(f"sample {i} of the batch has no tokens: drop rollouts without tokens")
        if sample.inference_logprobs is None or sample.advantages is None:
            missing = "inference_logprobs" if sample.inference_logprobs is None else "advantages"
            raise ValueError(f"sample {i} of the batch has no `{missing}`, which the policy loss needs")
        if sample.objective is not None and sample.objective not in env_losses:
            raise ValueError(
                f"sample {i} of the batch is of an environment with a loss of its own, {sample.objective!r}: "
                f"set env_loss.{sample.objective} to the keys of orchestrator.env.loss, or start both by rl"
            )
        if len(sample.loss_mask) != len(sample.tokens):
            raise ValueError(f"sample {i} of the batch has {len(sample.loss_mask)} mask entries, not one per token")
        if invalid := [token for token in (min(sample.tokens), max(sample.tokens)) if not 0 <= token < vocab_size]:
            raise ValueError(
                f"sample {i} of the batch has token {invalid[0]}, but the vocabulary size is {vocab_size}: "
                "give orchestrator, inference and trainer the same model.name"
            )
        if sample.sampling_support:
            check_supports(sample.sampling_support, sample.tokens, vocab_size)
    check_teacher(samples, loss, vocab_size)


def check_teacher(samples: Sequence[Sample], loss: LossConfig, vocab_size: int) -> None:
    """Raise `ValueError` when the teacher log-probs of a batch do not match the loss."""
    # On reference samples both taus are 1, whatever the loss.
    num_scored = sum(sample.teacher_logprobs is not None and not sample.reference_weight for sample in samples)
    need = loss.needs_teacher
    if num_scored and need is None:
        raise ValueError(
            "the batch has teacher log-probs but loss.teacher_tau is 0: set trainer.loss.teacher_tau above 0, "
            "or run without a teacher"
        )
    num_missing = sum(sample.teacher_logprobs is None and sample.has_teacher for sample in samples)
    if need is not None and num_missing:
        raise ValueError(
            f"loss.{need} is {getattr(loss, need)} but {num_missing} of {len(samples)} samples have no "
            f"teacher log-probs: set orchestrator.teacher_model, or loss.{need} = 0"
        )
    top_logprobs = loss.top_logprobs
    for sample in samples:
        if not top_logprobs or sample.teacher_logprobs is None:
            continue
        table = sample.teacher_table
        if table is None and loss.distill.estimator == "auto":
            continue
        if table is None or (top_logprobs == -1) != (not table.ids) or top_logprobs not in (-1, table.k):
            scored = "sampled tokens only" if table is None else f"{table.k} tokens per position"
            raise ValueError(
                f'loss.distill.estimator is "{loss.distill.estimator}" but the teacher scored {scored}: set '
                f"orchestrator.teacher_model.top_logprobs = {top_logprobs}, or start both by rl"
            )
        fits = np.frombuffer(table.ids, np.int32).max() < vocab_size if table.ids else table.k == vocab_size
        if not fits:
            raise ValueError(
                f"the teacher's vocabulary has another size than the student's {vocab_size}, which "
                f'loss.distill.estimator = "{loss.distill.estimator}" cannot compare: set estimator = "token", or '
                "choose a teacher whose config.json has the same vocab_size"
            )
