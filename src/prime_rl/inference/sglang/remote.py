"""HTTP client of an SGLang server: `/generate`, streaming and not, and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import orjson
from loguru import logger

from prime_rl.client.http import HttpPool
from prime_rl.inference.request_parsing import Json
from prime_rl.inference.sglang.protocol import MalformedResponse
from rollouts.training.weight_sync import EngineError, SGLangEngine

LONGEST_S = 7 * 86400.0  # request timeout; clients have their own limits


class ServerUnreachable(Exception):
    """The server is unreachable, overloaded, or was restarted."""


class RequestRejected(Exception):
    """The server rejected this request."""


class Remote:
    """Client for all but the control routes, with at most `max_requests` concurrent requests."""

    def __init__(self, server: SGLangEngine, max_requests: int) -> None:
        self._url = server.base_url + "/generate"
        self._server = server
        self._headers = {"content-type": "application/json", **server.headers}
        self._pool = HttpPool(server.base_url, max_connections=max_requests, timeout_s=LONGEST_S)

    async def generate(self, body: Json) -> Json:
        """Return the `meta_info` of a response; `ServerUnreachable`, `RequestRejected` or `MalformedResponse`."""
        try:
            reply = await self._pool.request("POST", urlsplit(self._url).path, orjson.dumps(body), self._headers)
        except (ConnectionError, TimeoutError) as error:
            raise ServerUnreachable(str(error)) from error
        return read_meta(reply.status, reply.body)

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        """Yield the `meta_info` of each chunk; the last one has a finish_reason. Raises as `generate`."""
        import httpx  # the pool does not support streaming

        ended = False
        verify = self._url.startswith("https://")
        try:
            async with (
                httpx.AsyncClient(timeout=None, headers=self._headers, trust_env=False, verify=verify) as client,
                client.stream("POST", self._url, content=orjson.dumps(body)) as reply,
            ):
                if reply.status_code >= 400:
                    read_meta(reply.status_code, await reply.aread())
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data and data != "[DONE]":
                        meta = read_meta(200, data.encode())
                        ended = bool(meta.get("finish_reason"))
                        yield meta
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{type(error).__name__} {error}".rstrip()) from error
        if not ended:
            raise ServerUnreachable("the stream ended prematurely")

    async def notify(self, path: str, body: Json) -> None:
        """Best-effort POST: failures are only logged, since a failed server has lost the state anyway."""
        try:
            await self._server.post(path, body)
        except EngineError as error:
            logger.debug(f"{self._server}: {error}")

    async def close(self) -> None:
        """Close the idle connections."""
        await self._pool.close()


def read_meta(status: int, body: bytes) -> Json:
    """Parse the `meta_info` of a response, or raise its error."""
    if status == 503:
        raise ServerUnreachable(f"HTTP 503 ({read_error(body) or 'no message'})")
    if status >= 400:
        raise RequestRejected(read_error(body) or f"HTTP {status}")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedResponse(f"response is not JSON: {error}") from error
    if isinstance(found, dict) and "error" in found:
        raise RequestRejected(read_error(body))
    meta = found.get("meta_info") if isinstance(found, dict) else None
    if not isinstance(meta, dict):
        raise MalformedResponse("response has no meta_info")
    return meta


def read_error(body: bytes) -> str:
    """Extract the message from any of SGLang's error formats."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode(errors="replace")
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return str(found)[:300]
