"""The native decoder against transformers, and its independence of what is packed beside a sequence."""

from __future__ import annotations

import random

import pytest
import torch

from prime_rl.trainer.models.attention import KEY_MULTIPLE, PackedAttention, fold_groups, unfold_groups
from prime_rl.trainer.models.causal_lm import CausalLM, DecoderConfig, init_weights, tensor_names

SHAPE = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build_pair(family: str) -> tuple[torch.nn.Module, CausalLM]:
    """A transformers model of random weights and ours with the same."""
    import transformers

    configs = {
        "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
        "llama3-rope": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    }
    config = configs[family]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))  # biases and norms start at 0 and 1, where a mix-up would not show
    ours = CausalLM(DecoderConfig.from_hf(config.to_dict()))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "llama3-rope"])
def test_logits_and_gradients_equal_transformers(family: str) -> None:
    theirs, ours = build_pair(family)
    ids, weights = torch.randint(0, 320, (100,)), torch.randn(100, 320)
    expected = theirs(ids[None]).logits[0]
    actual = ours.logits(ours(ids, torch.arange(100), PackedAttention([100])))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize("mode", ["exact", "sdpa"])
def test_a_pack_does_not_mix_its_sequences(mode: str) -> None:
    _, ours = build_pair("qwen3")
    lengths = [7, 30, 3, 12]
    sequences = [torch.randint(0, 320, (n,)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = ours(torch.cat(sequences), positions, PackedAttention(lengths, mode=mode)).split(lengths)
    for ids, hidden in zip(sequences, packed, strict=True):
        alone = ours(ids, torch.arange(len(ids)), PackedAttention([len(ids)], mode=mode))
        torch.testing.assert_close(hidden, alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("hidden, intermediate, vocab", [(64, 128, 320), (128, 384, 320), (256, 704, 512)])
def test_exact_mode_is_bit_identical_whatever_is_packed_beside(hidden: int, intermediate: int, vocab: int) -> None:
    shape = dict(SHAPE, model_type="qwen3", hidden_size=hidden, intermediate_size=intermediate, vocab_size=vocab)
    model = CausalLM(DecoderConfig.from_hf(dict(shape, tie_word_embeddings=True, head_dim=32)))
    init_weights(model, seed=1)
    for p in model.parameters():
        p.mul_(3.0)  # sharper attention than at initialisation
    rng = random.Random(hidden)

    def logprobs(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        lengths = [len(s) for s in sequences]
        positions = torch.cat([torch.arange(n) for n in lengths])
        logits = model.logits(model(torch.cat(sequences), positions, PackedAttention(lengths)))
        return torch.log_softmax(logits, -1).split(lengths)

    for _ in range(6):
        sequences = [torch.randint(0, vocab, (rng.randint(4, 150),)) for _ in range(rng.randint(2, 30))]
        together = logprobs(sequences)
        chosen = rng.sample(range(len(sequences)), rng.randint(1, len(sequences)))
        for i, alone in zip(chosen, logprobs([sequences[i] for i in chosen]), strict=True):
            assert torch.equal(together[i], alone), f"sequence of {len(alone)} tokens changed with its neighbours"


def test_initial_weights_are_a_pure_function_of_config_and_seed() -> None:
    config = DecoderConfig.from_hf(dict(SHAPE, model_type="qwen3", tie_word_embeddings=True))
    models = [CausalLM(config) for _ in range(3)]
    torch.manual_seed(5)  # the global generator must play no part
    init_weights(models[0], seed=7)
    init_weights(models[1], seed=7)
    init_weights(models[2], seed=8)
    first, again, other = (tensor_names(m) for m in models)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert "lm_head.weight" not in first, "a tied head is stored once"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_what_the_decoder_does_not_implement_is_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecoderConfig.from_hf({**SHAPE, "model_type": "qwen3", **change})


def test_folding_groups_round_trips() -> None:
    q = torch.randn(2, 5, 8, 4)
    assert torch.equal(unfold_groups(fold_groups(q, 2), 5), q)


def test_a_pack_refuses_an_empty_sequence() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedAttention([3, 0])
    assert PackedAttention([3]).rows.shape[1] == KEY_MULTIPLE
