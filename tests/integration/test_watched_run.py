"""Monitoring of a live run: Prometheus scrape, offline W&B log and browser page."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest
from cli_runner import THREE_FILES, Command, runner, until
from page_browser import Open, serve_page
from page_runs import HOSTILE
from wandb_files import history_of, read_what_is_there

from prime_rl.runtime.machine import find_free_port

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
    "time/generate_completions time/update_weights time/slots_exhausted pool/normal evicted_examples/easy"
).split()
SERVER = "generated_tokens_total policy_version requests_running".split()


def scrape(port: int) -> dict[str, float]:
    """Values by name; none while the server is unreachable."""
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


HELD_OUT = {
    "id": "reverse-text",
    "name": "held-out",
    "args": {
        "system_prompt": HOSTILE,
        "num_train_examples": 8,
        "num_eval_examples": 8,
        "min_length": 3,
        "max_length": 6,
    },
}


@dataclass(frozen=True)
class Watched:
    """A run that continues until the tests of this file end."""

    command: Command
    out: Path
    server: int
    trainer: int
    orchestrator: int


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    server, trainer, orchestrator = find_free_port(), find_free_port(), find_free_port()
    options = ["--output_dir", folder / "out", "--inference.server.port", server, "--max-steps", 10_000]
    options += ["--trainer.prometheus.port", trainer, "--orchestrator.prometheus.port", orchestrator]
    options += ["--orchestrator.eval.env", json.dumps([HELD_OUT]), "--orchestrator.eval.num-examples", 2]
    options += ["--orchestrator.eval.interval", 4]
    if find_spec("wandb") is not None:
        options += ["--wandb.offline"]
    with pytest.MonkeyPatch.context() as patch, runner(folder / "said") as run:
        patch.delenv("WANDB_MODE", raising=False)
        command = run.start("rl", *THREE_FILES, *options)
        yield Watched(command, folder / "out", server, trainer, orchestrator)
        command.process.send_signal(signal.SIGINT)
        command.wait()


def test_every_process_can_be_watched_while_it_runs(watched: Watched) -> None:
    scraped = {
        watched.trainer: "loss_mean perf_mfu".split(),
        watched.orchestrator: "reward_mean".split(),
        watched.server: SERVER,
    }
    for port, names in scraped.items():
        until(
            lambda port=port, names=names: set(names) <= set(scrape(port)),
            f"{names[0]} at port {port}",
            watched.command,
        )
    assert scrape(watched.trainer)["step"] >= 1


def test_offline_wandb_runs_have_documented_names(watched: Watched) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; cure: make test-extras")
    logged = {"trainer": set(TRAINER), "orchestrator": {*ORCHESTRATOR, "samples", "distributions"}}
    until(
        lambda: all(names <= names_in_wandb(watched.out).get(process, set()) for process, names in logged.items()),
        "every documented name in the runs of both processes",
        watched.command,
    )


def test_the_page_follows_the_run(watched: Watched, open_page: Open) -> None:
    until((watched.out / "samples.jsonl").exists, "the first rollouts", watched.command)
    with serve_page(watched.out) as url:
        opened = open_page(url)
        page = opened.page
        assert opened.texts(".badge") == ["running"]
        page.wait_for_selector(".badge:not(.lost)")
        opened.open_section("rollouts")
        page.wait_for_selector(".list li")
        held = int(opened.counter().split()[0].replace(",", ""))
        opened.wait_until(lambda: int(opened.counter().split()[0].replace(",", "")) > held, "more rollouts")
        page.keyboard.press("t")
        page.wait_for_selector(".tokens .token:not(.context)")
        opened.wait_until(lambda: page.locator("select[aria-label=kind]").is_visible(), "rollouts of an evaluation")
        page.select_option("select[aria-label=kind]", "evaluation")
        page.keyboard.press("Escape")
        page.keyboard.press("c")
        page.wait_for_selector(".bubble.system")
        assert page.locator(".bubble.system pre").evaluate("node => node.textContent") == HOSTILE.strip()
        assert page.evaluate("window.hacked") is None
        opened.open_section("timeline")
        assert {"trainer", "orchestrator", "inference"} <= set(
            page.evaluate("Object.keys(window.page.source.data.lanes.lanes)")
        )
        assert watched.command.process.poll() is None, "the run goes on"
        page.close()  # before its server ends
