"""Parses and validates OpenAI requests into engine requests; unsupported fields are rejected, not ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from prime_rl.client.constraints import find_constraint
from prime_rl.inference.engine import GenerationRequest, SamplingParams, derive_seed
from rollouts.training.datasets.chat import RENDER_OPTIONS

Json = dict[str, Any]
MAX_CHOICES = 256
MAX_TOP_LOGPROBS = 100
MAX_STOPS = 64
"""Maximum number of stop strings per request."""
MAX_STOP_IDS = 1024
"""Maximum number of stop token ids; some models have hundreds of special tokens."""
MAX_STOP_LENGTH = 1024
"""Maximum length of a stop string in characters; streams buffer as many."""
MAX_NAME_LENGTH = 256
"""Maximum length in characters of names and ids that are echoed in responses."""
MAX_MESSAGE_LENGTH = 400
"""Maximum length of an error message in characters; the middle of a longer one is omitted."""
SMALLEST, LARGEST = 1e-6, 1e6
"""Range of temperatures, repetition penalties and biases that keeps logits finite."""


class Range(NamedTuple):
    """Default and bounds of a numeric field; `above`: the lower bound itself is excluded."""

    default: float | None
    low: float | None = None
    high: float | None = None
    above: bool = False


NUMBERS = {
    "temperature": Range(1.0, 0, LARGEST),
    "top_p": Range(1.0, 0, 1, above=True),
    "min_p": Range(0.0, 0, 1),
    "repetition_penalty": Range(1.0, SMALLEST, LARGEST),
    "presence_penalty": Range(0.0, -2, 2),
    "frequency_penalty": Range(0.0, -2, 2),
    "prompt_temperature": Range(1.0, SMALLEST, LARGEST),
}
INTEGERS = {
    "max_tokens": Range(None, 0),
    "max_completion_tokens": Range(None, 0),
    "min_tokens": Range(0, 0),
    "top_k": Range(-1, -1),
    "seed": Range(None),
    "n": Range(1, 1, MAX_CHOICES),
    "top_logprobs": Range(0, 0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": Range(None, 0, MAX_TOP_LOGPROBS),
}


class ApiError(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, kind: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(shorten(message))
        self.status, self.retry_after_s = status, retry_after_s
        self.param = None if param is None else shorten(param)
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    def body(self) -> Json:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def shorten(text: str) -> str:
    """Truncate the middle of a text longer than `MAX_MESSAGE_LENGTH` characters."""
    return (
        text
        if len(text) <= MAX_MESSAGE_LENGTH
        else f"{text[: MAX_MESSAGE_LENGTH // 2]} ... {text[-MAX_MESSAGE_LENGTH // 2 :]}"
    )


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request: sampling parameters and response format."""

    params: SamplingParams
    num_choices: int
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool  # also return token ids
    names_as_ids: bool  # show a token as `token_id:N`
    tools: list[Json] | None
    single_tool: bool
    seeded: bool = True  # the request has a seed, which then is that of all its prompts
    echo: bool = False
    shows_scores: bool = False  # return the log-probs of the prompt in vLLM's format
    adapter: str | None = None
    opened: bool = False  # the prompt ends inside a reasoning block
    continues: bool = False  # the completion continues the text of the prompt


SHARED_FIELDS = frozenset(
    "model max_tokens temperature top_p top_k min_p repetition_penalty min_tokens seed stop stop_token_ids ignore_eos "
    "logit_bias n stream stream_options logprobs return_token_ids return_tokens_as_token_ids skip_special_tokens "
    "include_stop_str_in_output presence_penalty frequency_penalty prompt_logprobs prompt_temperature response_format "
    "return_sampling_support".split()
)
CHAT_FIELDS = SHARED_FIELDS | frozenset(
    "messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs tokens add_generation_prompt "
    "chat_template_kwargs".split()
)
COMPLETION_FIELDS = SHARED_FIELDS | frozenset(["prompt", "add_special_tokens", "echo"])
LIMITS = {"max_tokens", "max_completion_tokens"}
NO_GRAMMAR = ("ignore_eos", "min_tokens")
"""Fields that cannot be combined with a grammar."""
HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id priority "
    "cache_salt spaces_between_special_tokens".split()
)
"""Accepted fields without effect on the output."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "guided_decoding_backend": ("auto",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
}
"""Known but unimplemented fields: only the neutral value is accepted."""


def parse_body(data: bytes) -> Json:
    """Parse a JSON object; HTTP 400 otherwise."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


def parse_request(
    body: Json, *, chat: bool, max_new_tokens: int, vocab: int, default_seed: Callable[[], int]
) -> ParsedRequest:
    """Validate everything but the prompt. `max_new_tokens` is the maximum number of completion tokens of any prompt.

    `ApiError` names a field that is unknown, of the wrong type or out of range.
    """
    _check_fields(body, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    top, logprobs = _parse_logprobs(body, chat)
    stream, echo = read_flag(body, "stream", False), not chat and read_flag(body, "echo", False)
    score = read_integer(body, "prompt_logprobs")
    limit = _parse_limit(body, chat, lowest=1 if score is None and not echo else 0)
    shows_scores = score is not None
    if echo and (logprobs or limit == 0):
        score = max(score or 0, top)
    if stream and (echo or score is not None):
        raise ApiError(f"{'echo' if echo else 'prompt_logprobs'} does not support streaming: set stream to false")
    if stream and read_flag(body, "return_sampling_support", False):
        raise ApiError("return_sampling_support does not support streaming: set stream to false")
    min_tokens = read_integer(body, "min_tokens") or 0
    if limit is not None and min_tokens > limit:
        raise ApiError(f"min_tokens = {min_tokens} exceeds max_tokens = {limit}", param="min_tokens")
    num_choices = read_integer(body, "n") or 1
    if limit == 0 and num_choices > 1:
        raise ApiError("max_tokens = 0 scores the prompt only: set n to 1", param="n")
    seed = read_integer(body, "seed")
    numbers: dict[str, Any] = {name: _number(body, name) for name in NUMBERS}
    if 0 < numbers["temperature"] < SMALLEST:
        raise ApiError(
            f"temperature must be 0 or at least {SMALLEST:g}, got {numbers['temperature']!r}", param="temperature"
        )
    params = SamplingParams(
        **numbers,
        max_tokens=max_new_tokens if limit is None else min(limit, max_new_tokens),
        top_k=read_integer(body, "top_k") or -1,
        min_tokens=min(min_tokens, max_new_tokens),
        seed=default_seed() if seed is None else seed,
        stop=_parse_stop(body),
        include_stop=read_flag(body, "include_stop_str_in_output", False),
        skip_special_tokens=read_flag(body, "skip_special_tokens", True),
        stop_token_ids=_parse_stop_ids(body, vocab),
        ignore_eos=read_flag(body, "ignore_eos", False),
        logit_bias=_parse_bias(body, vocab),
        top_logprobs=top,
        prompt_logprobs=score,
        return_support=read_flag(body, "return_sampling_support", False),
    )
    return ParsedRequest(
        params=params,
        num_choices=num_choices,
        stream=stream,
        include_usage=_parse_stream_options(body, stream),
        logprobs=logprobs,
        token_ids=read_flag(body, "return_token_ids", False),
        names_as_ids=read_flag(body, "return_tokens_as_token_ids", False),
        tools=parse_tools(body) if chat else None,
        single_tool=not read_flag(body, "parallel_tool_calls", True) or isinstance(body.get("tool_choice"), dict),
        seeded=seed is not None,
        echo=echo,
        shows_scores=shows_scores,
        continues=not chat,
    )


def parse_tools(body: Json) -> list[Json] | None:
    """Tool definitions of a chat; `ApiError` for invalid ones."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ApiError("tools must be a list of tool definitions", param="tools")
    named = _function_name(choice) if isinstance(choice, dict) else None
    if named is None and choice not in (None, "auto", "none", "required"):
        raise ApiError(
            'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if forces_call(body) and not find_callable(body):
        wanted = "tools" if named is None else f"a tool named {named!r}"
        raise ApiError(f"tool_choice requires a call: add {wanted}", param="tool_choice")
    return None if choice == "none" else tools or None


def forces_call(body: Json) -> bool:
    """Whether `tool_choice` requires a call."""
    return body.get("tool_choice") not in (None, "auto", "none")


def find_callable(body: Json) -> list[Json]:
    """The tools that a grammar may call: all, or the one that `tool_choice` names; `ApiError` for an unnamed one."""
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    if any(_function_name(tool) is None for tool in tools):
        raise ApiError("every tool must be a function with a name, and its parameters a JSON schema", param="tools")
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    return [] if choice == "none" else [tool for tool in tools if named in (None, _function_name(tool))]


def _function_name(tool: Json) -> str | None:
    """`tool.function.name`; None unless it is a string and the parameters, if any, are an object."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return None
    if not isinstance(function.get("parameters"), dict | None):
        return None
    name = function.get("name")
    return name if isinstance(name, str) else None


def parse_chat(body: Json, max_model_len: int) -> tuple[list[Json], list[Json] | None, bool, Json]:
    """`(messages, tools, add_generation_prompt, template options)` of a chat; `ApiError` for invalid ones."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ApiError("messages must be a non-empty list of messages", param="messages")
    if len(messages) > max_model_len:  # every message takes at least one token
        raise prompt_too_long(max_model_len, len(messages), at_least=True)
    options = body.get("chat_template_kwargs")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise ApiError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if taken := sorted(options.keys() & RENDER_OPTIONS):
        raise ApiError(f"chat_template_kwargs.{taken[0]} cannot be set: leave it out", param="chat_template_kwargs")
    return messages, parse_tools(body), read_flag(body, "add_generation_prompt", True), options


def build_requests(
    prompt: list[int], parsed: ParsedRequest, max_new_tokens: int, context: list[int]
) -> list[GenerationRequest]:
    """Build one engine request per choice, each with its own seed; only the first scores the prompt, if requested.

    `max_new_tokens` is the maximum number of completion tokens of this prompt, `context` as in the engine request.
    """
    max_tokens, min_tokens = (
        min(max_new_tokens, limit) for limit in (parsed.params.max_tokens, parsed.params.min_tokens)
    )
    params = replace(parsed.params, max_tokens=max_tokens, min_tokens=min_tokens)
    requests = []
    for i in range(parsed.num_choices):
        requests.append(GenerationRequest(prompt, params, parsed.stream, parsed.adapter, context))
        params = replace(params, seed=derive_seed(parsed.params.seed, i + 1), prompt_logprobs=None)
    return requests


def check_prompt_length(num_tokens: int, max_model_len: int) -> int:
    """Return the maximum number of completion tokens; clients detect context overflow by the text of this error."""
    if num_tokens == 0:
        raise ApiError("the prompt is empty")
    if num_tokens >= max_model_len:
        raise prompt_too_long(max_model_len, num_tokens)
    return max_model_len - num_tokens


def prompt_too_long(max_model_len: int, num_tokens: int, *, at_least: bool = False) -> ApiError:
    """The context-overflow error; with `at_least` the exact prompt length is unknown."""
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return ApiError(
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has {count} tokens: "
        "shorten it.",
        kind="BadRequestError",
    )


def check_token_ids(ids: Any, vocab: int, name: str, max_model_len: int | None = None) -> list[int]:
    """Validate a list of token ids; one longer than `max_model_len` is rejected without checking its ids."""
    if isinstance(ids, list) and max_model_len is not None and len(ids) > max_model_len:
        raise prompt_too_long(max_model_len, len(ids))
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ApiError(f"{name} must be a list of token ids", param=name)
    if ids and not (0 <= min(ids) and max(ids) < vocab):
        raise ApiError(f"{name} must be below the vocabulary size {vocab}", param=name)
    return ids


def with_defaults(body: Json, defaults: Json, *, chat: bool) -> Json:
    """Fill missing request fields with the server defaults (`inference.sampling`), except fields of chats alone, or of
    completions alone, in the other kind of request, and those that a grammar excludes.

    Default numbers of tokens are changed where they would contradict the request.
    """
    others = COMPLETION_FIELDS - CHAT_FIELDS if chat else CHAT_FIELDS - COMPLETION_FIELDS
    if find_constraint(body) is not None:
        others |= set(NO_GRAMMAR)
    given = {name for name, value in body.items() if value is not None}
    if given & LIMITS:
        given |= LIMITS
    added = {name: value for name, value in defaults.items() if name not in given | others}
    if not added:
        return body
    merged = {**body, **added}
    min_tokens = merged.get("min_tokens")
    if type(min_tokens) is int and "min_tokens" not in added:
        merged |= {name: max(merged[name], min_tokens) for name in LIMITS & added.keys() if type(merged[name]) is int}
    elif type(min_tokens) is int and (limit := _parse_limit(merged, chat, lowest=0)) is not None:
        merged["min_tokens"] = min(min_tokens, limit)
    return merged


def _check_fields(body: Json, known: frozenset[str]) -> None:
    for name in body.keys() - known - HARMLESS:
        value = body[name]
        if value is None or (name in NEUTRAL and any(value == neutral for neutral in NEUTRAL[name])):
            continue
        if name in NEUTRAL:
            raise ApiError(f"{name} = {value!r} is not supported: leave it out", param=name)
        raise ApiError(f"unknown field {name!r}: leave it out", param=name)


def _parse_logprobs(body: Json, chat: bool) -> tuple[int, bool]:
    """`(number of top log-probs, whether log-probs are requested)`, for chats and completions."""
    if chat:
        is_requested = read_flag(body, "logprobs", False)
        top = read_integer(body, "top_logprobs") or 0
        if top and not is_requested:
            raise ApiError("top_logprobs needs logprobs = true", param="top_logprobs")
        return top, is_requested
    number = body.get("logprobs")
    if number is None or number is False:
        return 0, False
    return (1 if number is True else read_integer(body, "logprobs", INTEGERS["top_logprobs"]) or 0), True


def _parse_limit(body: Json, chat: bool, lowest: int) -> int | None:
    """Maximum number of completion tokens; None: unlimited. A completion without the field has OpenAI's default, 16."""
    limit = read_integer(body, "max_completion_tokens", Range(None, lowest)) if chat else None
    limit = limit if limit is not None else read_integer(body, "max_tokens", Range(None, lowest))
    return 16 if not chat and "max_tokens" not in body else limit


def _parse_stream_options(body: Json, stream: bool) -> bool:
    """Whether the stream ends with a usage chunk."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise ApiError("stream_options requires stream = true", param="stream_options")
    for name, value in options.items():
        if name != "include_usage" and value:
            raise ApiError(f"stream_options.{name} is not supported: leave it out", param="stream_options")
    return read_flag(options, "include_usage", False)


def _parse_stop(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError("stop must be a string or a list of strings", param="stop")
    if len(stops) > MAX_STOPS or not all(1 <= len(item) <= MAX_STOP_LENGTH for item in stops):
        raise ApiError(
            f"stop must have at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters: shorten it", param="stop"
        )
    return tuple(stops)


def _parse_stop_ids(body: Json, vocab: int) -> tuple[int, ...]:
    ids = body.get("stop_token_ids")
    if isinstance(ids, list) and len(ids) > MAX_STOP_IDS:
        raise ApiError(f"stop_token_ids must have at most {MAX_STOP_IDS} ids: shorten it", param="stop_token_ids")
    return tuple(check_token_ids([] if ids is None else ids, vocab, "stop_token_ids"))


def _parse_bias(body: Json, vocab: int) -> tuple[tuple[int, float], ...]:
    bias = {} if body.get("logit_bias") is None else body["logit_bias"]
    try:
        if len(bias) > vocab:
            raise ApiError(f"logit_bias must have at most {vocab} tokens: shorten it", param="logit_bias")
        pairs = [(int(token), float(value)) for token, value in bias.items()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ApiError("logit_bias must map token ids to numbers", param="logit_bias") from error
    check_token_ids([token for token, _ in pairs], vocab, "logit_bias")
    if not all(abs(value) <= LARGEST for _, value in pairs):
        raise ApiError(f"logit_bias must be from {-LARGEST:g} to {LARGEST:g}", param="logit_bias")
    return tuple(pairs)


def _number(body: Json, name: str) -> float:
    default, low, high, above = NUMBERS[name]
    assert default is not None and low is not None and high is not None
    value = body.get(name)
    if value is None:
        return default
    # `not (a <= b)` rather than `a > b`: NaN must fail as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ApiError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", param=name)
    if above and value == low:
        raise ApiError(f"{name} must be above {low:g}", param=name)
    return float(value)


def read_integer(body: Json, name: str, allowed: Range | None = None) -> int | None:
    """Integer field `name`, within `INTEGERS[name]` unless `allowed` is given; null is the default."""
    default, low, high, _ = allowed or INTEGERS[name]
    value = body.get(name)
    if value is None:
        return None if default is None else int(default)
    if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
        bounds = (f" of at least {low}" if low is not None else "") + (f" and at most {high}" if high else "")
        raise ApiError(f"{name} must be an integer{bounds}, got {value!r}", param=name)
    return value


def read_flag(body: Json, name: str, default: bool) -> bool:
    """Boolean field `name`."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {value!r}", param=name)
    return value
