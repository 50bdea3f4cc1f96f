"""Comparison of two runs, and of a run with its replay."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from page_runs import (
    write_page_run,
)

from prime_rl.monitor.compare import compare_metrics, compare_runs, differences_text, flat_config, is_place
from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.replay import compare, has_step, plan_replay, verdict_text
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.metrics import append_jsonl, load_jsonl


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


def test_the_time_of_an_evaluation_is_not_compared(tmp_path: Path) -> None:
    a, b = (open_run(write_page_run(tmp_path / name, num_steps=4)) for name in "ab")
    for run, seconds in ((a, 2.5), (b, 2.75)):
        scores = {"eval/alpha/avg@2": 0.5, "eval/alpha/time": seconds}
        append_jsonl(run.metrics_path, [{"step": 4, "process": "orchestrator", **scores}])
    assert compare_metrics(a, b) is None
    append_jsonl(b.metrics_path, [{"step": 4, "process": "orchestrator", "eval/alpha/avg@2": 0.75}])
    metric = compare_metrics(a, b)
    assert metric is not None and "eval/alpha/avg@2 = 0.5 / 0.75" in metric.text


def test_models_and_all_environments_are_compared() -> None:
    text = 'output_dir = "{0}"\n[model]\nname = "{0}"\n[wandb]\nname = "{0}"\n'
    text += '[[env]]\nargs = {{n = "{0}"}}\n[[env]]\nid = "x"\n'
    ours, theirs = (flat_config(text.format(name)) for name in "ab")
    assert ours["env.1.id"] == theirs["env.1.id"] == '"x"'
    changed = {key for key, value in ours.items() if theirs[key] != value and not is_place(key)}
    assert changed == {"model.name", "env.0.args.n"}


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


def test_a_step_needs_its_metrics_and_its_weights(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    append_jsonl(files.metrics, [{"step": 3, "process": "trainer", "loss/mean": 0.5}])
    assert not has_step(files, 3), "weights are published in the background"
    files.weights.mkdir()
    write_weights(tmp_path, 3, 5.0)
    assert has_step(files, 3) and not has_step(files, 2)
