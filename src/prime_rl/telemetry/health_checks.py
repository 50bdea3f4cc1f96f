"""Online health checks that warn about silent failures and suggest a fix.

orchestrator: samples of a batch --> RolloutHealthChecks;    trainer: metrics of a step --> TrainerHealthChecks
Each check warns when a problem starts, and again only after it was resolved.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from loguru import logger

from prime_rl.telemetry.advice import MORE_SERVERS
from rollouts.training.advantages import split_groups
from rollouts.training.types import Sample, Status

ENOUGH = 8
"""Minimum number of samples for a fraction to be meaningful."""
CONSTANT_BATCHES = 3
THIN_COVERAGE = 0.01
"""Minimum fraction of tokens after the prompts that carry loss (long tool outputs carry none)."""
SAME_ENDING = 0.5
BROKEN_TURNS = 0.5
RATIO_SLACK = 0.02
MISMATCH_KL = 0.05
"""bfloat16 rounding stays below a tenth of this."""
WINDOW = 10
STARVED = 0.6
COLLAPSED_KL = 1e-3
COLLAPSED_REWARD = 0.5


class OnceWarner:
    """Warns about each problem once, when it starts."""

    def __init__(self, log: Callable[[str], object] | None = None) -> None:
        self._log = log or logger.warning
        self._active = set[str]()

    def update(self, problems: Mapping[str, str | None]) -> list[str]:
        """Log new problems (check name -> message, None if passed); return the new lines."""
        new = [f"health check {name}: {text}" for name, text in problems.items() if text and name not in self._active]
        self._active = {name for name, text in problems.items() if text}
        for line in new:
            self._log(line)
        return new


class RolloutHealthChecks:
    """Checks the samples of every batch before it is sent."""

    def __init__(
        self, max_async_level: int, *, verified: bool = True, log: Callable[[str], object] | None = None
    ) -> None:
        self._level, self._verified, self._warner = max_async_level, verified, OnceWarner(log)
        self._constant, self._completions = 0, 0
        self._unrewarded = Counter[str]()
        self._stalled = deque[tuple[float, float]](maxlen=WINDOW)

    def check(self, samples: Sequence[Sample], stalled_s: float = 0.0, step_s: float = 0.0) -> list[str]:
        """Check a batch; generation was stalled for lack of slots for `stalled_s` of the step's `step_s` seconds."""
        if samples:
            same = len({sample.reward for sample in samples}) == 1 and len(samples) > 1 and self._verified
            self._count(samples, same=same)
        self._stalled.append((stalled_s, step_s))
        return self._warner.update(
            {
                "mask": mask_trouble(samples),
                "end of turn": ending_trouble(samples),
                "prefixes": prefix_trouble(samples),
                "reward function" if self._unrewarded else "rewards": self._constant_trouble(samples),
                "engine starves": self._starvation(),
            }
        )

    def _count(self, samples: Sequence[Sample], *, same: bool) -> None:
        """Count consecutive batches of equal rewards, and right answers in them that earned nothing."""
        self._constant, self._completions = (self._constant + 1, self._completions + len(samples)) if same else (0, 0)
        right = (sample for sample in samples if sample.reward <= 0 and _contains_answer(sample))
        kinds = Counter(type(sample.metadata["answer"]).__name__ for sample in right)
        self._unrewarded = self._unrewarded + kinds if same else Counter()

    def _constant_trouble(self, samples: Sequence[Sample]) -> str | None:
        if not samples or self._constant < CONSTANT_BATCHES:
            return None
        return constant_trouble(samples[0].reward, self._constant, self._unrewarded, self._completions)

    def _starvation(self) -> str | None:
        share = _full_share(self._stalled) if self._level else None
        if share is None or share < STARVED:
            return None
        return (
            f"generation is stalled {share:.0%} of the time because every slot waits for the trainer: use more ranks "
            "(trainer.parallel.dp), a larger trainer.micro_bs, or fewer engines"
        )


class TrainerHealthChecks:
    """Checks the metrics of every RL optimizer step."""

    def __init__(
        self, max_async_level: int, *, adapter: bool = False, log: Callable[[str], object] | None = None
    ) -> None:
        self._level, self._adapter = max_async_level, adapter
        self._warner = OnceWarner(log)
        self._waits = deque[tuple[float, float]](maxlen=WINDOW)
        self._rewards = deque[float](maxlen=WINDOW)
        self._best: float | None = None

    def check(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> list[str]:
        """Check a step, given its trainer metrics and training samples."""
        self._waits.append((metrics.get("time/wait_for_batch", 0.0), metrics.get("time/step", 0.0)))
        if samples:
            self._rewards.append(sum(sample.reward for sample in samples) / len(samples))
        # Further updates on a batch move the policy away from its sampler.
        fresh = is_fresh(step, samples) and metrics.get("optim/num_updates", 1) == 1
        unmoved = fresh or metrics.get("optim/lr") == 0
        return self._warner.update(
            {
                "ratio": ratio_trouble(metrics.get("importance_ratio/mean"), unmoved),
                "weights not delivered": delivery_trouble(metrics.get("mismatch_kl/mean"), fresh, self._adapter),
                "teacher collapse": self._collapse(metrics.get("teacher_kl/mean")),
                "trainer starves": self._starvation(),
            }
        )

    def _collapse(self, teacher_kl: float | None) -> str | None:
        """Teacher KL vanishes while the reward falls."""
        if teacher_kl is None or len(self._rewards) < WINDOW:
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
            f"the trainer waits for batches {share:.0%} of the time: {MORE_SERVERS}, raise max_async_level (now "
            f"{self._level}), or shorten orchestrator.sampling.max_tokens"
        )


def mask_trouble(samples: Sequence[Sample]) -> str | None:
    """Prompt tokens carry loss, or almost no tokens do."""
    prompts = sum(1 for sample in samples if sample.loss_mask and sample.loss_mask[0] > 0)
    if prompts:
        return (
            f"{prompts} of {len(samples)} samples carry loss on their first token, so prompts are trained on: the "
            "server must return prompt_token_ids separately from the completion's"
        )
    trained = sum(sample.response_length for sample in samples)
    after = sum(len(sample.loss_mask) - _first(sample) for sample in samples)
    if after and trained < THIN_COVERAGE * after:
        return f"only {trained} of {after} tokens after the prompts carry loss: check loss_mask in samples.jsonl"
    return None


def ending_trouble(samples: Sequence[Sample]) -> str | None:
    """Stopped completions do not share a last trained token, so the end-of-turn token carries no loss."""
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
        f"{len(ended)} completions stopped but have {len(last)} different last trained tokens (the most common, "
        f"{token}, in {count}): the end-of-turn token carries no loss, so the policy cannot learn to stop. "
        "The server must return it (token ids with the stop token), and no stop string may cut it off"
    )


def prefix_trouble(samples: Sequence[Sample]) -> str | None:
    """Turns do not extend the tokens of the previous turns, so each becomes a separate sample."""
    rollouts = [rollout for group in split_groups(samples) for rollout in group]  # of one seat each in self-play
    multi_turn = [rows for rows in rollouts if (rows[0].metadata.get("num_turns") or len(rows)) > 1]
    broken = sum(len(rows) > 1 for rows in multi_turn)
    if len(multi_turn) < ENOUGH or broken < BROKEN_TURNS * len(multi_turn):
        return None
    return (
        f"in {broken} of {len(multi_turn)} conversations a turn does not start with the tokens of the previous turns: "
        "the chat template or the environment rewrites the history (removed reasoning, re-rendered text). Each turn "
        "becomes a separate training sample without prefix reuse"
    )


def constant_trouble(reward: float, num_batches: int, unrewarded: Counter[str], num_completions: int) -> str:
    """All rewards are equal in several consecutive batches; `unrewarded` right answers, by the type of the expected."""
    text = f"every rollout of the last {num_batches} batches has reward {reward:g}, so there is no learning signal. "
    text += "Inspect rollouts (monitor, samples.jsonl): "
    if not unrewarded:
        return text + (
            "the reward function may fail to parse answers, completions may be truncated at max_tokens, or the task is "
            "too easy or too hard"
        )
    kind = next(iter(unrewarded))
    cure = "" if kind == "str" else f"; answers of the rows are {kind}, not text: compare with str(answer)"
    return text + (
        f"{unrewarded.total()} of {num_completions} completions contain the expected answer: check whether the reward "
        f"function finds it{cure}"
    )


def _contains_answer(sample: Sample) -> bool:
    """Whether the completion contains the answer of the row as whole words."""
    answer = sample.metadata.get("answer")
    text = "" if answer is None else str(answer).strip()
    return bool(text) and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", sample.response) is not None


def ratio_trouble(mean: float | None, unmoved: bool) -> str | None:
    """Importance ratios differ from 1 although the weights have not changed since sampling."""
    if mean is None or not unmoved or abs(mean - 1) <= RATIO_SLACK:
        return None
    return (
        f"the mean importance ratio is {mean:.4g} although the weights have not changed since sampling: engine and "
        "trainer use different distributions. Compare temperature, chat template and dtype of both; with top_p, top_k "
        "or min_p, set orchestrator.sampling_support_replay"
    )


def delivery_trouble(mismatch_kl: float | None, fresh: bool, adapter: bool) -> str | None:
    """Samples are labeled with the newest version but were generated by other weights."""
    if mismatch_kl is None or not fresh or mismatch_kl <= MISMATCH_KL:
        return None
    what = "adapter" if adapter else "weights"
    return (
        f"samples are labeled with the newest {what}, but the KL between engine and trainer is {mismatch_kl:.3g}: "
        f"the {what} did not arrive in the engine. Check its log, and whether it loads weights/step_N"
    )


def is_fresh(step: int, samples: Sequence[Sample]) -> bool:
    """Whether every token was sampled from the weights that this step trains (on-policy)."""
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
