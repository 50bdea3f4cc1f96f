"""From the JSON of an OpenAI request to what the engine understands; what would be ignored is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from prime_rl.inference.engine import GenerationRequest, SamplingParams, derive_seed

Json = dict[str, Any]
MAX_CHOICES = 256
MAX_TOP_LOGPROBS = 100
SMALLEST, LARGEST = 1e-6, 1e6
"""Of temperatures, repetition penalties and biases: logits stay finite."""


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, kind: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after_s = status, param, retry_after_s
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> Json:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class Wish:
    """A checked request: what to generate and how to answer."""

    params: SamplingParams
    num_choices: int
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool  # also return token ids
    names_as_ids: bool  # show a token as `token_id:N`
    tools: list[Json] | None
    single_tool: bool
    echo: bool = False
    adapter: str | None = None
    opened: bool = False  # the prompt ended inside of reasoning


SHARED_FIELDS = frozenset(
    "model max_tokens temperature top_p top_k min_p repetition_penalty min_tokens seed stop stop_token_ids ignore_eos "
    "logit_bias n stream stream_options logprobs return_token_ids return_tokens_as_token_ids skip_special_tokens "
    "include_stop_str_in_output presence_penalty frequency_penalty prompt_logprobs prompt_temperature".split()
)
CHAT_FIELDS = SHARED_FIELDS | frozenset(
    "messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs tokens add_generation_prompt "
    "chat_template_kwargs".split()
)
COMPLETION_FIELDS = SHARED_FIELDS | frozenset(["prompt", "add_special_tokens", "echo"])
LIMITS = {"max_tokens", "max_completion_tokens"}
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id priority "
    "cache_salt spaces_between_special_tokens".split()
)
"""Fields that change nothing about what is generated."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "guided_decoding_backend": ("auto",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
}
"""Fields we know but do not implement: only the value that changes nothing is accepted."""


def parse_body(data: bytes) -> Json:
    """A JSON object, or a 400."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


def parse_wish(body: Json, *, chat: bool, room: int, vocab: int, default_seed: Callable[[], int]) -> Wish:
    """Check everything but the prompt. `room` is the most tokens that fit behind the prompt.

    Raises `ApiError` naming the field that is unknown, of the wrong type or out of range.
    """
    _check_fields(body, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    top, logprobs = _parse_logprobs(body, chat)
    stream, echo = _flag(body, "stream", False), not chat and _flag(body, "echo", False)
    score = _integer(body, "prompt_logprobs", top if echo and logprobs else None, 0, MAX_TOP_LOGPROBS)
    if stream and (echo or score is not None):
        raise ApiError(f"{'echo' if echo else 'prompt_logprobs'} is not told in a stream: set stream to false")
    limit = _parse_limit(body, chat, lowest=1 if score is None and not echo else 0)
    min_tokens = _integer(body, "min_tokens", 0, 0) or 0
    if limit is not None and min_tokens > limit:
        raise ApiError(f"min_tokens = {min_tokens} is more than max_tokens = {limit}", param="min_tokens")
    num_choices = _integer(body, "n", 1, 1, MAX_CHOICES) or 1
    if limit == 0 and num_choices > 1:
        raise ApiError("max_tokens = 0 scores the prompt, once: set n to 1", param="n")
    seed = _integer(body, "seed", None)
    params = SamplingParams(
        max_tokens=room if limit is None else min(limit, room),
        temperature=_parse_temperature(body),
        top_p=_number(body, "top_p", 1.0, 0, 1, above=True),
        top_k=_integer(body, "top_k", -1, -1) or -1,
        min_p=_number(body, "min_p", 0.0, 0, 1),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, SMALLEST, LARGEST),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2, 2),
        min_tokens=min(min_tokens, room),
        seed=default_seed() if seed is None else seed,
        stop=_parse_stop(body),
        include_stop=_flag(body, "include_stop_str_in_output", False),
        skip_special_tokens=_flag(body, "skip_special_tokens", True),
        stop_token_ids=tuple(check_token_ids(body.get("stop_token_ids") or [], vocab, "stop_token_ids")),
        ignore_eos=_flag(body, "ignore_eos", False),
        logit_bias=_parse_bias(body, vocab),
        top_logprobs=top,
        prompt_logprobs=score,
        prompt_temperature=_number(body, "prompt_temperature", 1.0, SMALLEST, LARGEST),
    )
    return Wish(
        params=params,
        num_choices=num_choices,
        stream=stream,
        include_usage=_parse_stream_options(body, stream),
        logprobs=logprobs,
        token_ids=_flag(body, "return_token_ids", False),
        names_as_ids=_flag(body, "return_tokens_as_token_ids", False),
        tools=parse_tools(body) if chat else None,
        single_tool=not _flag(body, "parallel_tool_calls", True),
        echo=echo,
    )


def parse_tools(body: Json) -> list[Json] | None:
    """The tools that a chat may call; `ApiError` for what cannot be one."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ApiError("tools must be a list of tool definitions", param="tools")
    if choice not in (None, "auto", "none"):
        raise ApiError("tool_choice must be auto or none: this server does not force calls", param="tool_choice")
    return None if choice == "none" else tools or None


def build_requests(prompt: list[int], wish: Wish) -> list[GenerationRequest]:
    """One engine request per choice, each with its own seed; the first also scores the prompt where that is wanted."""
    params = wish.params
    requests = []
    for i in range(wish.num_choices):
        requests.append(GenerationRequest(prompt, params, wish.stream, wish.adapter))
        params = replace(params, seed=derive_seed(wish.params.seed, i + 1), prompt_logprobs=None)
    return requests


def check_prompt_length(num_tokens: int, max_model_len: int) -> int:
    """The most tokens that fit behind a prompt; clients recognise an overlong prompt by the words of this error."""
    if num_tokens == 0:
        raise ApiError("the prompt is empty")
    if num_tokens >= max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {num_tokens} tokens: "
            "shorten it.",
            kind="BadRequestError",
        )
    return max_model_len - num_tokens


def check_token_ids(ids: Any, vocab: int, name: str) -> list[int]:
    """A list of token ids of this model."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ApiError(f"{name} must be a list of token ids", param=name)
    if ids and not (0 <= min(ids) and max(ids) < vocab):
        raise ApiError(f"{name} must be below the vocabulary size {vocab}", param=name)
    return ids


def with_defaults(body: Json, defaults: Json) -> Json:
    """The request with the server's own values (`inference.sampling`) where it brings none."""
    given = {name for name, value in body.items() if value is not None}
    if given & LIMITS:
        given |= LIMITS
    added = {name: value for name, value in defaults.items() if name not in given}
    return {**body, **added} if added else body


def _check_fields(body: Json, known: frozenset[str]) -> None:
    for name in body.keys() - known - HARMLESS:
        value = body[name]
        if value is None or (name in NEUTRAL and any(value == neutral for neutral in NEUTRAL[name])):
            continue
        if name in NEUTRAL:
            raise ApiError(f"{name} = {value!r} is not supported: leave it out", param=name)
        raise ApiError(f"{name!r} is not a field this server knows: leave it out", param=name)


def _parse_logprobs(body: Json, chat: bool) -> tuple[int, bool]:
    """`(number of alternatives, whether log-probs are wanted)` of both dialects."""
    if chat:
        wanted = _flag(body, "logprobs", False)
        top = _integer(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0
        if top and not wanted:
            raise ApiError("top_logprobs needs logprobs = true", param="top_logprobs")
        return top, wanted
    number = body.get("logprobs")
    if number is None or number is False:
        return 0, False
    return (1 if number is True else _integer(body, "logprobs", 0, 0, MAX_TOP_LOGPROBS) or 0), True


def _parse_temperature(body: Json) -> float:
    """0 (the most likely token) or a temperature."""
    found = _number(body, "temperature", 1.0, 0, LARGEST)
    if 0 < found < SMALLEST:
        raise ApiError(f"temperature must be 0 or at least {SMALLEST:g}, got {found!r}", param="temperature")
    return found


def _parse_limit(body: Json, chat: bool, lowest: int) -> int | None:
    """The most tokens to draw. None in a chat: as many as fit; OpenAI's default for plain completions is 16."""
    limit = _integer(body, "max_completion_tokens", None, lowest) if chat else None
    limit = limit if limit is not None else _integer(body, "max_tokens", None, lowest)
    return 16 if limit is None and not chat else limit


def _parse_stream_options(body: Json, stream: bool) -> bool:
    """Whether usage is wanted at the end of the stream."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise ApiError("stream_options belong to a request with stream = true", param="stream_options")
    for name, value in options.items():
        if name != "include_usage" and value:
            raise ApiError(f"stream_options.{name} is not offered: leave it out", param="stream_options")
    return _flag(options, "include_usage", False)


def _parse_stop(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError("stop must be a string or a list of strings", param="stop")
    return tuple(item for item in stops if item)


def _parse_bias(body: Json, vocab: int) -> tuple[tuple[int, float], ...]:
    bias = body.get("logit_bias") or {}
    try:
        pairs = [(int(token), float(value)) for token, value in bias.items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ApiError("logit_bias must map token ids to numbers", param="logit_bias") from error
    check_token_ids([token for token, _ in pairs], vocab, "logit_bias")
    if not all(abs(value) <= LARGEST for _, value in pairs):
        raise ApiError(f"logit_bias must be from {-LARGEST:g} to {LARGEST:g}", param="logit_bias")
    return tuple(pairs)


def _number(body: Json, name: str, default: float, low: float, high: float, above: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    # `not (a <= b)` rather than `a > b`: NaN must fail as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ApiError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
    if above and value == low:
        raise ApiError(f"{name} must be above {low:g}", param=name)
    return float(value)


def _integer(body: Json, name: str, default: int | None, low: int | None = None, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
        bounds = (f" of at least {low}" if low is not None else "") + (f" and at most {high}" if high else "")
        raise ApiError(f"{name} must be an integer{bounds}, got {value!r}", param=name)
    return value


def _flag(body: Json, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {value!r}", param=name)
    return value
