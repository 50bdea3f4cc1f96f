"""`inference.backend = "sglang"`: the gateway to a fake SGLang server, compared with the embedded engine."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_sglang import FakeSGLang
from pydantic import ValidationError
from running_server import RunningServer, slow_down, wait_until

from prime_rl.client.scoring import MIN_TAIL_MASS
from prime_rl.config import RLConfig
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.engine import GenerationRequest, SamplingParams
from prime_rl.inference.sglang.protocol import MalformedResponse, check_params, read_output, read_scores
from prime_rl.launcher.gpus import assign_visible_gpus
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.transport.weights import publish_weights
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.steps import step_path

PROMPT = [104, 101, 108, 108, 111, 32, 119]
CHAT = [{"role": "user", "content": "hello"}]
CLOSE = 1e-5


@dataclass
class Fleet:
    """A gateway and its server, the embedded engine for comparison, and published weights for all."""

    fake: FakeSGLang
    gateway: RunningServer
    ours: RunningServer
    root: Path

    def update(self, step: int, server: RunningServer | None = None, name: str = "weights") -> Any:
        return (server or self.gateway).post("/update_weights", {"weight_dir": str(step_path(self.root / name, step))})

    def answers(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        replies = [server.post(path, body) for server in (self.ours, self.gateway)]
        assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
        return replies[0].json(), replies[1].json()


def build_trainer(seed: int, **model: Any) -> Backend:
    debug = {"random_init": True, "seed": seed}
    return build_backend(TrainConfig.model_validate({"model": {"name": "tiny-qwen3", "debug": debug, **model}}))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`weights` and `adapters` of steps 1 and 2."""
    root = tmp_path_factory.mktemp("sglang")
    trainer = build_trainer(1)
    for step in (1, 2):
        with torch.no_grad():
            for parameter in trainer.parameters.values():
                parameter *= 1.1
        canary = trainer.compute_canary(step)
        publish_weights(root / "weights", step, trainer.export_state_dict(), trainer.model_dir, canary=canary)
    trainer = build_trainer(0, lora={"rank": 4, "alpha": 8})
    for step in (1, 2):
        torch.manual_seed(step)
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        canary, config = trainer.compute_canary(step), trainer.adapter_config
        publish_weights(
            root / "adapters",
            step,
            trainer.export_state_dict(),
            trainer.model_dir,
            adapter_config=config,
            canary=canary,
        )
    return root


def build_gateway(fake: FakeSGLang, root: Path | None, **config: Any) -> RunningServer:
    sglang = {"base_url": fake.url, "timeout": 20.0, **config.pop("sglang", {})}
    return RunningServer(root, backend="sglang", sglang=sglang, **config)


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[Fleet]:
    fake = FakeSGLang("tiny-qwen3").start()
    found = Fleet(fake, build_gateway(fake, root), RunningServer(root), root)
    yield found
    found.gateway.stop()
    found.ours.stop()
    fake.stop()


@pytest.fixture
def fleet(servers: Fleet) -> Iterator[Fleet]:
    """With the weights of the start, whatever the order of the tests."""
    for server in (servers.ours, servers.gateway):
        assert server.post("/reload_weights", {}).json()["version"] == 0
    yield servers
    servers.fake.wrong = ""


LETTERS = {"logit_bias": {str(token): 30.0 for token in range(97, 123)}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "temperature": 0, "logprobs": True, "top_logprobs": 3}),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": 0.7, "seed": 11, "logprobs": True, "min_tokens": 9}),
        ("/v1/chat/completions", {"messages": CHAT, "seed": 5, "stop": ["q", "zz"], "logprobs": True, **LETTERS}),
        ("/v1/chat/completions", {"messages": CHAT, "temperature": 0, "n": 2}),
        ("/v1/chat/completions/tokens", {"messages": CHAT, "tokens": PROMPT, "seed": 3, "logprobs": True}),
        ("/v1/completions", {"prompt": PROMPT, "seed": 6, "temperature": 1.3, "logprobs": 2}),
        ("/v1/completions", {"prompt": PROMPT, "seed": 2, "stop_token_ids": [104, 119], "logprobs": 0, **LETTERS}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT[:4]], "temperature": 0, "logprobs": 0, "ignore_eos": True}),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 2, "temperature": 0, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "hello", "seed": 4, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "presence_penalty": 1.1, "frequency_penalty": 0.4}),
    ],
    ids=str,
)
def test_answers_are_those_of_the_embedded_engine(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    mine, theirs = fleet.answers(path, {"max_tokens": 24, "return_token_ids": True, **body})
    for answer in (mine, theirs):
        for name in ("id", "created"):
            del answer[name]
        answer["usage"].pop("prompt_tokens_details", None)  # what was in a cache
    assert differences(mine, theirs) == []
    if "/chat/" in path:
        assert theirs["choices"][0]["token_ids"] and theirs["choices"][0]["versions"] == [[0, 0]]


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Values that differ, numbers by more than `CLOSE`."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        return [line for name in mine for line in differences(mine[name], theirs[name], f"{path}.{name}")]
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [line for i, pair in pairs for line in differences(*pair, f"{path}[{i}]")]
    if isinstance(mine, float) and isinstance(theirs, float) and math.isclose(mine, theirs, abs_tol=CLOSE):
        return []
    return [] if mine == theirs else [f"{path}: {mine!r} and {theirs!r}"]


def test_tokens_in_and_tokens_out(fleet: Fleet) -> None:
    params = {"temperature": 1.0, "seed": 9, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    mine, theirs = fleet.answers("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    assert differences(mine["choices"], theirs["choices"]) == []
    score = {"tokens": PROMPT, "start": 2, "top": 3}
    mine, theirs = (server.post("/score", score) for server in (fleet.ours, fleet.gateway))
    assert mine.status_code == theirs.status_code == 200 and len(mine.content) == len(theirs.content)


def test_overloaded_server_is_retried(fleet: Fleet) -> None:
    body = {"prompt": PROMPT, "seed": 8, "max_tokens": 4}
    expected = fleet.gateway.post("/v1/completions", body).json()["choices"][0]["text"]
    fleet.fake.full = 1
    assert fleet.gateway.post("/v1/completions", body).json()["choices"][0]["text"] == expected and not fleet.fake.full
    assert fleet.gateway.http.get("/health").status_code == 200


def test_many_ask_at_once_and_some_leave(fleet: Fleet) -> None:
    before = fleet.gateway.metric("requests_finished_total")

    def ask(number: int) -> str:
        if number % 4:
            body = {"prompt": PROMPT, "seed": number % 5, "max_tokens": 2, "return_token_ids": True}
            return str(fleet.gateway.post("/v1/completions", body).json()["choices"][0]["token_ids"])
        with suppress(httpx.TimeoutException):
            httpx.post(fleet.gateway.root + "/v1/completions", json=LONG, timeout=0.05)
        return ""

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(96)))
    assert len({answers[i] for i in range(96) if i % 4}) <= 5, "one answer for each seed"
    wait_until(lambda: fleet.gateway.service.engine.num_requests == 0, "those that left to be forgotten")
    wait_until(lambda: fleet.gateway.metric("requests_running") == 0, "the server to be told")
    assert fleet.gateway.metric("requests_finished_total") >= before + 72


def test_a_stream_has_the_whole_completion(fleet: Fleet) -> None:
    body = {"prompt": PROMPT, "seed": 8, "max_tokens": 12, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}
    whole = fleet.gateway.post("/v1/completions", body).json()["choices"][0]
    tokens, text, logprobs, pieces = [], "", [], 0
    with fleet.gateway.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                tokens += choice["token_ids"]
                text += choice["text"]
                logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                pieces += 1
    assert (tokens, text) == (whole["token_ids"], whole["text"]) and pieces == 1
    assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty with SGLang"),
        ({"top_p": 0.9}, "log-probs are computed before filtering"),
        ({"top_k": 500}, "log-probs are computed before filtering"),
        ({"min_p": 0.1}, "log-probs are computed before filtering"),
        ({"prompt_logprobs": 0, "prompt_temperature": 0.5}, "prompt_temperature with SGLang"),
        ({"prompt": [1] * 600}, "maximum context length is"),
        ({"model": "other"}, "is not served"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(fleet: Fleet, change: dict[str, Any], words: str) -> None:
    reply = fleet.gateway.post("/v1/completions", {"prompt": PROMPT, **change})
    assert reply.status_code in (400, 404) and words in reply.json()["error"]["message"]


def test_scores_over_a_support_are_refused() -> None:
    with pytest.raises(ValueError, match="support with SGLang"):
        check_params(SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_support=b"any"))


def score(server: RunningServer, tokens: list[int]) -> list[float]:
    body = {"prompt": tokens, "max_tokens": 0, "temperature": 0, "prompt_logprobs": 0}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    return [row[str(token)]["logprob"] for row, token in zip(choice["prompt_logprobs"][1:], tokens[1:], strict=True)]


NUM_LONG = 150
LONG = {
    "prompt": PROMPT,
    "seed": 4,
    "max_tokens": NUM_LONG,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
}


def ask_long(fleet: Fleet, pool: ThreadPoolExecutor) -> Any:
    """A request that runs: its answer to come."""
    slow_down(fleet.fake.embedded)
    drawn = fleet.fake.embedded.stats().generated_tokens
    requested = pool.submit(fleet.gateway.post, "/v1/completions", LONG)
    wait_until(lambda: fleet.fake.embedded.stats().generated_tokens > drawn + 20, "tokens")
    return requested


def test_running_requests_finish_before_an_update(fleet: Fleet) -> None:
    with ThreadPoolExecutor() as pool:
        running = ask_long(fleet, pool)
        reply = fleet.update(1).json()
        [choice] = running.result().json()["choices"]
    assert (reply["version"], reply["digests"], reply["exact"], reply["dtype"]) == (1, {}, False, "float32")
    assert choice["versions"] == [[0, 0]] and len(choice["token_ids"]) == NUM_LONG
    [after] = fleet.gateway.post("/v1/completions", LONG).json()["choices"]
    assert after["versions"] == [[0, 1]] and after["token_ids"] != choice["token_ids"]
    assert fleet.gateway.http.get("/health").json()["version"] == 1
    assert fleet.gateway.metric("policy_version") == 1 and fleet.gateway.metric("weight_updates_total") > 0


def test_weights_that_compute_something_else_are_not_taken(fleet: Fleet) -> None:
    assert fleet.update(1).status_code == 200
    before = score(fleet.gateway, PROMPT)
    fleet.fake.wrong = "weights/step_2"
    with ThreadPoolExecutor() as pool:
        requested = ask_long(fleet, pool)
        reply = fleet.update(2)
        [choice] = requested.result().json()["choices"]
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and "log-probs of the canary are off" in message
    assert "version 1 stays in service" in message and fleet.gateway.http.get("/health").json()["version"] == 1
    assert fleet.fake.labels[-2:] == ["2", "1"], "those before were loaded again"
    assert choice["versions"] == [[0, 1]] and len(choice["token_ids"]) == NUM_LONG
    assert len(choice["logprobs"]["token_logprobs"]) == NUM_LONG
    assert score(fleet.gateway, PROMPT) == pytest.approx(before, abs=CLOSE)


def test_engine_without_known_weights_fails(root: Path) -> None:
    fake = FakeSGLang("tiny-qwen3").start()
    gateway = build_gateway(fake, root)
    fleet = Fleet(fake, gateway, gateway, root)
    assert fleet.update(1).status_code == 200
    fake.wrong = "weights/step_"  # neither the new version nor the one before is what it should be
    assert fleet.update(2).status_code >= 400
    deadline = time.monotonic() + 20
    while (health := gateway.http.get("/health")).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.02)  # the engine's thread ends in its next step
    assert health.status_code == 503 and "failed to load version 2" in health.text
    assert "restore the previous one" in health.text
    gateway.stop()
    fake.stop()


def test_damaged_and_foreign_directories_never_reach_it(fleet: Fleet, tmp_path: Path) -> None:
    loads = fleet.fake.calls.count("/update_weights_from_disk")
    path = step_path(fleet.root / "weights", 3) / "model.safetensors"
    shutil.copytree(step_path(fleet.root / "weights", 2), path.parent)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    reply = fleet.update(3)
    assert reply.status_code == 400 and "do not match their manifest" in reply.json()["error"]["message"]
    assert fleet.gateway.post("/update_weights", {"weight_dir": str(tmp_path)}).status_code == 403
    assert fleet.update(9).status_code == 400
    assert fleet.gateway.post("/update_weights", {"weight_dir": None, "step": 1}).status_code == 409
    assert fleet.fake.calls.count("/update_weights_from_disk") == loads


def test_pause_freezes_and_abort_ends_running_requests(fleet: Fleet) -> None:
    with ThreadPoolExecutor() as pool:
        requested = ask_long(fleet, pool)
        assert fleet.gateway.post("/pause", {}).status_code == 200 and fleet.fake.paused
        waiting = pool.submit(fleet.gateway.post, "/v1/completions", {**LONG, "max_tokens": 3})
        assert fleet.update(1).json()["version"] == 1 and fleet.fake.paused, "an update does not end the pause"
        assert not requested.done() and not waiting.done()
        assert fleet.gateway.post("/resume", {}).status_code == 200
        assert waiting.result().json()["choices"][0]["versions"] == [[0, 1]]
        assert requested.result().json()["choices"][0]["versions"] == [[0, 1]], "sampled again with the new weights"
        requested = ask_long(fleet, pool)
        assert fleet.gateway.post("/pause?mode=abort", {}).status_code == 200
        [choice] = requested.result().json()["choices"]
        assert choice["finish_reason"] == "abort" and 20 <= len(choice["token_ids"]) < NUM_LONG
        assert fleet.gateway.post("/resume", {}).status_code == 200
    assert len(fleet.gateway.post("/v1/completions", LONG).json()["choices"][0]["token_ids"]) == NUM_LONG


def test_an_adapter_becomes_the_policy(fleet: Fleet) -> None:
    for step in (1, 2):
        reported = fleet.update(step, name="adapters").json()
        assert reported["version"] == step and fleet.update(step, fleet.ours, name="adapters").status_code == 200
        assert score(fleet.gateway, PROMPT) == pytest.approx(score(fleet.ours, PROMPT), abs=CLOSE)
        mine, theirs = fleet.answers("/v1/completions", {**LONG, "max_tokens": 8})
        assert differences(mine["choices"], theirs["choices"]) == [] and theirs["choices"][0]["versions"] == [[0, step]]
    wait_until(lambda: len(fleet.fake.embedded.adapters()) == 1, "the one before to go")
    fleet.fake.wrong = "adapters/step_1"
    reply = fleet.update(1, name="adapters")
    assert reply.status_code == 400 and "log-probs of the canary are off" in reply.json()["error"]["message"]
    assert fleet.gateway.http.get("/health").json()["version"] == 2
    fleet.fake.enable_lora = False
    assert "set `--enable-lora`" in fleet.update(1, name="adapters").json()["error"]["message"]
    fleet.fake.enable_lora = True


def test_an_adapter_is_loaded_during_a_pause(fleet: Fleet) -> None:
    assert fleet.gateway.post("/pause", {}).status_code == 200
    assert fleet.update(1, name="adapters").json()["version"] == 1 and fleet.fake.paused, "the pause goes on"
    fleet.fake.wrong = "adapters/step_2"
    assert fleet.update(2, name="adapters").status_code == 400 and fleet.fake.paused
    assert fleet.gateway.post("/resume", {}).status_code == 200
    assert fleet.gateway.post("/v1/completions", LONG).json()["choices"][0]["versions"] == [[0, 1]]


def test_a_server_that_scores_no_canary_is_unavailable(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = fleet.gateway.service.engine.engine
    monkeypatch.setattr(engine, "server", replace(engine.server, timeout=0.5))
    fleet.fake.freeze()
    reply = fleet.update(1, name="adapters")
    assert reply.status_code == 503 and "did not score the canary within 0.5 s" in reply.json()["error"]["message"]
    fleet.fake.engine._thread.resume().result()
    wait_until(lambda: fleet.gateway.http.get("/health").status_code == 200, "the gateway to reconnect")


def test_restarted_server_is_updated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.inference.sglang.engine.WATCH_S", 0.1)
    fake = FakeSGLang("tiny-qwen3").start()
    gateway = build_gateway(fake, root)
    fleet = Fleet(fake, gateway, gateway, root)
    assert fleet.update(1).json()["version"] == 1
    expected = gateway.post("/v1/completions", LONG).json()["choices"][0]
    with ThreadPoolExecutor() as pool:
        requested = ask_long(fleet, pool)
        fake.freeze()
        fake.stop()
        wait_until(lambda: gateway.http.get("/health").status_code == 503, "the loss to be seen")
        assert "is unavailable" in gateway.http.get("/health").json()["error"]["message"]
        reply = fleet.update(2)
        assert reply.status_code == 503 and "is unavailable" in reply.json()["error"]["message"]
        back = FakeSGLang("tiny-qwen3", port=fake.port, seed=8).start()
        [choice] = requested.result().json()["choices"]
    assert choice["token_ids"] == expected["token_ids"] and choice["versions"] == [[0, 1]]
    wait_until(lambda: gateway.http.get("/health").status_code == 200, "the way back")
    assert gateway.http.get("/health").json()["version"] == 1
    assert gateway.post("/reload_weights", {}).status_code == 200
    assert fleet.update(2, name="adapters").json()["version"] == 2
    expected = score(gateway, PROMPT)
    back.stop()
    again = FakeSGLang("tiny-qwen3", port=fake.port, seed=9).start()  # no request in flight
    assert score(gateway, PROMPT) == pytest.approx(expected, abs=CLOSE)
    assert gateway.http.get("/health").json()["version"] == 2
    gateway.stop()
    again.stop()


def test_a_server_without_seeds_and_with_a_key(root: Path) -> None:
    fake = FakeSGLang("tiny-qwen3", deterministic=False, api_key="key").start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_KEY", "key")
        gateway = build_gateway(fake, root, sglang={"api_key_var": "SGLANG_KEY"})
    fleet = Fleet(fake, gateway, gateway, root)
    with ThreadPoolExecutor() as pool:
        requested = ask_long(fleet, pool)
        assert fleet.update(1).json()["version"] == 1
        assert requested.result().json()["choices"][0]["versions"] == [[0, 0]]
    assert gateway.post("/v1/completions", LONG).json()["choices"][0]["versions"] == [[0, 1]]
    gateway.stop()
    fake.stop()


def test_gateway_loads_base_weights_over_those_of_an_earlier_run(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.update(1).status_code == 200 and fleet.fake.labels[-1] == "1"
    second = build_gateway(fleet.fake, tmp_path)
    assert fleet.ours.post("/reload_weights", {}).status_code == 200
    assert second.http.get("/health").json()["version"] == 0 and fleet.fake.labels[-1] == "0"
    assert score(second, PROMPT) == pytest.approx(score(fleet.ours, PROMPT), abs=CLOSE)
    second.stop()


def test_server_with_original_logprobs_is_rejected(root: Path) -> None:
    fake = FakeSGLang("tiny-qwen3", original=True).start()
    with pytest.raises(ValueError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
        build_gateway(fake, root)
    fake.original = False
    with pytest.raises(ValueError, match=r"model\.max_model_len is 600, but the SGLang server has a context of 512"):
        build_gateway(fake, root, model_options={"max_model_len": 600})
    fake.stop()
    with pytest.raises(TimeoutError, match="no response from"):
        build_gateway(fake, root, sglang={"timeout": 0.1})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "needs sglang.base_url"),
        ({"sglang": {"base_url": "localhost:1"}}, "must begin with http"),
        ({"weight_broadcast": {"type": "gloo"}}, 'set "filesystem"'),
        ({"exact": True}, "embedded"),
        ({"model": {"dtype": "float32"}}, "model.dtype with SGLang"),
        ({"parallel": {"tp": 2}}, "parallel.tp with SGLang"),
        ({"cache": {"max_tokens": 512}}, "cache.max_tokens with SGLang"),
        ({"vllm": {"x": 1}}, "vllm.x with SGLang"),
        ({"enforce_eager": True}, "enforce_eager with SGLang"),
        ({"backend": "embedded"}, 'set backend = "sglang"'),
    ],
)
def test_configs_that_do_not_fit_are_refused(config: dict[str, Any], words: str) -> None:
    base = {"backend": "sglang", "sglang": {"base_url": "http://localhost:1"}} if config else {"backend": "sglang"}
    with pytest.raises(ValidationError, match=words):
        InferenceConfig.model_validate({**base, **config})


def test_rl_leaves_all_gpus_to_the_trainer(tmp_path: Path) -> None:
    argv = ["--output-dir", str(tmp_path), "--inference.backend", "sglang"]
    argv += ["--inference.sglang.base-url", "http://localhost:1", "--trainer.parallel.dp", "2"]
    config = parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]
    assignment = assign_visible_gpus(config, [0, 1])
    assert assignment.trainer == (0, 1) and assignment.inference is None


def test_malformed_responses_are_errors() -> None:
    request = GenerationRequest(PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=0))
    ends = {"finish_reason": {"type": "length"}, "completion_tokens": 1}
    for meta, words in (
        ({**ends, "completion_tokens": 2, "output_token_logprobs": [[-1.0, 5, None]]}, "1 log-probs for 2 tokens"),
        ({**ends, "output_token_logprobs": [[None, 5, None]]}, "not finite"),
        ({"completion_tokens": 0, "finish_reason": None}, "unknown finish_reason"),
        ({**ends, "output_token_logprobs": [[-1.0, 5, None]], "input_token_logprobs": [[None, 1, None]]}, "expected 7"),
    ):
        with pytest.raises(MalformedResponse, match=words):
            read_output(request, meta, 0, lambda ids, skip: "")
    assert read_scores(GenerationRequest(PROMPT, SamplingParams(max_tokens=1)), {}) is None


def test_tail_mass_below_the_resolution_is_not_zero() -> None:
    request = GenerationRequest([1, 2, 3], SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_start=1))
    rows = [[None, 1, None], [0.0, 2, None], [-0.25, 3, None]]
    scores = read_scores(
        request, {"input_token_logprobs": rows, "input_top_logprobs": [None, *([r] for r in rows[1:])]}
    )
    assert scores is not None and scores.tail_mass == [MIN_TAIL_MASS, pytest.approx(1 - math.exp(-0.25))]
