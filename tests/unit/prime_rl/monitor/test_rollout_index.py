"""Rollout index: selection, growth, evaluations, attempts, recorded log-probs and text search."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from page_runs import (
    index_of,
    metric_rows,
    sample_rows,
    write_evaluation,
    write_page_run,
)

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.page_data import build_page_data
from prime_rl.monitor.rollout_detail import rollout_detail
from prime_rl.monitor.rollout_index import Query, RolloutIndex
from prime_rl.trainer.rl.logprob_recorder import recorded_rows
from rollouts.training.batching import pack_samples
from rollouts.training.metrics import append_jsonl, load_jsonl
from rollouts.training.types import Sample


def test_selection_is_that_of_a_plain_loop(run_dir: Path) -> None:
    index, rows = index_of(run_dir), list(load_jsonl(run_dir / "samples.jsonl"))
    queries = [
        Query(),
        Query(step=3, sort="reward"),
        Query(env="beta", min_reward=0.2, max_reward=0.7, sort="tokens", descending=False),
        Query(text="QUESTION 1 2", sort="advantage"),
        Query(status="failed", text="onerror"),
        Query(group=502),
        Query(env="nowhere"),
    ]

    def words(row: dict[str, Any]) -> str:
        return "\n".join([*(m["content"] for m in row["prompt"]), row["completion"], row["error"] or ""]).lower()

    def fits(row: dict[str, Any], q: Query) -> bool:
        same = [(q.step, row["step"]), (q.env, row["env"]), (q.status, row["status"]), (q.group, row["group_index"])]
        low, high = (-9 if q.min_reward is None else q.min_reward), (9 if q.max_reward is None else q.max_reward)
        return all(a in (None, b) for a, b in same) and low <= row["reward"] <= high and q.text.lower() in words(row)

    for query in queries:
        keys = {"tokens": lambda r: len(r["tokens"])}
        key = keys.get(query.sort, lambda r, name=query.sort: r[name])
        found = [n for n, row in enumerate(rows) if fits(row, query)]
        wanted = sorted(found, key=lambda n: key(rows[n]) * (-1 if query.descending else 1))
        assert index.select(query) == wanted, query
    assert index.row(7) == rows[7]


def test_the_index_grows_with_the_file_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path, rows = tmp_path / "samples.jsonl", sample_rows(random.Random(0), 1)
    index = RolloutIndex(LocalRun(tmp_path))
    assert not index.grow() and len(index) == 0
    append_jsonl(path, rows[:5])
    with path.open("ab") as file:
        file.write(b'{"step": 2, "env"')
    assert index.grow() and len(index) == 5
    assert not index.grow()
    with path.open("ab") as file:
        file.write(b': "late"}\nnot json\n{"step": "wrong"}\n{"step": 2, "group_index": %d}\n' % 10**20)
    append_jsonl(path, rows[5:6])
    assert index.grow() and len(index) == 7
    assert index.row(5) == {"step": 2, "env": "late"} and index.row(6) == json.loads(msgspec.json.encode(rows[5]))
    assert index.facts()["envs"] == ["alpha", "beta", "late"]
    append_jsonl(path, rows[6:9])
    for length in (8, 9, 10):
        assert index.grow(max_bytes=1) and len(index) == length
    assert index.select(Query(sort="reward"))[-1] == 5, "what has no reward comes last"


def test_rollouts_of_evaluations_are_read_beside_those_of_training(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=2)
    index = index_of(run)
    assert list(index.facts()["kinds"]) == ["training"] and index.facts()["count"] == 24
    write_evaluation(run, 2, [1.0, 0.5, None, 0.0])
    assert index.grow() and not index.grow()
    kinds = index.facts()["kinds"]
    assert kinds["evaluation"] == {
        "count": 4,
        "envs": ["alpha"],
        "statuses": ["completed", "failed", "truncated"],
        "steps": [2],
    }
    assert len(index.select(Query(kind="training"))) == 24 and len(index.select(Query())) == 28
    (run / "evals" / "half_written").mkdir()
    (run / "evals" / "half_written" / "summary.json").write_text("{")
    (run / "evals" / "foreign").mkdir()
    (run / "evals" / "foreign" / "summary.json").write_text("[]")
    assert [place.step for place in LocalRun(run).evaluations()] == [2] and not index.grow()
    [late] = index.select(Query(text="TIMEOUT", kind="evaluation"))
    row = index.row(late)
    assert (row["status"], row["group_index"], row["index"], row["answer"]) == ("failed", 1, 0, "known")
    first, second = index.brief(index.siblings(late))
    assert (first["id"], second["id"]) == (late, late + 1) and first["tokens"] == 5 and first["kind"] == "evaluation"
    write_evaluation(run, 2, [0.25, 0.25])
    assert index.grow() and index.facts()["kinds"]["evaluation"]["count"] == 2
    assert [index.row(n)["reward"] for n in index.select(Query(kind="evaluation"))] == [0.25, 0.25]
    assert sum(map(len, index.groups())) == 26


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    """Steps 3 to 6 were made by two attempts; the second one has reached step 4."""
    resumed, whole = (write_page_run(tmp_path / name, num_steps=steps) for name, steps in (("a", 6), ("b", 4)))
    index = index_of(resumed)
    assert index.facts()["count"] == 6 * 12
    rng = random.Random(1)
    for step in (3, 4):
        again = [{**row, "attempt": 1} for row in sample_rows(rng, step, 3, 4, 8)]
        append_jsonl(resumed / "samples.jsonl", again)
        append_jsonl(resumed / "metrics.jsonl", [{**row, "attempt": 1} for row in metric_rows(step)])
        assert index.grow()
    for found in (index, index_of(resumed)):
        assert found.facts()["steps"] == [1, 2, 3, 4] and found.facts()["count"] == 4 * 12
        assert len(found.select(Query())) == 4 * 12 and len(found.select(Query(step=3))) == 12
        assert [len(group) for group in found.groups()] == [4] * 12
        last = found.select(Query(step=4))[0]
        assert len(found.siblings(last)) == 4 and found.row(last)["attempt"] == 1
    a, b = (build_page_data(LocalRun(path)) for path in (resumed, whole))
    assert a["series"] == b["series"] and a["lanes"] == b["lanes"]
    assert len(list(LocalRun(resumed).samples())) == 4 * 12


def test_evaluations_that_a_resume_removes_are_hidden(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=2)
    write_evaluation(run, 1, [1.0, 0.5])
    write_evaluation(run, 2, [0.0, 0.25])
    index = index_of(run)
    late = index.select(Query(kind="evaluation", step=2))
    (run / "evals" / "step_2").rename(tmp_path / "step_2")
    with pytest.raises(ValueError, match=f"rollout {late[0]} cannot be read: .*results.jsonl: No such file"):
        index.row(late[0])
    assert index.grow() and not index.grow()
    assert index.facts()["kinds"]["evaluation"]["steps"] == [1] and len(late) == 2
    assert index.select(Query(kind="evaluation", step=2)) == []
    (tmp_path / "step_2").rename(run / "evals" / "step_2")
    assert index.grow() and index.facts()["kinds"]["evaluation"]["count"] == 4
    assert [index.row(n)["reward"] for n in index.select(Query(kind="evaluation", step=2))] == [0.0, 0.25]


def test_recorded_logprobs_are_those_of_the_last_attempt(tmp_path: Path) -> None:
    sample = {"step": 3, "group_index": 0, "index": 1, "tokens": [5, 6], "loss_mask": [0, 1], "logprobs": [0, -0.5]}
    recorded = {"step": 3, "group_index": 0, "index": 1}
    for attempt in (0, 1):
        append_jsonl(tmp_path / "samples.jsonl", [{**sample, "attempt": attempt}])
        row = {**recorded, "attempt": attempt, "trainer_logprobs": [0.0, -float(attempt)]}
        append_jsonl(tmp_path / "trainer_logprobs.jsonl", [row])
    index = index_of(tmp_path)
    [number] = index.select(Query())
    assert index.row(number)["trainer_logprobs"] == [0.0, -1.0]


def test_recorded_logprobs_find_their_sample(tmp_path: Path) -> None:
    def micro(samples: list[Sample]) -> list[Any]:
        return pack_samples(samples, seq_len=8)[0]

    samples = [
        Sample(prompt="", tokens=[1, 2, 3], loss_mask=[0, 1, 1], inference_logprobs=[0, -1, -2], advantages=[0, 1, 1],
               group_index=5, index=0),
        Sample(prompt="", tokens=[4, 5, 6, 7], loss_mask=[0, 1, 0, 1], inference_logprobs=[0, -3, 0, -4],
               advantages=[0, 1, 0, 1], group_index=5, index=1),
    ]  # fmt: skip
    micros = micro(samples)
    # numbers by which each label is known
    given = {
        tuple(p.sample_ids): [-10.0 * token for token, m in zip(p.labels, p.loss_mask, strict=True) if m]
        for p in micros
    }
    rows = {row["index"]: row["trainer_logprobs"] for row in recorded_rows(samples, given)}
    assert rows == {0: [0.0, -20.0, -30.0], 1: [0.0, -50.0, 0.0, -70.0]}

    lines = [{"step": 3, "group_index": 5, "index": i, "tokens": s.tokens, "loss_mask": s.loss_mask,
              "logprobs": s.inference_logprobs} for i, s in enumerate(samples)]  # fmt: skip
    append_jsonl(tmp_path / "samples.jsonl", lines)
    index = RolloutIndex(LocalRun(tmp_path))
    index.grow()
    assert "trainer" not in rollout_detail(0, index.row(0))["streams"]
    recorded = [{"step": 3, "group_index": 5, "index": i, "trainer_logprobs": row} for i, row in rows.items()]
    append_jsonl(tmp_path / "trainer_logprobs.jsonl", recorded)
    assert index.grow() and not index.grow()
    assert rollout_detail(1, index.row(1))["streams"]["trainer"] == [0.0, -47.0, 0.0, -66.0]
    append_jsonl(tmp_path / "trainer_logprobs.jsonl", recorded[:1])
    index.grow()
    twice = recorded[0]["index"]
    assert "trainer_logprobs" not in index.row(twice), "two rows match: ambiguous"


def test_text_search_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdeé\n %_*?[]\0", k=rng.randrange(40))) for _ in range(300)]
    append_jsonl(tmp_path / "samples.jsonl", [{"step": 1, "prompt": text} for text in texts])
    index = index_of(tmp_path)
    needles = [
        "a",
        "É",
        "ab",
        "ca",
        "abc",
        "e\nb",
        "dab c",
        "zz",
        "z",
        "%",
        "_",
        "*",
        "?[",
        "\0",
        *(t[3:9].upper() for t in texts[::20] if t[3:9]),
    ]
    for needle in needles:
        wanted = [number for number, text in enumerate(texts) if needle.lower() in f"{text}\n\n"]
        assert index.select(Query(text=needle, descending=False)) == wanted, needle


@pytest.mark.slow
def test_a_hundred_thousand_rollouts_stay_quick(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=1, groups=25, size=8)
    lines = (run / "samples.jsonl").read_text()
    with (run / "samples.jsonl").open("a") as file:
        for step in range(2, 501):
            file.write(
                lines.replace('"step":1,', f'"step":{step},').replace('"group_index":1', f'"group_index":{step}')
            )
    start = time.process_time()  # other processes of the machine do not count
    index = index_of(run)
    assert len(index) == 100_000 and time.process_time() - start < 15
    for question in (lambda: index.prompts(200), lambda: index.select(Query(equal=True)), index.facts):
        start = time.process_time()
        question()
        assert time.process_time() - start < 2
