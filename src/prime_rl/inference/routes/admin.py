"""Routes for server state: version, weights, adapters, pause and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.adapters import POLICY
from prime_rl.inference.engine import EngineFailed
from prime_rl.inference.intake import read_json
from prime_rl.inference.request_parsing import MAX_NAME_LENGTH, ApiError, Json
from prime_rl.inference.routes.openai import Route, answer
from prime_rl.inference.weight_dirs import parse_directory
from prime_rl.inference.weight_receiver import init_broadcast, parse_version
from prime_rl.telemetry.prometheus import CONTENT_TYPE, Sample, render_samples
from prime_rl.transport.weights import is_adapter

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState


async def update_weights(service: ServerState, request: Request) -> Response:
    """POST /update_weights {"weight_dir"}: serve the weights of a published directory; running requests continue.

    A directory with only a LoRA adapter also becomes the policy: the base model with this adapter.
    With {"weight_dir": null, "step"}, version `step` is received from the trainer set by /init_broadcaster.
    """
    body = await _read(service, request)
    if "weight_dir" in body and body["weight_dir"] is None:
        return answer(await service.load_broadcast(parse_version(body)))
    directory = parse_directory(body, "weight_dir", service.config)
    if is_adapter(directory):
        return answer(await service.load_policy_adapter(directory))
    return answer(await service.load(lambda: service.weights.read_step(directory)))


async def reload_weights(service: ServerState, request: Request) -> Response:
    """POST /reload_weights: restore the initial weights, version 0."""
    return answer(await service.load(service.weights.read_base))


async def load_lora_adapter(service: ServerState, request: Request) -> Response:
    """POST /v1/load_lora_adapter {"lora_name", "lora_path"}: requests can then select it as their model."""
    body = await _read(service, request)
    name = body.get("lora_name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH or name in service.names:
        raise ApiError(f"lora_name must be a unique name of at most {MAX_NAME_LENGTH} characters", param="lora_name")
    return answer(await service.load_adapter(name, parse_directory(body, "lora_path", service.config)))


async def unload_lora_adapter(service: ServerState, request: Request) -> Response:
    """POST /v1/unload_lora_adapter {"lora_name"}"""
    name = (await _read(service, request)).get("lora_name")
    if not isinstance(name, str):
        raise ApiError("lora_name must be the name of an adapter", param="lora_name")
    return answer(await service.remove_adapter(name))


async def init_broadcaster(service: ServerState, request: Request) -> Response:
    """POST /init_broadcaster {"host", "port"}: connect to the trainer from which /update_weights receives weights."""
    service.broadcast = await init_broadcast(await _read(service, request), service.config.weight_broadcast.type)
    return answer({"status": "ok"})


async def pause(service: ServerState, request: Request) -> Response:
    """POST /pause?mode=keep|abort: stop generation; keep suspends running requests, abort ends them."""
    mode = request.query_params.get("mode", "keep")
    if mode not in ("keep", "abort"):
        raise ApiError(f"mode {mode!r} is not supported: use keep or abort", param="mode")
    await service.engine.pause(abort=mode == "abort")
    return answer({"status": "paused", "version": service.version})


async def resume(service: ServerState, request: Request) -> Response:
    """POST /resume"""
    await service.engine.resume()
    return answer({"status": "resumed", "version": service.version})


async def is_paused(service: ServerState, request: Request) -> Response:
    """GET /is_paused"""
    return answer({"is_paused": service.engine.paused})


async def models(service: ServerState, request: Request) -> Response:
    """GET /v1/models: the model and its adapters."""
    return answer({"object": "list", "data": _build_cards(service)})


async def model(service: ServerState, request: Request) -> Response:
    """GET /v1/models/{model}: the model or one of its adapters."""
    name = request.path_params["model"]
    adapter = service.find_adapter({"model": name})
    is_named = adapter is not None and adapter != POLICY
    cards = {card["id"]: card for card in _build_cards(service)}
    return answer(cards[adapter if is_named else service.names[0]])


def _build_cards(service: ServerState) -> list[Json]:
    """OpenAI model objects: the model, then its adapters."""

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
    return cards + [card(name, spec.version, base) for name, spec in service.named_adapters().items()]


async def health(service: ServerState, request: Request) -> Response:
    """GET /health: 200 with the weight version, numerics, whether weights are awaited and whether generation is paused;
    503 if the engine failed."""
    if service.engine.error is not None:
        raise EngineFailed(f"engine failed: {service.engine.error}")
    if service.engine.engine.problem is not None:
        raise ApiError(service.engine.engine.problem, status=503)
    states = {"awaits_weights": service.awaits_weights, "is_paused": service.engine.paused}
    given = {name: True for name, is_set in states.items() if is_set}
    return answer({"status": "ok", "version": service.version} | service.numerics | given)


async def metrics(service: ServerState, request: Request) -> Response:
    """GET /metrics in Prometheus text format."""
    stats = service.engine.engine.stats()
    rows: list[Sample] = [
        ("requests_running", "gauge", "Running requests.", stats.running),
        ("requests_waiting", "gauge", "Queued requests.", stats.waiting),
        ("requests_finished_total", "counter", "Finished requests.", stats.finished),
        ("requests_preempted_total", "counter", "Requests preempted for lack of cache memory.", stats.preempted),
        ("prompt_tokens_total", "counter", "Prompt tokens received.", stats.prompt_tokens),
        (
            "shared_prompt_tokens_total",
            "counter",
            "Prompt tokens read from the prefix cache.",
            stats.shared_prompt_tokens,
        ),
        ("generated_tokens_total", "counter", "Generated tokens.", stats.generated_tokens),
        ("engine_steps_total", "counter", "Forward passes.", stats.steps),
        ("drafted_tokens_total", "counter", "Tokens drafted by speculative decoding.", stats.drafted_tokens),
        ("accepted_tokens_total", "counter", "Drafted tokens that were kept.", stats.accepted_tokens),
        ("cached_tokens", "gauge", "Tokens in the KV cache.", stats.cached_tokens),
        ("kept_tokens", "gauge", "Cached tokens of finished requests.", stats.kept_tokens),
        ("cache_size_tokens", "gauge", "KV cache capacity in tokens.", stats.cache_size),
        ("weight_updates_total", "counter", "Completed weight updates.", service.num_updates),
        ("paused", "gauge", "1 while generation is paused.", int(service.engine.paused)),
        ("policy_version", "gauge", "Version of the weights in service.", service.version),
    ]
    return Response(render_samples(rows), media_type=CONTENT_TYPE)


async def _read(service: ServerState, request: Request) -> Json:
    return await read_json(request, service.workers, lambda body: body)


CONTROL_ROUTES: tuple[Route, ...] = (
    ("/health", "GET", health, "open"),
    ("/metrics", "GET", metrics, "read"),
    ("/v1/models", "GET", models, "api"),
    ("/v1/models/{model:path}", "GET", model, "api"),
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
