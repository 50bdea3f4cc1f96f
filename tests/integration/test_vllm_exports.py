"""Published models and adapters have our log-probs in real vLLM; skipped if it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; cure: make test-vllm"
)
IDS = [(7 * i * i + 3 * i + 11) % 300 + 10 for i in range(60)]

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

def main(model, adapter, ids):
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, enable_lora=True, max_lora_rank=8)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    found = []
    for lora in (None, LoRARequest("adapter", 1, adapter)):
        [answer] = llm.generate([{"prompt_token_ids": ids}], params, lora_request=lora)
        rows = answer.prompt_logprobs[1:]
        found.append([row[token].logprob for row, token in zip(rows, ids[1:])])
    print("FOUND" + json.dumps(found))

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
"""


@needs_vllm
@pytest.mark.timeout(900)
def test_a_model_and_an_adapter_have_our_logprobs_in_vllm(tmp_path: Path) -> None:
    import torch

    from prime_rl.runtime.tokenizer import resolve_model_dir
    from prime_rl.trainer.lora import (
        LoraSpec,
        adapter_tensors,
        add_lora,
        load_adapter,
        peft_config,
        peft_tensors,
    )
    from prime_rl.trainer.models.attention import PackedAttention
    from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
    from prime_rl.trainer.models.multi_lora import AdapterTable
    from prime_rl.trainer.models.registry import load_decoder
    from prime_rl.transport.weights import publish_weights

    @torch.no_grad()
    def compute_logprobs(model: CausalLM) -> list[float]:
        ids = torch.tensor(IDS)
        logits = model.logits(model(ids, torch.arange(len(IDS)), PackedAttention([len(IDS)])))
        found: list[float] = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0].tolist()
        return found

    source = resolve_model_dir("tiny-qwen3")
    base = load_decoder(source, random_init=True)
    whole = publish_weights(tmp_path / "whole", 1, tensor_names(base), source)
    trained, spec = load_decoder(whole), LoraSpec(rank=8, alpha=16)
    add_lora(trained, spec)
    with torch.no_grad():
        for tensor in adapter_tensors(trained).values():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)), alpha=0.1)
    config = peft_config(trained, spec, str(whole))
    adapter = publish_weights(tmp_path / "adapter", 1, peft_tensors(trained), whole, adapter_config=config)

    table = AdapterTable(load_decoder(whole))
    expected = [compute_logprobs(table.model)]
    table.put("adapter", load_adapter(adapter))
    with table.route({"adapter": torch.arange(len(IDS))}):
        expected.append(compute_logprobs(table.model))
    assert max(abs(a - b) for a, b in zip(*expected, strict=True)) > 0.1, "leaving the adapter out would show"

    (tmp_path / "serve.py").write_text(SERVE)
    ran = subprocess.run(
        [sys.executable, tmp_path / "serve.py", whole, adapter, json.dumps(IDS)],
        env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=800,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, ran.stdout[-1000:] + ran.stderr[-3000:]
    for ours, theirs in zip(expected, json.loads(lines[0].removeprefix("FOUND")), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)
