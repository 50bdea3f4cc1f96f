"""Published weights: readable by transformers, consistent with the manifest, pruned versions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from prime_rl.pretrained.push import list_files
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_tensors
from prime_rl.transport.weights import prune_weights, publish_weights, read_model_files, verify_tensors
from rollouts.training.manifests import digest_tensor, read_manifest
from rollouts.training.steps import complete_steps, publish_step

TINY = resolve_model_dir("tiny-qwen3")


def write_model(directory: Path, **changes: object) -> Path:
    config = json.loads((TINY / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "head_dim": 16}
    config |= {"pad_token_id": None, "eos_token_id": None, **changes}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    ],
    ids=["qwen3-tied", "qwen3", "llama", "qwen2"],
)
def test_an_export_gives_the_same_logits_in_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    from transformers import AutoModelForCausalLM

    source = write_model(tmp_path / "source", num_hidden_layers=3, **changes)
    model = load_decoder(source, random_init=True, num_layers=2, seed=3)
    path = publish_weights(tmp_path / "weights", 7, tensor_names(model), source, num_layers=2)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert theirs.config.num_hidden_layers == 2 and theirs.dtype == torch.float32
    tokens = torch.randint(96, (23,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.arange(23), PackedAttention([23])))
        expected = theirs(tokens[None]).logits[0]
    assert (ours - expected).abs().max() <= 1e-5
    again = load_decoder(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_export_has_tokenizer_template_and_config(tmp_path: Path) -> None:
    model = load_decoder(TINY, random_init=True)
    path = publish_weights(tmp_path, 1, tensor_names(model), read_model_files(TINY, chat_template="{{ messages }}"))
    names = {p.name for p in path.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "STABLE", "manifest.json"} <= names
    assert (path / "chat_template.jinja").read_text() == "{{ messages }}"
    narrow = publish_weights(tmp_path, 2, {n: t.bfloat16() for n, t in tensor_names(model).items()}, TINY)
    assert json.loads((narrow / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_further_chat_templates_are_published(tmp_path: Path) -> None:
    source = shutil.copytree(TINY, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    tensors = {"a": torch.zeros(1)}
    templates = load_tokenizer(str(source)).chat_template
    assert templates["tool_use"] == "{{ tools }}"
    path = publish_weights(tmp_path, 1, tensors, source)
    assert load_tokenizer(str(path)).chat_template == templates
    assert "additional_chat_templates/tool_use.jinja" in list_files(path)
    path = publish_weights(tmp_path, 2, tensors, read_model_files(source, chat_template="{{ messages }}"))
    assert load_tokenizer(str(path)).chat_template == "{{ messages }}", "the configured template is for all chats"


def test_manifest_detects_flipped_bits_and_lost_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(2.0)}
    manifest = read_manifest(publish_weights(tmp_path, 4, tensors, TINY))
    assert manifest.step == 4 and manifest.tensors["b"].dtype == "bfloat16" and manifest.tensors["a"].shape == (3, 4)
    assert verify_tensors(tensors, manifest) == {name: digest_tensor(t) for name, t in tensors.items()}
    changed = {**tensors, "a": tensors["a"].clone()}
    changed["a"].view(torch.int32)[1, 2] ^= 1
    with pytest.raises(ValueError, match=r"step 4 do not match.*: a$"):
        verify_tensors(changed, manifest)
    with pytest.raises(ValueError, match="b"):
        verify_tensors({"a": tensors["a"], "c": tensors["c"]}, manifest)


def test_digests_do_not_depend_on_the_memory_layout() -> None:
    square = torch.randn(6, 6)
    assert digest_tensor(square.t().contiguous().t()) == digest_tensor(square)
    assert digest_tensor(square.t()) != digest_tensor(square)


def test_a_manifest_of_another_schema_is_rejected(tmp_path: Path) -> None:
    path = publish_weights(tmp_path, 1, {"a": torch.zeros(1)}, TINY)
    changed = json.loads((path / "manifest.json").read_text()) | {"schema": 99}
    (path / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="schema 99"):
        read_manifest(path)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("level", "interval", "final", "kept"),
    [
        (2, None, None, [7, 8, 9, 10]),
        (0, None, None, [9, 10]),
        (1, 4, None, [4, 8, 9, 10]),
        (0, None, 3, [3, 9, 10]),
    ],
)
def test_pruning_retains_versions_that_engines_and_resumes_need(
    tmp_path: Path, level: int, interval: int | None, final: int | None, kept: list[int]
) -> None:
    for step in range(1, 11):
        publish_step(tmp_path, step, lambda directory: None)
    removed = prune_weights(tmp_path, 10, level, interval, final)
    assert complete_steps(tmp_path) == kept
    assert sorted(removed + kept) == list(range(1, 11))


def test_a_resumed_run_prunes_only_its_own_versions(tmp_path: Path) -> None:
    """Resumed after step 30 with another interval: what the first attempt had kept stays."""
    for step in (10, 20, 28, 29, 30, 31, 32, 33, 34):
        publish_step(tmp_path, step, lambda directory: None)
    prune_weights(tmp_path, 34, 1, None, None, start=30)
    assert complete_steps(tmp_path) == [10, 20, 30, 32, 33, 34]


def test_random_weights_are_a_function_of_config_and_seed() -> None:
    one, two = (load_decoder(TINY, random_init=True, seed=5) for _ in range(2))
    other = load_decoder(TINY, random_init=True, seed=6)
    names = tensor_names(one)
    assert all(torch.equal(names[n], t) for n, t in tensor_names(two).items())
    assert not torch.equal(names["model.embed_tokens.weight"], tensor_names(other)["model.embed_tokens.weight"])
    assert one.lm_head.weight is one.model.embed_tokens.weight
    narrow = load_decoder(TINY, random_init=True, seed=5, dtype=torch.bfloat16)
    assert all(torch.equal(names[n].bfloat16(), t) for n, t in tensor_names(narrow).items())


def test_mismatching_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.debug\.random_init"):
        load_decoder(TINY)
    with pytest.raises(ValueError, match=r"num_layers is 9"):
        load_decoder(TINY, random_init=True, num_layers=9)
    tensors = tensor_names(load_decoder(TINY, random_init=True))
    lacking = {n: t for n, t in tensors.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"is missing model\.norm\.weight"):
        load_decoder(publish_weights(tmp_path, 1, lacking, TINY))
    with pytest.raises(ValueError, match="has unexpected tensors extra"):
        load_decoder(publish_weights(tmp_path, 2, {**tensors, "extra": torch.zeros(1)}, TINY))
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* has shape \(1,\)"):
        load_decoder(publish_weights(tmp_path, 3, {**tensors, "model.norm.weight": torch.zeros(1)}, TINY))
    with pytest.raises(ValueError, match="model_type 'gpt2'"):
        load_decoder(write_model(tmp_path / "gpt", model_type="gpt2"))
    (tmp_path / "step_1" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path / "step_1")


def test_shards_and_a_stored_tied_head_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = write_model(tmp_path / "source")
    model = load_decoder(source, random_init=True)
    tensors = {**tensor_names(model), "lm_head.weight": model.lm_head.weight.detach().clone()}
    shards: dict[str, dict[str, torch.Tensor]] = {"one.safetensors": {}, "two.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        shards[sorted(shards)[i % 2]][name] = tensor.clone()
    for file, held in shards.items():
        save_file(held, source / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    again = load_decoder(source)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
