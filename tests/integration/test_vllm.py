"""Weight sync with a real vLLM server, on CPU or GPU; skipped where vLLM is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import anyio
import pytest

from rollouts.training.weight_sync import update_vllm_weights_from_disk

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; cure: make test-vllm")
def test_a_real_vllm_server_takes_new_weights(tmp_path: Path) -> None:
    """A tiny random model is served, other weights are loaded, and its log-probs change as they should."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from prime_rl.runtime.tokenizer import load_tokenizer

    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=len(load_tokenizer("tiny-qwen3")),
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    for step in (0, 1):
        torch.manual_seed(step)
        model = transformers.Qwen3ForCausalLM(config)
        model.save_pretrained(tmp_path / f"step_{step}")
        load_tokenizer("tiny-qwen3").save_pretrained(tmp_path / f"step_{step}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "step_0")]
    options = [
        "--served-model-name",
        "m",
        "--port",
        str(port),
        "--enforce-eager",
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
    ]
    with (tmp_path / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdout=log,
            stderr=log,
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "VLLM_SERVER_DEV_MODE": "1"},
        )
        try:
            _wait_until_healthy(url, process, tmp_path / "vllm.log")
            before = _prompt_logprobs(url)
            answer = anyio.run(update_vllm_weights_from_disk, url, str(tmp_path / "step_1"))
            after = _prompt_logprobs(url)
            anyio.run(update_vllm_weights_from_disk, url, str(tmp_path / "step_0"), backend="trio")
            again = _prompt_logprobs(url)
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert answer["success"] is True and answer["version"] in ("1", None)
    assert before == pytest.approx(again, abs=1e-4) and before != pytest.approx(after, abs=1e-2)
    # A server was once seen to hold neither the old weights nor the new: so compare with the new ones themselves.
    assert after == pytest.approx(_expected_logprobs(tmp_path / "step_1"), abs=1e-3)


def _expected_logprobs(model_dir: Path) -> list[float]:
    """What transformers computes from the same directory."""
    import torch
    import transformers

    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)(ids).logits
    found = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[0, 1:, None])
    return [float(value) for value in found[:, 0]]


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url + "/health", timeout=5)
            return
        time.sleep(1)
    raise TimeoutError(f"vLLM did not start: {log.read_text()[-3000:]}")


def _prompt_logprobs(url: str) -> list[float]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    rows = answer["choices"][0]["prompt_logprobs"]
    return [next(iter(row.values()))["logprob"] for row in rows if row]
