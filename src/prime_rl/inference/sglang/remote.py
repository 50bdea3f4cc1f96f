"""HTTP client of an SGLang server: `/generate` and its errors."""

from __future__ import annotations

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
        self._path = urlsplit(server.base_url).path + "/generate"
        self._server = server
        self._headers = {"content-type": "application/json", **server.headers}
        self._pool = HttpPool(server.base_url, max_connections=max_requests, timeout_s=LONGEST_S)

    async def generate(self, body: Json) -> Json:
        """Return the `meta_info` of a response; `ServerUnreachable`, `RequestRejected` or `MalformedResponse`."""
        try:
            reply = await self._pool.request("POST", self._path, orjson.dumps(body), self._headers)
        except (ConnectionError, TimeoutError) as error:
            raise ServerUnreachable(str(error)) from error
        return read_meta(reply.status, reply.body)

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
    try:
        content: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = body[:300].decode(errors="replace")
    if status == 503:
        raise ServerUnreachable(f"HTTP 503 ({_find_message(content) or 'no message'})")
    if status >= 400:
        raise RequestRejected(_find_message(content) or f"HTTP {status}")
    meta = content.get("meta_info") if isinstance(content, dict) else None
    if not isinstance(meta, dict):
        raise MalformedResponse(f"response has no meta_info: {_find_message(content)}")
    return meta


def _find_message(content: Any) -> str:
    """The message in any of SGLang's error formats."""
    while isinstance(content, dict):
        content = content.get("error") or content.get("message") or content.get("detail") or str(content)
    return str(content)[:300]
