"""Data of the page: curves, updates, configuration, token streams and texts, training time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from page_runs import index_of, metric_rows, write_distillation_run, write_page_run

from prime_rl.monitor import page_data
from prime_rl.monitor.local_runs import LocalRun, open_run
from prime_rl.monitor.page_data import build_page_data, build_update, config_rows, thin
from prime_rl.monitor.rollout_detail import rollout_detail
from prime_rl.monitor.timing import find_timing
from prime_rl.monitor.vocabulary import Vocabulary
from rollouts.training.metrics import append_jsonl


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
    assert first["configs"]["trainer"][1] == ["", "micro_bs", "4", "default"], "a comment, as in records"
    assert first["configs"]["trainer"][2] == ["model", "name", '"tiny"', "run.toml:3"]
    assert [(e["env"], e["step"]) for e in first["evals"]] == [("alpha", 12)]
    assert first["weights"][0]["dtypes"] == ["float32"]
    append_jsonl(run_dir / "metrics.jsonl", [{"step": 13, "process": "trainer", "timestamp": 1.0, "loss/mean": 7.0}])
    update = build_update(open_run(run_dir), first["offset"])
    assert update["series"] == {"steps": [[13]], "curves": {"trainer": {"loss/mean": [0, [7.0]]}}}
    assert build_update(open_run(run_dir), update["offset"])["series"]["curves"] == {}


def test_an_environment_may_be_named_like_a_version(tmp_path: Path) -> None:
    for folder in ("step_5/multi_step_2", "step_3", "two_step_4"):
        (tmp_path / "evals" / folder).mkdir(parents=True)
        (tmp_path / "evals" / folder / "summary.json").write_text("{}")
    found = {place.env: place.step for place in LocalRun(tmp_path).evaluations()}
    assert found == {"multi_step_2": 5, "step_3": None, "two_step_4": None}


def test_updates_tell_of_new_attempts_of_each_process(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    whole = build_page_data(LocalRun(run))
    append_jsonl(run / "metrics.jsonl", metric_rows(4))
    same = build_update(LocalRun(run), whole["offset"])
    assert whole["attempts"] == same["attempts"] == {"trainer": 0, "orchestrator": 0, "inference": 0}
    again = [{**row, "attempt": 1} for row in metric_rows(2)]
    append_jsonl(run / "metrics.jsonl", [row for row in again if row["process"] == "orchestrator"])
    first = build_update(LocalRun(run), same["offset"])
    assert first["attempts"] == {"orchestrator": 1}
    assert build_page_data(LocalRun(run))["attempts"] == {"trainer": 0, "orchestrator": 1, "inference": 0}
    append_jsonl(run / "metrics.jsonl", [row for row in again if row["process"] == "trainer"])
    assert build_update(LocalRun(run), first["offset"])["attempts"] == {"trainer": 1}


def test_secrets_with_quotes_are_hidden(tmp_path: Path) -> None:
    run = write_page_run(tmp_path / "run", num_steps=1)
    (run / "configs").mkdir(exist_ok=True)
    (run / "configs" / "rl.toml").write_text('api_key = "abc\\"supersecret"\nname = "a\\"b"\n')
    text = LocalRun(run).configs()["rl"]
    assert "supersecret" not in text and 'api_key = "***"\n' in text and 'name = "a\\"b"' in text


def test_config_rows_take_values_that_hold_signs() -> None:
    text = 'a = "x # y = z"   # file.toml:1\n[b.c]  # here\nd = {e = 1, f = "g"}  # default\n"odd key" = 3\n'
    assert config_rows(text) == [
        ["", "a", '"x # y = z"', "file.toml:1"],
        ["b.c", "d", '{e = 1, f = "g"}', "default"],
        ["b.c", '"odd key"', "3", ""],
    ]


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

    def seconds(rows: list[dict[str, Any]]) -> float:
        return find_timing(rows).seconds

    rows = [row("trainer", 110.0, **{"timeline/start": 100.0}), row("orchestrator", 90.0), row("trainer", 130.0)]
    assert seconds(rows) == 30
    assert seconds([*rows, row("eval", 9000.0)]) == 30, "an evaluation that was made later"
    resumed = [row("trainer", 5000.0 + k, attempt=1) for k in range(11)]
    assert seconds([*rows, *resumed]) == 40, "the pause before the second attempt does not count"
    steps = [row("sft", 10.0 * step, step=step, attempt=0, **{"loss/mean": 1.0}) for step in range(1, 4)]
    values: list[dict[str, Any]] = [{"timeline/start": 8990.0}, {"val_loss/mean": 1.0}]
    late = [row("sft", 9000.0, step=3, attempt=0, **found) for found in values]
    assert seconds([*steps, *late]) == 8990, "a validation of the last step"
    begun = row("sft", 8000.0, step=3, attempt=1)
    assert seconds([begun, *steps, *late]) == 20, "a validation that a resume repeated"
    timing = find_timing([begun, *steps], 20)
    assert (timing.seconds, timing.until, timing.finish) == (20, 8000, None), "a resume that has no metrics yet"
    assert seconds([row("orchestrator", 1.0), row("orchestrator", 3.0)]) == 2
    assert seconds([]) == 0


def test_remaining_time_follows_the_pace_of_recent_steps() -> None:
    head = {"process": "trainer", "loss/mean": 1.0}
    rows = [{**head, "timestamp": 100.0 + 3 * step, "step": step} for step in range(1, 9)]
    timing = find_timing(rows, 20)
    assert (timing.seconds, timing.until, timing.finish) == (21, 124, 124 + 3 * 12)
    slower = [*rows, {**head, "timestamp": 900.0, "step": 9}]
    assert find_timing(slower, 20).finish == 900 + 3 * 11, "one slow step does not count"
    assert find_timing(rows, None).finish is None
    resumed = [*rows, {**head, "timestamp": 9000.0, "step": 5, "attempt": 1}]
    assert find_timing(resumed, 20).finish is None, "the first step after a pause has no pace yet"


def test_charts_of_training_health_are_explained() -> None:
    text = (Path(page_data.__file__).parent / "page" / "metric_help.js").read_text()
    meanings = set(re.findall(r'^  "([^"]+)":', text.partition("const MEANING")[2].partition("\n};")[0], re.MULTILINE))
    groups = text.partition("const CHART_GROUPS")[2].partition("\n];")[0]
    for title in ("Stability", "Off-policy diagnostics"):
        part = groups.partition(f'["{title}", [')[2].partition("]]]")[0]
        charts = re.findall(r'\["([^"]+)"', part)
        assert len(charts) >= 6 and not set(charts) - meanings, title
