"""POST /v1/chat/completions/group: one chat, sampled once per seed, for the rollouts of a group.

The request is parsed and rendered once and submitted to the engine as a batch. The responses equal those of one
request per seed and are sent as JSON lines, each as soon as it is ready.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.async_engine import EngineBusy
from prime_rl.inference.engine import EngineFailed, GenerationRequest, Output
from prime_rl.inference.intake import read_json
from prime_rl.inference.request_parsing import MAX_CHOICES, ApiError, Json
from prime_rl.inference.routes.openai import Job, Route, build_error_response, check, parse_generation_request

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState


async def chat_group(service: ServerState, request: Request) -> Response:
    """POST /v1/chat/completions/group: one completion per seed, as JSON lines `{"index", "status", "answer"}`."""

    def build(body: Json) -> Job:
        service.find_adapter(body)
        seeds = _parse_seeds(body.pop("seeds", None))
        for name in ("seed", "tokens"):
            if body.pop(name, None) is not None:
                raise ApiError(f"{name} is not supported for groups: leave it out", param=name)
        prompt = service.render(body)
        parsed = parse_generation_request(service, body | {"seed": 0}, [prompt], chat=True)
        if parsed.num_choices != 1 or parsed.stream:  # from the request or inference.sampling
            name = "stream" if parsed.stream else "n"
            raise ApiError(f"{name} is not supported for groups: seeds sets the number of completions", param=name)
        default = service.defaults.get("seed")
        requests = []
        for seed in (default if given is None else given for given in seeds):
            params = replace(parsed.params, seed=service.next_seed() if seed is None else seed)
            requests.append(GenerationRequest(prompt, params, False, parsed.adapter))
        check(service, requests)
        return Job([prompt], parsed, requests)

    job = await read_json(request, service.workers, build)
    return StreamingResponse(_lines(service, request, job), media_type="application/x-ndjson")


def _parse_seeds(seeds: Any) -> list[int | None]:
    if not isinstance(seeds, list) or not 1 <= len(seeds) <= MAX_CHOICES:
        raise ApiError(f"seeds must be a list of 1 to {MAX_CHOICES} integers, null for any", param="seeds")
    if not all(seed is None or type(seed) is int for seed in seeds):
        raise ApiError("seeds must be integers, or null for any", param="seeds")
    return seeds


async def _lines(service: ServerState, request: Request, job: Job) -> AsyncIterator[bytes]:
    """Yield the responses completed by each engine step as one chunk."""
    [prompt], requests, parsed = job.prompts, job.requests, job.parsed
    index = {single: i for i, single in enumerate(requests)}

    def build_line(output: Output) -> bytes:
        i = index.pop(output.request)
        try:
            return _line(i, 200, orjson.dumps(service.writer.chat(prompt, [output], parsed)))
        except Exception as error:  # fails this completion alone, as for single requests
            return fail(i, error)

    def fail(i: int, error: Exception) -> bytes:
        refusal = build_error_response(request, error)
        return _line(i, refusal.status_code, bytes(refusal.body))

    try:
        async for events in service.engine.batches(requests):
            yield b"".join(build_line(event) for event in events if isinstance(event, Output))
    except (EngineBusy, EngineFailed) as error:
        yield b"".join(fail(i, error) for i in index.values())


def _line(index: int, status: int, answer: bytes) -> bytes:
    return b'{"index":%d,"status":%d,"answer":%s}\n' % (index, status, answer)


GROUP_ROUTES: tuple[Route, ...] = (("/v1/chat/completions/group", "POST", chat_group, "api"),)
