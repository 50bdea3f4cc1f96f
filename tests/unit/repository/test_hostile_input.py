"""Hostile input: files in data directories are never executed, and requests stay within resource limits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import pickle
import re
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import DEADLINE_S, RunningServer
from starlette.requests import Request
from starlette.responses import Response

from nanochat.tokenizer import read_published
from prime_rl.configuration.sections import LogConfig
from prime_rl.deployment.ray_job import read_plan
from prime_rl.inference.access import Access, build_hosts, check_access
from prime_rl.inference.config import ServerConfig
from prime_rl.inference.intake import BodyLimit, read_body
from prime_rl.inference.request_parsing import ApiError
from prime_rl.inference.routes.openai import build_error_response
from prime_rl.inference.tool_parser import parse_hermes, parse_llama
from prime_rl.inference.weight_dirs import resolve_allowed
from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.page_data import read_rows
from prime_rl.monitor.vocabulary import Vocabulary
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.models.registry import load_hf_config
from prime_rl.transport.batches import decode_batch, read_batch
from prime_rl.transport.broadcast import read_broadcast
from prime_rl.transport.canary import read_canary
from prime_rl.transport.weights import check_directory
from prime_rl.utils.pydantic_config import parse_argv, write_config
from rollouts.training.backends.checkpoint import read_tensors
from rollouts.training.datasets.data_buffer import create_buffer_from_jsonl
from rollouts.training.datasets.rows import load_rows
from rollouts.training.datasets.sample_files import load_samples_from_jsonl
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import read_manifest
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import find_damage

TINY = Path(__file__).parents[3] / "src" / "prime_rl" / "assets" / "tiny-qwen3"


class Bomb:
    """Unpickling it creates `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A directory in which every name that a reader might open holds a pickle, and the file that it would make."""
    mark = tmp_path / "executed"
    root = tmp_path / "planted"
    root.mkdir()
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)  # noqa: S301
    assert mark.exists(), "the bomb works"
    mark.unlink()
    names = (
        "batch.msgpack model.safetensors adapter_model.safetensors manifest.json state.json metrics.jsonl rows.jsonl"
    )
    for name in [*names.split(), "STABLE", "tokenizer.json", "config.json", "pytorch_model.bin", "canary.json"]:
        (root / name).write_bytes(bomb)
    yield root, mark
    assert not mark.exists(), "a planted file was run"


LOOKED_UP: list[str] | None = None


def watch_unpickling(event: str, arguments: tuple[Any, ...]) -> None:
    """The interpreter's audit hook reports every class that an unpickler looks up, in Python or C."""
    if event == "pickle.find_class" and LOOKED_UP is not None:
        LOOKED_UP.append(".".join(map(str, arguments)))


@pytest.fixture
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unpickling anything is an error."""
    global LOOKED_UP

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled")

    LOOKED_UP = []
    pickle.loads(pickle.dumps(Path("x")))  # noqa: S301
    assert LOOKED_UP == ["pathlib.PosixPath"], "the hook works"
    LOOKED_UP.clear()
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    yield
    found, LOOKED_UP = LOOKED_UP, None
    assert not found, found


sys.addaudithook(watch_unpickling)


READERS: dict[str, Callable[[Path], object]] = {
    "a batch": lambda root: decode_batch(read_batch(root) or b""),
    "a manifest": read_manifest,
    "weights": check_directory,
    "a seal": find_damage,
    "a tokenizer": lambda root: load_tokenizer(str(root)),
    "rows": lambda root: load_rows(str(root / "rows.jsonl")),
    "tensors of a nanochat model": lambda root: read_tensors(root / "pytorch_model.bin"),
    "a published nanochat tokenizer": lambda root: read_published((root / "state.json").read_bytes()),
}


@pytest.mark.parametrize("what", READERS)
def test_pickles_in_data_directories_are_rejected_unread(
    what: str, planted: tuple[Path, Path], no_unpickling: None
) -> None:
    if what == "a seal":
        assert "STABLE is not what was written" in (find_damage(planted[0]) or "")
        return
    with pytest.raises((ValueError, OSError)):
        READERS[what](planted[0])


BRACKETS = b"[" * 100_000 + b"]" * 100_000
DEEP_OBJECT = b'{"x": ' + BRACKETS + b"}"
DEEP_BATCH = b"\x83\xa6schema\x01\xa4step\x01\xa7samples\x91\x81\xa8metadata\x81\xa1x" + b"\x91" * 100_000 + b"\x01"
NESTED: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "batch.msgpack": (DEEP_BATCH, lambda path: decode_batch(path.read_bytes())),
    "manifest.json": (DEEP_OBJECT, lambda path: read_manifest(path.parent)),
    "canary.json": (DEEP_OBJECT, lambda path: read_canary(path.parent)),
    "config.json": (DEEP_OBJECT, lambda path: load_hf_config(path.parent)),
    "rows.jsonl": (DEEP_OBJECT, lambda path: load_rows(str(path))),
    "samples.jsonl": (DEEP_OBJECT, load_samples_from_jsonl),
    "prompts.jsonl": (DEEP_OBJECT, create_buffer_from_jsonl),
    "state.json": (DEEP_OBJECT, read_json_file),
    "ray.json": (DEEP_OBJECT, read_plan),
    "broadcast.json": (DEEP_OBJECT, lambda path: read_broadcast(path.parent)),
    "tokenizer.json": (DEEP_OBJECT, Vocabulary),
    "adapter_config.json": (DEEP_OBJECT, lambda path: load_adapter(path.parent)),
    "run.toml": (b"a = " + BRACKETS, lambda path: parse_argv(LogConfig, ["@", str(path)], "eval")),
}


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    content, read = NESTED[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError) as refused:
        read(tmp_path / name)
    message = str(refused.value)
    assert name.partition(".")[0] in message and len(message) < 400, message


def test_deep_nesting_of_records_hides_no_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + DEEP_OBJECT + b'\n{"step": 2}\n')
    assert [row["step"] for row in load_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")[0]] == [1, 2]
    (tmp_path / "STABLE").write_bytes(BRACKETS)
    assert "STABLE is not what was written" in (find_damage(tmp_path) or "")


@pytest.mark.parametrize("parse", [parse_hermes, parse_llama])
def test_deep_nesting_from_a_model_is_text(parse: Callable[[str], Any]) -> None:
    text = ("<tool_call>" if parse is parse_hermes else "") + BRACKETS.decode()
    assert parse(text) == (text, [])


def test_deep_nesting_on_the_command_line_is_rejected() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_argv(OrchestratorConfig, ["--env", BRACKETS.decode()], "orchestrator")


def test_records_of_another_kind_are_left_out(planted: tuple[Path, Path], no_unpickling: None) -> None:
    assert list(load_jsonl(planted[0] / "metrics.jsonl")) == []


def test_a_model_directory_brings_no_code(tmp_path: Path) -> None:
    """`auto_map` and Python files in a model directory are not imported unless trust_remote_code is set."""
    root, mark = tmp_path / "model", tmp_path / "executed"
    shutil.copytree(TINY, root)
    (root / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    settings = json.loads((root / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    before = set(sys.modules)
    try:
        load_tokenizer(str(root))
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    assert not mark.exists() and not [name for name in set(sys.modules) - before if "evil" in name]


def test_safetensors_with_a_wrong_length(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 1, "step": 1, "tensors": {}}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    for data in (struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", len(header)) + header, b"", b"\x00" * 7):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
            check_directory(tmp_path)


def test_weight_directories_outside_the_list(tmp_path: Path) -> None:
    inside, outside = tmp_path / "run", tmp_path / "outside" / "step_1"
    (inside / "weights").mkdir(parents=True)
    outside.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "loop").symlink_to(inside / "loop")
    for path in (outside, inside / ".." / "outside" / "step_1", inside / "link", Path("/"), tmp_path / "run-too", "\0"):
        with pytest.raises((PermissionError, ValueError, OSError, RuntimeError)):
            resolve_allowed(str(path), [inside])
    assert resolve_allowed(str(inside / "weights" / "step_1"), [inside]) == inside / "weights" / "step_1"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(None)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A server for bodies of 10 kB at most, with half a second for each."""
    running = RunningServer(None, server={"max_request_mb": 0.01, "read_timeout": 0.5})
    yield running
    running.stop()


def test_too_long_bodies_are_rejected(small: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"a" * 1000

    for content in (b"a" * 20_000, pieces()):
        reply = small.http.post("/v1/completions", content=content)
        assert reply.status_code == 413 and "server.max_request_mb" in reply.json()["error"]["message"]
    assert small.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}).status_code == 200


def plain(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", **more}


def output(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **more}


CHAT, TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
REFUSALS: list[tuple[str, str, list[Any]]] = [
    ("/v1/completions", "not valid JSON", [None]),
    ("/v1/completions", "the body must be a JSON object", [[], "x", 1]),
    ("/v1/completions", "prompt must be a string, a list of token ids", [{"prompt": None}, {"prompt": {}}]),
    ("/v1/completions", "the prompt is empty", [{"prompt": [[]]}]),
    ("/v1/completions", "prompt must be below the vocabulary size 320", [{"prompt": [-1]}]),
    ("/v1/completions", "prompt must be a list of token ids",
     [{"prompt": [2**70]}, {"prompt": [1.5]}, {"prompt": [True]}, {"prompt": ["a", 1]}]),
    ("/v1/completions", "n must be an integer of at least 1 and at most 256", [plain(n=10**9), plain(n=-1)]),
    ("/v1/completions", "max_tokens must be an integer of at least 1", [plain(max_tokens=-5), plain(max_tokens="3")]),
    ("/v1/completions", "temperature must be a number from 0", [plain(temperature="hot"), plain(temperature=-1)]),
    ("/v1/completions", "top_p must be a number from 0 to 1", [plain(top_p=7)]),
    ("/v1/completions", "top_k must be an integer", [plain(top_k=1.5)]),
    ("/v1/completions", "seed must be an integer", [plain(seed="x"), plain(seed=2**200)]),
    ("/v1/completions", "stop must be a string or a list of strings", [plain(stop=[1]), plain(stop={})]),
    ("/v1/completions", "logit_bias must map token ids to numbers",
     [plain(logit_bias=[1]), plain(logit_bias={"x": 1}), plain(logit_bias={"1": "x"})]),
    ("/v1/completions", "logprobs must be an integer",
     [plain(logprobs=-1), plain(logprobs=10**6), plain(logprobs={}), plain(logprobs="all")]),
    ("/v1/completions", "stream must be true or false", [plain(stream="yes")]),
    ("/v1/completions", "is not served; available: 'tiny-qwen3'",
     [plain(model=["x"]), plain(model="../../etc/passwd")]),
    ("/v1/completions", "echo must be true or false", [plain(echo=3)]),
    ("/v1/completions", "maximum context length is 2048 tokens", [{"prompt": "a" * 5000}]),
    ("/v1/completions", "exceeds max_tokens = 16", [plain(min_tokens=10**9)]),
    ("/v1/completions", "repetition_penalty must be a number from 1e-06", [plain(repetition_penalty=0)]),
    ("/v1/completions", "unknown field 'unknown'", [plain(unknown=1)]),
    (CHAT, "the body must be a JSON object", [[]]),
    (CHAT, "messages must be a non-empty list of messages",
     [{}, {"messages": None}, {"messages": "hi"}, {"messages": []}, {"messages": [1]}]),
    (CHAT, "messages[0].role is", [{"messages": [{}]}, {"messages": [{"role": 1, "content": "x"}]}]),
    (CHAT, "content of a message must be text or a list of parts", [{"messages": [{"role": "user", "content": 3}]}]),
    (CHAT, "a content part must be", [{"messages": [{"role": "user", "content": [None]}]}]),
    (CHAT, "a content part must be", [{"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}]),
    (CHAT, "tool_calls must be a list", [{"messages": [{"role": "assistant", "tool_calls": 3}]}]),
    (CHAT, "a tool call must be an object", [{"messages": [{"role": "assistant", "tool_calls": [None]}]}]),
    (CHAT, "parts of type 'image_url' are not supported",
     [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]),
    (CHAT, "tools must be a list of tool definitions", [output(tools="hammer"), output(tools=[1])]),
    (CHAT, "tool_choice requires a call: add tools", [output(tool_choice="required")]),
    (CHAT, "top_logprobs needs logprobs = true", [output(top_logprobs=99)]),
    (CHAT, "chat_template_kwargs must be an object", [output(chat_template_kwargs=[1])]),
    (CHAT, "tokens belongs to /v1/chat/completions/tokens", [output(tokens=[1])]),
    (TOKENS, "the prompt is empty", [output(tokens=[])]),
    (TOKENS, "tokens must be below the vocabulary size", [output(tokens=[-1])]),
    (TOKENS, "tokens must be a list of token ids", [output(tokens="x"), output(tokens=[2**70])]),
    ("/update_weights", "the body must be a JSON object", [[]]),
    ("/update_weights", 'give {"weight_dir": "<directory>"}',
     [{}, {"weight_dir": 3}, {"weight_dir": ""}, {"weight_dir": ["/tmp"]}]),
    ("/update_weights", 'give {"weight_dir": null, "step": N}', [{"weight_dir": None}]),
    ("/update_weights", "is not below inference.output_dir or inference.weight_dirs",
     [{"weight_dir": "/etc"}, {"weight_dir": "../.."}, {"weight_dir": "~"}, {"weight_dir": "a" * 5000}]),
    ("/update_weights", "is not a valid path", [{"weight_dir": "\0"}]),
    ("/v1/load_lora_adapter", "lora_name must be a unique name", [{}, {"lora_name": 3, "lora_path": "/"}]),
    ("/v1/load_lora_adapter", 'give {"lora_path": "<directory>"}', [{"lora_name": "x"}]),
    ("/tokenize", "the body must be a JSON object", [[]]),
    ("/tokenize", "messages or a prompt is required", [{}, {"prompt": 3}]),
    ("/tokenize", "messages must be a non-empty list", [{"messages": 3}]),
    ("/detokenize", "the body must be a JSON object", [[]]),
    ("/detokenize", "tokens must be a list of token ids", [{}, {"tokens": "x"}, {"tokens": [2**70]}]),
    ("/detokenize", "tokens must be below the vocabulary size", [{"tokens": [-1]}]),
    ("/score", "the body must be a JSON object", [[]]),
    ("/score", "invalid score request", [{}, {"tokens": "x"}]),
    ("/score", "tokens must be below the vocabulary size", [{"tokens": [-1]}]),
    ("/score", "start must be from 1", [{"tokens": []}, {"tokens": [5]}]),
    ("/score", "maximum context length is", [{"tokens": [5] * 3000}]),
    ("/detokenize", "maximum context length is", [{"tokens": [5] * 3000}]),
    ("/tokenize", "maximum context length is", [{"prompt": "a" * 80_000}, {"messages": [{"role": "user"}] * 3000}]),
    ("/tokenize", "must be true or false", [{"prompt": "a", "add_special_tokens": "no"},
                                            {"prompt": "a", "return_token_strs": 1}]),
    ("/v1/completions", "maximum context length is", [{"prompt": [5] * 3000}, {"prompt": [[5] * 3000]}]),
    ("/v1/completions", "requests: send fewer", [{"prompt": [[5]] * 17_000}, {"prompt": [[5]] * 100, "n": 256}]),
    ("/v1/completions", "stop must have at most 64 strings",
     [plain(stop=[""] * 10_000), plain(stop=""), plain(stop=["x"] * 65), plain(stop="x" * 2000)]),
    ("/v1/completions", "stop_token_ids must have at most", [plain(stop_token_ids=[1] * 1025)]),
    ("/v1/completions", "logit_bias must have at most", [plain(logit_bias={str(i): 1 for i in range(321)})]),
    ("/v1/completions", "unknown field", [plain(**{"x" * 100_000: 1})]),
    ("/v1/completions", "is not served", [plain(model="x" * 100_000)]),
    (CHAT, "messages[0].role is 'evil'", [{"messages": [{"role": "evil", "content": "x"}]}]),
    (CHAT, "messages[0].content is missing",
     [{"messages": [{"role": "user"}]}, {"messages": [{"role": "assistant"}]}]),
    (CHAT, "messages[0].role is", [{"messages": [{"role": ["user"], "content": "x"}]}]),
    (CHAT, "chat_template_kwargs.chat_template cannot be set",
     [output(chat_template_kwargs={"chat_template": "{% for i in range(99999) %}x{% endfor %}"})]),
    (CHAT, "chat_template_kwargs.tokenize cannot be set", [output(chat_template_kwargs={"tokenize": True})]),
    (CHAT, "maximum context length is", [{"messages": [{"role": "user", "content": "<|im_end|>" * 1000}]}]),
    ("/inference/v1/generate", "request_id must be a string",
     [{"token_ids": [5], "sampling_params": {}, "request_id": value} for value in (3, "x" * 1000)]),
    ("/v1/unload_lora_adapter", "lora_name must be the name", [{}, {"lora_name": 3}]),
    ("/v1/load_lora_adapter", "lora_name must be a unique name", [{"lora_name": "x" * 1000, "lora_path": "/"}]),
]  # fmt: skip
"""Route, words of the refusal, and bodies that get it."""
CASES = [(path, body, words) for path, words, bodies in REFUSALS for body in bodies]


@pytest.mark.parametrize(("path", "body", "words"), CASES, ids=lambda value: None)
def test_invalid_requests_get_an_error_and_server_survives(
    path: str, body: Any, words: str, server: RunningServer
) -> None:
    reply = server.post(path, body)
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text)
    message = reply.json()["error"]["message"]
    assert words in message and "Traceback" not in message and len(message) < 2000


def test_bytes_that_are_no_request_and_the_server_lives(server: RunningServer) -> None:
    for content in (b"", b"{", b"\x80\xff", b"[" * 9000, b'{"prompt": "\xff"}', b"NaN", b'{"a":1}{"b":2}'):
        reply = server.http.post("/v1/completions", content=content)
        assert 400 <= reply.status_code < 500, (content[:20], reply.text)
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("depth", [300, 990, 1020, 100_000])
@pytest.mark.parametrize(
    "field", ["model", "messages", "tools", "metadata", "chat_template_kwargs", "stop", "weight_dir"]
)
def test_deep_nesting_never_fails_the_server(depth: int, field: str, server: RunningServer) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        nested = opening * depth + ("1" if opening != "[" else "") + closing * depth
        value = f'[{{"role": "user", "content": "x", "a": {nested}}}]' if field in ("messages", "tools") else nested
        body = f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'.encode()
        for path in (CHAT, "/tokenize", "/update_weights", "/score"):
            reply = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert reply.status_code < 500, (path, reply.text[:300])
            assert reply.status_code == 200 or len(reply.json()["error"]["message"]) < 500


def test_deeply_nested_tool_arguments_and_surrogates(server: RunningServer) -> None:
    for arguments in ('{"a":' * 5000 + "1" + "}" * 5000, '"\\ud800"', "[" * 10_000):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "x", "tool_calls": [call]}
        reply = server.post("/tokenize", {"messages": [message]})
        assert reply.status_code in (200, 400), reply.text[:300]


def test_deeply_nested_manifest_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"a": ' * 100_000)
    with pytest.raises(ValueError, match="is no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("name", "top"), [("MAX_NUMBERS", -1), ("MAX_PAIRS", 319)])
def test_scores_of_one_request_are_bounded(
    name: str, top: int, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"prime_rl.inference.routes.score.{name}", 320)
    assert server.post("/score", {"tokens": [5, 6], "top": top}).status_code == 200
    reply = server.post("/score", {"tokens": [5, 6, 7], "top": top})
    assert reply.status_code == 400 and "raise start, or lower top" in reply.json()["error"]["message"]


def test_long_supports_are_read_by_default(server: RunningServer) -> None:
    """As those of a teacher's sample of 2,000 tokens, each drawn from 1,000."""
    support = b"\x80\x80\x80\x02" + bytes(2**21)  # of one token: the first 2 ** 21 ids
    reply = server.post("/score", {"tokens": [5, 6], "support": base64.b64encode(support).decode()})
    assert reply.status_code == 400 and "the vocabulary size is 320" in reply.json()["error"]["message"]


def test_large_texts_do_not_delay_other_requests() -> None:
    server = RunningServer(None, {"max_model_len": 128})
    try:
        with ThreadPoolExecutor(2) as pool:
            bodies = [("/v1/completions", {"prompt": "a b " * 2_000_000}), ("/tokenize", {"prompt": "a" * 8_000_000})]
            replies = [pool.submit(server.post, path, body) for path, body in bodies]
            slowest = 0.0
            while not all(reply.done() for reply in replies):
                start = time.monotonic()
                assert server.http.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - start)
            assert [reply.result().status_code for reply in replies] == [400, 400]
        assert slowest < 2.0
    finally:
        server.stop()


FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:80",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "[::1",
    "a, b",
)
OWN_HOSTS = ("localhost", "localhost:1", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", socket.gethostname())


@pytest.mark.parametrize("path", ["/pause", "/reload_weights", "/update_weights", CHAT, "/v1/models", "/openapi.json"])
def test_web_pages_of_other_servers_get_no_answer(path: str, server: RunningServer) -> None:
    method = "GET" if path in ("/v1/models", "/openapi.json") else "POST"
    port = server.root.rpartition(":")[2]
    for origin in ("http://evil.example", "null", "http://localhost:1", f"https://localhost.evil.example:{port}"):
        reply = server.http.request(method, path, headers={"origin": origin})
        assert reply.status_code == 403 and "rejects cross-origin requests" in reply.json()["error"]["message"]
    for host in FOREIGN_HOSTS:
        reply = server.http.request(method, path, headers={"host": host})
        assert reply.status_code == 403, (host, reply.text)
    assert server.http.get("/is_paused").json() == {"is_paused": False} and server.service.num_updates == 0


def test_own_names_and_own_pages_are_answered(server: RunningServer) -> None:
    for host in OWN_HOSTS:
        assert server.http.get("/v1/models", headers={"host": host}).status_code == 200, host
    assert server.http.get("/v1/models", headers={"origin": server.root}).status_code == 200
    assert server.http.get("/health", headers={"host": "evil.example"}).status_code == 200


def test_names_of_a_server_that_other_machines_use() -> None:
    def status(access: Access, name: str, *, origin: str = "", **server: Any) -> int:
        hosts = build_hosts(ServerConfig.model_validate({"host": "0.0.0.0", **server}))
        headers = [(b"host", name.encode()), *([(b"origin", origin.encode())] if origin else [])]
        scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": headers, "path": "/x", "method": "POST"}
        try:
            check_access(None, Request(scope), access, hosts)
        except ApiError as error:
            return error.status
        return 200

    assert status("api", "node-7.cluster.example:8000") == 200
    assert status("api", "node-7.cluster.example:8000", origin="http://node-7.cluster.example:8000") == 403
    assert status("control", "node-7.cluster.example:8000") == 403
    assert status("control", "node-7.cluster.example", allowed_hosts=["node-7.cluster.example"]) == 200
    assert status("control", "inference.example", host="inference.example") == 200
    assert status("api", "evil.example", host="127.0.0.1") == 403


def test_non_json_bodies_are_rejected(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for path in (CHAT, "/update_weights", "/v1/completions", "/tokenize", "/score"):
            reply = server.http.post(path, content=b"{}", headers={"content-type": kind})
            assert reply.status_code == 415 and "application/json" in reply.json()["error"]["message"]
    headers = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post("/tokenize", content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"POST /v1/comp",
        b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
        b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"prompt"',
        b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea",
    ],
)
def test_half_sent_requests_are_closed(part: bytes, small: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", int(small.root.rpartition(":")[2])), DEADLINE_S) as raw:
        start = time.monotonic()
        raw.sendall(part)
        answer = b"".join(iter(lambda: raw.recv(2**16), b""))  # until it is closed
    assert time.monotonic() - start < DEADLINE_S / 2
    if b"{" in part:
        assert b"408" in answer.split(b"\r\n")[0] and b"server.read_timeout" in answer


def test_too_long_headers_are_rejected(small: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", int(small.root.rpartition(":")[2])), DEADLINE_S) as raw:
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                raw.sendall(b"x: " + b"a" * 2**16)
        with contextlib.suppress(ConnectionError):
            assert raw.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431")
    assert small.http.get("/health").status_code == 200


def test_all_bodies_together_are_bounded() -> None:
    async def main() -> None:
        held = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await read_body(Request(scope, receive))
            await held.wait()
            await Response("good")(scope, receive, send)

        limit = BodyLimit(app, 600, 5.0, build_error_response, max_reserved=1000)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(limit), base_url="http://localhost") as http:
            first = [asyncio.create_task(http.post("/", content=b"x" * 450)) for _ in range(2)]
            while limit.reserved < 900:
                await asyncio.sleep(0)
            reply = await http.post("/", content=b"x" * 450)
            assert reply.status_code == 503 and reply.headers["retry-after"] and limit.reserved == 900
            held.set()
            assert [one.status_code for one in await asyncio.gather(*first)] == [200, 200] and limit.reserved == 0

    asyncio.run(main())


def test_reports_and_pages_show_no_secret(tmp_path: Path) -> None:
    """The configs in the run directory contain secrets for the processes; reports and pages do not."""
    (tmp_path / "configs").mkdir()
    config = OrchestratorConfig.model_validate(
        {
            "client": {"headers": {"Authorization": "Bearer geheim-1"}, "api_key_var": "MY_KEY"},
            "env": [{"id": "reverse-text", "args": {"judge_api_key": "geheim-2", "password": "geheim-3", "n": 3}}],
        }
    )
    write_config(config, tmp_path / "configs" / "orchestrator.toml")
    assert "geheim-2" in (tmp_path / "configs" / "orchestrator.toml").read_text()
    assert (tmp_path / "configs" / "orchestrator.toml").stat().st_mode & 0o077 == 0, "for their owner alone"
    shown = LocalRun(tmp_path).configs()["orchestrator"]
    assert "geheim" not in shown and shown.count('"***"') == 3 and 'api_key_var = "MY_KEY"' in shown


def test_report_shows_no_secret_of_an_older_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a run that was recorded elsewhere, before the value was a secret here."""
    from prime_rl.monitor.report import write_report
    from prime_rl.runtime import redaction

    monkeypatch.setenv("FOO_TOKEN", "geheim-12345678")
    redaction.refresh_secrets()
    row = {"step": 1, "timestamp": 1.0, "process": "orchestrator", "env": "e geheim-12345678", "reward": 1.0}
    row |= {"prompt": "p geheim-12345678", "completion": "c", "tokens": [1, 2], "loss_mask": [0, 1]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "timestamp": 1.0, "process": "trainer", "loss/mean": 1.0}\n')
    write_report(LocalRun(tmp_path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    payloads = re.findall(r"[A-Za-z0-9+/=]{200,}", page)
    texts = [gzip.decompress(base64.b64decode(p)).decode(errors="replace") for p in payloads if p.startswith("H4sI")]
    assert texts and any("p ***" in text for text in texts)
    assert not any("geheim" in text for text in [page, *texts])
    redaction.refresh_secrets()


def test_nothing_of_ours_evaluates_text() -> None:
    """No `eval` or `exec` of model output, rows or configs, and no unpickling except of nanochat's tokenizer."""
    import ast

    root = Path(__file__).parents[3]
    found = []
    for path in [*(root / "src").rglob("*.py"), *(root / "environments").rglob("*.py")]:
        text = path.read_text()
        if not re.search(r"\b(eval|exec|pickle|marshal|shelve)\b", text):
            continue  # to parse all takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.Import) and any(
                alias.name in ("pickle", "marshal", "shelve") for alias in node.names
            ):
                found.append(f"{path.name}: pickle")
    assert found == ["tokenizer.py: pickle"]
