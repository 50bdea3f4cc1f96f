"""Models implemented by transformers: parity of packs, steps, adapters and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from group_of_one import group_of_one
from loguru import logger
from safetensors.torch import load_file, save_file

from prime_rl.pretrained.convert import convert
from prime_rl.trainer.backend import Backend, build_backend, find_float32_modules, shard_model
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.forward import compute_head, compute_table
from prime_rl.trainer.lora import DEFAULT_TARGETS, LoraSpec, add_lora
from prime_rl.trainer.model import load_model, resolve_placement
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.decoder_config import choose_impl
from prime_rl.trainer.models.hf_model import HFCausalLM, find_backbone, find_max_positions
from prime_rl.trainer.models.registry import load_causal_lm, load_decoder
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.trainer.rl.train import train
from prime_rl.trainer.sft.train import train as train_sft
from prime_rl.transport.weights import publish_weights
from rollouts.training.batching import pack_samples

SHAPE = dict(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "qwen2": ("Qwen2Config", {}),
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 16}),
    "mamba": ("MambaConfig", {"state_size": 4, "num_attention_heads": None, "num_key_value_heads": None}),
}


def save_model(family: str, root: Path) -> Path:
    """A model directory of a family with random weights, without constant parameters."""
    import transformers

    kind, extra = FAMILIES[family]
    torch.manual_seed(0)
    options = {key: value for key, value in {**SHAPE, **extra}.items() if value is not None}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    model.save_pretrained(root / family)
    return root / family


def make_config(name: Path, output_dir: Path, **model: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"name": str(name), "seq_len": 48, **model},
            "optim": {"lr": 1e-2},
            "data": {"fake": {"batch_size": 6}},
            "max_steps": 2,
            "output_dir": output_dir,
            "log": {"file": False},
        }
    )


@torch.no_grad()
def compute_their_logits(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model.eval()(ids[None], use_cache=False).logits[0] for ids in sequences])


@torch.no_grad()
def compute_logits(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model(torch.cat(sequences), positions, PackedAttention(lengths)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_packed_trained_and_published(family: str, tmp_path: Path) -> None:
    import transformers

    base = save_model(family, tmp_path)
    config = make_config(base, tmp_path / "run", impl="hf")
    sequences = [torch.arange(n) * 7 % 320 for n in (5, 40, 17)]
    model, _ = load_model(config.model, resolve_placement(config.model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    expected = compute_their_logits(theirs, sequences)
    torch.testing.assert_close(compute_logits(model, sequences), expected, atol=2e-5, rtol=1e-4)

    assert train(config) == 0
    directory = tmp_path / "run" / "weights" / "step_2"
    after, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert not torch.allclose(compute_their_logits(after, sequences), expected, atol=1e-3), "it has learned"
    again, _ = load_model(make_config(directory, tmp_path, impl="hf").model, resolve_placement(config.model))
    torch.testing.assert_close(
        compute_logits(again, sequences), compute_their_logits(after, sequences), atol=2e-5, rtol=1e-4
    )


def save_model_of_images_and_text(directory: Path) -> Path:
    """Qwen3.5, of which transformers loads the language model as a causal one."""
    import transformers

    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    text = {**SHAPE, **linear, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=32)
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(directory)
    assert any("visual" in name for name in load_file(directory / "model.safetensors"))
    return directory


def test_the_text_part_of_a_model_is_published_as_one(tmp_path: Path) -> None:
    import transformers

    assert train(make_config(save_model_of_images_and_text(tmp_path / "base"), tmp_path / "run")) == 0
    directory = tmp_path / "run/weights/step_2"
    published = json.loads((directory / "config.json").read_text())
    assert published["model_type"] == "qwen3_5_text" and published["architectures"] == ["Qwen3_5ForCausalLM"]
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    sequences = [torch.arange(n) * 7 % 320 for n in (5, 17)]
    expected = compute_their_logits(theirs, sequences)
    torch.testing.assert_close(compute_logits(load_causal_lm(directory), sequences), expected, atol=2e-5, rtol=1e-4)


def test_adapters_of_the_text_part_are_merged_into_the_model(tmp_path: Path) -> None:
    import transformers

    base = save_model_of_images_and_text(tmp_path / "base")
    assert train(make_config(base, tmp_path / "run", lora={"rank": 2})) == 0
    convert(tmp_path / "run/weights/step_2", tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    sequences = [torch.arange(n) * 7 % 320 for n in (5, 17)]
    expected = compute_logits(load_causal_lm(tmp_path / "run/weights/step_2"), sequences)
    torch.testing.assert_close(compute_their_logits(merged, sequences), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"), [("GPT2", 128), ("OPT", 128), ("GPTBigCode", 128), ("Mistral", None), ("Mamba", None)]
)
def test_learned_tables_of_positions_are_found(kind: str, expected: int | None) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SHAPE)
    assert find_max_positions(transformers.AutoModelForCausalLM.from_config(config)) == expected


def test_lora_adapts_only_attention_beside_experts(tmp_path: Path) -> None:
    model = load_causal_lm(save_model("mixtral", tmp_path))
    assert {name.rpartition(".")[2] for name in add_lora(model, LoraSpec(2, 4.0))} == set(DEFAULT_TARGETS[:4])


def test_dense_models_may_name_a_number_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of the config of Doge has a default of 16,384."""
    monkeypatch.setitem(FAMILIES, "doge", ("DogeConfig", {}))
    model = load_causal_lm(save_model("doge", tmp_path))
    assert not model.config.num_experts
    assert {name.rpartition(".")[2] for name in add_lora(model, LoraSpec(2, 4.0))} == set(DEFAULT_TARGETS)


def test_rows_longer_than_the_table_of_positions_are_refused(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": {"name": str(save_model("gpt2", tmp_path))},
        "data": {"type": "fake", "seq_len": 129, "batch_size": 1},
        "max_steps": 1,
        "output_dir": tmp_path / "run",
        "log": {"file": False},
    }
    with pytest.raises(
        ValueError, match=r"the longest sample has 129 tokens, .* 128 positions: lower data\.seq_len to 128"
    ):
        train_sft(SFTConfig.model_validate(values))
    assert train_sft(SFTConfig.model_validate(values | {"data": values["data"] | {"seq_len": 128}})) == 0


def test_fake_samples_longer_than_the_table_are_refused(tmp_path: Path) -> None:
    config = make_config(save_model("gpt2", tmp_path), tmp_path / "run", seq_len=129)
    with pytest.raises(ValueError, match=r"up to 129 tokens, .* 128 positions: lower model\.seq_len to 128"):
        train(config)


def test_packs_may_be_longer_than_the_table_of_positions(tmp_path: Path) -> None:
    """Positions restart in each sample."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "ab", "completion": "ba"}\n' * 20)
    values: dict[str, Any] = {
        "model": {"name": str(save_model("gpt2", tmp_path))},
        "tokenizer": {"name": "tiny-qwen3"},
        "data": {"name": str(rows), "seq_len": 300, "batch_size": 1},
        "micro_bs": "auto",
        "max_steps": 1,
        "output_dir": tmp_path / "run",
        "log": {"file": False},
    }
    assert train_sft(SFTConfig.model_validate(values)) == 0


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
ROPE_BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3Config", {"original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE}),
    "dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
}


def test_mamba_runs_in_bfloat16(tmp_path: Path) -> None:
    import transformers

    base = save_model("mamba", tmp_path)
    sequences = [torch.arange(n) * 7 % 320 for n in (5, 17)]
    model = load_causal_lm(base, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    logits = compute_logits(model, sequences)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), compute_their_logits(theirs, sequences).float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rope", ROPE_BY_LENGTH)
def test_rope_is_that_of_each_sequence_alone(
    rope: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setitem(FAMILIES, rope, ROPE_BY_LENGTH[rope])
    base, generator = save_model(rope, tmp_path), torch.Generator().manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for p in source.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.3, generator=generator)
    source.save_pretrained(base)
    backend = build_backend(make_config(base, tmp_path, impl="hf", dtype=dtype, seq_len=128))
    model = backend.model
    reference = transformers.AutoModelForCausalLM.from_pretrained(base)
    if dtype == "bfloat16":
        reference = reference.bfloat16().float()  # the values of the weights
    sequences = [torch.arange(n) * 7 % 320 for n in (20, 32, 100, 33, 60, 5)]
    rotary = type(reference.model.rotary_emb)
    expected = []
    for ids in sequences:
        reference.model.rotary_emb = rotary(reference.config)  # dynamic frequencies are those of the longest so far
        expected.append(compute_their_logits(reference, [ids]))
    tolerance = 1e-4 if dtype == "float32" else 0.05
    assert not model.mixes_tokens_only_in_attend and not model.config.num_experts
    for is_in_rows in (False, True):
        if is_in_rows:
            model.inner.config._attn_implementation, model._function = "sdpa", None
        for _ in range(2):
            found = compute_logits(model, sequences).float()
            worst = max(
                (a - b).abs().max() / b.abs().max()
                for a, b in zip(found.split([len(ids) for ids in sequences]), expected, strict=True)
            )
            assert worst < tolerance


def test_a_cache_needs_rope_that_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rope, max_len, recomputes in (("longrope", 32, False), ("longrope", None, True), ("dynamic", None, False)):
        monkeypatch.setitem(FAMILIES, rope, ROPE_BY_LENGTH[rope])
        model = load_causal_lm(save_model(rope, tmp_path), impl="hf", max_len=max_len)
        assert model.recomputes == recomputes
        warning = "log-probs of samples that grow past it are not the trainer's: set model.max_model_len = 32"
        assert (warning in model.describe()) == recomputes


def test_both_implementations_give_the_same_gradients(tmp_path: Path) -> None:
    base = save_model("qwen2", tmp_path)

    def gradients(impl: str) -> dict[str, torch.Tensor]:
        config = make_config(base, tmp_path / impl, impl=impl)
        backend: Backend = build_backend(config)
        assert isinstance(backend.model, HFCausalLM) == (impl == "hf")
        assert backend.compute_canary(1).exact == (impl == "custom"), "an engine can be near to transformers only"
        [micros] = pack_samples(build_batches(config, 320).receive(1), 48, rows=2)
        backend.forward_backward(micros, build_loss(config.loss, longest=48))
        return {name: p.grad for name, p in backend.parameters.items() if p.grad is not None}

    ours, theirs = gradients("custom"), gradients("hf")
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-6, rtol=1e-4)


def test_the_padding_embedding_is_trained_by_the_native_decoder_only(tmp_path: Path) -> None:
    """Transformers drops the gradient of `pad_token_id`, even of a token that is not padding (docs/differences.md)."""
    base = save_model("qwen2", tmp_path)
    ids = torch.tensor([5, SHAPE["pad_token_id"], 7, 9])
    found = {}
    for impl in ("custom", "hf"):
        config = make_config(base, tmp_path / impl, impl=impl)
        model, _ = load_model(config.model, resolve_placement(config.model))
        model(ids, torch.arange(4), PackedAttention([4])).square().sum().backward()
        found[impl] = model.embedding().grad[ids]
    native, theirs = found["custom"], found["hf"]
    assert native[1].abs().sum() > 0 and theirs[1].abs().sum() == 0
    torch.testing.assert_close(native[[0, 2, 3]], theirs[[0, 2, 3]], atol=1e-5, rtol=1e-4)


def test_narrow_weights_keep_rotary_frequencies(tmp_path: Path) -> None:
    """Rounded to bf16, a frequency near 0.75 is off by up to 0.002, and a position of 1,500 by 3 radians."""
    import transformers

    options = SHAPE | {"hidden_size": 256, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    source = transformers.MistralForCausalLM(transformers.MistralConfig(**options, sliding_window=None))
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.12)  # attention that depends on positions
    source.save_pretrained(tmp_path / "base")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    ids = torch.randint(3, 320, (1600,))
    expected = compute_their_logits(reference, [ids]).float().log_softmax(-1)
    model = build_backend(make_config(tmp_path / "base", tmp_path, dtype="bfloat16", seq_len=1600)).model
    assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), reference.model.rotary_emb.inv_freq)
    logprobs = compute_logits(model, [ids]).float().log_softmax(-1)
    errors = (logprobs - expected)[:-1].gather(-1, ids[1:, None]).abs().squeeze(-1)
    assert errors[1400:].mean() < 2 * errors[:200].mean(), "late positions are as close as early ones"


ERNIE = (
    "Ernie4_5_MoeConfig",
    {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
)


INKLING = (
    "InklingTextConfig",
    {
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 64,
        "mlp_layer_types": ["dense", "dense"],
        "logits_mup_width_multiplier": 1.0,
        "unpadded_vocab_size": 320,
    },
)


def add_noise(base: Path, part: str) -> tuple[str, torch.Tensor]:
    """Make the tensor with this part of a name one that bfloat16 cannot hold; returns it."""
    stored = load_file(base / "model.safetensors")
    [name] = [name for name in stored if part in name]
    stored[name] += torch.randn_like(stored[name])
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    return name, stored[name]


def test_narrow_weights_keep_what_transformers_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_keep_in_fp32_modules_strict`: a buffer of DeepSeek-V3, matrices of ERNIE 4.5."""
    heads = {"num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    sizes = {"moe_intermediate_size": 16, "q_lora_rank": None}
    monkeypatch.setitem(FAMILIES, "deepseek", ("DeepseekV3Config", {**heads, **experts, **sizes}))
    monkeypatch.setitem(FAMILIES, "ernie", ERNIE)
    for family, part in (("deepseek", "e_score_correction_bias"), ("ernie", "gate.weight")):
        base = save_model(family, tmp_path)
        name, stored = add_noise(base, part)
        backend = build_backend(make_config(base, tmp_path, dtype="bfloat16"))
        backend.stepper.after_step()
        tensors = backend.export_state_dict()
        assert torch.equal(tensors[name], stored), "not rounded"
        assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
        published = publish_weights(tmp_path / "weights", 1, tensors, base)
        assert json.loads((published / "config.json").read_text())["torch_dtype"] == "bfloat16"
        shutil.rmtree(published)


def test_several_ranks_keep_routers_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "ernie", ERNIE)
    base = save_model("ernie", tmp_path)
    name, stored = add_noise(base, "gate.weight")
    config = make_config(base, tmp_path, dtype="bfloat16")
    backend = build_backend(config)
    backend.ranks = SimpleNamespace(size=2, rank=0, gather_bytes=lambda data: [data])  # type: ignore[assignment]
    tensors = backend.export_state_dict()
    assert torch.equal(tensors[name], stored) and tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    model, _ = load_model(config.model, backend.placement, sharded=True)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    with group_of_one() as mesh:
        shard_model(model, config.model, backend.placement, Mesh(dense=mesh))
        router = model.get_submodule(name.rpartition(".")[0])
        router.register_forward_hook(lambda _, inputs, outputs: calls.append((inputs[0], outputs[0])))
        compute_logits(model, [torch.arange(20)])
    [(hidden, logits)] = calls
    assert hidden.dtype == torch.bfloat16 and torch.equal(logits, hidden.float() @ stored.T)


def test_parameters_beside_others_are_computed_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP has one dtype per module. DeepSeek-V4 has such parameters, and is too large for one rank."""
    monkeypatch.setitem(FAMILIES, "ernie", ERNIE)
    config = make_config(save_model("ernie", tmp_path), tmp_path, dtype="bfloat16")
    placement = resolve_placement(config.model)
    model, _ = load_model(config.model, placement, sharded=True)
    model.float32_names = frozenset({"gate.weight"})  # its module also has a bias
    logged: list[str] = []
    number = logger.add(logged.append, level="WARNING")
    assert find_float32_modules(model) == []
    logger.remove(number)
    assert len(logged) == 1 and "gate.weight shares a module with other parameters" in logged[0]
    with group_of_one() as mesh:
        shard_model(model, config.model, placement, Mesh(dense=mesh))
        assert compute_logits(model, [torch.arange(20)]).isfinite().all()


def test_several_ranks_shard_modules_whose_parents_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolutions of Inkling stay in float32; the module around each computes with its weight."""
    monkeypatch.setitem(FAMILIES, "inkling", INKLING)
    config = make_config(save_model("inkling", tmp_path), tmp_path, dtype="bfloat16")
    backend = build_backend(config)
    model, _ = load_model(config.model, backend.placement, sharded=True)
    with group_of_one() as mesh:
        shard_model(model, config.model, backend.placement, Mesh(dense=mesh))
        logits = compute_logits(model, [torch.arange(20)])
    expected = compute_logits(backend.model, [torch.arange(20)]).to(logits)
    torch.testing.assert_close(logits, expected, atol=1e-2, rtol=1e-2)


def test_auto_selects_native_decoder_if_supported(tmp_path: Path) -> None:
    for family, impl in (("qwen2", "custom"), ("mistral", "hf")):
        base = save_model(family, tmp_path)
        assert choose_impl("auto", base) == impl
    with pytest.raises(ValueError, match="'mistral' is not supported by the native decoder"):
        load_decoder(tmp_path / "mistral")
    with pytest.raises(ValueError, match="'mistral' is not supported by the native decoder"):
        build_backend(make_config(tmp_path / "mistral", tmp_path, impl="custom"))


def quantize(base: Path, method: str) -> None:
    """Replace the matrices of a saved model by blocks of FP8, or the experts of GPT-OSS by those of MXFP4."""
    tensors = load_file(base / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight" if method == "fp8" else "_proj")]:
        if method == "fp8":
            tensors[f"{name}_scale_inv"] = tensors[name].abs().max().reshape(1, 1) / 448
            tensors[name] = (tensors[name] / tensors[f"{name}_scale_inv"]).to(torch.float8_e4m3fn)
        elif method == "mxfp4":
            experts, rows, columns = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((experts, columns, rows // 32), 122, dtype=torch.uint8)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": method, "weight_block_size": [128, 128], "activation_scheme": "dynamic", "bits": 4}
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": settings}
    (base / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("family", "method"), [("mistral", "fp8"), ("gpt_oss", "mxfp4")])
def test_quantized_models_are_published_without_loss(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setitem(FAMILIES, "gpt_oss", ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4}))
    base = save_model(family, tmp_path)
    names = load_file(base / "model.safetensors").keys()
    quantize(base, method)
    model = load_causal_lm(base)
    tensors = tensor_names(model)
    assert tensors.keys() == names
    published = publish_weights(tmp_path / "weights", 1, tensors, base)
    assert "quantization_config" not in json.loads((published / "config.json").read_text())
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(published).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.copy_tensors(load_file(published / "model.safetensors"))
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def publish_two_adapters(base: Path, folder: Path) -> tuple[Path, Backend]:
    """Publish an adapter of `base` and one of that adapter; the latter's directory and backend."""
    for name in ("one", "two"):
        backend = build_backend(make_config(base, folder, lora={"rank": 4}))
        with torch.no_grad():
            for p in backend.parameters.values():
                p.add_(0.1)
        tensors, config = backend.export_state_dict(), backend.adapter_config
        base = publish_weights(folder / name, 1, tensors, base, adapter_config=config)
    return base, backend


def test_auto_selects_transformers_for_quantized_weights(tmp_path: Path) -> None:
    """Also for adapters, which are merged into the dequantized weights."""
    base = save_model("qwen2", tmp_path)
    quantize(base, "fp8")
    with pytest.raises(ValueError, match=r'not supported by the native decoder: set model\.impl = "hf"'):
        load_causal_lm(base, impl="custom")
    base, backend = publish_two_adapters(base, tmp_path)
    sequences = [torch.arange(20)]
    expected = compute_logits(backend.model, sequences)
    torch.testing.assert_close(compute_logits(load_causal_lm(base), sequences), expected, atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"is quantized: give a bfloat16 version of it as --base"):
        convert(base, tmp_path / "merged")


def test_an_adapter_with_added_tokens_is_merged(tmp_path: Path) -> None:
    base, adapter, merged = save_model("mistral", tmp_path), tmp_path / "adapter", tmp_path / "merged"
    tensors = {f"{name}.weight": torch.randn(322, 32) for name in ("lm_head", "model.embed_tokens")}
    query = "model.layers.0.self_attn.q_proj"
    tensors |= {f"{query}.lora_A.weight": torch.randn(2, 32), f"{query}.lora_B.weight": torch.randn(32, 2)}
    adapter.mkdir()
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has shape \(322, 32\), .* \(320, 32\): merge it with `convert` first"):
        load_causal_lm(adapter, impl="hf")
    convert(adapter, merged)
    model = load_causal_lm(merged)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"]) and model.config.vocab_size == 322
    del tensors["lm_head.weight"]
    save_file({f"base_model.model.{name}": t for name, t in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="only one of lm_head and embed_tokens"):
        convert(adapter, tmp_path / "other")


def test_other_quantizations_are_refused(tmp_path: Path) -> None:
    base = save_model("mistral", tmp_path)
    quantize(base, "gptq")
    with pytest.raises(ValueError, match=r"its weights are quantized \(gptq\): use a bfloat16 version of it"):
        load_causal_lm(base)


def test_an_adapter_of_any_family_loads_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_model("mistral", tmp_path)
    lora = {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    config = make_config(base, tmp_path / "run", lora=lora)
    backend = build_backend(config)
    assert backend.model.model.layers[0].self_attn.q_proj.training, "dropout is for adapters, transformers' is off"
    assert train(config) == 0
    ids = torch.arange(9)
    with torch.no_grad():
        for p in backend.parameters.values():
            p.add_(0.1)
    drawn = [backend.model(ids, ids, PackedAttention([9])).detach() for _ in range(2)]
    assert not torch.equal(*drawn), "a training forward pass drops some inputs of the change, an evaluation none"
    assert torch.equal(*(compute_logits(backend.model, [ids]) for _ in range(2)))
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "weights" / "step_2")
    sequences = [torch.arange(20)]
    merged, _ = load_model(make_config(tmp_path / "run" / "weights" / "step_2", tmp_path).model, backend.placement)
    torch.testing.assert_close(
        compute_logits(merged, sequences), compute_their_logits(loaded, sequences), atol=2e-5, rtol=1e-4
    )


def test_adapters_of_adapters_are_merged(tmp_path: Path) -> None:
    base = save_model("mistral", tmp_path)
    warnings: list[str] = []
    number = logger.add(warnings.append, level="WARNING")
    base, backend = publish_two_adapters(base, tmp_path)
    logger.remove(number)
    assert len(warnings) == 1 and "is a LoRA adapter itself" in warnings[0]
    sequences = [torch.arange(20)]
    expected = compute_logits(backend.model, sequences)
    torch.testing.assert_close(compute_logits(load_causal_lm(base), sequences), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("cap", [0.05, 30.0])
def test_logprobs_have_the_logit_cap_of_transformers(
    cap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setitem(FAMILIES, "gemma2", ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": cap}))
    base = save_model("gemma2", tmp_path)
    backend = build_backend(make_config(base, tmp_path))
    assert backend.model.config.logit_cap == cap
    sequences = [torch.arange(n) * 7 % 320 for n in (20, 11)]
    theirs = compute_their_logits(transformers.AutoModelForCausalLM.from_pretrained(base), sequences).log_softmax(-1)
    labels = torch.cat(sequences).roll(-1)
    expected = theirs.gather(-1, labels[:, None]).squeeze(-1)
    with torch.no_grad():
        positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
        hidden = backend.model(torch.cat(sequences), positions, PackedAttention([20, 11]))
        rows, ones = torch.arange(len(labels)), torch.ones(len(labels))
        logprobs, entropy = compute_head(hidden, rows, labels, ones, backend.model, backend.mesh)
        table = compute_table(hidden, rows, ones, None, backend.model)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(theirs.exp() * theirs).sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(table, theirs, atol=1e-5, rtol=1e-5)
    served = compute_logits(backend.model, sequences).log_softmax(-1)
    torch.testing.assert_close(served, theirs, atol=1e-5, rtol=1e-5)


def test_unsupported_logits_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.trainer.models.hf_model.find_head_scale", lambda config: 1.0)
    base = save_model("granite", tmp_path)
    with pytest.raises(ValueError, match="GraniteForCausalLM computes its logits in an unsupported way"):
        build_backend(make_config(base, tmp_path))


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    """As in a merged adapter with a trained head, whose config still ties it."""
    base = save_model("qwen2", tmp_path)
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"an lm_head\.weight that is not the embedding"):
        load_causal_lm(base)
    model = load_causal_lm(base, impl="hf")
    assert torch.equal(model.lm_head.weight, load_file(base / "model.safetensors")["lm_head.weight"])
    assert not model.config.tie_word_embeddings


def test_missing_tensors_are_not_drawn_at_random(tmp_path: Path) -> None:
    file = save_model("mistral", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"its weights lack 1 tensors, such as lm_head\.weight"):
        load_causal_lm(file.parent)


def test_random_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    base = save_model("gpt2", tmp_path)
    (base / "model.safetensors").unlink()
    place = resolve_placement(make_config(base, tmp_path).model)
    first, second, other = (
        load_model(make_config(base, tmp_path, debug={"random_init": True, "seed": seed}).model, place)[0]
        for seed in (1, 1, 2)
    )
    ids = [torch.arange(9)]
    assert torch.equal(compute_logits(first, ids), compute_logits(second, ids))
    assert not torch.equal(compute_logits(first, ids), compute_logits(other, ids))
    with pytest.raises(ValueError, match="transformers cannot load"):
        build_backend(make_config(base, tmp_path))


def test_selective_checkpointing_of_changed_outputs_is_refused(tmp_path: Path) -> None:
    """The experts of Llama 4 are added to the output of a matrix product in place."""
    config = make_config(save_model("llama4", tmp_path), tmp_path / "run", impl="hf", ac={"mode": "selective"})
    with pytest.raises(ValueError, match=r'set model\.ac\.mode = "full"'):
        train(config)


def test_a_model_that_is_its_own_decoder_is_refused() -> None:
    inner = torch.nn.Module()
    inner.__dict__["base_model"] = inner
    with pytest.raises(ValueError, match="Module computes its logits in an unsupported way"):
        find_backbone(inner)
