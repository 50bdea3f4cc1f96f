"""Adapters over HTTP: in addition to the model, and as the policy that a trainer publishes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from running_server import DEADLINE_S, RunningServer, wait_until

from prime_rl.client.scoring import PackedScores
from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.embedded import loading
from prime_rl.orchestrator.canary_check import CanaryCheck
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.registry import load_causal_lm
from prime_rl.transport.weights import publish_weights
from rollouts.training.weight_sync import PrimeEngine, sync_weights_to_engines

PROMPT = [97, 98, 99, 100, 101]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("outputs"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def backend() -> Backend:
    """A trainer of an adapter that has already moved away from nothing."""
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}, "lora": {"rank": 8, "alpha": 16}}
    built = build_backend(TrainConfig.model_validate({"model": model}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in built.parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return built


def publish(backend: Backend, root: Path, step: int) -> Path:
    return publish_weights(
        root,
        step,
        backend.export_state_dict(),
        backend.model_dir,
        adapter_config=backend.adapter_config,
        canary=backend.compute_canary(step),
    )


def scores(server: RunningServer, model: str | None = None) -> list[float]:
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0} | ({"model": model} if model else {})
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    rows = choice["prompt_logprobs"][1:]
    return [row[str(token)]["logprob"] for row, token in zip(rows, PROMPT[1:], strict=True)]


def test_a_published_adapter_becomes_the_policy(server: RunningServer, backend: Backend) -> None:
    assert server.config.output_dir is not None
    path = publish(backend, server.config.output_dir / "weights", 1)
    assert not (path / "model.safetensors").exists()
    base = scores(server)

    async def update() -> dict[str, object]:
        engines = [PrimeEngine(server.root)]
        answers = await sync_weights_to_engines(engines, str(path))
        await CanaryCheck(1).check(1, path, engines, answers)
        return answers[0]

    answer = anyio.run(update)
    published = {
        name: entry["digest"] for name, entry in json.loads((path / "manifest.json").read_text())["tensors"].items()
    }
    assert answer["version"] == 1 and answer["digests"] == published
    assert server.http.get("/health").json()["version"] == 1
    changed = scores(server)
    assert max(abs(a - b) for a, b in zip(base, changed, strict=True)) > 1e-3
    reported = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).json()
    assert reported["model"] == "tiny-qwen3" and reported["choices"][0]["versions"] == [[0, 1]]
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["tiny-qwen3"]
    assert server.post("/reload_weights", {}).json()["version"] == 0
    assert scores(server) == base


def test_an_adapter_replaces_the_one_of_the_model(backend: Backend, tmp_path: Path) -> None:
    first = publish(backend, tmp_path / "weights", 1)
    with torch.no_grad():
        for name, parameter in backend.parameters.items():
            if "lora_B" in name:
                parameter.mul_(-1)
    second = publish(backend, tmp_path / "weights", 2)
    found = []
    for model in ("tiny-qwen3", str(second)):
        server = RunningServer(tmp_path, {"name": model})
        merged = scores(server)
        assert server.post("/update_weights", {"weight_dir": str(first)}).status_code == 200
        found.append(scores(server))
        assert server.post("/reload_weights", {}).status_code == 200 and scores(server) == merged != found[-1]
        server.stop()
    assert found[0] == found[1]


def test_adapters_get_the_base_that_they_name(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(backend, tmp_path / "weights", 1)
    more = publish(backend, tmp_path / "more", 2)
    config = more / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(first)}))
    server = RunningServer(tmp_path, {"name": str(first)})
    reads = list[Path]()
    monkeypatch.setattr(
        loading, "load_causal_lm", lambda path, **given: reads.append(path) or load_causal_lm(path, **given)
    )
    found = []
    for path in (more, first, first, more):
        assert server.post("/update_weights", {"weight_dir": str(path)}).status_code == 200
        found.append(scores(server))
    assert found[0] == found[3] != found[1] == found[2]
    assert len(reads) == 2, "only if it is another"
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path / "weights" / "step_1")})
    assert reply.status_code == 400 and "start the server with --model.name" in reply.json()["error"]["message"]
    assert server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": str(more)}).status_code == 200
    server.stop()


def test_a_base_that_does_not_fit_changes_nothing(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(backend, tmp_path / "weights", 1)
    server = RunningServer(tmp_path, {"name": str(first)})
    before = scores(server)
    monkeypatch.setattr(loading.WeightReader, "read_model", lambda reader, directory: {})
    reply = server.post("/update_weights", {"weight_dir": str(first)})
    assert reply.status_code == 400 and "is missing" in reply.json()["error"]["message"]
    assert scores(server) == before and len(server.http.get("/v1/models").json()["data"]) == 1
    assert not server.service.engine.engine.adapters()
    server.stop()


def test_a_named_adapter_is_served_with_the_model(server: RunningServer, backend: Backend) -> None:
    assert server.config.output_dir is not None
    path = publish(backend, server.config.output_dir / "mine", 7)
    base = scores(server)
    reply = server.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(path)})
    assert reply.status_code == 200 and reply.json()["version"] == 7
    assert scores(server) == base != scores(server, "mine")
    for name in ("tiny-qwen3", "mine"):
        body = {"prompt": PROMPT, "max_tokens": 1, "model": name}
        assert server.post("/v1/completions", body).json()["model"] == name
        streamed = server.post("/v1/completions", body | {"stream": True}).text
        assert json.loads(streamed.splitlines()[0].removeprefix("data: "))["model"] == name
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": name}
        assert server.post("/v1/chat/completions", chat).json()["model"] == name
    packed = [server.post("/score", {"tokens": PROMPT, "model": name}).content for name in ("tiny-qwen3", "mine")]
    told = [array("f", msgspec.msgpack.decode(data, type=PackedScores).logprobs).tolist() for data in packed]
    assert told == [pytest.approx(base, abs=1e-5), pytest.approx(scores(server, "mine"), abs=1e-5)]
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert (cards["mine"]["parent"], cards["mine"]["version"], cards["tiny-qwen3"]["version"]) == ("tiny-qwen3", 7, 0)
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    assert server.post("/v1/completions", {"prompt": PROMPT, "model": "mine"}).status_code == 404


def test_unloading_ends_the_requests_of_a_paused_server(server: RunningServer, backend: Backend) -> None:
    assert server.config.output_dir is not None
    path = publish(backend, server.config.output_dir / "brief", 8)
    assert server.post("/v1/load_lora_adapter", {"lora_name": "brief", "lora_path": str(path)}).status_code == 200
    server.post("/pause", {})
    body = {"prompt": PROMPT, "max_tokens": 1, "model": "brief"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", body)
        try:
            wait_until(lambda: server.metric("requests_waiting") == 1, "the request to wait")
            assert server.post("/v1/unload_lora_adapter", {"lora_name": "brief"}).status_code == 200
            [choice] = waiting.result(DEADLINE_S / 6).json()["choices"]
        finally:
            server.post("/resume", {})
    assert choice["finish_reason"] == "abort"


def test_adapters_that_cannot_be_trusted_are_refused(server: RunningServer, backend: Backend) -> None:
    assert server.config.output_dir is not None
    path = publish(backend, server.config.output_dir / "bad", 2)

    def refused(words: str) -> None:
        for route, body in (
            ("/update_weights", {"weight_dir": str(path)}),
            ("/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(path)}),
        ):
            reply = server.post(route, body)
            assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
        assert server.http.get("/health").json()["version"] == 0

    weights = path / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-2] + bytes([good[-2] ^ 1]) + good[-1:])
    refused("do not match their manifest")
    weights.write_bytes(good[:-50])
    refused("cannot be read")
    weights.write_bytes(good)
    config = json.loads((path / "adapter_config.json").read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora = True is not plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not plain LoRA"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens = [1] is not plain LoRA"),
        ({"lora_alpha": None}, "adapter_config.json: lora_alpha must be a positive number, got None"),
    ):
        (path / "adapter_config.json").write_text(json.dumps(config | change))
        refused(words)


def test_the_version_of_an_adapter(backend: Backend, tmp_path: Path) -> None:
    """The version in the manifest; an unpublished adapter, as `peft` saves it, has the given one."""
    path = publish(backend, tmp_path / "weights", 3)
    renamed = path.rename(tmp_path / "step_8")
    assert read_adapter(renamed)[1].version == 3
    (renamed / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        read_adapter(renamed, 5)
    unpublished = renamed.rename(tmp_path / "mine")
    (unpublished / "STABLE").unlink()
    assert read_adapter(unpublished, 5)[1].version == 5
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        read_adapter(unpublished)
