"""The HTTP server of an environment worker: one address per rollout, with the APIs that agents use.

    POST /sessions/ID/v1/chat/completions    OpenAI, chat completions
    POST /sessions/ID/v1/responses           OpenAI, responses
    POST /sessions/ID/v1/messages            Anthropic, messages
    GET  /sessions/ID/v1/models              OpenAI, the model
    POST /sessions/ID/reward                 {"reward": 0.5}: the agent scores itself
    POST /sessions/by-model/...              the same for a client of many sessions: ID follows "@" in `model`

Every route needs the session's key, as a bearer token or in `x-api-key`. Streams are sent when the answer is complete.
An answer whose client has gone is dropped: the agent has not seen it, so it is not trained on.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import orjson
import uvicorn

from prime_rl.gateway import anthropic_api, openai_api
from prime_rl.gateway.chat import CONTEXT_LENGTH, ChatRequest, RequestError
from prime_rl.gateway.session import NoAnswer, Session
from rollouts.training.environments.plain import read_message

HOST = "127.0.0.1"
BY_MODEL = "by-model"
MAX_REQUEST_BYTES = 32 << 20
KEEP_ALIVE_S = 3600
"""Agents reuse connections after long pauses; the end of their process closes them."""
JSON, EVENTS = b"application/json", b"text/event-stream"
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Content = tuple[bytes, bytes]
"""Media type and body of an answer."""


class _Named(msgspec.Struct):
    """Any request to a model."""

    model: str


class RewardReport(msgspec.Struct):
    """Body of /reward."""

    reward: float


class _Server(uvicorn.Server):
    """A server inside of another program, whose signal handlers stay as they are."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """The sessions of one process, and their server, which starts with the first one in the running event loop."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0
        self._routes: dict[tuple[str, str], Callable[[Session, bytes, bool], Awaitable[Content]]] = {
            ("POST", "v1/chat/completions"): _complete_chat,
            ("POST", "v1/responses"): _respond,
            ("POST", "v1/messages"): _write_message,
            ("POST", "reward"): _set_reward,
            ("GET", "v1/models"): _list_models,
        }

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[str]:
        """Serve `session` at the address that is returned, until the context is left."""
        self._ensure_started()
        name = secrets.token_hex(8)
        self.sessions[name] = session
        try:
            yield f"http://{HOST}:{self._port}/sessions/{name}"
        finally:
            del self.sessions[name]

    def _ensure_started(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        listener = socket.create_server((HOST, 0), backlog=2048)
        self._port = listener.getsockname()[1]
        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        server = _Server(uvicorn.Config(self, timeout_keep_alive=KEEP_ALIVE_S, **options))
        # Not in the context of the first rollout, to which the worker would attribute all requests.
        self._serving = loop.create_task(server.serve([listener]), context=contextvars.Context())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        try:
            status, content = await self._handle(scope, receive)
        except asyncio.CancelledError:
            raise
        except RequestError as error:
            status, content = 400, _describe_error(scope, 400, str(error), error.code)
        except NoAnswer as error:
            text = f"the engine failed, so this rollout will be repeated: {error}"
            status, content = 500, _describe_error(scope, 500, text)
        if content is None:
            return
        media_type, body = content
        headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
        if status >= 400:
            headers.append((b"x-should-retry", b"false"))  # the OpenAI and Anthropic clients obey it
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _handle(self, scope: Scope, receive: Receive) -> tuple[int, Content | None]:
        """Status and content; None if the client has disconnected."""
        _, _, name, path = (*scope["path"].split("/", 3), "", "", "")[:4]
        body = None
        if name == BY_MODEL:
            if (body := await _read_body(receive)) is None:
                return 0, None
            name = _decode(body, _Named).model.rpartition("@")[2]
        session, route = self.sessions.get(name), self._routes.get((scope["method"], path))
        if session is None:
            return 404, _describe_error(scope, 404, "this rollout has ended, so its address no longer exists")
        headers = dict(scope["headers"])
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(key, session.key.encode()):
            return 401, _describe_error(scope, 401, "the key is not that of this session: use OPENAI_API_KEY")
        if route is None:
            return 404, _describe_error(scope, 404, f"there is no {scope['method']} /{path}")
        if body is None and (body := await _read_body(receive)) is None:
            return 0, None
        is_retry = headers.get(b"x-stainless-retry-count", b"0") != b"0"
        try:
            return 200, await _run_until_disconnected(route(session, body, is_retry), receive)
        except RequestError as error:
            session.refusal = error
            raise


async def _complete_chat(session: Session, data: bytes, is_retry: bool) -> Content:
    request = _decode(data, ChatRequest)
    completion = openai_api.write_chat(await session.complete(request, is_retry=is_retry), request.model)
    if not request.stream:
        return JSON, orjson.dumps(completion)
    chunks = openai_api.stream_chat(completion, request.stream_options)
    return EVENTS, b"".join(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


async def _respond(session: Session, data: bytes, is_retry: bool) -> Content:
    body = _decode(data, openai_api.ResponsesRequest)
    request = openai_api.read_response_request(body, session.responses)
    answer = await session.complete(request, is_retry=is_retry)
    response = openai_api.write_response(answer, body)
    history = request.messages[bool(body.instructions) :]  # instructions do not carry over to the next response
    session.responses[response["id"]] = [*history, read_message(answer.choices[0].message)]
    if not body.stream:
        return JSON, orjson.dumps(response)
    return EVENTS, _encode_events(openai_api.stream_response(response), numbered=True)


async def _write_message(session: Session, data: bytes, is_retry: bool) -> Content:
    body = _decode(data, anthropic_api.MessagesRequest)
    answer = await session.complete(anthropic_api.read_request(body), is_retry=is_retry)
    message = anthropic_api.write_answer(answer, body.model)
    if not body.stream:
        return JSON, msgspec.json.encode(message)  # orjson refuses integers of more than 64 bits, as arguments may have
    return EVENTS, _encode_events(anthropic_api.stream_events(message))


async def _set_reward(session: Session, data: bytes, is_retry: bool) -> Content:
    reward = _decode(data, RewardReport).reward
    if not math.isfinite(reward):
        raise RequestError(f"reward is {reward}: send a finite number, such as 0.0 or 1.0")
    session.reward = reward
    return JSON, orjson.dumps({"reward": reward})


async def _list_models(session: Session, data: bytes, is_retry: bool) -> Content:
    card = {"id": session.model, "object": "model", "created": 0, "owned_by": "prime-rl"}
    return JSON, orjson.dumps({"object": "list", "data": [card]})


async def _run_until_disconnected(work: Awaitable[Content], receive: Receive) -> Content | None:
    """The result of `work`; cancels it and returns None if the client disconnects before."""
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        disconnected.cancel()


async def _read_body(receive: Receive) -> bytes | None:
    """The body of a request; None if the client disconnected before its end."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        data += message.get("body", b"")
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestError(f"the request is longer than {MAX_REQUEST_BYTES >> 20} MiB: send less")
        if not message.get("more_body"):
            return bytes(data)


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request is not valid: {error}") from error


def _encode_events(events: Iterator[tuple[str, dict[str, Any]]], *, numbered: bool = False) -> bytes:
    lines = []
    for number, (name, fields) in enumerate(events):
        fields = {"type": name, **fields, **({"sequence_number": number} if numbered else {})}
        lines.append(b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(fields)))
    return b"".join(lines)


def _describe_error(scope: Scope, status: int, text: str, code: str | None = None) -> Content:
    is_anthropic = scope["path"].endswith("/messages")
    if is_anthropic and code == CONTEXT_LENGTH:
        text = f"prompt is too long: {text}"  # the words that agents look for, since there are no codes
    error = {"type": KINDS.get(status, "api_error"), "message": text}
    content = {"type": "error", "error": error} if is_anthropic else {"error": {**error, "param": None, "code": code}}
    return JSON, orjson.dumps(content)
