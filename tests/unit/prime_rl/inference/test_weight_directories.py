"""Directories named by requests: only verified files inside the allowed directories."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running_server import RunningServer
from safetensors.torch import save_file

from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.vllm.worker import read_published
from prime_rl.inference.weight_dirs import check_step, resolve_allowed
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.hf_model import load_hf_model
from prime_rl.trainer.models.registry import load_decoder, read_tensors
from prime_rl.transport.weights import check_directory, publish_weights
from rollouts.training.manifests import read_manifest
from rollouts.training.steps import STABLE, find_damage, publish_dir, step_path

TINY = resolve_model_dir("tiny-qwen3")
INDEX = "model.safetensors.index.json"
OUTSIDE_NAMES = [
    *("../../etc/passwd", "/etc/passwd", "../x.safetensors", "sub/model.safetensors"),
    *("..", ".", "", "config.json", "a\0.safetensors"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("outputs"), weight_dirs=[tmp_path_factory.mktemp("shared")])
    yield running
    running.stop()


def publish(root: Path, step: int, seed: int = 3) -> Path:
    shutil.rmtree(step_path(root, step), ignore_errors=True)
    return publish_weights(root, step, tensor_names(load_decoder(TINY, random_init=True, seed=seed)), TINY)


def publish_adapter(root: Path, step: int) -> Path:
    shutil.rmtree(step_path(root, step), ignore_errors=True)
    shapes = {"lora_A": (4, 128), "lora_B": (128, 4)}
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.{kind}.weight": torch.randn(shape) for kind, shape in shapes.items()}
    return publish_weights(root, step, tensors, TINY, adapter_config={"peft_type": "LORA", "r": 4, "lora_alpha": 8})


def weights(server: RunningServer) -> Path:
    assert server.config.output_dir is not None
    return server.config.output_dir / "weights"


def move_out(file: Path, target: Path) -> None:
    """Replace a file by a link to itself elsewhere."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(file, target)
    file.symlink_to(target)


def update(server: RunningServer, path: Path) -> tuple[int, str]:
    reply = server.post("/update_weights", {"weight_dir": str(path)})
    return reply.status_code, "" if reply.status_code == 200 else reply.json()["error"]["message"]


def shard(directory: Path) -> None:
    """Split `model.safetensors` into two files with an index."""
    tensors = read_tensors(directory)
    (directory / "model.safetensors").unlink()
    names, weight_map = list(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1}-of-2.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "config.json", STABLE])
def test_a_file_that_links_out_is_refused(server: RunningServer, tmp_path: Path, file: str) -> None:
    path = publish(weights(server), 1)
    assert update(server, path)[0] == 200
    before = server.post("/reload_weights", {}).json()["version"]
    move_out(path / file, tmp_path / "elsewhere" / file)
    status, message = update(server, path)
    assert status == 403 and f"{file} of" in message and "is a link out of" in message
    assert server.http.get("/health").json()["version"] == before


def test_links_between_allowed_directories_are_followed(server: RunningServer) -> None:
    path = publish(weights(server), 2)
    move_out(path / "model.safetensors", server.config.weight_dirs[0] / "blobs" / "abc")
    assert update(server, path) == (200, "")
    (path.parent / "loop.safetensors").symlink_to(path.parent / "loop.safetensors")
    status, message = update(server, path.parent)
    assert status == 403 and "loop.safetensors" in message


def test_an_adapter_that_links_out_is_refused(server: RunningServer, tmp_path: Path) -> None:
    path = publish_adapter(weights(server), 3)
    assert update(server, path)[0] == 200
    move_out(path / "adapter_model.safetensors", tmp_path / "adapter_model.safetensors")
    for route, body in (
        ("/update_weights", {"weight_dir": str(path)}),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)}),
    ):
        reply = server.post(route, body)
        assert reply.status_code == 403 and "is a link out of" in reply.json()["error"]["message"]
    server.post("/reload_weights", {})


def test_a_step_without_a_manifest_is_refused(server: RunningServer) -> None:
    path = publish(weights(server), 4)
    (path / "manifest.json").unlink()
    status, message = update(server, path)
    assert status == 400 and "has no manifest.json" in message
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        check_step(path)
    assert server.http.get("/health").json()["version"] == 0
    assert server.post("/reload_weights", {}).status_code == 200, "the model of the start needs none"


def test_a_published_adapter_without_a_manifest_is_refused(server: RunningServer, tmp_path: Path) -> None:
    path = publish_adapter(weights(server), 5)
    (path / "manifest.json").unlink()
    assert "has no manifest.json" in update(server, path)[1]
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
    assert reply.status_code == 400 and "has no manifest.json" in reply.json()["error"]["message"]
    for version in (None, 0):
        with pytest.raises(ValueError, match=r"has no manifest\.json"):
            read_adapter(path, version)


def test_an_adapter_saved_by_peft_needs_no_manifest(server: RunningServer) -> None:
    published = publish_adapter(weights(server), 6)
    path = weights(server) / "mine"
    path.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(published / file, path / file)
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(path)})
    assert reply.status_code == 200 and reply.json()["version"] == 0
    assert "has no manifest.json" in update(server, path)[1], "it cannot become the policy"
    server.post("/v1/unload_lora_adapter", {"lora_name": "mine"})


def test_a_sharded_step_is_served(server: RunningServer) -> None:
    path = publish(weights(server), 7)
    shard(path)
    assert update(server, path) == (200, "") and check_step(path)[0] == 7
    assert {name: get().shape for name, get in read_published(path).items()} == {
        name: torch.Size(entry.shape) for name, entry in read_manifest(path).tensors.items()
    }
    server.post("/reload_weights", {})


@pytest.mark.parametrize("name", OUTSIDE_NAMES)
def test_an_index_names_files_of_its_folder_only(server: RunningServer, name: str) -> None:
    path = publish(weights(server), 8)
    shard(path)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (path / INDEX).write_text(json.dumps(index))
    status, message = update(server, path)
    assert status == 400 and "may name .safetensors files beside it only" in message
    options: dict[str, Any] = {"random_init": False, "num_layers": None, "seed": 0, "dtype": torch.float32}
    for read in (read_tensors, check_directory, read_published, lambda p: load_hf_model(p, device="cpu", **options)):
        with pytest.raises(ValueError, match=r"may name \.safetensors files beside it only"):
            read(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match="is no index of weights"):
        read_tensors(tmp_path)


def test_a_hub_cache_of_links_is_a_model(tmp_path: Path) -> None:
    """The model of the configuration, whose snapshot links to blobs, is not restricted."""
    source = publish(tmp_path / "source", 1)
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "main", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(source / file, blobs / f"blob-{file}")
        (snapshot / file).symlink_to(Path("../../blobs") / f"blob-{file}")
    tensors = read_tensors(resolve_model_dir(str(snapshot)))
    assert tensors.keys() == read_manifest(source).tensors.keys()
    with pytest.raises(PermissionError, match="is a link out of"):
        resolve_allowed(str(snapshot), [snapshot.parent])
    assert resolve_allowed(str(snapshot), [tmp_path / "hub"]) == snapshot


def test_a_checkpoint_opens_no_file_outside(tmp_path: Path, opened: list[str]) -> None:
    path = publish_dir(tmp_path / "step_1", lambda p: (p / "state.json").write_text("{}") and None, sealed=True)
    assert find_damage(path) is None
    seal = json.loads((path / STABLE).read_text())
    (tmp_path / "secret").write_text("{}")
    (path / STABLE).write_text(json.dumps({"../secret": seal["state.json"]}))
    opened.clear()
    assert "leads out of the checkpoint" in (find_damage(path) or "")
    (path / STABLE).write_text(json.dumps(seal))
    move_out(path / "state.json", tmp_path / "elsewhere.json")
    assert "leads out of the checkpoint" in (find_damage(path) or "")
    assert not [file for file in opened if "secret" in file or "elsewhere" in file]


FOLLOWED: list[str] | None = None


def follow(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and FOLLOWED is not None:
        FOLLOWED.append(str(arguments[0]))


sys.addaudithook(follow)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Names of the files that Python opens meanwhile."""
    global FOLLOWED
    FOLLOWED = []
    yield FOLLOWED
    FOLLOWED = None
