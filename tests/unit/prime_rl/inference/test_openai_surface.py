"""Everything that the official OpenAI client offers, against the server; docs/openai.md has the same table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel
from running_server import RunningServer

PAGE = Path(__file__).parents[4] / "docs" / "openai.md"
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
CHAT: dict[str, Any] = {"model": "tiny-qwen3", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny-qwen3", "prompt": "abc", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SHARED = {
    "model": "tiny-qwen3",
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "max_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 1,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "u",
}
VALUES: dict[str, dict[str, Any]] = {
    "chat.completions.create": {
        **SHARED,
        "messages": CHAT["messages"],
        "audio": {"voice": "alloy", "format": "wav"},
        "function_call": "auto",
        "functions": [TOOL["function"]],
        "logprobs": True,
        "max_completion_tokens": 2,
        "metadata": {"a": "b"},
        "modalities": ["text", "audio"],
        "moderation": {"model": "m"},
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "tool_choice": "required",
        "tools": [TOOL],
        "top_logprobs": 3,
        "verbosity": "low",
        "web_search_options": {},
    },
    "completions.create": {
        **SHARED,
        "prompt": ["abc", "de"],
        "best_of": 3,
        "echo": True,
        "logprobs": 3,
        "suffix": "end",
    },
}
"""A value of each parameter that is not the default."""
NEUTRAL = {"modalities": ["text"], "best_of": 1, "suffix": "", "verbosity": "medium"}
NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
}
NEEDS_GRAMMAR = ("response_format", "tool_choice")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    server = RunningServer(None)
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{server.root}/v1", api_key="none", http_client=http, max_retries=0) as client:
        yield client
    server.stop()


def read_table(section: str) -> dict[str, str]:
    """Name -> support of the first table after a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (\w[\w ]*) \|", text, re.MULTILINE)
    return {name: support for names, support in rows for name in re.findall(r"`(\w+)`", names)}


def call(client: openai.OpenAI, method: str, **fields: Any) -> Any:
    if method == "completions.create":
        return client.completions.create(**{**TEXT, **fields})
    return client.chat.completions.create(**{**CHAT, **fields})


@pytest.mark.parametrize("method", sorted(VALUES))
def test_page_lists_every_parameter_of_the_client(method: str) -> None:
    resources: Any = openai.resources
    function = resources.Completions if method == "completions.create" else resources.chat.Completions
    parameters = set(inspect.signature(function.create).parameters) - TRANSPORT
    assert parameters == set(VALUES[method]) == set(read_table(method))


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in sorted(VALUES) for name in VALUES[method]])
def test_parameters_are_served_as_documented(client: openai.OpenAI, method: str, name: str) -> None:
    support, value = read_table(method)[name], VALUES[method][name]
    if name in NEEDS_GRAMMAR:
        pytest.importorskip("llguidance", reason="constrained sampling needs the extra `grammar`")
    fields = {name: value, **NEEDED.get(name, {})}
    if support in ("refused", "neutral value"):
        with pytest.raises(openai.BadRequestError, match=name):
            call(client, method, **fields)
    if support == "neutral value":
        fields = {name: NEUTRAL[name]}
    if support != "refused":
        answer = call(client, method, **fields)
        chunks = list(answer) if fields.get("stream") else [answer]
        assert chunks and any(chunk.choices for chunk in chunks)
    if support == "no effect":
        plain = call(client, method, seed=3, temperature=1.0)
        changed = call(client, method, seed=3, temperature=1.0, **fields)
        assert plain.choices == changed.choices


def test_page_lists_every_resource_of_the_client(client: openai.OpenAI) -> None:
    public = {name for name in dir(client) if not name.startswith("_")}
    resources = {name for name in public if ".resources." in type(getattr(client, name)).__module__}
    assert set(read_table("Other resources")) >= resources


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.responses.create(model="tiny-qwen3", input="abc"),
        lambda client: client.embeddings.create(model="tiny-qwen3", input="abc", encoding_format="float"),
        lambda client: client.moderations.create(input="abc"),
        lambda client: client.files.list(),
        lambda client: client.batches.list(),
        lambda client: client.images.generate(prompt="abc"),
        lambda client: client.fine_tuning.jobs.list(),
        lambda client: client.vector_stores.list(),
        lambda client: client.models.delete("tiny-qwen3"),
        lambda client: client.chat.completions.list(),
    ],
)
def test_other_routes_are_refused_by_name(client: openai.OpenAI, use: Any) -> None:
    with pytest.raises(openai.APIStatusError, match=r"is not served here: GET /openapi.json") as caught:
        use(client)
    assert caught.value.status_code in (404, 405)


def test_models_list_and_retrieve(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.models.retrieve("other")


def test_parse_returns_a_typed_answer(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance", reason="constrained sampling needs the extra `grammar`")

    class Answer(BaseModel):
        is_metric: bool
        unit: Literal["m", "km"]

    reply = client.chat.completions.parse(**{**CHAT, "max_tokens": 200}, response_format=Answer)
    assert isinstance(reply.choices[0].message.parsed, Answer)
