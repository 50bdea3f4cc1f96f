"""Chats of a group: one request to the server, the same responses as single requests, each delivered at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, serve
from hypothesis import given
from hypothesis import strategies as st
from running_server import RunningServer, wait_until

from prime_rl.client import request_batcher as together
from prime_rl.client.http import HttpPool, Reply
from prime_rl.inference.async_engine import EngineBusy
from prime_rl.inference.engine import EngineFailed
from prime_rl.inference.request_parsing import MAX_CHOICES
from prime_rl.utils.client import InferenceClient

CHAT = [{"role": "user", "content": "abc"}]
GROUP, SINGLE = "/v1/chat/completions/group", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(None)
    yield running
    running.stop()


@pytest.fixture
def paths(server: RunningServer) -> Iterator[list[str]]:
    """The paths of the requests that reach the server."""
    seen: list[str] = []
    app = server._server.config.loaded_app

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await app(scope, receive, send)

    server._server.config.loaded_app = noting
    yield seen
    server._server.config.loaded_app = app


def body(**more: Any) -> dict[str, Any]:
    requested = {"model": "tiny-qwen3", "messages": CHAT, "max_tokens": 8, "logprobs": True, "return_token_ids": True}
    return requested | more


async def ask(client: InferenceClient, **more: Any) -> Any:
    return await client.chat.completions.create(**body(**more))


def reported(answer: dict[str, Any]) -> dict[str, Any]:
    """The parts of a response that are independent of the request form."""
    assert answer["id"] and answer["created"]
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {**{key: answer[key] for key in ("object", "model", "choices", "prompt_token_ids")}, "usage": usage}


def test_each_answer_is_that_of_a_request_of_its_own(server: RunningServer) -> None:
    seeds = [3, 1, 4, 1, 5]
    reply = server.post(GROUP, body(seeds=seeds))
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(5)) and all(line["status"] == 200 for line in lines)
    by_index = {line["index"]: line["answer"] for line in lines}
    for i, seed in enumerate(seeds):
        assert reported(by_index[i]) == reported(server.post(SINGLE, body(seed=seed)).json())
    assert len({answer["id"] for answer in by_index.values()}) == 5


def test_a_seed_of_null_is_any(server: RunningServer) -> None:
    lines = [json.loads(line) for line in server.post(GROUP, body(seeds=[None] * 4)).text.splitlines()]
    assert len({tuple(line["answer"]["choices"][0]["token_ids"]) for line in lines}) > 1


@pytest.mark.parametrize(
    ("wrong", "output"),
    [
        ({}, "seeds must be a list"),
        ({"seeds": []}, "seeds must be a list"),
        ({"seeds": [1] * (MAX_CHOICES + 1)}, f"1 to {MAX_CHOICES}"),
        ({"seeds": [True]}, "seeds must be integers"),
        ({"seeds": [1], "seed": 2}, "seed is not supported for groups"),
        ({"seeds": [1], "stream_options": {}}, "stream_options requires stream = true"),
        ({"seeds": [1], "n": True}, "n must be an integer"),
        ({"seeds": [1], "stream": 0}, "stream must be true or false"),
        ({"seeds": [1], "n": 2}, "n is not supported for groups"),
        ({"seeds": [1], "stream": True}, "stream is not supported for groups"),
        ({"seeds": [1], "tokens": [5]}, "tokens is not supported for groups"),
        ({"seeds": [1], "temperature": -1}, "temperature"),
        ({"seeds": [1], "prompts": 1}, "unknown field 'prompts'"),
    ],
)
def test_invalid_groups_are_rejected_at_once(server: RunningServer, wrong: dict[str, Any], output: str) -> None:
    reply = server.post(GROUP, body(**wrong))
    assert reply.status_code == 400 and output in reply.json()["error"]["message"]


def test_tasks_that_differ_in_their_seed_share_a_request(server: RunningServer, paths: list[str]) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        others = [{"role": "user", "content": "xyz"}]
        seeds = range(7)
        found = await asyncio.gather(
            *[ask(client, seed=seed) for seed in seeds], *[ask(client, seed=seed, messages=others) for seed in seeds]
        )
        assert sorted(paths) == [GROUP] * 2
        alone = [await ask(client, seed=seed) for seed in seeds]
        alone += [await ask(client, seed=seed, messages=others) for seed in seeds]
        assert paths[2:] == [SINGLE] * 14
        for one, other in zip(found, alone, strict=True):
            assert one.choices == other.choices and one.prompt_token_ids == other.prompt_token_ids
        assert len(client._pool._idle) == 2, "connections are kept"  # type: ignore[union-attr]
        await client.close()

    asyncio.run(main())


def test_only_plain_chats_are_gathered(server: RunningServer, paths: list[str]) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        await asyncio.gather(*[ask(client, seed=seed, n=2) for seed in range(3)])
        prompts = [client.completions.create(model="tiny-qwen3", prompt="ab", seed=seed) for seed in range(3)]
        await asyncio.gather(*prompts)
        await client.close()

    asyncio.run(main())
    assert sorted(paths) == [SINGLE] * 3 + ["/v1/completions"] * 3


def test_large_groups_are_cut(server: RunningServer, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MAX_SEEDS", 3)

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        answers = await asyncio.gather(*[ask(client, seed=seed) for seed in range(8)])
        assert [a.choices for a in answers] == [(await ask(client, seed=seed)).choices for seed in range(8)]
        await client.close()

    asyncio.run(main())
    assert paths[:3] == [GROUP] * 3


@pytest.mark.usefixtures("slow_engine")
def test_a_short_answer_does_not_wait_for_a_long_one(server: RunningServer) -> None:
    """One line of the answer is there while the engine still draws the others."""
    short, long = body(max_tokens=1, seeds=[1]), body(max_tokens=400, ignore_eos=True, seeds=[1])
    seen = 0
    with httpx.stream("POST", server.root + GROUP, json=long, timeout=60, trust_env=False) as slow:
        lines = slow.iter_lines()
        assert server.post(GROUP, short).status_code == 200
        seen = server.metric("requests_running")
        assert len(list(lines)) == 1
    assert seen == 1

    async def main() -> None:  # the same inside of one group: a stop string ends some after a token, others never
        client = InferenceClient(f"{server.root}/v1")
        ended: list[int] = []
        drawing: list[int] = []

        async def one(seed: int) -> None:
            answer = await ask(client, seed=seed, max_tokens=300, stop=["a", "e", "i", "o", "u"])
            ended.append(len(answer.choices[0].token_ids))
            drawing.append(server.service.engine.num_requests)

        await asyncio.gather(*[one(seed) for seed in range(12)])
        assert ended == sorted(ended) and ended[0] < ended[-1]
        assert drawing[0] > 0, "the others were still being drawn when the first answer was there"
        await client.close()

    asyncio.run(main())


@pytest.mark.usefixtures("slow_engine")
def test_last_cancellation_ends_the_request(server: RunningServer) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        endless = {"max_tokens": 450, "ignore_eos": True}
        tasks = [asyncio.create_task(ask(client, seed=seed, **endless)) for seed in range(100, 103)]
        await _until(lambda: server.metric("requests_running") == 3)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert not tasks[1].done()
        for task in tasks[1:]:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await _until(lambda: server.metric("requests_running") == 0)
        first, *_ = await asyncio.gather(*[ask(client, seed=seed) for seed in range(3)])
        assert first.choices
        await client.close()

    before = server.metric("generated_tokens_total")
    asyncio.run(main())
    assert server.metric("generated_tokens_total") - before < 3 * 450


async def _until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, "the server")


def test_one_that_is_cancelled_takes_nothing_from_the_others(server: RunningServer) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        tasks = [asyncio.create_task(ask(client, seed=seed, max_tokens=60, ignore_eos=True)) for seed in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        answers = [await tasks[i] for i in (0, 2)]
        alone = [await ask(client, seed=seed, max_tokens=60, ignore_eos=True) for seed in (0, 2)]
        assert [a.choices for a in answers] == [a.choices for a in alone]
        await client.close()

    asyncio.run(main())


def test_single_requests_if_the_route_is_missing() -> None:
    with serve(FakeEngine(reply=lambda request: f"seed {request['seed']}")) as engine:

        async def main() -> None:
            client = InferenceClient(engine.base_url)
            for _ in range(2):
                answers = await asyncio.gather(*[ask(client, seed=seed, max_tokens=None) for seed in range(4)])
                assert [a.choices[0].message.content for a in answers] == [f"seed {i}" for i in range(4)]
                assert not client.supports_group_requests
            await client.close()

        asyncio.run(main())
        assert len(engine.requests) == 8


def test_full_queue_rejects_groups_but_not_single_requests(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.utils.client.RETRY_AFTER_S", 0.001)
    check = server.service.engine.check

    def small(requests: list[Any]) -> None:
        if len(requests) > 1:
            raise EngineBusy("try again")
        check(requests)

    monkeypatch.setattr(server.service.engine, "check", small)

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        answers = await asyncio.gather(*[ask(client, seed=seed) for seed in range(3)])
        assert all(answer.choices for answer in answers) and client.supports_group_requests
        await client.close()

    asyncio.run(main())


def test_the_error_of_a_group_is_the_error_of_each(server: RunningServer) -> None:
    async def main() -> list[Any]:
        client = InferenceClient(f"{server.root}/v1")
        long = [{"role": "user", "content": "a" * 5000}]
        tries = [ask(client, seed=seed, messages=long) for seed in range(3)]
        found = await asyncio.gather(*tries, return_exceptions=True)
        await client.close()
        return found

    for error in asyncio.run(main()):
        assert isinstance(error, openai.BadRequestError) and "maximum context length is" in error.response.text


def test_completed_responses_survive_an_engine_failure(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first response is kept; the others are requested singly, with the same seeds."""
    batches = server.service.engine.batches

    async def breaking(requests: list[Any]) -> Any:
        async with contextlib.aclosing(batches(requests)) as inner:
            async for events in inner:
                yield events[:1]
                raise EngineFailed("the engine has failed: no memory")

    monkeypatch.setattr(server.service.engine, "batches", breaking)

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        before = server.metric("requests_finished_total")
        answers = await asyncio.gather(*[ask(client, seed=seed, ignore_eos=True) for seed in range(3)])
        assert server.metric("requests_finished_total") - before == 3 + 2
        assert [a.choices for a in answers] == [(await ask(client, seed=s, ignore_eos=True)).choices for s in range(3)]
        await client.close()

    asyncio.run(main())


def test_an_answer_that_cannot_be_written_is_one_failure(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, calls = server.service.writer.chat, itertools.count()

    def write(*args: Any) -> Any:
        return {"text": "\ud83d"} if next(calls) == 1 else chat(*args)

    monkeypatch.setattr(server.service.writer, "chat", write)

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1", reconnect_s=30)
        found = await asyncio.gather(*[ask(client, seed=seed) for seed in range(4)], return_exceptions=True)
        bad = [one for one in found if isinstance(one, BaseException)]
        assert len(bad) == 1 and isinstance(bad[0], openai.InternalServerError) and next(calls) == 4
        await client.close()

    asyncio.run(main())


def test_groups_that_come_together_keep_to_the_limit(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each passes the check before the first one starts; the excess is rejected line by line."""
    monkeypatch.setattr(server.service.engine, "max_requests", 40)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            group = body(seeds=list(range(30)), ignore_eos=True)
            return await asyncio.gather(*[http.post(server.root + GROUP, json=group) for _ in range(8)])

    most, listeners = 0, server.service.engine._listeners
    submit = server.service.engine._submit

    def noting(*args: Any) -> None:
        nonlocal most
        submit(*args)
        most = max(most, len(listeners))

    monkeypatch.setattr(server.service.engine, "_submit", noting)
    replies = asyncio.run(main())
    assert 30 <= most <= 40
    statuses = [json.loads(line)["status"] for r in replies if r.status_code == 200 for line in r.text.splitlines()]
    assert all(reply.status_code in (200, 429) for reply in replies) and statuses.count(200) >= 30
    assert set(statuses) <= {200, 429}


def test_default_sampling_applies_to_null_seeds() -> None:
    seeded, double = RunningServer(None, sampling={"seed": 5}), RunningServer(None, sampling={"extra_body": {"n": 2}})
    try:
        lines = [json.loads(line) for line in seeded.post(GROUP, body(seeds=[None, None, 6])).text.splitlines()]
        drawn = {line["index"]: line["answer"]["choices"][0]["token_ids"] for line in lines}
        assert drawn[0] == drawn[1] == seeded.post(SINGLE, body()).json()["choices"][0]["token_ids"] != drawn[2]

        async def main() -> None:
            client = InferenceClient(f"{double.root}/v1")
            answers = await asyncio.gather(*[ask(client, seed=seed) for seed in range(3)])
            assert all(len(answer.choices) == 2 for answer in answers)
            await client.close()

        asyncio.run(main())
    finally:
        seeded.stop()
        double.stop()


def test_values_that_change_nothing_are_taken(server: RunningServer, paths: list[str]) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        answers = await asyncio.gather(*[ask(client, seed=seed, n=1, stream=False) for seed in range(3)])
        assert all(answer.choices for answer in answers) and paths == [GROUP]
        await client.close()

    asyncio.run(main())


def test_send_errors_reach_the_caller(server: RunningServer) -> None:
    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        found = await asyncio.gather(*[ask(client, seed=seed) for seed in (object(), 1, 2)], return_exceptions=True)
        assert isinstance(found[0], TypeError) and all(one.choices for one in found[1:])
        await client.close()

    asyncio.run(main())


def test_who_is_cancelled_first_draws_no_longer_than_the_others(server: RunningServer) -> None:
    """One chat is cancelled, the other completes: the request ends."""

    async def main() -> None:
        client = InferenceClient(f"{server.root}/v1")
        ids = {seed: (await ask(client, seed=seed, max_tokens=2)).choices[0].token_ids for seed in range(40)}
        first = next(seed for seed in ids if ids[seed][0] != ids[0][0])  # ends at once where seed 0 goes on
        ends = {"stop_token_ids": [ids[first][0]], "ignore_eos": True, "max_tokens": 450}
        leaving, staying = (asyncio.create_task(ask(client, seed=seed, **ends)) for seed in (0, first))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).choices[0].token_ids == ids[first][:1]
        await _until(lambda: server.metric("requests_running") == 0)
        await client.close()

    asyncio.run(main())


@contextlib.contextmanager
def scripted(*replies: bytes, hold_s: float = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers one request per connection with the next bytes and closes it; records the bodies."""
    listener, bodies = socket.create_server(("127.0.0.1", 0)), []

    def run() -> None:
        for reply in replies:
            connection, _ = listener.accept()
            with connection:
                bodies.append(json.loads(connection.recv(65536).partition(b"\r\n\r\n")[2]))
                connection.sendall(reply)
                time.sleep(hold_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", bodies
    listener.close()
    thread.join(timeout=20)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(*lines: Any, end: bool = True) -> bytes:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if end else b"")


def line(index: int, text: str = "", status: int = 200) -> dict[str, Any]:
    good = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    return {"index": index, "status": status, "answer": good if status == 200 else {"error": {"message": text}}}


def contents(found: list[Any]) -> list[Any]:
    return [one if isinstance(one, BaseException) else one.choices[0].message.content for one in found]


def gather(url: str, num: int) -> list[Any]:
    async def main() -> list[Any]:
        client = InferenceClient(url)
        return await asyncio.gather(*[ask(client, seed=seed) for seed in range(num)], return_exceptions=True)

    return contents(asyncio.run(main()))


def alone(text: str) -> bytes:
    data = json.dumps(line(0, text)["answer"]).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def test_a_broken_connection_loses_nothing_that_has_arrived() -> None:
    with scripted(HEAD + chunk(line(1, "one"), end=False), alone("first"), alone("second")) as (url, bodies):
        found = gather(url, 3)
        assert found[1] == "one" and sorted([found[0], found[2]]) == ["first", "second"]
        assert bodies[0]["seeds"] == [0, 1, 2] and sorted(b["seed"] for b in bodies[1:]) == [0, 2]


def test_a_line_that_failed_is_one_failure() -> None:
    with scripted(HEAD + chunk(line(0, "zero"), line(1, "bad luck", 500))) as (url, _):
        zero, error = gather(url, 2)
    assert zero == "zero" and isinstance(error, openai.InternalServerError) and "bad luck" in str(error)


@pytest.mark.parametrize(
    ("reply", "asked_again"),
    [
        (HEAD + chunk("what?"), True),
        (HEAD + chunk(line(7, "unclaimed")), True),
        (HEAD + b"0\r\n\r\n", True),
        (alone("unclaimed"), False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", True),
        *((b"HTTP/1.1 %d Whatever\r\ncontent-length: 2\r\n\r\n{}" % status, True) for status in (302, 400, 403, 503)),
        *((b"HTTP/1.1 %d Whatever\r\ncontent-length: 2\r\n\r\n{}" % status, False) for status in (404, 405, 501)),
        (b"", True),
    ],
)
def test_single_requests_after_an_unexpected_response(reply: bytes, asked_again: bool) -> None:
    with scripted(reply, alone("first"), alone("second")) as (url, bodies):

        async def main() -> None:
            client = InferenceClient(url)
            found = await asyncio.gather(*[ask(client, seed=seed) for seed in range(2)])
            assert sorted(contents(found)) == ["first", "second"] and client.supports_group_requests == asked_again

        asyncio.run(main())
        assert "seeds" in bodies[0] and sorted(b["seed"] for b in bodies[1:]) == [0, 1]


def test_lines_that_a_proxy_has_collected_are_lines() -> None:
    data = b"".join(json.dumps(line(i, f"answer {i}")).encode() + b"\n" for i in (1, 0))
    with scripted(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)) as (url, _):
        assert gather(url, 2) == ["answer 0", "answer 1"]


def test_too_slow_is_not_sent_twice() -> None:
    with scripted(HEAD + chunk(line(1, "one"), end=False), hold_s=1) as (url, bodies):

        async def main() -> list[Any]:
            client = InferenceClient(url, timeout_s=0.3)
            return await asyncio.gather(*[ask(client, seed=seed) for seed in range(3)], return_exceptions=True)

        late, one, too = contents(asyncio.run(main()))
        assert one == "one" and late is not too
        assert isinstance(late, openai.APITimeoutError) and isinstance(too, openai.APITimeoutError)
        assert len(bodies) == 1


@given(data=st.data())
def test_lines_arrive_whole_however_the_bytes_are_cut(data: st.DataObject) -> None:
    """By chunks of the server and by packets of the network."""
    lines = data.draw(st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=6))
    payload = b"".join(one + b"\n" for one in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=4)))
    parts = [payload[a:b] for a, b in itertools.pairwise([0, *cuts, len(payload)]) if b > a]
    wire = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    packets = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=5)))

    async def main() -> None:
        connection = http_connection()
        received: list[bytes] = []
        sending = asyncio.ensure_future(connection.send(b"", received.append))
        await asyncio.sleep(0)
        for a, b in itertools.pairwise([0, *packets, len(wire)]):
            connection.data_received(wire[a:b])
        assert await sending == Reply(200, b"") and received == lines

    asyncio.run(main())


def http_connection() -> Any:
    from prime_rl.client.http import _Connection

    class Nowhere:
        def write(self, data: bytes) -> None: ...

    connection = _Connection()
    connection._transport = Nowhere()  # type: ignore[assignment]
    return connection


def test_without_a_listener_pieces_are_one_body() -> None:
    with scripted_get(HEAD + chunk("a", "b")) as url:

        async def main() -> None:
            reply = await HttpPool(url, max_connections=1, timeout_s=20).request("POST", "/", b"{}")
            assert reply == Reply(200, b'"a"\n"b"\n')

        asyncio.run(main())


@contextlib.contextmanager
def scripted_get(reply: bytes) -> Iterator[str]:
    with scripted(reply) as (url, _):
        yield url
