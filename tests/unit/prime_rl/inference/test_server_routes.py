"""Routes other than plain generation: scoring, tokens in and out, pause, adapters, limits; sync and async clients."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from loguru import logger
from openai import OpenAI, RateLimitError
from running_server import DEADLINE_S, RunningServer, wait_until
from starlette.requests import Request
from starlette.responses import Response
from tokenizers.processors import TemplateProcessing

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.loading import WeightReader
from prime_rl.inference.engine import EngineStats, GenerationRequest
from prime_rl.inference.initial_weights import prepare_model_dir
from prime_rl.inference.responses import Writer
from prime_rl.inference.routes import openai as routes
from prime_rl.inference.routes import score as score_route
from prime_rl.inference.server import choose_backend
from rollouts.kernels import native

CHAT: list[Any] = [{"role": "user", "content": "abc"}]
PROMPT = [97, 98, 99, 100]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("outputs"), model_options={"reasoning_parser": "think"})
    yield running
    running.stop()


def client_of(server: RunningServer) -> OpenAI:
    http = httpx.Client(trust_env=False)
    return OpenAI(base_url=f"{server.root}/v1", api_key="none", http_client=http, max_retries=0)


def test_the_sync_client_gets_the_same_answer_whole_and_streamed(server: RunningServer) -> None:
    with client_of(server) as client:
        settings: dict[str, Any] = {"model": "tiny-qwen3", "messages": CHAT, "max_tokens": 9, "seed": 5}
        whole = client.chat.completions.create(**settings)
        pieces = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
        text = client.completions.create(model="tiny-qwen3", prompt="abc", max_tokens=9, seed=5, logprobs=2)
        parts = list(client.completions.create(model="tiny-qwen3", prompt="abc", max_tokens=9, seed=5, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage
    assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None and logprobs.text_offset[0] == 0


def test_token_ids_in_and_out(server: RunningServer) -> None:
    params = {"max_tokens": 6, "seed": 2, "logprobs": 1, "ignore_eos": True, "temperature": 1.0, "detokenize": False}
    body = {"model": "tiny-qwen3", "token_ids": PROMPT, "sampling_params": params, "return_token_ids": True}
    reported = server.post("/inference/v1/generate", body).json()
    same = {"prompt": PROMPT, "max_tokens": 6, "seed": 2, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}
    (plain,) = server.post("/v1/completions", same).json()["choices"]
    (choice,) = reported["choices"]
    assert (choice["token_ids"], reported["prompt_token_ids"]) == (plain["token_ids"], PROMPT)
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == plain["logprobs"]["token_logprobs"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(entry["top_logprobs"][0]["rank"] == 1 for entry in content)
    version = server.service.version
    assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 6}]
    assert choice["finish_reason"] == "length"
    with server.http.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    ids = [token for event in events for piece in event["choices"] for token in piece["token_ids"]]
    assert ids == choice["token_ids"] and events[0]["prompt_token_ids"] == PROMPT
    text = server.post("/inference/v1/generate", {**body, "output_mode": "text"}).json()["choices"][0]["text"]
    assert text == plain["text"]
    unbounded = {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": [plain["token_ids"][0]], "seed": 2}}
    (stopped,) = server.post("/inference/v1/generate", unbounded).json()["choices"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", plain["token_ids"][0])
    filtered = {"max_tokens": 6, "seed": 2, "ignore_eos": True, "top_k": 5, "return_sampling_support": True}
    (plain,) = server.post("/v1/completions", {"prompt": PROMPT, **filtered}).json()["choices"]
    (choice,) = server.post("/inference/v1/generate", body | {"sampling_params": filtered}).json()["choices"]
    assert choice["sampling_support"] == plain["sampling_support"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"features": {}}, "'features' is not supported"),
        ({"output_mode": "audio"}, "output_mode"),
        ({"output_mode": "text", "stream": True}, "does not support streaming"),
        ({"token_ids": [-1]}, "token_ids must be below"),
        ({"sampling_params": None}, "sampling_params must be an object"),
        ({"sampling_params": {"structured_outputs": {"json": 1}}}, "unknown field 'structured_outputs'"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "skip_reading_prefix_cache is not supported"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo is not supported"),
        ({"sampling_params": {"prompt": "a"}}, "sampling_params.prompt is not supported"),
    ],
)
def test_token_requests_that_cannot_be_honoured_are_refused(
    server: RunningServer, change: dict[str, Any], words: str
) -> None:
    reply = server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}, **change})
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_large_scores_are_packed_beside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB of a teacher's distributions would delay all other requests by many seconds."""
    threads: list[str] = []
    pack = score_route.pack_scores

    def record(output: Any) -> Any:
        threads.append(threading.current_thread().name)
        return pack(output)

    monkeypatch.setattr(score_route, "pack_scores", record)
    for tokens in (PROMPT[:2], PROMPT * 4):
        assert server.post("/score", {"tokens": tokens, "top": -1}).status_code == 200
    assert [name.startswith("requests") for name in threads] == [False, True]


def test_a_prompt_is_scored_as_it_would_be_sampled(server: RunningServer) -> None:
    drawn = server.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 7, "seed": 3, "logprobs": 0, "ignore_eos": True, "return_token_ids": True},
    ).json()["choices"][0]
    tokens = PROMPT + drawn["token_ids"]
    scored = server.post("/v1/completions", {"prompt": tokens, "max_tokens": 0, "prompt_logprobs": 2}).json()
    rows = scored["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(tokens)
    own = [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:], strict=True)]
    assert own[len(PROMPT) - 1 :] == drawn["logprobs"]["token_logprobs"]
    assert all(len(row) in (2, 3) and min(e["rank"] or 9 for e in row.values()) == 1 for row in rows[1:])
    assert all(0 <= mass <= 1 for mass in scored["choices"][0]["prompt_tail_mass"][1:])
    chat = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_echo_puts_the_prompt_before_the_completion(server: RunningServer) -> None:
    body = {"prompt": "abcd", "max_tokens": 3, "seed": 1, "logprobs": 1, "echo": True, "ignore_eos": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    (plain,) = server.post("/v1/completions", {**body, "echo": False}).json()["choices"]
    assert choice["text"] == "abcd" + plain["text"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][4:] == plain["logprobs"]["token_logprobs"]
    assert logprobs["tokens"][:4] == list("abcd") and logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert server.post("/v1/completions", {**body, "stream": True}).status_code == 400


@pytest.mark.parametrize("num_top", [0, 3])
def test_echo_comes_with_the_prompt_log_probs_asked_for(server: RunningServer, num_top: int) -> None:
    body = {"prompt": "abcd", "max_tokens": 1, "logprobs": 2, "echo": True, "seed": 1}
    (plain,) = server.post("/v1/completions", body).json()["choices"]
    (both,) = server.post("/v1/completions", body | {"prompt_logprobs": num_top}).json()["choices"]
    assert both["logprobs"] == plain["logprobs"] and "prompt_logprobs" not in plain
    rows = both["prompt_logprobs"]
    assert rows[0] is None and all(len(row) >= num_top for row in rows[1:])
    own = [row[str(token)]["logprob"] for row, token in zip(rows[1:], PROMPT[1:], strict=True)]
    assert own == both["logprobs"]["token_logprobs"][1:4]


def test_echo_leaves_out_what_the_tokenizer_adds(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.service.tokenizer
    mark, id = tokenizer.eos_token, tokenizer.eos_token_id
    added = TemplateProcessing(single=f"{mark} $A {mark}", special_tokens=[(mark, id)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", added)
    body = {"prompt": ["ab", [id, 99]], "max_tokens": 1, "logprobs": 0, "echo": True, "return_token_ids": True}
    text, ids = server.post("/v1/completions", body).json()["choices"]
    assert text["prompt_token_ids"] == [id, 97, 98, id] and text["text"].startswith("ab")
    assert text["logprobs"]["text_offset"] == [0, 0, 1, 2, 2]
    assert ids["text"].startswith(f"{mark}c") and ids["logprobs"]["text_offset"][1] == len(mark)


def test_alternatives_with_equal_text_keep_the_likeliest() -> None:
    parts = {3: ("\ufffd", [0xE2, 0x82]), 4: ("\ufffd", [0xF0])}
    names: Any = {0: ("a", [97]), 1: ("a", [97]), 2: ("b", [98]), **parts}
    tops = [[(0, -1.0), (1, -2.0)], [(2, -1.0), (3, -1.5), (4, -3.0)]]
    drawn: Any = SimpleNamespace(token_ids=[3, 2], logprobs=[-2.5, -1.0], top_logprobs=tops)
    asked: Any = SimpleNamespace(names_as_ids=False)
    found = Writer("m", lambda ids, skip: "", names).completion_logprobs(drawn, asked, [0, 0])
    assert found["tokens"] == ["bytes:\\xe2\\x82", "b"] and found["text_offset"] == [0, 0]
    assert found["top_logprobs"] == [
        {"a": -1.0, "bytes:\\xe2\\x82": -2.5},
        {"b": -1.0, "bytes:\\xe2\\x82": -1.5, "bytes:\\xf0": -3.0},
    ]


def test_a_prompt_comes_back_without_a_completion(server: RunningServer) -> None:
    (choice,) = server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 0, "echo": True}).json()["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("abcd", None, "length")


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
def test_alternatives_for_others_change_no_response(server: RunningServer, path: str, num_top: int) -> None:
    """A request beside one that wants more alternatives of each token, for a part of the time."""
    settings = {"max_tokens": 40, "seed": 3, "ignore_eos": True, "temperature": 1.0}
    body: dict[str, Any] = {"prompt": PROMPT, **settings, "logprobs": num_top}
    if path.endswith("chat/completions"):
        body = {"messages": CHAT, **settings, "logprobs": True, "top_logprobs": num_top}
    elif path.endswith("generate"):
        body = {"token_ids": PROMPT, "sampling_params": {**settings, "logprobs": num_top}}
    alone = server.post(path, body).json()["choices"]
    found: list[Any] = []
    server.post("/pause", {})
    threads = [threading.Thread(target=lambda: found.append(server.post(path, body)))]
    for max_tokens in (1, 9):
        other = {"prompt": PROMPT, "max_tokens": max_tokens, "logprobs": 5, "ignore_eos": True}
        threads.append(threading.Thread(target=server.post, args=("/v1/completions", other)))
    for thread in threads:
        thread.start()
    wait_until(lambda: server.service.engine.num_requests == len(threads), "all requests")
    server.post("/resume", {})
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found[0].status_code == 200 and found[0].json()["choices"] == alone


def test_prompts_of_a_request_have_their_own_limits(server: RunningServer) -> None:
    length = server.service.max_model_len
    body = {"max_tokens": 2 * length, "ignore_eos": True, "seed": 1, "temperature": 0, "return_token_ids": True}
    prompts = [PROMPT * (length // 8), PROMPT * (length // 4 - 1)]
    choices = server.post("/v1/completions", {"prompt": prompts, **body}).json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [length - len(prompt) for prompt in prompts]
    for prompt, choice in zip(prompts, choices, strict=True):
        (alone,) = server.post("/v1/completions", {"prompt": prompt, **body}).json()["choices"]
        assert alone["token_ids"] == choice["token_ids"]
    reply = server.post("/v1/completions", {"prompt": [PROMPT, PROMPT * length], **body})
    assert reply.status_code == 400 and "maximum context length" in reply.json()["error"]["message"]


def test_without_a_seed_each_prompt_is_drawn_by_its_own(server: RunningServer) -> None:
    body = {"prompt": [PROMPT] * 3, "max_tokens": 12, "ignore_eos": True}
    for given, num_texts in (({}, 3), ({"seed": 5}, 1)):
        choices = server.post("/v1/completions", body | given).json()["choices"]
        assert len({choice["text"] for choice in choices}) == num_texts


def test_streamed_completions_report_what_whole_ones_do(server: RunningServer) -> None:
    """Offsets while text waits for a stop string, and the ids of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 1, "stop": ["z" * 18], "seed": 1, "ignore_eos": True}
    body |= {"return_token_ids": True, "n": 2}
    whole = server.post("/v1/completions", body).json()["choices"]
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    for index, choice in enumerate(whole):
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == index]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for piece in pieces for x in piece["logprobs"][name]] == choice["logprobs"][name]
        assert [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece] == [PROMPT]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]


def test_biases_and_penalties_steer(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    forced = server.post("/v1/completions", {**body, "logit_bias": {"120": 100}}).json()["choices"][0]
    assert forced["token_ids"] == [120] * 4
    steered = {**body, "logit_bias": {"120": 100, "121": 99}, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    assert set(server.post("/v1/completions", steered).json()["choices"][0]["token_ids"]) == {120, 121}


def test_more_requests_that_cannot_be_honoured_are_refused(server: RunningServer) -> None:
    def refused(body: dict[str, Any], words: str, path: str = "/v1/completions", status: int = 400) -> None:
        reply = server.post(path, {"prompt": PROMPT, **body})
        assert reply.status_code == status, reply.text
        assert words in reply.json()["error"]["message"] and "\n" not in reply.json()["error"]["message"]

    refused({"max_tokens": 0}, "max_tokens must be an integer of at least 1")
    refused({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "set n to 1")
    refused({"prompt_logprobs": -1}, "prompt_logprobs must be an integer of at least 0")
    refused({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs does not support streaming")
    refused({"min_tokens": 20}, "min_tokens = 20 exceeds max_tokens = 16")
    refused({"stream_options": {"include_usage": True}}, "stream_options requires stream")
    refused({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats")
    refused({"guided_json": {}}, "unknown field 'guided_json'")
    refused({"host": "x"}, "loads weights from directories", "/init_broadcaster", 409)
    refused({"lora_name": "x"}, "no adapter 'x' is loaded", "/v1/unload_lora_adapter", 404)
    refused({"lora_name": "tiny-qwen3"}, "a unique name", "/v1/load_lora_adapter")
    refused({"lora_name": "x", "lora_path": "/etc"}, "weight_dirs", "/v1/load_lora_adapter", 403)


@pytest.mark.skipif(native.library() is None, reason="needs the CPU kernels")
def test_metrics_count_drafted_and_accepted_tokens(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 5, "ignore_eos": True}
    first = server.post("/v1/completions", body).json()["choices"][0]["text"]
    names = ("accepted_tokens_total", "drafted_tokens_total")
    before = [server.metric(name) for name in names]
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == first
    accepted, drafted = (server.metric(name) - held for name, held in zip(names, before, strict=True))
    assert 30 < accepted <= drafted < 80


@pytest.mark.usefixtures("slow_engine")
def test_pause_freezes_and_resume_continues(server: RunningServer) -> None:
    def ask() -> None:
        answers.append(server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}))

    answers: list[httpx.Response] = []
    before = server.metric("generated_tokens_total")
    running = threading.Thread(target=ask)
    running.start()
    wait_until(lambda: server.metric("generated_tokens_total") > before, "the first token")
    assert server.post("/pause", {}).json()["status"] == "paused"
    held = server.metric("generated_tokens_total")
    assert server.http.get("/is_paused").json() == {"is_paused": True} and server.metric("paused") == 1
    assert server.http.get("/health").json()["is_paused"] is True
    assert server.metric("generated_tokens_total") == held and server.metric("requests_running") == 1
    assert server.post("/pause?mode=wait", {}).status_code == 400
    assert server.post("/resume", {}).json()["status"] == "resumed"
    assert "is_paused" not in server.http.get("/health").json()
    running.join(DEADLINE_S)
    assert answers.pop().json()["usage"]["completion_tokens"] == 300
    running = threading.Thread(target=ask)
    running.start()
    wait_until(lambda: server.metric("requests_running") == 1, "the request to run")
    server.post("/pause?mode=abort", {})
    running.join(DEADLINE_S)
    server.post("/resume", {})
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_that_is_aborted_is_empty(server: RunningServer, stream: bool) -> None:
    """As a running one, it ends with what it has: nothing."""
    texts: list[str] = []
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 9}, "stream": stream}
    waiting = threading.Thread(target=lambda: texts.append(server.post("/inference/v1/generate", body).text))
    server.post("/pause", {})
    waiting.start()
    wait_until(lambda: server.metric("requests_waiting") == 1, "the request to wait")
    server.post("/pause?mode=abort", {})
    waiting.join(DEADLINE_S)
    server.post("/resume", {})
    [choice] = json.loads(texts[0].split("\n")[0].removeprefix("data: "))["choices"]
    assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])


def test_restarted_server_rejects_requests_until_weights_arrive(server: RunningServer) -> None:
    server.service.awaits_weights = True
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert reply.status_code == 503 and reply.headers["retry-after"] and "wait_for_weights" in reply.text
    numerics = {"exact": True, "dtype": "float32"}
    assert server.http.get("/health").json() == {"status": "ok", "version": 0, "awaits_weights": True} | numerics
    assert server.post("/reload_weights", {}).status_code == 200
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}).status_code == 200
    assert "awaits_weights" not in server.http.get("/health").json()


def test_a_hang_report_names_a_load(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, read = threading.Event(), WeightReader.read_base

    def hang(reader: WeightReader) -> Any:
        go_on.wait(DEADLINE_S)
        return read(reader)

    monkeypatch.setattr(WeightReader, "read_base", hang)
    loading = threading.Thread(target=lambda: server.post("/reload_weights", {}))
    loading.start()
    wait_until(lambda: server.service.describe_wait().what == "loads weights", "the load")
    go_on.set()
    loading.join(DEADLINE_S)
    assert server.service.describe_wait().what == "is idle"


def test_full_queue_returns_429() -> None:
    server = RunningServer(None, max_batch_size=1, server={"max_queued_requests": 1})
    try:
        server.post("/pause", {})
        body = {"prompt": PROMPT, "max_tokens": 2}
        requesting = [threading.Thread(target=lambda: server.post("/v1/completions", body)) for _ in range(2)]
        for thread in requesting:
            thread.start()
        wait_until(lambda: server.service.engine.num_requests == 2, "two requests")
        reply = server.post("/v1/completions", body)
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["type"] == "rate_limit_error"
        with client_of(server) as client, pytest.raises(RateLimitError):
            client.completions.create(model="tiny-qwen3", prompt="x", stream=True)
        server.post("/resume", {})
        for thread in requesting:
            thread.join(DEADLINE_S)
        assert server.post("/v1/completions", body).status_code == 200
    finally:
        server.stop()


def test_server_defaults_apply_to_missing_fields() -> None:
    sampling = {"max_tokens": 3, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    server = RunningServer(None, sampling=sampling)
    try:
        usage = server.post("/v1/chat/completions", {"messages": CHAT}).json()["usage"]
        assert usage["completion_tokens"] == 3
        usage = server.post("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 5}).json()["usage"]
        assert usage["completion_tokens"] == 5
        answers = [server.post("/v1/completions", {"prompt": PROMPT, "seed": i}).json() for i in (1, 2)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"], "temperature 0"
    finally:
        server.stop()


def test_defaults_of_chat_templates_apply_to_chats_alone() -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    server = RunningServer(None, sampling={"max_tokens": 3, "extra_body": off})
    template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}"
    server.service.tokenizer.chat_template = template
    try:
        prompts = {}
        for name, given in (("default", {}), ("same", off), ("other", {"chat_template_kwargs": {"a": 1}})):
            body = {"messages": CHAT, "return_token_ids": True, **given}
            prompts[name] = server.post("/v1/chat/completions", body).json()["prompt_token_ids"]
            assert server.post("/tokenize", {"messages": CHAT, **given}).json()["tokens"] == prompts[name]
        assert prompts["default"] == prompts["same"] != prompts["other"]
        group = {"messages": CHAT, "seeds": [1], "return_token_ids": True}
        line = server.post("/v1/chat/completions/group", group).json()
        assert line["answer"]["prompt_token_ids"] == prompts["same"]
        assert server.post("/v1/completions", {"prompt": PROMPT}).status_code == 200
    finally:
        server.stop()


def test_without_a_key_only_this_machine_changes_the_server(server: RunningServer) -> None:

    from prime_rl.inference.request_parsing import ApiError
    from prime_rl.inference.routes.openai import check_access

    def request(host: str) -> Request:
        return Request({"type": "http", "client": (host, 1), "headers": [], "path": "/pause", "method": "POST"})

    check_access(None, request("127.0.0.1"), "control")
    check_access(None, request("10.0.0.7"), "api")
    with pytest.raises(ApiError, match="this machine only"):
        check_access(None, request("10.0.0.7"), "control")
    with pytest.raises(ApiError, match="bearer token"):
        check_access("key", request("127.0.0.1"), "control")


def test_disconnect_during_the_body_is_answered_499(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the client has left, the server has not failed: no status 500, which comes with a traceback in the log."""
    statuses: list[int] = []
    build_error_response = routes.build_error_response

    def record(request: Request, error: Exception) -> Response:
        reply = build_error_response(request, error)
        statuses.append(reply.status_code)
        return reply

    monkeypatch.setattr(routes, "build_error_response", record)
    host, port = server.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: bool(statuses), "the server to notice")
    assert statuses == [499]


def test_which_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(has_vllm: bool, gpus: list[int], **config: Any) -> str:
        monkeypatch.setattr("prime_rl.runtime.machine.find_gpus", lambda: gpus)
        monkeypatch.setattr("prime_rl.runtime.machine.is_installed", lambda name: has_vllm)
        return choose_backend(InferenceConfig.model_validate(config))

    assert chosen(True, []) == chosen(False, [0]) == "embedded"
    assert chosen(True, [0]) == chosen(True, [], backend="vllm") == "vllm"
    assert chosen(True, [0], exact=True) == chosen(True, [0], model={"device": "cuda:0"}) == "embedded"
    with pytest.raises(ValueError, match=r"pip install 'prime-rl\[vllm\]'"):
        chosen(False, [0], backend="vllm")
    with pytest.raises(ValueError, match=r"parallel.tp = 2: the embedded engine uses one device"):
        chosen(False, [0], parallel={"tp": 2})
    with pytest.raises(ValueError, match="speculation = false is for the embedded engine"):
        chosen(True, [0], speculation=False)
    with pytest.raises(ValueError, match="option of vLLM"):
        chosen(True, [], vllm={"enforce_eager": True})
    with pytest.raises(ValueError, match="exact = true"):
        InferenceConfig.model_validate({"backend": "vllm", "exact": True})
    with pytest.raises(ValueError, match=r"cache.max_tokens = 4096 is for the embedded engine"):
        InferenceConfig.model_validate({"backend": "vllm", "cache": {"max_tokens": 4096}})
    with pytest.raises(ValueError, match=r"speculation = false is for the embedded engine"):
        InferenceConfig.model_validate({"backend": "vllm", "speculation": False})
    with pytest.raises(ValueError, match=r"vLLM's is --vllm.shutdown-timeout"):
        InferenceConfig.model_validate({"backend": "vllm", "server": {"drain_timeout": 9}})
    sglang = {"backend": "sglang", "sglang": {"base_url": "http://127.0.0.1:1"}}
    with pytest.raises(ValueError, match=r"speculation with SGLang: set it on the SGLang server"):
        InferenceConfig.model_validate({**sglang, "speculation": False})
    int8 = {"quantization": "int8"}
    assert chosen(True, [0], model=int8) == "embedded"
    with pytest.raises(ValueError, match="with exact = true"):
        chosen(True, [], model=int8, exact=True)
    with pytest.raises(ValueError, match=r"model.quantization is for the embedded engine"):
        InferenceConfig.model_validate({"backend": "vllm", "model": int8})


def test_adapter_as_model_needs_the_embedded_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would load the adapter's matrices as those of a model, and fail."""
    monkeypatch.setattr("prime_rl.runtime.machine.find_gpus", lambda: [0])
    monkeypatch.setattr("prime_rl.runtime.machine.is_installed", lambda name: True)
    model = {"name": str(tmp_path)}
    (tmp_path / "config.json").write_text("{}")
    assert choose_backend(InferenceConfig.model_validate({"model": model})) == "vllm"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert choose_backend(InferenceConfig.model_validate({"model": model})) == "embedded"
    with pytest.raises(ValueError, match="is a LoRA adapter, which only the embedded engine merges"):
        prepare_model_dir(InferenceConfig.model_validate({"model": model, "backend": "vllm"}))


def test_engine_validates_before_the_response_starts(server: RunningServer) -> None:
    class Full:
        def check(self, request: GenerationRequest) -> None:
            raise ValueError("not this one")

        def stats(self) -> EngineStats:
            return EngineStats()

    real, server.service.engine.engine = server.service.engine.engine, Full()  # type: ignore[assignment]
    try:
        server.service.engine.engine.max_model_len = 99
        server.service.engine.engine.adapters = dict
        reply = server.post("/v1/completions", {"prompt": PROMPT, "stream": True})
    finally:
        server.service.engine.engine = real
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "not this one"


def test_requests_unfinished_at_the_stop_get_503(caplog: pytest.LogCaptureFixture) -> None:
    server = RunningServer(None, server={"drain_timeout": 0.1})
    server.post("/pause", {})
    body = {"prompt": "ab", "max_tokens": 2}
    lines = list[str]()
    sink = logger.add(lines.append, format="{level} {message}")
    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=server.root, timeout=DEADLINE_S, trust_env=False) as http:
        whole, streamed = (
            pool.submit(http.post, "/v1/completions", json=body | {"stream": stream}) for stream in (False, True)
        )
        wait_until(lambda: server.service.engine.num_requests == 2, "both requests")
        server.stop()
        reply, stream = whole.result(DEADLINE_S), streamed.result(DEADLINE_S)
    logger.remove(sink)
    assert reply.status_code == 503 and reply.headers["retry-after"]
    assert reply.json()["error"]["message"] == "the server is stopping"
    assert "the server is stopping" in stream.text.splitlines()[-2] and "[DONE]" not in stream.text
    assert "INFO Stopping after 0.1 s (server.drain_timeout): 2 unfinished\n" in lines
    assert not [line for line in lines if line.startswith("ERROR")] and not caplog.records
