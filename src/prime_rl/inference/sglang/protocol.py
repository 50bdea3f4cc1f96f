"""Converts engine requests to SGLang's /generate format and its responses to outputs.

The format follows SGLang's `io_struct.py`, `sampling_params.py` and `tokenizer_manager.py`. `output_token_logprobs` are
`log_softmax(logits / temperature)` with penalties and biases, *before* top_k, top_p and min_p filtering (`sampler.py`);
`input_token_logprobs` are without temperature, and their first entry is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.inference.detokenizer import Decode, Detokenizer, StopStringMatcher
from prime_rl.inference.engine import (
    FULL,
    FinishReason,
    GenerationRequest,
    Output,
    PromptLogprobs,
    SamplingParams,
    TopLogprobs,
)
from prime_rl.inference.request_parsing import MAX_TOP_LOGPROBS, Json

SEED_MASK = (1 << 31) - 1
"""Seed range supported by all SGLang versions."""


class MalformedResponse(ValueError):
    """A response without the expected content."""


def check_params(params: SamplingParams) -> None:
    """`ValueError` for parameters that SGLang lacks, defines differently, or returns no log-probs for."""
    if params.repetition_penalty != 1:
        raise ValueError("repetition_penalty with SGLang: it ignores prompt tokens; use presence_penalty")
    if params.prompt_logprobs is not None and params.prompt_temperature != 1:
        raise ValueError("prompt_temperature with SGLang: it scores prompts at temperature 1 only")
    if params.prompt_logprobs is not None and not 0 <= params.prompt_logprobs <= MAX_TOP_LOGPROBS:
        requested = "the full distribution" if params.prompt_logprobs == FULL else f"{params.prompt_logprobs} tokens"
        raise ValueError(f"SGLang returns at most {MAX_TOP_LOGPROBS} log-probs per position, not {requested}")
    if filters(params) and not 1 <= params.top_k <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_p, min_p and top_k with SGLang need a top_k from 1 to {MAX_TOP_LOGPROBS}: its log-probs are computed "
            "before filtering and must be renormalized over the top_k tokens"
        )


def filters(params: SamplingParams) -> bool:
    """Whether sampling is restricted to a part of the vocabulary."""
    return bool(params.temperature) and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def build_body(request: GenerationRequest, rid: str, adapter: str | None, supports_seeds: bool = False) -> Json:
    """Build the body of /generate with request id `rid` and the server's LoRA adapter name `adapter`.

    Seeds are sent only to servers that support them.
    """
    params = request.params
    body: Json = {
        "rid": rid,
        "input_ids": request.prompt,
        "sampling_params": build_sampling(params)
        | ({"sampling_seed": params.seed & SEED_MASK} if supports_seeds else {}),
        "return_logprob": True,
        "logprob_start_len": -1 if params.prompt_logprobs is None else params.prompt_start - 1,
        "top_logprobs_num": max(
            params.top_logprobs, params.prompt_logprobs or 0, params.top_k if filters(params) else 0
        ),
        "stream": request.stream,
    }
    return body if adapter is None else {**body, "lora_path": adapter}


def build_sampling(params: SamplingParams) -> Json:
    """Build the `sampling_params` of /generate, without the seed."""
    fields: Json = {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.include_stop,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    return fields


@dataclass
class StreamedCompletion:
    """Accumulates the tokens of one completion."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, meta: Mapping[str, Any]) -> int:
        """Append the new tokens of a response or chunk and return their number; chunks are cumulative or incremental,
        depending on the server's options."""
        params, rows = self.request.params, meta.get("output_token_logprobs") or []
        num_new = int(meta.get("completion_tokens", len(self.token_ids))) - len(self.token_ids)
        tops: list[Any] = meta.get("output_top_logprobs") or [None] * len(rows)
        if not 0 <= num_new <= len(rows) or len(tops) != len(rows):
            raise MalformedResponse(f"{len(rows)} log-probs for {num_new} new tokens")
        num_added = min(num_new, params.max_tokens - len(self.token_ids))  # for max_tokens = 0 it may sample one
        first = len(rows) - num_new
        for row, entries in zip(rows[first : first + num_added], tops[first : first + num_added], strict=True):
            top, logprob = read_top(entries), row[0]
            if filters(params) and logprob is not None:
                logprob, top = renormalize(params, int(row[1]), logprob, top)
            if logprob is None or not math.isfinite(logprob):
                raise MalformedResponse("the model's log-probs are not finite")
            self.token_ids.append(int(row[1]))
            self.logprobs.append(logprob)
            if params.top_logprobs:
                self.top_logprobs.append(top[: params.top_logprobs])
        return num_added

    def finish(self, meta: Mapping[str, Any], versions: list[tuple[int, int]], decode: Decode) -> Output:
        """Build the output; stop strings are matched again here, on the decoded text."""
        params, reason = self.request.params, meta.get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length", "abort"):
            raise MalformedResponse(f"unknown finish_reason {reason!r}")
        kind: FinishReason = reason["type"]
        stop: str | int | None = reason.get("matched")
        text: str | None = None
        if isinstance(stop, int) and stop not in params.stop_token_ids:
            stop = None  # the model's EOS token
        if params.max_tokens == 0:
            kind, stop = "length", None
        if params.stop:
            watch = StopStringMatcher(Detokenizer(decode, params.skip_special_tokens), params.stop, params.include_stop)
            for i, token in enumerate(self.token_ids):
                if (found := watch.add(token, active=i + 1 >= params.min_tokens)) is not None:
                    kind, stop, text = "stop", found, watch.text
                    self._cut(i + 1)
                    break
            else:
                text = watch.text if isinstance(stop, str) else None
        return Output(
            request=self.request,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            versions=[span for span in versions if span[0] < max(len(self.token_ids), 1)],
            finish_reason=kind,
            stop_reason=stop,
            text=text,
            prompt_logprobs=read_scores(self.request, meta),
            num_cached=int(meta.get("cached_tokens") or 0),
        )

    def _cut(self, length: int) -> None:
        for rows in (self.token_ids, self.logprobs, self.top_logprobs):
            del rows[length:]


def read_top(rows: Any) -> TopLogprobs:
    """Parse the top log-probs of one position: `[[logprob, token id, text], ...]` or null."""
    return [(int(row[1]), float(row[0])) for row in rows or [] if row[0] is not None]


def renormalize(params: SamplingParams, token: int, logprob: float, top: TopLogprobs) -> tuple[float, TopLogprobs]:
    """Renormalize log-probs over the tokens that pass the filters; returns that of `token` and the top ones.

    A token passes if it is among the first `top_k`, with a preceding mass of at most `top_p`, and at least `min_p`
    times as likely as the first (SGLang applies each filter to the full distribution).
    """
    kept: TopLogprobs = []
    mass = 0.0
    for other, value in top[: params.top_k]:
        if mass > params.top_p or value < top[0][1] + math.log(params.min_p or math.ulp(0.0)):
            break
        kept.append((other, value))
        mass += math.exp(value)
    if token not in dict(kept):  # rounding may differ at the boundary
        kept.append((token, logprob))
    total = math.log(math.fsum(math.exp(value) for _, value in kept))
    return logprob - total, [(other, value - total) for other, value in kept]


def read_scores(request: GenerationRequest, meta: Mapping[str, Any]) -> PromptLogprobs | None:
    """Parse the prompt log-probs from `prompt_start` on; None if not requested."""
    params = request.params
    if params.prompt_logprobs is None:
        return None
    rows: Sequence[Any] = meta.get("input_token_logprobs") or []
    wanted = len(request.prompt) - params.prompt_start
    if len(rows) != wanted + 1 or any(row[0] is None or not math.isfinite(row[0]) for row in rows[1:]):
        raise MalformedResponse(f"{len(rows)} prompt log-probs, expected {wanted + 1}")
    top_rows = meta.get("input_top_logprobs") or [None] * len(rows)
    tops = [read_top(entries)[: params.prompt_logprobs] for entries in top_rows]
    tails = [max(0.0, 1.0 - math.fsum(math.exp(value) for _, value in top)) for top in tops[1:]]
    return PromptLogprobs([float(row[0]) for row in rows[1:]], tops[1:], tails)


def read_spans(meta: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Parse version spans `(start, version)`: completion tokens from `start` on were sampled with `version`."""
    if spans := meta.get("weight_versions"):
        return [(int(span["start"]), str(span["version"])) for span in spans]
    return [(0, str(meta.get("weight_version")))]
