"""Context distillation in one process: a model of 0.1 million parameters, two tasks, exact measurements.

The arithmetic is the library's (`policy_loss`, `compute_sequence_kl_advantages`, `compute_fixed_point`), the decoder is
the one that is trained and served; only prompts, sampling and the loop are here, on rectangles of token ids.

    facts   plain `B Q key key key A`, with a context `B v0 .. v5 Q key key key A` -> the keys' values, end
    modes   plain `B x x x x A`, with a context `B way x x x x A` -> the letters rewritten, end
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from prime_rl.trainer.models.causal_lm import CausalLM, init_weights  # noqa: E402
from prime_rl.trainer.models.decoder_config import DecoderConfig  # noqa: E402
from rollouts.training.objectives import PRESETS, Direction, DistillChoice, Objective, choose_distillation  # noqa: E402
from rollouts.training.rl_losses import (  # noqa: E402
    LossInputs,
    compute_coverage,
    compute_divergence,
    compute_sequence_kl_advantages,
    nll_loss,
    policy_loss,
)
from rollouts.training.types import Sample  # noqa: E402

VALUES, KEYS, WAYS = 8, 6, 4
KEY, WAY, BEGIN, NOISY, ASK, ANSWER, END, VOCAB = 8, 14, 18, 19, 20, 21, 22, 24
NOISE = 0.3
GROUP = 8
RISING = 20  # first steps, in which the learning rate rises: early samples carry little information
SETTLING = 20  # last steps of a distillation, in which the learning rate falls to zero
Rows = Tensor  # int64 [rows, length]
Past = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer


class Rectangle:
    """Causal attention over rows of one length, after the keys and values of `past`, as the decoder takes it.

    `kept` has the keys and values [rows, heads, length, dim] of each layer, those of the past among them.
    """

    def __init__(self, rows: int, past: Past = ()) -> None:
        self.rows, self.past = rows, past
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        assert window is None, "the model of this laboratory attends to everything"
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q, k, v))
        if self.past:
            k, v = (torch.cat(both, 2) for both in zip(self.past[layer], (k, v), strict=True))
        self.kept.append((k, v))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if self.past else None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not self.past)
        return out.transpose(1, 2).flatten(0, 1)


def build_model(seed: int) -> CausalLM:
    """Two layers of width 64."""
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "initializer_range": 0.05,
        "max_position_embeddings": 64,
    }
    model = CausalLM(DecoderConfig.from_hf(config))
    with torch.no_grad():
        init_weights(model, seed)
    return model


def read(model: CausalLM, tokens: Rows, past: Past = ()) -> tuple[Tensor, Past]:
    """Hidden states [rows, length, width] of tokens that follow the past, and all keys and values."""
    rows, length = tokens.shape
    first = past[0][0].shape[2] if past else 0
    attend = Rectangle(rows, past)
    hidden = model(tokens.flatten(), torch.arange(first, first + length).repeat(rows), attend)
    return hidden.unflatten(0, (rows, length)), attend.kept


def choose(past: Past, rows: Tensor) -> Past:
    """The keys and values of these rows, in their order."""
    return [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in past]


def read_prompts(model: CausalLM, prompts: Rows) -> tuple[Tensor, Past]:
    """Hidden states [rows, width] of the last tokens, and keys and values; equal prompts are computed once."""
    prompts, row_of = prompts.unique(dim=0, return_inverse=True)
    hidden, past = read(model, prompts)
    return hidden[:, -1].index_select(0, row_of), choose(past, row_of)


def compute_table(
    model: CausalLM, prompts: Rows, answers: Rows, temperature: float = 1.0, shared: bool = True
) -> Tensor:
    """Log-probs [rows, length, VOCAB] at each token of the answers.

    Equal rows are computed once, because a trained student repeats its answers. Without shared prompts it is faster to
    compute prompt and answer together.
    """
    length = answers.shape[1]
    rows, row_of = torch.cat((prompts, answers[:, :-1]), 1).unique(dim=0, return_inverse=True)
    if shared:
        prompts, completions = rows.tensor_split((prompts.shape[1],), 1)
        last, past = read_prompts(model, prompts)
        hidden = torch.cat((last[:, None], read(model, completions, past)[0]), 1)
    else:
        hidden = read(model, rows)[0][:, -length:]
    logits = model.logits(hidden.flatten(0, 1)).unflatten(0, (-1, length))
    return torch.log_softmax(logits / temperature, -1).index_select(0, row_of)


@torch.no_grad()
def sample(model: CausalLM, prompts: Rows, length: int, draw: torch.Generator, temperature: float = 1.0) -> Rows:
    """Answers [rows, length] to the prompts; after an end come more ends."""
    answers = prompts[:, :0]
    prompts, place = prompts.unique(dim=0, return_inverse=True)  # equal beginnings are read once
    hidden, past = read(model, prompts)
    while True:
        p = torch.softmax(model.logits(hidden[:, -1]) / temperature, -1).index_select(0, place)
        ended = (answers[:, -1:] == END).any(1, keepdim=True)
        token = torch.where(ended, END, torch.multinomial(p, 1, generator=draw))
        answers = torch.cat((answers, token), 1)
        if answers.shape[1] == length:
            return answers
        next_places, place = (place * VOCAB + token[:, 0]).unique(return_inverse=True)
        hidden, past = read(model, next_places[:, None] % VOCAB, choose(past, next_places // VOCAB))


# tasks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Questions, what contexts put before them, and right answers; a context has a row per question, or one for all."""

    name: str
    length: int  # of an answer, with its end
    train: Rows
    eval: Rows
    show: Callable[[Rows, Rows, int], Rows]  # questions, contexts, first token -> prompts
    solve: Callable[[Rows, Rows], Rows]
    draw_contexts: Callable[[int, torch.Generator], Rows]
    answer_plainly: Callable[[Rows, torch.Generator], Rows]
    sft_steps: int

    def plain(self, questions: Rows) -> Rows:
        """The student's prompts."""
        return self.show(questions, questions[:, :0], BEGIN)


def split(questions: Rows) -> tuple[Rows, Rows]:
    """Every fifth of a fixed shuffle is for evaluation."""
    order = torch.randperm(len(questions), generator=torch.Generator().manual_seed(0))
    is_eval = order % 5 == 0
    return questions[~is_eval], questions[is_eval]


def wrap(*parts: Rows | int) -> Rows:
    """Columns side by side; a number is the same in every row."""
    rows = max(len(part) for part in parts if isinstance(part, Tensor))
    columns = [torch.full((1, 1), p) if isinstance(p, int) else p for p in parts]
    return torch.cat([column.expand(rows, -1) for column in columns], 1)


def build_facts() -> Task:
    """A context is six values, one per key; a question is three keys."""
    train, held_out = split(torch.cartesian_prod(*[torch.arange(KEYS)] * 3))
    return Task(
        "facts",
        4,
        train,
        held_out,
        show=lambda keys, table, first: wrap(first, table, ASK, keys + KEY, ANSWER),
        solve=lambda keys, table: wrap(table.expand(len(keys), -1).gather(1, keys), END),
        draw_contexts=lambda n, draw: torch.randint(VALUES, (n, KEYS), generator=draw),
        answer_plainly=lambda keys, draw: wrap(torch.randint(VALUES, keys.shape, generator=draw), END),
        sft_steps=600,
    )


def build_modes() -> Task:
    """A context is a way to rewrite: copy, reverse, sort, next; a question is four letters."""
    train, held_out = split(torch.cartesian_prod(*[torch.arange(VALUES)] * 4)[::4])

    def solve(letters: Rows, way: Rows) -> Rows:
        ways = torch.stack((letters, letters.flip(1), letters.sort(1).values, (letters + 1) % VALUES), 1)
        return wrap(ways[torch.arange(len(letters)), way.expand(len(letters), -1)[:, 0]], END)

    def answer_plainly(letters: Rows, draw: torch.Generator) -> Rows:
        shares = torch.tensor([0.55, 0.15, 0.15, 0.15])
        return solve(letters, torch.multinomial(shares, len(letters), True, generator=draw)[:, None])

    return Task(
        "modes",
        5,
        train,
        held_out,
        show=lambda letters, way, first: wrap(first, way + WAY, letters, ANSWER),
        solve=solve,
        draw_contexts=lambda n, draw: torch.randint(WAYS, (n, 1), generator=draw),
        answer_plainly=answer_plainly,
        sft_steps=600,
    )


def pick(questions: Rows, count: int, draw: torch.Generator) -> Rows:
    """Random questions, with repetition."""
    return questions[torch.randint(len(questions), (count,), generator=draw)]


def make_noisy(answers: Rows, draw: torch.Generator) -> Rows:
    """Each value is the next one with probability NOISE."""
    hit = (torch.rand(answers.shape, generator=draw) < NOISE) & (answers < VALUES)
    return torch.where(hit, (answers + 1) % VALUES, answers)


def warm_up(task: Task, seed: int, steps: int | None = None, batch: int = 128) -> CausalLM:
    """A model that follows contexts (a fifth of them noisily) and answers plain questions at random."""
    torch.manual_seed(seed)
    draw, model = torch.Generator().manual_seed(seed), build_model(seed)
    steps = steps or task.sft_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    num_plain = num_noisy = batch // 5
    num_noisy *= task.name == "facts"
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        questions = pick(task.train, batch - num_plain, draw)
        contexts = task.draw_contexts(len(questions), draw)
        answers = task.solve(questions, contexts)
        shown = task.show(questions, contexts, BEGIN)
        if num_noisy:
            shown[:num_noisy, 0] = NOISY
        plain = pick(task.train, num_plain, draw)
        loss = learn(model, shown[num_noisy:], answers[num_noisy:]) * ((len(shown) - num_noisy) / batch)
        if num_noisy:
            loss = loss + learn_noisy(model, shown[:num_noisy], answers[:num_noisy], draw) * (num_noisy / batch)
        loss = loss + learn(model, task.plain(plain), task.answer_plainly(plain, draw)) * (num_plain / batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def learn_noisy(model: CausalLM, prompts: Rows, answers: Rows, draw: torch.Generator) -> Tensor:
    """The same for values that are the next one with probability NOISE, in expectation over the token to say."""
    written, following = make_noisy(answers, draw), torch.where(answers < VALUES, (answers + 1) % VALUES, answers)
    table = compute_table(model, prompts, written, shared=False)
    right, wrong = (table.gather(-1, x[..., None]).squeeze(-1) for x in (answers, following))
    return -((1 - NOISE) * right + NOISE * wrong).mean()


def learn(model: CausalLM, prompts: Rows, answers: Rows) -> Tensor:
    """The loss of supervised fine-tuning: nll_loss over the answers, per token."""
    table = compute_table(model, prompts, answers, shared=False)
    output = nll_loss(make_inputs(table, answers, table.detach()))
    return output.loss_sum / output.count


# distillation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """One run: objective, teacher and start."""

    objective: Objective
    steps: int = 100
    prompts: int = 8  # of a step, each answered GROUP times
    context: Rows | None = None  # the teacher's; None: the task's own
    truth: Rows | None = None  # what rewards go by; None: the context
    noisy: bool = False
    on_teacher_samples: bool = False  # supervised fine-tuning on what the teacher says
    teacher: str = "frozen"  # live, ema
    ema_decay: float = 0.95
    reference_weight: float = 0.0
    top_k: int = 4
    auto: bool = False  # the estimator "auto"
    temperature: float = 1.0
    teacher_temperature: float = 1.0
    lr: float = 1e-3
    equal: int = 0  # first steps, in which the student's tau is the teacher's
    anneal: tuple[int, int, float] | None = None  # after, steps, margin: see `prime_rl.trainer.rl.config.AnnealConfig`
    marks: Sequence[int] = ()


def aim(estimator: str = "token", direction: str = "reverse", **choices: Any) -> Objective:
    """An objective with the taus 0/1/1 unless given."""
    taus = {"adv_tau": 0.0, "teacher_tau": 1.0, "student_tau": 1.0}
    distill = DistillChoice(estimator, direction)  # type: ignore[arg-type]
    return replace(PRESETS["aipo"], distill=distill, **{**taus, **choices})


def make_inputs(
    table: Tensor, answers: Rows, teacher: Tensor, weight: float = 1.0, advantages: Tensor | None = None
) -> LossInputs:
    """Streams of all answer tokens up to the first end; the sampler is the student itself."""
    rows, length = answers.shape
    logprobs = table.gather(-1, answers[..., None]).squeeze(-1)
    before_end = (answers == END).long().cumsum(1) - (answers == END).long() == 0
    return LossInputs(
        trainer_logprobs=logprobs.flatten(),
        inference_logprobs=logprobs.detach().flatten(),
        advantages=torch.zeros(rows * length) if advantages is None else advantages.flatten(),
        loss_mask=weight * before_end.flatten().float(),
        sequence=torch.arange(rows).repeat_interleave(length),
        teacher_logprobs=teacher.gather(-1, answers[..., None]).flatten(),
        num_sequences=rows,
    )


def add_tables(inputs: LossInputs, student: Tensor, teacher: Tensor, choice: DistillChoice, k: int) -> LossInputs:
    """The distributions that the estimator compares."""
    student, teacher = student.flatten(0, 1), teacher.flatten(0, 1)
    if choice.estimator == "topk+tail":
        ids = teacher.topk(k).indices
        student, teacher = (
            torch.cat((x.gather(-1, ids), x.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)
            for x in (student, teacher)
        )
    return replace(inputs, student_table=student, teacher_table=teacher)


def spread_credit(inputs: LossInputs, rows: int, objective: Objective, groups: int) -> LossInputs:
    """`compute_sequence_kl_advantages` over these streams: the estimators reward_to_go and sequence."""
    streams = {
        name: getattr(inputs, name).view(rows, -1).tolist()
        for name in ("inference_logprobs", "teacher_logprobs", "loss_mask", "advantages")
    }
    size = rows // groups
    samples = [
        Sample(prompt="", tokens=[0] * len(mask), group_index=i // size, **{n: s[i] for n, s in streams.items()})
        for i, mask in enumerate(streams["loss_mask"])
    ]
    credited = [s.advantages for s in compute_sequence_kl_advantages(samples, objective)]
    return replace(inputs, advantages=torch.tensor(credited).flatten())


def distill(task: Task, base: CausalLM, recipe: Recipe, seed: int) -> tuple[CausalLM, list[dict[str, float]]]:
    """Train a copy of `base`; step and accuracy at `recipe.marks`, and all measurements at the end."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed + 1000)
    student = copy.deepcopy(base)
    teacher = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(student.parameters(), lr=recipe.lr)
    plain, truth = task.plain(task.eval), right_answers(task, recipe, task.eval)
    judge, curve, farthest = student if recipe.teacher == "live" else teacher, [], 0.0
    for step in range(recipe.steps):
        if step in recipe.marks:
            curve.append({"step": step, "accuracy": compute_accuracy(student, plain, truth)})
        found, count, farthest = teach(task, student, judge, recipe, draw, step + 1, farthest)
        losses = [(found, count)]
        if recipe.reference_weight:
            losses.append(hold(task, student, base, recipe, draw))
        for settings in optimizer.param_groups:
            settings["lr"] = recipe.lr * min(1.0, (step + 1) / RISING, (recipe.steps - step) / SETTLING)
        total = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.teacher == "ema":
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 1 - recipe.ema_decay)
    curve.append({"step": recipe.steps, **measure(task, base, student, judge, recipe, seed)})
    return student, curve


def schedule_taus(recipe: Recipe, step: int, farthest: float) -> Objective:
    """The objective of a step, counted from 1: its taus shrink until a reward is worth `margin * farthest` nats."""
    if step <= recipe.equal:
        return replace(recipe.objective, student_tau=recipe.objective.teacher_tau)
    if recipe.anneal is None:
        return recipe.objective
    after, steps, margin = recipe.anneal
    objective, part = recipe.objective, min(max(step - after, 0) / steps, 1.0)
    scale = min(1.0, objective.adv_tau / (objective.student_tau * margin * max(farthest, 1e-9))) ** part
    return replace(objective, teacher_tau=scale * objective.teacher_tau, student_tau=scale * objective.student_tau)


def context_of(task: Task, recipe: Recipe) -> Rows:
    """The teacher's context: one row."""
    if recipe.context is not None:
        return recipe.context
    return torch.tensor([[3, 7, 1, 0, 5, 2]]) if task.name == "facts" else torch.tensor([[1]])


def right_answers(task: Task, recipe: Recipe, questions: Rows) -> Rows:
    """Right answers, for rewards and accuracies."""
    return task.solve(questions, context_of(task, recipe) if recipe.truth is None else recipe.truth)


def teacher_prompts(task: Task, recipe: Recipe, questions: Rows) -> Rows:
    """The teacher's prompts."""
    return task.show(questions, context_of(task, recipe), NOISY if recipe.noisy else BEGIN)


def teach(
    task: Task,
    student: CausalLM,
    teacher: CausalLM,
    recipe: Recipe,
    draw: torch.Generator,
    step: int = 1,
    farthest: float = 0.0,
) -> tuple[Tensor, Tensor, float]:
    """Sum and count of the loss of a batch, `prompts` groups of GROUP answers, and the new `farthest`.

    That is the largest distance of a batch's answers from the teacher so far, in nats, including this batch.
    """
    questions = pick(task.train, recipe.prompts, draw).repeat_interleave(GROUP, 0)
    plain, shown = task.plain(questions), teacher_prompts(task, recipe, questions)
    if recipe.on_teacher_samples:
        answers = sample(teacher, shown, task.length, draw)
        table = compute_table(student, plain, answers)
        output = nll_loss(make_inputs(table, answers, table.detach()))
        return output.loss_sum, output.count, farthest
    answers = sample(student, plain, task.length, draw, recipe.temperature)
    table = compute_table(student, plain, answers, recipe.temperature)
    with torch.no_grad():
        teacher_table = compute_table(teacher, shown, answers, recipe.teacher_temperature)
    rewards = (answers == right_answers(task, recipe, questions)).all(1).float().view(recipe.prompts, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1).expand(-1, task.length)
    inputs = make_inputs(table, answers, teacher_table, advantages=advantages)
    distance = (
        inputs.loss_mask * (inputs.inference_logprobs - teacher_table.gather(-1, answers[..., None]).flatten())
    ).sum()
    farthest = max(farthest, distance.item() / len(answers))
    objective = schedule_taus(recipe, step, farthest)
    if recipe.auto:
        objective = replace(objective, distill=choose_distillation(has_topk=True))
    if objective.distill.estimator in ("reward_to_go", "sequence"):
        inputs = spread_credit(inputs, len(answers), objective, recipe.prompts)
    if objective.distill.has_table:
        inputs = add_tables(inputs, table, teacher_table, objective.distill, recipe.top_k)
    output = policy_loss(inputs, objective)
    return output.loss_sum, output.count, farthest


def hold(task: Task, student: CausalLM, base: CausalLM, recipe: Recipe, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sum and count of the reference environment: KL(student || initial model) under other contexts, which both see."""
    questions = pick(task.train, recipe.prompts * GROUP, draw)
    shown = task.show(questions, task.draw_contexts(len(questions), draw), BEGIN)
    answers = sample(student, shown, task.length, draw)
    table = compute_table(student, shown, answers, shared=False)
    with torch.no_grad():
        teacher_table = compute_table(base, shown, answers, shared=False)
    inputs = make_inputs(table, answers, teacher_table, weight=recipe.reference_weight)
    full = aim("full")
    output = policy_loss(add_tables(inputs, table, teacher_table, full.distill, 0), full)
    return output.loss_sum, output.count


# measurements: exact where they can be ------------------------------------------------------------------------------


@torch.no_grad()
def compute_accuracy(model: CausalLM, prompts: Rows, answers: Rows) -> float:
    """Mean probability of the right answer: what sampling at temperature 1 scores in expectation."""
    table = compute_table(model, prompts, answers)
    return table.gather(-1, answers[..., None]).squeeze(-1).sum(1).exp().mean().item()


@torch.no_grad()
def measure(
    task: Task, base: CausalLM, student: CausalLM, teacher: CausalLM, recipe: Recipe, seed: int
) -> dict[str, float]:
    """Accuracies on held-out questions, of student and teacher, the gap closed and the retention: exact."""
    draw = torch.Generator().manual_seed(seed + 2000)
    questions, truth = task.eval, right_answers(task, recipe, task.eval)
    plain, shown = task.plain(questions), teacher_prompts(task, recipe, questions)
    others = torch.cat([task.eval] * 3)
    other_contexts = task.draw_contexts(len(others), draw)
    other = (task.show(others, other_contexts, BEGIN), task.solve(others, other_contexts))
    base_plain, base_shown = (compute_accuracy(base, prompts, truth) for prompts in (plain, shown))
    accuracy = compute_accuracy(student, plain, truth)
    before, after = compute_accuracy(base, *other), compute_accuracy(student, *other)
    return {
        "accuracy": accuracy,
        "teacher": compute_accuracy(teacher, shown, truth),
        "gap_closed": (accuracy - base_plain) / (base_shown - base_plain) if base_shown != base_plain else math.nan,
        "retention": after / before,
        "student_with_context": compute_accuracy(student, shown, truth),
    }


@torch.no_grad()
def compare_answers(
    task: Task, student: CausalLM, teacher: CausalLM, recipe: Recipe, seed: int, copies: int = 16
) -> dict[str, float]:
    """KL of whole answers in nats and coverage, sampled `copies` times for every held-out question."""
    draw = torch.Generator().manual_seed(seed + 2000)
    questions = task.eval.repeat(copies, 1)  # a slip of one answer in a thousand costs ten nats
    plain, shown = task.plain(questions), teacher_prompts(task, recipe, questions)

    def compare(answers: Rows, direction: Direction) -> tuple[float, Tensor, Tensor]:
        s, t = compute_table(student, plain, answers), compute_table(teacher, shown, answers)
        mask = make_inputs(s, answers, t).loss_mask.view(len(answers), -1)
        s, t = s.flatten(0, 1), t.flatten(0, 1)
        return (compute_divergence(s, t, direction).view_as(mask) * mask).sum(1).mean().item(), s, t

    kl_forward, _, _ = compare(sample(teacher, shown, task.length, draw), "forward")
    kl_reverse, s, t = compare(sample(student, plain, task.length, draw), "reverse")
    return {"kl_reverse": kl_reverse, "kl_forward": kl_forward, "coverage": compute_coverage(s, t).mean().item()}


@torch.no_grad()
def main_share(task: Task, model: CausalLM, recipe: Recipe, truth: Rows | None = None) -> tuple[float, float]:
    """The student's mean probability of each right value, and the entropy of its values, on held-out questions."""
    answers = task.solve(task.eval, context_of(task, recipe) if truth is None else truth)
    table = compute_table(model, task.plain(task.eval), answers, recipe.temperature)
    table = table[:, :-1]
    share = table.gather(-1, answers[:, :-1, None]).exp().mean().item()
    return share, -(table.exp() * table).sum(-1).mean().item()


@torch.no_grad()
def predicted_share(task: Task, teacher: CausalLM, recipe: Recipe) -> float:
    """The same of the fixed point of the taus, made of the teacher's own distribution."""
    answers = task.solve(task.eval, context_of(task, recipe))
    shown = teacher_prompts(task, recipe, task.eval)
    table = compute_table(teacher, shown, answers, recipe.teacher_temperature)[:, :-1]
    a, b = recipe.objective.teacher_tau, recipe.objective.student_tau
    target = torch.log_softmax(a / b * table, -1) if b else (table == table.max(-1, keepdim=True).values).float().log()
    return target.gather(-1, answers[:, :-1, None]).exp().mean().item()


@torch.no_grad()
def predicted_accuracy(task: Task, teacher: CausalLM, recipe: Recipe) -> float:
    """Mean probability of the right answer at the fixed point of reward and teacher, answers taken whole.

    With p its probability under the teacher and c / b nats for a reward of 1: p e^(c/b) / (1 - p + p e^(c/b)).
    """
    answers = right_answers(task, recipe, task.eval)
    table = compute_table(teacher, teacher_prompts(task, recipe, task.eval), answers)
    right = table.gather(-1, answers[..., None]).squeeze(-1).sum(1)
    wrong = torch.log1p(-right.exp().clamp(max=1 - 1e-7))
    objective = recipe.objective
    nats = objective.adv_tau / objective.student_tau if objective.student_tau else math.inf
    return torch.sigmoid(right + nats - wrong).mean().item()
