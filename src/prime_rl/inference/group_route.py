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

from prime_rl.inference.async_engine import EngineBusy, EngineFailed
from prime_rl.inference.engine import GenerationRequest, Output
from prime_rl.inference.requests import MAX_CHOICES, ApiError, Wish, parse_body
from prime_rl.inference.routes import Route, build_wish, check, refuse

if TYPE_CHECKING:
    from prime_rl.inference.service import Service


async def chat_group(service: Service, request: Request) -> Response:
    """One chat, answered once for each of `seeds`, as lines of JSON: `{"index", "status", "answer"}`."""
    body = parse_body(await request.body())
    service.find_adapter(body)
    seeds = _parse_seeds(body.pop("seeds", None))
    for name in ("seed", "tokens"):
        if body.pop(name, None) is not None:
            raise ApiError(f"{name} does not belong to a group: leave it out", param=name)
    prompt = service.render(body)
    wish = build_wish(service, body | {"seed": 0}, [prompt], chat=True)
    if wish.num_choices != 1 or wish.stream:  # of the request, or of inference.sampling
        name = "stream" if wish.stream else "n"
        raise ApiError(f"{name} does not belong to a group: seeds says how many answers there are", param=name)
    default = service.defaults.get("seed")
    requests = []
    for seed in (default if given is None else given for given in seeds):
        params = replace(wish.params, seed=service.next_seed() if seed is None else seed)
        requests.append(GenerationRequest(prompt, params, False, wish.adapter))
    check(service, requests)
    return StreamingResponse(_lines(service, request, prompt, requests, wish), media_type="application/x-ndjson")


def _parse_seeds(seeds: Any) -> list[int | None]:
    if not isinstance(seeds, list) or not 1 <= len(seeds) <= MAX_CHOICES:
        raise ApiError(f"seeds must be a list of 1 to {MAX_CHOICES} integers, null for any", param="seeds")
    if not all(seed is None or type(seed) is int for seed in seeds):
        raise ApiError("seeds must be integers, or null for any", param="seeds")
    return seeds


async def _lines(
    service: Service, request: Request, prompt: list[int], requests: list[GenerationRequest], wish: Wish
) -> AsyncIterator[bytes]:
    """The answers that each step of the engine completes, in one piece."""
    index = {single: i for i, single in enumerate(requests)}

    def tell(output: Output) -> bytes:
        i = index.pop(output.request)
        try:
            return _line(i, 200, orjson.dumps(service.writer.chat(prompt, [output], wish)))
        except Exception as error:  # what cannot be written is its own failure, as for a request of its own
            return fail(i, error)

    def fail(i: int, error: Exception) -> bytes:
        refusal = refuse(request, error)
        return _line(i, refusal.status_code, bytes(refusal.body))

    try:
        async for events in service.engine.batches(requests):
            yield b"".join(tell(event) for event in events if isinstance(event, Output))
    except (EngineBusy, EngineFailed) as error:
        yield b"".join(fail(i, error) for i in index.values())


def _line(index: int, status: int, answer: bytes) -> bytes:
    return b'{"index":%d,"status":%d,"answer":%s}\n' % (index, status, answer)


GROUP_ROUTES: tuple[Route, ...] = (("/v1/chat/completions/group", "POST", chat_group, "api"),)
