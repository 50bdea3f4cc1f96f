"""The native decoder: parity with transformers and batch invariance."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.trainer.models import attention
from prime_rl.trainer.models.attention import (
    AttentionMode,
    PackedAttention,
    bucket_lengths,
    causal_mask,
    exact_causal_attention,
    fold_groups,
    has_flash,
    has_kernel_bits,
    masked_attention,
    torch_causal_attention,
    unfold_groups,
)
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, rope_frequencies, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.gemma3 import Gemma3LM
from prime_rl.trainer.models.moe import SparseMLP, compute_imbalance, pop_expert_load
from prime_rl.trainer.models.registry import MODEL_CLASSES, fill_weights
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native
from rollouts.training.numerics import KEY_MULTIPLE, padded

SHAPE = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[0])
FAMILIES = ["qwen3", "qwen2", "qwen3_moe", "llama", "llama3-rope", "smollm3", "smollm3-untied", "gemma3", "gemma3-long"]
SPECIAL = dict(pad_token_id=None, bos_token_id=None, eos_token_id=1)  # the defaults exceed this vocabulary
GEMMA = dict(head_dim=32, sliding_window=20, layer_types=["full_attention", "sliding_attention"])
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build_pair(family: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, CausalLM]:
    """A transformers model with random weights, and the native decoder with the same weights."""
    import transformers

    configs = {
        "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, tie_word_embeddings=True),
        "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
        "llama3-rope": transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
        "smollm3": transformers.SmolLM3Config(**{**SHAPE, "num_hidden_layers": 4}, **SPECIAL),
        "smollm3-untied": transformers.SmolLM3Config(
            **SHAPE, **SPECIAL, no_rope_layers=[0, 1], tie_word_embeddings=False
        ),
        "gemma3": transformers.Gemma3TextConfig(**SHAPE, **SPECIAL, **GEMMA),
        "gemma3-long": transformers.Gemma3TextConfig(
            **{**SHAPE, "num_hidden_layers": 3},
            **{**SPECIAL, **GEMMA, "layer_types": None},
            query_pre_attn_scalar=24,
            sliding_window_pattern=3,
            tie_word_embeddings=False,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
    }
    config = configs[family]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval().to(dtype)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.05 * torch.randn_like(p))  # biases and norms start at 0 and 1, where a mix-up would not show
    model_class = MODEL_CLASSES.get(config.model_type, CausalLM)
    ours = model_class(DecoderConfig.from_hf(config.to_dict())).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("mode", ["exact", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_logits_and_gradients_equal_transformers(
    family: str, mode: AttentionMode, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = build_pair(family, dtype)
    ids, weights = torch.randint(0, 320, (100,)), torch.randn(100, 320, dtype=dtype)
    with monkeypatch.context() as patch:
        # transformers casts to float32 in norms and routers, where we keep float64.
        patch.setattr(torch, "float32", dtype)
        patch.setattr(torch, "float", dtype)
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
        expected = theirs(ids[None]).logits[0]
        kinds = [["full_attention"], ["sliding_attention"]] if isinstance(ours, Gemma3LM) else [[]]
        angles = [theirs.model.rotary_emb(weights, torch.arange(100)[None], *kind) for kind in kinds]
    # Our angles are float32 always: compared, then made the same.
    ropes = {"_rope": ours.rope, "_local_rope": getattr(ours, "local_rope", None)}
    for (name, rope), tables in zip(ropes.items(), angles, strict=False):
        tables = tuple(table[0][:, None] for table in tables)
        for mine, table in zip(rope(100, ids.device), tables, strict=True):
            torch.testing.assert_close(mine[:100].to(dtype), table, atol=2e-6, rtol=0)
        setattr(ours, name, tables)
    actual = ours.logits(ours(ids, torch.arange(100), PackedAttention([100], mode=mode)))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, p in ours.named_parameters():
        error = (p.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("mode", ["exact", "sdpa"])
def test_packed_sequences_are_independent(mode: str) -> None:
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
def test_exact_mode_is_batch_invariant(hidden: int, intermediate: int, vocab: int) -> None:
    shape = dict(SHAPE, model_type="qwen3", hidden_size=hidden, intermediate_size=intermediate, vocab_size=vocab)
    model = CausalLM(DecoderConfig.from_hf(dict(shape, tie_word_embeddings=True, head_dim=32)))
    init_weights(model, seed=1)
    for p in model.parameters():
        p.mul_(3.0)  # sharper attention than at initialization
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


@torch.no_grad()
@pytest.mark.parametrize("num_experts, top_k, inner", [(8, 3, 48), (60, 4, 32)])
def test_experts_are_batch_invariant(num_experts: int, top_k: int, inner: int) -> None:
    """With 60 experts, most have fewer tokens than `min_rows`."""
    experts = dict(num_experts=num_experts, num_experts_per_tok=top_k, moe_intermediate_size=inner)
    model = CausalLM(DecoderConfig.from_hf(dict(SHAPE, **experts, model_type="qwen3_moe", norm_topk_prob=True)))
    init_weights(model, seed=2)
    for p in model.parameters():
        p.mul_(4.0)
    sequences = [torch.randint(0, 320, (length,)) for length in (33, 4, 5, 9, 4, 9, 33, 5)]

    def hidden(chosen: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        lengths = [len(s) for s in chosen]
        positions = torch.cat([torch.arange(n) for n in lengths])
        return model(torch.cat(chosen), positions, PackedAttention(lengths)).split(lengths)

    for together, sequence in zip(hidden(sequences), sequences, strict=True):
        assert torch.equal(together, hidden([sequence])[0])


def test_individual_and_stacked_experts_load() -> None:
    theirs, ours = build_pair("qwen3_moe")
    names = tensor_names(ours)
    assert names["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (64, 48)
    assert "model.layers.0.mlp.gate_proj.weight" in names, "mlp_only_layers"
    for tensors in (names, theirs.state_dict()):
        copy = CausalLM(ours.config)
        fill_weights(copy, dict(tensors))
        assert all(torch.equal(tensor, names[name]) for name, tensor in tensor_names(copy).items())


def test_expert_imbalance_is_recorded_with_gradients() -> None:
    _, ours = build_pair("qwen3_moe")
    ids = torch.randint(0, 320, (50,))
    with torch.no_grad():
        ours(ids, torch.arange(50), PackedAttention([50]))
    assert compute_imbalance(pop_expert_load(ours)) == {}
    ours(ids, torch.arange(50), PackedAttention([50]))
    block = ours.model.layers[1].mlp
    assert isinstance(block, SparseMLP) and block.load is not None and int(block.load.sum()) == 50 * 3
    block.load = torch.tensor([60, 0, 15, 15, 15, 15, 15, 15])
    assert compute_imbalance(pop_expert_load(ours))["router/max_violation/mean"] == pytest.approx(60 / 18.75 - 1)


def test_counting_tokens_does_not_wait_for_the_gpu() -> None:
    block = build_pair("qwen3_moe")[1].model.layers[1].mlp
    assert isinstance(block, SparseMLP)
    chosen, counted = torch.tensor([[0, 2], [2, 1], [7, 0]]), torch.tensor([True, False, True])
    assert block._count_chosen(chosen).tolist() == [2, 1, 2, 0, 0, 0, 0, 1]
    assert block._count_chosen(chosen, counted).tolist() == [2, 0, 1, 0, 0, 0, 0, 1]
    assert block._count_chosen(chosen.to("meta"), counted.to("meta")).shape == (8,), "no value is read"


def test_initial_weights_are_a_pure_function_of_config_and_seed() -> None:
    config = DecoderConfig.from_hf(dict(SHAPE, model_type="qwen3", tie_word_embeddings=True))
    models = [CausalLM(config) for _ in range(3)]
    torch.manual_seed(5)  # must not depend on the global generator
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
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "gemma3", "text_config": SHAPE}, "gemma3"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_unsupported_configs_are_rejected(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecoderConfig.from_hf({**SHAPE, "model_type": "qwen3", **change})


def test_window_mask_counts_the_query_itself() -> None:
    visible = causal_mask(torch.arange(4), 4, 2) == 0
    assert visible.long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_older_gemma3_configs_are_read_alike() -> None:
    """Configs on the hub have flat keys and a pattern; transformers 5 writes nested ones and a list."""
    kinds = ["sliding_attention", "full_attention"]
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    ropes["full_attention"] = {"rope_type": "linear", "rope_theta": 4e6, "factor": 8.0}
    shape = dict(SHAPE, model_type="gemma3_text", head_dim=32, sliding_window=20, query_pre_attn_scalar=8)
    new = DecoderConfig.from_hf({**shape, "layer_types": kinds, "rope_parameters": ropes})
    scaling = {"rope_type": "linear", "factor": 8.0}
    flat = {"rope_theta": 4e6, "rope_local_base_freq": 500.0, "rope_scaling": scaling, "sliding_window_pattern": 2}
    old = DecoderConfig.from_hf({**shape, **flat})
    assert new == replace(old, rope_scaling=new.rope_scaling)
    assert torch.equal(rope_frequencies(new), rope_frequencies(old))
    assert (new.find_window(0), new.find_window(1), new.query_scale) == (20, None, 2.0)


def test_folding_groups_round_trips() -> None:
    q = torch.randn(2, 5, 8, 4)
    assert torch.equal(unfold_groups(fold_groups(q, 2), 5), q)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=40))
def test_buckets_contain_every_sequence_once(lengths: list[int]) -> None:
    buckets = bucket_lengths(lengths)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        widths = [padded(lengths[i]) for i in bucket]
        assert widths[0] == max(widths) and min(widths) >= 0.9 * widths[0]
    assert len(PackedAttention(lengths).inverse) == sum(lengths)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 200])
def test_blocked_attention_matches_unblocked_bit_for_bit(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key blocks and other sequences in the pack do not change the result."""
    q, k, v = torch.randn(900, 4, 32), torch.randn(900, 2, 32), torch.randn(900, 2, 32)
    lengths = [300, 5, 560, 16, 19]
    packed = PackedAttention(lengths)(0, q, k, v, window).split(lengths)
    for n, out, *one in zip(lengths, packed, q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        room = [F.pad(t, (0, 0, 0, 0, 0, padded(n) - n))[None] for t in one]
        mask = causal_mask(torch.arange(padded(n)), padded(n), window).repeat_interleave(2, dim=0)
        keys, values = room[1].transpose(1, 2), room[2].transpose(1, 2)
        whole = unfold_groups(masked_attention(fold_groups(room[0], 2), keys, values, mask), padded(n))
        assert torch.equal(out, whole[0, :n])
    with monkeypatch.context() as patch:
        patch.setattr(attention, "is_faster_by_kernel", lambda q: False)
        fused = PackedAttention(lengths, mode="sdpa")(0, q, k, v, window)
    torch.testing.assert_close(fused, torch.cat(packed), atol=1e-5, rtol=1e-5)
    narrow = q.bfloat16(), k.bfloat16(), v.bfloat16()
    in_fp32 = PackedAttention(lengths, mode="sdpa")(0, *(x.float() for x in narrow), window)
    assert torch.equal(PackedAttention(lengths, mode="sdpa")(0, *narrow, window), in_fp32.bfloat16())


@pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rows", "keys", "window"),
    [
        (6, 2, 64, 144, 144, None),
        (3, 1, 64, 1104, 1104, None),  # several spans of keys
        (4, 1, 128, 80, 80, 37),
        (2, 2, 32, 704, 704, 200),
        (8, 2, 96, 50, 176, None),  # queries behind keys of their own positions
    ],
)
def test_gradients_of_attention(
    heads: int, kv_heads: int, dim: int, rows: int, keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(keys)
    shapes = ((2, rows, heads, dim), (2, keys, kv_heads, dim), (2, keys, kv_heads, dim))
    leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    weight = torch.randn(shapes[0], generator=draw)
    starts = torch.tensor([keys - rows, (keys - rows) // 3])
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad(torch_causal_attention(*wide, starts, window), wide, weight.double())
    found = []
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    q, k, v = leaves
    projected = torch.cat((q, q), dim=2)[:, :, :heads]  # rows with other distances
    for threads, queries in ((1, q), (2, projected)):
        torch.set_num_threads(threads)
        found.append(torch.autograd.grad(exact_causal_attention(queries, k, v, starts, window), leaves, weight))
    for one, two, value in zip(*found, expected, strict=True):
        assert torch.equal(one, two)
        assert (one - value).norm() < 2e-6 * value.norm()


@pytest.mark.skipif(
    not cpu_kernels.name_bf16_instructions(), reason="no instructions for bf16; cure: a CPU with AVX512_BF16"
)
@pytest.mark.parametrize(("dim", "keys", "mean"), [(32, 304, 0), (64, 304, 40), (64, 1104, 40), (128, 304, 0)])
def test_gradients_of_rounded_attention(dim: int, keys: int, mean: float) -> None:
    """Those of fp64 with rounded queries, also with a mean of the keys, as by a bias, and several spans of keys."""
    draw = torch.Generator().manual_seed(dim)
    shapes, scale, starts = ((1, keys, 6, dim), (1, keys, 2, dim), (1, keys, 2, dim)), dim**-0.5, torch.zeros(1)
    q, k, v = (2 * torch.randn(shape, generator=draw).bfloat16().float() for shape in shapes)
    k[..., :4] = (k[..., :4] + mean).bfloat16().float()
    q = (3 * q * torch.rand(q.shape, generator=draw)).requires_grad_()  # not rounded, and with few large weights
    leaves, weight = [q, k.requires_grad_(), v.requires_grad_()], torch.randn(shapes[0], generator=draw)
    out = exact_causal_attention(*leaves, starts.long(), rounded=True)
    rounded = ((q.detach() * scale).bfloat16().double() / scale, k.detach().double(), v.detach().double())
    wide = [leaf.requires_grad_() for leaf in rounded]
    whole = torch_causal_attention(*wide, starts.long(), None)
    assert (out - whole).norm() < 3e-3 * whole.norm()
    expected = torch.autograd.grad(whole, wide, weight.double())
    for mine, value in zip(torch.autograd.grad(out, leaves, weight), expected, strict=True):
        assert (mine - value).norm() < 1e-3 * value.norm()


@torch.no_grad()
@pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(6, 2, 64, None), (4, 2, 32, 200), (4, 1, 128, 37)])
def test_attention_kernel_equals_fp64_and_torch_bits(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """Whole sequences and the rows of a later chunk, whose keys are partly in the cache."""
    q, k, v = (torch.randn(2, 304, n, dim) for n in (heads, kv_heads, kv_heads))
    out, log_sums = cpu_kernels.causal_attention(q, k, v, torch.zeros(2, dtype=torch.long), window)
    if has_kernel_bits(dim):
        assert torch.equal(out, torch_causal_attention(q, k, v, None, window))
    later, _ = cpu_kernels.causal_attention(q[:, 201:], k, v, torch.tensor([201, 201]), window)
    assert torch.equal(later, out[:, 201:])
    padded_rows, _ = cpu_kernels.causal_attention(q, k, v, torch.tensor([0, 300]), window)
    assert torch.equal(padded_rows[0], out[0]) and padded_rows.isfinite().all()
    keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=2).transpose(1, 2) for x in (k, v))
    mask = causal_mask(torch.arange(304), 304, window).double()
    scores = q.double().transpose(1, 2) @ keys.transpose(2, 3) * dim**-0.5 + mask
    torch.testing.assert_close(log_sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), (scores.softmax(-1) @ values).transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
def test_attention_kernel_gradients_match_fp64(window: int | None) -> None:
    """The backward pass recomputes the weights from the log-sum-exp of the kernel."""
    lengths, shapes = [37, 300, 16], [(353, n, 64) for n in (4, 2, 2)]
    inputs, weight = [torch.randn(shape) for shape in shapes], torch.randn(shapes[0])
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = PackedAttention(lengths)(0, *leaves, window)
        found.append(torch.autograd.grad((out * weight.to(dtype)).sum(), leaves))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_flash_attention_equals_the_fused_kernel_on_a_gpu() -> None:
    device = torch.device("cuda")
    assert has_flash(device), "this GPU and torch should have it"
    lengths = [300, 5, 560, 1]
    q, k, v = (torch.randn(866, n, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2))
    outs = [PackedAttention(lengths, device, mode)(0, q, k, v) for mode in ("flash", "sdpa")]
    torch.testing.assert_close(*outs, atol=0.02, rtol=0.02)
    grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in outs]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0.1, rtol=0.05)


def test_pack_rejects_empty_sequence() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedAttention([3, 0])
    assert PackedAttention([3]).buckets[0].keys.shape[1] == KEY_MULTIPLE


@pytest.mark.parametrize("window", [None, 1, 30])
def test_exact_attention_gradient_matches_autograd(window: int | None) -> None:
    """On a CPU the fused kernel computes the backward pass; it must match masked_attention up to rounding."""
    torch.manual_seed(0)
    lengths, heads, kv_heads, dim = [1, 37, 300, 16, 17], 4, 2, 8
    shapes = [(sum(lengths), n, dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    weight = torch.randn(shapes[0], dtype=torch.float64)
    found = torch.autograd.grad((PackedAttention(lengths)(0, q, k, v, window) * weight).sum(), (q, k, v))
    parts, start = [], 0
    for n in lengths:
        span = slice(start, start + n)
        mask = causal_mask(torch.arange(n), n, window).repeat_interleave(heads // kv_heads, dim=0)
        folded = fold_groups(q[None, span], kv_heads)
        out = masked_attention(folded, k[None, span].transpose(1, 2), v[None, span].transpose(1, 2), mask)
        parts.append(unfold_groups(out, n)[0])
        start += n
    expected = torch.autograd.grad((torch.cat(parts) * weight).sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
