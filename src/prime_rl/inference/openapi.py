"""GET /openapi.json: the server's own description, for people, for clients, and for fuzzers that hold it to its word.

It says of a field no more than `requests` checks: what fits the description may still be refused (a prompt that is too
long, a model that is not served), what does not fit it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    HARMLESS,
    LARGEST,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    SMALLEST,
    Json,
)
from prime_rl.inference.routes import TOKENIZE_FIELDS, Route, answer
from prime_rl.inference.token_route import FIELDS, IGNORED_PARAMS

if TYPE_CHECKING:
    from prime_rl.inference.service import Service

ANY: Json = {}
MODEL: Json = {"$ref": "#/components/schemas/Model"}
TOKEN: Json = {"$ref": "#/components/schemas/Token"}


def _maybe(kind: str, **limits: Any) -> Json:
    """A value of this type, or null, which stands for its absence."""
    return {"type": [kind, "null"], **limits}


FLAG, TEXT = _maybe("boolean"), _maybe("string")
COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
IDS: Json = {"type": "array", "items": TOKEN}
PROMPT: Json = {**IDS, "minItems": 1}
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
PROPERTIES: dict[str, Json] = {
    "model": MODEL,
    "max_tokens": _maybe("integer", minimum=0),
    "max_completion_tokens": _maybe("integer", minimum=0),
    "temperature": _maybe("number", minimum=0, maximum=LARGEST),
    "top_p": _maybe("number", exclusiveMinimum=0, maximum=1),
    "top_k": _maybe("integer", minimum=-1),
    "min_p": _maybe("number", minimum=0, maximum=1),
    "repetition_penalty": _maybe("number", minimum=SMALLEST, maximum=LARGEST),
    "presence_penalty": _maybe("number", minimum=-2, maximum=2),
    "frequency_penalty": _maybe("number", minimum=-2, maximum=2),
    "min_tokens": _maybe("integer", minimum=0),
    "seed": _maybe("integer"),
    "stop": {"anyOf": [TEXT, {"type": "array", "items": {"type": "string"}}]},
    "stop_token_ids": {**IDS, "type": ["array", "null"]},
    "ignore_eos": FLAG,
    "logit_bias": _maybe("object", additionalProperties={"type": "number", "minimum": -LARGEST, "maximum": LARGEST}),
    "n": _maybe("integer", minimum=1, maximum=MAX_CHOICES),
    "stream": FLAG,
    "stream_options": _maybe("object", properties={"include_usage": FLAG}),
    "logprobs": {"anyOf": [FLAG, COUNT]},
    "top_logprobs": {**COUNT, "type": ["integer", "null"]},
    "prompt_logprobs": {**COUNT, "type": ["integer", "null"]},
    "prompt_temperature": _maybe("number", minimum=SMALLEST, maximum=LARGEST),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "skip_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "messages": {**OBJECTS, "minItems": 1},
    "tools": {**OBJECTS, "type": ["array", "null"]},
    "tool_choice": {"enum": ["auto", "none", None]},
    "parallel_tool_calls": FLAG,
    "tokens": PROMPT,
    "add_generation_prompt": FLAG,
    "chat_template_kwargs": _maybe("object"),
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            PROMPT,
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, PROMPT]}},
        ]
    },
    "add_special_tokens": FLAG,
    "echo": FLAG,
    "return_token_strs": FLAG,
}
"""What is checked about each field of a generation request."""


def _body(names: frozenset[str], required: list[str], more: Json | None = None) -> Json:
    known = {name: PROPERTIES[name] for name in sorted(names)}
    return _shape({**known, **(more or {})}, required)


def _shape(properties: dict[str, Json], required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


BESIDE: dict[str, Json] = {
    **dict.fromkeys(sorted(HARMLESS), ANY),
    **{name: {"enum": [*values, None]} for name, values in NEUTRAL.items() if name != "echo"},
}
"""Fields that are taken because they change nothing, or only with the value that changes nothing."""

SAMPLING = _body(
    COMPLETION_FIELDS - {"model", "stream", "stream_options", "prompt", "add_special_tokens", "echo"},
    [],
    {**BESIDE, **{name: {"enum": list(values)} for name, values in IGNORED_PARAMS.items()}},
)
TOKEN_REQUEST: dict[str, Json] = {
    **dict.fromkeys(sorted(FIELDS), ANY),
    "model": MODEL,
    "token_ids": PROMPT,
    "sampling_params": {**SAMPLING, "additionalProperties": ANY},
    "stream": FLAG,
    "output_mode": {"enum": ["tokens", "text"]},
    "stream_options": PROPERTIES["stream_options"],
}
SCORE_REQUEST: dict[str, Json] = {
    "tokens": {**IDS, "minItems": 2},
    "start": {"type": "integer", "minimum": 1},
    "top": {"type": "integer", "minimum": -1},
    "temperature": {"type": "number", "minimum": SMALLEST, "maximum": LARGEST},
    "model": MODEL,
}
GROUP: dict[str, Json] = {
    "seeds": {"type": "array", "items": _maybe("integer"), "minItems": 1, "maxItems": MAX_CHOICES},
    **{"n": {"enum": [1, None]}, "stream": {"enum": [False, None]}},
    **{name: {"type": "null"} for name in ("seed", "tokens", "stream_options")},
}
VERSION: Json = {"type": "integer", "minimum": 0}
DIRECTORY: Json = {"type": "string", "minLength": 1}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": _body(CHAT_FIELDS - {"tokens"}, ["messages"], BESIDE),
    "/v1/chat/completions/tokens": _body(CHAT_FIELDS, ["tokens"], BESIDE | {"messages": ANY}),
    "/v1/chat/completions/group": _body(CHAT_FIELDS, ["messages", "seeds"], BESIDE | GROUP),
    "/v1/completions": _body(COMPLETION_FIELDS, ["prompt"], BESIDE),
    "/tokenize": _body(TOKENIZE_FIELDS, [], {"tool_choice": ANY, "prompt": ANY, "messages": ANY}),
    "/detokenize": {"type": "object", "properties": {"model": MODEL, "tokens": IDS}, "required": ["tokens"]},
    "/inference/v1/generate": _shape(TOKEN_REQUEST, ["token_ids", "sampling_params"]),
    "/score": _shape(SCORE_REQUEST, ["tokens"]),
    "/update_weights": {
        "type": "object",
        "properties": {"weight_dir": {"anyOf": [DIRECTORY, {"type": "null"}]}, "step": VERSION},
        "required": ["weight_dir"],
    },
    "/init_broadcaster": {
        "type": "object",
        "properties": {
            "host": DIRECTORY,
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "type": {"enum": ["gloo", "nccl"]},
            "timeout": {"type": "number", "exclusiveMinimum": 0},
            "server_rank": VERSION,
            "num_inference_server": {"type": "integer", "minimum": 1},
        },
        "required": ["host", "port"],
    },
    "/v1/load_lora_adapter": {
        "type": "object",
        "properties": {"lora_name": DIRECTORY, "lora_path": DIRECTORY},
        "required": ["lora_name", "lora_path"],
    },
    "/v1/unload_lora_adapter": {"type": "object", "properties": {"lora_name": DIRECTORY}, "required": ["lora_name"]},
}
BODIES["/load_lora_adapter"] = BODIES["/v1/load_lora_adapter"]
MODE: Json = {"name": "mode", "in": "query", "schema": {"enum": ["keep", "abort"]}}
KINDS = {
    "/metrics": "text/plain",
    "/score": "application/msgpack",
    "/v1/chat/completions/group": "application/x-ndjson",
}
STREAMING = ("/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/completions", "/inference/v1/generate")
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": _shape({"message": {"type": "string"}, "type": {"type": "string"}, "param": TEXT, "code": ANY}, [])
    },
}
REFUSALS = {
    "400": "What is wrong with the request.",
    "401": "The bearer token is missing or wrong.",
    "403": "Not from this machine, or not from an allowed directory.",
    "404": "No such model or adapter.",
    "409": "Weights are not handed over in this way here.",
    "413": "The body is larger than server.max_request_mb.",
    "429": "As many requests wait as may (server.max_waiting): come back after Retry-After seconds.",
    "503": "Waiting to be told its weights, the engine has failed, or the trainer does not answer.",
}


def describe(routes: tuple[Route, ...], models: list[str], vocab: int) -> Json:
    """The OpenAPI 3.1 description of these routes, for a server of these models with `vocab` tokens."""
    paths: dict[str, Json] = {}
    for path, method, handler, access in routes:
        paths.setdefault(path, {})[method.lower()] = _describe_route(path, handler.__doc__ or path, access)
    return {
        "openapi": "3.1.0",
        "info": {"title": "prime-rl inference", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": ERROR,
                "Model": {"enum": [*models, None]},
                "Token": {"type": "integer", "minimum": 0, "maximum": vocab - 1},
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_route(path: str, summary: str, access: str) -> Json:
    good: Json = {KINDS.get(path, "application/json"): {"schema": ANY}}
    if path in STREAMING:
        good["text/event-stream"] = {"schema": ANY}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: Json = {
        "summary": summary.partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": good},
            **{status: {"description": text, "content": error} for status, text in REFUSALS.items()},
        },
    }
    if access != "open":
        found["security"] = [{"key": []}, {}]  # the key where there is one
    if path == "/pause":
        found["parameters"] = [MODE]
    if path in BODIES:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}
    return found


def openapi_route(described: tuple[Route, ...]) -> Route:
    """The route that tells of the others."""

    async def openapi(service: Service, request: Request) -> Response:
        """GET /openapi.json"""
        return answer(describe(described, [*service.names, *service.named_adapters()], service.vocab))

    return ("/openapi.json", "GET", openapi, "open")
