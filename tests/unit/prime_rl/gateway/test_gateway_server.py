"""The gateway's server over sockets: clients that close their connection."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from recorded_client import RecordedClient

from prime_rl.gateway.server import BY_MODEL, Gateway
from prime_rl.gateway.session import Session

HELLO: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_an_answer_whose_client_has_gone_is_dropped() -> None:
    outcomes: list[str] = []

    async def never_answer(request: dict[str, Any]) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise
        return "too late"

    async def run() -> Session:
        gateway, session = Gateway(), Session(RecordedClient(never_answer, "Hello."), "policy", {})
        async with (
            gateway.open(session) as url,
            openai.AsyncOpenAI(api_key=session.key, base_url=f"{url}/v1", max_retries=0) as stock,
        ):
            try:
                await stock.chat.completions.create(**HELLO, stream=True, timeout=httpx.Timeout(5, read=0.2))
            except openai.APITimeoutError:
                outcomes.append("timeout")
            answer = await stock.chat.completions.create(**HELLO)
            assert answer.choices[0].message.content == "Hello."
        return session

    session = asyncio.run(run())
    assert sorted(outcomes) == ["cancelled", "timeout"]
    assert [turn.completion_ids for turn in session.turns] == [[2, 7, 8]]


def test_half_a_request_leaves_the_server_running() -> None:
    async def run() -> str | None:
        gateway, session = Gateway(), Session(RecordedClient(), "policy", {})
        async with gateway.open(session) as url:
            parts = urlsplit(url)
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            head = f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-api-key: {session.key}\r\n"
            writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
            await writer.drain()
            writer.close()
            async with openai.AsyncOpenAI(api_key=session.key, base_url=f"{url}/v1") as stock:
                return (await stock.chat.completions.create(**HELLO)).choices[0].message.content

    assert asyncio.run(run()) == "Hello."


def test_one_address_serves_sessions_named_in_the_model() -> None:
    async def run() -> list[int]:
        gateway = Gateway()
        sessions = [Session(RecordedClient(), "policy", {}, key="shared") for _ in range(2)]
        async with gateway.open(sessions[0]) as first, gateway.open(sessions[1]) as second:
            base_url = f"{first.rpartition('/')[0]}/{BY_MODEL}/v1"
            async with openai.AsyncOpenAI(api_key="shared", base_url=base_url, max_retries=0) as stock:
                for url in (second, second, first):
                    await stock.chat.completions.create(**{**HELLO, "model": f"a@b@{url.rpartition('/')[2]}"})
                with pytest.raises(openai.NotFoundError, match="this rollout has ended"):
                    await stock.chat.completions.create(**{**HELLO, "model": "a@no-such-session"})
        return [len(session.turns) for session in sessions]

    assert asyncio.run(run()) == [1, 2]
