"""GGUF files to Hugging Face directories and back: weights, configuration, tokenizers, errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import CORPUS, save_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from prime_rl.pretrained.gguf_architectures import (
    ARCHITECTURES,
    MODULES,
    compute_llama3_factors,
    interleave_rope,
    separate_rope,
)
from prime_rl.pretrained.gguf_reader import convert_gguf
from prime_rl.pretrained.gguf_tokenizer import (
    PRE_TOKENIZERS,
    TokenType,
    build_tokenizer_files,
    find_end_tokens,
    read_tokenizer_metadata,
)
from prime_rl.pretrained.gguf_writer import FILE_TYPES, write_gguf
from prime_rl.trainer.models.decoder_config import DecoderConfig

FAMILIES = ["llama", "qwen2", "qwen3", "smollm3", "gemma3_text"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def compute_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model(torch.arange(24)[None]).logits


def round_trip(directory: Path, tmp_path: Path, file_type: str = "f32") -> Path:
    write_gguf(directory, tmp_path / "model.gguf", file_type)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    return tmp_path / "back"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_weights_logits_and_config(family: str, tied: bool, tmp_path: Path) -> None:
    original = save_model(tmp_path / "model", family, tie_word_embeddings=tied)
    back = round_trip(original, tmp_path)
    before, after = load_file(original / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:  # GGUF adds 1 to the norms of Gemma 3, which rounds
        atol = 2e-7 if family == "gemma3_text" and before[name].ndim == 1 else 0
        torch.testing.assert_close(before[name], after[name], atol=atol, rtol=0)
    atol = 1e-6 if family == "gemma3_text" else 0
    torch.testing.assert_close(compute_logits(original), compute_logits(back), atol=atol, rtol=0)
    configs = [DecoderConfig.from_hf(json.loads((d / "config.json").read_text())) for d in (original, back)]
    assert configs[0] == configs[1]


def test_a_head_of_its_own_is_written(tmp_path: Path) -> None:
    """Programs that train the head alone may leave it tied in the config; transformers then does not tie it."""
    original = save_model(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    path = original / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert torch.equal(compute_logits(original), compute_logits(round_trip(original, tmp_path)))


def test_other_rope_layers_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "smollm3", no_rope_layers=[1, 0, 1, 1])
    with pytest.raises(ValueError, match="no_rope_layers"):
        write_gguf(model, tmp_path / "model.gguf")


def test_attention_biases_of_llama(tmp_path: Path) -> None:
    original = save_model(tmp_path / "model", "llama", attention_bias=True)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(original)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(original)
    assert torch.equal(compute_logits(original), compute_logits(round_trip(original, tmp_path)))


@pytest.mark.parametrize("file_type", list(FILE_TYPES))
def test_matrices_equal_those_of_the_gguf_package(file_type: str, tmp_path: Path) -> None:
    back = round_trip(save_model(tmp_path / "model", "qwen3"), tmp_path, file_type)
    tensors, dtype = load_file(back / "model.safetensors"), torch.float32
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape)))
        found = tensors[ARCHITECTURES["llama"].to_hf_name(tensor.name) or ""]
        assert np.array_equal(found.float().numpy(), expected), tensor.name
        if tensor.name == "token_embd.weight":
            dtype = found.dtype
    assert dtype == {"f16": torch.float16, "bf16": torch.bfloat16}.get(file_type, torch.float32)
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_matrices_without_whole_blocks_are_float16(tmp_path: Path) -> None:
    back = round_trip(save_model(tmp_path / "model", "qwen3", intermediate_size=40), tmp_path, "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    down = "model.layers.0.mlp.down_proj.weight"
    before, after = (load_file(d / "model.safetensors")[down].float() for d in (tmp_path / "model", back))
    assert torch.equal(before.half().float(), after)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_quantized_blocks_equal_those_of_the_gguf_package(kind: str, tmp_path: Path) -> None:
    """Random blocks: every bit pattern of a type without infinite or undefined scales."""
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 255, (64, 256 // block * size), dtype=np.uint8)
    raw = raw.reshape(64, -1, size)
    raw[..., 1::2][..., :4] &= 0x3B  # exponents of half-precision scales stay finite wherever they are
    if kind == "Q6_K":
        raw[..., -1] &= 0x3B
    raw = raw.reshape(64, -1)
    directory = save_model(tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=64)
    write_gguf(directory, tmp_path / "plain.gguf", "f32")
    replace_tensor(tmp_path / "plain.gguf", tmp_path / "quantized.gguf", "blk.0.ffn_gate.weight", raw, quantization)
    convert_gguf(tmp_path / "quantized.gguf", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"].numpy()
    assert np.array_equal(found, gguf.dequantize(raw, quantization)) and np.isfinite(found).all()


def replace_tensor(source: Path, target: Path, name: str, data: Any, kind: gguf.GGMLQuantizationType) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        if tensor.name == name:
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_llama3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    original = save_model(tmp_path / "model", "llama", rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    back = round_trip(original, tmp_path)
    assert json.loads((back / "config.json").read_text())["rope_scaling"] == LLAMA3
    assert torch.equal(compute_logits(original), compute_logits(back))


def test_llama3_factors_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = compute_llama3_factors(64, 500000.0, **{k: v for k, v in LLAMA3.items() if k != "rope_type"})
    np.testing.assert_allclose(plain.numpy() / scaled.double().numpy(), factors, rtol=1e-5)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    original = save_model(
        tmp_path / "model", "llama", rope_parameters={**LLAMA3, "rope_theta": 500000.0, "low_freq_factor": 2.0}
    )
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not those of Llama 3"):
        round_trip(original, tmp_path)


def test_rope_order_is_inverted() -> None:
    rows = np.arange(48).reshape(24, 2)
    assert np.array_equal(separate_rope(interleave_rope(rows, 3), 3), rows)
    assert interleave_rope(np.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_every_tensor_name_is_inverted(family: str) -> None:
    row = ARCHITECTURES[family]
    names = [f"{name}.weight" for name in MODULES] + [f"blk.7.{name}.bias" for name in row.layer_modules]
    assert [row.to_gguf_name(row.to_hf_name(name) or "") for name in names] == names
    assert row.to_hf_name("blk.0.ffn_gate_exps.weight") is None
    assert row.to_gguf_name("model.layers.0.mlp.gate.weight") is None


@pytest.mark.parametrize(
    "change",
    [
        {"query_pre_attn_scalar": 4},
        {"layer_types": ["full_attention"] * 6},
        {"layer_types": None, "sliding_window_pattern": 2},
    ],
    ids=["scale", "layers", "pattern"],
)
def test_other_options_of_gemma3_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "gemma3_text")
    config = json.loads((model / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{next(iter(change))} = .* cannot be written as GGUF"):
        write_gguf(model, tmp_path / "model.gguf")


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_token_ids_survive_the_round_trip(pre: str, tmp_path: Path) -> None:
    original = save_model(tmp_path / "model", "qwen3", pre=pre)
    back = round_trip(original, tmp_path)
    before, after = (PreTrainedTokenizerFast.from_pretrained(d) for d in (original, back))
    for text in CORPUS:
        assert before(text)["input_ids"] == after(text)["input_ids"]
        assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    chat = [{"role": "user", "content": "Hi <|im_end|> there"}]
    assert before.apply_chat_template(chat) == after.apply_chat_template(chat)
    assert (before.eos_token_id, before.pad_token_id) == (after.eos_token_id, after.pad_token_id)


def test_named_chat_templates_are_converted(tmp_path: Path) -> None:
    """Those of Hermes 2 and 3, for example, are a list in tokenizer_config.json."""
    model = save_model(tmp_path / "model", "qwen3")
    text = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "default", "template": text}, {"name": "tool_use", "template": "tools"}]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    metadata = read_tokenizer_metadata(model, 405)
    assert metadata["tokenizer.chat_template"][0] == text
    assert metadata["tokenizer.chat_template.tool_use"][0] == "tools"
    assert (round_trip(model, tmp_path) / "chat_template.jinja").read_text() == text


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
@pytest.mark.parametrize("given", [None, False, True])
def test_begin_token_by_default_is_that_of_llama_cpp(given: bool | None, pre: str) -> None:
    """llama.cpp (llama-vocab.cpp) sets add_bos for llama-bpe, as it does for SentencePiece."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values = {"model": "gpt2", "pre": pre, "tokens": [*alphabet, "<s>"], "merges": [], "bos_token_id": len(alphabet)}
    values |= {} if given is None else {"add_bos_token": given}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    tokens = Tokenizer.from_str(build_tokenizer_files(metadata, 64)["tokenizer.json"]).encode("ab").tokens
    expected = pre == "llama-bpe" if given is None else given
    assert tokens == (["<s>", "a", "b"] if expected else ["a", "b"])


@pytest.mark.parametrize(("ends", "expected"), [([397, 398], [397, 398]), (398, [397, 398]), (397, [397])])
def test_end_tokens_survive_the_round_trip(ends: int | list[int], expected: list[int], tmp_path: Path) -> None:
    """Token 397 is that of the tokenizer; generation_config.json may name others."""
    model = save_model(tmp_path / "model", "qwen3")
    assert PreTrainedTokenizerFast.from_pretrained(model).eos_token_id == expected[0]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    back = round_trip(model, tmp_path)
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == expected


def test_more_end_tokens_than_gguf_has_keys_are_refused(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3, 4]}))
    with pytest.raises(ValueError, match="has 4 end tokens"):
        write_gguf(model, tmp_path / "model.gguf")


def test_ends_of_turns_are_found_by_their_text() -> None:
    """Published files of Gemma 3 name only the end of a text."""
    tokens = ["<pad>", "<eos>", "<bos>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>"]
    types = [TokenType.CONTROL] * 4 + [TokenType.NORMAL, TokenType.USER_DEFINED]
    values = {"tokens": tokens, "token_type": types, "eos_token_id": 1}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    assert find_end_tokens(metadata) == [1, 3, 5]
    assert find_end_tokens(metadata | {"tokenizer.ggml.eot_token_id": 3}) == [1, 3, 5]


def test_ends_of_turns_need_no_key(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<pad>"}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [398, 397, 1, 2]}))
    back = round_trip(model, tmp_path)
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [398, 1, 2, 397]


VOCAB = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abc", "ab", "▁a", "bc", "abc", "▁ab", "ca"]
SCORES = [0.0] * 259 + [-1000.0] * 4 + [-3.0, -1.0, -2.0, -5.0, -4.0, -6.0]


def merge_by_score(text: str) -> list[str]:
    """SentencePiece BPE in its plain form: merge the neighbors whose union has the best score, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [
            (-SCORES[VOCAB.index(a + b)], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in VOCAB
        ]
        if not unions:
            return [p for piece in pieces for p in ([piece] if piece in VOCAB else to_bytes(piece))]
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def to_bytes(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


@settings(max_examples=200, deadline=None)
@given(st.text("abc é", max_size=12).filter(lambda text: text))
def test_sentencepiece_merges_follow_the_scores(text: str) -> None:
    tokenizer = build_sentencepiece()
    assert tokenizer.encode(text).tokens == ["<s>", *merge_by_score(text)]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def build_sentencepiece() -> Tokenizer:
    types = [2, 3, 3] + [6] * 256 + [1] * (len(VOCAB) - 259)
    names = ("model", "tokens", "token_type", "scores", "bos_token_id", "eos_token_id", "unknown_token_id")
    values = ("llama", VOCAB, types, SCORES, 1, 2, 0)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in zip(names, values, strict=True)}
    return Tokenizer.from_str(build_tokenizer_files(metadata, 64)["tokenizer.json"])


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    write_gguf(model, tmp_path / "model.gguf", "f32")
    data = (tmp_path / "model.gguf").read_bytes()

    def refuse(content: bytes, message: str) -> None:
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            convert_gguf(tmp_path / "bad.gguf", tmp_path / "never")

    refuse(data.replace(b"llama", b"mamba"), "architecture 'mamba' is not supported, only llama")
    refuse(data.replace(b"qwen2", b"qwenX"), "pre-tokenizer 'qwenX' is not supported")
    refuse(data.replace(b"ffn_gate", b"ffn_gaze"), "tensor blk.0.ffn_gaze.weight is not supported for llama")
    refuse(data.replace(b"block_count", b"block_coun7"), "metadata key llama.block_count is missing")
    refuse(b"PK" + data, "no GGUF file, or damaged")
    refuse(b"", "no GGUF file, or damaged")
    for cut in (100, len(data) // 8, len(data) // 2, len(data) - 100):
        refuse(data[:cut], "no GGUF file, or damaged")

    def refuse_directory(message: str, **changes: Any) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=message):
            write_gguf(model, tmp_path / "other.gguf")
        (model / "config.json").write_text(json.dumps(config))
        assert not list(tmp_path.glob("*other.gguf*"))

    refuse_directory("model_type 'gpt2' cannot be written", model_type="gpt2")
    refuse_directory("mlp_bias = True cannot be written", mlp_bias=True)
    refuse_directory("hidden_act = 'gelu' cannot be written as GGUF, only 'silu'", hidden_act="gelu")
    refuse_directory("attention_bias = true of qwen3 cannot be written", model_type="qwen3", attention_bias=True)
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}
    refuse_directory("beta_fast = 16 of its RoPE cannot be written as GGUF, only 32", rope_parameters=yarn)
    refuse_directory("vocab_size is 10", vocab_size=10)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    without_merges = tokenizer | {"model": tokenizer["model"] | {"merges": []}}
    (model / "tokenizer.json").write_text(json.dumps(without_merges))
    refuse_directory("has no merges")
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse_directory("splits text in a way that has no GGUF name")
