"""POST /inference/v1/generate: token ids in, token ids out, compatible with vLLM's route."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.engine import Event, Output, StreamUpdate
from prime_rl.inference.intake import read_json
from prime_rl.inference.request_parsing import MAX_NAME_LENGTH, ApiError, Json, ParsedRequest, read_flag
from prime_rl.inference.responses import describe_end, slice_output, usage
from prime_rl.inference.routes.openai import (
    Job,
    Route,
    build_checked,
    parse_generation_request,
    stream_events,
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
    "echo": (False, None),
    "prompt": (None,),
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
        if parsed.stream and mode == "text":
            raise ApiError('output_mode = "text" does not support streaming: set stream to false', param="output_mode")
        job = Job([prompt], parsed, build_checked(service, [prompt], parsed))
        head = {"request_id": _parse_id(body) or service.writer.head("", "generate")["id"]}
        return job, head, mode == "text", read_flag(body, "return_token_ids", False)

    job, head, text_mode, shows_prompt = await read_json(request, service.workers, build)
    [prompt], parsed = job.prompts, job.parsed
    shown: Json = {"prompt_token_ids": prompt} if shows_prompt else {}
    if parsed.stream:
        return stream_events(service, request, job, head, _build_pieces(job, shown))
    outputs = await service.engine.generate(job.requests, request.receive)

    def build_response() -> Json:
        choices = []
        for i, output in enumerate(outputs):
            choice = _choice(i, slice_output(output, 0), parsed) | _end(output)
            choices.append({**choice, "text": service.writer.text(output)} if text_mode else choice)
        scores = service.writer.prompt_scores(prompt, outputs[0], parsed)
        return {**head, "choices": choices, "usage": usage([prompt], outputs), **shown, **scores}

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


def _choice(index: int, event: StreamUpdate, parsed: ParsedRequest) -> Json:
    choice: Json = {"index": index, "token_ids": event.token_ids, "finish_reason": None, "logprobs": None}
    if parsed.logprobs:
        content = [_entry(token, logprob) for token, logprob in zip(event.token_ids, event.logprobs, strict=True)]
        tops = event.top_logprobs or [[] for _ in content]
        for item, top in zip(content, tops, strict=True):
            item["top_logprobs"] = [_entry(token, value, rank) for rank, (token, value) in enumerate(top, 1)]
        choice["logprobs"] = {"content": content}
    return choice


def _end(output: Output) -> Json:
    """Additional fields of a finished choice."""
    ends = [*(start for start, _ in output.versions), len(output.token_ids)][1:]  # none if it was aborted in the queue
    spans = [
        {"version": str(version), "start": start, "end": end}
        for (start, version), end in zip(output.versions, ends, strict=True)
    ]
    return {**describe_end(output), "weight_versions": spans}


def _entry(token: int, logprob: float, rank: int | None = None) -> Json:
    """A token entry with the fields of both versions of vLLM's route."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": rank}


def _build_pieces(job: Job, shown: Json) -> Callable[[Event], Json]:
    """Builds stream chunks with the new tokens of a choice; the first chunk also has the fields `shown`."""
    index = {single: i for i, single in enumerate(job.requests)}
    num_sent = [0] * len(index)
    first = dict(shown)

    def build(event: Event) -> Json:
        i = index[event.request]
        new = slice_output(event, num_sent[i]) if isinstance(event, Output) else event
        num_sent[i] += len(new.token_ids)
        choice = _choice(i, new, job.parsed) | (_end(event) if isinstance(event, Output) else {})
        content = {"choices": [choice], **first}
        first.clear()
        return content

    return build


TOKEN_ROUTES: tuple[Route, ...] = (("/inference/v1/generate", "POST", generate, "api"),)
