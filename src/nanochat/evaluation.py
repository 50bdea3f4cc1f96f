"""Evaluation on held-out questions: pass@k, exact match, format, and accuracy of answer letters by logits."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import anyio
import msgspec
import torch

from nanochat.chat_client import ChatClient, is_scored, run_rollouts
from nanochat.engine import Engine
from rollouts.training.agent_integration import Rollout
from rollouts.training.backends.ranks import Ranks
from rollouts.training.environments.protocol import Environment, Row
from rollouts.training.metrics import compute_pass_at_k, compute_standard_error, reaches

LETTERS = "ABCDE"
ROWS_AT_ONCE = 32


class QuestionScore(msgspec.Struct):
    """Results of one question: correct and failed samples, rewards, lengths and the environment's metrics."""

    index: int
    correct: int
    rewards: list[float]
    lengths: list[int]
    metrics: dict[str, list[float]]
    failed: int = 0
    letter_right: bool | None = None


async def evaluate(
    env: Environment,
    client: ChatClient,
    rows: Sequence[Row],
    ranks: Ranks,
    *,
    num_samples: int,
    seed: int,
    sampling: dict[str, Any],
    letters: bool = True,
) -> list[QuestionScore]:
    """Evaluate all questions with `num_samples` samples, distributed over ranks; all ranks get all results in order."""
    own: list[QuestionScore] = []

    async def attempt(index: int) -> None:
        rollouts = await run_rollouts(env, client, rows[index], num_samples, (seed, index), sampling)
        own.append(_score(index, rollouts))

    mine = list(range(ranks.rank, len(rows), ranks.size))
    for start in range(0, len(mine), ROWS_AT_ONCE):
        async with anyio.create_task_group() as tasks:
            for index in mine[start : start + ROWS_AT_ONCE]:
                tasks.start_soon(attempt, index)
    if letters:
        for scored in own:
            scored.letter_right = letter_is_right(client.engine, rows[scored.index])
    parts = ranks.gather_bytes(msgspec.msgpack.encode(own))
    gathered = [scored for part in parts for scored in msgspec.msgpack.decode(part, type=list[QuestionScore])]
    return sorted(gathered, key=lambda scored: scored.index)


def summarize_scores(scored: Sequence[QuestionScore]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... up to the number of samples, and means of the other metrics over questions.

    `accuracy` is pass@1: the share of right ones among all `samples` at the sampling temperature. `accuracy_se` is its
    standard error over questions, if there are several. `categorical_accuracy` takes the most probable letter, without
    reasoning.
    """
    num = min((len(s.rewards) for s in scored), default=0)
    if not num:
        return {}
    out = {}
    for name in sorted({name for s in scored for name in s.metrics}):  # first: ours replace those of the same name
        out[name] = fmean(fmean(s.metrics[name]) for s in scored if s.metrics.get(name))
    powers = [2**i for i in range(num.bit_length()) if 2**i <= num]
    out |= {f"pass@{k}": fmean(compute_pass_at_k(len(s.rewards), s.correct, k) for s in scored) for k in powers}
    shares = [s.correct / len(s.rewards) for s in scored]
    out["accuracy"] = fmean(shares)
    if len(shares) > 1:
        out["accuracy_se"] = compute_standard_error(shares)
    out["samples"] = float(sum(len(s.rewards) for s in scored))
    out["failed"] = sum(s.failed for s in scored) / out["samples"]
    out["reward"] = fmean(fmean(s.rewards) for s in scored)
    out["mean_length"] = fmean(fmean(s.lengths) for s in scored)
    if letters := [s.letter_right for s in scored if s.letter_right is not None]:
        out["categorical_accuracy"] = fmean(letters)
    return out


def _score(index: int, rollouts: Sequence[Rollout]) -> QuestionScore:
    """A sample is correct with exact match 1, else with reward 1; one without its reward is failed and incorrect."""
    scored = QuestionScore(index, 0, [], [], {})
    for rollout in rollouts:
        has_reward = is_scored(rollout)
        scored.failed += not has_reward
        scored.rewards.append(rollout.reward if has_reward else 0.0)
        scored.lengths.append(sum(len(turn.completion_ids) for turn in rollout.turns))
        for name, value in rollout.metrics.items():
            scored.metrics.setdefault(name.removesuffix("_reward"), []).append(value)
        right = rollout.metrics.get("exact_match_reward", rollout.reward)
        scored.correct += has_reward and reaches(right, 1.0)
    return scored


@torch.no_grad()
def letter_is_right(engine: Engine, row: Row) -> bool | None:
    """Whether the correct letter X is the most probable in a direct `Answer: X`.

    None for rows without a letter, and for prompts that are no chat of the model or too long.
    """
    answer = row.get("answer")
    if not isinstance(answer, str) or answer not in tuple(LETTERS):
        return None
    tokenizer, model = engine.tokenizer, engine.model
    try:
        prompt = tokenizer.render_for_completion(row["prompt"])
    except ValueError:
        return None
    answers = [tokenizer.encode(f"Answer: {letter}") for letter in LETTERS]
    width = max(map(len, answers))
    if len(prompt) + width > engine.max_length:
        return None
    tokens = torch.tensor([[*prompt, *one, *[0] * (width - len(one))] for one in answers], device=model.get_device())
    table = model(tokens)[:, len(prompt) - 1 :].log_softmax(-1)
    totals = [float(table[i, range(len(one)), one].sum()) for i, one in enumerate(answers)]
    return LETTERS[max(range(len(LETTERS)), key=totals.__getitem__)] == answer
