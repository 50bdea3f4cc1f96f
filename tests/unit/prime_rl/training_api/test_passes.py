"""Mixed packs: random mixes of requests give each adapter the bits that it gets alone."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_requests import build_pass

from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.registry import load_causal_lm
from prime_rl.training_api.adapters import AdapterConfig, AdapterTrainer
from prime_rl.training_api.passes import RunningPass
from prime_rl.training_api.wire import CLASSES, INT64, Datum, PassRequest, decode_pass

pytestmark = pytest.mark.usefixtures("one_thread")
LOSSES = ("importance_sampling", "cross_entropy", "ppo", "gspo")
CONFIGS = [
    AdapterConfig(4, 1),
    AdapterConfig(8, 2, train_mlp=False),
    AdapterConfig(3, 3, train_attn=False),
    AdapterConfig(16, 4),
]
Bits = dict[str, list[Tensor]]


@pytest.fixture
def trainer() -> AdapterTrainer:
    return AdapterTrainer(load_causal_lm(resolve_model_dir("tiny-qwen3"), random_init=True), 256, 96)


def draw_request(rng: random.Random, *, forward_only: bool = False) -> PassRequest:
    numpy, loss_fn = np.random.default_rng(rng.randrange(2**32)), rng.choice(LOSSES)
    data = []
    for _ in range(rng.randint(1, 5)):
        length = rng.choice((1, 2, 7, 30, 65, 90))
        tokens = numpy.integers(0, 300, length + 1)
        inputs = {"target_tokens": tokens[1:]}
        if loss_fn == "cross_entropy" and rng.random() < 0.5:
            inputs["target_tokens"] = np.stack([tokens[1:], np.full(length, -1)], axis=1)
        if loss_fn != "cross_entropy":
            inputs |= {"advantages": numpy.normal(size=length), "logprobs": numpy.normal(size=length) - 5}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(length)
        data.append(Datum(tokens[:-1].tolist(), inputs))
    return PassRequest(data, loss_fn, {}, forward_only)


def create(trainer: AdapterTrainer) -> list[str]:
    names = []
    for config in CONFIGS:
        adapter = trainer.create(name := f"m{config.seed}", config)
        names.append(name)
        with torch.no_grad():
            for key, p in adapter.parameters.items():
                if ".lora_B." in key:
                    p.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(len(key)))
    return names


def collect(trainer: AdapterTrainer, passes: Sequence[RunningPass]) -> Bits:
    """All bits that a tenant gets: log-probs, loss, gradients."""
    found: Bits = {}
    for p in passes:
        parameters = trainer.adapters[p.name].parameters.values()
        gradients = [x.grad.clone() for x in parameters if x.grad is not None]
        found[p.name] = [*p.result.logprobs, torch.tensor(p.result.loss), *gradients]
        for x in parameters:
            x.grad = None
    return found


def advance_together(trainer: AdapterTrainer, *packs: Sequence[RunningPass]) -> None:
    """Compute packs in threads that meet in the first layer, where each has chosen its rows."""
    all_begun = threading.Barrier(len(packs))

    def meet(*_: Any) -> None:
        all_begun.wait(20)

    hook = trainer.model.layers()[0].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(len(packs)) as threads:
        list(threads.map(trainer.advance, packs))
    hook.remove()


def load_mistral(directory: Path) -> CausalLM:
    """A small model that runs on transformers' code."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    MistralForCausalLM(
        MistralConfig(vocab_size=320, hidden_size=32, intermediate_size=64, max_position_embeddings=256, **sizes)
    ).save_pretrained(directory)
    return load_causal_lm(directory)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_random_mixes_give_the_bits_of_each_alone(trainer: AdapterTrainer, seed: int) -> None:
    rng = random.Random(seed)
    names, forward_only = create(trainer), seed == 2
    requests = {name: draw_request(rng, forward_only=forward_only) for name in names}
    alone = [trainer.start_pass(name, request) for name, request in requests.items()]
    for p in alone:
        while p.parts:
            trainer.advance([p])
    expected = collect(trainer, alone)

    mixed = [trainer.start_pass(name, request) for name, request in requests.items()]
    while left := [p for p in mixed if p.parts]:
        trainer.advance(rng.sample(left, rng.randint(1, len(left))))
    actual = collect(trainer, mixed)
    for name in names:
        assert len(actual[name]) == len(expected[name])
        assert all(torch.equal(x, y) for x, y in zip(actual[name], expected[name], strict=True)), name
        assert forward_only or len(actual[name]) > len(requests[name].data) + 1


def test_a_mix_has_whole_micro_batches_up_to_the_limit(trainer: AdapterTrainer) -> None:
    names = create(trainer)
    datum = Datum(list(range(40)), {"target_tokens": np.arange(40)})

    def start(name: str, num: int, *, forward_only: bool = False) -> RunningPass:
        return trainer.start_pass(name, PassRequest([datum] * num, "cross_entropy", {}, forward_only))

    big, small, other = start(names[0], 5), start(names[1], 1), start(names[2], 1, forward_only=True)
    assert [len(part) for part in big.parts] == [2, 2, 1]
    assert trainer.choose_mix([big, small, other]) == [big]  # 80 of 96 tokens
    assert trainer.choose_mix([small, other, big]) == [small]
    assert trainer.choose_mix([small, other, start(names[3], 1)])[1:] != [other]
    assert len(trainer.choose_mix([small, start(names[3], 1)])) == 2
    trainer.mixes = False
    assert trainer.choose_mix([small, start(names[3], 1)]) == [small]


def test_packs_at_the_same_time_have_the_bits_of_one(trainer: AdapterTrainer) -> None:
    def start() -> list[RunningPass]:
        rng = random.Random(3)
        return [trainer.start_pass(name, draw_request(rng)) for name in names]

    names = create(trainer)
    alone = start()
    for p in alone:
        trainer.advance([p])
    expected = [p._logprobs for p in alone]
    passes = start()
    advance_together(trainer, passes[:2], passes[2:])
    for p, logprobs in zip(passes, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(p._logprobs, logprobs, strict=True))


def test_a_transformers_model_runs_two_packs_at_once(tmp_path: Path) -> None:
    trainer = AdapterTrainer(copy.deepcopy(load_mistral(tmp_path)), 256, 96)  # as `serve` does
    lengths = {"m1": (40, 25), "m2": (5, 60)}  # as many tokens, other boundaries
    create(trainer)

    def start() -> list[RunningPass]:
        data = {
            name: [Datum(list(range(n)), {"target_tokens": np.arange(n)}) for n in own] for name, own in lengths.items()
        }
        return [trainer.start_pass(name, PassRequest(own, "cross_entropy", {}, False)) for name, own in data.items()]

    alone = start()
    for p in alone:
        trainer.advance([p])
    expected = collect(trainer, alone)
    together = start()
    advance_together(trainer, together[:1], together[1:])
    actual = collect(trainer, together)
    for name in lengths:
        assert len(actual[name]) == len(expected[name]) > 3
        assert all(torch.equal(x, y) for x, y in zip(actual[name], expected[name], strict=True)), name


@pytest.mark.parametrize("has_weights", [True, False])
def test_sparse_targets_are_those_of_dense_ones(trainer: AdapterTrainer, has_weights: bool) -> None:
    """The client lists no 0, which is a token; without weights, only listed cells count."""
    weights = np.array([[0.5, 0.5], [0, 0], [1, 0]], np.float32)
    inputs = {"target_tokens": np.array([[0, 7], [0, 0], [5, 0]]), "weights": weights}
    message = CLASSES["ForwardBackwardRequest"].FromString(build_pass("m", 1, [([1, 2, 3], inputs)]))
    found, listed = message.data[0].loss_fn_inputs, np.array([[0, 1], [0, 0], [1, 0]], np.float32)
    for name, array in ("crow_indices", [0, 1, 1, 2]), ("col_indices", [1, 0]), ("values", [7, 5]):
        setattr(found["target_tokens"].sparse_csr, name, np.array(array, np.int64).tobytes())
    assert (found["target_tokens"].dtype, found["target_tokens"].shape) == (INT64, [3, 2])
    if not has_weights:
        del found["weights"]
        inputs["weights"] = listed
    dense = PassRequest([Datum([1, 2, 3], inputs)], "cross_entropy", {}, False)
    [name, *_] = create(trainer)
    results = []
    for request in (dense, decode_pass(message.SerializeToString())):
        trainer.advance([running := trainer.start_pass(name, request)])
        results.append(running.result)
    assert torch.equal(*(result.logprobs[0] for result in results)) and results[0].loss == results[1].loss != 0


def test_one_and_several_targets_have_the_same_logit_cap(trainer: AdapterTrainer) -> None:
    trainer.model.config = replace(trainer.model.config, logit_cap=0.1)
    [name, *_] = create(trainer)
    targets = np.arange(40)
    found = []
    for shape in ((40,), (40, 1)):
        datum = Datum(list(range(40)), {"target_tokens": targets.reshape(shape)})
        running = trainer.start_pass(name, PassRequest([datum], "cross_entropy", {}, True))
        trainer.advance([running])
        found.append(running.result.logprobs[0].flatten())
    assert torch.allclose(*found, atol=1e-6)
