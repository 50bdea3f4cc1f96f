"""Training API whose samples come from a real vLLM, adapters included."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from cli_runner import runner, until
from training_requests import TOKENS, Server, open_server

from prime_rl.runtime.machine import find_free_port

START_S = float(os.environ.get("VLLM_START_S", "600"))
pytestmark = [
    pytest.mark.timeout(600 + START_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; cure: make test-vllm"),
]
TINY = ("--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.max-model-len", 512)
CLOSE = 1e-4


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """One that samples itself, and one whose samples are vLLM's."""
    root, port = tmp_path_factory.mktemp("serve"), find_free_port()
    url = f"http://127.0.0.1:{port}"
    with runner(root / "logs") as found:
        options = (*TINY, "--backend", "vllm", "--max-lora-rank", 8, "--output-dir", root, "--server.port", port)
        command = found.start("inference", *options)
        until(lambda: is_healthy(url), "the server", command, deadline_s=START_S)
        with open_server(root / "own") as own, open_server(root / "remote", sampling={"url": url}) as remote:
            yield own, remote


def read_floats(data: bytes) -> list[float]:
    return np.frombuffer(data, dtype=np.float32).tolist()


@pytest.mark.parametrize("is_base", [True, False])
def test_greedy_samples_and_scores_of_vllm_agree(servers: tuple[Server, Server], is_base: bool) -> None:
    samplers = [s.open_sampler(base_model="tiny-qwen3") if is_base else s.train_sampler() for s in servers]
    for seq_id, fields in enumerate(({"topk_sample_logprobs": 2}, {"prompt_logprobs": True})):
        mine, theirs = (
            server.read_samples(sampler, seq_id, {"max_tokens": 12, "temperature": 0, "stop": []}, **fields)
            for server, sampler in zip(servers, samplers, strict=True)
        )
        [first], [second] = mine.sequences, theirs.sequences
        assert first.tokens == second.tokens and first.stop_reason == second.stop_reason
        assert read_floats(first.logprobs) == pytest.approx(read_floats(second.logprobs), abs=CLOSE)
        scores = read_floats(mine.prompt_logprobs)
        assert scores == pytest.approx(read_floats(theirs.prompt_logprobs), abs=CLOSE, nan_ok=True)
        assert len(scores) == (len(TOKENS) if "prompt_logprobs" in fields else 0)


def test_draws_of_vllm_repeat_with_their_seed_and_stop(servers: tuple[Server, Server]) -> None:
    _, remote = servers
    sampler = remote.train_sampler()
    params = {"max_tokens": 40, "seed": 7, "stop": ["e"]}
    first, again = (remote.read_samples(sampler, i, params, num_samples=4).sequences for i in range(2))
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({s.tokens for s in first}) > 1, "samples of a request have seeds of their own"
    assert any(len(s.tokens) < 40 * 4 for s in first), "a stop string ends a sample"
