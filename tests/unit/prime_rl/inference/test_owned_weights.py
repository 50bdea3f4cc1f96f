"""An engine that owns its model keeps weights in the kernels' layout only: same results, names and digests."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.loading import build_engine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.lora import LoraSpec, add_lora, peft_tensors
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_files
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.training.manifests import digest_tensor
from rollouts.training.tensor_files import MappedTensors, save_tensors

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = {
    "tied, norms of heads": {"model_type": "qwen3", "tie_word_embeddings": True},
    "untied, biases": {"model_type": "qwen2", "tie_word_embeddings": False},
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small model of one kind."""
    config = json.loads((resolve_model_dir("tiny-qwen3") / "config.json").read_text())
    config |= {"hidden_size": 64, "head_dim": 32, "vocab_size": 96, **MODELS[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def build(model_dir: Path, seed: int, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Random weights; biases and norms, too, differ between seeds."""
    model, noise = load_decoder(model_dir, random_init=True, seed=seed, dtype=dtype), torch.Generator()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise.manual_seed(seed)))
    return model


def run(engine: EmbeddedEngine, adapter: str | None = None) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a few prompts, of which one is longer than a block."""
    requests = [
        GenerationRequest([i + 1] * (150 if i == 2 else 5 + i), SamplingParams(max_tokens=6, seed=i), adapter=adapter)
        for i in range(4)
    ]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    requests.append(GenerationRequest([*range(20)], scored, adapter=adapter))
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Output):
                of_prompt = [] if event.prompt_logprobs is None else event.prompt_logprobs.logprobs
                found[event.request] = (event.token_ids, [*event.logprobs, *of_prompt])
    return [found[request] for request in requests]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_results_and_digests_are_those_of_a_shared_model(model_dir: Path, dtype: str, exact: bool) -> None:
    shared, owned = (
        EmbeddedEngine(build(model_dir, 0, DTYPES[dtype]), exact=exact, owns_model=owns) for owns in (False, True)
    )
    assert run(owned) == run(shared)
    new = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensor_names(build(model_dir, 1)).items()}
    digests = {name: digest_tensor(tensor) for name, tensor in new.items()}
    assert owned.load_weights(new, 1)() == shared.load_weights(new, 1)() == digests
    assert run(owned) == run(shared)
    assert owned.tensors().keys() == new.keys() and len(owned.tensors()) == len(new)
    for name, tensor in owned.tensors().items():
        assert torch.equal(tensor.to(DTYPES[dtype]), new[name]), name


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_kernels_hold_matrices(model_dir: Path, dtype: str) -> None:
    model = build(model_dir, 0, DTYPES[dtype])
    before = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    engine = EmbeddedEngine(model, owns_model=True)
    gc.collect()
    assert before() is None and engine.model is model
    held = {name for name, parameter in model.named_parameters() if parameter.ndim > 1 and not parameter.is_meta}
    experts = {name for name in held if ".mlp." in name}  # their products are those of the model
    assert held - experts == {"model.embed_tokens.weight"}
    assert model.embedding().dtype == DTYPES[dtype]
    assert bool(experts) == (model.config.num_experts > 0)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("owns", [False, True], ids=["shared", "owned"])
def test_weights_mapped_from_a_float32_file_are_rounded(model_dir: Path, dtype: str, owns: bool) -> None:
    engine = EmbeddedEngine(build(model_dir, 0, DTYPES[dtype]), owns_model=owns)
    new = build(model_dir, 1)
    tensors = {name: tensor.contiguous() for name, tensor in tensor_names(new).items()}
    save_tensors(tensors, model_dir / "model.safetensors")
    digests = engine.load_weights(MappedTensors(read_files(model_dir)), 1)()
    assert run(engine) == run(EmbeddedEngine(new.to(DTYPES[dtype])))
    rounded = {name: tensor.to(DTYPES[dtype]).float() for name, tensor in tensors.items()}
    assert digests == {name: digest_tensor(tensor) for name, tensor in rounded.items()}


@needs_kernels
def test_a_server_owns_its_model(tmp_path: Path) -> None:
    config = InferenceConfig(output_dir=tmp_path, model={"name": "tiny-qwen3", "debug": {"random_init": True}})
    engine = build_engine(config, resolve_model_dir("tiny-qwen3"), lambda ids: "")
    assert engine.model.model.layers[0].mlp.down_proj.weight.is_meta


@needs_kernels
def test_looking_for_a_name_unpacks_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = EmbeddedEngine(build(model_dir, 0), owns_model=True).tensors()
    monkeypatch.setattr(cpu_kernels.PackedWeight, "unpack", None)
    assert "model.layers.0.self_attn.q_proj.weight" in tensors and "model.layers.9.norm.weight" not in tensors


@needs_kernels
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_weights_that_do_not_fit_change_nothing(model_dir: Path, damage: str) -> None:
    engine = EmbeddedEngine(build(model_dir, 0), owns_model=True)
    before, new = run(engine), dict(tensor_names(build(model_dir, 1)))
    name = "model.layers.1.self_attn.o_proj.weight"
    if damage == "missing":
        new.pop(name)
    else:
        new[name] = new[name][1:]
    with pytest.raises(ValueError, match="o_proj"):
        engine.load_weights(new, 1)
    assert engine.version == 0 and run(engine) == before


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_change_released_weights(model_dir: Path, dtype: str) -> None:
    adapted = build(model_dir, 0)
    add_lora(adapted, LoraSpec(4, 8.0, target_modules=("q_proj", "o_proj")), 1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    found = []
    for owns in (False, True):
        engine = EmbeddedEngine(build(model_dir, 0, DTYPES[dtype]), owns_model=owns)
        engine.load_adapter("a", dict(peft_tensors(adapted)), AdapterSpec(4, 8.0, 1))
        found.append((run(engine, "a"), run(engine)))
    assert found[0] == found[1] and found[0][0] != found[0][1]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_dir", [name for name in MODELS if name != "experts"], indirect=True)
def test_quantized_weights_keep_their_originals(model_dir: Path, dtype: str) -> None:
    options = {"exact": False, "quantization": "int8"}
    owned = EmbeddedEngine(build(model_dir, 0, DTYPES[dtype]), owns_model=True, **options)
    shared = EmbeddedEngine(build(model_dir, 0, DTYPES[dtype]), **options)
    assert {parameter.dtype for parameter in owned.model.parameters() if parameter.ndim > 1} == {DTYPES[dtype]}
    assert run(owned) == run(shared)
    new = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensor_names(build(model_dir, 1)).items()}
    digests = {name: digest_tensor(tensor) for name, tensor in new.items()}
    assert owned.load_weights(new, 1)() == shared.load_weights(new, 1)() == digests
    assert run(owned) == run(shared)
