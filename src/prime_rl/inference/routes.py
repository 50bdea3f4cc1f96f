"""What each route of the server does, as functions of (service, request)."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.async_engine import ClientGone, EngineFailed
from prime_rl.inference.engine import Event, GenerationRequest, Output, resolve_allowed
from prime_rl.inference.requests import (
    ApiError,
    Json,
    Wish,
    build_requests,
    check_prompt_length,
    check_token_ids,
    parse_body,
    parse_wish,
)
from prime_rl.inference.responses import ChoiceStream, usage

if TYPE_CHECKING:
    from prime_rl.inference.service import Service

RouteHandler = Callable[["Service", Request], Awaitable[Response]]
TOKENIZE_FIELDS = frozenset(
    "model messages prompt tools tool_choice add_generation_prompt add_special_tokens return_token_strs "
    "chat_template_kwargs".split()
)


def answer(content: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def chat(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions"""
    body = await _read(service, request)
    if "tokens" in body:
        raise ApiError("tokens belongs to /v1/chat/completions/tokens", param="tokens")
    return await _answer_chat(service, request, body, service.render(body))


async def chat_tokens(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions/tokens: a chat whose prompt is given as `tokens`; its messages are not rendered."""
    body = await _read(service, request)
    return await _answer_chat(service, request, body, check_token_ids(body.get("tokens"), service.vocab, "tokens"))


async def _answer_chat(service: Service, request: Request, body: Json, prompt: list[int]) -> Response:
    wish = _wish(service, body, [prompt], chat=True)
    requests = build_requests(prompt, wish)
    if wish.stream:
        return _stream(service, [prompt], requests, wish, chat=True)
    outputs = await service.engine.generate(requests, request.receive)
    return answer(service.writer.chat(prompt, outputs, wish))


async def completions(service: Service, request: Request) -> Response:
    """POST /v1/completions: one prompt or several, as text or as token ids."""
    body = await _read(service, request)
    prompts = _prompts(service, body)
    wish = _wish(service, body, prompts, chat=False)
    requests = [single for prompt in prompts for single in build_requests(prompt, wish)]
    if wish.stream:
        return _stream(service, prompts, requests, wish, chat=False)
    outputs = await service.engine.generate(requests, request.receive)
    return answer(service.writer.completion(prompts, outputs, wish))


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize: the token ids of `messages` or of a `prompt`."""
    body = await _read(service, request)
    if unknown := sorted(name for name in body.keys() - TOKENIZE_FIELDS if body[name] is not None):
        raise ApiError(f"{unknown[0]!r} is not a field of /tokenize: leave it out", param=unknown[0])
    if body.get("messages") is not None:
        tokens = service.render(body)
    elif isinstance(body.get("prompt"), str):
        tokens = service.encode(body["prompt"], body.get("add_special_tokens") is not False)
    else:
        raise ApiError("give messages or a prompt", param="prompt")
    names = service.tokenizer.convert_ids_to_tokens(tokens) if body.get("return_token_strs") else None
    return answer({"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": names})


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize: the text of `tokens`, special ones included."""
    body = await _read(service, request)
    tokens = check_token_ids(body.get("tokens"), service.vocab, "tokens")
    return answer({"prompt": service.writer.decode(tokens, False)})


async def update_weights(service: Service, request: Request) -> Response:
    """POST /update_weights {"weight_dir"}: serve the weights of a published directory, without dropping a request."""
    body = parse_body(await request.body())
    weight_dir = body.get("weight_dir")
    if not isinstance(weight_dir, str) or not weight_dir:
        raise ApiError('give {"weight_dir": "<directory>"}', param="weight_dir")
    allowed = [*service.config.weight_dirs, *filter(None, [service.config.output_dir])]
    try:
        directory = resolve_allowed(weight_dir, allowed)
    except PermissionError as error:
        raise ApiError(str(error), status=403, param="weight_dir", kind="permission_error") from error
    return answer(await service.load(lambda: service.weights.read_step(directory)))


async def reload_weights(service: Service, request: Request) -> Response:
    """POST /reload_weights: back to the weights of the start, version 0."""
    return answer(await service.load(service.weights.read_base))


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models"""
    card = {
        "id": service.config.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "prime-rl",
        "root": service.names[-1],
        "max_model_len": service.max_model_len,
        "version": service.version,
    }
    return answer({"object": "list", "data": [card]})


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 with the version in service, 503 when the engine has failed."""
    if service.engine.error is not None:
        raise EngineFailed(f"the engine has failed: {service.engine.error}")
    return answer({"status": "ok", "version": service.version})


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics in the text format of Prometheus."""
    stats = service.engine.engine.stats()
    rows = [
        ("requests_running", "gauge", "Requests that hold a slot.", stats.running),
        ("requests_waiting", "gauge", "Requests that wait for a slot.", stats.waiting),
        ("requests_finished_total", "counter", "Requests answered.", stats.finished),
        ("prompt_tokens_total", "counter", "Prompt tokens received.", stats.prompt_tokens),
        ("shared_prompt_tokens_total", "counter", "Prompt tokens copied from a twin.", stats.shared_prompt_tokens),
        ("generated_tokens_total", "counter", "Tokens drawn.", stats.generated_tokens),
        ("engine_steps_total", "counter", "Forward passes.", stats.steps),
        ("policy_version", "gauge", "Version of the weights in service.", service.version),
    ]
    lines = [
        f"# HELP prime_rl_{name} {text}\n# TYPE prime_rl_{name} {kind}\nprime_rl_{name} {value}\n"
        for name, kind, text, value in rows
    ]
    return Response("".join(lines), media_type="text/plain; version=0.0.4")


def guarded(service: Service, handler: RouteHandler, is_open: bool) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the key, with every error in OpenAI's shape."""

    async def handle(request: Request) -> Response:
        try:
            if not is_open:
                _check_key(service.api_key, request)
            return await handler(service, request)
        except ApiError as error:
            return answer(error.body(), error.status)
        except ClientGone:
            return Response(status_code=499)
        except EngineFailed as error:
            return answer(ApiError(str(error), status=503).body(), 503)
        except Exception as error:
            logger.exception(f"{request.method} {request.url.path} failed")
            failure = ApiError(f"the server failed: {type(error).__name__}: {error}", status=500)
            return answer(failure.body(), failure.status)

    return handle


async def refuse_route(request: Request, error: Exception) -> Response:
    """A path or method that no route serves, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return answer(ApiError(f"{request.method} {request.url.path} is not served here", status=status).body(), status)


def _check_key(api_key: str | None, request: Request) -> None:
    if api_key is None:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), api_key.encode()):
        raise ApiError("the bearer token is missing or wrong", status=401, kind="authentication_error")


async def _read(service: Service, request: Request) -> Json:
    body = parse_body(await request.body())
    service.check_model(body)
    return body


def _wish(service: Service, body: Json, prompts: list[list[int]], *, chat: bool) -> Wish:
    room = min(check_prompt_length(len(prompt), service.max_model_len) for prompt in prompts)
    return parse_wish(body, chat=chat, room=room, vocab=service.vocab, default_seed=service.next_seed)


def _prompts(service: Service, body: Json) -> list[list[int]]:
    prompt = body.get("prompt")
    add_special_tokens = body.get("add_special_tokens") is not False
    if isinstance(prompt, str):
        return [service.encode(prompt, add_special_tokens)]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError("prompt must be a string, a list of token ids, or a list of those", param="prompt")
    if isinstance(prompt[0], int):
        return [check_token_ids(prompt, service.vocab, "prompt")]
    return [
        service.encode(one, add_special_tokens)
        if isinstance(one, str)
        else check_token_ids(one, service.vocab, "prompt")
        for one in prompt
    ]


def _stream(
    service: Service, prompts: list[list[int]], requests: list[GenerationRequest], wish: Wish, *, chat: bool
) -> Response:
    """Server-sent events: one line per piece, then usage if wanted, then [DONE]."""
    head = service.writer.head("chat.completion.chunk" if chat else "text_completion", "chatcmpl" if chat else "cmpl")
    choices = {single: ChoiceStream(service.writer, i, wish, chat) for i, single in enumerate(requests)}

    def line(content: Json) -> bytes:
        return b"data: " + orjson.dumps({**head, **content}) + b"\n\n"

    def opening() -> Json:
        first: Json = {"choices": []}
        for i in range(len(requests)):
            delta: Json = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            first["choices"].append(delta | {"logprobs": None})
        return first | ({"prompt_token_ids": prompts[0]} if wish.token_ids else {})

    def piece(event: Event) -> bytes:
        choice = choices[event.request]
        return line({"choices": [choice.end(event) if isinstance(event, Output) else choice.progress(event)]})

    async def lines() -> AsyncIterator[bytes]:
        outputs = []
        if chat:
            yield line(opening())
        try:
            async for event in service.engine.stream(requests):
                yield piece(event)
                if isinstance(event, Output):
                    outputs.append(event)
        except (ApiError, EngineFailed) as error:
            failure = error if isinstance(error, ApiError) else ApiError(str(error), status=503)
            yield b"data: " + orjson.dumps(failure.body()) + b"\n\n"
            return
        if wish.include_usage:
            yield line({"choices": [], "usage": usage(sum(map(len, prompts)), outputs)})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


ROUTES: tuple[tuple[str, str, RouteHandler, bool], ...] = (
    # path, method, handler, open to everybody even when a key is set
    ("/v1/chat/completions", "POST", chat, False),
    ("/v1/chat/completions/tokens", "POST", chat_tokens, False),
    ("/v1/completions", "POST", completions, False),
    ("/v1/models", "GET", models, False),
    ("/tokenize", "POST", tokenize, False),
    ("/detokenize", "POST", detokenize, False),
    ("/update_weights", "POST", update_weights, False),
    ("/reload_weights", "POST", reload_weights, False),
    ("/health", "GET", health, True),
    ("/metrics", "GET", metrics, True),
)
