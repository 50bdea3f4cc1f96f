"""The `inference` command as a process: shutdown and unsupported options."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_runner import Runner, runner, until
from openai import AsyncOpenAI

from prime_rl.runtime.machine import find_free_port

TINY = ("--model.name", "tiny-qwen3", "--model.debug.random-init")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runner]:
    with runner(tmp_path / "said") as found:
        yield found


def get(url: str) -> str:
    """The body of a response; empty while the server is unreachable."""
    try:
        return httpx.get(url, trust_env=False, timeout=5).text
    except httpx.HTTPError:
        return ""


def test_stopping_server_finishes_running_requests(run: Runner) -> None:
    port = find_free_port()
    server = run.start("inference", *TINY, "--server.port", port, "--server.drain-timeout", 30)
    root = f"http://127.0.0.1:{port}"
    until(lambda: "ok" in get(f"{root}/health"), "the server", server)

    async def use() -> Any:
        http = httpx.AsyncClient(trust_env=False)
        async with AsyncOpenAI(base_url=f"{root}/v1", api_key="none", http_client=http) as client:
            running = asyncio.create_task(
                client.completions.create(
                    model="tiny-qwen3", prompt="ab", max_tokens=2000, extra_body={"ignore_eos": True}
                )
            )
            while "prime_rl_requests_running 1" not in await asyncio.to_thread(get, f"{root}/metrics"):
                await asyncio.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            return await running

    assert asyncio.run(use()).usage.completion_tokens == 2000
    assert server.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "embedded", "--tensor-parallel-size", 2), "the embedded engine uses one device"),
        (("--backend", "embedded", "--parallel.dp", 2), "the embedded engine uses one device"),
        (("--backend", "vllm", "--exact"), "exact = true requires the embedded engine"),
        (("--backend", "embedded", "--vllm.enforce-eager", "true"), "is an option of vLLM"),
        (("--sampling.max-token", 3), "sampling.max_tokens"),
    ],
)
def test_unsupported_engine_options_are_rejected(run: Runner, options: tuple[Any, ...], words: str) -> None:
    command = run.run("inference", *TINY, *options)
    assert command.process.returncode == 2, command.err
    assert words in command.err and len(command.err.splitlines()) <= 3, command.err


def test_documented_flags_exist(run: Runner) -> None:
    flags = ("--parallel.tp", 1, "--parallel.dp", 1, "--tensor-parallel-size", 1, "--max-batch-size", 8)
    command = run.run_well("inference", *TINY, *flags, "--sampling.max-tokens", 5, "--dry-run")
    assert "max_batch_size = 8" in command.out and "max_tokens = 5" in command.out
