"""POST /score: log-probs of given tokens in a packed binary format, for teacher scoring of long sequences."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.client.scoring import PackedScores
from prime_rl.inference.engine import FULL, GenerationRequest, Output, SamplingParams
from prime_rl.inference.intake import read_json
from prime_rl.inference.request_parsing import LARGEST, SMALLEST, ApiError, Json, check_token_ids
from prime_rl.inference.responses import check_output
from prime_rl.inference.routes.openai import ENTRY_BYTES, Route, check

if TYPE_CHECKING:
    from prime_rl.inference.service import ServerState

MAX_NUMBERS = 2**30
"""Maximum number of full-distribution log-probs per response: 4 GiB."""
MAX_PAIRS = 2**23
"""Maximum number of top log-probs per response; each takes about 100 bytes while being built."""


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Requests the log-probs of `tokens[start:]`, each given the preceding tokens, at `temperature`.

    The `top` most likely tokens are returned for each (-1: the full vocabulary, in order). Tokens before `start` can
    come from the prefix cache. `support` (base64) has the supports that the log-probs of `tokens[start:]` are
    renormalized over, see `rollouts.training.sampling_support`.
    """

    tokens: list[int]
    start: int = 1
    top: int = 0
    temperature: float = 1.0
    support: bytes = b""
    model: str | None = None


async def score(service: ServerState, request: Request) -> Response:
    """POST /score: scores as msgpack."""

    def build(body: Json) -> tuple[GenerationRequest, int]:
        max_len = service.engine.engine.max_score_len
        tokens = body.get("tokens")
        if isinstance(tokens, list) and len(tokens) > max_len:
            raise ApiError(f"This model's maximum context length is {max_len} tokens, but there are {len(tokens)}.")
        try:
            parsed = msgspec.convert(body, ScoreRequest)
        except msgspec.ValidationError as error:
            raise ApiError(f"invalid score request: {error}") from error
        tokens = check_token_ids(parsed.tokens, service.vocab, "tokens")
        if not (
            SMALLEST <= parsed.temperature <= LARGEST
            and FULL <= parsed.top < service.vocab
            and 1 <= parsed.start < len(tokens)
        ):
            raise ApiError(
                f"start must be from 1 to {len(tokens) - 1}, top from -1 to {service.vocab - 1} "
                f"and temperature from {SMALLEST:g} to {LARGEST:g}"
            )
        full = parsed.top == FULL
        num_scores = (len(tokens) - parsed.start) * (service.vocab if full else parsed.top)
        if num_scores > (limit := MAX_NUMBERS if full else MAX_PAIRS):
            raise ApiError(f"{num_scores} scores exceed the limit of {limit} per request: raise start, or lower top")
        params = SamplingParams(
            max_tokens=0,
            prompt_logprobs=parsed.top,
            prompt_temperature=parsed.temperature,
            prompt_start=parsed.start,
            prompt_support=parsed.support,
        )
        single = GenerationRequest(tokens, params, adapter=service.find_adapter(body))
        check(service, [single])
        return single, num_scores

    single, num_scores = await read_json(request, service.workers, build)
    [output] = await service.engine.generate([single], request.receive)

    def build_response() -> Response:
        return Response(msgspec.msgpack.encode(pack_scores(output)), media_type="application/msgpack")

    return await service.workers.run(ENTRY_BYTES * num_scores, build_response)


def pack_scores(output: Output) -> PackedScores:
    """Pack the scores of a finished request."""
    check_output(output)
    logprobs = output.prompt_logprobs
    if logprobs is None:
        raise ApiError("the engine returned no scores", status=500)
    scores = PackedScores(
        _floats(logprobs.logprobs),
        version=output.versions[-1][1] if output.versions else 0,
        num_cached=output.num_cached,
    )
    if logprobs.full is not None:
        scores.top_logprobs = logprobs.full.numpy().astype("float32", copy=False).tobytes()
        return scores
    scores.top_ids = array("i", [token for row in logprobs.top_logprobs for token, _ in row]).tobytes()
    scores.top_logprobs = _floats([logprob for row in logprobs.top_logprobs for _, logprob in row])
    scores.tail_mass = _floats(logprobs.tail_mass)
    return scores


def _floats(values: Any) -> bytes:
    return array("f", values).tobytes()


SCORE_ROUTES: tuple[Route, ...] = (("/score", "POST", score, "api"),)
