"""`rl` with agents that are programs: the tokens in the training batches are those that the engine sampled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from cli_runner import ROOT, Command, metric_rows, read_command_line, runner, until
from recording_proxy import Recorder, compare, recording

from prime_rl.runtime.machine import find_free_port, is_healthy
from prime_rl.transport.batches import decode_batch, read_batch
from rollouts.training.steps import complete_steps, step_path
from rollouts.training.types import Sample

AGENTS = ROOT / "tests" / "integration" / "agents"
EXAMPLE = ROOT / "examples" / "agents"
PYTHON = Path(os.environ.get("AGENTS_PYTHON") or ROOT / ".venv-agents" / "bin" / "python")
"""An interpreter with openai, anthropic and openai-agents: `make test-agents` creates it."""
KINDS = ("openai", "responses", "anthropic", "agents")
UNTRAINED = ("tiny-qwen3", "--model.debug.random_init", "true")


def train(
    out: Path,
    command: Sequence[object],
    *options: object,
    model: Sequence[object] = UNTRAINED,
    disturb: Callable[[Command], None] = lambda rl: None,
) -> Recorder:
    """Run `rl` with a recorder in front of its inference server; fails if a process is left."""
    port = find_free_port()
    model = ["--model.name", *model]
    with runner(out / "said") as run:
        server = run.start(
            "inference", *model, "--model.max_model_len", 512, "--output-dir", out, "--server.port", port
        )
        until(lambda: is_healthy(None, port), "the server", server)
        with recording(f"http://127.0.0.1:{port}") as recorder:
            agent = ["--orchestrator.env.0.command", json.dumps([str(word) for word in command])]
            client = ["--no-inference", "--orchestrator.client.base_url", f"{recorder.root}/v1"]
            rl = run.start("rl", "@", AGENTS / "rl.toml", "--output-dir", out, *model, *agent, *client, *options)
            disturb(rl)
            assert rl.wait(900) == 0, rl.out + rl.err
            assert rl.pids() == [], "a process of the run is left"
        server.process.terminate()
        server.wait()
    return recorder


def kill_workers(rl: Command) -> None:
    """Kill an environment worker with its programs, three times."""
    for _ in range(3):
        time.sleep(8)
        workers = [pid for pid in rl.pids() if "prime_rl.envs.worker" in read_command_line(pid)]
        if workers and rl.process.poll() is None:
            os.kill(workers[0], signal.SIGKILL)


def read_samples(out: Path) -> list[Sample]:
    """The samples of all training batches."""
    batches = [read_batch(step_path(out / "rollouts", step)) for step in complete_steps(out / "rollouts")]
    return [sample for data in batches for sample in decode_batch(data or b"")[1]]


def test_a_run_trains_what_its_agents_sampled(tmp_path: Path) -> None:
    recorder = train(tmp_path, [sys.executable, "-S", AGENTS / "plain_agent.py"])
    samples = read_samples(tmp_path)
    num_tokens, num_different = compare(samples, recorder)
    assert num_tokens > 1000 and num_different == 0
    rollouts = {(sample.group_index, sample.index) for sample in samples}
    assert len(samples) == 3 * len(rollouts), "two turns, the sub-agent and the compacted history"
    rows = metric_rows(tmp_path, "orchestrator", "reward/mean")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["metrics/unmatched_requests"] == 0 for row in rows)
    masked = [(s, zip(s.advantages or [], s.loss_mask, strict=True)) for s in samples]
    advantages = {(s.group_index, s.index, value) for s, pairs in masked for value, is_trained in pairs if is_trained}
    assert len(advantages) == len(rollouts), "one advantage for all branches of a rollout"
    steps = metric_rows(tmp_path, "trainer", "batch/shared_ratio")
    assert [row["batch/shared_ratio"] > 0.2 and row["mismatch_kl/max"] == 0 for row in steps] == [True] * 3
    assert all(row["mismatch_kl/max"] == 0 for row in metric_rows(tmp_path, "trainer", "mismatch_kl/mean"))


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls tools."""
    out = tmp_path_factory.mktemp("sft")
    subprocess.run([sys.executable, EXAMPLE / "tasks.py"], cwd=out, check=True)
    with runner(out / "said") as run:
        data = out / "outputs" / "agents" / "sft.jsonl"
        steps = ["--max-steps", 200, "--scheduler.decay-steps", 40]  # the format of calls
        sft = run.start("sft", "@", EXAMPLE / "sft.toml", "--data.name", data, "--output-dir", out, *steps)
        assert sft.wait(900) == 0, sft.out + sft.err
    return out / "weights" / "step_200"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not PYTHON.exists(), reason="the clients are not installed: make test-agents")
def test_stock_clients_train_what_the_engine_sampled(tmp_path: Path, warmed_up: Path) -> None:
    total = calls = 0
    for kind in KINDS:
        out, command = tmp_path / kind, [PYTHON, AGENTS / "clients_agent.py", kind]
        task = ["--orchestrator.env.0.id", EXAMPLE / "tasks.py", "--orchestrator.sampling.max_tokens", 100]
        options = ["--max-steps", 4, "--seq-len", 512, "--trainer.optim.lr", 1e-4, *task]
        recorder = train(out, command, *options, model=[warmed_up])
        samples = read_samples(out)
        num_tokens, num_different = compare(samples, recorder)
        rollouts = {(sample.group_index, sample.index) for sample in samples}
        turns = [sum(map(float.__gt__, s.loss_mask[1:], s.loss_mask[:-1])) for s in samples]
        unmatched = max(r["metrics/unmatched_requests"] for r in metric_rows(out, "orchestrator", "reward/mean"))
        sizes = f"{len(rollouts)} rollouts, {len(samples)} samples, {sum(turns)} turns"
        print(f"{kind}: {sizes}, {num_tokens} tokens, {num_different} different, {unmatched:g} unmatched requests")
        assert num_different == unmatched == 0 and len(rollouts) >= 60
        assert len(samples) >= 4 * len(rollouts), "two loops at once, a sub-agent and a compacted history"
        total, calls = total + num_tokens, calls + sum(turn > 1 for turn in turns)
    print(f"{total} tokens; >= 100000, 0 different; {calls} samples of several turns")
    assert total >= 100_000 and calls >= 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_survives_misbehaving_agents(tmp_path: Path) -> None:
    options = ["--max-steps", 8, "--max-async-level", 1, "--orchestrator.env.0.timeout", 20]
    options += ["--orchestrator.env.0.num-workers", 2, "--orchestrator.max-retries", 5]
    recorder = train(tmp_path, [sys.executable, "-S", AGENTS / "chaos_agent.py"], *options, disturb=kill_workers)
    samples = read_samples(tmp_path)
    num_tokens, num_different = compare(samples, recorder)
    assert num_tokens > 2000 and num_different == 0, "no turn of a failed or repeated try, none twice"
    rows = metric_rows(tmp_path, "orchestrator", "reward/mean")
    assert [row["step"] for row in rows] == list(range(1, 9))
    groups = {sample.group_index for sample in samples}
    sizes = [len({s.index for s in samples if s.group_index == group}) for group in groups]
    assert len(groups) == 8 * 4 and min(sizes) >= 2, "a group is in one batch"
    last = rows[-1]
    counted = sum(last[f"groups/{name}"] for name in ("trained", "filtered", "quarantined", "in_flight"))
    assert last["groups/drawn"] == counted
    print(f"{sum(sizes)} of {4 * len(groups)} rollouts in {len(groups)} groups, {num_tokens} tokens, 0 different")
