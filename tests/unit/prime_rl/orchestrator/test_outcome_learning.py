"""Rollouts until a reward of .9, with contexts from outcomes and with `grpo`: three seeds of a policy in tables.

The policy has logits of eight values for each of six keys, all equal at the start; a question asks for three keys, and
a reward needs all values. A context `a3 b7` adds FOLLOWS to the logits of the values that it names. Of the learning
rates .1, .3, 1 and 3 the last needs the fewest rollouts, with and without contexts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.outcomes import RolloutOutcome
from rollouts.training.advantages import compute_batch_advantages
from rollouts.training.objectives import PRESETS, Objective
from rollouts.training.rl_losses import LossInputs, policy_loss

KEYS, VALUES, RIGHT = "abcdef", 8, "371052"
FOLLOWS, TARGET, LR = 6.0, 0.9, 3.0
PROMPTS, GROUP, ASKED = 8, 8, 3
QUESTIONS = [list(keys) for keys in itertools.product(range(len(KEYS)), repeat=ASKED)]


def build_contexts(context_from: str) -> ContextProvider:
    field = {"answer": "answer", "sibling": "demonstration", "feedback": "feedback"}[context_from]
    config = OrchestratorConfig.model_validate(
        {
            "env": [{"id": "facts"}],
            "batch_size": GROUP,
            "rollouts_per_example": GROUP,
            "teacher_model": {"context_from": context_from, "context_template": f"{{{{{field}}}}}"},
        }
    )
    assert config.teacher_model is not None
    return ContextProvider(config.teacher_model, config.env, config.seed)


def write(keys: list[int], values: list[int]) -> str:
    return " ".join(f"{KEYS[k]}{v}" for k, v in zip(keys, values, strict=True))


def follow(logits: Tensor, keys: list[int], context: str) -> Tensor:
    """Log-probs of the values of the asked keys under a context."""
    table = logits.detach()[keys].clone()
    shown = dict(pair for pair in context.split())
    for place, key in enumerate(keys):
        if (value := shown.get(KEYS[key])) is not None:
            table[place, int(value)] += FOLLOWS
    return torch.log_softmax(table, -1)


def accuracy(logits: Tensor) -> float:
    right = torch.softmax(logits.detach(), -1)[range(len(KEYS)), list(map(int, RIGHT))]
    return sum(float(right[keys].prod()) for keys in QUESTIONS) / len(QUESTIONS)


def batch_inputs(logits: Tensor, objective: Objective, contexts: ContextProvider | None, draw: Any) -> LossInputs:
    """One batch of groups: sampled answers, rewards, advantages, and the teacher's table of those with a context."""
    tables, tokens, advantages, teachers, has_teacher = [], list[int](), list[float](), [], list[bool]()
    for number in torch.randint(len(QUESTIONS), (PROMPTS,), generator=draw).tolist():
        keys = QUESTIONS[number]
        truth = [int(RIGHT[key]) for key in keys]
        table = torch.log_softmax(logits[keys], -1)
        answers = torch.multinomial(table.detach().exp(), GROUP, True, generator=draw).T.tolist()
        rewards = [float(answer == truth) for answer in answers]
        [scores] = compute_batch_advantages([rewards], baseline="mean", std=objective.advantage.std)
        row = {"answer": write(keys, truth), "example_id": number}
        group = [
            RolloutOutcome(i, write(keys, answer), reward, None if reward else write(keys, truth))
            for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
        ]
        for one, answer, score in zip(group, answers, scores, strict=True):
            context = None if contexts is None else contexts.context_for("facts", row, one, group)
            assert context is None or isinstance(context, str)
            teachers.append(follow(logits, keys, context or ""))
            has_teacher += [context is not None] * ASKED
            tables.append(table)
            tokens += answer
            advantages += [score] * ASKED
    student, teacher = torch.cat(tables), torch.cat(teachers)
    chosen = student.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
    return LossInputs(
        trainer_logprobs=chosen,
        inference_logprobs=chosen.detach(),
        advantages=torch.tensor(advantages),
        loss_mask=torch.ones(len(tokens)),
        sequence=torch.arange(PROMPTS * GROUP).repeat_interleave(ASKED),
        teacher_logprobs=torch.zeros(len(tokens)),
        has_teacher=torch.tensor(has_teacher),
        student_table=student,
        teacher_table=teacher,
    )


def count_rollouts(name: str, context_from: str | None, seed: int, limit: int) -> tuple[int, float]:
    """Rollouts until the exact mean reward is TARGET, at most `limit`; and that reward."""
    objective = PRESETS[name]
    if objective.distill.has_table:
        objective = replace(objective, distill=replace(objective.distill, estimator="full"))
    contexts = None if context_from is None else build_contexts(context_from)
    draw, logits = torch.Generator().manual_seed(seed), torch.zeros(len(KEYS), VALUES, requires_grad=True)
    optimizer, num = torch.optim.Adam([logits], lr=LR), 0
    while accuracy(logits) < TARGET and num < limit:
        inputs = batch_inputs(logits, objective, contexts, draw)
        output = policy_loss(inputs, objective)
        optimizer.zero_grad()
        torch.autograd.backward(output.loss_sum / output.count)
        optimizer.step()
        num += PROMPTS * GROUP
    return num, accuracy(logits)


@pytest.mark.parametrize(("name", "context_from"), [("opsd", "answer"), ("sdpo", "feedback")], ids=str)
def test_outcome_contexts_need_a_quarter_of_the_rollouts(name: str, context_from: str) -> None:
    for seed in range(3):
        num, reward = count_rollouts(name, context_from, seed, limit=20_000)
        assert reward >= TARGET
        _, of_grpo = count_rollouts("grpo", None, seed, limit=4 * num)
        assert of_grpo < TARGET, f"seed {seed}: {num} rollouts; grpo after {4 * num}: {of_grpo:.3f}"
