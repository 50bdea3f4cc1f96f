"""Handlers of the OpenAI API as functions of (service, request), and the access and error wrapper of all routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.access import Access, check_access
from prime_rl.inference.async_engine import ClientGone, EngineBusy, EngineStopping, ReaderTooSlow
from prime_rl.inference.detokenizer import accumulate_offsets, find_context
from prime_rl.inference.engine import EngineFailed, Event, GenerationRequest, Output
from prime_rl.inference.grammar import read_grammar
from prime_rl.inference.intake import RETRY_AFTER_S, read_json
from prime_rl.inference.request_parsing import (
    ApiError,
    Json,
    ParsedRequest,
    build_requests,
    check_prompt_length,
    parse_request,
    read_flag,
    with_defaults,
)
from prime_rl.inference.responses import ChoiceStream, EchoedPrompt, usage

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState

RouteHandler = Callable[["ServerState", Request], Awaitable[Response]]
Route = tuple[str, str, RouteHandler, Access]
REQUEST_TIMEOUT = 408
ENTRY_BYTES = 4
"""Serializing one log-prob takes about as long as parsing this many body bytes."""
TOKENIZE_FIELDS = frozenset(
    "model messages prompt tools tool_choice add_generation_prompt add_special_tokens return_token_strs "
    "chat_template_kwargs".split()
)


@dataclass(frozen=True)
class Job:
    """A validated request: prompts, parameters and engine requests."""

    prompts: list[list[int]]
    parsed: ParsedRequest
    requests: list[GenerationRequest]
    echoed: list[EchoedPrompt] = field(default_factory=list)


def answer(content: Any, status: int = 200) -> Response:
    """Build a JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def chat(service: ServerState, request: Request) -> Response:
    """POST /v1/chat/completions"""

    def build(body: Json) -> Job:
        if "tokens" in body:
            raise ApiError("tokens belongs to /v1/chat/completions/tokens", param="tokens")
        service.find_adapter(body)
        return _build_chat(service, body, service.render(body))

    return await _answer_chat(service, request, await read_json(request, service.workers, build))


async def chat_tokens(service: ServerState, request: Request) -> Response:
    """POST /v1/chat/completions/tokens: a chat with its prompt given as `tokens`; messages are not rendered."""

    def build(body: Json) -> Job:
        service.find_adapter(body)
        return _build_chat(service, body, service.check_prompt(body.get("tokens"), "tokens"))

    return await _answer_chat(service, request, await read_json(request, service.workers, build))


def _build_chat(service: ServerState, body: Json, prompt: list[int]) -> Job:
    parsed = parse_generation_request(service, body, [prompt], chat=True)
    return Job([prompt], parsed, build_checked(service, [prompt], parsed))


async def _answer_chat(service: ServerState, request: Request, job: Job) -> Response:
    if job.parsed.stream:
        return _stream(service, request, job, chat=True)
    outputs = await service.engine.generate(job.requests, request.receive)
    return await write(service, outputs, job.parsed, lambda: service.writer.chat(job.prompts[0], outputs, job.parsed))


async def completions(service: ServerState, request: Request) -> Response:
    """POST /v1/completions: one or several prompts, as text or token ids."""

    def build(body: Json) -> Job:
        service.find_adapter(body)
        given = _read_prompts(service, body)
        prompts = _encode_prompts(service, body, given)
        parsed = parse_generation_request(service, body, prompts, chat=False)
        echoed = _echo(service, body, parsed, given, prompts) if parsed.echo else []
        return Job(prompts, parsed, build_checked(service, prompts, parsed), echoed)

    job = await read_json(request, service.workers, build)
    if job.parsed.stream:
        return _stream(service, request, job, chat=False)
    outputs = await service.engine.generate(job.requests, request.receive)
    return await write(
        service, outputs, job.parsed, lambda: service.writer.completion(job.prompts, outputs, job.parsed, job.echoed)
    )


async def tokenize(service: ServerState, request: Request) -> Response:
    """POST /tokenize: token ids of `messages` or of a `prompt`."""

    def build(body: Json) -> Response:
        service.find_adapter(body)
        if unknown := sorted(name for name in body.keys() - TOKENIZE_FIELDS if body[name] is not None):
            raise ApiError(f"unknown field {unknown[0]!r}: leave it out", param=unknown[0])
        add_special_tokens = read_flag(body, "add_special_tokens", True)
        max_len = service.engine.engine.max_score_len  # a teacher's prompt is tokenized here, and only scored
        if body.get("messages") is not None:
            tokens = service.render(body, max_len)
        elif isinstance(body.get("prompt"), str):
            tokens = service.encoder.encode(body["prompt"], add_special_tokens, max_len)
        else:
            raise ApiError("messages or a prompt is required", param="prompt")
        with_names = read_flag(body, "return_token_strs", False)
        names = service.tokenizer.convert_ids_to_tokens(tokens) if with_names else None
        return answer(
            {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens, "token_strs": names}
        )

    return await read_json(request, service.workers, build)


async def detokenize(service: ServerState, request: Request) -> Response:
    """POST /detokenize: text of `tokens`, including special tokens."""

    def build(body: Json) -> Response:
        service.find_adapter(body)
        tokens = service.check_prompt(body.get("tokens"), "tokens")
        return answer({"prompt": service.writer.decode(tokens, False)})

    return await read_json(request, service.workers, build)


def wrap_handler(
    service: ServerState, handler: RouteHandler, access: Access
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a handler with access control and OpenAI-format errors."""

    async def handle(request: Request) -> Response:
        try:
            check_access(service.api_key, request, access, service.hosts)
            if access == "api":
                check_weights(service.awaits_weights)
            return await handler(service, request)
        except asyncio.CancelledError:  # the server stops
            return build_error_response(request, EngineStopping())
        except Exception as error:
            return build_error_response(request, error)

    return handle


def build_error_response(request: Request, error: Exception) -> Response:
    """Build the error response of a failed request."""
    if isinstance(error, RecursionError):
        error = ApiError("the request is nested too deeply")
    elif isinstance(error, EngineFailed):
        retry_after_s = RETRY_AFTER_S if isinstance(error, EngineStopping) else 0
        error = ApiError(str(error), status=503, retry_after_s=retry_after_s)
    elif isinstance(error, EngineBusy):
        error = ApiError(str(error), status=429, kind="rate_limit_error", retry_after_s=RETRY_AFTER_S)
    elif isinstance(error, ReaderTooSlow):
        error = ApiError(str(error))
    elif isinstance(error, (ClientGone, ClientDisconnect)):
        error = ApiError("the client closed the connection", status=499)
    elif not isinstance(error, ApiError):
        logger.opt(exception=error).error(f"{request.method} {request.url.path} failed")
        error = ApiError(f"the server failed: {type(error).__name__}: {error}", status=500)
    reply = answer(error.body(), error.status)
    if error.retry_after_s:
        reply.headers["retry-after"] = str(error.retry_after_s)
    if error.status == REQUEST_TIMEOUT:
        reply.headers["connection"] = "close"
    return reply


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Error response for unknown paths and methods, in OpenAI's format."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path} is not served here: GET /openapi.json lists the routes"
    reply = answer(ApiError(message, status=status).body(), status)
    reply.headers.update((isinstance(error, HTTPException) and error.headers) or {})  # Allow, with a 405
    return reply


def check_weights(awaited: bool) -> None:
    """HTTP 503 until the awaited weights are loaded."""
    if awaited:
        raise ApiError("waiting for weights (server.wait_for_weights)", 503, retry_after_s=RETRY_AFTER_S)


def parse_generation_request(
    service: ServerState, body: Json, prompts: list[list[int]], *, chat: bool
) -> ParsedRequest:
    """Validate the request parameters; `ApiError` names an unsupported field."""
    max_new_tokens = max(check_prompt_length(len(prompt), service.max_model_len) for prompt in prompts)
    body = with_defaults(body, service.defaults, chat=chat)
    parsed = parse_request(
        body, chat=chat, max_new_tokens=max_new_tokens, vocab=service.vocab, default_seed=service.next_seed
    )
    opened = chat and service.opens_reasoning(prompts[0])
    parsed = replace(parsed, adapter=service.find_adapter(body), opened=opened)
    grammar = read_grammar(body, parsed, service.writer.parser.tools, service.added_tokens, chat=chat)
    return replace(parsed, params=replace(parsed.params, grammar=grammar)) if grammar is not None else parsed


def check(service: ServerState, requests: list[GenerationRequest]) -> None:
    """`ApiError` for requests that the engine does not support."""
    try:
        service.engine.check(requests)
    except ValueError as error:
        raise ApiError(str(error)) from error


def build_checked(service: ServerState, prompts: list[list[int]], parsed: ParsedRequest) -> list[GenerationRequest]:
    """Build the engine requests; `ApiError` if they exceed the queue size or are unsupported.

    Without a seed in the request, each prompt has its own: the engine draws by seed and position.
    """
    limit = service.engine.max_requests
    if limit is not None and len(prompts) * parsed.num_choices > limit:
        raise ApiError(f"{len(prompts)} prompts with n = {parsed.num_choices} exceed {limit} requests: send fewer")
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        if requests and not parsed.seeded:
            parsed = replace(parsed, params=replace(parsed.params, seed=service.next_seed()))
        context = find_context(service.writer.decode, prompt) if parsed.continues else []
        requests += build_requests(prompt, parsed, service.max_model_len - len(prompt), context)
    check(service, requests)
    return requests


async def write(
    service: ServerState, outputs: list[Output], parsed: ParsedRequest, build: Callable[[], Json]
) -> Response:
    """Serialize the response of `build`, in a worker thread if it has many log-probs."""
    entries = sum(len(one.token_ids) for one in outputs) * (1 + parsed.params.top_logprobs) if parsed.logprobs else 0
    entries += sum(len(one.prompt_logprobs.logprobs) for one in outputs if one.prompt_logprobs is not None) * (
        1 + (parsed.params.prompt_logprobs or 0)
    )
    return await service.workers.run(ENTRY_BYTES * entries, lambda: answer(build()))


def _read_prompts(service: ServerState, body: Json) -> list[Any]:
    """The prompts as they were given: texts, and lists of token ids that are not checked yet."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError("prompt must be a string, a list of token ids, or a list of these", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    limit = service.engine.max_requests
    if limit is not None and len(prompt) > limit:
        raise ApiError(f"{len(prompt)} prompts exceed {limit} requests: send fewer", param="prompt")
    return prompt


def _encode_prompts(service: ServerState, body: Json, given: list[Any]) -> list[list[int]]:
    add_special_tokens = read_flag(body, "add_special_tokens", True)
    return [
        service.encoder.encode(one, add_special_tokens) if isinstance(one, str) else service.check_prompt(one, "prompt")
        for one in given
    ]


def _echo(
    service: ServerState, body: Json, parsed: ParsedRequest, given: list[Any], prompts: list[list[int]]
) -> list[EchoedPrompt]:
    """The prompts as they were given, which differ from their tokens by special tokens and normalization."""
    add_special_tokens = read_flag(body, "add_special_tokens", True)
    echoed, decode = [], service.writer.decode
    for text, prompt in zip(given, prompts, strict=True):
        offsets: list[int] = []
        if parsed.logprobs:
            offsets = (
                service.encoder.find_offsets(text, add_special_tokens)
                if isinstance(text, str)
                else accumulate_offsets(decode, prompt)
            )
        echoed.append(EchoedPrompt(text if isinstance(text, str) else decode(prompt, False), offsets))
    return echoed


def _stream(service: ServerState, request: Request, job: Job, *, chat: bool) -> Response:
    parsed = job.parsed
    kind, prefix = ("chat.completion.chunk", "chatcmpl") if chat else ("text_completion", "cmpl")
    head = service.writer.head(kind, prefix, parsed.adapter)
    choices = {single: ChoiceStream(service.writer, i, parsed, chat) for i, single in enumerate(job.requests)}

    def build_opening() -> Json:
        first: Json = {"choices": []}
        for i in range(len(choices)):
            delta: Json = {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            first["choices"].append(delta | {"logprobs": None})
        return first | ({"prompt_token_ids": job.prompts[0]} if parsed.token_ids else {})

    def build_piece(event: Event) -> Json:
        choice = choices[event.request]
        return {"choices": [choice.end(event) if isinstance(event, Output) else choice.progress(event)]}

    return stream_events(service, request, job, head, build_piece, build_opening() if chat else None)


def stream_events(
    service: ServerState,
    request: Request,
    job: Job,
    head: Json,
    build_piece: Callable[[Event], Json],
    opening: Json | None = None,
) -> Response:
    """Stream server-sent events: one line per engine event, usage if requested, then [DONE]; or an error."""

    def line(content: Json) -> bytes:
        return b"data: " + orjson.dumps({**head, **content}) + b"\n\n"

    async def lines() -> AsyncIterator[bytes]:
        outputs: dict[GenerationRequest, Output] = {}
        if opening is not None:
            yield line(opening)
        try:
            async for event in service.engine.stream(job.requests):
                yield line(build_piece(event))
                if isinstance(event, Output):
                    outputs[event.request] = event
        except Exception as error:
            yield b"data: " + build_error_response(request, error).body + b"\n\n"
            return
        if job.parsed.include_usage:
            yield line({"choices": [], "usage": usage(job.prompts, [outputs[single] for single in job.requests])})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


ROUTES: tuple[Route, ...] = (
    ("/v1/chat/completions", "POST", chat, "api"),
    ("/v1/chat/completions/tokens", "POST", chat_tokens, "api"),
    ("/v1/completions", "POST", completions, "api"),
    ("/tokenize", "POST", tokenize, "api"),
    ("/detokenize", "POST", detokenize, "api"),
)
