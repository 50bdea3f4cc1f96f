"""A run that is watched: every process answers a scrape, and offline W&B runs hold the documented names."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.request import urlopen

import pytest
from road import THREE_FILES, runner, until

from prime_rl.utils.process import find_free_port
from wandb_files import history_of, read_what_is_there

TRAINER = (
    "loss/mean entropy/mean mismatch_kl/mean mismatch_kl/max is_masked/mean optim/lr optim/grad_norm perf/throughput "
    "perf/throughput_per_gpu perf/mfu perf/peak_memory time/step time/wait_for_batch time/forward_backward "
    "time/broadcast_weights"
).split()
ORCHESTRATOR = (
    "reward/mean reward/reverse-text batch/reverse-text seq_len/mean prompt_len/mean completion_len/max "
    "is_truncated/mean num_turns/min generation_ms/mean scoring_ms/mean batch/solve_none batch/solve_all "
    "batch/effective_batch_size batch/async_level batch/off_policy_level/max error/mean perf/throughput "
    "progress/total_tokens progress/total_samples progress/total_problems progress/ckpt_step time/step "
    "time/generate_completions time/update_weights time/wait_for_ckpt pool/normal evicted_examples/easy"
).split()
SERVER = "generated_tokens_total policy_version requests_running".split()


def scrape(port: int) -> dict[str, float]:
    """Values by name; none while nobody answers."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.partition("{")[0].removeprefix("prime_rl_"): float(value) for name, value in pairs}


def names_in_wandb(out: Path) -> dict[str, set[str]]:
    """Process -> every name in the history of its run, tables by their first part."""
    found: dict[str, set[str]] = {}
    for path in out.glob("wandb/offline-run-*/*.wandb"):
        records = read_what_is_there(path)
        kinds = [record.run.job_type for record in records if record.WhichOneof("record_type") == "run"]
        names = {name for row in history_of(records) for name in row}
        found |= {kind: names | {name.partition(".")[0] for name in names} for kind in kinds}
    return found


def test_every_process_can_be_watched_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install wandb to run this")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    server, trainer, orchestrator = find_free_port(), find_free_port(), find_free_port()
    out = tmp_path / "out"
    options = ["--output_dir", out, "--inference.server.port", server, "--max-steps", 10_000, "--wandb.offline"]
    options += ["--trainer.prometheus.port", trainer, "--orchestrator.prometheus.port", orchestrator]
    scraped = {trainer: "loss_mean perf_mfu".split(), orchestrator: "reward_mean".split(), server: SERVER}
    logged = {"trainer": set(TRAINER), "orchestrator": {*ORCHESTRATOR, "samples", "distributions"}}
    with runner(tmp_path / "said") as run:
        command = run.start("rl", *THREE_FILES, *options)
        for port, names in scraped.items():
            until(lambda port=port, names=names: set(names) <= set(scrape(port)), f"{names[0]} at port {port}", command)
        assert scrape(trainer)["step"] >= 1
        until(
            lambda: all(names <= names_in_wandb(out).get(process, set()) for process, names in logged.items()),
            "every documented name in the runs of both processes",
            command,
        )
        command.process.send_signal(signal.SIGINT)
        command.wait()
