"""Hostile input: what is planted in data directories is never run, and what is sent never takes more than its share."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from nanochat.checkpoint_manager import read_tensors
from nanochat.tokenizer import read_published
from prime_rl.inference.directories import resolve_allowed
from prime_rl.monitor.local_runs import LocalRun
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.transport.batches import decode_batch, read_batch
from prime_rl.transport.weights import check_directory, read_manifest
from prime_rl.utils.pydantic_config import write_config
from prime_rl.utils.tokenizer import load_tokenizer
from rollouts.training.datasets.rows import load_rows
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import find_damage

TINY = Path(__file__).parents[2] / "src" / "prime_rl" / "assets" / "tiny-qwen3"


class Bomb:
    """Whoever unpickles it makes `mark`."""

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
    """The interpreter itself tells of every class that an unpickler looks up, Python's or C's, whoever imported it."""
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
def test_pickles_in_data_directories_are_refused_unread(
    what: str, planted: tuple[Path, Path], no_unpickling: None
) -> None:
    if what == "a seal":
        assert "STABLE is not what was written" in (find_damage(planted[0]) or "")
        return
    with pytest.raises((ValueError, OSError)):
        READERS[what](planted[0])


def test_records_of_another_kind_are_left_out(planted: tuple[Path, Path], no_unpickling: None) -> None:
    assert list(load_jsonl(planted[0] / "metrics.jsonl")) == []


def test_a_model_directory_brings_no_code(tmp_path: Path) -> None:
    """`auto_map` and Python files in a model directory are not imported unless trust_remote_code says so."""
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


def test_safetensors_that_lie_about_their_length(tmp_path: Path) -> None:
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
    running = RunningServer(None, server={"max_request_mb": 0.01})
    yield running
    running.stop()


def test_a_body_that_is_too_long_is_refused_announced_or_not(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(50):
            yield b"a" * 1000

    for content in (b"a" * 20_000, pieces()):
        reply = server.http.post("/v1/completions", content=content)
        assert reply.status_code == 413 and "server.max_request_mb" in reply.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1}).status_code == 200


def plain(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", **more}


def said(**more: Any) -> dict[str, Any]:
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
    ("/v1/completions", "is not served here, only 'tiny-qwen3'",
     [plain(model=["x"]), plain(model="../../etc/passwd")]),
    ("/v1/completions", "echo must be true or false", [plain(echo=3)]),
    ("/v1/completions", "maximum context length is 2048 tokens", [{"prompt": "a" * 5000}]),
    ("/v1/completions", "is more than max_tokens = 16", [plain(min_tokens=10**9)]),
    ("/v1/completions", "repetition_penalty must be a number from 1e-06", [plain(repetition_penalty=0)]),
    ("/v1/completions", "'unknown' is not a field", [plain(unknown=1)]),
    (CHAT, "the body must be a JSON object", [[]]),
    (CHAT, "messages must be a non-empty list of messages",
     [{}, {"messages": None}, {"messages": "hi"}, {"messages": []}, {"messages": [1]}]),
    (CHAT, "a message needs a role", [{"messages": [{}]}, {"messages": [{"role": 1, "content": "x"}]}]),
    (CHAT, "content of a message must be text or a list of parts", [{"messages": [{"role": "user", "content": 3}]}]),
    (CHAT, "a content part must be", [{"messages": [{"role": "user", "content": [None]}]}]),
    (CHAT, "a content part must be", [{"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}]),
    (CHAT, "tool_calls must be a list", [{"messages": [{"role": "assistant", "tool_calls": 3}]}]),
    (CHAT, "a tool call must be an object", [{"messages": [{"role": "assistant", "tool_calls": [None]}]}]),
    (CHAT, "parts of type 'image_url' are not supported",
     [{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]),
    (CHAT, "tools must be a list of tool definitions", [said(tools="hammer"), said(tools=[1])]),
    (CHAT, "tool_choice must be auto or none", [said(tool_choice="required")]),
    (CHAT, "top_logprobs needs logprobs = true", [said(top_logprobs=99)]),
    (CHAT, "chat_template_kwargs must be an object", [said(chat_template_kwargs=[1])]),
    (CHAT, "tokens belongs to /v1/chat/completions/tokens", [said(tokens=[1])]),
    (TOKENS, "the prompt is empty", [said(tokens=[])]),
    (TOKENS, "tokens must be below the vocabulary size", [said(tokens=[-1])]),
    (TOKENS, "tokens must be a list of token ids", [said(tokens="x"), said(tokens=[2**70])]),
    ("/update_weights", "the body must be a JSON object", [[]]),
    ("/update_weights", 'give {"weight_dir": "<directory>"}',
     [{}, {"weight_dir": 3}, {"weight_dir": ""}, {"weight_dir": ["/tmp"]}]),
    ("/update_weights", 'give {"weight_dir": null, "step": N}', [{"weight_dir": None}]),
    ("/update_weights", "is not below inference.output_dir or inference.weight_dirs",
     [{"weight_dir": "/etc"}, {"weight_dir": "../.."}, {"weight_dir": "~"}, {"weight_dir": "a" * 5000}]),
    ("/update_weights", "is no path", [{"weight_dir": "\0"}]),
    ("/v1/load_lora_adapter", "lora_name must be a name of its own", [{}, {"lora_name": 3, "lora_path": "/"}]),
    ("/v1/load_lora_adapter", 'give {"lora_path": "<directory>"}', [{"lora_name": "x"}]),
    ("/tokenize", "the body must be a JSON object", [[]]),
    ("/tokenize", "give messages or a prompt", [{}, {"prompt": 3}]),
    ("/tokenize", "messages must be a non-empty list", [{"messages": 3}]),
    ("/detokenize", "the body must be a JSON object", [[]]),
    ("/detokenize", "tokens must be a list of token ids", [{}, {"tokens": "x"}, {"tokens": [2**70]}]),
    ("/detokenize", "tokens must be below the vocabulary size", [{"tokens": [-1]}]),
    ("/score", "the body must be a JSON object", [[]]),
    ("/score", "not a request for scores", [{}, {"tokens": "x"}]),
    ("/score", "tokens must be below the vocabulary size", [{"tokens": [-1]}]),
]  # fmt: skip
"""Route, words of the refusal, and bodies that get it."""
CASES = [(path, body, words) for path, words, bodies in REFUSALS for body in bodies]


@pytest.mark.parametrize(("path", "body", "words"), CASES, ids=lambda value: None)
def test_a_wrong_request_is_refused_in_a_sentence_and_the_server_lives(
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


def test_reports_and_pages_show_no_secret(tmp_path: Path) -> None:
    """The processes need what the run directory's configs say; whoever is shown a run does not."""
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


def test_nothing_of_ours_evaluates_text() -> None:
    """No `eval` or `exec` of what a model, a row or a config says, and no unpickling but of nanochat's tokenizer."""
    import ast

    root = Path(__file__).parents[2]
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
