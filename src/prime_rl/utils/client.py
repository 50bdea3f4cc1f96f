"""A lightweight client for OpenAI-compatible servers with the subset of the `openai` API that `verifiers` uses."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from prime_rl.client.http import HttpPool, Reply, read_retry_after
from prime_rl.client.request_batcher import PendingResponses, RequestBatcher
from rollouts.training.environments.answers import read_completion
from rollouts.training.environments.protocol import describe_failure
from rollouts.training.proxies import build_http_client, needs_proxy

if TYPE_CHECKING:
    import openai

    from prime_rl.client.multi_turn import MultiTurnClient
    from prime_rl.configuration.sections import ClientConfig

T = TypeVar("T")
MAX_RETRIES = 3  # after connection errors or overload; a timed-out generation is never resent
RETRY_AFTER_S = 0.25
LONGEST_RETRY_S = 1.0
LONGEST_LIMIT_S = 60.0
"""Of the waits for a rate limit, if the server names none."""
RETRIED_STATUS = (429, 502, 503, 504)
RATE_LIMITED = 429
NO_QUOTA = "insufficient_quota"
"""Type of OpenAI's error with status 429 that waiting does not resolve."""
NOT_READY = 503
NO_SUCH_ROUTE = (404, 405, 501)
REJECTED = (400, 422)
OWN_REJECTION = "invalid_request_error"
"""Type of the errors of our server, and of OpenAI's, for invalid requests; that of vLLM is `BadRequestError`."""


class Tokenized(msgspec.Struct):
    """Response of /tokenize."""

    tokens: list[int]


class ErrorCause(msgspec.Struct):
    """What was wrong with a request."""

    type: str | None = None
    param: str | None = None
    message: str | None = None


class ErrorBody(msgspec.Struct):
    """Response with an error status, in OpenAI's format."""

    error: ErrorCause


class GroupResponse(msgspec.Struct):
    """A line of /chat/completions/group."""

    index: int
    status: int
    answer: msgspec.Raw


decode_answer = msgspec.json.Decoder(GroupResponse).decode


class ServerSpec(msgspec.Struct, frozen=True):
    """Arguments of `InferenceClient`, for building the same client in another process."""

    base_url: str
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 1200
    max_connections: int = 1024
    seq_len: int | None = None
    reconnect_s: float = 0


class InferenceClient:
    """Client of one server; `verifiers` uses `chat.completions.create`, `completions.create`, `post` and `base_url`.

    Responses are lightweight `ChatCompletion` / `Completion` objects (`as_completion`); errors are those of `openai`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 1200,
        max_connections: int = 8192,
        seq_len: int | None = None,
        reconnect_s: float = 0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.timeout_s = timeout_s
        self.max_connections = max_connections
        self.seq_len = seq_len
        self.reconnect_s = reconnect_s
        self._pool = _build_pool(self.base_url, timeout_s, max_connections)
        self._path = urlsplit(self.base_url).path
        self.supports_token_prompts = True
        """Whether the server accepts prompts as tokens; detected at the first use."""
        self.supports_group_requests = isinstance(self._pool, HttpPool)
        """Whether the server accepts batched chats that differ in their seed; detected at the first use."""
        self._seen_routes: set[str] = set()
        """Those of the optional routes that have answered."""
        self._turn_ends: dict[bytes, list[int]] = {}
        self._line_breaks: dict[str, list[int]] = {}
        self._batcher = RequestBatcher(self._send_group)
        self.completions = _Completions(self, "/completions")
        self.chat = SimpleNamespace(completions=_Completions(self, "/chat/completions"))

    @property
    def root_url(self) -> str:
        """Base of control routes such as /health: `base_url` without /v1."""
        return self.base_url.removesuffix("/v1")

    def describe(self) -> ServerSpec:
        """The server and the limits of this client."""
        return ServerSpec(
            self.base_url,
            tuple(self.headers.items()),
            self.timeout_s,
            self.max_connections,
            self.seq_len,
            self.reconnect_s,
        )

    def copy(self, *, base_url: str) -> InferenceClient:
        """The same server at another path, such as the root for /tokenize; connections are shared."""
        twin = InferenceClient.__new__(InferenceClient)
        twin.__dict__.update(self.__dict__, base_url=base_url.rstrip("/"), _path=urlsplit(base_url).path.rstrip("/"))
        twin._batcher = RequestBatcher(twin._send_group)
        twin.completions = _Completions(twin, "/completions")
        twin.chat = SimpleNamespace(completions=_Completions(twin, "/chat/completions"))
        return twin

    @cached_property
    def _root(self) -> InferenceClient:
        return self if self.base_url == self.root_url else self.copy(base_url=self.root_url)

    async def post(self, path: str, *, body: dict[str, Any], cast_to: Any = dict) -> Any:
        """The response to a POST as `cast_to`: a completion type of `openai`, any pydantic model, or `dict`."""
        data = await self.request("POST", path, body)
        if getattr(cast_to, "__name__", "") in ("ChatCompletion", "Completion"):
            return self._read_completion(data, path, chat=cast_to.__name__ == "ChatCompletion")
        return (
            cast_to.model_validate_json(data) if hasattr(cast_to, "model_validate_json") else msgspec.json.decode(data)
        )

    def with_options(self, *, base_url: str) -> InferenceClient:
        """A client of another server with the limits of this one, and without its headers (the token of its server)."""
        limits = {"timeout_s": self.timeout_s, "max_connections": self.max_connections, "seq_len": self.seq_len}
        return InferenceClient(base_url, **limits)  # type: ignore[arg-type]

    def open_conversation(self) -> MultiTurnClient:
        """The client for one rollout, which sends earlier turns as tokens."""
        from prime_rl.client.multi_turn import MultiTurnClient

        return MultiTurnClient(self)

    async def generate(self, path: str, body: dict[str, Any]) -> Any:
        """Request a completion from a route."""
        data = None
        if (
            self.supports_group_requests
            and path == "/chat/completions"
            and body.get("n", 1) == 1
            and not body.get("stream")
        ):
            data = await self._batcher.request(body)
        if data is None:
            data = await self.request("POST", path, body)
        return self._read_completion(data, path, chat=path.startswith("/chat"))

    def _read_completion(self, data: bytes, path: str, *, chat: bool) -> Any:
        """Decode a completion; an aborted one is an error, as of a server that is not ready: nothing ended its text."""
        completion = read_completion(data, chat=chat)
        if any(choice.finish_reason == "abort" for choice in completion.choices or ()):
            raise _bad_status(Reply(NOT_READY, b"the completion was aborted"), self.base_url + path)
        return completion

    async def _send_group(self, body: bytes, waiting: PendingResponses) -> None:
        """Send one request for all pending responses; unanswered ones are requested individually by the caller.

        It is therefore never retried, and servers without this route need no special handling.
        """
        assert isinstance(self._pool, HttpPool)
        path = "/chat/completions/group"

        def on_line(line: bytes) -> None:
            try:
                answer = decode_answer(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"{path}: {error}") from error
            self._seen_routes.add(path)
            if answer.status in RETRIED_STATUS or (future := waiting.pop(answer.index, None)) is None or future.done():
                return
            if answer.status < 300:
                future.set_result(bytes(answer.answer))
            else:
                future.set_exception(_bad_status(Reply(answer.status, bytes(answer.answer)), self.base_url + path))

        try:
            reply = await self._pool.request("POST", self._path + path, body, self.headers, on_line=on_line)
            if reply.status == 200:  # from a proxy that buffers the chunks
                for line in reply.body.splitlines():
                    on_line(line)
        except TimeoutError as error:
            for future in waiting.values():
                if not future.done():
                    future.set_exception(_no_answer("APITimeoutError", self.base_url + path, str(error)))
        except ConnectionError:
            return
        except ValueError:
            self.supports_group_requests = path in self._seen_routes
        else:
            is_seen = path in self._seen_routes
            self.supports_group_requests = is_seen or not _lacks_route(_bad_status(reply, self.base_url + path))

    async def _try_route(
        self, path: str, response: Awaitable[T], is_missing: Callable[[openai.APIStatusError], bool]
    ) -> T | None:
        """The response of an optional route; None from a server without it.

        A server that has answered has the route: later errors, such as those of a proxy while it restarts, are raised.
        """
        import openai

        try:
            answer = await response
        except openai.APIStatusError as error:
            if path in self._seen_routes or not is_missing(error):
                raise
            return None
        self._seen_routes.add(path)
        return answer

    async def generate_from_tokens(self, body: dict[str, Any]) -> Any:
        """The response to a chat whose prompt is `tokens`; None from a server without that route."""
        path = "/chat/completions/tokens"
        answer = await self._try_route(path, self.generate(path, body), _lacks_route)
        self.supports_token_prompts &= answer is not None
        return answer

    async def request_scores(self, body: dict[str, Any]) -> bytes | None:
        """The packed response of /score; None from a server without that route, or with another one of that name."""
        return await self._try_route("/score", self._root.request("POST", "/score", body), _lacks_scores)

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Token ids of `messages` or of a `prompt`; None if the server cannot tokenize them.

        `openai.BadRequestError` if they are longer than the server's context.
        """
        import openai

        try:
            answer = await self._try_route("/tokenize", self._root.request("POST", "/tokenize", body), _lacks_route)
        except openai.BadRequestError as error:
            if describe_failure(error)[0] == "OverlongPrompt":
                raise
            return None  # the template cannot render these messages: send them unrendered
        if answer is None:
            self.supports_token_prompts = False
            return None
        return msgspec.json.decode(answer, type=Tokenized).tokens

    async def tokenize_continuation(self, model: str, text: str) -> list[int] | None:
        """Token ids of a text behind another one; None if the server cannot tokenize it.

        Tokenizers such as Llama 2's put a space before every text, which must not appear inside of one.
        """

        async def encode(part: str) -> list[int] | None:
            return await self.tokenize({"model": model, "prompt": part, "add_special_tokens": False})

        if model not in self._line_breaks:
            ids, alone, joined = [await encode(part) for part in ("\n", "a", "\na")]
            if ids is None or alone is None or joined is None:
                return None
            self._line_breaks[model] = ids if joined[len(ids) :] != alone else []
        if line_break := self._line_breaks[model]:
            joined = await encode(f"\n{text}")
            if joined is not None and joined[: len(line_break)] == line_break:
                return joined[len(line_break) :]
        return await encode(text)

    async def detokenize(self, body: dict[str, Any]) -> str:
        """The text of `tokens` including special tokens."""
        answer: dict[str, str] = msgspec.json.decode(await self._root.request("POST", "/detokenize", body))
        return answer["prompt"]

    async def try_detokenize(self, body: dict[str, Any]) -> str | None:
        """As `detokenize`; None from a server without that route. `ValueError` if it has no model of that name."""
        import openai

        try:
            return await self.detokenize(body)
        except (openai.APIError, msgspec.DecodeError, KeyError) as error:
            if isinstance(error, openai.APIStatusError) and has_unknown_model(error):
                raise ValueError(str(error)) from error
            return None

    async def read_turn_end(self, body: dict[str, Any]) -> list[int] | None:
        """Tokens that the template appends to a completion: the common suffix of two different conversations."""
        key = msgspec.json.encode(body, order="deterministic")
        if key not in self._turn_ends:
            ends = []
            for text in ("A", "B"):
                messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
                ids = await self.tokenize(body | {"messages": messages, "add_generation_prompt": False})
                if ids is None:
                    return None
                ends.append(ids)
            self._turn_ends[key] = _common_end(*ends)
        return self._turn_ends[key]

    def overlong(self, num_tokens: int) -> Exception:
        """The context-length error of a server with `seq_len`."""
        message = f"This model's maximum context length is {self.seq_len} tokens, but the prompt has {num_tokens}."
        return _bad_status(Reply(400, msgspec.json.encode({"error": {"message": message}})), self.base_url)

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = 0,
        max_retries: int = MAX_RETRIES,
    ) -> bytes:
        """Send a request below `base_url` and return the body; bounded retries, then an error of `openai`.

        A server that is unreachable or not ready may be restarting, so it is retried for `reconnect_s` seconds after
        the first failure; one that limits the rate of requests as long as a response may take. Retries use the same
        seed, so the response does not change.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        started = time.monotonic()
        limited_until = started + (timeout_s or self.timeout_s if max_retries else 0.0)
        patience_s = self.reconnect_s if max_retries else 0.0
        lost: float | None = None  # not `started`: the server may have computed for longer before

        def is_gone() -> bool:
            nonlocal lost
            lost = time.monotonic() if lost is None else lost
            return time.monotonic() >= lost + patience_s

        for attempt in itertools.count():
            spent = attempt >= max_retries
            wait_s = min(RETRY_AFTER_S * 2 ** min(attempt, 8), LONGEST_RETRY_S)
            try:
                reply = await self._pool.request(method, self._path + path, data, self.headers, timeout_s)
            except TimeoutError as error:
                raise _no_answer("APITimeoutError", self.base_url + path, str(error)) from error
            except ConnectionError as error:
                if is_gone() and spent:
                    raise _no_answer("APIConnectionError", self.base_url + path, str(error)) from error
            else:
                if reply.status < 300:
                    return reply.body
                if reply.status == RATE_LIMITED:
                    wait_s = _find_limit_wait(reply, attempt)
                    if time.monotonic() + wait_s >= limited_until or read_cause(reply.body).type == NO_QUOTA:
                        raise _bad_status(reply, self.base_url + path)
                elif reply.status not in RETRIED_STATUS or ((is_gone() or reply.status != NOT_READY) and spent):
                    raise _bad_status(reply, self.base_url + path)
            await asyncio.sleep(wait_s)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the idle connections."""
        await self._pool.close()


class _Completions:
    """`create(**request)` at one route."""

    def __init__(self, client: InferenceClient, path: str) -> None:
        self._client, self._path = client, path

    async def create(self, *, extra_body: dict[str, Any] | None = None, **request: Any) -> Any:
        return await self._client.generate(self._path, {**request, **(extra_body or {})})


class _HttpxPool:
    """The `HttpPool` interface over `httpx`, for servers behind a proxy."""

    def __init__(self, url: str, timeout_s: float, max_connections: int) -> None:
        import httpx

        parts = urlsplit(url)
        self._root, self._timeout_s = f"{parts.scheme}://{parts.netloc}", timeout_s
        self._client = build_http_client(url, {}, max_connections)
        self._no_answer: type[Exception] = httpx.TransportError
        self._too_late: type[Exception] = httpx.TimeoutException

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None, timeout_s: float = 0
    ) -> Reply:
        limit = timeout_s or self._timeout_s
        try:
            reply = await self._client.request(method, self._root + path, content=body, headers=headers, timeout=limit)
        except self._too_late as error:
            raise TimeoutError(f"{self._root} did not answer {path} within {limit:g} s") from error
        except self._no_answer as error:
            raise ConnectionError(f"no connection to {self._root}: {error}") from error
        return Reply(reply.status_code, reply.content, read_retry_after(reply.headers.get("retry-after")))

    async def close(self) -> None:
        await self._client.aclose()


def build_client(server: ServerSpec) -> InferenceClient:
    """Build the client of a server described by another process."""
    return InferenceClient(**{**msgspec.structs.asdict(server), "headers": dict(server.headers)})


def build_clients(config: ClientConfig, *, seq_len: int | None = None) -> list[InferenceClient]:
    """One client per `base_url`, used in round-robin order by groups. The API key is read from `api_key_var` if set.

    Conversations are limited to `seq_len` tokens.
    """
    headers = config.read_headers()
    return [
        InferenceClient(
            url,
            headers=headers,
            timeout_s=config.timeout,
            max_connections=config.max_connections,
            seq_len=seq_len,
            reconnect_s=config.reconnect_timeout,
        )
        for url in config.base_url
    ]


def _build_pool(base_url: str, timeout_s: float, max_connections: int) -> HttpPool | _HttpxPool:
    if needs_proxy(base_url):
        return _HttpxPool(base_url, timeout_s, max_connections)
    return HttpPool(base_url, max_connections=max_connections, timeout_s=timeout_s)


def _common_end(one: list[int], other: list[int]) -> list[int]:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return one[len(one) - count :]


def _bad_status(reply: Reply, url: str) -> openai.APIStatusError:
    """The `openai` error of a status; its `response.text` is the server's own explanation."""
    import httpx
    import openai

    kinds: dict[int, type[openai.APIStatusError]] = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        403: openai.PermissionDeniedError,
        404: openai.NotFoundError,
        422: openai.UnprocessableEntityError,
        429: openai.RateLimitError,
    }
    kind = kinds.get(reply.status, openai.InternalServerError if reply.status >= 500 else openai.APIStatusError)
    response: Any = httpx.Response(reply.status, content=reply.body, request=httpx.Request("POST", url))
    return kind(f"{url} answered {reply.status}: {response.text[:500]}", response=response, body=None)


def _find_limit_wait(reply: Reply, attempt: int) -> float:
    """Seconds until a request beyond a rate limit is repeated; spread, as all requests of a moment are rejected."""
    wait_s = RETRY_AFTER_S * 2.0 ** min(attempt, 8)
    if reply.retry_after_s is not None and reply.retry_after_s <= LONGEST_RETRY_S:  # as of our own servers
        return min(wait_s, LONGEST_RETRY_S)
    return (reply.retry_after_s or min(wait_s, LONGEST_LIMIT_S)) * random.uniform(1, 1.25)


def read_cause(body: bytes) -> ErrorCause:
    """What was wrong with a request; empty for responses in another format than OpenAI's."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, RecursionError):
        return ErrorCause()


def has_unknown_model(error: openai.APIStatusError) -> bool:
    """Whether a server has the route of a request, but no model of that name."""
    return error.status_code == 404 and read_cause(error.response.content).param == "model"


def _lacks_route(error: openai.APIStatusError) -> bool:
    """Whether a server does not have the route of a request."""
    return error.status_code in NO_SUCH_ROUTE and not has_unknown_model(error)


def _lacks_scores(error: openai.APIStatusError) -> bool:
    """Whether a server has no /score as ours; vLLM has one for pairs of texts, which rejects our requests."""
    if error.status_code in REJECTED:
        return read_cause(error.response.content).type != OWN_REJECTION
    return _lacks_route(error)


def _no_answer(kind: str, url: str, reason: str) -> Exception:
    import httpx
    import openai

    request: Any = httpx.Request("POST", url)
    if kind == "APITimeoutError":
        return openai.APITimeoutError(request)
    return openai.APIConnectionError(message=f"{url}: {reason}", request=request)
