"""An SGLang server over HTTP: `/generate`, whole or in pieces, and what its refusals say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import orjson
from loguru import logger

from prime_rl.inference.requests import Json
from prime_rl.inference.sglang.wire import Garbled
from prime_rl.utils.http import HttpPool
from rollouts.training.weight_sync import EngineError, SGLangEngine

LONGEST_S = 7 * 86400.0  # of one request: whoever asks has a limit of its own


class Away(Exception):
    """The server could not be reached, has no room, or is not the one it was."""


class Refused(Exception):
    """The server said why it does not answer this request."""


class Remote:
    """What is asked of the server beside its control routes, at most `max_requests` at a time."""

    def __init__(self, server: SGLangEngine, max_requests: int) -> None:
        self._url = server.base_url + "/generate"
        self._server = server
        self._headers = {"content-type": "application/json", **server.headers}
        self._pool = HttpPool(server.base_url, max_connections=max_requests, timeout_s=LONGEST_S)

    async def generate(self, body: Json) -> Json:
        """The `meta_info` of a whole answer. `Away`, `Refused` or `Garbled` when there is none."""
        try:
            reply = await self._pool.request("POST", urlsplit(self._url).path, orjson.dumps(body), self._headers)
        except (ConnectionError, TimeoutError) as error:
            raise Away(str(error)) from error
        return read_meta(reply.status, reply.body)

    async def stream(self, body: Json) -> AsyncIterator[Json]:
        """The `meta_info` of one piece after the other, the last one with a finish_reason. Raises as `generate`."""
        import httpx  # the pool takes whole answers

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
            raise Away(f"{type(error).__name__} {error}".rstrip()) from error
        if not ended:
            raise Away("it ended a stream before its end")

    async def tell(self, path: str, body: Json) -> None:
        """A POST whose failure costs nothing: whoever fell has forgotten it anyway."""
        try:
            await self._server.post(path, body)
        except EngineError as error:
            logger.debug(f"{self._server}: {error}")

    async def close(self) -> None:
        """Close the idle connections."""
        await self._pool.close()


def read_meta(status: int, body: bytes) -> Json:
    """The `meta_info` of an answer, or the exception that it means."""
    if status == 503:
        raise Away(f"it answers 503 ({read_error(body) or 'nothing more'})")
    if status >= 400:
        raise Refused(read_error(body) or f"it answered {status}")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Garbled(f"its answer is no JSON: {error}") from error
    if isinstance(found, dict) and "error" in found:
        raise Refused(read_error(body))
    meta = found.get("meta_info") if isinstance(found, dict) else None
    if not isinstance(meta, dict):
        raise Garbled("its answer has no meta_info")
    return meta


def read_error(body: bytes) -> str:
    """The message of an error in one of SGLang's shapes."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:300].decode(errors="replace")
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return str(found)[:300]
