"""`--bench`, traces and memory snapshots of both trainers."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from prime_rl.config import RLConfig
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.profiling import build_bench_table, prepare_bench
from prime_rl.trainer.rl.train import train as train_rl
from prime_rl.trainer.sft.train import train as train_sft
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import load_jsonl

TINY = {"model": {"name": "tiny-qwen3", "debug": {"random_init": True, "num_layers": 1}}, "log": {"file": False}}


def test_bench_uses_fake_data_and_writes_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {**TINY, "output_dir": tmp_path / "out", "bench": True, "max_steps": 3}
    data = {"name": "no/such", "seq_len": 16, "batch_size": 2}
    assert train_sft(SFTConfig.model_validate({**settings, "data": data, "ckpt": {}, "val": {}})) == 0
    first = capsys.readouterr().out
    model = {**TINY["model"], "seq_len": 32}  # type: ignore[dict-item]
    assert train_rl(TrainConfig.model_validate({**settings, "model": model})) == 0
    for text in (first, capsys.readouterr().out):
        assert "2 steps on cpu" in text
        for label in ("step (s)", "throughput (tokens/s)", "MFU (%)", "peak memory (GiB)", "load data (s)"):
            assert label in text
        assert "weights  " not in text and "inference --model.name" not in text  # the folder is removed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("loss", "metric"),
    [
        ({"kl_coef": 0.1}, "teacher_kl/mean"),
        ({"type": "sdpg"}, "teacher_kl/mean"),
        ({"teacher_tau": 1.0, "distill": {"estimator": "auto"}}, "teacher_kl_forward/mean"),
        ({"teacher_tau": 1.0, "distill": {"estimator": "full"}}, "teacher_kl_forward/mean"),
    ],
)
def test_fake_data_have_the_teacher_of_the_loss(loss: dict[str, Any], metric: str, tmp_path: Path) -> None:
    model = {**TINY["model"], "seq_len": 32}  # type: ignore[dict-item]
    settings = {**TINY, "model": model, "output_dir": tmp_path, "max_steps": 2, "data": {"fake": {"batch_size": 4}}}
    assert train_rl(TrainConfig.model_validate({**settings, "loss": loss})) == 0
    rows = list(load_jsonl(tmp_path / "metrics.jsonl"))
    assert any(metric in row for row in rows), sorted(rows[-1])


@pytest.mark.parametrize("module", ["sft", "rl"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bench_command_leaves_an_earlier_run_as_it_is(
    module: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = importlib.import_module(f"prime_rl.trainer.{module}.train")
    started: list[Path] = []

    class Ranks:
        def __init__(self, logs: Path, **_: Any) -> None:
            started.append(logs)

        def __enter__(self) -> Ranks:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self, name: str, argv: list[str], env: dict[str, str]) -> None:
            assert parse_argv(SFTConfig if module == "sft" else TrainConfig, argv[3:], module)[0].bench

        def wait(self, names: list[str]) -> None: ...

    for name in ("configuration.command.end_on_signals", "trainer.command.share_heap"):  # they change this process
        monkeypatch.setattr(f"prime_rl.{name}", lambda: None)
    monkeypatch.setattr("prime_rl.trainer.launch.Supervisor", Ranks)
    monkeypatch.setattr("prime_rl.trainer.profiling.run_bench", lambda config, train: 0)
    options = ["--bench", "--parallel.dp", str(num_ranks), "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [module, "--model.name", "tiny-qwen3", *options])
    with pytest.raises(SystemExit) as caught:
        trainer.main()
    assert not caught.value.code and not (tmp_path / "out").exists()
    assert len(started) == (num_ranks > 1) and not any(logs.exists() for logs in started)
    assert "Page of this run" not in capsys.readouterr().out


def test_bench_uses_configured_sizes(tmp_path: Path) -> None:
    sft = prepare_bench(SFTConfig.model_validate({"bench": True, "data": {"seq_len": 99, "batch_size": 7}}), tmp_path)
    assert (sft.data.type, sft.data.seq_len, sft.data.batch_size, sft.max_steps) == ("fake", 99, 7, 5)
    assert not sft.bench and sft.output_dir == tmp_path
    rl = prepare_bench(TrainConfig.model_validate({"bench": True, "data": {"fake": {"batch_size": 8}}}), tmp_path)
    assert rl.data.fake is not None and rl.data.fake.batch_size == 8


def test_table_excludes_the_first_step() -> None:
    def row(seconds: float) -> dict[str, float]:
        return {"time/step": seconds, "batch/tokens": 100, "perf/mfu": 10, "perf/throughput": 50}

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(build_bench_table([row(9), row(1), row(3)], "here"))
    text = console.export_text()
    assert "2 steps on here" in text
    [step] = [line for line in text.splitlines() if "step (s)" in line]
    assert [cell.strip() for cell in step.split("│")[2:6]] == ["2.000", "1.000", "1.000", "3.000"]
    [mfu] = [line for line in text.splitlines() if "MFU" in line]
    assert [cell.strip() for cell in mfu.split("│")[4:6]] == ["6.7", "20.0"]


def test_trace_is_written(tmp_path: Path) -> None:
    data = {"type": "fake", "seq_len": 8, "batch_size": 1}
    settings = {**TINY, "output_dir": tmp_path, "max_steps": 2, "trace_path": tmp_path / "trace", "data": data}
    assert train_sft(SFTConfig.model_validate(settings)) == 0
    events = json.loads(gzip.decompress((tmp_path / "trace/trace_0.json.gz").read_bytes()))["traceEvents"]
    assert sum("AdamW.step" in event.get("name", "") for event in events) >= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_memory_snapshot_needs_a_gpu(tmp_path: Path) -> None:
    data = {"type": "fake", "seq_len": 8, "batch_size": 1}
    settings = {**TINY, "output_dir": tmp_path, "max_steps": 2, "memory_profiler_path": tmp_path, "data": data}
    with pytest.raises(ValueError, match="on the CPU: leave it out"):
        train_sft(SFTConfig.model_validate(settings))


def test_invalid_settings_are_rejected() -> None:
    for settings, words in (
        ({"trace_path": "t"}, "set max_steps to 10 or less"),
        ({"trace_path": "t", "max_steps": 11}, "set max_steps to 10 or less"),
        ({"bench": True, "max_steps": 1}, "set max_steps to 2 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            SFTConfig.model_validate(settings)
    with pytest.raises(ValueError, match="trainer --bench"):
        RLConfig.model_validate({"trainer": {"bench": True}})
