"""LoRA in the native decoder: parity with PEFT, file format, and batches of mixed adapters."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.lora import (
    PEFT_PREFIX,
    Adapter,
    LoraLinear,
    LoraSpec,
    adapter_tensors,
    add_lora,
    load_adapter,
    match_modules,
    merge,
    merge_adapter,
    merged_tensors,
    peft_config,
    peft_tensors,
)
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.multi_lora import AdapterTable
from prime_rl.transport.weights import is_adapter, publish_weights, verify_tensors
from rollouts.kernels.linear import Linear
from rollouts.training.manifests import read_manifest

SHAPE = dict(
    model_type="qwen3",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
ASSET = Path(__file__).parents[4] / "src/prime_rl/assets/tiny-qwen3"


def build_model(seed: int = 1, **changes: object) -> CausalLM:
    model = CausalLM(DecoderConfig.from_hf({**SHAPE, **changes}))
    init_weights(model, seed)
    return model


def train_adapter(model: CausalLM, spec: LoraSpec, seed: int) -> None:
    """An adapter without zero-initialized tensors."""
    add_lora(model, spec, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)


def compute_logits(model: CausalLM, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model(torch.cat(sequences), positions, PackedAttention(lengths))).split(lengths)


def publish(model: CausalLM, spec: LoraSpec, root: Path, step: int = 1) -> Path:
    """A published adapter of a base model in `root/base`."""
    config = peft_config(model, spec, str(root / "base"))
    return publish_weights(root, step, peft_tensors(model), ASSET, adapter_config=config)


def test_new_adapter_is_identity_and_only_it_trains() -> None:
    model, plain = build_model(), build_model()
    targets = add_lora(model, LoraSpec(rank=4, alpha=8))
    assert len(targets) == 7 * 2
    ids = torch.randint(0, 96, (20,))
    assert torch.equal(compute_logits(model, [ids])[0], compute_logits(plain, [ids])[0])
    compute_logits(model, [ids])[0].square().sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(adapter_tensors(model))
    again = build_model()
    add_lora(again, LoraSpec(rank=4, alpha=8))
    assert all(torch.equal(t, adapter_tensors(again)[n]) for n, t in adapter_tensors(model).items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(5, 64), (2, 7, 64)])
def test_inexact_layer_computes_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Outputs and gradients, with other roundings."""
    torch.manual_seed(0)
    base = Linear(64, 48).to(dtype)
    x, grad = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(*shape[:-1], 48, dtype=dtype)
    results = []
    for exact in (True, False):
        base.exact = exact
        layer = LoraLinear(base, LoraSpec(8, 24.0))
        torch.manual_seed(1)
        for parameter in (layer.lora_A.weight, layer.lora_B.weight):
            torch.nn.init.normal_(parameter)
        assert layer.exact == exact
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, [x, layer.lora_A.weight, layer.lora_B.weight], grad)])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for exact_result, other in zip(*results, strict=True):
        torch.testing.assert_close(other, exact_result, rtol=tolerance, atol=100 * tolerance)
    expected = x @ base.weight.t() + base.bias + 3 * (x @ layer.lora_A.weight.t()) @ layer.lora_B.weight.t()
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("attn", ["exact", "sdpa"])
def test_adapted_layers_are_as_exact_as_the_model(attn: str, tmp_path: Path) -> None:
    config: dict[str, object] = {
        "name": str(ASSET),
        "dtype": "float32",
        "device": "cpu",
        "lora": {"rank": 4},
        "attn": attn,
        "debug": {"random_init": True},
    }
    backend = build_backend(TrainConfig.model_validate({"model": config, "output_dir": str(tmp_path)}))
    layers = [module for module in backend.model.modules() if isinstance(module, LoraLinear)]
    assert layers and all(layer.exact == (attn == "exact") for layer in layers)


def test_merged_weights_compute_the_same() -> None:
    model = build_model().double()
    train_adapter(model, LoraSpec(rank=3, alpha=5, modules_to_save=("lm_head", "model.norm")), seed=2)
    assert not model.config.tie_word_embeddings, "a head that is trained alone parts from the embedding"
    merged = CausalLM(model.config).double()
    merged.load_state_dict(merged_tensors(model))
    ids = torch.randint(0, 96, (20,))
    torch.testing.assert_close(compute_logits(merged, [ids]), compute_logits(model, [ids]), atol=1e-10, rtol=1e-10)


def test_adapters_are_merged_on_the_device_of_the_weights() -> None:
    merged = merge(torch.empty(3, 4, device="meta", dtype=torch.bfloat16), torch.ones(2, 4), torch.ones(3, 2), 0.5)
    assert (merged.device.type, merged.dtype, merged.shape) == ("meta", torch.bfloat16, (3, 4))


@torch.no_grad()
@pytest.mark.parametrize("ranks", [(1, 2, 8), (3, 16, 5)])
def test_mixed_adapters_match_their_trainers_bit_for_bit(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Rows of one, two or many tokens per adapter."""
    base = build_model()
    trainers: dict[str | None, CausalLM] = {None: build_model()}
    table = AdapterTable(base)
    for step, rank in enumerate(ranks, start=1):
        spec = LoraSpec(rank=rank, alpha=2 * rank, dropout=0.5)
        trainers[f"a{step}"] = build_model()
        train_adapter(trainers[f"a{step}"], spec, seed=step)
        table.put(f"a{step}", load_adapter(publish(trainers[f"a{step}"], spec, tmp_path, step)))
    assert tensor_names(base).keys() == tensor_names(build_model()).keys(), "the base keeps its names"
    rng = random.Random(ranks[0])
    for _ in range(8):
        lengths = [rng.choice([1, 2, 3, rng.randint(4, 60)]) for _ in range(rng.randint(4, 20))]
        sequences = [torch.randint(0, 96, (n,)) for n in lengths]
        owners = [rng.choice(list(trainers)) for _ in lengths]
        owners[:2] = ["a1", f"a{len(ranks)}"]
        per_row = [owner for owner, n in zip(owners, lengths, strict=True) for _ in range(n)]
        named = [name for name in trainers if name is not None]
        rows = {n: torch.tensor([i for i, o in enumerate(per_row) if o == n], dtype=torch.long) for n in named}
        with table.route(rows):
            together = compute_logits(base, sequences)
        for sequence, owner, logits in zip(sequences, owners, together, strict=True):
            filler = torch.zeros(8, dtype=torch.long)  # trainer packs have at least MIN_TOKENS tokens
            assert torch.equal(logits, compute_logits(trainers[owner], [sequence, filler])[0]), owner
    table.remove("a1")
    ids = torch.randint(0, 96, (9,))
    assert torch.equal(compute_logits(base, [ids])[0], compute_logits(trainers[None], [ids])[0])


def test_published_adapters_round_trip(tmp_path: Path) -> None:
    spec = LoraSpec(rank=4, alpha=6, target_modules=("q_proj", r".*layers\.1\.mlp\..*"), modules_to_save=("lm_head",))
    model = build_model()
    train_adapter(model, spec, seed=3)
    directory = publish(model, spec, tmp_path, step=7)
    assert is_adapter(directory) and read_manifest(directory).step == 7
    adapter = load_adapter(directory)
    verify_tensors({PEFT_PREFIX + name: t for name, t in adapter.tensors.items()}, read_manifest(directory))
    parts = {f"model.layers.1.mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    assert set(adapter.spec.target_modules) == {"q_proj", *parts}, "a part of a kind is listed in full"
    trained = adapter_tensors(model)
    assert adapter.tensors.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in adapter.tensors.items())


@pytest.mark.parametrize("tie, saved", [(True, ()), (False, ("lm_head",)), (True, ("lm_head",))])
def test_peft_round_trip(tie: bool, saved: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    shape = {key: value for key, value in SHAPE.items() if key != "model_type"}
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**shape, "tie_word_embeddings": tie})).eval()
    theirs.save_pretrained(tmp_path / "base")
    ours = build_model(tie_word_embeddings=tie)
    ours.load_state_dict(theirs.state_dict())
    spec = LoraSpec(rank=4, alpha=8, modules_to_save=saved)
    train_adapter(ours, spec, seed=4)
    ids = torch.randint(0, 96, (30,))
    expected = compute_logits(ours, [ids])[0]
    loaded = peft.PeftModel.from_pretrained(theirs, publish(ours, spec, tmp_path)).eval()
    torch.testing.assert_close(loaded(ids[None]).logits[0], expected, atol=1e-5, rtol=1e-5)

    loaded.save_pretrained(tmp_path / "peft")
    base = build_model(tie_word_embeddings=tie)
    base.load_state_dict(
        {n: t for n, t in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict().items()}
    )
    adapter, table, trained = load_adapter(tmp_path / "peft"), AdapterTable(base), adapter_tensors(ours)
    assert adapter.tensors.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in adapter.tensors.items())
    if saved:
        with pytest.raises(ValueError, match=r"has the full tensor lm_head\.weight"):
            table.put("peft", adapter)
        return
    table.put("peft", adapter)
    with table.route({"peft": torch.arange(30)}):
        assert torch.equal(compute_logits(base, [ids])[0], expected)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"target_modules": ("wq",)}, "'wq' matches no module; available: down_proj"),
        ({"target_modules": ("lm_head",)}, "modules_to_save"),
        ({"modules_to_save": ("head",)}, "'head' matches no module"),
        ({"modules_to_save": ("q_proj",)}, "choose one"),
        ({"target_modules": ("(",)}, "regular expression"),
    ],
)
def test_invalid_targets_are_rejected(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        add_lora(build_model(), replace(LoraSpec(rank=2, alpha=2), **change))


def test_routers_are_saved_modules_or_frozen() -> None:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    build = partial(build_model, model_type="qwen3_moe", mlp_only_layers=[], **experts)
    with pytest.raises(ValueError, match="'gate' matches no module; available: k_proj"):
        add_lora(build(), LoraSpec(rank=2, alpha=2, target_modules=("gate",)))
    model = build()
    spec = LoraSpec(rank=2, alpha=2, target_modules=(r".*layers.*(q_proj|gate)",), modules_to_save=("gate",))
    assert add_lora(model, spec) == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert {name for name in adapter_tensors(model) if "lora" not in name} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)
    }
    compute_logits(model, [torch.arange(9)])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' is not plain.*weight_conversion"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"match_strict": True}}, "use_bdlora"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_alpha": None}, "lora_alpha must be a positive number, got None"),
        ({"r": None}, "r must be a positive number, got None"),
        ({"r": 5}, "rank 5"),
    ],
)
def test_unsupported_adapter_variants_are_rejected(change: dict, words: str, tmp_path: Path) -> None:
    model, spec = build_model(), LoraSpec(rank=2, alpha=2)
    add_lora(model, spec)
    directory = publish(model, spec, tmp_path)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=words):
        load_adapter(directory)


def test_mismatched_adapter_does_not_change_the_table() -> None:
    table = AdapterTable(build_model())
    other = build_model(hidden_size=128)
    spec = LoraSpec(rank=2, alpha=2)
    add_lora(other, spec)
    with pytest.raises(ValueError, match="shape"):
        table.put("a", Adapter(spec, adapter_tensors(other)))
    with pytest.raises(ValueError, match="does not have"):
        table.put("a", Adapter(spec, {"model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(2, 64)}))
    assert not table.changes


@pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
def test_a_matrix_without_its_pair_is_refused(kind: str) -> None:
    model, spec = build_model(), LoraSpec(rank=2, alpha=2)
    adapted = build_model()
    add_lora(adapted, spec)
    tensors = dict(adapter_tensors(adapted))
    del tensors[next(name for name in tensors if kind in name)]
    table = AdapterTable(model)
    with pytest.raises(ValueError, match=r"no matching pair of matrices for model\.layers\.0"):
        table.put("a", Adapter(spec, tensors))
    with pytest.raises(ValueError, match="does not match its base model"):
        merge_adapter(tensor_names(model), Adapter(spec, tensors))
    assert not table.changes


def test_an_adapter_of_another_rank_or_without_tensors_is_refused() -> None:
    model, spec = build_model(), LoraSpec(rank=2, alpha=2)
    adapted = build_model()
    add_lora(adapted, spec)
    table = AdapterTable(model)
    with pytest.raises(ValueError, match=r"has shape \(2, 64\), it should be \(4, 64\) \(r = 4\)"):
        table.put("a", Adapter(replace(spec, rank=4), adapter_tensors(adapted)))
    with pytest.raises(ValueError, match="has no tensors"):
        table.put("a", Adapter(spec, {}))
    assert not table.changes


@pytest.mark.parametrize("kind", ["lora_embedding_A", "token_adapter.trainable_tokens_delta"])
def test_tensors_that_cannot_be_merged_are_refused(kind: str) -> None:
    model, name = build_model(), f"model.embed_tokens.{kind}"
    adapter = Adapter(LoraSpec(4, 8), {name: torch.ones(4, SHAPE["vocab_size"])})
    with pytest.raises(ValueError, match=f"{name} is no tensor of its base model"):
        merge_adapter(tensor_names(model), adapter)


def test_adapters_of_models_of_images_and_text_are_merged() -> None:
    """Of the complete model, and of its language model alone, whose names lack a prefix."""
    image, text = "model.visual.qkv", "model.language_model.layers.0.q_proj"
    tensors = {f"{name}.weight": torch.zeros(4, 4) for name in (image, text)}
    tensors["model.language_model.embed_tokens.weight"] = torch.zeros(8, 4)
    for name, own in ((image, image), (text, text), ("model.layers.0.q_proj", text)):
        pair = {f"{name}.lora_A.weight": torch.ones(2, 4), f"{name}.lora_B.weight": torch.ones(4, 2)}
        merged = merge_adapter(tensors, Adapter(LoraSpec(rank=2, alpha=2), pair))
        assert [key for key in tensors if merged[key].any()] == [f"{own}.weight"]
    saved = {"model.embed_tokens.weight": torch.ones(8, 4)}
    merged = merge_adapter(tensors, Adapter(LoraSpec(rank=2, alpha=2), saved))
    assert merged["model.language_model.embed_tokens.weight"].all() and not merged["lm_head.weight"].any()


def test_patterns_match_like_peft() -> None:
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.xq_proj"]
    assert match_modules(names, ["q_proj"]) == names[:2]
    assert match_modules(names, [r".*\.1\..*"]) == names[1:]
