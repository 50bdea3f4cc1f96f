"""POST /v1/chat/completions/group: one chat, drawn once per seed, as the rollouts of a group ask for it.

It is read, checked and rendered once, and the engine gets all of it at once. The answers are those of one request per
seed, told in lines of JSON as they are ready, so that nobody waits for the longest of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.async_engine import EngineFailed
from prime_rl.inference.engine import GenerationRequest, Output
from prime_rl.inference.requests import MAX_CHOICES, ApiError, Json, Wish, parse_body
from prime_rl.inference.routes import Route, build_wish, check

if TYPE_CHECKING:
    from prime_rl.inference.service import Service

SINGLE = ("seed", "n", "stream", "stream_options", "tokens")
"""Fields of a chat that say how many answers there are and how they come, as `seeds` does here, or the prompt."""


async def chat_group(service: Service, request: Request) -> Response:
    """One chat, answered once for each of `seeds`, as lines of JSON: `{"index", "status", "answer"}`."""
    body = parse_body(await request.body())
    service.find_adapter(body)
    seeds = _parse_seeds(body.pop("seeds", None))
    if given := [name for name in SINGLE if body.pop(name, None) is not None]:
        raise ApiError(f"{given[0]} does not belong to a group: leave it out, seeds says it", param=given[0])
    prompt = service.render(body)
    wish = build_wish(service, body, [prompt], chat=True)
    drawn = [service.next_seed() if seed is None else seed for seed in seeds]
    requests = [GenerationRequest(prompt, replace(wish.params, seed=seed), False, wish.adapter) for seed in drawn]
    check(service, requests)
    return StreamingResponse(_lines(service, prompt, requests, wish), media_type="application/x-ndjson")


def _parse_seeds(seeds: Any) -> list[int | None]:
    if not isinstance(seeds, list) or not 1 <= len(seeds) <= MAX_CHOICES:
        raise ApiError(f"seeds must be a list of 1 to {MAX_CHOICES} integers, null for any", param="seeds")
    if not all(seed is None or type(seed) is int for seed in seeds):
        raise ApiError("seeds must be integers, or null for any", param="seeds")
    return seeds


async def _lines(
    service: Service, prompt: list[int], requests: list[GenerationRequest], wish: Wish
) -> AsyncIterator[bytes]:
    """The answers that each step of the engine completes, in one piece."""
    index = {single: i for i, single in enumerate(requests)}

    def tell(output: Output) -> bytes:
        status, answer = 200, {}
        try:
            answer = service.writer.chat(prompt, [output], wish)
        except ApiError as error:
            status, answer = error.status, error.body()
        return line(index.pop(output.request), status, answer)

    def line(i: int, status: int, answer: Json) -> bytes:
        return orjson.dumps({"index": i, "status": status, "answer": answer}) + b"\n"

    try:
        async for events in service.engine.batches(requests):
            yield b"".join(tell(event) for event in events if isinstance(event, Output))
    except EngineFailed as error:
        failure = ApiError(str(error), status=503).body()
        yield b"".join(line(i, 503, failure) for i in index.values())


GROUP_ROUTES: tuple[Route, ...] = (("/v1/chat/completions/group", "POST", chat_group, "api"),)
