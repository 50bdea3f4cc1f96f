"""Models implemented by transformers in the embedded engine: log-probs, weight updates, adapters and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.hf_model import HFCausalLM
from prime_rl.trainer.models.registry import load_causal_lm
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.manifests import digest_tensor

SHAPE = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "olmo2": {},
    "mistral": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8, "logit_scale": 0.25},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    },
    "falcon": {},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": 0.5},
    "diffllama": {},
    "hrm_text": {"head_dim": 16, "H_cycles": 1, "L_cycles": 1},
    "mamba": {"state_size": 4, "num_attention_heads": None, "num_key_value_heads": None},
}
RECOMPUTED = ("falcon", "gemma2", "diffllama", "hrm_text", "mamba")
EXPERTS = ("mixtral", "deepseek_v3")


def build_theirs(family: str, root: Path, seed: int = 0, **changes: Any) -> tuple[Any, Path]:
    """A model of transformers with random weights, and its directory."""
    import transformers

    options = {**SHAPE, **FAMILIES.get(family, {}), **changes}
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in options.items() if v is not None})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(root / f"{family}-{seed}")
    return model, root / f"{family}-{seed}"


def generate(engine: EmbeddedEngine, **params: Any) -> list[Output]:
    """Completions of three prompts, computed together."""
    requests = [
        GenerationRequest(
            list(range(3, 3 + n)), SamplingParams(**{"max_tokens": 20 + n, "seed": n, "ignore_eos": True, **params})
        )
        for n in (5, 12, 33)
    ]
    for request in requests:
        engine.add(request)
    outputs: dict[GenerationRequest, Output] = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return [outputs[request] for request in requests]


@torch.no_grad()
def score_by_theirs(model: Any, output: Output) -> torch.Tensor:
    """Log-probs of a completion by transformers."""
    prompt, ids = output.request.prompt, output.token_ids
    logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


@torch.no_grad()
def score_by_trainer(model: CausalLM, outputs: list[Output]) -> list[torch.Tensor]:
    """Log-probs of the completions by the trainer's forward pass, as one pack."""
    texts = [[*o.request.prompt, *o.token_ids] for o in outputs]
    lengths = [len(text) for text in texts]
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(n) for n in lengths])
    logits = model.logits(model(ids, positions, PackedAttention(lengths))).split(lengths)
    rows = [log_softmax(x.float())[len(o.request.prompt) - 1 : -1] for x, o in zip(logits, outputs)]  # noqa: B905
    return [x.gather(1, torch.tensor(o.token_ids)[:, None])[:, 0] for x, o in zip(rows, outputs, strict=True)]


SLOW = ("cohere2", "mamba")
"""Families whose modules of transformers take seconds to import."""


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FAMILIES])
def test_sampled_logprobs_before_and_after_an_update(family: str, tmp_path: Path) -> None:
    """Equal to transformers and to the trainer; bit for bit to the trainer for dense models with our attention."""
    first, directory = build_theirs(family, tmp_path)
    second, later = build_theirs(family, tmp_path, seed=1)
    model = load_causal_lm(directory)
    assert isinstance(model, HFCausalLM)
    assert model.recomputes == (family in RECOMPUTED), model.describe()
    engine = EmbeddedEngine(model, max_model_len=100)
    tensors = {name: t.clone() for name, t in tensor_names(load_causal_lm(later)).items()}
    for version, theirs in enumerate((first, second)):
        if version:
            digests = engine.load_weights(tensors, version)()
            assert digests.keys() == tensors.keys()
        outputs = generate(engine)
        for output, by_trainer in zip(outputs, score_by_trainer(model, outputs), strict=True):
            logprobs = torch.tensor(output.logprobs)
            assert output.versions == [(0, version)]
            torch.testing.assert_close(logprobs, score_by_theirs(theirs, output), atol=1e-5, rtol=0)
            if family in (*RECOMPUTED, *EXPERTS):
                torch.testing.assert_close(logprobs, by_trainer, atol=1e-5, rtol=0)
            else:
                assert torch.equal(logprobs, by_trainer)


def test_an_update_keeps_float32_tensors_unrounded(tmp_path: Path) -> None:
    """ERNIE 4.5 has routers in float32 in a model in bfloat16."""
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1}
    _, directory = build_theirs("ernie4_5_moe", tmp_path, **experts)
    model = load_causal_lm(directory, dtype=torch.bfloat16)
    published = {name: tensor + 0.01 for name, tensor in tensor_names(model).items()}
    assert {tensor.dtype for tensor in published.values()} == {torch.float32, torch.bfloat16}
    engine = EmbeddedEngine(model, max_model_len=100)
    assert engine.load_weights(published, 1)() == {name: digest_tensor(t) for name, t in published.items()}


@pytest.mark.parametrize("family", ["mistral", "falcon", "diffllama"])
def test_prompt_scores_and_chunked_prefill(family: str, tmp_path: Path) -> None:
    theirs, directory = build_theirs(family, tmp_path)
    engine = EmbeddedEngine(load_causal_lm(directory), max_model_len=100, max_num_batched_tokens=16)
    prompt = [(7 * i) % 300 + 3 for i in range(80)]
    engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0)))
    [event] = [event for _ in range(20) if engine.has_work() for event in engine.step()]
    assert isinstance(event, Output) and event.prompt_logprobs is not None
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float(), -1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(event.prompt_logprobs.logprobs), expected, atol=1e-5, rtol=0)


def test_an_adapter_changes_its_own_requests_only(tmp_path: Path) -> None:
    theirs, directory = build_theirs("mistral", tmp_path)
    engine = EmbeddedEngine(load_causal_lm(directory), max_model_len=100)
    name = "model.layers.1.self_attn.q_proj"
    a, b = torch.randn(4, 64), torch.randn(64, 4)
    spec = AdapterSpec(rank=4, alpha=8.0, version=3)
    engine.load_adapter("policy", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, spec)
    plain = GenerationRequest(list(range(3, 20)), SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    adapted = GenerationRequest(
        list(range(3, 20)), SamplingParams(max_tokens=9, seed=1, ignore_eos=True), adapter="policy"
    )
    engine.add(plain), engine.add(adapted)
    outputs = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    expected = score_by_theirs(theirs, outputs[plain])
    torch.testing.assert_close(torch.tensor(outputs[plain].logprobs), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.q_proj.weight += 2.0 * b @ a
    expected = score_by_theirs(theirs, outputs[adapted])
    torch.testing.assert_close(torch.tensor(outputs[adapted].logprobs), expected, atol=1e-4, rtol=0)


def test_recomputed_models_refuse_adapters(tmp_path: Path) -> None:
    _, directory = build_theirs("falcon", tmp_path)
    engine = EmbeddedEngine(load_causal_lm(directory), max_model_len=100)
    with pytest.raises(ValueError, match=r"set model\.lora\.merge = true"):
        engine.load_adapter("policy", {}, AdapterSpec(rank=4, alpha=8.0, version=1))


def test_models_that_are_not_causal_decoders_are_refused(tmp_path: Path) -> None:
    import transformers

    small = dict(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=320)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="t5 is an encoder-decoder model"):
        load_causal_lm(tmp_path / "t5")
    _, directory = build_theirs("bert", tmp_path)
    with pytest.raises(ValueError, match="BertLMHeadModel is not a causal language model"):
        load_causal_lm(directory)
    _, directory = build_theirs("phi", tmp_path)
    with pytest.raises(ValueError, match="PhiForCausalLM has no bias-free output head"):
        load_causal_lm(directory)
