"""Constrained sampling: JSON schemas and forced tool calls as grammars, which llguidance turns into token masks.

A grammar is text in llguidance's dialect of Lark. In every position, tokens that no valid completion has there are
excluded before sampling. Source: https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy.typing import NDArray

from prime_rl.inference.request_parsing import NO_GRAMMAR, ApiError, Json, ParsedRequest, find_callable, forces_call
from prime_rl.inference.tool_parser import TOOL_DIALECTS

INSTALL = "pip install 'prime-rl[grammar]'"
MAX_CALLS = 16
"""Maximum number of parallel calls of one forced completion."""
CACHED_GRAMMARS = 128
JSON_OPTIONS: Json = {"whitespace_pattern": r"( ?|\n {0,16})"}
"""Whitespace between JSON tokens is bounded: small models would otherwise fill the completion with it."""


def build_grammar(
    schema: Json | None, tools: list[Json], dialect: str, added: Mapping[str, int], *, single: bool
) -> str:
    """Build the grammar of completions that are JSON of `schema`, or calls of `tools` (only one if `single`).

    `added` maps the tokenizer's added tokens to ids: the marks of `dialect` are single tokens in some vocabularies.
    """
    rules = [] if schema is None else [f"json: {_json_rule(schema)}"]
    if tools:
        rules += _call_rules(tools, dialect, added, single)
    starts = [name for name, given in (("json", schema is not None), ("calls", bool(tools))) if given]
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


def _call_rules(tools: list[Json], dialect: str, added: Mapping[str, int], single: bool) -> list[str]:
    """Rules for calls in the format of `TOOL_DIALECTS[dialect]`."""
    form = TOOL_DIALECTS[dialect]
    opening, closing = (" ".join(_literal(part, added) for part in parts) for parts in (form.opening, form.closing))
    more = "" if single else f" ({_literal(form.separator, added)} call){{0,{MAX_CALLS - 1}}}"
    names = " | ".join(f"tool{i}" for i in range(len(tools)))
    rules = [f"calls: call{more}", f"call: {opening} ({names}) {closing}"]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, {json.dumps(form.arguments)}: '
        parameters = function.get("parameters") or {"type": "object"}
        rules += [f'tool{i}: {_literal(head, {})} arguments{i} "}}"', f"arguments{i}: {_json_rule(parameters)}"]
    return rules


def _json_rule(schema: Json) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def _literal(text: str, added: Mapping[str, int]) -> str:
    return f"<[{added[text]}]>" if text in added else json.dumps(text)


def read_grammar(
    body: Json, parsed: ParsedRequest, dialect: str, added: Mapping[str, int], *, chat: bool
) -> str | None:
    """Build the grammar of a request; `ApiError` for options that cannot be combined with one."""
    forced = chat and forces_call(body)
    schema = parse_response_format(body)
    if schema is None and not forced:
        return None
    name = "tool_choice" if forced else "response_format"
    for option in NO_GRAMMAR:
        if getattr(parsed.params, option):
            raise ApiError(f"{option} cannot be combined with {name}: leave one of them out", param=option)
    if parsed.opened:
        raise ApiError(f"{name} needs a prompt without open reasoning: disable it in chat_template_kwargs", param=name)
    tools = find_callable(body) if chat else []
    return build_grammar(None if forced else schema, tools, dialect, added, single=parsed.single_tool)


def parse_response_format(body: Json) -> Json | None:
    """The JSON schema of `response_format`, None for plain text; `ApiError` for an invalid one."""
    given = body.get("response_format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ApiError("response_format.type must be text, json_object or json_schema", param="response_format")
    wrapper = given.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise ApiError("response_format.json_schema.schema must be a JSON schema", param="response_format")
    return schema


class GrammarState:
    """The position of one completion in its grammar.

    A copied matcher shares its lexer with the other copies, and with it an error of one of them, such as a limit of its
    complexity. A completion with an error therefore goes on with a matcher of its own, which `compile` returns.
    """

    def __init__(self, matcher: Any, vocab: int, compile: Callable[[], Any]) -> None:
        self._matcher, self._vocab, self._compile = matcher, vocab, compile
        self._tokens: list[int] = []
        self._is_own = False

    @property
    def error(self) -> str:
        """Why the grammar cannot be continued, such as a limit of its complexity; empty if it can."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else ""

    def forbidden(self) -> Bool[NDArray[np.bool_], " vocab"]:
        """Whether each token is excluded from the next position; all are after an error."""
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # computing a mask may reach a limit; that of an error allows EOS
            if self._is_own:
                return np.ones(self._vocab, dtype=np.bool_)
            self._matcher, self._is_own = self._compile(), True
            for token in self._tokens:
                self._matcher.consume_token(token)
            return self.forbidden()
        allowed = np.unpackbits(words, count=self._vocab, bitorder="little")
        return np.asarray(allowed == 0)

    def advance(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)
        self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars for one tokenizer; thread-safe. The first use reads the vocabulary (0.7 s for 49k tokens)."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab, self._eos_ids = tokenizer, vocab, list(eos_ids)
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, grammar: str) -> GrammarState:
        """The start of a completion; compiled grammars are cached. `ValueError` for an invalid grammar."""
        with self._lock:
            matcher = self._compiled.pop(grammar, None)
            if matcher is None:
                matcher = self._compile(grammar)
            self._compiled[grammar] = matcher
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self._vocab, partial(self._replace, grammar, matcher))

    def _replace(self, grammar: str, failed: Any) -> Any:
        """A new matcher; `failed`, of whose copies one has an error, is not copied any more."""
        with self._lock:
            if self._compiled.get(grammar) is failed:
                del self._compiled[grammar]
            return self._compile(grammar)

    def _compile(self, grammar: str) -> Any:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise ValueError(f"response_format and forced tool calls need llguidance: {INSTALL}") from error
        if self._vocabulary is None:
            core = getattr(self._tokenizer, "backend_tokenizer", None)
            if core is None or not self._eos_ids:
                missing = "an EOS token" if core is not None else "a tokenizer.json"
                raise ValueError(f"response_format and forced tool calls need {missing}, which the model lacks")
            self._vocabulary = LLTokenizer(core.to_str(), n_vocab=self._vocab, eos_token=self._eos_ids)
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            reason = " ".join(str(matcher.get_error()).split())
            raise ValueError(f"the JSON schema of response_format or of a tool is not supported: {reason}")
        return matcher
