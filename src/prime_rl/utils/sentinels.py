"""Sentinels: what goes wrong in silence, said in plain words with its cure while the run goes on.

orchestrator: samples of a batch --> BatchSentinels --> warnings;    trainer: metrics of a step --> StepSentinels
Each says its sentence when its trouble begins, and again only after it was gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from loguru import logger

from rollouts.training.types import Sample, Status

ENOUGH = 8
"""Samples of a kind below which a share says nothing."""
CONSTANT_BATCHES = 3
THIN_COVERAGE = 0.01
"""Long tool outputs are not trained on; less than this of what follows the prompts is a mistake."""
SAME_ENDING = 0.5
BROKEN_TURNS = 0.5
RATIO_SLACK = 0.02
MISMATCH_KL = 0.05
"""Rounding of bfloat16 stays below a tenth of this."""
WINDOW = 10
STARVED = 0.6
COLLAPSED_KL = 1e-3
COLLAPSED_REWARD = 0.5


class _Voice:
    """Speaks of each trouble when it begins."""

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say or logger.warning
        self._present = set[str]()

    def tell(self, found: Mapping[str, str | None]) -> list[str]:
        """Sentinel -> its sentence, None where all is well; returns what was said now."""
        new = [f"sentinel {name}: {text}" for name, text in found.items() if text and name not in self._present]
        self._present = {name for name, text in found.items() if text}
        for line in new:
            self._say(line)
        return new


class BatchSentinels:
    """Looks at the samples of every batch before they go out."""

    def __init__(
        self, max_async_level: int, *, verified: bool = True, say: Callable[[str], object] | None = None
    ) -> None:
        self._level, self._verified, self._voice = max_async_level, verified, _Voice(say)
        self._constant = 0
        self._stalled = deque[tuple[float, float]](maxlen=WINDOW)

    def look(self, samples: Sequence[Sample], stalled_s: float = 0.0, step_s: float = 0.0) -> list[str]:
        """`stalled_s` of the `step_s` seconds of this step nothing was generated for lack of slots."""
        if samples:
            same = len({sample.reward for sample in samples}) == 1 and len(samples) > 1 and self._verified
            self._constant = self._constant + 1 if same else 0
        self._stalled.append((stalled_s, step_s))
        return self._voice.tell(
            {
                "mask": mask_trouble(samples),
                "end of turn": ending_trouble(samples),
                "prefixes": prefix_trouble(samples),
                "rewards": constant_trouble(samples, self._constant),
                "engine starves": self._starvation(),
            }
        )

    def _starvation(self) -> str | None:
        share = _full_share(self._stalled) if self._level else None
        if share is None or share < STARVED:
            return None
        return (
            f"generation stands still {share:.0%} of the time because every slot waits for the trainer: more ranks "
            "(trainer.parallel.dp), a larger trainer.micro_bs, or fewer engines"
        )


class StepSentinels:
    """Looks at the metrics of every optimizer step of RL."""

    def __init__(
        self,
        max_async_level: int,
        *,
        adapter: bool = False,
        verified: bool = True,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._level, self._adapter, self._verified = max_async_level, adapter, verified
        self._voice = _Voice(say)
        self._waits = deque[tuple[float, float]](maxlen=WINDOW)
        self._rewards = deque[float](maxlen=WINDOW)
        self._best: float | None = None

    def look(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        """`metrics` are the trainer's own names; `samples` those that the step trained on."""
        self._waits.append((metrics.get("time/wait_for_batch", 0.0), metrics.get("time/step", 0.0)))
        if samples:
            self._rewards.append(sum(sample.reward for sample in samples) / len(samples))
        fresh = is_fresh(step, samples)
        unmoved = fresh or metrics.get("optim/lr") == 0
        return self._voice.tell(
            {
                "ratio": ratio_trouble(metrics.get("importance_ratio/mean"), unmoved),
                "weights not delivered": delivery_trouble(metrics.get("mismatch_kl/mean"), fresh, self._adapter),
                "teacher collapse": self._collapse(metrics.get("teacher_kl/mean")),
                "trainer starves": self._starvation(),
            }
        )

    def _collapse(self, teacher_kl: float | None) -> str | None:
        """Student and teacher agree ever better on ever worse answers."""
        if teacher_kl is None or not self._verified or len(self._rewards) < WINDOW:
            return None
        recent = sum(self._rewards) / len(self._rewards)
        self._best = recent if self._best is None else max(self._best, recent)
        if self._best <= 0 or recent > COLLAPSED_REWARD * self._best or abs(teacher_kl) > COLLAPSED_KL:
            return None
        return (
            f"student and teacher agree (teacher_kl {teacher_kl:.1g}) while the reward fell from {self._best:.3g} to "
            f"{recent:.3g}: both have collapsed. Keep the teacher frozen (orchestrator.teacher_model.weights), lower "
            "trainer.optim.lr, or stop at an earlier step"
        )

    def _starvation(self) -> str | None:
        share = _full_share(self._waits) if self._level else None
        if share is None or share < STARVED:
            return None
        return (
            f"the trainer waits for batches {share:.0%} of the time: add engines (inference.parallel.dp), raise "
            f"max_async_level (now {self._level}), or shorten orchestrator.sampling.max_tokens"
        )


def mask_trouble(samples: Sequence[Sample]) -> str | None:
    """Prompts that are trained on, or next to nothing that is."""
    prompts = sum(1 for sample in samples if sample.loss_mask and sample.loss_mask[0] > 0)
    if prompts:
        return (
            f"{prompts} of {len(samples)} samples carry loss on their first token, so prompts are trained on: the "
            "server must tell prompt_token_ids apart from the completion's"
        )
    trained = sum(sample.response_length for sample in samples)
    after = sum(len(sample.loss_mask) - _first(sample) for sample in samples)
    if after and trained < THIN_COVERAGE * after:
        return f"only {trained} of {after} tokens behind the prompts carry loss: look at loss_mask in samples.jsonl"
    return None


def ending_trouble(samples: Sequence[Sample]) -> str | None:
    """Answers that ended by themselves, whose last trained tokens are no common end-of-turn token."""
    ended = [
        s for s in samples if s.status == Status.COMPLETED and s.stop_reason in ("stop", None) and any(s.loss_mask)
    ]
    if len(ended) < ENOUGH:
        return None
    last = Counter(sample.tokens[_last(sample)] for sample in ended)
    token, count = last.most_common(1)[0]
    if count >= SAME_ENDING * len(ended):
        return None
    return (
        f"{len(ended)} answers ended by themselves but their last trained tokens are of {len(last)} kinds (the most "
        f"common, {token}, in {count}): the end-of-turn token carries no loss, so the policy cannot learn to stop. "
        "The server must return it (token ids with the stop token), and no stop string may cut it off"
    )


def prefix_trouble(samples: Sequence[Sample]) -> str | None:
    """Conversations whose turns do not continue the tokens before them, each then a sample of its own."""
    rollouts = [list(rows) for _, rows in groupby(samples, key=lambda sample: (sample.group_index, sample.index))]
    talks = [rows for rows in rollouts if (rows[0].metadata.get("num_turns") or len(rows)) > 1]
    broken = sum(len(rows) > 1 for rows in talks)
    if len(talks) < ENOUGH or broken < BROKEN_TURNS * len(talks):
        return None
    return (
        f"in {broken} of {len(talks)} conversations a turn does not begin with the tokens of those before it: the chat "
        "template or the environment rewrites what was said (reasoning left out, text rendered anew). Each turn is "
        "trained as a sample of its own and computed from its beginning"
    )


def constant_trouble(samples: Sequence[Sample], num_batches: int) -> str | None:
    """Batch after batch in which everybody earns the same."""
    if num_batches < CONSTANT_BATCHES:
        return None
    return (
        f"every rollout of the last {num_batches} batches earned {samples[0].reward:g}: nothing can be learnt from "
        "that. Look at some rollouts (monitor, samples.jsonl): a reward function that cannot parse the answer, answers "
        "cut off at max_tokens, or a task that is too easy or too hard"
    )


def ratio_trouble(mean: float | None, unmoved: bool) -> str | None:
    """Importance ratios of weights that have not moved since they sampled; they must be 1."""
    if mean is None or not unmoved or abs(mean - 1) <= RATIO_SLACK:
        return None
    return (
        f"the mean importance ratio is {mean:.4g} though the weights have not moved since sampling: engine and trainer "
        "do not mean the same distribution. Compare temperature, top_p/top_k, chat template and number format of both"
    )


def delivery_trouble(mismatch_kl: float | None, fresh: bool, adapter: bool) -> str | None:
    """Samples that claim to be of the newest weights and are not."""
    if mismatch_kl is None or not fresh or mismatch_kl <= MISMATCH_KL:
        return None
    what = "adapter" if adapter else "weights"
    return (
        f"the samples say that the newest {what} made them, but engine and trainer are {mismatch_kl:.3g} (KL) apart: "
        f"the {what} did not arrive in the engine. See its log, and whether it loads what weights/step_N holds"
    )


def is_fresh(step: int, samples: Sequence[Sample]) -> bool:
    """Whether every token was drawn by the very weights that this step trains."""
    spans = [version for sample in samples for _, version in sample.versions]
    return bool(spans) and all(version == step - 1 for version in spans)


def _full_share(parts: deque[tuple[float, float]]) -> float | None:
    total = sum(whole for _, whole in parts)
    return sum(part for part, _ in parts) / total if len(parts) == parts.maxlen and total else None


def _trained(sample: Sample) -> Iterator[int]:
    return (i for i, mask in enumerate(sample.loss_mask) if mask > 0)


def _first(sample: Sample) -> int:
    return next(_trained(sample), len(sample.loss_mask))


def _last(sample: Sample) -> int:
    return max(_trained(sample))
