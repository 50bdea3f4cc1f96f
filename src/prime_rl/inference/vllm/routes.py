"""Additional routes of vLLM's server, as an ASGI middleware for its --middleware option."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from loguru import logger
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.access import Access, build_hosts, check_access, read_api_key
from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.async_engine import ClientGone
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.detokenizer import find_special
from prime_rl.inference.intake import RETRY_AFTER_S, BodyLimit, check_json_type, read_body, release_body
from prime_rl.inference.request_parsing import ApiError, Json, parse_body
from prime_rl.inference.routes.openai import answer, build_error_response, check_weights
from prime_rl.inference.tool_parser import MessageParser
from prime_rl.inference.vllm.chats import ChatGuard
from prime_rl.inference.vllm.engine import CONFIG_VARIABLE, MODEL_DIR_VARIABLE
from prime_rl.inference.vllm.translate import chat_from_completion, clip_limits, completion_from_chat
from prime_rl.inference.vllm.weights import WeightUpdater, read_numerics
from prime_rl.inference.weight_dirs import check_step, parse_directory
from prime_rl.inference.weight_receiver import init_broadcast, parse_version
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.telemetry.prometheus import Sample, render_samples
from prime_rl.transport.weights import ADAPTER_WEIGHTS_FILE, is_adapter

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/chat/completions/tokens")
MODEL_PATH = "/v1/models/"
MODEL_APIS = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
"""Routes of vLLM with these prefixes compute with the model; those that this module does not check are refused."""
UNKNOWN_MODEL_LEN = 2**17


class PrimeRoutes:
    """Serves the control routes, checks access to all others, and adds policy versions to vLLM's responses."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.config = InferenceConfig.model_validate_json(os.environ[CONFIG_VARIABLE])
        self.model_dir = Path(os.environ[MODEL_DIR_VARIABLE])
        self.weights = WeightUpdater(self.config, self.model_dir)
        self.num_requests = 0
        self.is_paused = False
        """By a request; weight updates pause vLLM, too."""
        self.loaded: dict[str, tuple[Path, int]] = {}
        """Names of adapters, also of unloaded ones, with the directory and modification time of their weights."""
        self._hosts = build_hosts(self.config.server)
        self._limited: BodyLimit | None = None
        self._key = read_api_key("server.api_key_var", self.config.server.api_key_var)
        model = self.config.model
        self._parser = MessageParser(model.tool_call_parser, model.reasoning_parser is not None)
        self._guard = ChatGuard(self._load_tokenizer)

    def _load_tokenizer(self) -> Any:
        options = {name.replace("-", "_"): value for name, value in self.config.vllm.items()}
        template = options.get("chat_template")
        return load_tokenizer(str(self.model_dir), template, self.config.model.trust_remote_code)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before the handshake: HTTP 403
        elif scope["type"] == "http":
            if self._limited is None:
                limits = self.config.server
                self._limited = BodyLimit(
                    self._serve, limits.max_request_bytes, limits.read_timeout, build_error_response
                )
            await self._limited(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _max_model_len(self, scope: Scope) -> int:
        engine = getattr(scope["app"].state.engine_client, "model_config", None)
        return int(getattr(engine, "max_model_len", None) or self.config.model.max_model_len or UNKNOWN_MODEL_LEN)

    async def _serve(self, scope: Scope, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        path, client = scope["path"], scope["app"].state.engine_client
        self.weights.wrap_generate(client)
        handler, access = ROUTES.get((scope["method"], path), (None, _access_of(path)))
        try:
            check_access(self._key, request, access, self._hosts)
            if handler is not None:
                reply = await handler(self, request, client)
                await reply(scope, receive, send)
            elif path in GENERATION_PATHS:
                await self._generate(request, send)
            elif path == "/tokenize":
                await self._tokenize(request, send, client)
            elif path.startswith(MODEL_PATH):
                listed = {**scope, "path": "/v1/models", "raw_path": b"/v1/models"}
                await self._rewrite(listed, receive, send, partial(_find_card, self, path.removeprefix(MODEL_PATH)))
            elif path in REWRITTEN:
                await self._rewrite(scope, receive, send, partial(REWRITTEN[path], self))
            elif path.startswith(MODEL_APIS):  # such as /v1/responses
                raise ApiError(f"{scope['method']} {path} is not served here: use {GENERATION_PATHS[0]}", status=404)
            else:
                await self.app(scope, receive, send)
        except Exception as error:
            await build_error_response(request, error)(scope, receive, send)

    async def _generate(self, request: Request, send: Any) -> None:
        """Handle a generation request: enforce the queue limit and add version spans to the response."""
        if self.weights.broken is not None:
            raise ApiError(self.weights.broken, status=503)
        check_weights(self.weights.awaits_weights)
        if self.num_requests >= self.config.max_batch_size + self.config.server.max_queued_requests:
            raise ApiError(
                f"{self.num_requests} requests are running or queued: try again",
                status=429,
                kind="rate_limit_error",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_requests += 1
        try:
            data = await read_body(request)
            check_json_type(request, data)
            data = await asyncio.to_thread(self._guard.name_roles, data)
            scope = request.scope
            data = clip_limits(data, self._max_model_len(scope))
            if scope["path"].endswith("/tokens"):
                with_tokens: Json | None = parse_body(data)
            else:
                with_tokens = await self._render_guarded(scope["path"], data)
            release_body(request)
            if with_tokens is not None:
                await self._answer_tokens(request, with_tokens, send)
            elif b'"stream"' in data and parse_body(data).get("stream"):
                await self.app(scope, _replay(data, request.receive), send)
            else:
                await self._rewrite(scope, _replay(data, request.receive), send, partial(_add_versions, self.weights))
        finally:
            self.num_requests -= 1

    async def _render_guarded(self, path: str, data: bytes) -> Json | None:
        """A chat with rendered token ids if its data contains control-token strings, else None."""
        if path != "/v1/chat/completions":
            return None
        body = parse_body(data)
        ids = await asyncio.to_thread(self._guard.render, body)
        return None if ids is None else {**body, "tokens": ids}

    async def _tokenize(self, request: Request, send: Any, client: Any) -> None:
        """Forward to vLLM, except for a chat whose data contains control-token strings."""
        data = await asyncio.to_thread(self._guard.name_roles, await request.body())
        body = parse_body(data)
        ids = await asyncio.to_thread(self._guard.render, body) if "messages" in body else None
        if ids is None:
            await self.app(request.scope, _replay(data, request.receive), send)
            return
        names = self._guard.tokenizer.convert_ids_to_tokens(ids) if body.get("return_token_strs") else None
        limit = client.model_config.max_model_len
        reply = answer({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names})
        await reply(request.scope, request.receive, send)

    async def _answer_tokens(self, request: Request, body: Json, send: Any) -> None:
        """Handle a chat with a token id prompt: forward as a completion and convert the response to a chat."""
        completion = completion_from_chat(body)
        if (body.get("tools") or self._parser.reasoning) and await asyncio.to_thread(self._has_special_tags):
            completion["skip_special_tokens"] = False
        data = orjson.dumps(completion)
        scope = {**request.scope, "path": "/v1/completions", "raw_path": b"/v1/completions"}

        opened = self._parser.reasoning and await asyncio.to_thread(self._opens_reasoning, body["tokens"])

        def as_chat(completion: Json) -> Json:
            return chat_from_completion(_add_versions(self.weights, completion), body, self._parser, opened)

        await self._rewrite(scope, _replay(data, request.receive), send, as_chat)

    def _has_special_tags(self) -> bool:
        return not find_special(self._guard.tokenizer).keys().isdisjoint(self._parser.tags)

    def _opens_reasoning(self, prompt: list[int]) -> bool:
        return self._parser.opens(prompt, lambda tail: str(self._guard.tokenizer.decode(tail)))

    async def _rewrite(self, scope: Scope, receive: Any, send: Any, change: Callable[[Any], Any]) -> None:
        """Forward to vLLM and apply `change` to a successful response. `ClientGone` if vLLM canceled the request."""
        start: Json = {}
        body = bytearray()

        async def collect(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        await self.app(scope, receive, collect)
        kind = dict(start.get("headers", [])).get(b"content-type", b"").decode()
        if start.get("status") == 200 and kind.startswith("application/json"):
            content = orjson.loads(body)
            if content is None:  # vLLM's handlers return None when canceled by a disconnect
                raise ClientGone
            reply = Response(orjson.dumps(change(content)), media_type="application/json")
        elif start.get("status") == 200 and scope["path"].startswith("/metrics"):
            reply = Response(change(body.decode()), media_type=kind)
        else:
            reply = Response(bytes(body), start.get("status", 500), media_type=kind or None)
        await reply(scope, receive, send)


async def update_weights(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /update_weights {"weight_dir"}, or {"weight_dir": null, "step"} from the trainer of /init_broadcaster"""
    body = await _read_json(request)
    if "weight_dir" in body and body["weight_dir"] is None:
        return answer(await routes.weights.load_broadcast(client, parse_version(body)))
    directory = parse_directory(body, "weight_dir", routes.config)
    try:
        if is_adapter(directory):
            version, digests = (await asyncio.to_thread(read_adapter, directory))[1].version, None
        else:
            version, digests = await asyncio.to_thread(check_step, directory)
    except (ValueError, OSError) as error:
        logger.warning(f"Weight update failed, version {routes.weights.version} stays in service: {error}")
        raise ApiError(str(error), param="weight_dir") from error
    return answer(await routes.weights.load(client, directory, version, digests))


async def reload_weights(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /reload_weights: restore the initial weights, version 0."""
    return answer(await routes.weights.reload(client))


async def pause(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /pause?mode=keep|abort|wait"""
    mode = request.query_params.get("mode", "keep")
    if mode not in ("keep", "abort", "wait"):
        raise ApiError(f"mode {mode!r} is not supported: use keep, abort or wait", param="mode")
    await client.pause_generation(mode=mode, clear_cache=False)
    routes.is_paused = True
    return answer({"status": "paused", "version": routes.weights.version})


async def resume(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /resume"""
    await client.resume_generation()
    routes.is_paused = False
    return answer({"status": "resumed", "version": routes.weights.version})


async def is_paused(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """GET /is_paused"""
    return answer({"is_paused": await client.is_paused()})


async def health(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """GET /health: 200 with the weight version, 503 if the engine failed or its weights are unknown."""
    if routes.weights.broken is not None:
        raise ApiError(routes.weights.broken, status=503)
    try:
        await client.check_health()
    except Exception as error:
        raise ApiError(f"engine failed: {error}", status=503) from error
    return answer(
        {"status": "ok", "version": routes.weights.version}
        | read_numerics(client)
        | ({"awaits_weights": True} if routes.weights.awaits_weights else {})
        | ({"is_paused": True} if routes.is_paused else {})
    )


async def load_lora_adapter(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /v1/load_lora_adapter {"lora_name", "lora_path"}; replaces one of the same name."""
    body = await _read_json(request)
    directory = parse_directory(body, "lora_path", routes.config)
    try:
        await asyncio.to_thread(read_adapter, directory, routes.weights.version)  # vLLM itself verifies nothing
    except (ValueError, OSError) as error:
        raise ApiError(str(error), param="lora_path") from error
    name, files = str(body.get("lora_name")), (directory, (directory / ADAPTER_WEIGHTS_FILE).stat().st_mtime_ns)
    reply = await _use_loras(request, "load", lora_name=body.get("lora_name"), lora_path=str(directory))
    # Other weights under a known name: vLLM would use keys of the earlier ones, and running requests have some.
    if routes.loaded.setdefault(name, files) != files:
        routes.loaded[name] = files
        await client.reset_prefix_cache(reset_running_requests=True)
    return reply


async def unload_lora_adapter(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /v1/unload_lora_adapter {"lora_name"}"""
    return await _use_loras(request, "unload", lora_name=(await _read_json(request)).get("lora_name"))


async def _use_loras(request: Request, verb: str, **fields: Any) -> Response:
    from vllm.entrypoints.serve.lora import protocol

    if request.scope["app"].state.vllm_config.lora_config is None:
        raise ApiError("this server was started without LoRA support: set inference.max_lora_rank")
    kind = protocol.LoadLoRAAdapterRequest if verb == "load" else protocol.UnloadLoRAAdapterRequest
    if verb == "load" and "load_inplace" in kind.model_fields:
        fields["load_inplace"] = True
    try:
        lora_request = kind(**fields)
    except ValueError as error:
        raise ApiError("lora_name must be a string", param="lora_name") from error
    models = request.scope["app"].state.openai_serving_models
    result = getattr(models, f"{verb}_lora_adapter")(lora_request)
    result = await result if inspect.isawaitable(result) else result
    loaded: Any = getattr(models, "lora_requests", {}).get(fields["lora_name"])
    if loaded is not None:
        loaded.load_inplace = False  # otherwise every step of its requests would read the files again
    if not isinstance(result, str):
        raise ApiError(result.error.message, status=result.error.code, param="lora_name")
    return answer({"status": "ok", "lora_name": fields["lora_name"]})


async def init_broadcaster(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /init_broadcaster {"host", "port"}: connect to the trainer from which /update_weights receives weights."""
    routes.weights.broadcast = await init_broadcast(await _read_json(request), routes.config.weight_broadcast.type)
    return answer({"status": "ok"})


async def _read_json(request: Request) -> Json:
    data = await read_body(request)
    check_json_type(request, data)
    return parse_body(data)


def _add_versions(weights: WeightUpdater, content: Any) -> Any:
    """Add `versions` spans to every choice, and `reasoning_content` as an alias of vLLM's `reasoning`."""
    choices = content.get("choices") or []
    spans = weights.take_spans(str(content.get("id", content.get("request_id", ""))), len(choices))
    for choice in choices:
        choice["versions"] = spans.get(choice["index"], [[0, weights.version]])
        message = choice.get("message")
        if isinstance(message, dict) and message.get("reasoning") is not None:
            message.setdefault("reasoning_content", message["reasoning"])
    return content


def _add_card_versions(routes: PrimeRoutes, content: Any) -> Any:
    for card in content.get("data", []):
        card["version"] = routes.weights.version
    return content


def _find_card(routes: PrimeRoutes, name: str, content: Any) -> Any:
    for card in _add_card_versions(routes, content)["data"]:
        if card["id"] == name:
            return card
    raise ApiError(f"model {name!r} is not served: GET /v1/models lists the models", status=404, param="model")


def _add_metrics(routes: PrimeRoutes, text: str) -> str:
    rows: list[Sample] = [
        ("policy_version", "gauge", "Version of the weights in service.", routes.weights.version),
        ("requests_in_flight", "gauge", "Unfinished requests.", routes.num_requests),
    ]
    return text + render_samples(rows)


def _replay(data: bytes, receive: Any) -> Any:
    """A `receive` that replays the body, then forwards further messages (the client's disconnect)."""
    replayed = False

    async def again() -> Any:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": data, "more_body": False}

    return again


def _access_of(path: str) -> Access:
    """Access level of a vLLM route; "control" unless known to be read-only or part of the API."""
    if path in ("/ping", "/health"):
        return "open"
    if path in ("/metrics", "/metrics/", "/version", "/load", "/docs", "/redoc", "/openapi.json"):
        return "read"
    return "api" if path.startswith(("/v1/", "/inference/", "/tokenize", "/detokenize", "/score")) else "control"


Handler = Callable[[PrimeRoutes, Request, Any], Awaitable[Response]]
ROUTES: dict[tuple[str, str], tuple[Handler | None, Access]] = {
    ("GET", "/health"): (health, "open"),
    ("POST", "/update_weights"): (update_weights, "control"),
    ("POST", "/reload_weights"): (reload_weights, "control"),
    ("POST", "/init_broadcaster"): (init_broadcaster, "control"),
    ("POST", "/pause"): (pause, "control"),
    ("POST", "/resume"): (resume, "control"),
    ("GET", "/is_paused"): (is_paused, "control"),
    ("POST", "/v1/load_lora_adapter"): (load_lora_adapter, "control"),
    ("POST", "/load_lora_adapter"): (load_lora_adapter, "control"),
    ("POST", "/v1/unload_lora_adapter"): (unload_lora_adapter, "control"),
}
REWRITTEN: dict[str, Callable[[PrimeRoutes, Any], Any]] = {
    "/v1/models": _add_card_versions,
    "/metrics": _add_metrics,
    "/metrics/": _add_metrics,
}
