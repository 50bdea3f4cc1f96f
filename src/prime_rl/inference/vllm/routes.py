"""Additional routes of vLLM's server, as an ASGI middleware for its --middleware option."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import torch
from loguru import logger
from safetensors.torch import save_file
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from prime_rl.inference.access import Access, build_hosts, check_access
from prime_rl.inference.adapters import POLICY, build_spec, read_adapter
from prime_rl.inference.async_engine import ClientGone
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.intake import RETRY_AFTER_S, BodyLimit, check_json_type, max_request_bytes, read_body
from prime_rl.inference.request_parsing import ApiError, Json, parse_body
from prime_rl.inference.routes.openai import answer, build_error_response, check_weights
from prime_rl.inference.tool_parser import MessageParser
from prime_rl.inference.vllm.chats import ChatGuard
from prime_rl.inference.vllm.engine import CONFIG_VARIABLE, MODEL_DIR_VARIABLE
from prime_rl.inference.vllm.translate import chat_from_completion, completion_from_chat
from prime_rl.inference.weight_dirs import check_step, resolve_allowed
from prime_rl.inference.weight_receiver import NO_TRAINER, init_broadcast, parse_version
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.transport.broadcast import Broadcast, BroadcastFailed, receive_weights
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, WEIGHTS_FILE, is_adapter
from prime_rl.utils.monitor import Monitor, build_monitor

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/chat/completions/tokens")
MAX_SPANS = 10_000
UNKNOWN_MODEL_LEN = 2**17
POLICY_ID = 1 << 20
"""vLLM's id of the policy adapter; adapters of /v1/load_lora_adapter are numbered from 1."""


class PrimeRoutes:
    """Serves the control routes, checks access to all others, and adds policy versions to vLLM's responses."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.config = InferenceConfig.model_validate_json(os.environ[CONFIG_VARIABLE])
        self.model_dir = Path(os.environ[MODEL_DIR_VARIABLE])
        self.version = 0
        self.awaits_weights = self.config.server.wait_for_weights
        self.num_requests = 0
        self.broken: str | None = None
        self._hosts = build_hosts(self.config.server)
        self._limited: BodyLimit | None = None
        self._warned_repair = False
        self._loaded_dir = self.model_dir
        self._adapter: Path | None = None
        """Directory of the policy adapter; None if the policy is the model itself."""
        self._policy: Any = None
        """The policy adapter as a vLLM `LoRARequest`."""
        self._settled = asyncio.Event()
        self._settled.set()
        self.broadcast: Broadcast | None = None
        self._received: tempfile.TemporaryDirectory[str] | None = None
        self._key = os.environ.get(self.config.server.api_key_var or "", "") or None
        self._parser = MessageParser(self.config.model.tool_call_parser)
        self._guard = ChatGuard(self._load_tokenizer)
        self._updating = asyncio.Lock()
        self._spans: OrderedDict[str, list[tuple[int, list[list[int]]]]] = OrderedDict()
        self._monitor: Monitor | None = None
        if self.config.output_dir is not None:
            self._monitor = build_monitor(self.config.output_dir, self.config.name)

    def _load_tokenizer(self) -> Any:
        options = {name.replace("-", "_"): value for name, value in self.config.vllm.items()}
        template = options.get("chat_template")
        return load_tokenizer(str(self.model_dir), template, self.config.model.trust_remote_code)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
        elif scope["type"] == "http":
            if self._limited is None:
                limits = self.config.server
                max_bytes = max_request_bytes(limits.max_request_mb, self._max_model_len(scope))
                self._limited = BodyLimit(self._serve, max_bytes, limits.read_timeout, build_error_response)
            await self._limited(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _max_model_len(self, scope: Scope) -> int:
        engine = getattr(scope["app"].state.engine_client, "model_config", None)
        return int(getattr(engine, "max_model_len", None) or self.config.model.max_model_len or UNKNOWN_MODEL_LEN)

    async def _serve_socket(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve vLLM's WebSocket routes with API access control."""
        try:
            check_access(self._key, HTTPConnection(scope), "api", self._hosts)
        except ApiError:
            await send({"type": "websocket.close", "code": 1008})  # before the handshake: HTTP 403
            return
        await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        path, client = scope["path"], scope["app"].state.engine_client
        self._wrap_generate(client)
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
            elif path in REWRITTEN:
                await self._rewrite(scope, receive, send, REWRITTEN[path])
            else:
                await self.app(scope, receive, send)
        except Exception as error:
            await build_error_response(request, error)(scope, receive, send)

    async def _generate(self, request: Request, send: Any) -> None:
        """Handle a generation request: enforce the queue limit and add version spans to the response."""
        if self.broken is not None:
            raise ApiError(self.broken, status=503)
        check_weights(self.awaits_weights)
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
            scope = request.scope
            if scope["path"].endswith("/tokens"):
                await self._answer_tokens(request, parse_body(data), send)
            elif (wrap_handler := await self._render_guarded(scope["path"], data)) is not None:
                await self._answer_tokens(request, wrap_handler, send)
            elif b'"stream"' in data and parse_body(data).get("stream"):
                await self.app(scope, _replay(data, request.receive), send)
            else:
                await self._rewrite(scope, _replay(data, request.receive), send, _add_versions)
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
        data = await request.body()
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
        data = orjson.dumps(completion_from_chat(body))
        scope = {**request.scope, "path": "/v1/completions", "raw_path": b"/v1/completions"}

        def as_chat(routes: PrimeRoutes, completion: Json) -> Json:
            return chat_from_completion(_add_versions(routes, completion), body, routes._parser)

        await self._rewrite(scope, _replay(data, request.receive), send, as_chat)

    async def _rewrite(self, scope: Scope, receive: Any, send: Any, change: Callable[[PrimeRoutes, Any], Any]) -> None:
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
            reply = Response(orjson.dumps(change(self, content)), media_type="application/json")
        elif start.get("status") == 200 and scope["path"].startswith("/metrics"):
            reply = Response(change(self, body.decode()), media_type=kind)
        else:
            reply = Response(bytes(body), start.get("status", 500), media_type=kind or None)
        await reply(scope, receive, send)

    async def load_broadcast(self, client: Any, step: int) -> Json:
        """Receive a version from the trainer into a temporary directory and load it (vLLM's loader reads files)."""
        if self.broadcast is None:
            raise ApiError(NO_TRAINER, 409, "weight_dir")
        try:
            directory, digests = await asyncio.to_thread(self._receive, self.broadcast, step)
        except (ValueError, OSError) as error:
            logger.warning(f"Weight update failed, version {self.version} stays in service: {error}")
            raise ApiError(str(error), 503 if isinstance(error, BroadcastFailed) else 400, "weight_dir") from error
        try:
            return await self.load(client, directory, step, digests)
        finally:  # keep the weights in service, for rollback
            in_use = (self._loaded_dir, self._adapter)
            for old in [path for path in directory.parent.iterdir() if path not in in_use]:
                shutil.rmtree(old)

    def _receive(self, broadcast: Broadcast, step: int) -> tuple[Path, dict[str, str]]:
        received = receive_weights(broadcast, step, self.config.name, torch.device("cpu"))
        if received.adapter_config is not None:
            build_spec(received.adapter_config, step, "the trainer")
        if self._received is None:
            self._received = tempfile.TemporaryDirectory(prefix="received-", dir=self.config.output_dir)
        directory = Path(tempfile.mkdtemp(prefix=f"step_{step}-", dir=self._received.name))
        file = WEIGHTS_FILE
        if received.adapter_config is not None:
            file = ADAPTER_WEIGHTS_FILE
            (directory / ADAPTER_CONFIG_FILE).write_bytes(orjson.dumps(dict(received.adapter_config)))
        save_file(received.tensors, directory / file, metadata={"format": "pt"})
        return directory, {name: entry.digest for name, entry in received.manifest.tensors.items()}

    async def load(self, client: Any, directory: Path, version: int, digests: dict[str, str] | None) -> Json:
        """Pause, load, verify, reset the KV cache and resume; running requests are recomputed.

        A directory with only a LoRA adapter also becomes the policy: the model in service with this adapter.
        """
        adapter = directory if is_adapter(directory) else None
        if adapter is not None and client.vllm_config.lora_config is None:
            raise ApiError(
                "this server was started without LoRA support: set inference.max_lora_rank, or "
                "trainer.model.lora.merge = true",
                param="weight_dir",
            )
        # A request keeps its adapter: if the policy switches between adapter and none, running requests end first.
        changes = (adapter is None) != (self._adapter is None)
        async with self._updating:
            start = time.time()
            if changes:
                self._settled.clear()
            try:
                await client.pause_generation(mode="wait" if changes else "keep", clear_cache=False)
                try:
                    report = await self._load_frozen(client, directory, adapter)
                except Exception as error:
                    await self._restore(client, error, adapter)
                    raise ApiError(f"{error}; version {self.version} stays in service", param="weight_dir") from error
                if hasattr(client, "update_weight_version"):
                    await client.update_weight_version(str(version))
                self.version, self._adapter, self.broken = version, adapter, None
                self._loaded_dir = self._loaded_dir if adapter is not None else directory
                self._policy = None if adapter is None else build_lora_request(adapter)
                self.awaits_weights = False
                await client.resume_generation()
            finally:
                self._settled.set()
            end = time.time()
        if report["repaired"] and not self._warned_repair:
            self._warned_repair = True
            logger.warning(f"vLLM kept stale copies of {', '.join(report['repaired'])}: repacked and verified")
        if report["unknown"]:
            logger.warning(f"Cannot verify in vLLM: {', '.join(report['unknown'][:5])}")
        logger.info(f"Loaded weights version={version} (paused {end - start:.3f} s)")
        if self._monitor is not None:
            self._monitor.log_timeline("update_weights", start, end, version)
            self._monitor.log({"time/update_weights": end - start, "time/update_weights_pause": end - start}, version)
        verified = {name: (digests or {}).get(name, digest) for name, digest in report["digests"].items()}
        notes = {name: report[name] for name in ("repaired", "unknown", "rounded") if report[name]}
        dtype = str(client.model_config.dtype).removeprefix("torch.")
        return {"status": "ok", "version": version, "digests": verified, "exact": False, "dtype": dtype, **notes}

    async def _load_frozen(self, client: Any, directory: Path, adapter: Path | None) -> Json:
        if adapter is not None:
            reports = await client.collective_rpc("load_published_adapter", args=(str(adapter), POLICY, POLICY_ID))
        elif self._adapter is not None and directory == self._loaded_dir:  # same model, without the adapter
            await client.collective_rpc("remove_published_adapter", args=(POLICY_ID,))
            reports = await client.collective_rpc("compare_published_weights", args=(str(directory),))
        else:
            reports = await client.collective_rpc("load_published_weights", args=(str(directory),))
        # Paused requests still hold KV blocks of the old weights: preempt them, so that they are recomputed.
        await client.reset_prefix_cache(reset_running_requests=True)
        report = dict(reports[0])
        for other in reports[1:]:
            report["digests"] = {k: v for k, v in report["digests"].items() if other["digests"].get(k) == v}
        return report

    async def _restore(self, client: Any, reason: Exception, failed: Path | None) -> None:
        """Roll back after a failed load; if that fails too, reject all further requests."""
        try:
            if failed is None:  # loading an adapter does not change the model
                await client.collective_rpc("load_published_weights", args=(str(self._loaded_dir),))
            if self._adapter is not None:
                await client.collective_rpc("load_published_adapter", args=(str(self._adapter), POLICY, POLICY_ID))
            elif failed is not None:
                await client.collective_rpc("remove_published_adapter", args=(POLICY_ID,))
            await client.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            self.broken = f"failed to load the new weights and to restore the old ones ({reason}; {error}): restart it"
            logger.error(self.broken)
            return
        await client.resume_generation()

    def _wrap_generate(self, client: Any) -> None:
        """Wrap `client.generate`: add the policy adapter to requests without one, and record the version spans."""
        if getattr(client, "prime_rl_watched", False):
            return
        original = client.generate

        async def generate(*args: Any, **kwargs: Any) -> Any:
            await self._settled.wait()
            if self._policy is not None and kwargs.get("lora_request") is None:
                kwargs["lora_request"] = self._policy
            async for result in original(*args, **kwargs):
                if result.finished:
                    self._record_spans(result)
                yield result

        client.generate, client.prime_rl_watched = generate, True

    def _record_spans(self, result: Any) -> None:
        spans = []
        for output in result.outputs:
            reported = getattr(output, "weight_versions", None) or []
            versions = [[span.start, int(span.version) if span.version.isdigit() else 0] for span in reported]
            spans.append((output.index, versions or [[0, self.version]]))
        self._spans[result.request_id] = spans
        if len(self._spans) > MAX_SPANS:
            self._spans.popitem(last=False)

    def take_spans(self, answer_id: str, num_choices: int) -> dict[int, list[list[int]]]:
        """Pop the version spans of a response's choices; completions have a request `<id>-<i>` per prompt."""
        if answer_id in self._spans:
            return dict(self._spans.pop(answer_id))
        merged: dict[int, list[list[int]]] = {}
        prompt = 0
        while (spans := self._spans.pop(f"{answer_id}-{prompt}", None)) is not None:
            merged |= {prompt * len(spans) + index: span for index, span in spans}
            prompt += 1
        return merged


async def update_weights(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /update_weights {"weight_dir"}, or {"weight_dir": null, "step"} from the trainer of /init_broadcaster"""
    body = await _read_json(request)
    if "weight_dir" in body and body["weight_dir"] is None:
        return answer(await routes.load_broadcast(client, parse_version(body)))
    directory = _allowed(routes, body, "weight_dir")
    try:
        if is_adapter(directory):
            version, digests = (await asyncio.to_thread(read_adapter, directory))[1].version, None
        else:
            version, digests = await asyncio.to_thread(check_step, directory)
    except (ValueError, OSError) as error:
        logger.warning(f"Weight update failed, version {routes.version} stays in service: {error}")
        raise ApiError(str(error), param="weight_dir") from error
    return answer(await routes.load(client, directory, version, digests))


async def reload_weights(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /reload_weights: restore the initial weights, version 0."""
    return answer(await routes.load(client, routes.model_dir, 0, None))


async def pause(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /pause?mode=keep|abort|wait"""
    mode = request.query_params.get("mode", "keep")
    if mode not in ("keep", "abort", "wait"):
        raise ApiError(f"mode {mode!r} is not supported: use keep, abort or wait", param="mode")
    await client.pause_generation(mode=mode, clear_cache=False)
    return answer({"status": "paused", "version": routes.version})


async def resume(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /resume"""
    await client.resume_generation()
    return answer({"status": "resumed", "version": routes.version})


async def is_paused(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """GET /is_paused"""
    return answer({"is_paused": await client.is_paused()})


async def health(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """GET /health: 200 with the weight version, 503 if the engine failed or its weights are unknown."""
    if routes.broken is not None:
        raise ApiError(routes.broken, status=503)
    try:
        await client.check_health()
    except Exception as error:
        raise ApiError(f"engine failed: {error}", status=503) from error
    return answer(
        {"status": "ok", "version": routes.version} | ({"awaits_weights": True} if routes.awaits_weights else {})
    )


async def load_lora_adapter(routes: PrimeRoutes, request: Request, client: Any) -> Response:
    """POST /v1/load_lora_adapter {"lora_name", "lora_path"}; replaces one of the same name."""
    body = await _read_json(request)
    directory = _allowed(routes, body, "lora_path")
    try:
        await asyncio.to_thread(read_adapter, directory, routes.version)  # vLLM itself verifies nothing
    except (ValueError, OSError) as error:
        raise ApiError(str(error), param="lora_path") from error
    return await _use_loras(request, "load", lora_name=body.get("lora_name"), lora_path=str(directory))


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
    routes.broadcast = await init_broadcast(await _read_json(request), routes.config.weight_broadcast.type)
    return answer({"status": "ok"})


async def _read_json(request: Request) -> Json:
    data = await read_body(request)
    check_json_type(request, data)
    return parse_body(data)


def _allowed(routes: PrimeRoutes, body: Json, key: str) -> Path:
    given = body.get(key)
    if not isinstance(given, str) or not given:
        raise ApiError(f'give {{"{key}": "<directory>"}}', param=key)
    allowed = [*routes.config.weight_dirs, *filter(None, [routes.config.output_dir])]
    try:
        return resolve_allowed(given, allowed)
    except PermissionError as error:
        raise ApiError(str(error), status=403, param=key, kind="permission_error") from error


def build_lora_request(directory: Path) -> Any:
    """The policy adapter as a `LoRARequest`. Its path distinguishes the cached keys of different versions."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(POLICY, POLICY_ID, str(directory))


def _add_versions(routes: PrimeRoutes, content: Any) -> Any:
    """Add `versions` spans to every choice, and `reasoning_content` as an alias of vLLM's `reasoning`."""
    choices = content.get("choices") or []
    spans = routes.take_spans(str(content.get("id", content.get("request_id", ""))), len(choices))
    for choice in choices:
        choice["versions"] = spans.get(choice["index"], [[0, routes.version]])
        message = choice.get("message")
        if isinstance(message, dict) and message.get("reasoning") is not None:
            message.setdefault("reasoning_content", message["reasoning"])
    return content


def _add_card_versions(routes: PrimeRoutes, content: Any) -> Any:
    for card in content.get("data", []):
        card["version"] = routes.version
    return content


def _add_metrics(routes: PrimeRoutes, text: str) -> str:
    rows = (
        ("policy_version", "Version of the weights in service.", routes.version),
        ("requests_in_flight", "Unfinished requests.", routes.num_requests),
    )
    return text + "".join(
        f"# HELP prime_rl_{name} {what}\n# TYPE prime_rl_{name} gauge\nprime_rl_{name} {value}\n"
        for name, what, value in rows
    )


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
    return "api" if path.startswith(("/v1/", "/inference/", "/tokenize", "/detokenize")) else "control"


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
