"""The inference server over real HTTP: the official client, weight updates in flight, and rejected requests."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import getsource
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from running_server import DEADLINE_S, RunningServer, slow_down, wait_until

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.detokenizer import TokenNames, build_decode
from prime_rl.inference.embedded.loading import build_engine
from prime_rl.inference.engine import GenerationRequest, Output, PromptLogprobs, SamplingParams, StreamUpdate
from prime_rl.inference.openapi import SCORE_REQUEST
from prime_rl.inference.request_parsing import ApiError, parse_request, with_defaults
from prime_rl.inference.responses import ChoiceStream, Writer
from prime_rl.inference.routes.admin import CONTROL_ROUTES
from prime_rl.inference.routes.generate import TOKEN_ROUTES
from prime_rl.inference.routes.group import GROUP_ROUTES
from prime_rl.inference.routes.openai import ROUTES
from prime_rl.inference.routes.score import SCORE_ROUTES, ScoreRequest, pack_scores
from prime_rl.inference.server import bind
from prime_rl.inference.service import build_service, sampling_defaults
from prime_rl.inference.weight_dirs import resolve_allowed
from prime_rl.runtime.machine import check_port_free
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.transport.digests import digest_tensors
from prime_rl.transport.weights import publish_weights
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.manifests import digest_tensor
from rollouts.training.weight_sync import PrimeEngine

MODEL_DIR = resolve_model_dir("tiny-qwen3")
TOKENIZER = load_tokenizer("tiny-qwen3")
CHAT: list[Any] = [{"role": "system", "content": "reverse"}, {"role": "user", "content": "abc"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("outputs"))
    yield running
    running.stop()


def run_client(server: RunningServer, use: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        http = httpx.AsyncClient(trust_env=False)
        async with AsyncOpenAI(base_url=f"{server.root}/v1", api_key="none", http_client=http) as client:
            return await use(client)

    return asyncio.run(main())


def trained_logprobs(model: CausalLM, prompt: list[int], ids: list[int]) -> list[float]:
    """What the trainer computes for `ids` behind `prompt`."""
    tokens = prompt + ids
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
        logprobs = log_softmax(model.logits(hidden).float() / torch.ones(len(tokens), 1))
    rows = torch.arange(len(prompt), len(tokens)) - 1
    return [float(value) for value in logprobs[rows, torch.tensor(ids)]]


def publish(output_dir: Path, step: int) -> CausalLM:
    model = load_decoder(MODEL_DIR, random_init=True, seed=step)
    publish_weights(output_dir / "weights", step, tensor_names(model), MODEL_DIR)
    return model


def test_chat_with_the_official_client(server: RunningServer) -> None:
    async def use(client: AsyncOpenAI) -> Any:
        return await client.chat.completions.create(
            model="tiny-qwen3",
            messages=CHAT,
            max_completion_tokens=6,
            temperature=1.0,
            top_p=1.0,
            n=2,
            seed=7,
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True, "top_k": -1, "min_p": 0.0, "min_tokens": 6},
        )

    answer = run_client(server, use)
    prompt = answer.model_extra["prompt_token_ids"]
    assert TOKENIZER.decode(prompt).startswith("<|im_start|>system\nreverse<|im_end|>\n<|im_start|>user\nabc")
    assert [choice.index for choice in answer.choices] == [0, 1]
    model = load_decoder(MODEL_DIR, random_init=True)
    for choice in answer.choices:
        ids = choice.model_extra["token_ids"]
        assert len(ids) == 6
        assert choice.finish_reason == "length"
        assert choice.model_extra["versions"] == [[0, 0]]
        assert choice.message.content == TOKENIZER.decode(ids, skip_special_tokens=True)
        content = choice.logprobs.content
        assert [entry.token for entry in content] == [TOKENIZER.decode([token]) for token in ids]
        assert all(len(entry.top_logprobs) == 2 for entry in content)
    plain = [entry.logprob for entry in answer.choices[1].logprobs.content]
    # min_tokens takes the end tokens out of the distribution, so these are close to, and above, the trainer's.
    trained = trained_logprobs(model, prompt, answer.choices[1].model_extra["token_ids"])
    assert plain == pytest.approx(trained, abs=0.1)
    assert answer.choices[0].model_extra["token_ids"] != answer.choices[1].model_extra["token_ids"]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + len(prompt)


def test_logprobs_survive_the_wire_bit_for_bit(server: RunningServer) -> None:
    body = {"messages": CHAT, "max_tokens": 12, "seed": 1, "logprobs": True, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
    (choice,) = answer["choices"]
    model = load_decoder(MODEL_DIR, random_init=True)
    trained = trained_logprobs(model, answer["prompt_token_ids"], choice["token_ids"])
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == trained


def test_streaming_equals_non_streaming(server: RunningServer) -> None:
    settings: dict[str, Any] = {"model": "tiny-qwen3", "messages": CHAT, "max_tokens": 20, "seed": 3, "n": 2}
    settings["extra_body"] = {"ignore_eos": True, "stop": ["zz"], "return_token_ids": True}

    async def use(client: AsyncOpenAI) -> Any:
        await client.chat.completions.create(**settings)  # caches the prompt for both
        whole = await client.chat.completions.create(**settings, logprobs=True)
        options = {"include_usage": True}
        stream = await client.chat.completions.create(**settings, logprobs=True, stream=True, stream_options=options)
        return whole, [piece async for piece in stream]

    whole, pieces = run_client(server, use)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[0].model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    assert pieces[-1].usage == whole.usage
    for index in (0, 1):
        mine = [choice for piece in pieces for choice in piece.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        logprobs = [entry for choice in mine if choice.logprobs for entry in choice.logprobs.content]
        assert logprobs == whole.choices[index].logprobs.content
        ids = [token for choice in mine for token in (choice.model_extra.get("token_ids") or [])]
        assert ids == whole.choices[index].model_extra["token_ids"]
        assert mine[-1].finish_reason == whole.choices[index].finish_reason


def test_cached_tokens_count_once_per_prompt(server: RunningServer) -> None:
    prompts = [list(range(40, 60)), list(range(60, 77))]
    body = {"prompt": prompts, "max_tokens": 3, "n": 3, "seed": 0}
    first = server.post("/v1/completions", body).json()["usage"]
    assert first["prompt_tokens"] == 37
    assert "prompt_tokens_details" not in first  # the other choices share a prompt that this request computed
    second = server.post("/v1/completions", body).json()["usage"]
    assert second["prompt_tokens_details"] == {"cached_tokens": 19 + 16}  # all but the last of each
    lines = server.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}).text
    assert json.loads(lines.split("data: ")[-2])["usage"] == second


def test_plain_completions(server: RunningServer) -> None:
    async def use(client: AsyncOpenAI) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True}
        one = await client.completions.create(
            model="tiny-qwen3", prompt="abc", max_tokens=5, logprobs=1, seed=2, extra_body=extra
        )
        several = await client.completions.create(
            model="tiny-qwen3", prompt=[[97, 98, 99], [100]], n=2, max_tokens=5, seed=2, extra_body=extra
        )
        stream = await client.completions.create(
            model="tiny-qwen3", prompt="abc", max_tokens=5, seed=2, stream=True, extra_body=extra
        )
        return one, several, [piece async for piece in stream]

    one, several, pieces = run_client(server, use)
    (choice,) = one.choices
    assert choice.model_extra["prompt_token_ids"] == [97, 98, 99]
    assert len(choice.logprobs.token_logprobs) == len(choice.model_extra["token_ids"]) == 5
    assert [choice.model_extra["prompt_token_ids"] for choice in several.choices] == [[97, 98, 99]] * 2 + [[100]] * 2
    assert several.choices[0].text == choice.text == "".join(piece.choices[0].text for piece in pieces)


def test_tokens_in_are_the_prompt(server: RunningServer) -> None:
    reported = server.post("/tokenize", {"model": "tiny-qwen3", "messages": CHAT, "tools": None}).json()
    assert reported["count"] == len(reported["tokens"])
    assert reported["max_model_len"] == 2048
    body = {"messages": CHAT, "max_tokens": 5, "seed": 4, "return_token_ids": True}
    rendered = server.post("/v1/chat/completions", body).json()
    given = server.post("/v1/chat/completions/tokens", body | {"tokens": reported["tokens"]}).json()
    assert rendered["prompt_token_ids"] == given["prompt_token_ids"] == reported["tokens"]
    assert rendered["choices"][0]["token_ids"] == given["choices"][0]["token_ids"]
    text = server.post("/detokenize", {"tokens": reported["tokens"]}).json()["prompt"]
    without = server.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()["tokens"]
    assert text == TOKENIZER.decode(reported["tokens"])
    assert reported["tokens"][: len(without)] == without
    assert server.post("/tokenize", {"prompt": "hé"}).json()["tokens"] == [104, 195, 169]


def test_models_and_health_report_the_version(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.root}/v1", api_key="none", http_client=httpx.Client(trust_env=False)) as client:
        (card,) = client.models.list().data
    assert (card.id, card.model_extra and card.model_extra["max_model_len"]) == ("tiny-qwen3", 2048)
    expected = {"status": "ok", "version": server.service.version, "exact": True, "dtype": "float32"}
    assert server.http.get("/health").json() == expected


REFUSALS: list[tuple[dict[str, Any], int, str]] = [
    ({"colr": 1}, 400, "unknown field 'colr'"),
    ({"presence_penalty": 3}, 400, "presence_penalty must be a number from -2 to 2"),
    ({"use_beam_search": True}, 400, "use_beam_search = True is not supported"),
    ({"response_format": {"type": "xml"}}, 400, "response_format"),
    ({"temperature": -1}, 400, "temperature must be a number from 0"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 1e-40}, 400, "temperature must be 0 or at least 1e-06"),
    ({"repetition_penalty": 5e-324}, 400, "repetition_penalty must be a number from 1e-06"),
    ({"prompt_temperature": 1e-300}, 400, "prompt_temperature must be a number from 1e-06"),
    ({"logit_bias": {"7": 1e308}}, 400, "logit_bias must be from -1e+06 to 1e+06"),
    ({"top_p": 0}, 400, "top_p must be above 0"),
    ({"max_tokens": 0}, 400, "max_tokens must be an integer of at least 1"),
    ({"n": 1.5}, 400, "n must be an integer"),
    ({"stop": [1]}, 400, "stop must be"),
    ({"logit_bias": {"9999": 1}}, 400, "vocabulary size 320"),
    ({"top_logprobs": 2}, 400, "needs logprobs"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": []}, 400, "messages must be"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role is None"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "maximum context length is 2048"),
    ({"tokens": [1]}, 400, "/v1/chat/completions/tokens"),
    ({"model": "gpt-9"}, 404, "'gpt-9' is not served"),
]


@pytest.mark.parametrize(("change", "status", "words"), REFUSALS)
def test_requests_that_cannot_be_honoured_are_refused(
    server: RunningServer, change: dict[str, Any], status: int, words: str
) -> None:
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **change})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert error["code"] == status


def test_the_server_describes_every_route_and_body(server: RunningServer) -> None:
    """Schemathesis holds the server to the description (`make fuzz`); here: nothing is missing from it."""
    reported = server.http.get("/openapi.json").json()
    routes = [*ROUTES, *GROUP_ROUTES, *TOKEN_ROUTES, *SCORE_ROUTES, *CONTROL_ROUTES]
    described = {(path, method) for path, methods in reported["paths"].items() for method in methods}
    assert described == {(path.replace(":path", ""), method.lower()) for path, method, *_ in routes}
    code = {path: getsource(handler) for path, _, handler, _ in routes}
    reads = {path for path, source in code.items() if "read_json(" in source or "_read(" in source}
    assert reads == {path for path, methods in reported["paths"].items() if "requestBody" in methods.get("post", {})}
    schemas = reported["components"]["schemas"]
    assert schemas["Model"]["enum"][0] == "tiny-qwen3" and schemas["Token"]["maximum"] == 319
    assert set(SCORE_REQUEST) == set(ScoreRequest.__struct_fields__)


def test_harmless_and_neutral_fields_are_accepted(server: RunningServer) -> None:
    body = {"user": "me", "presence_penalty": 0, "response_format": {"type": "text"}, "stream_options": None}
    extra = {"frequency_penalty": 0.0, "metadata": {"a": "b"}, "reasoning_effort": None, "tool_choice": "auto"}
    assert server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **body, **extra}).status_code == 200


def test_errors_reach_the_official_client_as_its_own(server: RunningServer) -> None:
    async def use(client: AsyncOpenAI) -> None:
        long: list[Any] = [{"role": "user", "content": "x" * 2100}]
        with pytest.raises(BadRequestError, match="maximum context length is"):
            await client.chat.completions.create(model="tiny-qwen3", messages=long)
        with pytest.raises(NotFoundError):
            await client.chat.completions.create(model="other", messages=CHAT)

    run_client(server, use)
    assert server.http.post("/v1/chat/completions", content=b"{").json()["error"]["code"] == 400
    assert server.http.get("/v1/nothing").json()["error"]["code"] == 404
    reply = server.http.get("/v1/completions")
    assert (reply.json()["error"]["code"], reply.headers["allow"]) == (405, "POST")
    for odd in ({}, [1], "many"):
        reply = server.post("/v1/completions", {"prompt": "a", "logprobs": odd})
        assert reply.status_code == 400 and "logprobs must be an integer" in reply.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": []}).status_code == 400


def test_an_update_in_flight_drops_nothing_and_marks_the_span(tmp_path: Path) -> None:
    server = RunningServer(tmp_path)
    try:
        new = publish(tmp_path, 3)
        old = load_decoder(MODEL_DIR, random_init=True)
        slow_down(server.service.engine.engine)
        body = {"messages": CHAT, "max_tokens": 400, "ignore_eos": True, "logprobs": True, "return_token_ids": True}

        async def use(client: AsyncOpenAI) -> tuple[Any, Any]:
            async with httpx.AsyncClient(base_url=server.root, timeout=DEADLINE_S, trust_env=False) as http:
                running = asyncio.create_task(http.post("/v1/chat/completions", json=body | {"seed": 9}))
                while server.service.engine.engine.stats().generated_tokens < 20:
                    await asyncio.sleep(0.002)
                reported = await PrimeEngine(server.root).update_weights_from_checkpoint(
                    str(tmp_path / "weights/step_3")
                )
                return reported, (await running).json()

        reported, answer = run_client(server, use)
        assert reported["success"] is True
        assert reported["version"] == 3
        assert server.http.get("/health").json()["version"] == 3
        (choice,) = answer["choices"]
        (zero, at) = [start for start, _ in choice["versions"]]
        assert zero == 0
        assert 20 <= at < 400
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
        assert len(ids) == 400
        assert logprobs[:at] == trained_logprobs(old, prompt, ids)[:at]
        assert logprobs[at:] == trained_logprobs(new, prompt, ids)[at:]
        digests = server.post("/reload_weights", {}).json()
        assert digests["version"] == 0
        assert digests["digests"] != reported["digests"]
        server.service.engine.close()
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        busy = [row for row in rows if row.get("timeline/what") == "generate"]
        assert {row["step"] for row in busy} == {0, 3}
        assert all(row["process"] == "inference" and row["timeline/start"] < row["timeline/end"] for row in busy)
        assert any("time/update_weights" in row for row in rows)
    finally:
        server.stop()


def test_the_step_before_an_update_is_no_part_of_its_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(tmp_path)
    try:
        publish(tmp_path, 3)
        call = server.service.engine.call

        async def call_late(function: Any) -> Any:
            await asyncio.sleep(0.5)  # the engine's step
            return await call(function)

        monkeypatch.setattr(server.service.engine, "call", call_late)
        assert server.post("/update_weights", {"weight_dir": str(tmp_path / "weights/step_3")}).status_code == 200
        server.service.engine.close()
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        (row,) = [row for row in rows if "time/update_weights" in row]
        assert 0 < row["time/update_weights_pause"] < row["time/update_weights"] - 0.5
    finally:
        server.stop()


def test_a_server_survives_rows_that_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, with its busy intervals and the metrics of an update."""
    monkeypatch.setattr("prime_rl.inference.engine.IDLE_GAP_S", 0.0)
    (tmp_path / "metrics.jsonl").mkdir()
    server = RunningServer(tmp_path)
    try:
        for _ in range(3):
            reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
            assert reply.status_code == server.post("/reload_weights", {}).status_code == 200
        assert server.http.get("/health").status_code == 200
    finally:
        server.stop()


def test_requests_run_while_new_weights_are_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RunningServer(tmp_path)
    is_digesting, answered = threading.Event(), threading.Event()

    def digest_late(tensors: Any) -> dict[str, str]:
        is_digesting.set()
        assert answered.wait(DEADLINE_S)
        return digest_tensors(tensors)

    monkeypatch.setattr("prime_rl.inference.embedded.engine.digest_tensors", digest_late)
    try:
        published = publish(tmp_path, 3)
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(server.post, "/update_weights", {"weight_dir": str(tmp_path / "weights/step_3")})
            assert is_digesting.wait(DEADLINE_S)
            reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).json()
            assert reply["choices"][0]["versions"] == [[0, 3]] and not update.done()
            answered.set()
            answer = update.result(DEADLINE_S).json()
        assert answer["digests"] == {name: digest_tensor(tensor) for name, tensor in tensor_names(published).items()}
    finally:
        answered.set()
        server.stop()


def test_unverified_weights_are_not_loaded(server: RunningServer, tmp_path: Path) -> None:
    output_dir = server.config.output_dir
    assert output_dir is not None
    publish(output_dir, 5)
    step = output_dir / "weights" / "step_5"
    before = server.http.get("/health").json()["version"]

    def refused(weight_dir: Path | str, status: int, words: str) -> None:
        reply = server.post("/update_weights", {"weight_dir": str(weight_dir)})
        assert reply.status_code == status
        assert words in reply.json()["error"]["message"]
        assert server.http.get("/health").json()["version"] == before

    data = bytearray((step / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (step / "model.safetensors").write_bytes(data)
    refused(step, 400, "do not match their manifest")
    (step / "model.safetensors").write_bytes(data[:-100])
    refused(step, 400, "cannot be read")
    (step / "STABLE").unlink()
    refused(step, 400, "STABLE")
    refused(output_dir / "weights" / "step_99", 400, "does not exist")
    publish(tmp_path, 5)
    outside = tmp_path / "weights" / "step_5"
    refused(outside, 403, "weight_dirs")
    refused(f"{output_dir}/../{outside.relative_to(tmp_path)}", 403, "weight_dirs")
    (output_dir / "link").symlink_to(outside)
    refused(output_dir / "link", 403, "weight_dirs")
    assert server.post("/update_weights", {}).status_code == 400
    assert server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}).status_code == 200
    with pytest.raises(PermissionError):
        resolve_allowed(str(outside), [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server: RunningServer, stream: bool) -> None:
    before = server.metric("generated_tokens_total")
    body = {"messages": CHAT, "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), DEADLINE_S) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        raw.sendall(head.encode() + data)
        wait_until(lambda: server.metric("requests_running") == 1, "the request to run")
    wait_until(lambda: server.metric("requests_running") == 0, "the request to be cancelled")
    assert server.metric("generated_tokens_total") - before < 2000


def test_many_requests_at_once_wait_for_a_slot() -> None:
    server = RunningServer(None, max_batch_size=4)
    try:

        async def use(client: AsyncOpenAI) -> list[Any]:
            create = client.chat.completions.create
            tasks = [create(model="tiny-qwen3", messages=CHAT, max_tokens=5, seed=i) for i in range(24)]
            return await asyncio.gather(*tasks)

        assert len(run_client(server, use)) == 24
        assert server.metric("requests_finished_total") == 24
        assert server.post("/update_weights", {"weight_dir": "/tmp"}).status_code == 403
    finally:
        server.stop()


def test_a_key_guards_every_route_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-word")
    server = RunningServer(None, server={"api_key_var": "MY_KEY"})
    try:
        assert server.post("/v1/chat/completions", {"messages": CHAT}).status_code == 401
        assert server.post("/update_weights", {"weight_dir": "/tmp"}).status_code == 401
        assert server.http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert server.http.get("/v1/models", headers={"authorization": "Bearer secret-word"}).status_code == 200
        for path in ("/metrics", "/openapi.json", "/is_paused"):
            assert server.http.get(path).status_code == 401
        assert server.http.get("/health").status_code == 200
    finally:
        server.stop()
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ValueError, match=r"api_key_var names MY_KEY"):
        build_service(server.config)


def test_a_failed_engine_answers_503(tmp_path: Path) -> None:
    server = RunningServer(None)
    try:
        slow_down(server.service.engine.engine)
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}
        running = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
        answers: list[httpx.Response] = []
        running.start()
        wait_until(lambda: server.metric("requests_running") == 1, "the request to run")
        server.service.engine._thread._post(lambda: 1 // 0)
        running.join(DEADLINE_S)
        assert answers[0].status_code == 503
        assert server.http.get("/health").status_code == 503
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
    finally:
        server.stop()


def test_cache_follows_the_config() -> None:
    shared = {}
    for enable_prefix_caching in (True, False):
        cache = {"max_tokens": 4096, "max_prefix_cache_tokens": 512, "enable_prefix_caching": enable_prefix_caching}
        model = {"name": "tiny-qwen3", "debug": {"random_init": True, "num_layers": 1}, "max_model_len": 128}
        config = InferenceConfig.model_validate({"model": model, "cache": cache})
        engine = build_engine(config, resolve_model_dir("tiny-qwen3"), lambda ids: "")
        assert engine.stats().cache_size == 4096 + 512
        for _ in range(2):
            engine.add(GenerationRequest([5, 6, 7] * 20, SamplingParams(max_tokens=1)))
            while engine.has_work():
                engine.step()
        shared[enable_prefix_caching] = engine.stats().shared_prompt_tokens
    assert shared[True] > shared[False] == 0


def test_wrong_configs_are_one_sentence() -> None:
    def config(**model: Any) -> InferenceConfig:
        return InferenceConfig.model_validate(
            {"model": {"name": "tiny-qwen3", "debug": {"random_init": True}, **model}}
        )

    with pytest.raises(ValueError, match=r"max_model_len is 9999.*at most 2048"):
        build_service(config(max_model_len=9999))
    with pytest.raises(ValueError, match=r"model\.debug\.random_init"):
        build_service(InferenceConfig.model_validate({"model": {"name": "tiny-qwen3"}}))
    with pytest.raises(ValueError, match=r"model\.device"):
        build_service(config(device="abacus"))
    with pytest.raises(ValueError, match=r"model\.name = 'base' is reserved for the initial weights: write \./base"):
        config(name="base")
    for key in ("tp", "dp"):
        with pytest.raises(ValueError, match="one device"):
            InferenceConfig.model_validate({"backend": "embedded", "parallel": {key: 2}})


def test_used_port_is_reported_before_loading() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "prime_rl.inference.server", "--server.port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ.copy())
    assert done.returncode == 2
    assert f"server.port {port}" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_a_server_that_loads_its_model_has_its_port() -> None:
    with bind("127.0.0.1", 0) as loading:
        port = loading.getsockname()[1]
        for use in (check_port_free, bind):
            with pytest.raises(ValueError, match=f"port {port}"):
                use("127.0.0.1", port)


def build_writer() -> Writer:
    return Writer("m", build_decode(TOKENIZER), TokenNames(TOKENIZER))


def test_tool_calls_are_parsed_and_buffered_in_streams() -> None:
    parsed = parse_request({"tools": [TOOL]}, chat=True, max_new_tokens=99, vocab=320, default_seed=lambda: 0)
    text = 'ok <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False)
    request = GenerationRequest([1], SamplingParams(max_tokens=99))
    output = Output(request, ids, [-1.0] * len(ids), [], [(0, 0)], "stop")
    (choice,) = build_writer().chat([1], [output], parsed)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "ok "
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    stream = ChoiceStream(build_writer(), 0, parsed, chat=True)
    pieces = [stream.progress(StreamUpdate(request, i, [token], [-1.0], [])) for i, token in enumerate(ids[:-1])]
    last = stream.end(output)
    assert "".join(piece["delta"].get("content", "") for piece in [*pieces, last]) == "ok "
    assert last["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert last["finish_reason"] == "tool_calls"


def test_an_unfinished_tool_call_stays_text() -> None:
    parsed = parse_request({"tools": [TOOL]}, chat=True, max_new_tokens=99, vocab=320, default_seed=lambda: 0)
    ids = TOKENIZER.encode('<tool_call>{"name": "a', add_special_tokens=False)
    output = Output(
        GenerationRequest([1], SamplingParams(max_tokens=9)), ids, [-1.0] * len(ids), [], [(0, 0)], "length"
    )
    (choice,) = build_writer().chat([1], [output], parsed)["choices"]
    assert choice["message"] == {"role": "assistant", "content": '<tool_call>{"name": "a'}
    broken = Output(output.request, [], [], [], [(0, 0)], "error", "nan")
    with pytest.raises(ApiError, match="generation failed"):
        build_writer().chat([1], [broken], parsed)


def test_aborted_scoring_is_answered_503() -> None:
    """Scores of the first chunks of a prompt are not those of its last tokens."""
    request = GenerationRequest([1, 2, 3], SamplingParams(max_tokens=9, prompt_logprobs=0))
    some, whole = (PromptLogprobs([-1.0] * n, [[]] * n, [0.5] * n) for n in (1, 2))
    parsed = parse_request({"prompt_logprobs": 0}, chat=False, max_new_tokens=9, vocab=320, default_seed=lambda: 0)
    for scores in (None, some):
        aborted = Output(request, [], [], [], [(0, 0)], "abort", prompt_logprobs=scores)
        for build in (pack_scores, lambda output: build_writer().completion([[1, 2, 3]], [output], parsed)):
            with pytest.raises(ApiError, match="aborted") as refusal:
                build(aborted)
            assert refusal.value.status == 503 and refusal.value.retry_after_s
    begun = Output(request, [97], [-1.0], [], [(0, 0)], "abort", prompt_logprobs=whole)
    (choice,) = build_writer().completion([[1, 2, 3]], [begun], parsed)["choices"]
    assert choice["text"] == "a" and len(choice["prompt_logprobs"]) == 3


def test_only_configured_sampling_applies_to_requests() -> None:
    """Other values stay those of the API, or of the model's generation_config.json."""
    assert sampling_defaults(InferenceConfig()) == {}
    given = {"temperature": 0.5, "max_tokens": None, "extra_body": {"min_tokens": 3}}
    config = InferenceConfig.model_validate({"sampling": given})
    assert sampling_defaults(config) == {"temperature": 0.5, "min_tokens": 3}


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        ({"min_tokens": 16}, {"max_tokens": 8}, (8, 8)),
        ({"min_tokens": 16}, {"max_tokens": 0, "prompt_logprobs": 0}, (0, 0)),
        ({"min_tokens": 20}, {}, (16, 16)),
        ({}, {"max_tokens": None}, (0, 99)),
        ({"min_tokens": 4, "max_tokens": 9}, {"min_tokens": 12}, (12, 12)),
        ({"min_tokens": 4}, {"max_tokens": 9}, (4, 9)),
    ],
)
def test_default_numbers_of_tokens_fit_the_request(
    defaults: dict[str, int], given: dict[str, int | None], expected: tuple[int, int]
) -> None:
    body = with_defaults(given, defaults, chat=False)
    params = parse_request(body, chat=False, max_new_tokens=99, vocab=320, default_seed=lambda: 0).params
    assert (params.min_tokens, params.max_tokens) == expected
    with pytest.raises(ApiError, match="exceeds max_tokens"):
        wrong = with_defaults({"max_tokens": 8, "min_tokens": 9}, defaults, chat=False)
        parse_request(wrong, chat=False, max_new_tokens=99, vocab=320, default_seed=lambda: 0)
