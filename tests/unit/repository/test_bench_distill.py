"""The lab of benchmarks/bench_distill.py: prompts and answers by hand, splits, and a step of every kind of run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import bench_distill as bench
import distill_lab as lab


def test_prompts_and_answers_by_hand() -> None:
    facts, modes = lab.build_facts(), lab.build_modes()
    asked, table = torch.tensor([[5, 0, 2]]), torch.tensor([[3, 7, 1, 0, 5, 2]])
    assert facts.plain(asked).tolist() == [[lab.BEGIN, lab.ASK, 13, 8, 10, lab.ANSWER]]
    shown = [[lab.BEGIN, 3, 7, 1, 0, 5, 2, lab.ASK, 13, 8, 10, lab.ANSWER]]
    assert facts.show(asked, table, lab.BEGIN).tolist() == shown
    assert facts.solve(asked, table).tolist() == [[2, 3, 1, lab.END]]
    letters = torch.tensor([[4, 7, 1, 0]])
    found = [modes.solve(letters, torch.tensor([[way]])).tolist()[0][:-1] for way in range(lab.WAYS)]
    assert found == [[4, 7, 1, 0], [0, 1, 7, 4], [0, 1, 4, 7], [5, 0, 2, 1]]
    for task in (facts, modes):
        train, held_out = ({tuple(row) for row in rows.tolist()} for rows in (task.train, task.eval))
        assert train and held_out and not train & held_out


def test_a_model_that_is_its_own_teacher_has_nothing_to_learn() -> None:
    task, model = lab.build_facts(), lab.build_model(0)
    plain = replace(task, show=lambda asked, table, first: task.plain(asked))
    recipe = lab.Recipe(lab.aim())
    assert lab.measure(plain, model, model, model, recipe, seed=0)["retention"] == pytest.approx(1)
    found = lab.compare_answers(plain, model, model, recipe, seed=0)
    assert found["kl_reverse"] == pytest.approx(0, abs=1e-5) and found["kl_forward"] == pytest.approx(0, abs=1e-5)
    assert 0 < found["coverage"] < 1


def test_shared_prompts_and_kept_keys_change_no_number() -> None:
    task, model = lab.build_facts(), lab.build_model(0)
    questions = task.train[:3].repeat_interleave(4, 0)
    prompts = task.show(questions, torch.tensor([[3, 7, 1, 0, 5, 2]]), lab.BEGIN)
    answers = lab.sample(model, prompts, task.length, torch.Generator().manual_seed(0))
    apart, whole = (lab.compute_table(model, prompts, answers, shared=shared) for shared in (True, False))
    torch.testing.assert_close(apart, whole, atol=1e-5, rtol=0)
    again, ended = torch.Generator().manual_seed(0), torch.zeros(len(answers), dtype=torch.bool)
    with torch.no_grad():  # as sampling goes on: a token at a time after what was read, here of every row
        hidden, past = lab.read_prompts(model, prompts)
        for place in range(task.length):
            logprobs = torch.log_softmax(model.logits(hidden), -1)
            torch.testing.assert_close(logprobs, whole[:, place], atol=1e-5, rtol=0)
            said = torch.multinomial(logprobs.exp(), 1, generator=again)[:, 0]
            assert torch.equal(answers[:, place], torch.where(ended, lab.END, said))
            ended |= answers[:, place] == lab.END
            hidden, past = lab.read(model, answers[:, place : place + 1], past)
            hidden = hidden[:, -1]
    assert answers.unique(dim=0).shape[0] > 3


ROWS = {f"{row.table}: {row.name}": row for row in bench.build_rows()}


@pytest.mark.parametrize(
    "name",
    [
        "estimators: topk+tail, k 4",
        "estimators: SFT on the teacher's answers",
        "estimators: modes: sequence",
        "retention: live, reference 1",
        "retention: ema .95",
        "taus: token 1, 0",
        "coverage: full jsd, 300 steps",
    ],
)
def test_a_step_of_a_row_changes_the_student_alone(name: str) -> None:
    row = ROWS[name]
    task = lab.build_facts() if row.task == "facts" else lab.build_modes()
    base = lab.warm_up(task, 0, steps=1, batch=10)
    before = [p.clone() for p in base.parameters()]
    student, curve = lab.distill(task, base, replace(row.recipe, steps=1, prompts=2, marks=()), seed=0)
    assert all(torch.equal(now, then) for now, then in zip(base.parameters(), before, strict=True))
    assert not all(torch.equal(now, then) for now, then in zip(student.parameters(), before, strict=True))
    measured_by_the_table = {"share", "entropy", "predicted", "coverage at start", "kl_reverse", "kl_forward"}
    assert set(row.shown) - measured_by_the_table <= set(curve[-1])
    assert all(torch.isfinite(p).all() for p in student.parameters())
    if row.prepare is not None:
        wrong = bench.make_wrong(task, base, 0, eps=0.1, steps=1)
        assert not all(torch.equal(a, b) for a, b in zip(wrong.parameters(), before, strict=True))
