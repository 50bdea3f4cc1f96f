"""GET /openapi.json: the API description, for users, client generators and fuzzers.

The schemas are exactly as strict as `request_parsing`: a request that violates them is rejected; one that satisfies
them can still be rejected (prompt too long, model not served).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.request_parsing import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    HARMLESS,
    INTEGERS,
    LARGEST,
    MAX_CHOICES,
    MAX_NAME_LENGTH,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    NUMBERS,
    SMALLEST,
    Json,
    Range,
)
from prime_rl.inference.routes.generate import FIELDS, IGNORED_PARAMS
from prime_rl.inference.routes.openai import TOKENIZE_FIELDS, Route, answer
from rollouts.training.datasets.chat import ROLES

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState

ANY: Json = {}
MODEL: Json = {"$ref": "#/components/schemas/Model"}
TOKEN: Json = {"$ref": "#/components/schemas/Token"}


def _maybe(kind: str, **limits: Any) -> Json:
    """A value of this type or null, which means unset."""
    return {"type": [kind, "null"], **limits}


def _describe_range(kind: str, allowed: Range) -> Json:
    lowest = "exclusiveMinimum" if allowed.above else "minimum"
    limits = {lowest: allowed.low, "maximum": allowed.high}
    return _maybe(kind, **{name: limit for name, limit in limits.items() if limit is not None})


FLAG, TEXT = _maybe("boolean"), _maybe("string")
IDS: Json = {"type": "array", "items": TOKEN}
PROMPT: Json = {**IDS, "minItems": 1}
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
MESSAGE: Json = {
    "type": "object",
    "properties": {"role": {"enum": sorted(ROLES)}},
    "required": ["role"],
}
NAMED_TOOL: Json = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["function"],
}
RESPONSE_FORMATS: list[Json] = [
    {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
    {
        "type": "object",
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
        },
        "required": ["type", "json_schema"],
    },
]
PROPERTIES: dict[str, Json] = {
    **{name: _describe_range("number", allowed) for name, allowed in NUMBERS.items()},
    **{name: _describe_range("integer", allowed) for name, allowed in INTEGERS.items()},
    **dict.fromkeys(
        "stream ignore_eos return_token_ids return_tokens_as_token_ids skip_special_tokens include_stop_str_in_output "
        "parallel_tool_calls add_generation_prompt add_special_tokens echo return_token_strs "
        "return_sampling_support".split(),
        FLAG,
    ),
    "model": MODEL,
    "stop": {"anyOf": [{"type": "null"}, STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOPS}]},
    "stop_token_ids": {**IDS, "type": ["array", "null"], "maxItems": MAX_STOP_IDS},
    "logit_bias": _maybe("object", additionalProperties={"type": "number", "minimum": -LARGEST, "maximum": LARGEST}),
    "stream_options": _maybe("object", properties={"include_usage": FLAG}),
    "logprobs": {"anyOf": [FLAG, {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}]},
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
    "tools": {**OBJECTS, "type": ["array", "null"]},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required", None]}, NAMED_TOOL]},
    "response_format": {"anyOf": [{"type": "null"}, *RESPONSE_FORMATS]},
    "tokens": PROMPT,
    "chat_template_kwargs": _maybe("object"),
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            PROMPT,
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, PROMPT]}},
        ]
    },
}
"""Schema of each field of a generation request."""


def _body(names: frozenset[str], required: list[str], more: Json | None = None) -> Json:
    known = {name: PROPERTIES[name] for name in sorted(names)}
    return _shape({**known, **(more or {})}, required)


def _shape(properties: dict[str, Json], required: list[str]) -> Json:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NEUTRAL_FIELDS: dict[str, Json] = {
    **dict.fromkeys(sorted(HARMLESS), ANY),
    **{name: {"enum": [*values, None]} for name, values in NEUTRAL.items() if name != "echo"},
}
"""Fields that are accepted without effect, or only with their neutral value."""

SAMPLING = _body(
    COMPLETION_FIELDS - {"model", "stream", "stream_options", "prompt", "add_special_tokens", "echo"},
    [],
    {**NEUTRAL_FIELDS, **{name: {"enum": list(values)} for name, values in IGNORED_PARAMS.items()}},
)
TOKEN_REQUEST: dict[str, Json] = {
    **dict.fromkeys(sorted(FIELDS), ANY),
    "model": MODEL,
    "request_id": _maybe("string", maxLength=MAX_NAME_LENGTH),
    "token_ids": PROMPT,
    "sampling_params": {**SAMPLING, "additionalProperties": ANY},
    "stream": FLAG,
    "output_mode": {"enum": ["tokens", "text", None]},
    "return_token_ids": FLAG,
    "stream_options": PROPERTIES["stream_options"],
}
SCORE_REQUEST: dict[str, Json] = {
    "tokens": {**IDS, "minItems": 2},
    "start": {"type": "integer", "minimum": 1},
    "top": {"type": "integer", "minimum": -1},
    "temperature": {"type": "number", "minimum": SMALLEST, "maximum": LARGEST},
    "support": {"type": "string", "contentEncoding": "base64"},
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
    "/v1/chat/completions": _body(CHAT_FIELDS - {"tokens"}, ["messages"], NEUTRAL_FIELDS),
    "/v1/chat/completions/tokens": _body(CHAT_FIELDS, ["tokens"], NEUTRAL_FIELDS | {"messages": ANY}),
    "/v1/chat/completions/group": _body(CHAT_FIELDS, ["messages", "seeds"], NEUTRAL_FIELDS | GROUP),
    "/v1/completions": _body(COMPLETION_FIELDS, ["prompt"], NEUTRAL_FIELDS),
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
    "400": "The request is invalid.",
    "401": "The bearer token is missing or wrong.",
    "403": "Request from another machine or a web page, or directory not allowed.",
    "404": "No such model or adapter.",
    "409": "The weight broadcast type does not match, or no broadcast is set up.",
    "408": "The body did not arrive in time (server.read_timeout).",
    "413": "The body exceeds server.max_request_mb.",
    "415": "The content type is not JSON.",
    "429": "The request queue is full (server.max_queued_requests): retry after Retry-After seconds.",
    "503": "Waiting for weights, the engine failed, or the trainer does not respond.",
}


def describe(routes: tuple[Route, ...], models: list[str], vocab: int) -> Json:
    """Build the OpenAPI 3.1 description of `routes`, for a server of `models` with `vocab` tokens."""
    paths: dict[str, Json] = {}
    for path, method, handler, access in routes:
        described = _describe_route(path, handler.__doc__ or path, access)
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = described
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
    operation: Json = {
        "summary": summary.partition("\n")[0],
        "responses": {
            "200": {"description": "Success.", "content": good},
            **{status: {"description": text, "content": error} for status, text in REFUSALS.items()},
        },
    }
    if access != "open":
        operation["security"] = [{"key": []}, {}]  # the key is optional
    if "{model" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/pause":
        operation["parameters"] = [MODE]
    if path in BODIES:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[path]}}}
    return operation


def openapi_route(described: tuple[Route, ...]) -> Route:
    """Build the route that describes the other routes."""

    async def openapi(service: ServerState, request: Request) -> Response:
        """GET /openapi.json"""
        return answer(describe(described, [*service.names, *service.named_adapters()], service.vocab))

    return ("/openapi.json", "GET", openapi, "read")
