"""The vLLM backend without vLLM: the command line, shards and fused tensors, and the routes around its app."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger
from safetensors.torch import load_file
from small_tokenizers import CHATML, TWO_ROLES, build_smollm2, build_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from torch import nn

from prime_rl.config import RLConfig
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.intake import RESERVED
from prime_rl.inference.request_parsing import ApiError
from prime_rl.inference.tool_parser import MessageParser
from prime_rl.inference.vllm.chats import ChatGuard
from prime_rl.inference.vllm.engine import CONFIG_VARIABLE, MODEL_DIR_VARIABLE, build_argv, serve_vllm, write_option
from prime_rl.inference.vllm.routes import PrimeRoutes, _add_versions
from prime_rl.inference.vllm.translate import chat_from_completion, completion_from_chat
from prime_rl.inference.vllm.worker import (
    WeightWorker,
    compare,
    compare_adapter,
    cut_share,
    list_adapter_tensors,
    list_loaded_tensors,
)
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.transport.broadcast import WeightSender
from prime_rl.transport.weights import publish_weights
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.datasets.chat import render_chat
from rollouts.training.manifests import digest_tensor

MODEL_DIR = resolve_model_dir("tiny-qwen3")


def argv(**config: Any) -> list[str]:
    found = build_argv(InferenceConfig.model_validate({"backend": "vllm", **config}), Path("m"), on_gpu=False)
    assert found[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    return found[3:]


def value_of(words: list[str], flag: str) -> str:
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


def test_the_command_line_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    words = argv(
        parallel={"tp": 2, "dp": 3}, max_batch_size=7, model={"max_model_len": 99, "reasoning_parser": "think"}
    )
    reported = {flag: value_of(words, flag) for flag in words if flag.startswith("--")}
    assert reported["--tensor-parallel-size"] == "2" and reported["--data-parallel-size"] == "3"
    assert (
        reported["--max-num-seqs"] == "7" and reported["--max-model-len"] == "99" and reported["--dtype"] == "float32"
    )
    assert reported["--logprobs-mode"] == "processed_logprobs" and reported["--reasoning-parser"] == "qwen3"
    assert "--enforce-eager" in words and "--data-parallel-size" not in argv()
    on_gpu = [build_argv(InferenceConfig(enforce_eager=eager), Path("m"), on_gpu=True) for eager in (False, True)]
    assert ["--enforce-eager" in words for words in on_gpu] == [False, True]
    assert "--gpu-memory-utilization" not in words
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
    assert value_of(argv(), "--gpu-memory-utilization") == "0.4"
    mine = argv(vllm={"max-num-seqs": 3, "enforce_eager": False, "kv_transfer": {"a": 1}, "nothing": None})
    assert value_of(mine, "--max-num-seqs") == "3" and "--no-enforce-eager" in mine and "--enforce-eager" not in mine
    assert value_of(mine, "--kv-transfer") == '{"a": 1}' and "--nothing" not in mine
    assert write_option("x", ["a", 1]) == ["--x", "a", "1"]
    assert json.loads(
        value_of(argv(sampling={"temperature": 0.5, "max_tokens": 9}), "--override-generation-config")
    ) == {
        "temperature": 0.5,
        "max_new_tokens": 9,
    }
    with pytest.raises(ValueError, match=r"sampling\.stop cannot be a default"):
        argv(sampling={"stop": ["x"]})


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_shards_of_all_ranks_make_the_tensor(size: int, rows: int, columns: int, across: bool) -> None:
    whole = torch.arange(size * rows * columns).reshape(size * rows, columns)
    whole = whole.T.contiguous() if across else whole
    shape = torch.Size((columns, rows) if across else (rows, columns))
    parts = [cut_share(whole, shape, rank, size) for rank in range(size)]
    assert all(part is not None for part in parts)
    if size > 1:
        assert torch.equal(torch.cat(parts, dim=int(across)), whole)  # type: ignore[arg-type]


def test_shards_that_are_padded_or_held_twice() -> None:
    table = torch.arange(10)[:, None]
    padded = torch.Size((8, 1))
    assert [len(cut_share(table, padded, rank, 2)) for rank in (0, 1)] == [8, 2]  # type: ignore[arg-type]
    heads = torch.arange(2)[:, None]
    held = [cut_share(heads, torch.Size((1, 1)), rank, 4).item() for rank in range(4)]  # type: ignore[union-attr]
    assert held == [0, 0, 1, 1], "two heads on four ranks"
    assert cut_share(table, torch.Size((5, 3)), 0, 2) is None


class Fused(nn.Module):
    """A projection as vLLM holds it: three matrices in one, packed away on a CPU."""

    def __init__(self, weight: torch.Tensor, packed: bool) -> None:
        super().__init__()
        self.output_partition_sizes = [4, 2, 2]
        self.input_size_per_partition = weight.shape[1]
        self.weight = nn.Parameter(torch.empty(0) if packed else weight)
        if packed:
            self.cpu_linear = lambda x, _, bias: x @ weight.T


def build_model(weight: torch.Tensor, packed: bool) -> nn.Module:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.attn = nn.Module()
    model.attn.qkv_proj = Fused(weight, packed)
    model.norm = nn.LayerNorm(3, bias=False)
    return model


@pytest.mark.parametrize("packed", [False, True])
def test_every_published_tensor_is_verified(packed: bool) -> None:
    weight = torch.randn(8, 3)
    published = {
        "attn.q_proj.weight": weight[:4].clone(),
        "attn.k_proj.weight": weight[4:6].clone(),
        "attn.v_proj.weight": weight[6:].clone(),
        "norm.weight": torch.ones(3),
    }

    def judge() -> Any:
        files = {name: (lambda t=tensor: t) for name, tensor in published.items()}
        return compare(list_loaded_tensors(build_model(weight, packed)), files, 0, 1)

    with torch.no_grad():
        report = judge()
        assert report.digests == {name: digest_tensor(tensor) for name, tensor in published.items()}
        published["attn.k_proj.weight"][1, 2] += 1e-6
        assert judge().wrong == ["attn.k_proj.weight"]
        published["attn.k_proj.weight"] = weight[4:6].double() + 1e-12
        published["other.weight"] = torch.ones(1)
        assert (judge().unknown, judge().rounded) == (["other.weight"], ["attn.k_proj.weight"])
        del published["norm.weight"]
        assert "norm.weight (not published)" in judge().wrong


def test_worker_repacks_stale_copies_or_raises(tmp_path: Path) -> None:
    class Head(nn.Module):
        """An output layer whose packed copy is made by `process_weights_after_loading` alone."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))
            self.quant_method = self
            self.process_weights_after_loading(self)

        def process_weights_after_loading(self, layer: Any) -> None:
            copy = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias: x @ copy.T

    class Worker(WeightWorker):
        rank = 0

        def __init__(self, breaks: bool) -> None:
            self.model = nn.Module()
            self.model.lm_head = Head()
            self.model_runner = SimpleNamespace(get_model=lambda: self.model, reload_weights=self.reload)
            hf = SimpleNamespace(tie_word_embeddings=False)
            parallel = SimpleNamespace(tensor_parallel_size=1)
            self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(hf_config=hf))
            self.breaks = breaks

        def reload(self, weights_path: str) -> None:
            if not self.breaks:
                self.model.lm_head.weight.data.fill_(2.0)

    from safetensors.torch import save_file

    save_file({"lm_head.weight": torch.full((4, 3), 2.0)}, tmp_path / "model.safetensors")
    report = Worker(breaks=False).load_published_weights(str(tmp_path))
    assert report["repaired"] == ["lm_head.weight"] and not report["wrong"]
    with pytest.raises(RuntimeError, match=r"after loading it: lm_head\.weight"):
        Worker(breaks=True).load_published_weights(str(tmp_path))


def test_a_chat_over_tokens_and_back() -> None:
    body = {
        "messages": [],
        "tokens": [1, 2],
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 5,
    }
    sent = completion_from_chat({**body, "tools": [{}], "model": "m"})
    assert sent == {"model": "m", "seed": 5, "prompt": [1, 2], "max_tokens": 3, "logprobs": 2}
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}]}
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": logprobs, "prompt_token_ids": [1, 2]}
    reported = chat_from_completion(
        {"id": "cmpl-1", "choices": [choice]}, {**body, "tools": [{}]}, MessageParser(), False
    )
    (chat,) = reported["choices"]
    assert (
        reported["prompt_token_ids"] == [1, 2]
        and reported["id"] == "chatcmpl-1"
        and chat["finish_reason"] == "tool_calls"
    )
    assert chat["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert [entry["token"] for entry in chat["logprobs"]["content"][0]["top_logprobs"]] == ["a", "b"]
    for bad in ({"tokens": None}, {"tokens": [1], "stream": True}):
        with pytest.raises(ApiError):
            completion_from_chat(bad)


NUMERICS = {"exact": False, "dtype": "float32"}
"""Those of /health, as in the answers to weight updates: a canary may be compared after either."""


class FakeClient:
    """The few verbs of vLLM's engine client that our routes use."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.adapters: list[Any] = []
        self.paused = False

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.calls.append(f"reset {reset_running_requests}")

    async def check_health(self) -> None:
        return None

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        name = Path(str(args[0])).name
        verb, kind = method.split("_published_")
        self.calls.append(f"{verb} {name}" if kind == "weights" else f"{verb} {kind} {name}")
        if name in self.failing:
            raise RuntimeError(f"does not hold {name}")
        report: dict[str, Any] = {"rounded": [], "wrong": [], "unknown": [], "repaired": []}
        return [{**report, "digests": {"a": "1", "b": "2"}}, {**report, "digests": {"a": "1", "b": "3"}}]

    async def generate(self, request_id: str, lora_request: Any = None) -> Any:
        self.adapters.append(lora_request)
        spans = [SimpleNamespace(version="default", start=0, end=2), SimpleNamespace(version="4", start=2, end=5)]
        output = SimpleNamespace(index=0, weight_versions=spans)
        yield SimpleNamespace(finished=True, request_id=request_id, outputs=[output])


@pytest.fixture
def routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Starlette, FakeClient, Path]:
    config = InferenceConfig.model_validate(
        {"backend": "vllm", "output_dir": tmp_path, "max_batch_size": 1, "server": {"max_queued_requests": 0}}
    )
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.setenv(MODEL_DIR_VARIABLE, str(MODEL_DIR))
    app = Starlette()

    async def chat(request: Request) -> JSONResponse:
        assert (await request.json())["model"] == "m"
        async for _ in app.state.engine_client.generate("chatcmpl-9"):
            pass
        return JSONResponse({"id": "chatcmpl-9", "choices": [{"index": 0, "message": {"reasoning": "hm"}}]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def metrics(request: Request) -> PlainTextResponse:
        return PlainTextResponse("vllm 1\n")

    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/v1/models", models)
    app.add_route("/metrics", metrics)
    app.add_middleware(PrimeRoutes)
    app.state.engine_client = FakeClient()
    return app, app.state.engine_client, tmp_path


TEXT = {"content-type": "text/plain"}
KEYS = ("wrong", "secret-word")


def talk(app: Starlette, use: Callable[[httpx.AsyncClient], Awaitable[Any]], host: str = "127.0.0.1") -> Any:
    async def main() -> Any:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await use(client)

    return asyncio.run(main())


def publish(root: Path, step: int) -> Path:
    tensors = tensor_names(load_decoder(MODEL_DIR, random_init=True, seed=step))
    return publish_weights(root / "weights", step, tensors, MODEL_DIR)


async def post_and_leave(app: Any, path: str, parts: list[bytes]) -> int:
    """Status of the answer to a client that disconnects after these parts of its body."""
    left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    left = [*left[:-1], {**left[-1], "more_body": not left[-1]["body"].endswith(b"}")}]
    status = 0

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": [], "client": ("127.0.0.1", 1), "app": app}, receive, send)
    return status


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """Messages logged at level ERROR, with their tracebacks."""
    found: list[str] = []
    sink = logger.add(found.append, level="ERROR")
    yield found
    logger.remove(sink)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v1/chat/completions", [b'{"model": "m"}']),
        ("/v1/chat/completions/tokens", [b'{"model": "m", "tokens": [1]}']),
        ("/v1/chat/completions", [b'{"model": ']),
        ("/update_weights", [b'{"weight_dir": ']),
    ],
    ids=["chat", "tokens", "body", "control"],
)
def test_client_disconnect_is_not_an_error(
    routes: tuple[Starlette, FakeClient, Path], errors: list[str], path: str, parts: list[bytes]
) -> None:
    """vLLM cancels the handler of a client that has left, which then returns None: the answer is `null`."""
    app, _, _ = routes

    async def cancelled(request: Request) -> JSONResponse:
        await request.body()
        assert (await request.receive())["type"] == "http.disconnect"
        return JSONResponse(None)

    for route in ("/v1/chat/completions", "/v1/completions"):
        app.routes.insert(0, Route(route, cancelled, methods=["POST"]))
    assert asyncio.run(post_and_leave(app, path, parts)) == 499
    assert errors == []
    assert "requests_in_flight 0" in talk(app, lambda http: http.get("/metrics")).text


def test_update_pauses_loads_clears_cache_and_resumes(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, root = routes
    path = publish(root, 4)

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        update = await http.post("/update_weights", json={"weight_dir": str(path)})
        chat = await http.post("/v1/chat/completions", json={"model": "m"})
        return [update, chat, *[await http.get(page) for page in ("/health", "/v1/models", "/metrics")]]

    update, chat, health, models, metrics = talk(app, use)
    assert client.calls == ["pause keep", "load step_4", "reset True", "resume"]
    assert update.json()["version"] == 4 and update.json()["digests"] == {"a": "1"}, "what all workers agree on"
    assert chat.json()["choices"][0]["versions"] == [[0, 0], [2, 4]]
    assert chat.json()["choices"][0]["message"]["reasoning_content"] == "hm"
    assert health.json() == {"status": "ok", "version": 4} | NUMERICS and models.json()["data"][0]["version"] == 4
    assert metrics.text.startswith("vllm 1\n") and "prime_rl_policy_version 4" in metrics.text


def test_vllm_rejects_requests_without_weights_and_large_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routes: tuple[Starlette, FakeClient, Path]
) -> None:
    """A restarted server waits for the orchestrator; a large body is rejected before it is read."""
    server = {"wait_for_weights": True, "max_request_mb": 0.001}
    config = InferenceConfig.model_validate({"backend": "vllm", "output_dir": tmp_path, "server": server})
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    app, client, root = routes
    path = publish(root, 4)

    async def many() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        before = [await http.get("/health"), await http.post("/v1/chat/completions", json={"model": "m"})]
        before.append(await http.post("/update_weights", json={"weight_dir": str(path)}))
        after = [await http.get("/health"), await http.post("/v1/chat/completions", json={"model": "m"})]
        after.append(await http.post("/v1/chat/completions", json={"model": "m" * 2000}))
        return [*before, *after, await http.post("/v1/chat/completions", content=many())]

    waiting, refused, update, health, chat, large, unannounced = talk(app, use)
    assert waiting.json() == {"status": "ok", "version": 0, "awaits_weights": True} | NUMERICS
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert "waiting for weights" in refused.json()["error"]["message"]
    assert health.json() == {"status": "ok", "version": 4} | NUMERICS
    assert (update.status_code, chat.status_code) == (200, 200)
    for reply in (large, unannounced):
        assert reply.status_code == 413 and "server.max_request_mb" in reply.json()["error"]["message"]
    assert client.calls[-1] == "resume"


def test_vllm_takes_weights_over_a_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, routes: tuple[Starlette, FakeClient, Path]
) -> None:
    """They lie in a directory of the server's own while it needs them, and vLLM's loader reads them there."""
    config = InferenceConfig.model_validate(
        {"backend": "vllm", "output_dir": tmp_path, "weight_broadcast": {"type": "gloo"}}
    )
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    app, client, _ = routes
    trainer = WeightSender("gloo", "localhost", 0, 5.0, torch.device("cpu"), max_versions=4)
    trainer.open()
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    digests = {name: entry.digest for name, entry in trainer.offer(1, tensors, None).tensors.items()}
    trainer.offer(2, tensors, None)
    trainer.offer(3, tensors, None)
    trainer._versions[3][1][0][0] += 1
    trainer.offer(4, tensors, {"r": 1, "use_dora": True})
    read: list[tuple[str, dict[str, torch.Tensor]]] = []

    async def collective_rpc(method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        name = Path(args[0]).name.split("-")[0]
        read.append((name, load_file(Path(args[0]) / "model.safetensors")))
        if name == "step_2":
            raise RuntimeError("does not hold step_2")
        return [{"rounded": [], "wrong": [], "unknown": [], "repaired": [], "digests": dict(digests)}]

    client.collective_rpc = collective_rpc  # type: ignore[method-assign]
    killed, other = (tmp_path / f"received-inference-{os.uname().nodename}-{port}-old" for port in (8000, 8001))
    for path in (killed, other):
        (path / "step_9-x").mkdir(parents=True)
    place = {"host": trainer.address.host, "port": trainer.address.port, "timeout": 5}

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        async def update(step: int) -> httpx.Response:
            return await http.post("/update_weights", json={"weight_dir": None, "step": step})

        replies = [await update(1), await http.post("/init_broadcaster", json=place)]
        replies += [await update(step) for step in (1, 2, 3, 4)]
        trainer.close()
        return [*replies, await update(1), await http.get("/health")]

    unknown, reported, first, failed, changed, adapter, gone, health = talk(app, use)
    assert unknown.status_code == 409 and reported.json() == {"status": "ok"}
    assert first.json()["version"] == 1 and first.json()["digests"] == digests
    assert [name for name, _ in read] == ["step_1", "step_2", "step_1"], "after a failure back to what was held"
    assert all(torch.equal(held[name], tensors[name]) for _, held in read for name in tensors)
    assert failed.status_code == 400 and "version 1 stays in service" in failed.json()["error"]["message"]
    assert changed.status_code == 400 and "do not match their manifest: a" in changed.json()["error"]["message"]
    assert adapter.status_code == 400 and "use_dora = True is not plain LoRA" in adapter.json()["error"]["message"]
    assert gone.status_code == 503 and health.json()["version"] == 1
    [place_of_all] = set(tmp_path.glob("received-*")) - {other}
    assert other.exists() and not killed.exists(), "each server removes its own"
    assert [path.name.split("-")[0] for path in place_of_all.iterdir()] == ["step_1"]


def test_weights_that_cannot_be_trusted_leave_vllm_as_it_was(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, root = routes
    good, damaged, refused = (publish(root, step) for step in (1, 2, 3))
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    client.failing = {"step_3"}

    async def use(http: httpx.AsyncClient) -> Any:
        async def update(path: Path | str) -> httpx.Response:
            return await http.post("/update_weights", json={"weight_dir": str(path)})

        assert (await update(good)).status_code == 200
        client.calls.clear()
        broken = await update(damaged)
        assert broken.status_code == 400 and "do not match their manifest" in broken.text and client.calls == []
        assert (await update("/etc")).status_code == 403
        (damaged / "STABLE").unlink()
        assert "STABLE" in (await update(damaged)).text and client.calls == []
        reply = await update(refused)
        assert reply.status_code == 400 and "version 1 stays in service" in reply.text
        assert client.calls == ["pause keep", "load step_3", "load step_1", "reset True", "resume"]
        assert (await http.get("/health")).json()["version"] == 1
        client.failing = {"step_3", "step_1"}
        reply = await update(refused)
        assert reply.status_code == 503 and "restore the old ones" in reply.text and "in service" not in reply.text
        assert client.calls[-1] == "load step_1", "not resumed"
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/chat/completions", json={"model": "m"})).status_code == 503
        client.vllm_config.lora_config = object()
        reply = await update(publish_adapter(root, 4))
        assert reply.status_code == 503 and "restore the old ones" in reply.text, "the weights below it are unknown"
        client.failing = {"step_3"}
        reply = await update(refused)
        assert reply.status_code == 400 and "version 1 stays in service" in reply.text and not client.paused
        assert (await http.get("/health")).json()["version"] == 1
        client.failing = {"step_3", "step_1"}
        assert (await update(refused)).status_code == 503 and client.paused
        client.failing = set()
        assert (await http.post("/reload_weights")).json()["version"] == 0
        assert not client.paused, "its weights are known again"
        client.failing = {"step_3", MODEL_DIR.name}
        await http.post("/pause")
        assert (await update(refused)).status_code == 503
        client.failing = set()
        assert (await http.post("/reload_weights")).status_code == 200 and client.paused, "as before the failure"
        await http.post("/resume")
        assert (await http.get("/health")).json() == {"status": "ok", "version": 0} | NUMERICS

    talk(app, use)


def publish_adapter(root: Path, step: int, rank: int = 2) -> Path:
    torch.manual_seed(step)
    tensors = {f"base_model.model.layers.0.{name}.lora_A.weight": torch.randn(rank, 3) for name in ("q_proj", "o_proj")}
    tensors |= {name.replace("lora_A", "lora_B"): torch.randn(4, rank) for name in tensors}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    return publish_weights(root / "adapters", step, tensors, MODEL_DIR, adapter_config=config)


def test_adapter_becomes_policy_without_loading_a_model(
    routes: tuple[Starlette, FakeClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have none end before the first one comes, and requests that have one before the last one goes."""
    app, client, root = routes
    monkeypatch.setattr("prime_rl.inference.vllm.weights.build_lora_request", lambda path: path.name)
    one, two, bad = (publish_adapter(root, step) for step in (1, 2, 3))
    data = bytearray((bad / "adapter_model.safetensors").read_bytes())
    data[-2] ^= 1
    (bad / "adapter_model.safetensors").write_bytes(data)

    async def use(http: httpx.AsyncClient) -> None:
        async def update(path: Path) -> httpx.Response:
            return await http.post("/update_weights", json={"weight_dir": str(path)})

        async def chat() -> Any:
            await http.post("/v1/chat/completions", json={"model": "m"})
            return client.adapters[-1]

        reply = await update(one)
        assert reply.status_code == 400 and "set inference.max_lora_rank" in reply.text and not client.calls
        client.vllm_config.lora_config = object()
        assert await chat() is None
        assert (await update(one)).json()["version"] == 1
        assert client.calls == ["pause wait", "load adapter step_1", "reset True", "resume"]
        assert await chat() == "step_1"
        client.calls.clear()
        assert (await update(two)).json()["version"] == 2 and await chat() == "step_2"
        assert client.calls == ["pause keep", "load adapter step_2", "reset True", "resume"]
        client.calls.clear()
        assert "do not match their manifest" in (await update(bad)).text and not client.calls
        client.failing = {"step_1"}
        assert "version 2 stays in service" in (await update(one)).text and await chat() == "step_2"
        assert client.calls[1:4] == ["load adapter step_1", "load adapter step_2", "reset True"]
        client.calls.clear()
        assert (await http.post("/reload_weights")).json()["version"] == 0 and await chat() is None
        assert client.calls[:2] == ["pause wait", f"remove adapter {1 << 20}"], "the model is the same, and is compared"
        assert client.calls[2] == f"compare {MODEL_DIR.name}"

    talk(app, use)


def test_a_reloaded_adapter_finds_no_keys_of_earlier_files(
    routes: tuple[Starlette, FakeClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, client, root = routes

    async def load(request: Any) -> str:
        client.calls.append(f"load {request.lora_name} {Path(request.lora_path).name}")
        return "Success"

    class Fields(SimpleNamespace):
        model_fields = ("load_inplace",)

    protocol = SimpleNamespace(LoadLoRAAdapterRequest=Fields)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.serve.lora", SimpleNamespace(protocol=protocol))
    app.state.vllm_config = SimpleNamespace(lora_config=object())
    app.state.openai_serving_models = SimpleNamespace(load_lora_adapter=load)
    paths = [publish_adapter(root, step) for step in (1, 1, 2, 1)]
    times = [1, 1, 1, 2]
    for path, modified in zip(paths, times, strict=True):
        os.utime(path / "adapter_model.safetensors", (modified, modified))
        body = {"lora_name": "mine", "lora_path": str(path)}
        reply = talk(app, lambda http, body=body: http.post("/v1/load_lora_adapter", json=body))
        assert reply.status_code == 200
    first, other = "load mine step_1", "load mine step_2"
    assert client.calls == [first, first, other, "reset True", first, "reset True"]


def test_every_adapter_matrix_is_verified(tmp_path: Path) -> None:
    path = publish_adapter(tmp_path, 1)
    published = load_file(path / "adapter_model.safetensors")

    def matrices(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (published[f"base_model.model.layers.0.{name}.{kind}.weight"] for kind in ("lora_A", "lora_B"))
        return torch.cat([a, torch.zeros(6, 3)]), torch.cat([2 * b, torch.zeros(4, 6)], 1)

    layer = [torch.zeros(2, 1, 8, 3), torch.zeros(2, 1, 4, 8)]
    layers = {name: [part.clone() for part in layer] for name in ("q_proj", "k_proj", "o_proj")}
    for name in ("q_proj", "o_proj"):
        for stack, matrix in zip(layers[name], matrices(name), strict=True):
            stack[1, 0] = matrix
    packed = {"layers.0.qk_proj": ["layers.0.q_proj", "layers.0.k_proj"]}
    fused = SimpleNamespace(
        lora_a_stacked=(layers["q_proj"][0], layers["k_proj"][0]),
        lora_b_stacked=(layers["q_proj"][1], layers["k_proj"][1]),
    )
    single = SimpleNamespace(lora_a_stacked=(layers["o_proj"][0],), lora_b_stacked=(layers["o_proj"][1],))

    def judge() -> Any:
        held = list_adapter_tensors({"layers.0.qk_proj": fused, "layers.0.o_proj": single}, packed, 1)
        return compare_adapter(held, path, 0, 1)

    report = judge()
    assert report.digests == {name: digest_tensor(tensor) for name, tensor in published.items()} and not report.wrong
    layers["k_proj"][1][1, 0, 0, 0] = 1
    layers["q_proj"][0][1, 0, 0, 0] += 1
    assert sorted(judge().wrong) == [
        "base_model.model.layers.0.k_proj.lora_B.weight (not published)",
        "base_model.model.layers.0.q_proj.lora_A.weight",
    ]
    of_other_size = compare_adapter({"layers.0.q_proj": (torch.zeros(1, 5), torch.zeros(5, 1))}, path, 0, 1)
    assert of_other_size.unknown == [
        "base_model.model.layers.0.q_proj.lora_A.weight",
        "base_model.model.layers.0.q_proj.lora_B.weight",
    ]
    assert compare_adapter({}, path, 0, 1).wrong == [
        "layers.0.o_proj (not adapted here)",
        "layers.0.q_proj (not adapted here)",
    ]


@pytest.mark.parametrize(("capacity", "pinned"), [(16, [7]), (1, [])])
def test_the_adapter_of_the_policy_stays_in_memory(
    capacity: int, pinned: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one adapter only, vLLM needs it for the adapter of a request."""
    request = SimpleNamespace(LoRARequest=lambda *args, **options: SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    pins: list[int] = []
    stacks = {name: (torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 4, 2)) for name in ("q_proj", "o_proj")}
    manager = SimpleNamespace(
        modules={
            f"layers.0.{name}": SimpleNamespace(lora_a_stacked=(a,), lora_b_stacked=(b,))
            for name, (a, b) in stacks.items()
        },
        packed_modules={},
        lora_index_to_id=[7, None],
        capacity=capacity,
        _registered_adapters=SimpleNamespace(pin=pins.append),
    )
    path = publish_adapter(tmp_path, 1)
    published = load_file(path / "adapter_model.safetensors")

    def add(lora: Any) -> None:
        assert lora.load_inplace
        for name, (a, b) in stacks.items():
            a[0, 0] = published[f"base_model.model.layers.0.{name}.lora_A.weight"]
            b[0, 0] = 2 * published[f"base_model.model.layers.0.{name}.lora_B.weight"]

    worker = WeightWorker()
    worker.rank, worker.vllm_config = 0, SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    worker.model_runner = SimpleNamespace(add_lora=add, lora_manager=SimpleNamespace(_adapter_manager=manager))
    report = worker.load_published_adapter(str(path), "policy", 7)
    assert report["digests"].keys() == published.keys() and pins == pinned


def test_vllm_keeps_several_adapters_in_memory() -> None:
    assert value_of(argv(max_lora_rank=8), "--max-cpu-loras") == "16" and "--max-cpu-loras" not in argv()
    assert value_of(argv(max_lora_rank=8, vllm={"max-loras": 20}), "--max-cpu-loras") == "20"
    assert value_of(argv(max_lora_rank=8, vllm={"max_cpu_loras": 2}), "--max-cpu-loras") == "2"


def test_adapter_rank_limit_fits_the_trainer(tmp_path: Path) -> None:
    words = argv(max_lora_rank=20)
    assert "--enable-lora" in words and value_of(words, "--max-lora-rank") == "32" and "--enable-lora" not in argv()
    assert "q_proj" in words[words.index("--lora-target-modules") :] and "--lora-target-modules" not in argv()
    with pytest.raises(ValueError, match="rank 512 at most"):
        argv(max_lora_rank=513)
    ranks = []
    for options in ([], ["--trainer.model.lora.rank", "4"], ["--trainer.model.lora.merge", "true"]):
        given = ["--model.name", "tiny-qwen3", "--output-dir", str(tmp_path), *options]
        inference = parse_argv(RLConfig, given, "rl")[0].inference
        assert inference is not None
        ranks.append(inference.max_lora_rank)
    assert ranks == [None, 4, None]


def test_pause_is_answered_with_the_version(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, _ = routes

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.post("/pause", params={"mode": mode}) for mode in ("wait", "sleep")]

    paused, refused = talk(app, use)
    assert (paused.status_code, paused.json()) == (200, {"status": "paused", "version": 0})
    assert refused.status_code == 400 and "sleep" in refused.text and client.calls == ["pause wait"]


def test_a_paused_server_stays_paused_after_an_update(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, root = routes
    paths = [publish(root, step) for step in (3, 4)]
    client.failing = {"step_3"}

    async def use(http: httpx.AsyncClient) -> tuple[list[int], Any]:
        await http.post("/pause", params={"mode": "keep"})
        statuses = [(await http.post("/update_weights", json={"weight_dir": str(path)})).status_code for path in paths]
        return statuses, (await http.get("/health")).json()

    assert talk(app, use) == ([400, 200], {"status": "ok", "version": 4, "is_paused": True} | NUMERICS)
    assert client.paused and "resume" not in client.calls and "load step_4" in client.calls


@pytest.mark.parametrize("opened", [False, True])
def test_chats_over_tokens_return_reasoning(
    opened: bool, monkeypatch: pytest.MonkeyPatch, routes: tuple[Starlette, FakeClient, Path]
) -> None:
    app, _, _ = routes
    config = InferenceConfig.model_validate({"backend": "vllm", "model": {"reasoning_parser": "think"}})
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())

    async def complete(request: Request) -> JSONResponse:
        choice = {"index": 0, "text": "hm</think>4" if opened else "<think>hm</think>4", "finish_reason": "stop"}
        return JSONResponse({"id": "cmpl-1", "choices": [choice]})

    app.add_route("/v1/completions", complete, methods=["POST"])
    tokens = load_tokenizer(str(MODEL_DIR)).encode("2 + 2?" + ("<think>\n" if opened else ""))
    body = {"model": "m", "messages": [], "tokens": tokens}
    reply = talk(app, lambda http: http.post("/v1/chat/completions/tokens", json=body))
    (choice,) = reply.json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("4", "hm")


def test_vllm_returns_tags_that_are_special_tokens(
    monkeypatch: pytest.MonkeyPatch, routes: tuple[Starlette, FakeClient, Path]
) -> None:
    app, _, root = routes
    tags = ["<tool_call>", "</tool_call>", "<|im_end|>"]
    build_tokenizer(root / "tokenizer", CHATML, tags, [], {"eos_token": "<|im_end|>"})
    monkeypatch.setenv(MODEL_DIR_VARIABLE, str(root / "tokenizer"))
    sent: list[Any] = []

    async def complete(request: Request) -> JSONResponse:
        sent.append(await request.json())
        return JSONResponse({"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})

    app.add_route("/v1/completions", complete, methods=["POST"])
    body = {"model": "m", "messages": [], "tokens": [1]}

    async def use(http: httpx.AsyncClient) -> None:
        for tools in ([], [{}]):
            await http.post("/v1/chat/completions/tokens", json={**body, "tools": tools})

    talk(app, use)
    assert [request.get("skip_special_tokens") for request in sent] == [None, False]


def test_only_reasoning_gets_its_other_name() -> None:
    routes = SimpleNamespace(take_spans=lambda request, num: {1: [[0, 2], [5, 3]]}, version=3)
    messages = [{"content": "a"}, {"content": "b", "reasoning": "hm"}, {"content": "c", "reasoning": None}]
    content = {"id": "x", "choices": [{"index": i, "message": dict(message)} for i, message in enumerate(messages)]}
    choices = _add_versions(routes, content)["choices"]  # type: ignore[arg-type]
    assert [choice["message"] for choice in choices] == [
        messages[0], {**messages[1], "reasoning_content": "hm"}, messages[2],
    ]  # fmt: skip
    assert [choice["versions"] for choice in choices] == [[[0, 3]], [[0, 2], [5, 3]], [[0, 3]]]


def test_vllm_starts_only_with_the_key_of_its_config(
    routes: tuple[Starlette, FakeClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _, _ = routes
    started: list[str] = []
    monkeypatch.setattr("prime_rl.utils.logger.setup_logger", lambda *_: None)
    monkeypatch.setattr("os.execve", lambda path, argv, environ: started.append(environ["MY_KEY"]))
    config = InferenceConfig.model_validate(
        {"backend": "vllm", "model": {"name": "tiny-qwen3"}, "server": {"host": "0.0.0.0", "api_key_var": "MY_KEY"}}
    )
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.delenv("MY_KEY", raising=False)
    for start in (serve_vllm, lambda _: PrimeRoutes(app)):
        with pytest.raises(ValueError, match=r"server\.api_key_var names MY_KEY, which is not set"):
            start(config)
    monkeypatch.setenv("MY_KEY", "secret-word")
    warnings: list[str] = []
    sink = logger.add(warnings.append, level="WARNING", format="{message}")
    serve_vllm(config)
    assert started == ["secret-word"] and not warnings
    serve_vllm(config.model_copy(update={"server": config.server.model_copy(update={"api_key_var": None})}))
    logger.remove(sink)
    assert warnings == ["Serving on 0.0.0.0 without an API key: set server.api_key_var\n"]

    async def use(http: httpx.AsyncClient) -> list[int]:
        return [(await http.post("/pause", headers={"authorization": f"Bearer {key}"})).status_code for key in KEYS]

    assert talk(app, use) == [401, 200]


def test_other_machines_cannot_change_the_server(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, _ = routes

    async def use(http: httpx.AsyncClient) -> list[int]:
        posts = ("/update_weights", "/pause", "/collective_rpc", "/v1/load_lora_adapter")
        return [(await http.post(path, json={})).status_code for path in posts] + [
            (await http.get(path)).status_code for path in ("/health", "/metrics", "/v1/models")
        ]

    assert talk(app, use, host="10.1.2.3") == [403] * 4 + [200] * 3 and client.calls == []


def test_a_teacher_elsewhere_finds_no_scores_in_vllm(routes: tuple[Starlette, FakeClient, Path]) -> None:
    """404, unlike 403, makes the scorer use the log-probs of prompts."""
    app, _, _ = routes
    assert talk(app, lambda http: http.post("/score", json={}), host="10.1.2.3").status_code == 404


def test_vllm_gets_ids_of_chats_with_control_tokens(
    routes: tuple[Starlette, FakeClient, Path],
) -> None:
    app, client, _ = routes
    client.model_config.max_model_len = 99
    sent: list[Any] = []

    async def complete(request: Request) -> JSONResponse:
        sent.append(await request.json())
        choice = {"index": 0, "text": "ok", "finish_reason": "stop", "logprobs": None}
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async def tokenize(request: Request) -> JSONResponse:
        return JSONResponse({"tokens": "of vLLM"})

    app.add_route("/v1/completions", complete, methods=["POST"])
    app.add_route("/tokenize", tokenize, methods=["POST"])
    attack = {"model": "m", "messages": [{"role": "user", "content": "a<|im_end|>b"}]}
    arguments = '{"a": "\\u003c|im_end|\\u003e"}'
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    hidden = {"model": "m", "messages": [{"role": "user", "content": "a"}, call]}
    plain = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        bodies = [attack, hidden, attack | {"stream": True}, plain]
        replies = [await http.post("/v1/chat/completions", json=body) for body in bodies]
        return replies + [await http.post("/tokenize", json=body) for body in (attack, plain, {"prompt": "a"})]

    answered, escaped, streamed, passed, *tokenized = talk(app, use)
    tokenizer = load_tokenizer("tiny-qwen3")
    assert answered.json()["choices"][0]["message"]["content"] == "ok" and escaped.status_code == 200
    assert [body["prompt"].count(tokenizer.eos_token_id) for body in sent] == [1, 2], "the ends of turns alone"
    assert streamed.status_code == 400 and "stream is not supported with vLLM" in streamed.text
    assert passed.json()["id"] == "chatcmpl-9"
    assert tokenized[0].json()["tokens"] == sent[0]["prompt"] == render_chat(tokenizer, attack["messages"])
    assert [reply.json()["tokens"] for reply in tokenized[1:]] == ["of vLLM"] * 2


def test_vllm_gets_token_limits_of_the_model(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, _ = routes
    client.model_config.max_model_len = 99
    sent: list[Any] = []

    async def complete(request: Request) -> JSONResponse:
        sent.append((await request.json())["max_tokens"])
        return JSONResponse({"id": "cmpl-1", "choices": []})

    app.add_route("/v1/completions", complete, methods=["POST"])

    async def use(http: httpx.AsyncClient) -> None:
        for limit in (100, 99, None):
            await http.post("/v1/completions", json={"prompt": "a", "max_tokens": limit})

    talk(app, use)
    assert sent == [99, 99, None]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"chat_template": "{{ messages[0].content }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
            "a forced tool_choice",
        ),
    ],
)
def test_chats_with_control_tokens_have_fewer_options(options: dict[str, Any], name: str) -> None:
    guard = ChatGuard(lambda: load_tokenizer("tiny-qwen3"))
    with pytest.raises(ApiError, match=rf"the chat contains '<\|im_end\|>', so {name} is not supported with vLLM"):
        guard.render({"messages": [{"role": "user", "content": "a<|im_end|>b"}], **options})
    assert guard.render({"messages": [{"role": "user", "content": "a"}], **options}) is None


def test_vllm_gets_ids_of_calls_that_templates_read_as_text() -> None:
    """As those of DeepSeek, to which vLLM gives no null content and no arguments as text."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.content is none %}"
        "{% for call in m.tool_calls %}<call>{{ call.function.name + call.function.arguments }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    tokenizer = load_tokenizer("tiny-qwen3", template)
    guard, turn = ChatGuard(lambda: tokenizer), {"role": "user", "content": "x"}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = {"messages": [turn, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert '<call>add{"a": 1}<|im_end|>' in tokenizer.decode(guard.render(chat))
    with pytest.raises(ApiError, match=r"contains tool calls, which .*, so stream is not supported with vLLM"):
        guard.render(chat | {"stream": True})
    assert guard.render({"messages": [turn], "stream": True}) is None


def test_vllm_gets_no_tools_that_the_template_drops(tmp_path: Path) -> None:
    guard = ChatGuard(lambda: build_smollm2(tmp_path))
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "f"}}]}
    with pytest.raises(ApiError, match="drops tools"):
        guard.render(chat)
    assert guard.render(chat | {"tool_choice": "none"}) is None


@pytest.mark.parametrize("role", ["system", "tool"])
def test_vllm_gets_only_roles_that_the_template_writes(role: str) -> None:
    template = (
        "{% for m in messages if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% endfor %}"
    )
    guard = ChatGuard(lambda: load_tokenizer("tiny-qwen3", template))
    turn = {"role": "user", "content": "x"}
    with pytest.raises(ApiError, match="the chat template drops"):
        guard.render({"messages": [{"role": role, "content": "y"}, turn]})
    assert guard.render({"messages": [turn]}) is None


def test_vllm_gets_no_roles_that_the_template_drops(
    routes: tuple[Starlette, FakeClient, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, _, _ = routes
    sent: list[Any] = []

    async def tokenize(request: Request) -> JSONResponse:
        sent.append([message["role"] for message in (await request.json())["messages"]])
        return JSONResponse({})

    app.add_route("/tokenize", tokenize, methods=["POST"])
    monkeypatch.setattr(PrimeRoutes, "_load_tokenizer", lambda self: load_tokenizer("tiny-qwen3", TWO_ROLES))

    async def use(http: httpx.AsyncClient) -> list[httpx.Response]:
        chats = [
            [{"role": role, "content": "x"}, {"role": "user", "content": "y"}] for role in ("developer", "function")
        ]
        return [await http.post("/tokenize", json={"model": "m", "messages": chat}) for chat in chats]

    _, refused = talk(app, use)
    assert sent == [["system", "user"]]
    assert refused.status_code == 400 and "drops messages of role 'function'" in refused.text


def test_web_pages_reach_no_route_of_vllm(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, _ = routes
    requested: list[str] = []

    async def use(http: httpx.AsyncClient) -> list[int]:
        origin, host = {"origin": "http://evil.example"}, {"host": "evil.example"}
        paths = ("/pause", "/collective_rpc", "/v1/chat/completions", "/reset_prefix_cache")
        statuses = [(await http.post(path, json={}, headers=h)).status_code for path in paths for h in (origin, host)]
        statuses.append((await http.options("/pause", headers=origin)).status_code)
        return [*statuses, (await http.post("/update_weights", content=b"{}", headers=TEXT)).status_code]

    async def connect(**headers: str) -> None:
        async def send(message: dict[str, Any]) -> None:
            requested.append(message["type"])

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": encoded, "client": ("127.0.0.1", 1)}
        await app({**scope, "query_string": b"", "scheme": "ws", "subprotocols": []}, receive, send)  # type: ignore[arg-type]

    assert talk(app, use) == [403] * 9 + [415] and client.calls == []
    asyncio.run(connect(host="localhost", origin="http://evil.example"))
    asyncio.run(connect(host="evil.example"))
    asyncio.run(connect(host="localhost"))
    assert requested == ["websocket.close"] * 3, "no WebSocket route is served"


def test_generation_routes_without_checks_are_refused(routes: tuple[Starlette, FakeClient, Path]) -> None:
    """They would serve initial weights to clients of a restarted server, beyond the queue limit."""
    app, _, _ = routes
    paths = ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/inference/v1/abort_requests")
    paths = (*paths, "/invocations", "/cohere/v2/chat")
    for path in (*paths, "/reset_prefix_cache", "/detokenize"):
        app.add_route(path, lambda request: JSONResponse({}), methods=["POST"])

    async def use(http: httpx.AsyncClient) -> list[int]:
        served = [(await http.post(path, json={})).status_code for path in ("/reset_prefix_cache", "/detokenize")]
        return [(await http.post(path, json={})).status_code for path in paths] + served

    assert talk(app, use) == [404] * len(paths) + [200] * 2


@pytest.mark.parametrize("fields", [{}, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, {"stream": True}])
def test_bodies_of_running_requests_reserve_no_memory(
    routes: tuple[Starlette, FakeClient, Path], fields: dict[str, Any]
) -> None:
    app, _, _ = routes
    reserved: list[int] = []

    async def generate(request: Request) -> JSONResponse:
        reserved.append(request.scope[RESERVED].limit.reserved)
        return JSONResponse({"id": "cmpl-1", "choices": []})

    for path in ("/v1/chat/completions", "/v1/completions"):
        app.routes.insert(0, Route(path, generate, methods=["POST"]))
    talk(app, lambda http: http.post("/v1/chat/completions", json={"model": "m", **fields}))
    assert reserved == [0]


def test_full_vllm_queue_returns_429(routes: tuple[Starlette, FakeClient, Path]) -> None:
    app, client, _ = routes
    held = asyncio.Event()
    original = client.generate

    async def slow(request_id: str) -> Any:
        await held.wait()
        async for result in original(request_id):
            yield result

    client.generate = slow  # type: ignore[method-assign]

    async def use(http: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        first = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "m"}))
        while "in_flight 1" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.001)
        second = await http.post("/v1/chat/completions", json={"model": "m"})
        held.set()
        return await first, second

    first, second = talk(app, use)
    assert (first.status_code, second.status_code) == (200, 429) and second.headers["retry-after"] == "1"
