"""A complete run with weights over process groups to two servers, or as deltas, compared with the same run over files.

pytest -m slow tests/integration/test_broadcast_runs.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import ROOT, Runner, digests, metric_rows, runner, until

from prime_rl.runtime.machine import find_free_port, is_healthy
from rollouts.training.steps import complete_steps, step_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
LETTERS = ROOT / "tests" / "integration" / "letters.toml"
MODEL = ["--model.name", "tiny-qwen3", "--model.debug.random-init", "true", "--model.max-model-len", "64"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def rl(run: Runner, out: Path, kind: str) -> None:
    """A run on two servers that were started before, each with a directory of its own."""
    ports = [find_free_port() for _ in range(2)]
    for i, port in enumerate(ports):
        see = ["--weight-dirs", json.dumps([str(out)])] if kind == "filesystem" else []
        own = ["--output-dir", out.with_name(f"{out.name}-server-{i}"), "--weight-broadcast.type", kind]
        server = run.start("inference", *MODEL, *own, *see, "--server.port", port, "--name", f"server_{i}")
        until(lambda port=port: is_healthy(None, port), "the server", server)  # type: ignore[misc]
    urls = json.dumps([f"http://127.0.0.1:{port}/v1" for port in ports])
    run.run_well(
        *("rl", "@", LETTERS, "--output-dir", out, "--no-inference", "--orchestrator.client.base-url", urls),
        *("--weight-broadcast.type", kind, "--orchestrator.weight-check-interval", 1),
    )


def test_both_ways_give_the_same_rewards_and_weights(run: Runner, tmp_path: Path) -> None:
    for kind in ("filesystem", "gloo"):
        rl(run, tmp_path / kind, kind)
    files, groups = tmp_path / "filesystem", tmp_path / "gloo"
    assert complete_steps(groups / "weights") == [2, 4] and complete_steps(groups / "broadcasts")[-1] == 4
    for step in complete_steps(files / "weights"):
        assert digests(step_path(files / "weights", step)) == digests(step_path(groups / "broadcasts", step))
    found = {}
    for out in (files, groups):
        rewards = [row["reward/mean"] for row in metric_rows(out, "orchestrator", "reward/mean")]
        mismatch = [row["mismatch_kl/mean"] for row in metric_rows(out, "trainer", "mismatch_kl/mean")]
        assert len(rewards) == 4 and max(mismatch) == 0
        found[out.name] = rewards
    assert found["filesystem"] == found["gloo"]
    for i in range(2):
        log = (tmp_path / f"gloo-server-{i}" / "logs" / f"server_{i}.log").read_text()
        assert all(f"Loaded weights version={step} " in log for step in (1, 2, 3, 4))


def test_a_resumed_run_and_one_of_two_ranks(run: Runner, tmp_path: Path) -> None:
    """A resumed run begins with the trainer's version of the checkpoint, over a new connection to a new server."""

    def start(name: str, *more: object) -> Path:
        own = ("--output-dir", tmp_path / name, "--inference.server.port", find_free_port())
        run.run_well("rl", "@", LETTERS, *own, *more)
        return tmp_path / name

    gloo = ("--weight-broadcast.type", "gloo")
    whole = start("whole")
    start("parts", *gloo, "--max-steps", 2)
    parts = start("parts", *gloo, "--resume")
    assert digests(step_path(whole / "weights", 4)) == digests(step_path(parts / "weights", 4))
    ranks = start("ranks", *gloo, "--trainer.parallel.dp", 2)
    assert complete_steps(ranks / "weights") == [2, 4] and complete_steps(ranks / "broadcasts")[-1] == 4
    assert max(row["mismatch_kl/mean"] for row in metric_rows(ranks, "trainer", "mismatch_kl/mean")) == 0


def test_deltas_give_the_same_weights_resumed_too(run: Runner, tmp_path: Path) -> None:
    """The servers of both attempts load every version; full weights are read at the start only."""

    def start(name: str, *more: object) -> Path:
        own = ("--output-dir", tmp_path / name, "--inference.server.port", find_free_port())
        run.run_well("rl", "@", LETTERS, *own, "--trainer.model.dtype", "bfloat16", *more)
        return tmp_path / name

    deltas = ("--weight-broadcast.delta", "--weight-broadcast.anchor-interval", 3)
    whole = start("whole")
    start("parts", *deltas, "--max-steps", 2)
    parts = start("parts", *deltas, "--resume")
    assert complete_steps(parts / "weights") == [2, 4] and complete_steps(parts / "broadcasts") == [2, 3, 4]
    for step in (3, 4):
        assert digests(step_path(whole / "weights", step)) == digests(step_path(parts / "broadcasts", step))
    assert digests(step_path(whole / "weights", 4)) == digests(step_path(parts / "weights", 4))
    log = "".join(path.read_text() for path in sorted(parts.rglob("inference.log")))
    assert all(f"Loaded weights version={step} " in log for step in (1, 2, 3, 4))
