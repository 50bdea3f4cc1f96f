"""A nanochat model as a Hugging Face directory: transformers, our trainer and our engine compute what nanochat does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from nanochat import gpt
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf_format import export_model, to_hf
from nanochat.tokenizer import NanochatTokenizer
from prime_rl.inference.embedded import prepared_decoder
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.inference.engine import GenerationRequest, SamplingParams
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_tensors
from rollouts.training.rl_losses import compute_head_logprobs


@pytest.fixture(scope="module")
def tokenizer() -> NanochatTokenizer:
    return NanochatTokenizer.train(["12+30 is 42"] * 3, 270)


@pytest.fixture(scope="module")
def model(tokenizer: NanochatTokenizer) -> GPT:
    built = GPT(GPTConfig(64, tokenizer.get_vocab_size(), 2, 4, 2, 32))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return built


@pytest.fixture(scope="module")
def directory(model: GPT, tokenizer: NanochatTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nanochat")
    export_model(path, model, tokenizer)
    return path


def test_transformers_computes_the_same(directory: Path, model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(directory))
    assert type(theirs).__name__ == "NanoChatForCausalLM"
    monkeypatch.setattr(gpt, "ROPE_DTYPE", torch.float32)  # theirs does not round its angles
    ours = GPT(model.config)
    ours.load_state_dict(model.state_dict())
    ids = torch.arange(40)[None] * 5 % 270
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)


def test_an_export_is_whole_and_replaces_nothing(
    directory: Path, model: GPT, tokenizer: NanochatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts"))
    script = importlib.import_module("export_nanochat")
    monkeypatch.setattr("nanochat.checkpoint_manager.load_model", lambda *_, **__: (model, tokenizer, {"step": 3}))
    config = script.ExportConfig(output_dir=tmp_path / "new" / "model")
    with monkeypatch.context() as patch:
        patch.setattr("nanochat.hf_format.CHAT_TEMPLATE", None)  # fails at the last file
        with pytest.raises(TypeError):
            script.export(config)
    assert not list((tmp_path / "new").iterdir())
    assert script.export(config) == 0
    names = sorted(path.name for path in config.output_dir.iterdir())
    assert names == sorted(path.name for path in directory.iterdir())
    with pytest.raises(ValueError, match=r"model exists: choose another --output_dir or remove it"):
        script.export(config)


def test_files_have_the_weights_by_their_names(directory: Path, model: GPT) -> None:
    expected, written = to_hf(model.state_dict()), read_tensors(directory)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_packed_sequences_have_the_logits_they_have_alone(directory: Path, model: GPT) -> None:
    decoder = load_decoder(directory)
    lengths = [7, 4, 21]
    ids = torch.arange(sum(lengths)) * 11 % 270
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        packed = decoder.logits(decoder(ids, positions, PackedAttention(lengths, torch.device("cpu"), "exact")))
        alone = torch.cat([model(part[None])[0] for part in ids.split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)
    assert tensor_names(decoder).keys() == read_tensors(directory).keys()


@pytest.mark.parametrize("exact", [True, False])
def test_the_engine_reports_the_log_probs_of_the_trainer(directory: Path, exact: bool) -> None:
    decoder = load_decoder(directory)
    engine = EmbeddedEngine(load_decoder(directory), exact=exact)
    for seed, n in enumerate((3, 9, 5)):
        engine.add(
            GenerationRequest(tuple(range(10, 10 + n)), SamplingParams(max_tokens=12, seed=seed, temperature=0.8))
        )
    outputs = []
    while len(outputs) < 3:
        outputs += [event for event in engine.step() if hasattr(event, "finish_reason")]
    for output in outputs:
        ids = torch.tensor([*output.request.prompt, *output.token_ids])
        attend = PackedAttention([len(ids)], torch.device("cpu"), "exact")
        with torch.no_grad():
            hidden = decoder(ids, torch.arange(len(ids)), attend)
            rows = slice(len(output.request.prompt) - 1, -1)
            temperature = torch.full((len(output.token_ids),), 0.8)
            expected, _ = compute_head_logprobs(
                hidden[rows], decoder.lm_head.weight, torch.tensor(output.token_ids), temperature, cap=15.0
            )
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, rtol=0, atol=0 if exact else 1e-5)


def test_logits_of_the_engine_on_a_gpu_are_wide(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the trainer: in bfloat16 a logit of 8 is off by up to 1/32."""
    monkeypatch.setattr(prepared_decoder, "widens", lambda x: x.dtype == torch.float16)
    monkeypatch.setattr(prepared_decoder, "multiply_wide", lambda x, weight, out: x.float() @ weight.float().T)
    decoder = PreparedDecoder(load_decoder(directory, dtype=torch.float16), False, torch.float16)
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).half()
    expected = 15 * torch.tanh(hidden.float() @ decoder.model.lm_head.weight.float().T / 15)
    torch.testing.assert_close(decoder.logits(hidden), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 24, 60])
def test_capped_log_probs_have_the_gradient_of_autograd(chunk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) * 9 for shape in ((12, 5), (7, 5)))
    labels, temperature = torch.arange(12) % 7, torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    grads = []
    for ours in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            logprobs, entropy = compute_head_logprobs(h, w, labels, temperature, chunk, cap=15.0)
        else:
            table = (15 * torch.tanh(h @ w.T / 15) / temperature[:, None]).log_softmax(-1)
            logprobs, entropy = table.gather(1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)
        (logprobs.sum() + 0.3 * entropy.square().sum()).backward()
        grads.append((logprobs.detach(), h.grad, w.grad))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)
