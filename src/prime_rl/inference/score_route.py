"""POST /score: how likely given tokens are, as packed numbers, for teachers who are asked about thousands of them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.engine import FULL, GenerationRequest, Output, SamplingParams
from prime_rl.inference.requests import LARGEST, SMALLEST, ApiError, check_token_ids, parse_body
from prime_rl.inference.routes import Route, check

if TYPE_CHECKING:
    from prime_rl.inference.service import Service


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The log-probs of `tokens[start:]`, each given the tokens before it, at `temperature`.

    `top` tokens are told beside each (-1: all of the vocabulary, in order). What comes before `start` is computed once
    for all requests that begin alike.
    """

    tokens: list[int]
    start: int = 1
    top: int = 0
    temperature: float = 1.0
    model: str | None = None


class Scores(msgspec.Struct):
    """Numbers of `tokens[start:]`, packed in the byte order of the machine: float32 and int32.

    `top_ids` and `top_logprobs` are `[tokens, top]`, the most likely first, `tail_mass` the probability of all others;
    with the whole vocabulary `top_ids` and `tail_mass` are empty.
    """

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    tail_mass: bytes = b""
    version: int = 0
    num_cached: int = 0


async def score(service: Service, request: Request) -> Response:
    """The scores, as msgpack."""
    body = parse_body(await request.body())
    try:
        wanted = msgspec.convert(body, ScoreRequest)
    except msgspec.ValidationError as error:
        raise ApiError(f"not a request for scores: {error}") from error
    tokens = check_token_ids(wanted.tokens, service.vocab, "tokens")
    if not (
        SMALLEST <= wanted.temperature <= LARGEST
        and FULL <= wanted.top < service.vocab
        and 1 <= wanted.start < len(tokens)
    ):
        raise ApiError(
            f"start must be from 1 to {len(tokens) - 1}, top from -1 to {service.vocab - 1} "
            f"and temperature from {SMALLEST:g} to {LARGEST:g}"
        )
    if len(tokens) > (longest := service.engine.engine.max_score_len):
        raise ApiError(f"This model's maximum context length is {longest} tokens, but there are {len(tokens)}.")
    params = SamplingParams(
        max_tokens=0,
        prompt_logprobs=wanted.top,
        prompt_temperature=wanted.temperature,
        prompt_start=wanted.start,
    )
    single = GenerationRequest(tokens, params, adapter=service.find_adapter(body))
    check(service, [single])
    [output] = await service.engine.generate([single], request.receive)
    return Response(msgspec.msgpack.encode(pack_scores(output)), media_type="application/msgpack")


def pack_scores(output: Output) -> Scores:
    """The scores of a finished request."""
    found = output.prompt_logprobs
    if found is None or output.finish_reason == "error":
        raise ApiError(f"scoring failed: {output.stop_reason}", status=500)
    scores = Scores(
        _floats(found.logprobs), version=output.versions[-1][1] if output.versions else 0, num_cached=output.num_cached
    )
    if found.full is not None:
        scores.top_logprobs = found.full.cpu().numpy().astype("float32").tobytes()
        return scores
    scores.top_ids = array("i", [token for row in found.top_logprobs for token, _ in row]).tobytes()
    scores.top_logprobs = _floats([logprob for row in found.top_logprobs for _, logprob in row])
    scores.tail_mass = _floats(found.tail_mass)
    return scores


def _floats(values: Any) -> bytes:
    return array("f", values).tobytes()


SCORE_ROUTES: tuple[Route, ...] = (("/score", "POST", score, "api"),)
