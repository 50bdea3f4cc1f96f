"""Thousands of concurrent rollouts in one process: none is lost, none waits for another."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.configuration.sections import SamplingConfig
from prime_rl.utils.client import InferenceClient
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.environments import PlainEnvironment

NUM, GROUP = 1600, 8
SERVER = Path(__file__).parents[4] / "benchmarks" / "fake_server.py"


def test_sixteen_hundred_in_flight() -> None:
    """The full number is in benchmarks/bench_orchestrator.py."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < NUM + 256:
        pytest.skip(f"the limit of open files is {hard}; cure: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    argv = [sys.executable, str(SERVER), "--hold", str(NUM), "--tokens", "10"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        environment = PlainEnvironment([{"prompt": f"{i}"} for i in range(NUM // GROUP)], lambda completion: 1.0)
        groups, most_open = asyncio.run(run_all(environment, url))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert [rollout.prompt[0]["content"] for group in groups for rollout in group] == [
        f"{i // GROUP}" for i in range(NUM)
    ]
    assert all(rollout.reward == 1.0 and len(rollout.turns[0].completion_ids) == 10 for g in groups for rollout in g)
    assert most_open == NUM


async def run_all(environment: PlainEnvironment, url: str) -> tuple[list[Any], int]:
    client = InferenceClient(url, max_connections=NUM)
    args = [build_sampling_args(SamplingConfig(), seed) for seed in range(GROUP)]
    async with asyncio.timeout(120):
        groups = await asyncio.gather(*(environment.run_group(row, client, "m", args, 0) for row in environment.rows()))
    most_open = int(await client.copy(base_url=client.root_url).request("GET", "/most_open"))
    await client.close()
    return list(groups), most_open
