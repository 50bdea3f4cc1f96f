"""What each route of the OpenAI API does, as functions of (service, request), and what guards all routes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import orjson
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.async_engine import ClientGone, EngineBusy, EngineFailed
from prime_rl.inference.engine import Event, GenerationRequest, Output
from prime_rl.inference.requests import (
    ApiError,
    Json,
    Wish,
    build_requests,
    check_prompt_length,
    check_token_ids,
    parse_body,
    parse_wish,
    with_defaults,
)
from prime_rl.inference.responses import ChoiceStream, usage

if TYPE_CHECKING:
    from prime_rl.inference.service import Service

RouteHandler = Callable[["Service", Request], Awaitable[Response]]
Access = Literal["open", "api", "control"]
"""Who may use a route: everybody; who has the key, if there is one; the same, but without a key this machine only."""
Route = tuple[str, str, RouteHandler, Access]
LOOPBACK = ("127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1")
RETRY_AFTER_S = 1
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
    wish = build_wish(service, body, [prompt], chat=True)
    requests = build_requests(prompt, wish)
    check(service, requests)
    if wish.stream:
        return _stream(service, request, [prompt], requests, wish, chat=True)
    outputs = await service.engine.generate(requests, request.receive)
    return answer(service.writer.chat(prompt, outputs, wish))


async def completions(service: Service, request: Request) -> Response:
    """POST /v1/completions: one prompt or several, as text or as token ids."""
    body = await _read(service, request)
    prompts = _prompts(service, body)
    wish = build_wish(service, body, prompts, chat=False)
    requests = [single for prompt in prompts for single in build_requests(prompt, wish)]
    check(service, requests)
    if wish.stream:
        return _stream(service, request, prompts, requests, wish, chat=False)
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


def guarded(service: Service, handler: RouteHandler, access: Access) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind the key, with every error in OpenAI's shape."""

    async def handle(request: Request) -> Response:
        try:
            check_access(service.api_key, request, access)
            if access == "api":
                check_weights(service.awaits_weights)
            return await handler(service, request)
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            return refuse(request, error)

    return handle


class BodyLimit:
    """Answers 413 to a request whose body is longer than `max_bytes`, announced or not, without keeping it."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_long = ApiError(f"the body is longer than {self.max_bytes} bytes (server.max_request_mb)", status=413)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.max_bytes:
            await refuse(Request(scope), too_long)(scope, receive, send)
            return
        seen = 0

        async def limited() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise too_long
            return message

        await self.app(scope, limited, send)


def refuse(request: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, EngineFailed):
        error = ApiError(str(error), status=503)
    elif isinstance(error, EngineBusy):
        error = ApiError(str(error), status=429, kind="rate_limit_error", retry_after_s=RETRY_AFTER_S)
    elif not isinstance(error, ApiError):
        logger.opt(exception=error).error(f"{request.method} {request.url.path} failed")
        error = ApiError(f"the server failed: {type(error).__name__}: {error}", status=500)
    reply = answer(error.body(), error.status)
    if error.retry_after_s:
        reply.headers["retry-after"] = str(error.retry_after_s)
    return reply


async def refuse_route(request: Request, error: Exception) -> Response:
    """A path or method that no route serves, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    reply = answer(ApiError(f"{request.method} {request.url.path} is not served here", status=status).body(), status)
    reply.headers.update((isinstance(error, HTTPException) and error.headers) or {})  # Allow, with a 405
    return reply


def check_access(api_key: str | None, request: Request, access: Access) -> None:
    """With a key every request must bring it; without one, only this machine may change the server."""
    if access == "open":
        return
    if api_key is not None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError("the bearer token is missing or wrong", status=401, kind="authentication_error")
    elif access == "control" and request.client is not None and request.client.host not in LOOPBACK:
        raise ApiError(
            f"{request.url.path} answers this machine only: set server.api_key_var and send its key",
            status=403,
            kind="permission_error",
        )


def check_weights(awaited: bool) -> None:
    """A server that waits to be told its weights answers nothing that depends on them."""
    if awaited:
        raise ApiError("waiting to be told its weights (server.await_weights)", 503, retry_after_s=RETRY_AFTER_S)


async def _read(service: Service, request: Request) -> Json:
    body = parse_body(await request.body())
    service.find_adapter(body)
    return body


def build_wish(service: Service, body: Json, prompts: list[list[int]], *, chat: bool) -> Wish:
    """The checked request; `ApiError` names what cannot be honoured."""
    room = min(check_prompt_length(len(prompt), service.max_model_len) for prompt in prompts)
    body = with_defaults(body, service.defaults)
    wish = parse_wish(body, chat=chat, room=room, vocab=service.vocab, default_seed=service.next_seed)
    opened = chat and service.opens_reasoning(prompts[0])
    return replace(wish, adapter=service.find_adapter(body), opened=opened)


def check(service: Service, requests: list[GenerationRequest]) -> None:
    """`ApiError` for what the engine cannot do."""
    try:
        service.engine.check(requests)
    except ValueError as error:
        raise ApiError(str(error)) from error


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
    service: Service,
    request: Request,
    prompts: list[list[int]],
    requests: list[GenerationRequest],
    wish: Wish,
    *,
    chat: bool,
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
        except (ApiError, EngineBusy, EngineFailed) as error:
            yield b"data: " + refuse(request, error).body + b"\n\n"
            return
        if wish.include_usage:
            yield line({"choices": [], "usage": usage(sum(map(len, prompts)), outputs)})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


ROUTES: tuple[Route, ...] = (
    ("/v1/chat/completions", "POST", chat, "api"),
    ("/v1/chat/completions/tokens", "POST", chat_tokens, "api"),
    ("/v1/completions", "POST", completions, "api"),
    ("/tokenize", "POST", tokenize, "api"),
    ("/detokenize", "POST", detokenize, "api"),
)
