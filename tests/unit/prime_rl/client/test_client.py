"""The HTTP client and its connection pool, against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import openai
import pytest
from fake_engine import FakeEngine, free_port, serve
from openai.types.chat import ChatCompletion

from prime_rl.client import http
from prime_rl.client.http import HttpPool, ensure_open_files
from prime_rl.client.scoring import ScoredTokens, TokenScorer, _from_rows
from prime_rl.configuration.sections import ClientConfig
from prime_rl.utils.client import InferenceClient, _bad_status, build_clients

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with serve(FakeEngine(reply=lambda body: "hello")) as engine:
        yield engine


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.fail, engine.latency_s, engine.max_model_len = lambda body: None, 0.0, 10_000
    engine.requests.clear()


async def ask(client: InferenceClient, **args: Any) -> Any:
    return await client.chat.completions.create(
        model="m", messages=MESSAGES, logprobs=True, extra_body={"return_token_ids": True, "top_k": 3}, **args
    )


def test_an_answer_has_the_type_and_fields_that_verifiers_reads(engine: FakeEngine) -> None:
    async def main() -> None:
        client = InferenceClient(engine.base_url)
        answer = await ask(client, temperature=0.5)
        choice = answer.choices[0]
        assert isinstance(answer, ChatCompletion)
        assert choice.message.content == "hello" and choice.finish_reason == "stop" and not choice.message.tool_calls
        assert choice.token_ids == [ord(c) for c in "hello"] and choice.versions == [(0, engine.version)]
        assert [t.logprob for t in choice.logprobs.content] == [-0.5, -1.5, -2.5, -3.5, -4.5]
        assert len(answer.prompt_token_ids) == 5 and not hasattr(answer, "nothing_like_that")
        assert engine.requests[-1]["top_k"] == 3 and engine.requests[-1]["temperature"] == 0.5
        assert "extra_body" not in engine.requests[-1]
        await client.close()

    anyio.run(main)


def test_without_token_ids_there_are_no_logprobs_either(engine: FakeEngine) -> None:
    async def main() -> None:
        client = InferenceClient(engine.base_url)
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True)
        assert answer.choices[0].logprobs is None and answer.choices[0].message.content == "hello"
        await client.close()

    anyio.run(main)


def test_the_overlong_prompt_error_carries_the_servers_words(engine: FakeEngine) -> None:
    engine.max_model_len = 3

    async def main() -> None:
        with pytest.raises(openai.BadRequestError) as error:
            await ask(InferenceClient(engine.base_url))
        assert "maximum context length is" in error.value.response.text

    anyio.run(main)


@pytest.mark.parametrize(("status", "tries"), [(503, 4), (500, 1), (400, 1), (404, 1)])
def test_only_overload_is_tried_again_and_not_for_ever(
    engine: FakeEngine, status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.001)
    engine.fail = lambda body: status

    async def main() -> None:
        with pytest.raises(openai.APIStatusError) as error:
            await ask(InferenceClient(engine.base_url))
        assert error.value.status_code == status

    anyio.run(main)
    assert len(engine.requests) == tries


@pytest.mark.parametrize(
    ("retry_after_s", "waits"),
    [
        (None, [0.25, 0.5, 1, 2, 4, 8, 16, 32, 60, 60]),
        (7.0, [7] * 10),
        (1.0, [0.25, 0.5, *[1] * 8]),  # of our own server
        (0.0, [0.25, 0.5, *[1] * 8]),
    ],
)
def test_a_rate_limit_is_waited_for(
    retry_after_s: float | None, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, slept = InferenceClient("http://127.0.0.1:1/v1"), list[float]()

    async def request(*_: Any) -> http.Reply:
        return http.Reply(200, b"done") if len(slept) == len(waits) else http.Reply(429, b"", retry_after_s)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client._pool, "request", request)
    monkeypatch.setattr("prime_rl.utils.client.asyncio", SimpleNamespace(sleep=sleep))
    assert anyio.run(client.request, "POST", "/chat/completions") == b"done"
    assert all(wait <= seconds <= 1.25 * wait for wait, seconds in zip(waits, slept, strict=True))


@pytest.mark.parametrize(
    ("timeout_s", "body"),
    [(5, b""), (1200, b'{"error": {"type": "insufficient_quota"}}')],
    ids=["longer than the timeout", "quota"],
)
def test_a_rate_limit_that_lasts_is_an_error(timeout_s: float, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    client, num_requests = InferenceClient("http://127.0.0.1:1/v1", timeout_s=timeout_s), 0

    async def request(*_: Any) -> http.Reply:
        nonlocal num_requests
        num_requests += 1
        return http.Reply(429, body, 7.0)

    monkeypatch.setattr(client._pool, "request", request)
    with pytest.raises(openai.RateLimitError):
        anyio.run(client.request, "POST", "/chat/completions")
    assert num_requests == 1


@pytest.mark.parametrize(("value", "seconds"), [(b"7", 7.0), (b"Wed, 21 Oct 2026 07:28:00 GMT", None), (b"\xb2", None)])
def test_retry_after_is_read(value: bytes, seconds: float | None) -> None:
    answer = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: " + value + b"\r\ncontent-length: 0\r\n\r\n"
    with raw_server([answer]) as url:

        async def main() -> None:
            pool = HttpPool(url, max_connections=1, timeout_s=20)
            assert await pool.request("GET", "/") == (429, b"", seconds)

        anyio.run(main)


def test_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.001)
    port = free_port()
    with pytest.raises(openai.APIConnectionError, match=f"no connection to 127.0.0.1:{port}"):
        anyio.run(ask, InferenceClient(f"http://127.0.0.1:{port}/v1"))


@pytest.mark.parametrize(
    "complete",
    [
        lambda client: client.chat.completions.create(model="m", messages=MESSAGES),
        lambda client: client.completions.create(model="m", prompt="hi"),
        lambda client: client.generate_from_tokens({"tokens": [1, 2]}),
        lambda client: client.post("/chat/completions", body={}, cast_to=ChatCompletion),
    ],
)
def test_an_aborted_completion_is_an_error(complete: Any) -> None:
    """Its text, which nothing has ended, must not be scored and trained; the rollout is tried again."""
    client = RejectingClient("http://127.0.0.1:1/v1")
    choices = [{"message": {"role": "assistant", "content": "hal"}, "finish_reason": "abort"}]
    client.reply = http.Reply(200, json.dumps({"choices": choices}).encode())
    with pytest.raises(openai.InternalServerError, match="the completion was aborted") as error:
        anyio.run(complete, client)
    assert error.value.status_code == 503 and client.supports_token_prompts


@pytest.mark.parametrize("away", [503, None])
def test_requests_are_retried_until_the_server_returns(
    away: int | None, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten refused connections, or a server that is not ready, are retried: more often than overload."""
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.001)
    client, tries = InferenceClient(engine.base_url, reconnect_s=30), 0
    engine.fail = lambda body: away if tries < 10 else None
    request = client._pool.request

    async def count(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if away is None and tries < 10:
            raise ConnectionError("gone")
        return await request(*args, **options)

    monkeypatch.setattr(client._pool, "request", count)
    answer = anyio.run(ask, client)
    assert answer.choices[0].message.content and tries == 10
    assert all(body == engine.requests[0] for body in engine.requests)


def test_a_server_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.001)
    with pytest.raises(openai.APIConnectionError):
        anyio.run(ask, InferenceClient(f"http://127.0.0.1:{free_port()}/v1", reconnect_s=0.05))


def test_patience_begins_with_the_loss_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that had run for longer than reconnect_timeout is sent again like others, with its seed."""
    client, now = InferenceClient("http://127.0.0.1:1/v1", reconnect_s=300), 0.0

    async def request(*_: Any) -> http.Reply:
        nonlocal now
        now = max(now, 400.0)
        if now < 690:
            raise ConnectionError("gone")
        return http.Reply(200, b"done")

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(client._pool, "request", request)
    monkeypatch.setattr("prime_rl.utils.client.asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("prime_rl.utils.client.time", SimpleNamespace(monotonic=lambda: now))
    assert anyio.run(client.request, "POST", "/chat/completions") == b"done"


def test_too_slow_is_not_sent_twice(engine: FakeEngine) -> None:
    engine.latency_s = 3
    with pytest.raises(openai.APITimeoutError):
        anyio.run(ask, InferenceClient(engine.base_url, timeout_s=0.5))
    assert len(engine.requests) == 1


def test_connections_are_kept_shared_and_limited(engine: FakeEngine) -> None:
    engine.latency_s = 0.01

    async def main() -> None:
        pool = HttpPool(engine.base_url, max_connections=4, timeout_s=20)
        seen = set()

        async def one() -> None:
            reply = await pool.request("GET", "/health")
            assert reply.status == 200
            seen.update(id(connection) for connection in pool._idle)

        await asyncio.gather(*[one() for _ in range(40)])
        assert 1 <= len(pool._idle) <= 4 and len(seen) <= 4
        await pool.close()
        assert not pool._idle

    anyio.run(main)


def test_a_server_whose_machine_is_gone_is_noticed(engine: FakeEngine) -> None:
    """It closes no connection, and a response may take long: the system asks whether it is still there."""

    async def main() -> None:
        pool = HttpPool(engine.base_url, max_connections=1, timeout_s=20)
        await pool.request("GET", "/health")
        transport = pool._idle[0]._transport
        assert transport is not None
        connection = transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            idle_s, interval_s, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle_s + interval_s * count <= ClientConfig().reconnect_timeout
        await pool.close()

    anyio.run(main)


@contextlib.contextmanager
def raw_server(answers: list[bytes]) -> Iterator[str]:
    """Answers each request on each connection with the next bytes, then closes that connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    thread.join(timeout=20)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: t\r\n\r\n", b"a"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
    ],
)
def test_ways_to_send_a_body(answer: bytes, body: bytes) -> None:
    with raw_server([answer]) as url:

        async def main() -> None:
            pool = HttpPool(url, max_connections=1, timeout_s=20)
            assert await pool.request("GET", "/") == http.Reply(200, body)

        anyio.run(main)


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2"]
)
def test_half_an_answer_is_a_connection_error(answer: bytes) -> None:
    with raw_server([answer]) as url:

        async def main() -> None:
            with pytest.raises(ConnectionError):
                await HttpPool(url, max_connections=1, timeout_s=20).request("GET", "/")

        anyio.run(main)


def test_idle_closed_connections_are_replaced() -> None:
    """The second request may meet the closing socket; it must not fail for that."""
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    with raw_server([good, good]) as url:

        async def main() -> None:
            pool = HttpPool(url, max_connections=1, timeout_s=20)
            assert [await pool.request("GET", "/") for _ in range(2)] == [http.Reply(200, b"ok")] * 2

        anyio.run(main)


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", b"garbage"])
def test_data_after_a_response_ends_its_connection(extra: bytes) -> None:
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    with raw_server([good + extra, good]) as url:

        async def main() -> None:
            pool = HttpPool(url, max_connections=1, timeout_s=20)
            assert await pool.request("GET", "/") == http.Reply(200, b"ok") and not pool._idle
            assert await pool.request("GET", "/") == http.Reply(200, b"ok")

        anyio.run(main)


def test_cancelling_a_request_reaches_the_server() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    got: list[bytes] = []

    def run() -> None:
        connection, _ = listener.accept()
        connection.settimeout(20)
        while data := connection.recv(65536):
            got.append(data)
        got.append(b"closed")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    async def main() -> None:
        pool = HttpPool(f"http://127.0.0.1:{listener.getsockname()[1]}", max_connections=1, timeout_s=20)
        with anyio.move_on_after(0.1):
            await pool.request("POST", "/", b"body")
        await anyio.sleep(0)
        assert not pool._idle

    anyio.run(main)
    thread.join(timeout=20)
    assert got[-1] == b"closed" and b"body" in b"".join(got)
    listener.close()


def test_build_clients_reads_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "abc")
    urls = ["http://a:1/v1", "http://b:2/v1/"]
    clients = build_clients(ClientConfig(base_url=urls, api_key_var="MY_KEY", headers={"x-team": "t"}, timeout=3))
    assert [client.base_url for client in clients] == ["http://a:1/v1", "http://b:2/v1"]
    assert clients[0].headers["authorization"] == "Bearer abc" and clients[0].headers["x-team"] == "t"
    assert clients[0].root_url == "http://a:1"
    with pytest.raises(ValueError, match="'localhost:8000' is not an address"):
        build_clients(ClientConfig(base_url=["localhost:8000"]))


@pytest.mark.parametrize(
    ("limits", "requested", "advice"),
    [
        ((1024, 4096), None, None),
        ((256, 4096), (628, 4096), None),
        ((256, http.resource.RLIM_INFINITY), (628, http.resource.RLIM_INFINITY), None),
        ((256, 400), (400, 400), "run `ulimit -n 628` first, or set max_concurrent = 272"),
    ],
)
def test_open_file_limit_is_raised_or_reported(
    limits: tuple[int, int], requested: tuple[int, int] | None, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(http.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(http.resource, "setrlimit", lambda kind, expected: set_to.append(expected))
    output = ensure_open_files(500)
    assert set_to == ([requested] if requested else [])
    assert (output is None) if advice is None else (output is not None and advice in output)


def test_a_client_of_another_server_sends_no_headers_of_the_first() -> None:
    client = InferenceClient("http://here:1/v1", headers={"authorization": "Bearer secret"}, timeout_s=7, seq_len=64)
    other = client.with_options(base_url="http://there:2/v1")
    assert (other.base_url, other.timeout_s, other.seq_len) == ("http://there:2/v1", 7, 64)
    assert "authorization" not in other.headers


class RejectingClient(InferenceClient):
    """A client whose server answers every request with `reply`."""

    reply: http.Reply

    async def request(self, *args: Any, **options: Any) -> bytes:
        if self.reply.status == 200:
            return self.reply.body
        raise _bad_status(self.reply, self.base_url)


@pytest.mark.parametrize(
    ("status", "error", "is_missing"),
    [
        (400, b'{"object": "error", "message": "text_1: Field required", "type": "Bad Request", "code": 400}', True),
        (400, b'{"error": {"message": "The model does not support Score API", "type": "BadRequestError"}}', True),
        (422, b'{"detail": [{"type": "missing", "loc": ["body", "text_1"], "msg": "Field required"}]}', True),
        (404, b"Not Found", True),
        (405, b"", True),
        (501, b"", True),
        (
            400,
            b'{"error": {"message": "invalid score request", "type": "invalid_request_error", "param": null}}',
            False,
        ),
        (404, b'{"error": {"message": "model x is not served", "param": "model", "code": 404}}', False),
        (500, b"", False),
    ],
)
def test_other_score_routes_count_as_missing(status: int, error: bytes, is_missing: bool) -> None:
    """vLLM has a /score for cross-encoders, which rejects our requests."""
    client = RejectingClient("http://127.0.0.1:1")
    client.reply = http.Reply(status, error)
    with contextlib.nullcontext() if is_missing else pytest.raises(openai.APIStatusError):
        assert anyio.run(client.request_scores, {"tokens": [1, 2]}) is None


def test_scores_beyond_the_body_limit_name_the_key() -> None:
    """Left out, the longest samples of a run would be missing in its training."""
    client = RejectingClient("http://127.0.0.1:1")
    client.reply = http.Reply(413, b'{"error": {"message": "the body exceeds 9 bytes"}}')
    with pytest.raises(ValueError, match=r"raise server\.max_request_mb .*the body exceeds 9 bytes"):
        anyio.run(TokenScorer([client], "m").score, [1, 2, 3], 1, b"\x00\x00")


@pytest.mark.parametrize("status", [400, 404])
def test_a_score_route_that_answered_is_not_missing(status: int) -> None:
    """A proxy may answer for a server that restarts; the run must not go on with another route."""
    client = RejectingClient("http://127.0.0.1:1")
    client.reply = http.Reply(200, b"scores")
    assert anyio.run(client.request_scores, {"tokens": [1, 2]}) == b"scores"
    client.reply = http.Reply(status, b"no backend")
    with pytest.raises(openai.APIStatusError):
        anyio.run(client.request_scores, {"tokens": [1, 2]})


@pytest.mark.parametrize("name", ["generate_from_tokens", "tokenize"])
def test_a_lost_model_or_server_keeps_token_prompts(name: str) -> None:
    """An adapter that was unloaded, or a proxy of a server that restarts, fails the request and nothing else."""
    client = RejectingClient("http://127.0.0.1:1")
    lost_model = http.Reply(404, b'{"error": {"message": "model x is not served", "param": "model", "code": 404}}')
    for reply in (lost_model, http.Reply(200, b'{"choices": [], "tokens": [1]}'), http.Reply(404, b"no backend")):
        client.reply = reply
        with contextlib.nullcontext() if reply.status == 200 else pytest.raises(openai.NotFoundError):
            assert anyio.run(getattr(client, name), {"tokens": [1, 2]}) is not None
        assert client.supports_token_prompts


@pytest.mark.parametrize("name", ["generate_from_tokens", "tokenize"])
def test_a_missing_route_ends_token_prompts(name: str) -> None:
    client = RejectingClient("http://127.0.0.1:1")
    client.reply = http.Reply(404, b"Not Found")
    assert anyio.run(getattr(client, name), {"tokens": [1, 2]}) is None and not client.supports_token_prompts


def test_tail_mass_of_prompt_logprobs_is_not_zero() -> None:
    rows = [{"5": {"logprob": 0.0, "rank": 1}}, {"5": {"logprob": -1e-7, "rank": 1}, "6": {"logprob": -0.5, "rank": 2}}]
    scored = _from_rows(rows, [5, 6], 1)
    assert scored.logprobs == [0.0, -0.5]
    assert array("f", scored.tail_mass).tolist() == pytest.approx([2.0**-24, 1e-7], rel=1e-6)


def test_prompt_logprobs_without_the_top_make_no_table() -> None:
    rows = [{"5": {"logprob": -1.0, "rank": 3}}, {"6": {"logprob": -2.0, "rank": 1}, "5": {"logprob": -3.0, "rank": 2}}]
    assert _from_rows(rows, [5, 6], 2) == ScoredTokens([-1.0, -2.0])
