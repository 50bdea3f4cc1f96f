"""scripts/example.py: results page of finished seeds, and errors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = "examples/smollm2/sums"


def run_script(patch: pytest.MonkeyPatch, *options: str) -> None:
    patch.syspath_prepend(str(ROOT / "scripts"))
    patch.chdir(ROOT)
    patch.setattr("sys.argv", ["example.py", *options])
    assert importlib.import_module("example").main() == 0


def keep(directory: Path, stage: str, reward: float, text: str) -> None:
    """Files of a finished evaluation and the result of its seed."""
    score = {"avg@1": reward, "avg@1/ci_low": reward - 0.1, "avg@1/ci_high": reward + 0.1, "examples": 1}
    result = {
        "scores": {stage: {"sums": score}},
        "curves": {} if stage == "untouched" else {"rl": {"reward/mean": [[1, 0.0], [2, reward]]}},
        **{"seconds": 60.0, "cpu_seconds": 90.0, "peak_bytes": 2**30},
    }
    evals = directory / ("" if stage == "untouched" else stage) / "evals" / "sums"
    evals.mkdir(parents=True)
    row = {"example_id": 0, "rollout_idx": 0, "prompt": [{"role": "user", "content": "What is 1 + 2?"}]}
    row |= {"completion": [{"role": "assistant", "content": text}], "reward": reward}
    (evals / "results.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "result.json").write_text(json.dumps(result))


def test_results_of_finished_seeds_become_one_page(tmp_path: Path) -> None:
    keep(tmp_path / "sums" / "untouched", "untouched", 0.1, "I do\nnot `know`")
    for seed in (0, 1):
        keep(tmp_path / "sums" / f"seed_{seed}", "rl", 0.5 + seed / 10, "3")
    command = [sys.executable, "scripts/example.py", EXAMPLE, "--seeds", "0", "1", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "sums" / "results.md").read_text()
    assert page.startswith("| seed | sums, untouched | sums, after RL | minutes | CPU minutes | peak memory, GiB |\n")
    assert "| 1 | 0.100 (0.000 to 0.200) | 0.600 (0.500 to 0.700) | 2.0 | 3.0 | 1.0 |\n" in page
    assert "- What is 1 + 2?\n  - untouched (reward 0.1): `I do / not 'know'`\n  - after RL (reward 0.5): `3`\n" in page
    assert (tmp_path / "sums" / "curve.svg").is_file()


CALL = {"function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "1 + 2 =", "completion": " 3", "reward": 1.0}, ("1 + 2 =", "` 3`", "reward 1")),
        ({"prompt": [{"role": "user", "content": "?"}], "completion": "", "reward": None}, ("?", "", "failed")),
        (
            {"prompt": [], "completion": [{"role": "assistant", "tool_calls": [CALL]}], "reward": 0.0},
            ("", f"`tool call: {json.dumps(CALL)}`", "reward 0"),
        ),
    ],
)
def test_answers_of_any_form_are_shown(
    row: dict[str, object], shown: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    example = importlib.import_module("example")
    (tmp_path / "results.jsonl").write_text(json.dumps({"example_id": 0, "rollout_idx": 0, **row}) + "\n")
    assert example.read_answers(tmp_path / "results.jsonl") == {0: shown}


def test_held_out_losses_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "gsm8k_sft"
    keep(directory / "untouched", "untouched", 0.1, "3")
    result = json.loads((directory / "untouched" / "result.json").read_text()) | {"scores": {}, "curves": {}}
    (directory / "untouched" / "result.json").write_text(json.dumps(result))
    (directory / "seed_0").mkdir()
    result["curves"] = {"sft": {"loss/mean": [[1, 1.5]], "val_loss/mean": [[0, 1.25], [1, 1.125]]}}
    (directory / "seed_0" / "result.json").write_text(json.dumps(result))
    run_script(monkeypatch, "examples/smollm2/gsm8k_sft", "--output-dir", str(tmp_path))
    page = (directory / "results.md").read_text()
    assert page.startswith("| seed | held-out loss, SFT | minutes |") and "| 0 | 1.250 to 1.125 | 2.0 |" in page


def test_all_metrics_of_a_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    rows = [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "distill/a/gap_closed": 1.0, "distill/a/gap_closed/ci_low": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = importlib.import_module("example")
    assert example.read_curves(tmp_path, example.TRAINING["rl"][1]) == {
        "reward/mean": [(1, 0.5)],
        "distill/a/gap_closed": [(2, 1.0)],
        "distill/a/gap_closed/ci_low": [(2, 0.5)],
    }


def test_distillations_show_gap_and_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "distill"
    keep(directory / "untouched", "untouched", 0.1, "3")
    result = json.loads((directory / "untouched" / "result.json").read_text()) | {"scores": {}, "curves": {}}
    (directory / "untouched" / "result.json").write_text(json.dumps(result))
    (directory / "seed_0").mkdir()
    last = {"./town.py/student/avg": 0.75, "./town.py/teacher_context/avg": 0.875, "world/student/avg": 0.5}
    last |= {"./town.py/gap_closed": 0.86, "./town.py/gap_closed/ci_low": 0.7, "./town.py/gap_closed/ci_high": 1.0}
    last |= {"./town.py/mayor/student/avg": 0.25, "./town.py/mayor/gap_closed": 0.3}  # one context of the environment
    last |= {"world/retention": 0.95}
    curves = {f"distill/{name}": [[0, 0.0], [8, value]] for name, value in last.items()}
    (directory / "seed_0" / "result.json").write_text(json.dumps(result | {"curves": {"rl": curves}}))
    run_script(monkeypatch, "examples/smollm2/distill", "--output-dir", str(tmp_path))
    page = (directory / "results.md").read_text()
    town = ("./town.py, before and after", "teacher", "gap closed")
    mayor = ("./town.py/mayor, before and after", "./town.py/mayor, gap closed")
    assert " | ".join((*town, "world, before and after", "world, retention", *mayor)) in page
    cells = "0.00, 0.75 | 0.88 | 0.86 (0.70 to 1.00) | 0.00, 0.50 | 0.95 | 0.00, 0.25 | 0.30 | 2.0"
    assert cells in page


@pytest.mark.parametrize(
    ("low", "high", "text"), [(0.25, 0.75, "0.500 (0.250 to 0.750)"), (None, None, "0.500")], ids=["known", "unknown"]
)
def test_scores_without_an_interval_are_shown(
    low: float | None, high: float | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a single reward of 2 is null in `summary.json`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    summary = {"avg@1": 0.5, "avg@1/ci_low": low, "avg@1/ci_high": high}
    assert importlib.import_module("stages").format_score(summary) == text


def test_results_of_other_settings_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    keep_result = importlib.import_module("example").keep_result

    def run(directory: Path) -> dict[str, int]:
        directory.mkdir()
        return {"seconds": 1}

    one, other = ({"--model.name": name, "--max-steps": None} for name in ("a", "b"))
    kept = keep_result(tmp_path / "seed_0", run, one)
    assert kept["seconds"] == 1 and keep_result(tmp_path / "seed_0", run, one) == kept
    with pytest.raises(SystemExit, match=r"another --model\.name: choose another --output-dir"):
        keep_result(tmp_path / "seed_0", run, other)


@pytest.mark.parametrize("name", ["rl.toml", "task.py"])
def test_results_of_other_files_are_not_reused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("example")

    def run(self: object, directory: Path, seed: int = 0) -> dict[str, object]:
        directory.mkdir(parents=True)
        return {"scores": {}, "curves": {}, "seconds": 1, "cpu_seconds": 1, "peak_bytes": 1}

    for method in ("run_untouched", "run_seed"):
        monkeypatch.setattr(script.Example, method, run)
    monkeypatch.setattr(script, "save_curves", lambda *_: False)
    folder = tmp_path / "task"
    folder.mkdir()
    for file, text in (("rl.toml", "max_steps = 1"), ("task.py", "")):
        (folder / file).write_text(text)
    example = script.Example(folder, tmp_path / "out", "m")
    example.run([0])
    (folder / "rl.toml").write_text("# as before\nmax_steps = 1")
    (folder / "README.md").write_text("new")
    example.run([0])
    (folder / name).write_text("max_steps = 2")
    with pytest.raises(SystemExit, match=f"another {name}: choose another --output-dir"):
        example.run([0])
    for path in (tmp_path / "out").glob("*/result.json"):  # of an earlier version
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"settings": {"--model.name": "m"}}))
    example.run([0])


def test_only_local_models_forbid_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    is_local = importlib.import_module("stages").is_local
    assert is_local(str(tmp_path)) and is_local("tiny-qwen3")
    assert not is_local("smollm2") and not is_local("HuggingFaceTB/SmolLM2-360M-Instruct")


@pytest.mark.parametrize(
    ("example", "words"),
    [("examples/smollm2", "name the folder of an example"), (EXAMPLE, "is an unfinished run: remove it")],
)
def test_wrong_folders_are_errors(
    example: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums" / "untouched").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, example, "--output-dir", str(tmp_path))
    assert ended.value.code and words in f"{ended.value.code}{capsys.readouterr().err}"
