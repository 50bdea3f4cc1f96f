"""Page: rollout index, packed report, token texts, findings and server routes."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from page_runs import (
    HOSTILE,
    metric_rows,
    sample_rows,
    write_distillation_run,
    write_evaluation,
    write_page_run,
)

from prime_rl.monitor import full_text_index as text_index
from prime_rl.monitor.compare import compare_runs, differences_text
from prime_rl.monitor.explain import explain, findings_text, waiting_shares
from prime_rl.monitor.full_text_index import TextIndex
from prime_rl.monitor.local_runs import LocalRun, open_run
from prime_rl.monitor.page_data import build_page_data, build_update, config_rows, explain_run, sum_seconds, thin
from prime_rl.monitor.replay import compare, plan_replay, verdict_text
from prime_rl.monitor.report import MAX_BYTES, _Columns, choose_rollouts, write_report
from prime_rl.monitor.rollout_detail import rollout_detail
from prime_rl.monitor.rollout_index import Query, RolloutIndex
from prime_rl.monitor.serve import LiveRun, build_app, read_query
from prime_rl.monitor.vocabulary import Vocabulary
from prime_rl.runtime.run_state import STATE_FILE, StateRecorder, _start_ticks
from prime_rl.trainer.rl.logprob_recorder import recorded_rows
from rollouts.training.batching import pack_samples
from rollouts.training.metrics import append_jsonl, load_jsonl
from rollouts.training.types import Sample


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page_run(tmp_path_factory.mktemp("page") / "run")


def index_of(run_dir: Path) -> RolloutIndex:
    index = RolloutIndex(LocalRun(run_dir))
    index.grow()
    return index


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
        assert index.select(query).tolist() == wanted, query
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
        file.write(b': "late"}\nnot json\n{"step": "wrong"}\n')
    append_jsonl(path, rows[5:6])
    assert index.grow() and len(index) == 7
    assert index.row(5) == {"step": 2, "env": "late"} and index.row(6) == json.loads(msgspec.json.encode(rows[5]))
    assert index.facts()["envs"] == ["alpha", "beta", "late"]
    append_jsonl(path, rows[6:9])
    for length in (8, 9, 10):
        assert index.grow(max_bytes=1) and len(index) == length
    assert index.select(Query(sort="reward")).tolist()[-1] == 5, "what has no reward comes last"


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
    assert [place.step for place in LocalRun(run).evaluations()] == [2] and not index.grow()
    [late] = index.select(Query(text="TIMEOUT", kind="evaluation"))
    row = index.row(int(late))
    assert (row["status"], row["group_index"], row["index"], row["answer"]) == ("failed", 1, 0, "known")
    first, second = index.brief(index.siblings(int(late)))
    assert (first["id"], second["id"]) == (late, late + 1) and first["tokens"] == 5 and first["kind"] == "evaluation"
    write_evaluation(run, 2, [0.25, 0.25])
    assert index.grow() and index.facts()["kinds"]["evaluation"]["count"] == 2
    assert [index.row(int(n))["reward"] for n in index.select(Query(kind="evaluation"))] == [0.25, 0.25]
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


def test_text_search_is_that_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "BLOCK", 64)
    rng = random.Random(3)
    texts = ["".join(rng.choices("abcdeé\n ", k=rng.randrange(40))) for _ in range(300)]
    index = TextIndex()
    for text in texts:
        index.add(text)
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
        *(t[3:9].upper() for t in texts[::20] if t[3:9]),
    ]
    for needle in needles:
        assert index.search(needle).tolist() == [needle.lower() in text for text in texts], needle


def test_reports_choose_whole_groups_from_all_over_the_run(run_dir: Path) -> None:
    index = index_of(run_dir)
    assert choose_rollouts(index, 10_000) == list(range(len(index)))
    chosen = choose_rollouts(index, 50)
    assert len(chosen) <= 50 and len(chosen) % 4 == 0
    steps = {index.row(n)["step"] for n in chosen}
    assert min(steps) == 1 and max(steps) == 12 and len(steps) >= 9
    assert choose_rollouts(index, 3) == []


def unpack(page: str) -> tuple[dict[str, Any], bytes]:
    """The data of a report: JSON and columns."""
    [data] = re.findall(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)
    raw = gzip.decompress(base64.b64decode(data))
    length = int.from_bytes(raw[:4], "little")
    return json.loads(raw[4 : 4 + length]), raw[4 + length :]


def test_report_is_self_contained(run_dir: Path, tmp_path: Path) -> None:
    held = write_report(open_run(run_dir), tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert held == {"rollouts": 144, "total": 144, "with_tokens": 144, "bytes": len(page.encode())}
    assert held["bytes"] < MAX_BYTES
    assert "window.hacked" not in page and page.count("<script") == 2 and page.count("</script>") == 2
    assert not re.findall(r"""(?:src|href)=["'](?!#)|https?://(?!www\.w3\.org/)|url\(|@import""", page)
    data, columns = unpack(page)
    assert data["run"]["state"] == "finished" and set(data["series"]["curves"]) == {"trainer", "orchestrator"}
    assert data["rollouts"]["details"][0]["completion"] == HOSTILE
    layout = {name: (kind, count) for name, kind, count in data["rollouts"]["layout"]}
    assert set(layout) == {"tokens", "mask", "logprob", "advantage", "teacher", "trainer", "version"}
    assert sum(detail["length"] for detail in data["rollouts"]["details"]) == layout["tokens"][1]
    assert len(columns) == sum(-(-n * int(kind[1]) // 4) * 4 for kind, n in layout.values())
    number = layout["tokens"][1]
    tokens = np.frombuffer(columns[: 2 * number], dtype="<u2")
    rows = list(load_jsonl(run_dir / "samples.jsonl"))
    assert tokens.tolist() == [token for row in rows for token in row["tokens"]]
    assert data["vocab"]["900"] == "<end>"


def test_report_drops_tokens_then_texts_then_rollouts(tmp_path: Path) -> None:
    rng = random.Random(1)
    run = write_page_run(tmp_path / "run", num_steps=3, groups=2, size=2)

    def long_row(row: dict[str, Any]) -> dict[str, Any]:
        tokens = [rng.randrange(60_000) for _ in range(600)]
        streams = {"tokens": tokens, "loss_mask": [1] * 600, "logprobs": [-(t % 97) / 9 for t in tokens]}
        return {**row, **streams, "teacher_logprobs": None, "trainer_logprobs": None}

    rows = [long_row(row) for step in range(4, 14) for row in sample_rows(rng, step)]
    append_jsonl(run / "samples.jsonl", rows)
    held = write_report(open_run(run), tmp_path / "report.html", max_bytes=260_000)
    assert held["bytes"] <= 260_000 and held["rollouts"] == held["total"] == 132
    assert 20 <= held["with_tokens"] < 132
    few = write_report(open_run(run), tmp_path / "report.html", max_bytes=170_000)
    assert few["bytes"] <= 170_000 and few["with_tokens"] < held["with_tokens"]


def test_streams_of_a_row() -> None:
    engine, teacher = [0, -1.0, -2.0], [0, -0.5, -3.0]
    row = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": engine, "teacher_logprobs": teacher}
    row |= {"advantage": 0.25, "versions": [[1, 4], [2, 5]]}
    streams = rollout_detail(0, row)["streams"]
    assert streams == {
        "logprob": [0, -1, -2], "teacher": [0, 0.5, -1], "advantage": [0, 0.25, 0.25], "version": [4, 4, 5],
    }  # fmt: skip
    assert rollout_detail(0, {**row, "loss_mask": [1]})["streams"] == {}
    assert rollout_detail(0, {**row, "teacher_logprobs": [1]})["streams"].keys() == {"logprob", "advantage", "version"}


def test_columns_of_a_report_are_aligned() -> None:
    """At multiples of four bytes, where a browser can read them in place."""
    columns = _Columns()
    columns.add([7, 8, 9], [0, 1, 1], {"logprob": [0.0, -1.0, -4.0]})
    data, found, offset = columns.data(), {}, 0
    for name, dtype, count in columns.layout():
        found[name] = np.frombuffer(data, dtype, count, offset).tolist()
        offset += -(-np.dtype(dtype).itemsize * count // 4) * 4
    assert found == {"tokens": [7, 8, 9], "mask": [0, 1, 1], "logprob": [0, 64, 128]} and offset == len(data)


def test_vocabulary_of_byte_level_and_byte_fallback(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    levels = {"model": {"vocab": {"\u0120hi": 1, "\u00c3": 2, "\u00a9": 3}}, "decoder": {"type": "ByteLevel"}}
    path.write_text(json.dumps({**levels, "added_tokens": [{"id": 9, "content": "<end>"}]}))
    vocabulary = Vocabulary(path)
    assert [vocabulary.bytes_of(t) for t in (1, 9, 77)] == [b" hi", b"<end>", b""]
    assert (vocabulary.bytes_of(2) + vocabulary.bytes_of(3)).decode() == "é"
    path.write_text(
        json.dumps({"model": {"vocab": [["\u2581hi", 0.0], ["<0x0A>", -1.0]]}, "decoder": {"type": "Sequence"}})
    )
    assert Vocabulary(path).table([0, 1]) == {"0": " hi", "1": "\n"}


def test_our_tokenizer_reads_the_same_as_the_real_one(tmp_path: Path) -> None:
    import tokenizers

    path = Path(__file__).parents[4] / "src/prime_rl/assets/tiny-qwen3/tokenizer.json"
    real, ours = tokenizers.Tokenizer.from_file(str(path)), Vocabulary(path)
    text = "Naïve 東京 🙂\n\tend <|im_end|> ok"
    ids = real.encode(text).ids
    joined = b"".join(ours.bytes_of(token) for token in ids).decode()
    assert joined == real.decode(ids, skip_special_tokens=False) == text


def test_thin_curves_keep_their_spikes() -> None:
    points = [(step, float(step % 7)) for step in range(10_000)]
    points[4321] = (4321, 99.0)
    kept = thin(points, 400)
    assert len(kept) <= 402 and (4321, 99.0) in kept and kept[0] == points[0] and kept[-1] == points[-1]
    assert kept == sorted(kept) and thin(points[:5], 5) == points[:5]


def test_page_data_and_its_updates_add_up(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run")
    first = build_page_data(open_run(run_dir))
    assert first["configs"]["trainer"][2] == ["model", "name", '"tiny"', "run.toml:3"]
    assert [(e["env"], e["step"]) for e in first["evals"]] == [("alpha", 12)]
    assert first["weights"][0]["dtypes"] == ["float32"]
    append_jsonl(run_dir / "metrics.jsonl", [{"step": 13, "process": "trainer", "timestamp": 1.0, "loss/mean": 7.0}])
    update = build_update(open_run(run_dir), first["offset"])
    assert update["series"] == {"steps": [[13]], "curves": {"trainer": {"loss/mean": [0, [7.0]]}}}
    assert build_update(open_run(run_dir), update["offset"])["series"]["curves"] == {}


def test_config_rows_take_values_that_hold_signs() -> None:
    text = 'a = "x # y = z"   # file.toml:1\n[b.c]  # here\nd = {e = 1, f = "g"}  # default\n"odd key" = 3\n'
    assert config_rows(text) == [
        ["", "a", '"x # y = z"', "file.toml:1"],
        ["b.c", "d", '{e = 1, f = "g"}', "default"],
        ["b.c", '"odd key"', "3", ""],
    ]


def test_explanations_name_stalls_and_fixes() -> None:
    def lanes(wait: float, generate: float) -> dict[str, list[tuple[str, float, float, int]]]:
        spans = [("wait_for_batch", 10.0 * s, 10.0 * s + wait, s) for s in range(1, 9)]
        spans += [("forward_backward", 10.0 * s + wait, 10.0 * s + 10, s) for s in range(1, 9)]
        return {"trainer": spans, "inference": [("generate", 10.0 * s, 10.0 * s + generate, s) for s in range(1, 9)]}

    config = {"orchestrator": {"max_async_level": 1}, "trainer": {"micro_bs": 8, "model": {"seq_len": 100}}}
    shares = waiting_shares(lanes(4, 9))
    assert shares["trainer"]["wait_for_batch"] == pytest.approx(0.4)
    assert shares["inference"]["generate"] == pytest.approx(0.9)
    starved = findings_text(explain({}, lanes(4, 9), config))
    assert "waits for batches 40%" in starved and "add engines" in starved
    assert "raise max_async_level" in findings_text(explain({}, lanes(4, 5), config))
    stalled = {
        "orchestrator": {
            "time/slots_exhausted": [(s, 5.0) for s in range(1, 9)],
            "time/step": [(s, 10.0) for s in range(1, 9)],
        }
    }
    assert "trainer is the bottleneck" in findings_text(explain(stalled, lanes(1, 4), config))
    cut = {name: [(s, share) for s in range(1, 9)] for name, share in (
        ("is_truncated/mean", 0.5), ("batch/effective_batch_size", 0.2), ("reward/mean", 0.1)
    )}  # fmt: skip
    text = findings_text(explain({"orchestrator": cut}, {}, config))
    assert "max_tokens" in text and "online_difficulty_filtering" in text
    batch = {name: [(8, value)] for name, value in (
        ("batch/samples", 40.0), ("batch/tokens", 1000.0), ("batch/micro_batches", 5.0)
    )}  # fmt: skip
    assert "micro-batches are 25% full" in findings_text(explain({"trainer": batch}, {}, config))
    assert findings_text([]) == "no complete step yet"


def test_no_advice_without_evidence_beyond_the_noise() -> None:
    def text(values: list[float]) -> str:
        series = {"is_truncated/mean": list(enumerate(values, 1)), "reward/mean": list(enumerate(values, 1))}
        return findings_text(explain({"orchestrator": series}, {}, {}))

    assert "cut off" not in text([0.5] * 6), "four steps after the warm-up"
    assert "50% of the rollouts are cut off" in text([0.5] * 7)
    assert "cut off" not in text([0.5] * 2 + [0.0, 0.25] * 10), "the mean is .125, but so is its noise"
    lanes = {"trainer": [("wait_for_batch", 10.0 * s, 10.0 * s + 9, s) for s in range(1, 7)]}
    assert "waits" not in findings_text(explain({}, lanes, {}))


def test_distillation_is_explained_without_rewards(tmp_path: Path) -> None:
    text = findings_text(explain_run(open_run(write_distillation_run(tmp_path / "run"))))
    assert "reward" not in text and "groups" not in text
    assert "teacher KL: on the student's tokens it fell from" in text
    assert "gap closed on facts: 0.80 (0.60 to 1.10) at step 12: the student scores 0.5, the teacher 0.6" in text
    assert "retention of other: the student keeps 70%" in text and "raise reference_weight" in text
    assert "2 samples were not scored by the teacher" in text and "max_model_len" in text


def test_equal_rewards_still_teach_beside_a_teacher() -> None:
    loss = {"adv_tau": 1.0, "teacher_tau": 1.0}
    config = {"trainer": {"loss": loss}, "orchestrator": {"teacher_model": {"context": "x"}}}
    series = {"orchestrator": {"batch/effective_batch_size": [(s, 0.2) for s in range(1, 9)]}}
    text = findings_text(explain(series, {}, config))
    assert "the others learn from the teacher alone" in text and "teach anything" not in text


def test_page_data_of_a_distillation(tmp_path: Path) -> None:
    data = build_page_data(open_run(write_distillation_run(tmp_path / "run")))
    assert data["run"]["kind"]["name"] == "distillation" and not data["run"]["kind"]["scores_rewards"]
    assert [(row["env"], row["step"], row["gap_text"]) for row in data["scores"]] == [
        ("facts", 0, "n.s."), ("facts", 12, "0.80 (0.60 to 1.10)"), ("other", 0, "-"), ("other", 12, "-"),
    ]  # fmt: skip
    [[name, verb, *_]] = data["trends"]
    assert (name, verb) == ("teacher_kl/mean", "fell")
    index = index_of(tmp_path / "run")
    assert [row["scored"] for row in index.brief([0, 1])] == [False, True]


def test_duration_counts_training_only() -> None:
    def row(process: str, at: float, **more: Any) -> dict[str, Any]:
        return {"process": process, "timestamp": at, **more}

    rows = [row("trainer", 110.0, **{"timeline/start": 100.0}), row("orchestrator", 90.0), row("trainer", 130.0)]
    assert sum_seconds(rows) == 30
    assert sum_seconds([*rows, row("eval", 9000.0)]) == 30, "an evaluation that was made later"
    resumed = [row("trainer", 5000.0 + k, attempt=1) for k in range(11)]
    assert sum_seconds([*rows, *resumed]) == 40, "the pause before the second attempt does not count"
    assert sum_seconds([row("orchestrator", 1.0), row("orchestrator", 3.0)]) == 2
    assert sum_seconds([]) == 0


def test_live_page_notices_that_a_run_was_killed(tmp_path: Path) -> None:
    run_dir = write_page_run(tmp_path / "run")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        live = LiveRun(open_run(run_dir))
        with StateRecorder(run_dir, "rl"):
            state = json.loads((run_dir / STATE_FILE).read_text())
        state |= {"status": "running", "ended": None}
        state["process"] |= {"pid": process.pid, "started": _start_ticks(process.pid)}
        (run_dir / STATE_FILE).write_text(json.dumps(state))
        before = live._state()
        assert live.page_data()["run"]["status"] == "running"
        assert live.update(0)["run"]["state"] == "running"
        process.kill()
    assert live._state() != before, "no file has changed, but the process has gone"
    assert live.update(0)["run"]["status"] == "stopped at step 12 (killed)"


def test_routes_answer_this_machine_only(run_dir: Path) -> None:
    from starlette.testclient import TestClient

    live = LiveRun(open_run(run_dir))
    live.index.grow()
    client = TestClient(build_app(live), base_url="http://127.0.0.1:8050")  # without its life cycle: nothing is watched
    page = client.get("/")
    assert page.status_code == 200 and page.headers["x-content-type-options"] == "nosniff"
    assert client.get("/api/run").json()["facts"]["count"] == 144
    found = client.get(
        "/api/rollouts", params={"text": "question 3 2", "limit": 2, "sort": "reward", "descending": "false"}
    ).json()
    assert found["total"] == 4 and len(found["rows"]) == 2 and found["rows"][0]["reward"] <= found["rows"][1]["reward"]
    detail = client.get(f"/api/rollouts/{found['rows'][0]['id']}").json()
    assert detail["detail"]["group"] == 302 and detail["vocab"]["900"] == "<end>"
    assert len(client.get(f"/api/rollouts/{found['rows'][0]['id']}/group").json()) == 4
    for wrong in (
        "/api/rollouts?sort=color",
        "/api/rollouts?step=x",
        "/api/rollouts?nonsense=1",
        "/api/rollouts/999999",
    ):
        assert client.get(wrong).status_code == 400
    assert client.post("/api/run").status_code == 405
    assert client.get("/api/run", headers={"host": "rebound.example"}).status_code == 403
    assert read_query({"min": "0.5"}) == Query(min_reward=0.5)


def write_weights(run_dir: Path, step: int, value: float) -> None:
    """A published version with two tensors."""
    from safetensors.numpy import save_file

    path = run_dir / "weights" / f"step_{step}"
    path.mkdir(exist_ok=True)
    tensors = {"a.weight": np.zeros(3, "f4"), "b.weight": np.array([1.0, value], "f4")}
    save_file(tensors, path / "model.safetensors")
    entries = {n: {"dtype": "float32", "shape": t.shape, "digest": t.tobytes().hex()} for n, t in tensors.items()}
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "step": step, "tensors": entries}))
    (path / "STABLE").touch()


def test_diff_names_the_first_token_metric_and_tensor(tmp_path: Path) -> None:
    runs = [write_page_run(tmp_path / name, num_steps=4) for name in "ab"]
    a, b = map(open_run, runs)
    for path in runs:
        write_weights(path, 2, 5.0)
        write_weights(path, 4, 5.0)
    assert compare_runs(a, b) == []
    assert "are equal" in differences_text(a, b, [])

    rows = list(load_jsonl(b.samples_path))
    rows[30]["tokens"][3] += 1  # in step 3
    rows[40]["reward"] = 77.0
    b.samples_path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    append_jsonl(b.metrics_path, [{"step": 3, "process": "trainer", "loss/mean": 9.0, "time/step": 1.0}])
    write_weights(b.path, 4, 5.5)
    (b.path / "configs" / "trainer.toml").write_text('max_steps = 5  # x\noutput_dir = "elsewhere"  # y\n')
    found = compare_runs(a, b)
    token = rows[30]["tokens"][3]
    parted = [(d.what, d.step) for d in found if d.step is not None]
    assert parted == [("sample", 3), ("metric", 3), ("weights", 4)]
    text = differences_text(a, b, found)
    assert f"first difference: step 3, sample: step 3 group 301 rollout 2: token 3 is {token - 1} / {token}" in text
    assert "trainer loss/mean = 0.03333333333333333 / 9.0" in text and "trainer max_steps = 4 / 5" in text
    assert "b.weight (up to 0.5 apart); 1 of 2 tensors differ" in text and "elsewhere" not in text
    append_jsonl(b.metrics_path, [{"step": 2, "process": "trainer", "optim/lr": 9.0}])  # earlier, and later by name
    [metric] = [d for d in compare_runs(a, b) if d.what == "metric"]
    assert metric.step == 2 and "trainer optim/lr" in metric.text


def test_replay_reports_missing_files(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"weights of step 5 are not .* there are 12"):
        plan_replay(open_run(run), 5)
    with pytest.raises(ValueError, match=r"step_1 of .*rollouts was removed .*keep-rollouts"):
        plan_replay(open_run(run), 12)
    for step in (10, 11):
        for part in ("trainer", "orchestrator")[: 1 if step == 11 else 2]:
            (run / "checkpoints" / f"step_{step}" / part).mkdir(parents=True)
            (run / "checkpoints" / f"step_{step}" / part / "STABLE").touch()
    for step in (11, 12):
        (run / "rollouts" / f"step_{step}").mkdir(parents=True)
        (run / "rollouts" / f"step_{step}" / "STABLE").touch()
    plan = plan_replay(open_run(run), 12)
    assert (plan.start, [path.name for path in plan.batches]) == (10, ["step_11", "step_12"])
    (run / "configs" / "trainer.toml").unlink()
    with pytest.raises(ValueError, match=r"neither configs/trainer\.toml nor configs/sft\.toml"):
        plan_replay(open_run(run), 12)
    (run / "configs" / "sft.toml").write_text("max_steps = 12\n")
    plan = plan_replay(open_run(run), 12)
    assert (plan.process, plan.start, plan.batches) == ("sft", 11, ()), "the data set has its batches"


def test_replay_detects_differences(tmp_path: Path) -> None:
    runs = [write_page_run(tmp_path / name, num_steps=4) for name in "ab"]
    for path in runs:
        write_weights(path, 4, 5.0)
    a, b = map(open_run, runs)
    assert compare(a, b, 4).equal and "all 2 tensors" in verdict_text(4, compare(a, b, 4))
    write_weights(runs[1], 4, 6.0)
    append_jsonl(b.metrics_path, [{"step": 4, "process": "trainer", "loss/mean": 0.5}])
    verdict = compare(a, b, 4)
    assert (verdict.equal, verdict.tensors, verdict.metrics) == (False, ["b.weight"], [("loss/mean", 0.025, 0.5)])
    assert "1 of 2 tensors" in verdict_text(4, verdict) and "loss/mean was 0.025, is 0.5" in verdict_text(4, verdict)


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
    given = [[-10.0 * token for token, m in zip(p.labels, p.loss_mask, strict=True) if m] for p in micros]
    rows = {row["index"]: row["trainer_logprobs"] for row in recorded_rows(samples, micros, given)}
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
    assert "trainer_logprobs" not in index.row(twice), "two that fit: nobody knows which"
