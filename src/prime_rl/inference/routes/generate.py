"""POST /inference/v1/generate: token ids in, token ids out, compatible with vLLM's route."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.engine import Output, StreamUpdate, TopLogprobs
from prime_rl.inference.intake import read_json
from prime_rl.inference.request_parsing import MAX_NAME_LENGTH, ApiError, Json, ParsedRequest, read_flag
from prime_rl.inference.responses import check_output, usage
from prime_rl.inference.routes.openai import (
    Job,
    Route,
    build_checked,
    build_error_response,
    parse_generation_request,
    write,
)

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState

FIELDS = frozenset(
    "request_id token_ids sampling_params model return_token_ids output_mode stream stream_options cache_salt "
    "priority".split()
)
IGNORED_PARAMS: dict[str, tuple[Any, ...]] = {
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
    "skip_reading_prefix_cache": (False, None),
    "spaces_between_special_tokens": (True,),
}
"""vLLM sampling parameters without effect here, with their accepted values."""


async def generate(service: ServerState, request: Request) -> Response:
    """POST /inference/v1/generate: token ids in, token ids and log-probs out."""

    def build(body: Json) -> tuple[Job, Json, bool, bool]:
        for name, value in body.items():
            if name not in FIELDS and value is not None:
                raise ApiError(f"{name!r} is not supported by /inference/v1/generate: leave it out", param=name)
        mode = "tokens" if body.get("output_mode") is None else body["output_mode"]
        if mode not in ("tokens", "text"):
            raise ApiError("output_mode must be tokens or text", param="output_mode")
        prompt = service.check_prompt(body.get("token_ids"), "token_ids")
        parsed = parse_generation_request(service, _as_completion(service, body, len(prompt)), [prompt], chat=False)
        job = Job([prompt], parsed, build_checked(service, [prompt], parsed))
        head = {"request_id": _parse_id(body) or service.writer.head("", "generate")["id"]}
        return job, head, mode == "text", read_flag(body, "return_token_ids", False)

    job, head, text_mode, shows_prompt = await read_json(request, service.workers, build)
    [prompt], requests, parsed = job.prompts, job.requests, job.parsed
    shown: Json = {"prompt_token_ids": prompt} if shows_prompt else {}
    if parsed.stream:
        return StreamingResponse(
            _lines(service, request, prompt, requests, parsed, head, shown), media_type="text/event-stream"
        )
    outputs = await service.engine.generate(requests, request.receive)

    def build_response() -> Json:
        choices = []
        for i, output in enumerate(outputs):
            check_output(output)
            choice = _choice(i, output, output.token_ids, output.logprobs, output.top_logprobs, parsed)
            choices.append({**choice, "text": service.writer.text(output)} if text_mode else choice)
        scores = service.writer.prompt_scores(prompt, outputs[0], parsed)
        return {**head, "choices": choices, "usage": usage(len(prompt), outputs), **shown, **scores}

    return await write(service, outputs, parsed, build_response)


def _parse_id(body: Json) -> str | None:
    request_id = body.get("request_id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= MAX_NAME_LENGTH):
        raise ApiError(f"request_id must be a string of at most {MAX_NAME_LENGTH} characters", param="request_id")
    return request_id


def _as_completion(service: ServerState, body: Json, num_prompt: int) -> Json:
    """Convert the request to the body of a completion request."""
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise ApiError("sampling_params must be an object", param="sampling_params")
    params = dict(params)
    for name, values in IGNORED_PARAMS.items():
        if params.pop(name, values[0]) not in values:
            raise ApiError(f"sampling_params.{name} is not supported: leave it out", param=name)
    if params.get("max_tokens") is None and "max_tokens" not in service.defaults:
        params["max_tokens"] = max(service.max_model_len - num_prompt, 1)
    return {**params, "model": body.get("model"), "stream": body.get("stream"), **_options(body)}


def _options(body: Json) -> Json:
    return {"stream_options": body["stream_options"]} if body.get("stream_options") is not None else {}


def _choice(
    index: int,
    event: Output | StreamUpdate,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[TopLogprobs],
    parsed: ParsedRequest,
) -> Json:
    choice: Json = {"index": index, "token_ids": list(ids), "finish_reason": None, "logprobs": None}
    if parsed.logprobs:
        content = [_entry(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        for i, item in enumerate(content):
            item["top_logprobs"] = (
                [_entry(t, value, rank) for rank, (t, value) in enumerate(tops[i], 1)] if tops else []
            )
        choice["logprobs"] = {"content": content}
    if isinstance(event, Output):
        ends = [start for start, _ in event.versions[1:]] + [len(event.token_ids)]
        choice["finish_reason"], choice["stop_reason"] = event.finish_reason, event.stop_reason
        choice["versions"] = event.versions
        choice["weight_versions"] = [
            {"version": str(version), "start": start, "end": end}
            for (start, version), end in zip(event.versions, ends, strict=True)
        ]
    return choice


def _entry(token: int, logprob: float, rank: int | None = None) -> Json:
    """A token entry with the fields of both versions of vLLM's route."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": rank}


async def _lines(
    service: ServerState,
    request: Request,
    prompt: list[int],
    requests: list[Any],
    parsed: ParsedRequest,
    head: Json,
    shown: Json,
) -> AsyncIterator[bytes]:
    """Server-sent events with the new tokens of each choice."""
    index = {single: i for i, single in enumerate(requests)}
    sent = [0] * len(requests)
    outputs: list[Output] = []

    def line(content: Json) -> bytes:
        return b"data: " + orjson.dumps({**head, **content}) + b"\n\n"

    try:
        async for event in service.engine.stream(requests):
            i = index[event.request]
            at = sent[i] if isinstance(event, Output) else 0
            tops = event.top_logprobs[at:]
            if isinstance(event, Output):
                check_output(event)
                outputs.append(event)
            sent[i] += len(event.token_ids) - at
            yield line(
                {"choices": [_choice(i, event, event.token_ids[at:], event.logprobs[at:], tops, parsed)], **shown}
            )
            shown = {}
    except Exception as error:
        yield b"data: " + build_error_response(request, error).body + b"\n\n"
        return
    if parsed.include_usage:
        yield line({"choices": [], "usage": usage(len(prompt), outputs)})
    yield b"data: [DONE]\n\n"


TOKEN_ROUTES: tuple[Route, ...] = (("/inference/v1/generate", "POST", generate, "api"),)
