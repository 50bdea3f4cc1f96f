"""Programs as environments, in environment workers: the example of the docs, and workers that are killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, serve

from prime_rl.configuration.sections import EnvConfig, SamplingConfig
from prime_rl.envs.worker_pool import EnvironmentWorkers
from prime_rl.runtime.process_tree import find_run_processes
from prime_rl.utils.client import InferenceClient
from prime_rl.utils.vf import build_sampling_args, open_environments
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.types import Status

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
TASKS = """
def load_environment():
    return {"dataset": [{"prompt": f"Question {i}?", "answer": "?"} for i in range(4)]}
"""
HANG = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with serve(FakeEngine(reply=lambda body: "Hello.")) as running:
        yield running


def build_config(folder: Path, program: str, **options: object) -> EnvConfig:
    (folder / "tasks.py").write_text(TASKS)
    (folder / "agent.py").write_text(program)
    command = [sys.executable, str(folder / "agent.py")]
    return EnvConfig.model_validate({"id": str(folder / "tasks.py"), "name": "e", "command": command, **options})


async def run_rows(pool: EnvironmentWorkers, engine: FakeEngine, retries: int = 0) -> list[Rollout]:
    """Two rollouts of each row."""
    client = InferenceClient(engine.base_url)
    args = [build_sampling_args(SamplingConfig(), seed) for seed in (1, 2)]
    groups = await asyncio.gather(*(pool.run_group(row, client, "m", args, retries) for row in pool.rows()))
    return [rollout for group in groups for rollout in group]


def test_the_agent_of_the_docs_runs_in_a_worker(tmp_path: Path, engine: FakeEngine) -> None:
    [program] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if text.startswith("# agent.py")]
    with open_environments([build_config(tmp_path, program)]) as found:
        pool = found["e"]
        assert isinstance(pool, EnvironmentWorkers)
        rollouts = asyncio.run(run_rows(pool, engine))
    assert [(r.status, r.reward, r.error) for r in rollouts] == [(Status.COMPLETED, 1.0, None)] * 8
    assert all(len(rollout_to_samples(rollout)) == 1 for rollout in rollouts)


def test_a_killed_worker_leaves_no_program_behind(tmp_path: Path, engine: FakeEngine) -> None:
    config = build_config(tmp_path, HANG)
    with open_environments([config]) as found:
        pool = found["e"]
        assert isinstance(pool, EnvironmentWorkers)
        token = pool._workers[0]._token

        async def kill() -> list[Rollout]:
            running = asyncio.create_task(run_rows(pool, engine))
            deadline = time.monotonic() + 20
            while len(list(find_run_processes(token))) < 17:  # the worker, and two processes of each rollout
                assert time.monotonic() < deadline and not running.done()
                await asyncio.sleep(0.05)
            os.kill(pool.pids[0], signal.SIGKILL)
            return await running

        rollouts = asyncio.run(kill())
        assert {rollout.error_type for rollout in rollouts} == {"WorkerDied"}
        assert not list(find_run_processes(token))


def test_hung_programs_end_with_their_rollouts(tmp_path: Path, engine: FakeEngine) -> None:
    with open_environments([build_config(tmp_path, HANG, timeout=1.0)]) as found:
        pool = found["e"]
        assert isinstance(pool, EnvironmentWorkers)
        token = pool._workers[0]._token
        rollouts = asyncio.run(run_rows(pool, engine))
        assert {rollout.error_type for rollout in rollouts} == {"RolloutTimeout"}
        assert list(find_run_processes(token)) == pool.pids
