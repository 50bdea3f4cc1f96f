"""Profiling: Chrome traces, GPU memory snapshots and the `--bench` table."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from loguru import logger
from rich.console import Console
from rich.table import Table

from prime_rl.configuration.sections import TrackersConfig
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.model import resolve_placement
from prime_rl.trainer.rl.config import FakeDataConfig
from prime_rl.trainer.sft.config import FakeSFTDataConfig
from rollouts.training.metrics import METRICS_FILE, load_jsonl

BENCH_STEPS = 5
"""Default number of `--bench` steps; the first is warmup and not counted."""

MAX_MEMORY_EVENTS = 100_000
"""Maximum number of events in a memory snapshot."""

Config = TypeVar("Config", TrainConfig, SFTConfig)


def prepare_bench(config: Config, scratch: Path) -> Config:
    """Config of a `--bench` run: fake data of the same sizes, few steps, temporary output in `scratch`."""
    changes: dict[str, object] = {
        "bench": False,
        "max_steps": config.max_steps or BENCH_STEPS,
        "output_dir": scratch,
        "ckpt": None,
        **dict.fromkeys(TrackersConfig.model_fields),
    }
    data: object
    if isinstance(config, SFTConfig):
        data = config.data
        if not isinstance(data, FakeSFTDataConfig):
            data = FakeSFTDataConfig(seq_len=config.data.seq_len, batch_size=config.data.batch_size)
        changes |= {"val": None, "num_epochs": None}
    else:
        data = config.data.model_copy(update={"fake": config.data.fake or FakeDataConfig()})
    return config.model_copy(update=changes | {"data": data})


def build_bench_table(rows: Sequence[Mapping[str, float]], device: str) -> Table:
    """Table of mean, standard deviation, minimum and maximum per step, without the first step."""
    table = Table("", "mean", "std", "min", "max", title=f"{len(rows) - 1} steps on {device}, after one warmup step")
    for label, key, digits in (
        ("step (s)", "time/step", 3),
        ("forward, backward, update (s)", "time/forward_backward", 3),
        ("publish weights (s)", "time/broadcast_weights", 3),
        ("load data (s)", "time/load_data", 3),
        ("throughput (tokens/s)", "throughput", 0),
        ("MFU (%)", "mfu", 1),
        ("peak memory (GiB)", "perf/peak_memory", 2),
    ):
        values = [row[key] for row in map(_add_step_rates, rows[1:]) if key in row]
        if values:
            figures = (statistics.fmean(values), statistics.pstdev(values), min(values), max(values))
            table.add_row(label, *(f"{figure:,.{digits}f}" for figure in figures))
    return table


def _add_step_rates(row: Mapping[str, float]) -> dict[str, float]:
    """Add throughput and MFU of this step; those in `perf/` are averages over a window."""
    throughput = row["batch/tokens"] / row["time/step"]
    return {**row, "throughput": throughput, "mfu": row["perf/mfu"] / row["perf/throughput"] * throughput}


def run_bench(config: Config, train: Callable[..., int]) -> int:
    """Run `train` with the config of `prepare_bench` and print the table."""
    with tempfile.TemporaryDirectory(prefix="bench_") as scratch:
        code = train(prepare_bench(config, Path(scratch)), keeps_output=False)
        rows = [row for row in load_jsonl(Path(scratch) / METRICS_FILE) if "time/step" in row]
    if rows:  # rank 0 only
        device = resolve_placement(config.model).device
        threads = f"cpu, threads: {torch.get_num_threads()}"
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
        Console().print(build_bench_table(rows, f"{where}, ranks: {os.environ.get('WORLD_SIZE', 1)}"))
    return code


@contextmanager
def record_profile(
    trace_dir: Path | None, memory_dir: Path | None, device: torch.device, rank: int = 0
) -> Iterator[None]:
    """Write the trace and memory snapshot to these directories, if any, when the run ends or fails.

    `ValueError` for a memory snapshot without a GPU.
    """
    if memory_dir is not None and device.type != "cuda":
        raise ValueError(
            "memory_profiler_path records the allocations of a GPU, and this run computes on the CPU: leave it out, "
            "the peak is in perf/peak_memory, and trace_path shows what each operation allocates"
        )
    with _trace(trace_dir, device, rank), _memory(memory_dir, rank):
        yield


@contextmanager
def _trace(path: Path | None, device: torch.device, rank: int) -> Iterator[None]:
    if path is None:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    path.mkdir(parents=True, exist_ok=True)
    profiler = profile(activities=activities, profile_memory=True, record_shapes=True)
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        file = path / f"trace_{rank}.json.gz"
        profiler.export_chrome_trace(str(file))
        logger.info(f"Wrote trace to {file}: open it in chrome://tracing or ui.perfetto.dev")


@contextmanager
def _memory(path: Path | None, rank: int) -> Iterator[None]:
    if path is None:
        yield
        return
    path.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
    try:
        yield
    finally:
        file = path / f"memory_{rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(file))  # pickle, for torch's viewer; never loaded here
        torch.cuda.memory._record_memory_history(enabled=None)
        logger.info(f"Wrote memory snapshot to {file}: open it at pytorch.org/memory_viz")
