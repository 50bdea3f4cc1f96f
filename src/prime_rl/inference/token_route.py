"""POST /inference/v1/generate: token ids in, token ids out, in the words of vLLM's route of this name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prime_rl.inference.engine import Output, Progress, TopLogprobs
from prime_rl.inference.requests import ApiError, Json, Wish, build_requests, check_token_ids, parse_body
from prime_rl.inference.responses import check_output, usage
from prime_rl.inference.routes import Route, answer, build_wish, check, refuse

if TYPE_CHECKING:
    from prime_rl.inference.service import Service

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
"""Sampling parameters of vLLM that change nothing here, with the values that are accepted."""


async def generate(service: Service, request: Request) -> Response:
    """Token ids in, token ids and log-probs out."""
    body = parse_body(await request.body())
    for name, value in body.items():
        if name not in FIELDS and value is not None:
            raise ApiError(f"{name!r} is not offered by /inference/v1/generate: leave it out", param=name)
    text_mode = body.get("output_mode", "tokens") == "text"
    if body.get("output_mode", "tokens") not in ("tokens", "text"):
        raise ApiError("output_mode must be tokens or text", param="output_mode")
    prompt = check_token_ids(body.get("token_ids"), service.vocab, "token_ids")
    wish = build_wish(service, _as_completion(service, body, len(prompt)), [prompt], chat=False)
    requests = build_requests(prompt, wish)
    check(service, requests)
    head = {"request_id": body.get("request_id") or service.writer.head("", "generate")["id"]}
    shown: Json = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
    if wish.stream:
        return StreamingResponse(
            _lines(service, request, prompt, requests, wish, head, shown), media_type="text/event-stream"
        )
    outputs = await service.engine.generate(requests, request.receive)
    choices = []
    for i, output in enumerate(outputs):
        check_output(output)
        choice = _choice(i, output, output.token_ids, output.logprobs, output.top_logprobs, wish)
        choices.append({**choice, "text": service.writer.text(output)} if text_mode else choice)
    scores = service.writer.prompt_scores(prompt, outputs[0], wish)
    return answer({**head, "choices": choices, "usage": usage(len(prompt), outputs), **shown, **scores})


def _as_completion(service: Service, body: Json, num_prompt: int) -> Json:
    """The same wish as the body of a plain completion."""
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise ApiError("sampling_params must be an object", param="sampling_params")
    params = dict(params)
    for name, values in IGNORED_PARAMS.items():
        if params.pop(name, values[0]) not in values:
            raise ApiError(f"sampling_params.{name} is not offered: leave it out", param=name)
    if params.get("max_tokens") is None and "max_tokens" not in service.defaults:
        params["max_tokens"] = max(service.max_model_len - num_prompt, 1)
    return {**params, "model": body.get("model"), "stream": body.get("stream"), **_options(body)}


def _options(body: Json) -> Json:
    return {"stream_options": body["stream_options"]} if body.get("stream_options") is not None else {}


def _choice(
    index: int,
    event: Output | Progress,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[TopLogprobs],
    wish: Wish,
) -> Json:
    choice: Json = {"index": index, "token_ids": list(ids), "finish_reason": None, "logprobs": None}
    if wish.logprobs:
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
    """A token in the words of both editions of vLLM's route."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": rank}


async def _lines(
    service: Service, request: Request, prompt: list[int], requests: list[Any], wish: Wish, head: Json, shown: Json
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
            yield line({"choices": [_choice(i, event, event.token_ids[at:], event.logprobs[at:], tops, wish)], **shown})
            shown = {}
    except Exception as error:
        yield b"data: " + refuse(request, error).body + b"\n\n"
        return
    if wish.include_usage:
        yield line({"choices": [], "usage": usage(len(prompt), outputs)})
    yield b"data: [DONE]\n\n"


TOKEN_ROUTES: tuple[Route, ...] = (("/inference/v1/generate", "POST", generate, "api"),)
