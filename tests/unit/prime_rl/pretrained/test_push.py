"""`push` against a hub in this process, and `convert` of adapters."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.pretrained import push as module
from prime_rl.pretrained.cache import models_cache_dir
from prime_rl.pretrained.convert import main as convert_main
from prime_rl.pretrained.push import main as push_main
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.lora import LoraSpec, adapter_tensors, add_lora, merged_tensors, peft_config, peft_tensors
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder, read_files
from prime_rl.transport.weights import publish_weights

TOKEN = "hf_secret"
BASE = resolve_model_dir("tiny-qwen3")


class Hub(ThreadingHTTPServer):
    """The routes of the hub that an upload needs; files are kept by name."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.messages: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("x-repo-commit", "0" * 40)
        self.send_header("etag", '"0"')
        if status == 404:
            self.send_header("x-error-code", "EntryNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.answer(200 if self.path.rpartition("/")[2] in self.server.files else 404)

    def do_GET(self) -> None:
        self.answer(200, {"sha": "0" * 40, "id": "me/model", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self.answer(401, {"error": f"bad token {self.headers['authorization']}"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer(200, {"url": f"{self.server.url}/me/model"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer(200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            self.server.messages.append(lines[0]["value"]["summary"])
            for line in lines[1:]:
                self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.url}/me/model/commit/{'1' * 40}"
            self.answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import HfApi

    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: HfApi(endpoint=server.url, token=token))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of an SFT run."""
    model = load_decoder(BASE, random_init=True)
    directory = publish_weights(tmp_path / "weights", 3, tensor_names(model), BASE)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft.toml").write_text('# [model]\n# name = "org/base"  # default\n')
    return directory


def run(main: Any, *args: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    return int(caught.value.code or 0)


def test_push_uploads_a_loadable_model_with_its_card(
    hub: Hub, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    args = (weights, "me/model", "--private", "--token-var", "MY_TOKEN", "--message", "First")
    assert run(push_main, *args) == 0
    out, err = capsys.readouterr()
    assert out.strip() == f"{hub.url}/me/model" and TOKEN not in out + err
    assert hub.created[0]["name"] == "model" and hub.created[0]["visibility"] == "private" and hub.messages == ["First"]
    assert not {"STABLE", "manifest.json"} & hub.files.keys()
    card = hub.files["README.md"].decode()
    for part in (
        "base_model: org/base",
        "supervised fine-tuning",
        "step 3",
        'AutoModelForCausalLM.from_pretrained("me/m',
    ):
        assert part in card
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in hub.files.items():
        (copy / name).write_bytes(data)
    loaded, original = read_files(copy), read_files(weights)
    assert loaded.keys() == original.keys() and all(torch.equal(loaded[n], original[n]) for n in loaded)
    hub.files["README.md"] = b"my card"
    assert run(push_main, *args) == 0
    assert hub.files["README.md"] == b"my card", "a card on the hub is kept"


def test_dry_run_shows_card_and_files(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(push_main, weights, "me/model", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "library_name: transformers" in out and "\nmodel.safetensors\n" in out and "STABLE" not in out


@pytest.mark.parametrize(
    ("name", "base"),
    [("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("org/base", "org/base"), ("tiny-qwen3", None)],
)
def test_the_card_links_only_models_of_the_hub(name: str, base: str | None, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "trainer.toml").write_text(f'[model]\nname = "{name}"\n')
    card = module.write_card(tmp_path / "weights" / "step_1", "me/model")
    assert (f"base_model: {base}" in card and f"https://huggingface.co/{base}" in card) == (base is not None)
    assert ("base_model" in card) == (base is not None)


def test_card_of_a_directory_below_the_root() -> None:
    assert "A model, trained with prime-rl." in module.write_card(Path("/no_such_model"), "me/model")


def test_a_refused_token_is_not_shown(
    hub: Hub, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert run(push_main, weights, "me/model") == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: the upload to me/model failed: ") and err.count("\n") == 1
    assert "hf_wrong" not in out + err


@pytest.mark.parametrize(
    ("directory", "repo_id", "message"),
    [
        ("weights/step_3", "model", "write it as owner/name"),
        ("weights/step_3", "me/model", "HF_TOKEN is not set"),
        ("weights", "me/model", "give one of them, such as"),
        ("configs", "me/model", "has no *.safetensors"),
        ("nothing", "me/model", "is not a directory"),
    ],
)
def test_bad_input_names_the_cure(
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    directory: str,
    repo_id: str,
    message: str,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if directory != "weights/step_3":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(push_main, weights.parents[1] / directory, repo_id) == 2
    assert message in capsys.readouterr().err


def publish_base(root: Path, dtype: torch.dtype = torch.float32) -> Path:
    tensors = {name: tensor.to(dtype) for name, tensor in tensor_names(load_decoder(BASE, random_init=True)).items()}
    return publish_weights(root / "base", 1, tensors, BASE)


def publish_adapter(
    root: Path, modules_to_save: tuple[str, ...], base: Path | None = None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter of a base model on disk, and the tensors that the trainer would merge."""
    base = base or publish_base(root)
    model, spec = load_decoder(base), LoraSpec(rank=4, alpha=8.0, modules_to_save=modules_to_save)
    add_lora(model, spec)
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    config = peft_config(model, spec, str(base))
    directory = publish_weights(root / "weights", 5, peft_tensors(model), BASE, adapter_config=config)
    return directory, merged_tensors(model)


@pytest.mark.parametrize("modules_to_save", [(), ("lm_head",)])
def test_convert_merges_an_adapter(tmp_path: Path, modules_to_save: tuple[str, ...]) -> None:
    directory, expected = publish_adapter(tmp_path, modules_to_save)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert run(convert_main, directory, tmp_path / "merged") == 0
    merged = read_files(tmp_path / "merged")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[n], expected[n]) for n in merged)
    served = tensor_names(load_decoder(tmp_path / "merged"))
    assert all(torch.equal(served[name], expected[name]) for name in expected)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"] == [7, 8]
    card = module.write_card(directory, "me/adapter")
    assert "A LoRA adapter, trained" in card and "library_name: peft" in card


def test_convert_merges_an_adapter_of_an_adapter(tmp_path: Path) -> None:
    first, _ = publish_adapter(tmp_path, ())
    second, expected = publish_adapter(tmp_path / "second", (), base=first)
    assert run(convert_main, second, tmp_path / "merged") == 0
    merged = read_files(tmp_path / "merged")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[n], expected[n]) for n in merged)


def rename_base(directory: Path, base: object) -> bytes:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    return path.read_bytes()


def test_pushed_adapters_name_a_base_on_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    directory, _ = publish_adapter(tmp_path, ())
    known = "HuggingFaceTB/SmolLM2-135M-Instruct"
    named = (("smollm2", known), (models_cache_dir() / "smollm2", known), ("org/base", "org/base"), ("gpt2", "gpt2"))
    for base, hub_id in named:
        before = rename_base(directory, base)
        hub.files.clear()
        assert run(push_main, directory, "me/adapter") == 0
        assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == hub_id
        assert f"base_model: {hub_id}" in hub.files["README.md"].decode()
        assert (directory / "adapter_config.json").read_bytes() == before, "the file here keeps its base"


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_adapters_of_a_local_base_are_not_pushed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry_run: tuple[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    directory, _ = publish_adapter(tmp_path, ())
    for base in (tmp_path / "base" / "step_1", "/no/such", "tiny-qwen3", "~/model"):
        rename_base(directory, base)
        assert run(push_main, directory, "me/adapter", *dry_run) == 2
        assert f"is not on the hub, so others could not load the adapter: merge it with `convert {directory}" in (
            capsys.readouterr().err
        )
    assert not hub.created and not hub.files


def test_merged_tensors_have_the_dtype_of_the_base(tmp_path: Path) -> None:
    directory, _ = publish_adapter(tmp_path, ("lm_head",), base=publish_base(tmp_path, torch.bfloat16))
    assert run(convert_main, directory, tmp_path / "merged") == 0
    assert {tensor.dtype for tensor in read_files(tmp_path / "merged").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_convert_of_adapters_names_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = publish_adapter(tmp_path, ())
    assert run(convert_main, directory, tmp_path / "x.gguf") == 2
    assert "merge it into a directory first" in capsys.readouterr().err
    assert run(convert_main, directory, tmp_path / "x", "--type", "f16") == 2
    assert "--type f16 is for a target named *.gguf" in capsys.readouterr().err
    assert run(convert_main, tmp_path / "base" / "step_1", tmp_path / "y", "--base", "tiny-qwen3") == 2
    assert "is not a LoRA adapter" in capsys.readouterr().err
    config = directory / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    assert run(convert_main, directory, tmp_path / "z") == 2
    assert "pass --base" in capsys.readouterr().err and not (tmp_path / "z").exists()
    assert run(convert_main, directory, tmp_path / "z", "--base", "tiny-qwen3") == 2
    assert "train with model.lora.merge = true" in capsys.readouterr().err and not (tmp_path / "z").exists()
    assert run(convert_main, directory, tmp_path / "z", "--base", tmp_path / "base" / "step_1") == 0
