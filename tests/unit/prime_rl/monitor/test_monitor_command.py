"""`monitor`: local runs and runs at Weights & Biases, summary, failed samples, plots, and invalid input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_wandb import KEY, FakeRun, FakeWandb, serve_wandb
from page_runs import write_distillation_run

from prime_rl.monitor import local_runs, wandb_monitor, wandb_runs
from prime_rl.monitor.plots import save_plots
from prime_rl.monitor.run_status import find_status
from prime_rl.monitor.series import join_processes, read_series, smooth
from prime_rl.monitor.summary import failed_samples, messages_of, sample_text, summarize_metrics
from prime_rl.telemetry.trackers import SAMPLE_COLUMNS
from rollouts.training.metrics import append_jsonl

ROOT = Path(__file__).parents[4]


def write_run(path: Path, num_steps: int = 30) -> Path:
    """A run directory as trainer and orchestrator leave it."""
    rows, samples = [], []
    for step in range(1, num_steps + 1):
        head = {"step": step, "timestamp": 1000.0 + step}
        busy = {"timeline/what": "forward_backward", "timeline/start": 1.0, "timeline/end": 2.0}
        trainer = {
            "loss/mean": 1 / step,
            "entropy/mean": 0.5,
            "mismatch_kl/mean": 0.0,
            "optim/lr": 1e-3,
            "optim/grad_norm": 0.1,
        }
        rows += [
            {**head, "process": "trainer", **busy},
            {**head, "process": "trainer", **trainer, "perf/throughput": 100.0, "perf/mfu": 12.0},
            {
                **head,
                "process": "orchestrator",
                "reward/mean": step / 100,
                "perf/throughput": 7.0,
                "val_reward/mean": None,
            },
        ]
        prompt = [{"role": "user", "content": f"question {step}"}]
        row = {**head, "env": "reverse", "prompt": prompt, "completion": "a\x1b[2Jb", "reward": step / 100}
        samples += [row, {**row, "reward": 0.9}]
    append_jsonl(path / "metrics.jsonl", rows)
    append_jsonl(path / "samples.jsonl", samples)
    (path / "configs").mkdir()
    (path / "configs" / "trainer.toml").write_text(f"max_steps = {num_steps}\n")
    return path


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        wandb_monitor.main([str(word) for word in argv])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_local_run_is_summed_up_under_the_documented_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, write_run(tmp_path / "run"), "--metrics-only")
    assert (code, err) == (0, "")
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert table["loss/mean"][:4] == ["1", "0.03333", "0.03333", "1"]
    assert table["throughput"][:2] == ["100", "100"], "the trainer's, not the orchestrator's"
    assert {"entropy", "mismatch_kl", "reward/mean", "MFU"} <= set(table)
    assert "val_reward" not in table, "it never had a value"
    assert "(finished)" in out and "question" not in out


def test_failed_health_checks_are_part_of_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    head = {"process": "orchestrator", "timestamp": 2000.0}
    append_jsonl(run / "metrics.jsonl", [{**head, "step": step, "is_truncated/mean": 0.99} for step in range(1, 31)])
    code, out, _ = call(capsys, run, "--metrics-only")
    assert code == 0 and "are cut off at the token limit\n  -> raise orchestrator.sampling.max_tokens" in out


def test_failed_samples_are_the_newest_below_the_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [write_run(tmp_path / "run"), "--samples-only", "--reward-threshold", 0.2, "--max-samples", 3]
    code, out, _ = call(capsys, *argv)
    assert code == 0 and "loss/mean" not in out
    assert [line.split("]")[1] for line in out.splitlines() if line.startswith("[user]")] == [
        " question 19", " question 18", " question 17",
    ]  # fmt: skip
    assert "\x1b" not in out and "a\\x1b[2Jb" in out, "what a model writes cannot clear the terminal"


def test_distillation_summary_shows_teacher_gap_and_retention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, write_distillation_run(tmp_path / "run"))
    assert (code, err) == (0, "")
    assert "Context distillation" in out and "reward" not in out.lower()
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert table["teacher_kl/mean"][:2] == ["2", "0.1667"] and table["reference_kl/mean"]
    scores = [line.split() for line in out.splitlines() if line.startswith(("facts", "other"))]
    assert scores[1] == ["facts", "12", "0.500", "0.600", "0.600", "0.80", "(0.60", "to", "1.10)", "-", "0.050"]
    assert scores[0][5] == "n.s." and "not significant" in out
    assert scores[3][-2] == "0.700", "retention"
    assert "2 samples were not scored by the teacher and left out (overlong 2)" in out
    assert "5 samples without teacher scores, the newest first\n\n--- step 12 | env alpha" in out


def test_distillation_shows_low_rewards_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_distillation_run(tmp_path / "run", verified=True)
    _, out, _ = call(capsys, run, "--reward-threshold", 0.3)
    assert "5 samples with a reward below 0.3" in out and "reward/mean" in out
    _, out, _ = call(capsys, "--list", "--runs-dir", tmp_path)
    assert "teacher KL 0.1667" in out and "reward" not in out


def test_summary_of_sft_has_the_validation_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"step": step, "process": "sft", "loss/mean": 1.0, "val_loss/mean": 2.0 / step} for step in (1, 2)]
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    code, out, _ = call(capsys, tmp_path)
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert code == 0 and table["val_loss/mean"][:2] == ["2", "1"]
    assert "samples" not in out, "it has neither samples nor rewards"


def test_plots_show_the_validation_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; cure: make setup")
    drawn: list[list[str]] = []
    monkeypatch.setattr("prime_rl.monitor.plots._draw_panel", lambda axes, curves: drawn.append(list(curves)))
    save_plots({"loss/mean": [(1, 2.0), (2, 1.0)], "val_loss/mean": [(0, 3.0), (2, 2.0)]}, tmp_path)
    assert drawn == [["loss/mean", "val_loss/mean"]]


def test_plots_are_png_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; cure: make setup")
    code, out, _ = call(capsys, write_run(tmp_path / "run"), "--save-dir", tmp_path / "plots", "--metrics-only")
    assert code == 0 and "optimizer.png" in out
    for name in ("loss.png", "reward.png", "optimizer.png"):
        data = (tmp_path / "plots" / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 3000
    assert save_plots({}, tmp_path / "nothing") == []
    run = write_distillation_run(tmp_path / "distillation")
    _, out, _ = call(capsys, run, "--save-dir", tmp_path / "teacher", "--metrics-only")
    assert "reward" not in out.lower() and (tmp_path / "teacher" / "distillation.png").exists()


def test_a_report_comes_with_the_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; cure: make setup")
    argv = [write_run(tmp_path / "run"), "--report", tmp_path / "r.html", "--save-dir", tmp_path / "plots"]
    code, out, _ = call(capsys, *argv)
    assert code == 0 and "optimizer.png" in out and (tmp_path / "r.html").exists()
    assert (tmp_path / "plots" / "loss.png").exists()


@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("--serve", "--save-dir=plots"),
        ("--open", "--replay=3"),
        ("--replay=3", "--report=r.html"),
        ("--replay=3", "--save-dir=plots"),
        ("--samples-only", "--save-dir=plots"),
    ],
)
def test_options_without_effect_are_refused(
    option: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, write_run(tmp_path / "run"), option, other)
    assert (code, out) == (2, "")
    assert f"{other.partition('=')[0]} has no effect with {option.partition('=')[0]}" in err


def test_plots_without_matplotlib_name_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = call(capsys, write_run(tmp_path / "run"), "--save-dir", tmp_path / "plots")
    assert (code, out) == (2, "") and "pip install 'prime-rl[plots]'" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "plots").exists()


def test_runs_of_one_moment_are_listed_by_name(tmp_path: Path) -> None:
    names = [f"run_{number:02}" for number in range(20)]
    for name in names[::-1]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("{}\n")
        os.utime(tmp_path / name / "metrics.jsonl", (1000, 1000))
    os.utime(tmp_path / "run_07" / "metrics.jsonl", (2000, 2000))
    found = [run.path.name for run in local_runs.find_runs(tmp_path)]
    assert found == ["run_07", *[name for name in names if name != "run_07"]]


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value() -> None:
    assert [value for _, value in smooth([(s, 2.0) for s in range(9)])] == pytest.approx([2.0] * 9)
    assert smooth([(1, 5.0), (2, 0.0)])[0] == (1, 5.0)


def test_series_keep_last_value_and_skip_non_numbers() -> None:
    rows = [
        {"step": 2, "process": "trainer", "loss/mean": 2.0, "x": float("nan"), "name": "text", "flag": True},
        {"step": 1, "process": "trainer", "loss/mean": None},
        {"step": 2, "process": "trainer", "loss/mean": 3.0},
        {"step": 1, "process": "orchestrator", "loss/mean": 9.0, "reward/mean": 1.0},
    ]
    table = read_series(rows)
    assert table["trainer"] == {"loss/mean": [(2, 3.0)]}
    assert join_processes(table) == {"loss/mean": [(2, 3.0)], "reward/mean": [(1, 1.0)]}
    assert summarize_metrics({"loss/mean": []}) == []


def test_messages_of_tools_and_tables() -> None:
    call_ = {"role": "assistant", "content": None, "tool_calls": [{"name": "search", "arguments": "{}"}]}
    assert messages_of({"messages": [call_]}) == [("assistant", 'tool call: {"name": "search", "arguments": "{}"}')]
    assert messages_of({"prompt": json.dumps([{"role": "user", "content": [{"text": "hi"}]}])}) == [("user", "hi")]
    assert failed_samples([{"reward": None}, {"reward": 0.1}], 0.2, 5) == [{"reward": 0.1}]
    assert "error: it broke" in sample_text({"step": 1, "reward": 0.0, "error": "it broke"})


def test_failed_samples_show_answer_and_reward_functions() -> None:
    row = {"step": 1, "prompt": "2+2", "completion": "4", "answer": "four", "metrics": {"exact": None, "short": 0.25}}
    assert sample_text(row).splitlines()[1:] == [
        "[user] 2+2",
        "[assistant] 4",
        "[expected answer] four",
        "[rewards] exact nan, short 0.25",
    ]
    assert "[rewards]" not in sample_text(row, show_reward=False)


def test_list_goes_on_after_a_run_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad" / "metrics.jsonl").mkdir(parents=True)
    write_run(tmp_path / "good", 3)
    os.utime(tmp_path / "good" / "metrics.jsonl", (1.0, 1.0))  # the older one is shown last
    code, out, _ = call(capsys, "--list", "--runs-dir", tmp_path)
    assert code == 0 and "bad  cannot be read (Is a directory)\n" in out and "good  finished" in out


def test_list_shows_local_runs_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "netrc").write_text("machine github.com login me password other\n")
    for age, name in enumerate(("new", "deep/middle", "old")):
        write_run(tmp_path / name, 3)
        os.utime(tmp_path / name / "metrics.jsonl", (time.time() - age * 1000,) * 2)
    code, out, _ = call(capsys, "--list", "--runs-dir", tmp_path, "--num-runs", 2)
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert code == 0 and [Path(name).name for name in names] == ["new", "middle"]
    assert "WANDB_API_KEY" in out and not wandb_runs.has_key(), "the key of another server is none"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    (tmp_path / ".netrc").chmod(0o644)
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_runs.has_key()
    assert all(line.count("step") == 1 for line in out.splitlines() if line.startswith("  ")), out
    old = local_runs.open_run(tmp_path / "old")
    (old.path / "configs" / "trainer.toml").unlink()
    assert find_status(old).text == "stopped at step 3"
    (old.path / "logs").mkdir()
    (old.path / "logs" / "sft.log").write_text("x" * 900 + "\n12:00:00 SUCCESS Finished after step 240, weights in w\n")
    assert find_status(old).text == "finished"


@pytest.mark.parametrize(
    ("machine", "variable", "setting"),
    [
        ("wandb.local:8080", "http://wandb.local:8080", None),
        ("wandb.local", None, "https://wandb.local/"),
        ("wandb.local:8080", "http://wandb.local:8080", "https://other.server"),
        ("api.forge.coreweave.com", None, None),
    ],
)
def test_the_login_at_any_server_is_found(
    machine: str, variable: str | None, setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", "~/keys")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(f"machine {machine} login user password key\n")
    if variable:
        monkeypatch.setenv("WANDB_BASE_URL", variable)
    if setting:
        (tmp_path / ".config" / "wandb").mkdir(parents=True)
        (tmp_path / ".config" / "wandb" / "settings").write_text(f"[default]\nbase_url = {setting}\n")
    assert wandb_runs.has_key()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = https://third.server\n")
    assert wandb_runs.has_key() == (variable is not None)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--replay", "3"], "which run?"),
        (["{empty}"], "holds no metrics.jsonl"),
        (["no/such"], "is no directory"),
        (["abc"], "WANDB_API_KEY"),
        (["--max-samples", "0"], "at least 1"),
        (["--rewrd-threshold", "1"], "unrecognized arguments: --rewrd-threshold"),
        (["x", "--metrics-only", "--samples-only"], "not allowed with"),
    ],
)
def test_wrong_input_names_its_cure(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    code, out, err = call(capsys, *[word.format(empty=tmp_path) for word in argv])
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and sentence in err and len(err.splitlines()) <= 3


@pytest.fixture(scope="module")
def wandb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWandb]:
    """A project with one experiment of two processes, and a run of another experiment in the same group."""
    pytest.importorskip("wandb", reason="wandb is not installed; cure: make test-extras")
    requested = json.dumps([{"role": "user", "content": "say hi"}])
    cells = [(requested, "<b>hi</b>", 0.1), ("ho", "ho", 0.9)]
    rows = [{"step": 5, **dict(zip(("prompt", "completion", "reward"), row, strict=True))} for row in cells]
    table = {"columns": SAMPLE_COLUMNS, "data": [[row.get(name) for name in SAMPLE_COLUMNS] for row in rows]}
    link = {"_type": "table-file", "path": "media/table/samples_5.table.json", "nrows": 2, "ncols": 3}
    steps = range(1, 6)
    runs = [
        FakeRun("t1", "first", "trainer", [{"step": s, "_step": 10 * s, "loss/mean": 1 / s} for s in steps], "both"),
        FakeRun(
            "o1",
            "first",
            "orchestrator",
            [{"step": s, "reward/mean": s / 10} for s in steps] + [{"step": 5, "samples": link}],
            "both",
            files={link["path"]: json.dumps(table).encode()},
        ),
        FakeRun("t2", "second", "trainer", [{"step": 1, "loss/mean": 77.0}], "both", created="2026-02-01T00:00:00"),
    ]
    home = tmp_path_factory.mktemp("home")
    with serve_wandb(FakeWandb(runs)) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_BASE_URL", fake.url)
        patch.setenv("WANDB_API_KEY", KEY)
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("HOME", str(home))
        patch.chdir(home)
        yield fake
        reported = "POST /sdk/otel/"  # telemetry of wandb in longer runs
        assert [route for route in fake.refused if not route.startswith(reported)] == [], "only these routes are used"


def test_attempts_of_a_named_wandb_run_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rl --wandb.name first` appends the process to the name; the group is shared with another experiment."""

    def logged(name: str, process: str, created: int, metric: str, *values: float) -> SimpleNamespace:
        history = [{"step": step, metric: value} for step, value in enumerate(values, 1)]
        return SimpleNamespace(
            id=f"{name}{created}",
            path=["ada", "prime-rl", f"{name}{created}"],
            name=f"{name}-{process}",
            job_type=process,
            group="both",
            created_at=f"2026-01-0{created}T00:00:00",
            history=lambda **_: history,
        )

    runs = [
        logged("first", "trainer", 1, "loss/mean", 4.0, 3.0, 2.5),  # step 3 is not repeated yet
        logged("first", "orchestrator", 2, "reward/mean", 0.1, 0.2),
        logged("second", "trainer", 3, "loss/mean", 7.0, 7.0),
        logged("first", "trainer", 4, "loss/mean", 4.0, 2.0),
    ]
    api = SimpleNamespace(run=lambda path: runs[3], runs=lambda path, filters: runs)
    monkeypatch.setattr(wandb_runs, "_api", lambda entity: api)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    series = wandb_runs.open_run("first4", "ada", "prime-rl").load_series()
    assert series == {"loss/mean": [(1, 4.0), (2, 2.0)], "reward/mean": [(1, 0.1), (2, 0.2)]}


@pytest.mark.timeout(400)
def test_wandb_runs_are_listed_read_and_rejected(wandb_server: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--list", "--project", "prime-rl", "--num-runs", 2)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == ["t2", "t1"]

    code, out, err = call(capsys, "t1", "--entity", "ada", "--max-samples", 20, "--reward-threshold", 0.3)
    assert (code, err) == (0, "")
    table = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert table["loss/mean"][1:5] == ["1", "0.2", "0.2", "1"]
    assert table["reward/mean"][2] == "0.5", "the other process of the experiment belongs to it"
    assert "[user] say hi" in out and "[assistant] <b>hi</b>" in out and "1 sample with" in out

    code, out, err = call(capsys, "nope", "--entity", "ada")
    assert (code, out) == (2, "") and "nope" in err and "--project" in err
    code, out, err = call(capsys, "t1", "--project", "other")
    assert (code, out) == (2, "") and "other" in err


@pytest.mark.timeout(400)  # wandb starts a process of its own, on machines that may be busy
def test_it_runs_by_path_with_nothing_but_wandb_and_pandas(wandb_server: FakeWandb, tmp_path: Path) -> None:
    # The requirements of this project are hidden, as they are where `uvx --with wandb --with pandas` runs the file.
    hidden = "msgspec anyio torch orjson loguru starlette httpx transformers rich matplotlib".split()
    block = "".join(f"import sys; sys.modules[{name!r}] = None\n" for name in hidden)
    (tmp_path / "sitecustomize.py").write_text(block)
    script = ROOT / "src" / "prime_rl" / "monitor" / "wandb_monitor.py"
    argv = [sys.executable, str(script), "t1", "--project", "prime-rl"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=380, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "loss/mean" in done.stdout and "say hi" in done.stdout


def test_a_reader_that_leaves_ends_the_command_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `monitor RUN | head`: Python would complain at its end about what it cannot write."""

    def run(options: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(wandb_monitor, "run", run)
    with (tmp_path / "pipe").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            wandb_monitor.main(["outputs/rl"])
        assert ended.value.code == 1 and os.path.samestat(os.fstat(output.fileno()), os.stat(os.devnull))
