"""Converts engine requests to SGLang's /generate format and its responses to outputs.

The format follows SGLang's `io_struct.py`, `sampling_params.py` and `tokenizer_manager.py`. `output_token_logprobs` are
`log_softmax(logits / temperature)` with penalties and biases, *before* top_k, top_p and min_p filtering (`sampler.py`);
`input_token_logprobs` are without temperature, and their first entry is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prime_rl.client.scoring import compute_tail_mass
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
    if params.grammar is not None:
        raise ValueError("response_format and forced tool calls are not supported with SGLang: leave them out")
    if params.repetition_penalty != 1:
        raise ValueError("repetition_penalty with SGLang: it ignores prompt tokens; use presence_penalty")
    if params.prompt_logprobs is not None and params.prompt_temperature != 1:
        raise ValueError("prompt_temperature with SGLang: it scores prompts at temperature 1 only")
    if params.prompt_support:
        raise ValueError("support with SGLang: it scores tokens over the whole vocabulary only")
    if params.prompt_logprobs is not None and not 0 <= params.prompt_logprobs <= MAX_TOP_LOGPROBS:
        requested = "the full distribution" if params.prompt_logprobs == FULL else f"{params.prompt_logprobs} tokens"
        raise ValueError(f"SGLang returns at most {MAX_TOP_LOGPROBS} log-probs per position, not {requested}")
    if params.temperature and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0):
        raise ValueError("top_p, top_k and min_p with SGLang: its log-probs are computed before filtering; unset them")


def build_body(request: GenerationRequest, rid: str, adapter: str | None, supports_seeds: bool = False) -> Json:
    """Build the body of /generate with request id `rid` and the server's LoRA adapter name `adapter`.

    Seeds are sent only to servers that support them.
    """
    params = request.params
    sampling: Json = {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens,
        "temperature": params.temperature,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.include_stop,
    }
    if supports_seeds:
        sampling["sampling_seed"] = params.seed & SEED_MASK
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        sampling["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    body: Json = {
        "rid": rid,
        "input_ids": request.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1 if params.prompt_logprobs is None else params.prompt_start - 1,
        "top_logprobs_num": max(params.top_logprobs, params.prompt_logprobs or 0),
    }
    return body if adapter is None else {**body, "lora_path": adapter}


def read_output(request: GenerationRequest, meta: Mapping[str, Any], version: int, decode: Decode) -> Output:
    """Build the output from the `meta_info` of a response; stop strings are matched again, on the decoded text.

    Raises `MalformedResponse`.
    """
    params, reason = request.params, meta.get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length", "abort"):
        raise MalformedResponse(f"unknown finish_reason {reason!r}")
    kind: FinishReason = reason["type"]
    stop: str | int | None = reason.get("matched")
    if isinstance(stop, int) and stop not in params.stop_token_ids:
        stop = None  # the model's EOS token
    token_ids, logprobs, top_logprobs = _read_tokens(params, meta)
    text: str | None = None
    if params.max_tokens == 0:
        kind, stop = "length", None
    if params.stop:
        detokenizer = Detokenizer(decode, params.skip_special_tokens, request.context)
        matcher = StopStringMatcher(detokenizer, params.stop, params.include_stop)
        for i, token in enumerate(token_ids):
            if (matched := matcher.add(token, active=i + 1 >= params.min_tokens)) is not None:
                kind, stop, text = "stop", matched, matcher.text
                token_ids, logprobs, top_logprobs = token_ids[: i + 1], logprobs[: i + 1], top_logprobs[: i + 1]
                break
        else:
            text = matcher.text if isinstance(stop, str) else None
    return Output(
        request=request,
        token_ids=token_ids,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        versions=[(0, version)],
        finish_reason=kind,
        stop_reason=stop,
        text=text,
        prompt_logprobs=read_scores(request, meta),
        num_cached=int(meta.get("cached_tokens") or 0),
    )


def _read_tokens(params: SamplingParams, meta: Mapping[str, Any]) -> tuple[list[int], list[float], list[TopLogprobs]]:
    """Sampled tokens, their log-probs and top log-probs; for max_tokens = 0 the server may have sampled one."""
    rows: list[Any] = meta.get("output_token_logprobs") or []
    tops: list[Any] = meta.get("output_top_logprobs") or [None] * len(rows)
    num_tokens = int(meta.get("completion_tokens", 0))
    if not len(rows) == len(tops) == num_tokens:
        raise MalformedResponse(f"{len(rows)} log-probs for {num_tokens} tokens")
    if any(row[0] is None or not math.isfinite(row[0]) for row in rows):
        raise MalformedResponse("the model's log-probs are not finite")
    rows, tops = rows[: params.max_tokens], tops[: params.max_tokens]
    top_logprobs = [read_top(entries)[: params.top_logprobs] for entries in tops] if params.top_logprobs else []
    return [int(row[1]) for row in rows], [float(row[0]) for row in rows], top_logprobs


def read_top(rows: Any) -> TopLogprobs:
    """Parse the top log-probs of one position: `[[logprob, token id, text], ...]` or null."""
    return [(int(row[1]), float(row[0])) for row in rows or [] if row[0] is not None]


def read_scores(request: GenerationRequest, meta: Mapping[str, Any]) -> PromptLogprobs | None:
    """Parse the prompt log-probs from `prompt_start` on; None if not requested."""
    params = request.params
    if params.prompt_logprobs is None:
        return None
    rows: list[Any] = meta.get("input_token_logprobs") or []
    num_scored = len(request.prompt) - params.prompt_start
    if len(rows) != num_scored + 1 or any(row[0] is None or not math.isfinite(row[0]) for row in rows[1:]):
        raise MalformedResponse(f"{len(rows)} prompt log-probs, expected {num_scored + 1}")
    top_rows = meta.get("input_top_logprobs") or [None] * len(rows)
    tops = [read_top(entries)[: params.prompt_logprobs] for entries in top_rows]
    tails = [compute_tail_mass(value for _, value in top) for top in tops[1:]]
    return PromptLogprobs([float(row[0]) for row in rows[1:]], tops[1:], tails)
