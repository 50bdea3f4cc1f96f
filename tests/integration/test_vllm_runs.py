"""`inference.backend = "vllm"` with a real vLLM: responses, verified weights, and a complete run of `rl`."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from cli_runner import THREE_FILES, Command, digests, metric_rows, runner, until
from teacher_group import roll_out

from prime_rl.runtime.machine import find_free_port
from rollouts.training.steps import step_path

START_S = float(os.environ.get("VLLM_START_S", "600"))
"""How long a server may take to start: on a busy machine the imports alone take minutes."""
pytestmark = [
    pytest.mark.timeout(600 + START_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; cure: make test-vllm"),
]
TINY = ("--model.name", "tiny-qwen3", "--model.debug.random-init", "--model.max-model-len", 512)
CHAT = [{"role": "system", "content": "reverse"}, {"role": "user", "content": "hello"}]
PROMPT = [104, 101, 108, 108, 111, 32, 119]
CLOSE = 1e-4
OURS_ALONE = {"versions", "prompt_tail_mass", "reasoning_content", "version"}
"""Fields that vLLM's own routes do not have."""
FREE = {"id", "created", "request_id", "owned_by", "root", "permission", "parent", "system_fingerprint"} | {
    "prompt_tokens_details",  # what was in a cache
    "rank",  # ours is reported within the requested k
}
"""Fields whose value is the server's own affair."""


@dataclass
class Pair:
    """Our engine and vLLM, each behind the `inference` command, serving the same random weights."""

    ours: httpx.Client
    theirs: httpx.Client
    output_dir: Path
    vllm: Command

    def post(self, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
        return self.ours.post(path, json=body), self.theirs.post(path, json=body)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("vllm")
    with runner(root / "said") as found:
        clients, commands = [], []
        for backend in ("embedded", "vllm"):
            port = find_free_port()
            options = (*TINY, "--backend", backend, "--output-dir", root / "out", "--server.port", port)
            options += ("--weight-broadcast.type", "gloo")
            commands.append(found.start("inference", *options))
            clients.append(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False))
        for client, command in zip(clients, commands, strict=True):
            until(lambda client=client: is_healthy(client), "the server", command, deadline_s=START_S)
        yield Pair(*clients, root / "out", commands[1])


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").json().items() >= {"status": "ok", "version": 0}.items()
    except httpx.HTTPError:
        return False


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Fields of both answers with other values: numbers up to `CLOSE`; a field one side leaves out counts as null."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = (ours.keys() & theirs.keys()) - FREE
        found = [line for name in sorted(names) for line in differences(ours[name], theirs[name], f"{path}.{name}")]
        missing = sorted(n for n in theirs.keys() - ours.keys() - FREE if theirs[n] not in (None, [], "", {}))
        extra = sorted(n for n in ours.keys() - theirs.keys() - FREE - OURS_ALONE if ours[n] not in (None, [], {}))
        return found + [f"{path}.{n}: missing" for n in missing] + [f"{path}.{n}: only ours" for n in extra]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            line for i, pair in enumerate(zip(ours, theirs, strict=True)) for line in differences(*pair, f"{path}[{i}]")
        ]
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return [] if math.isclose(ours, theirs, abs_tol=CLOSE) else [f"{path}: {ours} and {theirs}"]
    return (
        [] if ours == theirs or (ours in (None, []) and theirs in (None, [])) else [f"{path}: {ours!r} and {theirs!r}"]
    )


GREEDY = {"model": "tiny-qwen3", "temperature": 0, "max_tokens": 12, "return_token_ids": True}
ASCII = {"logit_bias": {str(token): 60.0 for token in range(97, 123)}}
"""Letters only: how a part of a character is shown is each server's own affair."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 3}),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "stop": ["zz", "a"]}),
        ("/v1/chat/completions", {"messages": CHAT, "min_tokens": 12, "ignore_eos": True, "presence_penalty": 1.5}),
        ("/v1/chat/completions", {"messages": CHAT, "frequency_penalty": 0.7, "repetition_penalty": 1.3}),
        ("/v1/chat/completions/tokens", {"messages": CHAT, "tokens": PROMPT, "logprobs": True}),
        ("/v1/completions", {"prompt": "hello w", "logprobs": 2}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT[:4]], "logprobs": 0}),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": PROMPT, "stop_token_ids": [101, 108]}),
    ],
    ids=str,
)
def test_greedy_answers_agree_field_by_field(pair: Pair, path: str, body: dict[str, Any]) -> None:
    ours, theirs = pair.post(path, {**GREEDY, **ASCII, **body})
    assert (ours.status_code, theirs.status_code) == (200, 200), theirs.text
    mine, vllms = ours.json(), theirs.json()
    assert not differences(mine, vllms)
    (first, *_), (second, *_) = mine["choices"], vllms["choices"]
    assert first["token_ids"] == second["token_ids"] and len(first["token_ids"]) >= 1
    assert first["versions"] == second["versions"] == [[0, 0]]


def test_token_route_agrees(pair: Pair) -> None:
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    ours, theirs = pair.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    if theirs.status_code in (403, 404):
        pytest.skip(f"this vLLM does not offer it: {theirs.text}")
    (first,), (second,) = ours.json()["choices"], theirs.json()["choices"]
    assert first["token_ids"] == second["token_ids"] and first["finish_reason"] == second["finish_reason"]
    for mine, vllms in zip(first["logprobs"]["content"], second["logprobs"]["content"], strict=True):
        assert mine["logprob"] == pytest.approx(vllms["logprob"], abs=CLOSE)
        assert vllms.get("token_id", mine["token_id"]) == mine["token_id"]


def test_streams_agree(pair: Pair) -> None:
    body = {
        **GREEDY,
        **ASCII,
        "messages": CHAT,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def collect(client: httpx.Client) -> tuple[str, list[float], Any, Any]:
        text, logprobs, reason, usage = "", [], None, None
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line[6:])
                usage = piece.get("usage") or usage
                for choice in piece["choices"]:
                    text += choice["delta"].get("content") or ""
                    logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
                    reason = choice["finish_reason"] or reason
        return text, logprobs, reason, {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}

    ours, theirs = collect(pair.ours), collect(pair.theirs)
    assert (ours[0], *ours[2:]) == (theirs[0], *theirs[2:])
    assert ours[1] == pytest.approx(theirs[1], abs=CLOSE) and len(ours[1]) == 12


def test_scores_of_a_prompt_agree(pair: Pair) -> None:
    ours, theirs = pair.post("/v1/completions", {**GREEDY, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2})
    (mine,), (vllms,) = ours.json()["choices"], theirs.json()["choices"]
    for first, second in zip(mine["prompt_logprobs"][1:], vllms["prompt_logprobs"][1:], strict=True):
        assert first.keys() == second.keys()
        for token in first:
            assert first[token]["logprob"] == pytest.approx(second[token]["logprob"], abs=CLOSE)


def test_tokenizing_and_refusals_agree(pair: Pair) -> None:
    for body in ({"prompt": "hello"}, {"messages": CHAT}, {"messages": CHAT, "add_generation_prompt": False}):
        ours, theirs = pair.post("/tokenize", {"model": "tiny-qwen3", **body})
        assert not differences(ours.json(), theirs.json())
    ours, theirs = pair.post("/detokenize", {"model": "tiny-qwen3", "tokens": PROMPT})
    assert ours.json()["prompt"] == theirs.json()["prompt"]
    for change, status in (({"prompt": [104] * 600}, 400), ({"model": "other"}, 404), ({"temperature": -1}, 400)):
        ours, theirs = pair.post("/v1/completions", {**GREEDY, "prompt": PROMPT, **change})
        assert ours.status_code == theirs.status_code == status
        assert ours.json()["error"].keys() == theirs.json()["error"].keys()
        if "prompt" in change:
            assert all("maximum context length is" in reply.text for reply in (ours, theirs))


def test_vllm_versions_are_reported(pair: Pair) -> None:
    for client in (pair.ours, pair.theirs):
        (card,) = [card for card in client.get("/v1/models").json()["data"] if card["id"] == "tiny-qwen3"]
        assert (card["version"], card["max_model_len"]) == (0, 512)
        assert "prime_rl_policy_version 0" in client.get("/metrics").text


def count_tracebacks(command: Command) -> int:
    return (command.out + command.err).count("Traceback")


def count_running(client: httpx.Client) -> int:
    """Requests in vLLM's batch: one that the server has received only is not in it yet."""
    found = re.search(r"^vllm:num_requests_running\{[^}]*\} (\d+)\.0$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions/tokens", {"tokens": PROMPT}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT[:4]]}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "ignore_eos": True}}),
    ],
    ids=["chat", "tokens", "completions", "generate"],
)
def test_disconnect_aborts_without_traceback(pair: Pair, path: str, body: dict[str, Any]) -> None:
    before = count_tracebacks(pair.vllm)
    long = {"model": "tiny-qwen3", "max_tokens": 400, "ignore_eos": True}
    url = pair.theirs.base_url
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    connection.request("POST", path, json.dumps({**long, **body}), {"Content-Type": "application/json"})
    until(lambda: count_running(pair.theirs) > 0, "a request in the engine", pair.vllm)
    connection.close()
    until(lambda: "prime_rl_requests_in_flight 0" in pair.theirs.get("/metrics").text, "the abort", pair.vllm)
    until(lambda: count_running(pair.theirs) == 0, "the abort in the engine", pair.vllm)
    assert pair.theirs.post("/v1/completions", json={**GREEDY, "prompt": PROMPT}).status_code == 200
    assert count_tracebacks(pair.vllm) == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions/tokens"])
def test_pause_abort_returns_partial_answers(pair: Pair, path: str) -> None:
    before, answers = count_tracebacks(pair.vllm), list[httpx.Response]()
    body = {"model": "tiny-qwen3", "prompt": PROMPT, "tokens": PROMPT, "max_tokens": 450, "ignore_eos": True}
    request = threading.Thread(target=lambda: answers.append(pair.theirs.post(path, json=body)))
    request.start()
    until(lambda: count_running(pair.theirs) > 0, "a request in the engine", pair.vllm)
    assert pair.theirs.post("/pause?mode=abort").status_code == 200
    request.join(60)
    assert pair.theirs.post("/resume").status_code == 200
    (answer,) = answers
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "abort", answer.text
    assert count_tracebacks(pair.vllm) == before


def test_weights_are_verified_in_flight_and_refused_when_damaged(pair: Pair) -> None:
    from prime_rl.orchestrator.canary_check import CanaryCheck
    from prime_rl.trainer.backend import build_backend
    from prime_rl.trainer.config import TrainConfig
    from prime_rl.transport.weights import publish_weights
    from rollouts.training.batching import MicroBatch
    from rollouts.training.weight_sync import PrimeEngine, sync_weights_to_engines

    def build(seed: int) -> Any:
        model = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": seed}}
        return build_backend(TrainConfig.model_validate({"model": model}))

    def scores(backend: Any, tokens: list[int]) -> list[float]:
        n, zeros = len(tokens), [0.0] * len(tokens)
        mask = [1.0] * (n - 1) + [0.0]
        micro = MicroBatch(tokens, list(range(n)), [*tokens[1:], 0], mask, zeros, zeros, [1.0] * n, None, [n], [0])
        found: list[float] = backend.compute_inputs(micro.to_tensors()).trainer_logprobs.tolist()
        return found

    old, new = build(0), build(1)
    weights = pair.output_dir / "weights"
    for step in (1, 2):
        publish_weights(weights, step, new.export_state_dict(), new.model_dir, canary=new.compute_canary(step))
    body = {**GREEDY, "temperature": 1.0, "seed": 4, "max_tokens": 200, "ignore_eos": True, "prompt": PROMPT}
    answers: list[dict[str, Any]] = []
    engine = PrimeEngine(str(pair.theirs.base_url))

    async def update(step: int) -> dict[str, Any]:
        (answer,) = await sync_weights_to_engines([engine], str(step_path(weights, step)))
        await CanaryCheck(1).check(step, step_path(weights, step), [engine], [answer])
        return answer

    requesting = threading.Thread(
        target=lambda: answers.append(pair.theirs.post("/v1/completions", json={**body, "logprobs": 0}).json())
    )
    requesting.start()
    until(lambda: "prime_rl_requests_in_flight 1" in pair.theirs.get("/metrics").text, "the request", pair.vllm)
    answer = anyio.run(update, 1)
    requesting.join(120)
    assert answer["version"] == 1 and not answer.get("unknown") and not answer.get("rounded")
    published = digests(step_path(weights, 1))
    assert {name: answer["digests"][name] for name in published} == published, "every tensor, as vLLM holds it"
    (choice,) = answers[0]["choices"]
    spans, drawn = choice["versions"], choice["logprobs"]["token_logprobs"]
    at = spans[1][0] if len(spans) > 1 else (0 if spans == [[0, 1]] else 200)
    tokens = PROMPT + choice["token_ids"]
    before, after = (scores(model, tokens)[len(PROMPT) - 1 :] for model in (old, new))
    assert drawn[:at] == pytest.approx(before[:at], abs=CLOSE)
    assert drawn[at:] == pytest.approx(after[at:], abs=CLOSE)
    damaged = step_path(weights, 2) / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-2] ^= 1
    damaged.write_bytes(data)
    reply = pair.theirs.post("/update_weights", json={"weight_dir": str(damaged.parent)})
    assert reply.status_code == 400 and "do not match their manifest" in reply.json()["error"]["message"]
    assert pair.theirs.get("/health").json()["version"] == 1
    assert anyio.run(engine.score_prompt, PROMPT) == pytest.approx(scores(new, PROMPT), abs=CLOSE)
    assert pair.theirs.post("/update_weights", json={"weight_dir": "/etc"}).status_code == 403
    assert pair.theirs.post("/reload_weights").json()["version"] == 0
    assert anyio.run(engine.score_prompt, PROMPT) == pytest.approx(scores(old, PROMPT), abs=CLOSE)


def test_both_receive_weights_over_a_process_group(pair: Pair, tmp_path: Path) -> None:
    import torch

    from prime_rl.orchestrator.canary_check import CanaryCheck
    from prime_rl.orchestrator.servers import BroadcastEngine
    from prime_rl.trainer.backend import build_backend
    from prime_rl.trainer.config import TrainConfig
    from prime_rl.transport.broadcast import WeightSender, announce
    from rollouts.training.weight_sync import WeightSyncError, sync_weights_to_engines

    model = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": 2}}
    backend = build_backend(TrainConfig.model_validate({"model": model}))
    trainer = WeightSender("gloo", "localhost", 0, 30.0, torch.device("cpu"))
    trainer.open()
    engines = [BroadcastEngine(str(client.base_url)) for client in (pair.ours, pair.theirs)]

    async def update(step: int) -> list[dict[str, Any]]:
        manifest = trainer.offer(step, backend.export_state_dict(), None)
        if step == 6:
            trainer._versions[6][1][1].view(-1)[0] += 1  # changed on its way
        path = announce(tmp_path, manifest, trainer.address, backend.compute_canary(step))
        answers = await sync_weights_to_engines(engines, str(path))
        await CanaryCheck(1).check(step, path, engines, answers)
        assert all(answer["digests"].items() >= digests(path).items() for answer in answers), "every tensor"
        return answers

    assert [answer["version"] for answer in anyio.run(update, 5)] == [5, 5]
    with pytest.raises(WeightSyncError, match=r"answered 400.*do not match.*answered 400.*do not match"):
        anyio.run(update, 6)
    trainer.close()
    with pytest.raises(WeightSyncError, match=r"answered 503.*does not answer.*answered 503.*does not answer"):
        anyio.run(sync_weights_to_engines, engines, str(step_path(tmp_path, 5)))
    for client in (pair.ours, pair.theirs):
        assert client.get("/health").json()["version"] == 5
        assert client.post("/reload_weights").json()["version"] == 0


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [("Qwen3", True, "bfloat16"), ("Qwen2", False, "bfloat16"), ("Llama", True, "float32")],
)
def test_workers_load_fused_tied_and_narrow_models(tmp_path: Path, family: str, tied: bool, dtype: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from prime_rl.runtime.tokenizer import load_tokenizer

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    extra = {"head_dim": 32} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **extra, tie_word_embeddings=tied)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 20, 30, 40]])
    expected = []
    for step in (0, 1):
        torch.manual_seed(step)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / f"step_{step}")
        load_tokenizer("tiny-qwen3").save_pretrained(tmp_path / f"step_{step}")
        with torch.no_grad():
            logprobs = torch.log_softmax(model.float()(prompt).logits[0, :-1], -1)
        expected.append(logprobs.gather(-1, prompt[0, 1:, None])[:, 0].tolist())
    command = [sys.executable, str(Path(__file__).parent / "vllm_models.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "step_0"), str(tmp_path / "step_1"), dtype],
        capture_output=True,
        text=True,
        timeout=600,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    reported = json.loads(lines[0].removeprefix("RESULT "))
    close = 1e-3 if dtype == "float32" else 0.05
    assert reported["before"] == pytest.approx(expected[0], abs=close)
    assert reported["after"] == pytest.approx(expected[1], abs=close)
    assert not reported["held"]["wrong"] and not reported["held"]["unknown"] and not reported["report"]["unknown"]
    # Norms start as ones in both; all other tensors of another model must be reported.
    assert len(reported["foreign"]) >= len(reported["held"]["digests"]) - 1
    assert reported["report"]["wrong"] == [] and len(reported["report"]["digests"]) == len(reported["held"]["digests"])
    assert reported["report"]["repaired"] in ([], ["lm_head.weight"]) and (tied or not reported["report"]["repaired"])


def test_damaged_adapters_are_rejected_in_flight(tmp_path: Path) -> None:
    """The policy becomes an adapter, another one, another base and the start again, under one served name."""
    import torch

    from prime_rl.orchestrator.canary_check import CanaryCheck
    from prime_rl.trainer.backend import build_backend
    from prime_rl.trainer.config import TrainConfig
    from prime_rl.transport.weights import publish_weights
    from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines

    def build(seed: int, **more: Any) -> Any:
        model = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": seed}, **more}
        return build_backend(TrainConfig.model_validate({"model": model}))

    out = tmp_path / "out"
    trainer, other = build(0, lora={"rank": 4, "alpha": 8}), build(1)
    for step in (1, 2, 3):
        torch.manual_seed(step)
        with torch.no_grad():
            for name, parameter in trainer.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        canary, config = trainer.compute_canary(step), trainer.adapter_config
        publish_weights(
            out / "weights", step, trainer.export_state_dict(), trainer.model_dir, adapter_config=config, canary=canary
        )
    publish_weights(out / "weights", 4, other.export_state_dict(), other.model_dir, canary=other.compute_canary(4))
    port = find_free_port()
    with runner(tmp_path / "said") as found:
        options = (*TINY, "--backend", "vllm", "--output-dir", out, "--server.port", port, "--max-lora-rank", 4)
        command = found.start("inference", *options)
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        until(lambda: is_healthy(http), "the server", command, deadline_s=START_S)
        engine = PrimeEngine(f"http://127.0.0.1:{port}")
        check = CanaryCheck(1)

        async def update(step: int) -> dict[str, Any]:
            path = step_path(out / "weights", step)
            (answer,) = await sync_weights_to_engines([engine], str(path))
            await check.check(step, path, [engine], [answer])
            return answer

        def ask(more: dict[str, Any]) -> Any:
            return http.post("/v1/completions", json={**GREEDY, "prompt": PROMPT, "logprobs": 0, **more}).json()

        def in_flight(step: int) -> list[list[int]]:
            """The spans of an answer that was running when a version came."""
            answers: list[Any] = []
            body = {"temperature": 1.0, "seed": 4, "max_tokens": 200, "ignore_eos": True}
            requesting = threading.Thread(target=lambda: answers.append(ask(body)))
            requesting.start()
            until(lambda: "prime_rl_requests_in_flight 1" in http.get("/metrics").text, "the request", command)
            answer = anyio.run(update, step)
            requesting.join(120)
            published = digests(step_path(out / "weights", step))
            assert {name: answer["digests"].get(name) for name in published} == published, "every tensor"
            (choice,) = answers[0]["choices"]
            assert answers[0]["model"] == "tiny-qwen3" and len(choice["token_ids"]) == 200
            return choice["versions"]

        base = anyio.run(engine.score_prompt, PROMPT)
        assert in_flight(1) == [[0, 0]], "what has no adapter ends without one"
        assert {version for _, version in in_flight(2)} <= {1, 2} and check.num_checked == 2
        assert ask({})["choices"][0]["versions"] == [[0, 2]]
        adapted = anyio.run(engine.score_prompt, PROMPT)
        assert adapted != pytest.approx(base, abs=0.01)
        damaged = step_path(out / "weights", 3) / "adapter_model.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-2] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(WeightSyncError, match="do not match their manifest"):
            anyio.run(update, 3)
        assert http.get("/health").json()["version"] == 2
        assert anyio.run(engine.score_prompt, PROMPT) == pytest.approx(adapted, abs=CLOSE)
        assert http.post("/reload_weights").json()["version"] == 0
        assert anyio.run(engine.score_prompt, PROMPT) == pytest.approx(base, abs=CLOSE)
        assert anyio.run(update, 4)["version"] == 4, "a whole model, beside room for adapters"
        assert http.post("/reload_weights").json()["version"] == 0
        assert anyio.run(engine.score_prompt, PROMPT) == pytest.approx(base, abs=CLOSE)
        assert anyio.run(update, 1)["version"] == 1
        beside = {"lora_name": "mine", "lora_path": str(step_path(out / "weights", 2))}
        assert http.post("/v1/load_lora_adapter", json=beside).status_code == 200
        scored = [ask({"model": name, "prompt_logprobs": 0})["choices"][0] for name in ("mine", "tiny-qwen3")]
        mine, policy = ([next(iter(row.values()))["logprob"] for row in one["prompt_logprobs"][1:]] for one in scored)
        assert mine == pytest.approx(adapted, abs=CLOSE) and policy != pytest.approx(adapted, abs=0.01)
        shutil.rmtree(step_path(out / "weights", 1))
        assert ask({"model": "mine"})["choices"]
        again = ask({"prompt_logprobs": 0})["choices"][0]
        assert again["prompt_logprobs"] == scored[1]["prompt_logprobs"], "the policy stays in memory"
        http.close()


@pytest.mark.parametrize("way", ["filesystem", "gloo", "adapters"])
def test_a_whole_run_on_vllm_by_one_line_of_config(way: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--output_dir", out, "--inference.server.port", find_free_port(), "--inference.backend", "vllm")
    if way == "adapters":
        options += ("--trainer.model.lora.rank", 4)
    else:
        options += ("--weight-broadcast.type", way)
    with runner(tmp_path / "said") as found:
        command = found.start("rl", *THREE_FILES, *options)
        assert command.wait(900) == 0, f"{command.out}\n{command.err}"

    kls = [row["mismatch_kl/mean"] for row in metric_rows(out, "trainer", "mismatch_kl/mean")]
    assert len(kls) == 5 and max(kls) < 1e-6
    assert (step_path(out / "weights", 5) / "model.safetensors").exists() == (way != "adapters")
    assert "engine log-probs match the trainer" in (out / "logs" / "orchestrator.log").read_text()


@pytest.mark.parametrize("top", [0, 4])
def test_vllm_teacher_equals_embedded_teacher(pair: Pair, top: int) -> None:
    """The same log-probs under a context, by vLLM's prompt log-probs and by our packed scores."""
    from array import array

    from prime_rl.client.scoring import FULL, ScoredTokens, TokenScorer
    from prime_rl.utils.client import InferenceClient

    tokens, start = [*b"the answer is always a vowel\n", *PROMPT], 29

    async def ask(root: str, top: int, temperature: float = 1.0) -> ScoredTokens:
        client = InferenceClient(f"{root}/v1")
        try:
            return await TokenScorer([client], "tiny-qwen3", temperature, top).score(tokens, start)
        finally:
            await client.close()

    ours, theirs = (anyio.run(ask, str(server.base_url).rstrip("/"), top) for server in (pair.ours, pair.theirs))
    assert len(ours.logprobs) == len(PROMPT) and theirs.logprobs == pytest.approx(ours.logprobs, abs=CLOSE)
    for name in ("top_logprobs", "tail_mass"):
        one, other = (array("f", getattr(scored, name)).tolist() for scored in (ours, theirs))
        assert other == pytest.approx(one, abs=CLOSE) if top else not other
    with pytest.raises(ValueError, match="temperature 1 only"):
        anyio.run(ask, str(pair.theirs.base_url).rstrip("/"), 0, 0.5)
    with pytest.raises(ValueError, match="whole distributions"):
        anyio.run(ask, str(pair.theirs.base_url).rstrip("/"), FULL)


CONTEXT = "Answer with letters only.\n"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def build_rows(system: bool = False, tools: bool = False, turns: int = 1) -> dict[str, Any]:
    """An environment in plain Python: `CHAT`, with its system message or without; `And then?` after every answer."""
    world = {"dataset": [{"prompt": CHAT[not system :]}], "rewards": lambda completion: 1.0}
    if turns > 1:
        world |= {
            "respond": lambda messages, row, state: [{"role": "user", "content": "And then?"}],
            "max_turns": turns,
        }
    return world | {"tools": [TOOL] if tools else None}


@pytest.mark.parametrize("args", [{}, {"system": True}, {"turns": 2}, {"system": True, "tools": True}], ids=str)
def test_a_teacher_on_vllm_is_a_plain_forward_under_the_context(pair: Pair, args: dict[str, Any]) -> None:
    """Ours samples, vLLM teaches, transformers computes the same ids in one go."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from prime_rl.orchestrator.config import OrchestratorConfig
    from rollouts.training.environments import load_environment

    ours, theirs = ({"base_url": [f"{str(side.base_url).rstrip('/')}/v1"]} for side in (pair.ours, pair.theirs))
    config = OrchestratorConfig.model_validate(
        {
            "client": ours,
            "model": {"name": "tiny-qwen3"},
            "teacher_model": {"context": CONTEXT, "client": theirs, "model": {"name": "tiny-qwen3"}},
            "env": [{"id": "test_vllm_runs:build_rows", "name": "rows"}],
            "batch_size": 2,
            "rollouts_per_example": 2,
            # A turn ends by a token, sooner or later: one that is cut off has no next one.
            "sampling": {"max_tokens": 60, "extra_body": {"stop_token_ids": [*range(0, 256, 3)]}},
        }
    )

    initial = step_path(pair.output_dir / "initial", 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(initial)
    system, user = CHAT
    reported = [*[system] * args.get("system", False), {**user, "content": CONTEXT + user["content"]}]
    tools = [TOOL] if args.get("tools") else None
    text = tokenizer.apply_chat_template(reported, tools=tools, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    samples, _ = roll_out(config, load_environment("test_vllm_runs:build_rows", args))
    assert len(samples) == 2
    for sample in samples:
        start = sample.loss_mask.index(1.0)
        assert (0.0 in sample.loss_mask[start:]) == (args.get("turns", 1) > 1)
        ids = [*prompt, *sample.tokens[start:]]
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        for i, mask in enumerate(sample.loss_mask):
            there = float(table[len(prompt) + i - start - 1, sample.tokens[i]]) if mask else 0.0
            assert sample.teacher_logprobs[i] == pytest.approx(there, abs=CLOSE)
