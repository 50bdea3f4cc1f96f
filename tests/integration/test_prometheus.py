"""Every process of a run answers a scrape."""

from __future__ import annotations

import signal
from pathlib import Path
from urllib.request import urlopen

from road import THREE_FILES, runner, until

from prime_rl.utils.process import find_free_port


def scrape(port: int) -> dict[str, float]:
    """Values by name; none while nobody answers."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.partition("{")[0].removeprefix("prime_rl_"): float(value) for name, value in pairs}


def test_trainer_orchestrator_and_inference_answer_while_they_run(tmp_path: Path) -> None:
    server, trainer, orchestrator = find_free_port(), find_free_port(), find_free_port()
    options = ["--output_dir", tmp_path / "out", "--inference.server.port", server, "--max-steps", 10_000]
    options += ["--trainer.prometheus.port", trainer, "--orchestrator.prometheus.port", orchestrator]
    wanted = {
        trainer: ("loss_mean", "entropy_mean", "mismatch_kl_mean", "optim_lr", "perf_throughput", "perf_mfu"),
        orchestrator: ("reward_mean", "seq_len_mean", "batch_async_level", "progress_total_tokens"),
        server: ("generated_tokens_total", "policy_version", "requests_running"),
    }
    with runner(tmp_path / "said") as run:
        command = run.start("rl", *THREE_FILES, *options)
        for port, names in wanted.items():
            until(lambda port=port, names=names: set(names) <= set(scrape(port)), f"{names[0]} at port {port}", command)
        assert scrape(trainer)["step"] >= 1
        command.process.send_signal(signal.SIGINT)
        command.wait()
