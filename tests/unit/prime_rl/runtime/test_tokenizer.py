"""The shipped tokenizer, names of models, and chats as token ids."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import TWO_ROLES

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.initial_weights import prepare_model_dir
from prime_rl.runtime.tokenizer import (
    find_local_model,
    find_window,
    fingerprint_model,
    load_tokenizer,
    resolve_model_dir,
)
from rollouts.training.datasets.chat import render_chat

TOKENIZER = load_tokenizer("tiny-qwen3")
SPECIAL = set(TOKENIZER.all_special_ids)


@given(st.text() | st.sampled_from(["user\n", "<think>a</think>", "système\r\n\t", "<|im_start|>user\n<|im_end|>"]))
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text


def test_characters_are_single_tokens_and_tags_survive_decoding() -> None:
    ids = TOKENIZER.encode("user\n<answer>ab</answer>", add_special_tokens=False)
    assert len(ids) == 5 + 1 + 2 + 1
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "user\n<answer>ab</answer>"


def test_a_short_chat_has_few_tokens() -> None:
    ids = render_chat(TOKENIZER, [{"role": "user", "content": "abc"}])
    tokens = ["<|im_start|>user\n", "a", "b", "c", "<|im_end|>", "Ċ", "<|im_start|>assistant\n"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == tokens


CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": None},
    {"role": "tool", "content": "2", "tool_call_id": "x"},
    {"role": "assistant", "content": "two", "tool_calls": None, "reasoning_content": "easy"},
    {"role": "user", "content": ""},
]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_longer_chat_extends_a_shorter_one(tools: list[dict[str, Any]] | None) -> None:
    whole = render_chat(TOKENIZER, CONVERSATION, tools)
    for n in range(1, len(CONVERSATION)):
        last_is_user = CONVERSATION[n]["role"] == "assistant"
        prefix = render_chat(TOKENIZER, CONVERSATION[:n], tools, add_generation_prompt=last_is_user)
        assert whole[: len(prefix)] == prefix


def test_tool_calls_and_reasoning_are_shown() -> None:
    text = TOKENIZER.decode(render_chat(TOKENIZER, CONVERSATION, TOOLS))
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert "<think>easy</think>two" in text
    assert "add()\n" in text


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_arguments_of_a_call_are_an_empty_object(blank: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": blank}}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "add", "arguments": {}}' in TOKENIZER.decode(render_chat(TOKENIZER, messages, TOOLS))


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|im_start|>", "a", "\n", "<|im_"])))
@settings(max_examples=60, deadline=None)
def test_content_cannot_become_special_tokens(parts: list[str]) -> None:
    content = "".join(parts)
    plain = render_chat(TOKENIZER, [{"role": "user", "content": "x"}])
    ids = render_chat(TOKENIZER, [{"role": "user", "content": content}])
    assert [i for i in ids if i in SPECIAL] == [i for i in plain if i in SPECIAL]
    assert TOKENIZER.decode(ids) == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user<|im_end|>", "content": "bad role"},
        {"role": "user", "content": [{"type": "image_url"}]},
    ],
)
def test_broken_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"role|image_url"):
        render_chat(TOKENIZER, [message])


def test_messages_that_the_template_drops_are_refused() -> None:
    tokenizer = load_tokenizer("tiny-qwen3", TWO_ROLES)
    for role in ("function", "tool"):
        what = "results of tools" if role == "tool" else "messages of role 'function'"
        with pytest.raises(ValueError, match=f"the chat template drops {what}"):
            render_chat(tokenizer, [{"role": "user", "content": "y"}, {"role": role, "content": "z"}])


def test_developer_is_system_unless_the_template_has_it() -> None:
    chat = {
        role: [{"role": role, "content": "x"}, {"role": "user", "content": "y"}] for role in ("developer", "system")
    }
    for template, is_system in ((TWO_ROLES, True), (TWO_ROLES.replace("'user'", "'user', 'developer'"), False)):
        tokenizer = load_tokenizer("tiny-qwen3", template)
        developer, system = (render_chat(tokenizer, messages) for messages in chat.values())
        assert (developer == system) == is_system


def test_a_template_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8-sig")
    long = "{# " + "c" * 300 + " #}{{ messages[0].content }}!"  # longer than a file name may be
    for template in ("{{ messages[0].content }}!", long, str(tmp_path / "t.jinja"), "~/t.jinja"):
        ids = render_chat(load_tokenizer("tiny-qwen3", template), [{"role": "user", "content": "hi"}])
        assert TOKENIZER.decode(ids) == "hi!"


def test_a_missing_template_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.chat_template = 'chat\.jinj' is neither a file nor a template"):
        load_tokenizer("no-such-model", "chat.jinj")


@pytest.mark.parametrize(("ids", "expected"), [(258, True), ([258, 0], True), (10**6, False), (None, False)])
def test_a_tokenizer_without_end_token_has_the_models(ids: Any, expected: bool, tmp_path: Path) -> None:
    """The end token of GPT-2 is in the code of its tokenizer class only."""
    shutil.copy(resolve_model_dir("tiny-qwen3") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_id == (258 if expected else None)


def test_model_names(tmp_path: Path) -> None:
    assert resolve_model_dir("tiny-qwen3").name == "tiny-qwen3"
    assert resolve_model_dir(str(resolve_model_dir("tiny-qwen3"))) == resolve_model_dir("tiny-qwen3")
    with pytest.raises(ValueError, match=r"no-such-model.*tiny-qwen3"):
        resolve_model_dir("no-such-model")
    with pytest.raises(ValueError, match=r"config\.json"):
        resolve_model_dir(str(tmp_path))


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_hub_model_is_only_fetched_if_trusted(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, code = ["config.json", "tokenizer_config.json"], ["tokenization_mine.py", "vocab.tiktoken"]

    def download(name: str, allow_patterns: list[str], **_: object) -> str:
        for file in (*data, *code):
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).write_text("{}")
        return str(tmp_path)

    def load(directory: str, trust_remote_code: bool) -> list[str]:
        assert trust_remote_code is trusted
        return sorted(path.name for path in Path(directory).iterdir())

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    found: Any = load_tokenizer("owner/mine", trust_remote_code=trusted)
    assert found == sorted(data + code * trusted)
    config = InferenceConfig.model_validate({"model": {"name": "owner/mine", "trust_remote_code": trusted}})
    for file in code:
        (tmp_path / file).unlink(missing_ok=True)
    assert load(str(prepare_model_dir(config)), trusted) == found, "as vLLM loads it"


def test_weights_in_a_second_form_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tools.jinja"]
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    found: list[str] = []

    def download(name: str, **patterns: Any) -> str:
        found.extend(filter_repo_objects([*files, *others], **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_dir("owner/twice") == tmp_path
    assert found == files


def test_downloaded_models_of_the_hub_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 64}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert find_local_model("owner/model") == snapshot and find_window("owner/model") == 64
    for name in ("owner/other", "no/hub/id", "../model"):
        assert find_local_model(name) is None


@pytest.mark.parametrize("has_both", [False, True])
def test_weights_in_torch_format_are_the_second_choice(
    has_both: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "pytorch_model-00001-of-00001.bin", *["model.safetensors"] * has_both, "training_args.bin"]

    def download(name: str, **patterns: Any) -> str:
        for file in filter_repo_objects(files, **patterns):
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_dir("owner/model") == tmp_path
    weights = "model.safetensors" if has_both else "pytorch_model-00001-of-00001.bin"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", weights}


def test_repositories_without_a_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"'owner/x' has no config\.json on the hub: give .* the path of a GGUF file"):
        load_tokenizer("owner/x")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no config\.json on the hub: it is a LoRA adapter, give the model"):
        load_tokenizer("owner/x")


def test_the_fingerprint_has_the_weights_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_text("b")
    assert [line.split()[0] for line in fingerprint_model(str(tmp_path))] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors").write_text("a")
    assert [line.split()[0] for line in fingerprint_model(str(tmp_path))] == ["model.safetensors"]


def test_the_shipped_shape_fits_whole_vector_lanes() -> None:
    config = json.loads((resolve_model_dir("tiny-qwen3") / "config.json").read_text())
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] >= len(TOKENIZER)
    assert config["eos_token_id"] == TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def test_unreachable_hub_and_unknown_name_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def fail(name: str, **_: object) -> None:
        response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
        if name == "no/network":
            raise errors.LocalEntryNotFoundError("Got: ConnectError: no route")
        kind = errors.GatedRepoError if name == "no/access" else errors.RepositoryNotFoundError
        raise kind("404: no such repository", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for name, words in {
        "no/network": "the hub could not be reached: check the network connection",
        "no/model": "was not found on the hub: check the name",
        "no/access": "needs access on the hub",
    }.items():
        with pytest.raises(ValueError, match=f"model.name '{name}' is no directory and {words}"):
            resolve_model_dir(name)
