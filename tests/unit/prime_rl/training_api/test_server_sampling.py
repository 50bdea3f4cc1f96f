"""Samples of the training API from an inference server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
from running_server import RunningServer
from training_requests import TOKENS, Server, open_server

from prime_rl.client.http import Reply
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.training_api.sampling import Sampler
from prime_rl.training_api.server_sampling import SamplingServerError, ServerSampling
from prime_rl.training_api.wire import LENGTH

Servers = tuple[Server, Server, RunningServer]
"""One that samples itself, one that uses an inference server, and this server, whose defaults must have no effect."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("serve")
    defaults = {"min_p": 0.5, "min_tokens": 4, "repetition_penalty": 1.5, "extra_body": {"presence_penalty": 1.0}}
    engine = RunningServer(root / "inference", weight_dirs=[root], sampling=defaults)
    with open_server(root / "own") as own, open_server(root / "remote", sampling={"url": engine.root}) as remote:
        yield own, remote, engine
    engine.stop()


REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 8, "seed": 3}, {"num_samples": 3}),
    ({"max_tokens": 8, "seed": -3, "temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"num_samples": 2}),
    ({"max_tokens": 4, "temperature": 0}, {"topk_sample_logprobs": 3}),
    ({"max_tokens": 30, "seed": 5, "stop": ["e", "a"]}, {"num_samples": 4}),
    ({"max_tokens": 30, "seed": 5, "stop": [20, 30, 40, 50, 60]}, {"num_samples": 4}),
    ({"max_tokens": 1, "seed": 1}, {"prompt_logprobs": True, "topk_prompt_logprobs": 2}),
    ({"max_tokens": 1, "seed": 1}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
]


def test_samples_of_an_exact_server_have_the_same_bits(servers: Servers) -> None:
    own, remote, _ = servers
    for is_base in (False, True):
        samplers = [s.open_sampler(base_model="tiny-qwen3") if is_base else s.train_sampler() for s in (own, remote)]
        for seq_id, (params, fields) in enumerate(REQUESTS):
            mine, theirs = (
                server.read_samples(sampler, seq_id, params, **fields)
                for server, sampler in zip((own, remote), samplers, strict=True)
            )
            assert mine.sequences and mine == theirs, (is_base, params, fields)


def test_special_tokens_are_stop_strings(servers: Servers) -> None:
    tokenizer = load_tokenizer("tiny-qwen3")
    for server in servers[:2]:
        sampler = server.open_sampler(base_model="tiny-qwen3")
        params = {"max_tokens": 200, "seed": 3, "stop": []}
        tokens = read_tokens(server.read_samples(sampler, 0, params))
        first = next(i for i, token in enumerate(tokens) if token in tokenizer.all_special_ids)
        stop = tokenizer.decode([tokens[first]])
        assert read_tokens(server.read_samples(sampler, 1, {**params, "stop": [stop]})) == tokens[: first + 1]


def read_tokens(message: Any) -> list[int]:
    [sequence] = message.sequences
    tokens: list[int] = np.frombuffer(sequence.tokens, dtype=np.int32).tolist()
    return tokens


def test_adapters_that_a_restarted_server_lost_are_loaded(servers: Servers) -> None:
    _, remote, engine = servers
    sampler = remote.train_sampler()
    before = remote.read_samples(sampler, 0, {"max_tokens": 5, "seed": 1})
    for model in engine.http.get("/v1/models").json()["data"]:
        engine.post("/v1/unload_lora_adapter", {"lora_name": model["id"]})
    assert remote.read_samples(sampler, 1, {"max_tokens": 5, "seed": 1}) == before


def test_sequences_that_fill_the_context_are_scored(servers: Servers, tmp_path: Path) -> None:
    own, _, engine = servers
    expected = own.read_samples(own.open_sampler(base_model="tiny-qwen3"), 0, {"max_tokens": 1}, prompt_logprobs=True)
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}, "max_model_len": len(TOKENS)}
    for name, options in ("own", {}), ("remote", {"sampling": {"url": engine.root}}):
        with open_server(tmp_path / name, model=model, **options) as server:
            sampler = server.open_sampler(base_model="tiny-qwen3")
            found = server.read_samples(sampler, 0, {"max_tokens": 1}, prompt_logprobs=True)
        [sequence] = found.sequences
        assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == (b"", b"", LENGTH)
        assert found.prompt_logprobs == expected.prompt_logprobs


def test_errors_of_the_inference_server_are_reported(servers: Servers, tmp_path: Path) -> None:
    with open_server(tmp_path / "outside", sampling={"url": servers[2].root}) as outside:
        found = outside.result(outside.sample(outside.train_sampler(), 0, {"max_tokens": 1}))
        assert "add its parent to weight_dirs" in found["error"] and found["category"] == "server"
    with open_server(tmp_path / "gone", sampling={"url": "http://127.0.0.1:9", "reconnect_timeout": 0}) as gone:
        found = gone.result(gone.sample(gone.open_sampler(base_model="tiny-qwen3"), 0, {"max_tokens": 1}))
        assert "no answer from sampling.url http://127.0.0.1:9" in found["error"]


class ScriptedPool:
    """Gives one answer after the other: an exception, or the status and body of a response."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers, self.paths = list(answers), list[str]()

    async def request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Reply:
        self.paths.append(path)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Reply(answer[0], orjson.dumps(answer[1]))


def build_sampling(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Any], reconnect_s: float = 60) -> Any:
    monkeypatch.setattr("prime_rl.training_api.server_sampling.RETRY_S", 0.0)
    sampling = ServerSampling("http://engine:8000", lambda checkpoint: Path("/adapter"), None, 9, reconnect_s)
    monkeypatch.setattr(sampling, "_pool", ScriptedPool(answers))
    return sampling


def build_answer(finish_reason: str) -> tuple[int, Any]:
    return 200, {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": finish_reason}]}


def test_samples_wait_for_a_server_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, adapter = ConnectionError("refused"), cast(Any, SimpleNamespace(path="a"))
    answers = [gone, (503, {}), gone, build_answer("abort"), (429, {}), (404, {}), (200, {}), build_answer("stop")]
    sampling = build_sampling(monkeypatch, answers)

    async def sample() -> list[Output]:
        await sampling.load_adapter(adapter)
        return list(await sampling.generate([GenerationRequest([1], SamplingParams(1), adapter="a")]))

    [output] = asyncio.run(sample())
    assert output.finish_reason == "stop"
    generate, load = "/inference/v1/generate", "/v1/load_lora_adapter"
    assert sampling._pool.paths == [load, *[generate] * 5, load, generate]


@pytest.mark.parametrize(("answer", "message"), [(ConnectionError("refused"), "refused"), ((502, {}), "HTTP 502")])
def test_samples_wait_for_a_limited_time(monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    sampling = build_sampling(monkeypatch, [answer] * 10**5, 0.05)
    with pytest.raises(SamplingServerError, match=message):
        asyncio.run(sampling.generate([GenerationRequest([1], SamplingParams(1))]))
    assert len(sampling._pool.paths) > 1


def test_a_failed_sample_cancels_the_others_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def post(path: str, body: dict[str, Any]) -> Reply:
        if body["sampling_params"]["seed"] == 0:
            return Reply(500, b"out of memory")
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.append("canceled")
            raise
        raise AssertionError

    async def sample() -> None:
        requests = [GenerationRequest([1], SamplingParams(1, seed=seed)) for seed in (1, 2, 0)]
        with pytest.raises(SamplingServerError, match="out of memory"):
            await sampling.generate(requests)
        await asyncio.sleep(0)
        assert ended == ["canceled"] * 2

    sampling = build_sampling(monkeypatch, [])
    monkeypatch.setattr(sampling, "_post", post)
    asyncio.run(sample())


class SlowBackend:
    """Loads an adapter when it is told to, and completes each load, as engines and servers do."""

    def __init__(self) -> None:
        self.adapters: set[str] = set()
        self.begun, self.may_load = asyncio.Event(), asyncio.Event()

    async def load_adapter(self, checkpoint: Any) -> None:
        self.begun.set()

        async def complete() -> None:
            await self.may_load.wait()
            self.adapters.add(checkpoint.path)

        await asyncio.shield(asyncio.create_task(complete()))

    async def remove_adapter(self, path: str) -> None:
        self.adapters.discard(path)

    async def generate(self, requests: Any) -> Any:
        raise AssertionError("the sample was canceled")


def test_an_adapter_of_a_canceled_sample_can_be_unloaded() -> None:
    async def run() -> set[str]:
        backend = SlowBackend()
        sampler = Sampler(backend, max_adapters=1)
        sample = asyncio.create_task(sampler.sample(cast(Any, None), cast(Any, SimpleNamespace(path="a"))))
        await backend.begun.wait()
        sample.cancel()
        await asyncio.sleep(0)
        backend.may_load.set()
        await asyncio.gather(sample, return_exceptions=True)
        assert sample.cancelled() and sampler.num_loaded == 1
        await sampler.unload("a")
        return backend.adapters

    assert asyncio.run(run()) == set()
