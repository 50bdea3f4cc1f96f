"""Constrained sampling: JSON schemas, forced tool calls, their log-probs, and their refusal in training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from running_server import RunningServer

from prime_rl.client.constraints import find_constraint
from prime_rl.client.scoring import PackedScores
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.engine import SamplingParams
from prime_rl.inference.grammar import GrammarCompiler, build_grammar
from prime_rl.inference.request_parsing import with_defaults
from prime_rl.inference.sglang.protocol import check_params
from prime_rl.inference.tool_parser import TOOL_DIALECTS
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.registry import load_eos_ids
from prime_rl.utils.client import InferenceClient
from rollouts.training.agent_integration import rollout_to_samples
from rollouts.training.environments.plain import PlainEnvironment

TOKENIZER = load_tokenizer("tiny-qwen3")
CHAT = [{"role": "user", "content": "abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["ok", "unit"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
ADD = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"digit": {"enum": [1, 2, 3]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": 'say "hi"', "parameters": {**SCHEMA}}},
]
NAMED = {"type": "function", "function": {"name": "add"}}


TEXTS = [{"type": "string", "pattern": f"^x{{0,{i + 1}}}y?.*z{{{i}}}$"} for i in range(200)]
COMPLEX = {"anyOf": [{"type": "object", "properties": {"a": text}, "required": ["a"]} for text in TEXTS]}
"""At the value of `a`, llguidance reaches a limit."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    pytest.importorskip("llguidance", reason="constrained sampling needs the extra `grammar`")
    running = RunningServer(None, served_model_name="policy-under-test")
    yield running
    running.stop()


def chat(server: RunningServer, **fields: Any) -> Any:
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 120, "temperature": 1.0, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_holds_for_an_untrained_model(server: RunningServer, seed: int) -> None:
    [choice] = chat(server, response_format=JSON_FORMAT, seed=seed)["choices"]
    answer = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert isinstance(answer["ok"], bool) and answer["unit"] in ("m", "km") and len(answer) == 2


def test_json_object_and_completions_and_streams(server: RunningServer) -> None:
    content = chat(server, response_format={"type": "json_object"}, max_tokens=400, temperature=0.01)["choices"][0]
    assert content["message"]["content"].startswith("{")
    body = {"prompt": "abc", "max_tokens": 60, "response_format": JSON_FORMAT}
    assert set(json.loads(server.post("/v1/completions", body).json()["choices"][0]["text"])) == {"ok", "unit"}
    body = {"messages": CHAT, "max_tokens": 60, "response_format": JSON_FORMAT, "stream": True}
    lines = server.post("/v1/chat/completions", body).text.split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert set(json.loads(text)) == {"ok", "unit"}


@pytest.mark.parametrize(
    ("choice", "parallel", "names"), [("required", False, {"add", 'say "hi"'}), (NAMED, True, {"add"})]
)
def test_forced_calls_are_valid(server: RunningServer, choice: Any, parallel: bool, names: set[str]) -> None:
    """`required` with `parallel_tool_calls = false`, and a named function, get exactly one call."""
    seen = set()
    for seed in range(8):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": seed}
        [answer] = chat(server, **fields, temperature=50)["choices"]
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        [call] = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == ({"x"} if call["function"]["name"] == "add" else {"ok", "unit"})
        seen.add(call["function"]["name"])
    assert seen == names


def test_a_schema_with_optional_tools_allows_both(server: RunningServer) -> None:
    kinds = set()
    for seed in range(12):
        fields = {
            "tools": TOOLS,
            "response_format": JSON_FORMAT,
            "parallel_tool_calls": False,
            "seed": seed,
            "temperature": 50,
        }
        message = chat(server, **fields)["choices"][0]["message"]
        kinds.add("call" if message.get("tool_calls") else "json")
        assert message.get("tool_calls") or set(json.loads(message["content"])) == {"ok", "unit"}
    assert kinds == {"call", "json"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be"),
        ({"response_format": "json"}, "response_format.type must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema must be a JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "objekt"),
        ({"response_format": JSON_FORMAT, "ignore_eos": True}, "ignore_eos cannot be combined"),
        ({"response_format": JSON_FORMAT, "min_tokens": 2}, "min_tokens cannot be combined"),
        ({"tool_choice": "required"}, "add tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS}, "a tool named 'sub'"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice must be"),
        ({"tool_choice": "required", "tools": [{"type": "custom"}]}, "every tool must be a function"),
    ],
)
def test_bad_constraints_name_the_field(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    reply = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, **fields})
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


def test_grammars_that_exceed_a_limit_fail(server: RunningServer) -> None:
    complex_format = {"type": "json_schema", "json_schema": {"schema": COMPLEX}}
    body = {"messages": CHAT, "max_tokens": 100, "seed": 0, "response_format": complex_format}
    replies = [server.post("/v1/chat/completions", body) for _ in range(2)]
    for reply in replies:
        assert reply.status_code == 500, reply.text
        assert "the grammar cannot be continued: lexer error: too many" in reply.text
    assert replies[0].text == replies[1].text, "the second completion gets as far as the first"


def test_a_failed_grammar_is_compiled_anew() -> None:
    pytest.importorskip("llguidance", reason="constrained sampling needs the extra `grammar`")
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])
    grammar = build_grammar(COMPLEX, [], "hermes", {}, single=False)
    state, beside = compiler.open(grammar), compiler.open(grammar)
    first, *rest = TOKENIZER.encode('{"a": "', add_special_tokens=False)
    expected = compiler.open(grammar)
    for each in (beside, expected):
        each.advance(first)
    mask = expected.forbidden()
    for token in (first, *rest):
        assert not state.error and not state.forbidden()[token]
        state.advance(token)
    assert state.forbidden().all() and "too many" in state.error
    assert (beside.forbidden() == mask).all() and not beside.error, "completions beside it go on"
    later = compiler.open(grammar)
    assert not later.forbidden().all() and not later.error
    assert state.forbidden().all() and compiler.open(grammar).forbidden().sum() == later.forbidden().sum()


@pytest.mark.parametrize("fields", [{"response_format": JSON_FORMAT}, {"tools": TOOLS, "tool_choice": NAMED}])
def test_defaults_do_not_contradict_a_grammar(fields: dict[str, Any]) -> None:
    defaults = {"min_tokens": 4, "ignore_eos": True, "temperature": 0.5}
    assert with_defaults(fields, defaults, chat=True) == {**fields, "temperature": 0.5}
    plain = {"tools": TOOLS, "tool_choice": "auto"}
    assert with_defaults(plain, defaults, chat=True) == {**plain, **defaults}


def test_logprobs_are_those_of_the_allowed_tokens(server: RunningServer) -> None:
    fields = {"response_format": JSON_FORMAT, "logprobs": True, "return_token_ids": True, "seed": 3}
    answer = chat(server, **fields)
    [choice], prompt = answer["choices"], answer["prompt_token_ids"]
    ids = choice["token_ids"]
    compiler = GrammarCompiler(TOKENIZER, server.service.vocab, load_eos_ids(resolve_model_dir("tiny-qwen3")))
    state = compiler.open(build_grammar(SCHEMA, [], "hermes", {}, single=False))
    scores = server.post("/score", {"tokens": [*prompt, *ids], "start": len(prompt), "top": -1}).content
    packed = msgspec.msgpack.decode(scores, type=PackedScores).top_logprobs
    full = torch.from_numpy(np.frombuffer(packed, dtype=np.float32).reshape(len(ids), -1).copy())
    for token, entry, row in zip(ids, choice["logprobs"]["content"], full, strict=True):
        row[torch.from_numpy(state.forbidden())] = -torch.inf
        assert entry["logprob"] == pytest.approx(float(torch.log_softmax(row, -1)[token]), abs=1e-5)
        state.advance(token)
    assert sum(entry["logprob"] for entry in choice["logprobs"]["content"]) < 0


def test_other_rows_of_a_batch_keep_their_bits(server: RunningServer) -> None:
    plain = {"messages": CHAT, "max_tokens": 24, "seed": 5, "logprobs": True}
    alone = chat(server, **{k: v for k, v in plain.items() if k != "messages"})["choices"][0]["logprobs"]

    async def run() -> Any:
        client = InferenceClient(f"{server.root}/v1")
        try:
            answers: list[Any] = [None] * 4

            async def send(i: int) -> None:
                extra = {"response_format": JSON_FORMAT} if i % 2 else {}
                body = {**plain, "model": "policy-under-test", "return_token_ids": True, **extra}
                answers[i] = await client.chat.completions.create(**body)

            async with anyio.create_task_group() as group:
                for i in range(4):
                    group.start_soon(send, i)
            return answers
        finally:
            await client.close()

    answers = anyio.run(run)
    for answer in answers[::2]:
        assert [entry.logprob for entry in answer.choices[0].logprobs.content] == [
            entry["logprob"] for entry in alone["content"]
        ]


def test_training_refuses_constrained_turns(server: RunningServer) -> None:
    async def run(extra: dict[str, Any]) -> Any:
        client = InferenceClient(f"{server.root}/v1")
        environment = PlainEnvironment([{"prompt": "x"}], lambda completion: 1.0)
        sampling = {"max_tokens": 40, "logprobs": True, "extra_body": {"return_token_ids": True, **extra}}
        try:
            [rollout] = await environment.run_group(environment.rows()[0], client, "policy-under-test", [sampling])
        finally:
            await client.close()
        return rollout

    rollout = anyio.run(run, {"response_format": JSON_FORMAT})
    assert not rollout.failed and rollout.reward == 1.0, "evaluation may use it"
    with pytest.raises(ValueError, match=r"response_format.*biased"):
        rollout_to_samples(rollout)
    [sample] = rollout_to_samples(anyio.run(run, {"response_format": {"type": "text"}}))
    assert sum(sample.loss_mask) > 0


def test_configs_refuse_constraints() -> None:
    constrained = {"sampling": {"extra_body": {"guided_json": SCHEMA}}}
    with pytest.raises(ValidationError, match="guided_json restricts sampling"):
        OrchestratorConfig.model_validate(constrained)
    with pytest.raises(ValidationError, match="guided_json cannot be a default"):
        InferenceConfig.model_validate(constrained)
    assert find_constraint({"tool_choice": "auto", "response_format": None, "guided_regex": None}) is None


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    running = RunningServer(None)
    try:
        reply = running.post("/v1/chat/completions", {"messages": CHAT, "response_format": JSON_FORMAT})
        assert reply.status_code == 400 and "pip install 'prime-rl[grammar]'" in reply.text
    finally:
        running.stop()


def test_sglang_refuses_grammars() -> None:
    with pytest.raises(ValueError, match="not supported with SGLang"):
        check_params(SamplingParams(max_tokens=1, grammar="start: json"))


@pytest.mark.parametrize("dialect", sorted(TOOL_DIALECTS))
def test_calls_of_every_dialect_parse(dialect: str) -> None:
    pytest.importorskip("llguidance", reason="constrained sampling needs the extra `grammar`")
    compiler = GrammarCompiler(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])
    added = TOKENIZER.get_added_vocab()
    state = compiler.open(build_grammar(None, TOOLS, dialect, added, single=False))
    rng, ids = np.random.default_rng(0), []
    for _ in range(2000):
        allowed = np.flatnonzero(~state.forbidden())
        token = int(rng.choice(allowed))
        if token == TOKENIZER.eos_token_id:
            break
        ids.append(token)
        state.advance(token)
    text, calls = TOOL_DIALECTS[dialect].parse(TOKENIZER.decode(ids))
    assert text is None and calls and {call["function"]["name"] for call in calls} <= {"add", 'say "hi"'}


def test_models_by_id_and_served_name(server: RunningServer) -> None:
    names = [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    assert names == ["policy-under-test"]
    for name in ("policy-under-test", "tiny-qwen3"):
        card = server.http.get(f"/v1/models/{name}").json()
        assert (card["id"], card["object"], card["version"]) == ("policy-under-test", "model", 0)
        assert chat(server, model=name, max_tokens=1)["model"] == "policy-under-test"
    reply = server.http.get("/v1/models/org/other")
    assert reply.status_code == 404 and "'org/other' is not served" in reply.text
    with pytest.raises(ValidationError, match="'base' is reserved"):
        InferenceConfig(served_model_name="base")


def test_unknown_roles_are_refused(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]})
    assert reply.status_code == 400 and "messages[0].role is 'robot'" in reply.text
