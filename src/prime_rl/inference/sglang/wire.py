"""What is asked of an engine in the words of SGLang's /generate, and its answers back again.

The words are those of its `io_struct.py`, `sampling_params.py` and `tokenizer_manager.py`. What `output_token_logprobs`
tell is `log_softmax(logits / temperature)`, penalties and biases included, *before* top_k, top_p and min_p leave tokens
out (its `sampler.py`); `input_token_logprobs` have no temperature, and their first entry is empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.inference.engine import (
    FULL,
    FinishReason,
    GenerationRequest,
    Output,
    PromptLogprobs,
    SamplingParams,
    TopLogprobs,
)
from prime_rl.inference.requests import MAX_TOP_LOGPROBS, Json
from prime_rl.inference.text import Decode, Detokenizer, StopWatch

SEED_MASK = (1 << 31) - 1
"""Of the seeds that all its versions take."""


class Garbled(ValueError):
    """An answer that does not say what it should."""


def check_params(params: SamplingParams) -> None:
    """`ValueError` for what SGLang has no words for, means something else by, or tells no log-probs of."""
    if params.repetition_penalty != 1:
        raise ValueError(
            "repetition_penalty with SGLang: it counts the completion and not the prompt; use presence_penalty"
        )
    if params.prompt_logprobs is not None and params.prompt_temperature != 1:
        raise ValueError("prompt_temperature with SGLang: it scores prompts at temperature 1 only")
    if params.prompt_logprobs is not None and not 0 <= params.prompt_logprobs <= MAX_TOP_LOGPROBS:
        told = "the whole distribution" if params.prompt_logprobs == FULL else f"{params.prompt_logprobs} tokens"
        raise ValueError(f"SGLang is asked for at most {MAX_TOP_LOGPROBS} log-probs of a position, not for {told}")
    if filters(params) and not 1 <= params.top_k <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_p, min_p and top_k with SGLang need a top_k from 1 to {MAX_TOP_LOGPROBS}: it tells log-probs from "
            "before tokens are left out, and so many of them are needed to correct that"
        )


def filters(params: SamplingParams) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return bool(params.temperature) and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def build_body(request: GenerationRequest, rid: str, adapter: str | None, keeps_seeds: bool = False) -> Json:
    """The body of /generate; `rid` names the request and `adapter` the LoRA adapter, as SGLang knows them.

    A server that does not keep seeds may be older than they are, and is told none.
    """
    params = request.params
    body: Json = {
        "rid": rid,
        "input_ids": request.prompt,
        "sampling_params": build_sampling(params) | ({"sampling_seed": params.seed & SEED_MASK} if keeps_seeds else {}),
        "return_logprob": True,
        "logprob_start_len": -1 if params.prompt_logprobs is None else params.prompt_start - 1,
        "top_logprobs_num": max(
            params.top_logprobs, params.prompt_logprobs or 0, params.top_k if filters(params) else 0
        ),
        "stream": request.stream,
    }
    return body if adapter is None else {**body, "lora_path": adapter}


def build_sampling(params: SamplingParams) -> Json:
    """The `sampling_params` of /generate, but for the seed."""
    told: Json = {
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
        told["stop"] = list(params.stop)
    if params.stop_token_ids:
        told["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        told["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    return told


@dataclass
class Drawn:
    """The tokens of one completion as they come in."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, meta: Mapping[str, Any]) -> int:
        """Take in the tokens of an answer or a piece that are new, and return how many; pieces repeat the old ones or
        do not, as the server was started."""
        params, rows = self.request.params, meta.get("output_token_logprobs") or []
        num_new = int(meta.get("completion_tokens", len(self.token_ids))) - len(self.token_ids)
        tops: list[Any] = meta.get("output_top_logprobs") or [None] * len(rows)
        if not 0 <= num_new <= len(rows) or len(tops) != len(rows):
            raise Garbled(f"it told {len(rows)} log-probs for {num_new} new tokens")
        num_wanted = min(num_new, params.max_tokens - len(self.token_ids))  # asked for none, it may draw one
        first = len(rows) - num_new
        for row, told in zip(rows[first : first + num_wanted], tops[first : first + num_wanted], strict=True):
            top, logprob = read_top(told), row[0]
            if filters(params) and logprob is not None:
                logprob, top = renormalise(params, int(row[1]), logprob, top)
            if logprob is None or not math.isfinite(logprob):
                raise Garbled("the model's log-probs are not finite")
            self.token_ids.append(int(row[1]))
            self.logprobs.append(logprob)
            if params.top_logprobs:
                self.top_logprobs.append(top[: params.top_logprobs])
        return num_wanted

    def finish(self, meta: Mapping[str, Any], versions: list[tuple[int, int]], decode: Decode) -> Output:
        """The finished completion; a stop string ends it where our own reading of the text finds it."""
        params, reason = self.request.params, meta.get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length", "abort"):
            raise Garbled(f"it ended with finish_reason {reason!r}")
        kind: FinishReason = reason["type"]
        stop: str | int | None = reason.get("matched")
        text: str | None = None
        if isinstance(stop, int) and stop not in params.stop_token_ids:
            stop = None  # the end of an answer, as the model means it
        if params.max_tokens == 0:
            kind, stop = "length", None
        if params.stop:
            watch = StopWatch(Detokenizer(decode, params.skip_special_tokens), params.stop, params.include_stop)
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
    """Alternatives of one position: `[[logprob, token id, text], ...]`, or null where there are none."""
    return [(int(row[1]), float(row[0])) for row in rows or [] if row[0] is not None]


def renormalise(params: SamplingParams, token: int, logprob: float, top: TopLogprobs) -> tuple[float, TopLogprobs]:
    """The log-prob of `token` among the tokens that were not left out, and theirs, most likely first.

    A token stays that is among the `top_k` first, with less than `top_p` before it, and `min_p` times as likely as the
    first (SGLang applies each to the distribution over the whole vocabulary).
    """
    kept: TopLogprobs = []
    mass = 0.0
    for other, value in top[: params.top_k]:
        if mass > params.top_p or value < top[0][1] + math.log(params.min_p or math.ulp(0.0)):
            break
        kept.append((other, value))
        mass += math.exp(value)
    if token not in dict(kept):  # at the very edge its rounding may decide otherwise
        kept.append((token, logprob))
    total = math.log(math.fsum(math.exp(value) for _, value in kept))
    return logprob - total, [(other, value - total) for other, value in kept]


def read_scores(request: GenerationRequest, meta: Mapping[str, Any]) -> PromptLogprobs | None:
    """How likely the prompt was, from `prompt_start` on; None when that was not asked."""
    params = request.params
    if params.prompt_logprobs is None:
        return None
    rows: Sequence[Any] = meta.get("input_token_logprobs") or []
    wanted = len(request.prompt) - params.prompt_start
    if len(rows) != wanted + 1 or any(row[0] is None or not math.isfinite(row[0]) for row in rows[1:]):
        raise Garbled(f"it told {len(rows)} log-probs of the prompt where {wanted + 1} were asked for")
    tops = [read_top(told)[: params.prompt_logprobs] for told in (meta.get("input_top_logprobs") or [None] * len(rows))]
    tails = [max(0.0, 1.0 - math.fsum(math.exp(value) for _, value in top)) for top in tops[1:]]
    return PromptLogprobs([float(row[0]) for row in rows[1:]], tops[1:], tails)


def read_spans(meta: Mapping[str, Any]) -> list[tuple[int, str]]:
    """`(start, version)`: from completion token `start` on, the weights were those called `version`."""
    if spans := meta.get("weight_versions"):
        return [(int(span["start"]), str(span["version"])) for span in spans]
    return [(0, str(meta.get("weight_version")))]
