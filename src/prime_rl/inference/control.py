"""Routes that tell and change the state of the server: version, weights, adapters, pause, counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.async_engine import EngineFailed
from prime_rl.inference.broadcasting import init_broadcast, parse_version
from prime_rl.inference.directories import resolve_allowed
from prime_rl.inference.requests import ApiError, Json, parse_body
from prime_rl.inference.routes import Route, answer
from prime_rl.transport.weights import is_adapter
from prime_rl.utils.prometheus import CONTENT_TYPE, Sample, render_samples

if TYPE_CHECKING:
    from prime_rl.inference.service import Service


async def update_weights(service: Service, request: Request) -> Response:
    """POST /update_weights {"weight_dir"}: serve the weights of a published directory, without dropping a request.

    A directory that holds nothing but a LoRA adapter becomes the policy too: the base model with this adapter.
    With {"weight_dir": null, "step"} the weights of a version are received from the trainer of /init_broadcaster.
    """
    body = parse_body(await request.body())
    if "weight_dir" in body and body["weight_dir"] is None:
        return answer(await service.load_broadcast(parse_version(body)))
    directory = _allowed(service, body, "weight_dir")
    if is_adapter(directory):
        return answer(await service.load_policy_adapter(directory))
    return answer(await service.load(lambda: service.weights.read_step(directory)))


async def reload_weights(service: Service, request: Request) -> Response:
    """POST /reload_weights: back to the weights of the start, version 0."""
    return answer(await service.load(service.weights.read_base))


async def load_lora_adapter(service: Service, request: Request) -> Response:
    """POST /v1/load_lora_adapter {"lora_name", "lora_path"}: requests may then name it as their model."""
    body = parse_body(await request.body())
    name = body.get("lora_name")
    if not isinstance(name, str) or not name or name in service.names:
        raise ApiError("lora_name must be a name of its own", param="lora_name")
    return answer(await service.load_adapter(name, _allowed(service, body, "lora_path")))


async def unload_lora_adapter(service: Service, request: Request) -> Response:
    """POST /v1/unload_lora_adapter {"lora_name"}"""
    name = parse_body(await request.body()).get("lora_name")
    return answer(await service.remove_adapter(str(name)))


async def init_broadcaster(service: Service, request: Request) -> Response:
    """POST /init_broadcaster {"host", "port"}: where /update_weights receives weights from, once that has answered."""
    service.broadcast = await init_broadcast(parse_body(await request.body()), service.config.weight_broadcast.type)
    return answer({"status": "ok"})


async def pause(service: Service, request: Request) -> Response:
    """POST /pause?mode=keep|abort: draw no further token; keep freezes running requests, abort ends them."""
    mode = request.query_params.get("mode", "keep")
    if mode not in ("keep", "abort"):
        raise ApiError(f"mode {mode!r} is not offered: use keep or abort", param="mode")
    await service.engine.pause(abort=mode == "abort")
    return answer({"status": "paused", "version": service.version})


async def resume(service: Service, request: Request) -> Response:
    """POST /resume"""
    await service.engine.resume()
    return answer({"status": "resumed", "version": service.version})


async def is_paused(service: Service, request: Request) -> Response:
    """GET /is_paused"""
    return answer({"is_paused": service.engine.paused})


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: the model, and the adapters beside it."""

    def card(name: str, version: int, parent: str | None = None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "prime-rl",
            "root": service.names[-1],
            "parent": parent,
            "max_model_len": service.max_model_len,
            "version": version,
        }

    base = service.names[0]
    cards = [card(base, service.version)]
    cards += [card(name, spec.version, base) for name, spec in service.named_adapters().items()]
    return answer({"object": "list", "data": cards})


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 with the version in service and whether one is awaited, 503 when the engine has failed."""
    if service.engine.error is not None:
        raise EngineFailed(f"the engine has failed: {service.engine.error}")
    if service.engine.engine.problem is not None:
        raise ApiError(service.engine.engine.problem, status=503)
    return answer(
        {"status": "ok", "version": service.version} | ({"awaits_weights": True} if service.awaits_weights else {})
    )


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics in the text format of Prometheus."""
    stats = service.engine.engine.stats()
    rows: list[Sample] = [
        ("requests_running", "gauge", "Requests that hold a place.", stats.running),
        ("requests_waiting", "gauge", "Requests that wait for a place.", stats.waiting),
        ("requests_finished_total", "counter", "Requests answered.", stats.finished),
        ("requests_preempted_total", "counter", "Requests put back for lack of memory.", stats.preempted),
        ("prompt_tokens_total", "counter", "Prompt tokens received.", stats.prompt_tokens),
        ("shared_prompt_tokens_total", "counter", "Prompt tokens found in the cache.", stats.shared_prompt_tokens),
        ("generated_tokens_total", "counter", "Tokens drawn.", stats.generated_tokens),
        ("engine_steps_total", "counter", "Forward passes.", stats.steps),
        ("cached_tokens", "gauge", "Tokens whose keys and values are held.", stats.cached_tokens),
        ("kept_tokens", "gauge", "Those of them that ended requests have left.", stats.kept_tokens),
        ("cache_size_tokens", "gauge", "Tokens that could be held.", stats.cache_size),
        ("weight_updates_total", "counter", "Weights taken into service.", service.num_updates),
        ("paused", "gauge", "1 while no token is drawn.", int(service.engine.paused)),
        ("policy_version", "gauge", "Version of the weights in service.", service.version),
    ]
    return Response(render_samples(rows), media_type=CONTENT_TYPE)


def _allowed(service: Service, body: Json, key: str) -> Path:
    """The directory that a request names, when it may be read."""
    given = body.get(key)
    if not isinstance(given, str) or not given:
        raise ApiError(f'give {{"{key}": "<directory>"}}', param=key)
    allowed = [*service.config.weight_dirs, *filter(None, [service.config.output_dir])]
    try:
        return resolve_allowed(given, allowed)
    except PermissionError as error:
        raise ApiError(str(error), status=403, param=key, kind="permission_error") from error


CONTROL_ROUTES: tuple[Route, ...] = (
    ("/health", "GET", health, "open"),
    ("/metrics", "GET", metrics, "open"),
    ("/v1/models", "GET", models, "api"),
    ("/update_weights", "POST", update_weights, "control"),
    ("/reload_weights", "POST", reload_weights, "control"),
    ("/init_broadcaster", "POST", init_broadcaster, "control"),
    ("/v1/load_lora_adapter", "POST", load_lora_adapter, "control"),
    ("/v1/unload_lora_adapter", "POST", unload_lora_adapter, "control"),
    ("/load_lora_adapter", "POST", load_lora_adapter, "control"),
    ("/pause", "POST", pause, "control"),
    ("/resume", "POST", resume, "control"),
    ("/is_paused", "GET", is_paused, "control"),
)
