"""Training of adapters: gradients against LoRA layers and plain autograd, isolation, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.lora import LoraSpec, add_lora
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.hf_model import HFCausalLM
from prime_rl.trainer.models.registry import load_causal_lm
from prime_rl.training_api.adapters import ALPHA, AdapterConfig, AdapterTrainer, TrainedAdapter, find_matrices
from prime_rl.training_api.passes import PassResult
from prime_rl.training_api.wire import Datum, PassRequest

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.1, "grad_clip_norm": 0.5}
CONFIG = AdapterConfig(rank=4, seed=7)


def load(dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_causal_lm(resolve_model_dir("tiny-qwen3"), random_init=True, dtype=dtype)


@pytest.fixture
def trainer() -> AdapterTrainer:
    return AdapterTrainer(load(), 256, 64)


def make_data(seed: int, lengths: Sequence[int] = (9, 14, 30)) -> list[Datum]:
    rng = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = rng.integers(0, 300, length + 1)
        floats = {name: rng.normal(size=length) for name in ("advantages", "logprobs")}
        inputs = {"target_tokens": tokens[1:], "advantages": floats["advantages"], "logprobs": floats["logprobs"] - 5}
        data.append(Datum(tokens[:-1].tolist(), inputs))
    return data


def request(data: list[Datum], loss_fn: str = "importance_sampling", *, forward_only: bool = False) -> PassRequest:
    return PassRequest(data, loss_fn, {}, forward_only)


def run_pass(trainer: AdapterTrainer, name: str, request: PassRequest) -> PassResult:
    running = trainer.start_pass(name, request)
    while running.parts:
        trainer.advance([running])
    return running.result


def gradients(adapter: TrainedAdapter) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in adapter.parameters.items() if p.grad is not None}


def fill_b(adapter: TrainedAdapter) -> None:
    with torch.no_grad():
        for name, p in adapter.parameters.items():
            if ".lora_B." in name:
                p.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(len(name)))


def test_loss_and_gradient_equal_plain_autograd_in_fp64() -> None:
    trainer = AdapterTrainer(load(torch.float64), 256, 64)
    adapter, data = trainer.create("m", CONFIG), make_data(0)
    fill_b(adapter)
    result = run_pass(trainer, "m", request(data))

    model = load(torch.float64)
    add_lora(model, LoraSpec(4, ALPHA), seed=7)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in adapter.parameters.items():
            named[name].copy_(p)
    loss = torch.zeros((), dtype=torch.float64)
    for datum in data:
        ids = torch.tensor(datum.tokens)
        hidden = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)], "cpu", "sdpa"))
        table = torch.log_softmax(hidden @ model.lm_head.weight.T, dim=-1)
        logprobs = table[torch.arange(len(ids)), torch.from_numpy(datum.inputs["target_tokens"])]
        ratio = torch.exp(logprobs - torch.from_numpy(datum.inputs["logprobs"]))
        loss = loss - (ratio * torch.from_numpy(datum.inputs["advantages"])).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert abs(result.loss - float(loss.detach())) < 1e-9
    for name, gradient in gradients(adapter).items():
        other = named[name].grad
        assert other is not None and float((gradient - other).abs().max()) < 1e-9, name


def test_gradients_accumulate_until_the_step(trainer: AdapterTrainer) -> None:
    adapter, data = trainer.create("m", CONFIG), make_data(1)
    run_pass(trainer, "m", request(data))
    once = gradients(adapter)
    run_pass(trainer, "m", request(data))
    assert all(torch.allclose(g, 2 * once[name]) for name, g in gradients(adapter).items())
    adapter.step(ADAM)
    assert not gradients(adapter)
    with pytest.raises(ValueError, match="needs a gradient"):
        adapter.step(ADAM)


def test_forward_only_leaves_no_gradient(trainer: AdapterTrainer) -> None:
    adapter = trainer.create("m", CONFIG)
    run_pass(trainer, "m", request(make_data(1), forward_only=True))
    assert not gradients(adapter)


def test_eight_tenants_get_the_bits_of_one(trainer: AdapterTrainer) -> None:
    def train(names: list[str]) -> dict[str, dict[str, Tensor]]:
        adapters = {name: trainer.create(name, AdapterConfig(4, int(name))) for name in names}
        for step in range(2):
            for name in names:
                run_pass(trainer, name, request(make_data(10 * int(name) + step, (20, 5))))
            for name in names:
                adapters[name].step(ADAM)
        tensors = {name: dict(adapters[name].adapter.tensors) for name in names}
        for name in names:
            trainer.remove(name)
        return tensors

    together = train([str(i) for i in range(8)])
    for name in ("0", "3", "7"):
        alone = train([name])[name]
        assert all(torch.equal(alone[key], together[name][key]) for key in alone)


def test_step_equals_torch_adamw(trainer: AdapterTrainer) -> None:
    adapter = trainer.create("m", CONFIG)
    copies = [p.detach().clone().requires_grad_() for p in adapter.parameters.values()]
    adamw = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(3):
        run_pass(trainer, "m", request(make_data(step)))
        for copy, p in zip(copies, adapter.parameters.values(), strict=True):
            copy.grad = None if p.grad is None else p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 0.5)
        adamw.step()
        assert adapter.step(ADAM)["grad_norm"] == pytest.approx(float(norm))
    for copy, p in zip(copies, adapter.parameters.values(), strict=True):
        assert torch.allclose(copy, p, rtol=0, atol=1e-7)


def test_loaded_state_continues_with_the_same_bits(trainer: AdapterTrainer, tmp_path: Path) -> None:
    first = trainer.create("a", CONFIG)
    run_pass(trainer, "a", request(make_data(0)))
    first.step(ADAM)
    second = trainer.create("b", AdapterConfig(4, 99))
    second.load(first.adapter.tensors, {k: v.clone() for k, v in first.optimizer_tensors().items()})
    for name, adapter in (("a", first), ("b", second)):
        run_pass(trainer, name, request(make_data(1)))
        adapter.step(ADAM)
    assert all(torch.equal(p, second.parameters[name]) for name, p in first.parameters.items())
    with pytest.raises(ValueError, match="other matrices"):
        trainer.create("c", AdapterConfig(8, 0)).load(first.adapter.tensors, None)


def test_many_targets_per_token_equal_single_ones(trainer: AdapterTrainer) -> None:
    trainer.create("m", CONFIG)
    [datum] = make_data(3, (12,))
    targets = datum.inputs["target_tokens"]
    both = np.stack([targets, np.full_like(targets, -1)], axis=1)
    single = Datum(datum.tokens, {"target_tokens": targets})
    double = Datum(datum.tokens, {"target_tokens": both, "weights": np.ones(both.shape, dtype=np.float32)})
    one = run_pass(trainer, "m", request([single], "cross_entropy", forward_only=True))
    two = run_pass(trainer, "m", request([double], "cross_entropy", forward_only=True))
    assert torch.allclose(two.logprobs[0][:, 0], one.logprobs[0], atol=1e-6) and not two.logprobs[0][:, 1].any()
    assert two.loss == pytest.approx(one.loss)


def test_matrices_follow_the_choice(trainer: AdapterTrainer) -> None:
    names = trainer.create("m", AdapterConfig(4, 0, train_mlp=False)).parameters
    assert names and all(".self_attn." in name for name in names)
    with pytest.raises(ValueError, match="selects no matrices"):
        trainer.create("n", AdapterConfig(4, 0, train_attn=False, train_mlp=False))


def build_transformers_model(family: str, **options: Any) -> CausalLM:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": 64, "intermediate_size": 16, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **options})
    return HFCausalLM(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("family", "attention", "mlp"),
    [
        ("phi3", "o_proj qkv_proj", "down_proj gate_up_proj"),
        ("gpt_neox", "dense query_key_value", "dense_4h_to_h dense_h_to_4h"),
        ("starcoder2", "k_proj o_proj q_proj v_proj", "c_fc c_proj"),
        ("qwen2_moe", "k_proj o_proj q_proj v_proj", ""),  # not the shared experts and their gate
    ],
)
def test_all_linear_layers_of_a_family_are_adapted(family: str, attention: str, mlp: str) -> None:
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = build_transformers_model(family, **experts if family == "qwen2_moe" else {})
    for is_attention, names in ((True, attention), (False, mlp)):
        found = [name for name, (_, kind) in find_matrices(model).items() if kind == is_attention]
        assert sorted({name.rpartition(".")[2] for name in found}) == names.split()
        assert len(found) == 2 * len(names.split()), "in both layers"


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no module of the type nn\.Linear"):
        find_matrices(build_transformers_model("gpt2", n_embd=16, n_layer=2, n_head=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_tokens": np.array([1, 2])}, "target_tokens has shape"),
        ({"target_tokens": np.full(9, 10**6)}, "outside of the vocabulary"),
        ({"target_tokens": np.ones(9, dtype=np.float32)}, "as int64"),
        ({"advantages": np.ones(3)}, "advantages has shape"),
        ({"mask": np.ones(9)}, "mask is not an input"),
        ({"advantages": None}, "needs loss_fn_inputs.advantages"),
    ],
)
def test_bad_data_leaves_no_gradient(trainer: AdapterTrainer, change: dict[str, Any], message: str) -> None:
    adapter, data = trainer.create("m", CONFIG), make_data(0)
    inputs = {name: array for name, array in {**data[0].inputs, **change}.items() if array is not None}
    with pytest.raises(ValueError, match=message):
        run_pass(trainer, "m", request([*data, Datum(data[0].tokens, inputs)]))
    assert not gradients(adapter)


def test_gspo_needs_a_token_for_its_ratio(trainer: AdapterTrainer) -> None:
    trainer.create("m", CONFIG)
    [datum] = make_data(0, (9,))
    datum.inputs["sequence_ratio_mask"] = np.zeros(9)
    with pytest.raises(ValueError, match="sequence_ratio_mask has no token"):
        run_pass(trainer, "m", request([datum], "gspo"))
