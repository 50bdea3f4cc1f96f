"""Builds OpenAI API responses from finished completions, as plain dicts (pydantic models per token are too slow)."""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.inference.adapters import POLICY
from prime_rl.inference.detokenizer import (
    UNFINISHED,
    Decode,
    Detokenizer,
    TokenNames,
    accumulate_offsets,
    decode_after,
)
from prime_rl.inference.engine import Output, StreamUpdate, TopLogprobs
from prime_rl.inference.intake import RETRY_AFTER_S
from prime_rl.inference.request_parsing import ApiError, ParsedRequest
from prime_rl.inference.tool_parser import MessageParser

Json = dict[str, Any]


@dataclass(frozen=True)
class EchoedPrompt:
    """The text of a prompt, and where in it each token begins; without offsets, no log-probs are asked for."""

    text: str
    offsets: list[int]


@dataclass
class Writer:
    """Builds the responses of one served model."""

    model: str
    decode: Decode
    names: TokenNames
    parser: MessageParser = field(default_factory=MessageParser)
    _run: str = field(default_factory=lambda: os.urandom(6).hex())
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def head(self, kind: str, prefix: str, adapter: str | None = None) -> Json:
        """Fields common to all responses; `model` is the served name, or that of an adapter beside the model."""
        number = f"{prefix}-{self._run}{next(self._numbers):x}"
        model = self.model if adapter in (None, POLICY) else adapter
        return {"id": number, "object": kind, "created": int(time.time()), "model": model}

    def chat(self, prompt: list[int], outputs: list[Output], parsed: ParsedRequest) -> Json:
        """Build a `chat.completion`."""
        answer = self.head("chat.completion", "chatcmpl", parsed.adapter)
        answer["choices"] = [self._chat_choice(i, output, parsed) for i, output in enumerate(outputs)]
        answer["usage"] = usage([prompt], outputs)
        answer.update(self.prompt_scores(prompt, outputs[0], parsed))
        if parsed.token_ids:
            answer["prompt_token_ids"] = prompt
        return answer

    def completion(
        self,
        prompts: list[list[int]],
        outputs: list[Output],
        parsed: ParsedRequest,
        echoed: Sequence[EchoedPrompt] = (),
    ) -> Json:
        """Build a `text_completion`; `outputs` are ordered by prompt, then by choice. `echoed`: prompts to repeat."""
        answer = self.head("text_completion", "cmpl", parsed.adapter)
        answer["choices"] = []
        for i, output in enumerate(outputs):
            prompt = prompts[i // parsed.num_choices]
            choice = self._end(i, output, parsed)
            choice["text"] = self.text(output)
            choice["logprobs"] = None
            if parsed.logprobs:
                choice["logprobs"] = self.completion_logprobs(
                    output, parsed, self._find_offsets(output, choice["text"])
                )
            if echoed:
                scored = outputs[i - i % parsed.num_choices]
                self._prepend(choice, prompt, echoed[i // parsed.num_choices], scored, parsed)
            choice.update(self.prompt_scores(prompt, output, parsed))
            if parsed.token_ids:
                choice["prompt_token_ids"] = prompt
            answer["choices"].append(choice)
        answer["usage"] = usage(prompts, outputs)
        return answer

    def prompt_scores(self, prompt: list[int], output: Output, parsed: ParsedRequest) -> Json:
        """Prompt log-probs in vLLM's format; `prompt_tail_mass` is the probability outside the top k."""
        scores = output.prompt_logprobs
        if scores is None or not parsed.shows_scores:
            return {}

        def entry(token: int, logprob: float, rank: int | None) -> Json:
            return {"logprob": logprob, "rank": rank, "decoded_token": self.names[token][0]}

        rows: list[Json | None] = [None]
        for token, logprob, top in zip(prompt[1:], scores.logprobs, scores.top_logprobs, strict=True):
            row = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(top, 1)}
            row.setdefault(str(token), entry(token, logprob, None))
            rows.append(row)
        return {"prompt_logprobs": rows, "prompt_tail_mass": [None, *scores.tail_mass]}

    def _prepend(
        self, choice: Json, prompt: list[int], echoed: EchoedPrompt, scored: Output, parsed: ParsedRequest
    ) -> None:
        """`echo`: prepend the prompt to the text and the log-probs."""
        choice["text"] = echoed.text + choice["text"]
        scores = scored.prompt_logprobs
        if not parsed.logprobs or scores is None:
            return
        tops = [top[: parsed.params.top_logprobs] for top in scores.top_logprobs]  # prompt_logprobs may have more
        part = StreamUpdate(scored.request, 0, prompt[1:], scores.logprobs, tops)
        before, after = self.completion_logprobs(part, parsed, []), choice["logprobs"]
        choice["logprobs"] = {
            "tokens": [self._name(prompt[0], parsed), *before["tokens"], *after["tokens"]],
            "token_logprobs": [None, *before["token_logprobs"], *after["token_logprobs"]],
            "top_logprobs": [None, *before["top_logprobs"], *after["top_logprobs"]],
            "text_offset": [*echoed.offsets, *(len(echoed.text) + offset for offset in after["text_offset"])],
        }

    def text(self, output: Output) -> str:
        """The visible text: without the stop token, up to the stop string."""
        if output.text is not None:
            return output.text
        params = output.request.params
        ends = output.finish_reason == "stop" and not params.include_stop
        tokens = output.token_ids[:-1] if ends else output.token_ids
        return decode_after(self.decode, output.request.context, tokens, params.skip_special_tokens)

    def chat_logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs], parsed: ParsedRequest
    ) -> Json:
        """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""
        names, as_ids = self.names, parsed.names_as_ids

        def entry(token: int, logprob: float) -> Json:
            text, raw = names[token]
            return {"token": f"token_id:{token}" if as_ids else text, "logprob": logprob, "bytes": raw}

        content = [entry(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        for i, item in enumerate(content):
            item["top_logprobs"] = [entry(*pair) for pair in tops[i]] if tops else []
        return {"content": content, "refusal": None}

    def _name(self, token: int, parsed: ParsedRequest) -> str:
        """A token in the log-probs of a completion; parts of characters are named by their bytes, as by OpenAI."""
        if parsed.names_as_ids:
            return f"token_id:{token}"
        text, raw = self.names[token]
        return text if UNFINISHED not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def completion_logprobs(self, output: Output | StreamUpdate, parsed: ParsedRequest, offsets: list[int]) -> Json:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`."""
        tokens = [self._name(token, parsed) for token in output.token_ids]
        tops: list[dict[str, float]] = [{} for _ in tokens]
        for found, top in zip(tops, output.top_logprobs, strict=False):
            for token, logprob in top:  # of tokens with the same text, the most likely one
                found.setdefault(self._name(token, parsed), logprob)
        # Clients expect the sampled token among its alternatives even if it is not one of the most likely.
        for i, found in enumerate(tops):
            found.setdefault(tokens[i], output.logprobs[i])
        return {
            "tokens": tokens,
            "token_logprobs": output.logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _find_offsets(self, output: Output, text: str) -> list[int]:
        """Where in the text of the completion each of its tokens begins."""
        names = [self.names[token][0] for token in output.token_ids]
        ends = list(itertools.accumulate(map(len, names), initial=0))
        if len(text) in ends[-2:] and not any(UNFINISHED in name for name in names):  # with or without the stop token
            return ends[:-1]
        request = output.request
        return accumulate_offsets(self.decode, output.token_ids, request.params.skip_special_tokens, request.context)

    def message(self, text: str, parsed: ParsedRequest) -> tuple[Json, bool]:
        """The assistant message, and whether it calls tools."""
        result = self.parser.parse(text, has_tools=bool(parsed.tools), opened=parsed.opened)
        message: Json = {"role": "assistant", "content": result.content}
        if result.reasoning is not None:
            message["reasoning_content"] = result.reasoning
        if result.calls:
            message["tool_calls"] = result.calls[:1] if parsed.single_tool else result.calls
        return message, bool(result.calls)

    def _chat_choice(self, index: int, output: Output, parsed: ParsedRequest) -> Json:
        choice = self._end(index, output, parsed)
        choice["message"], calls = self.message(self.text(output), parsed)
        if calls and output.finish_reason == "stop":
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = (
            self.chat_logprobs(output.token_ids, output.logprobs, output.top_logprobs, parsed)
            if parsed.logprobs
            else None
        )
        return choice

    def _end(self, index: int, output: Output, parsed: ParsedRequest) -> Json:
        """Index, end and, if requested, token ids of a choice."""
        return {"index": index, **describe_end(output)} | ({"token_ids": output.token_ids} if parsed.token_ids else {})


@dataclass
class ChoiceStream:
    """Builds the chunks of one streamed choice; text that may become a stop string or a tool call is buffered."""

    writer: Writer
    index: int
    parsed: ParsedRequest
    chat: bool
    _text: str = ""
    _sent: int = 0
    _sent_reasoning: int = 0
    _tokens_sent: int = 0
    _detokenizer: Detokenizer | None = None

    def progress(self, event: StreamUpdate) -> Json:
        """Build the chunk for `event`."""
        params, offsets = event.request.params, self._decode(event)
        num_buffered = 0 if params.include_stop else max((len(stop) - 1 for stop in params.stop), default=0)
        safe = self._text[: max(len(self._text) - num_buffered, 0)]
        reasoning, content = "", safe
        if self.chat:
            reasoning, content = self.writer.parser.parse_open(
                safe, has_tools=bool(self.parsed.tools), opened=self.parsed.opened
            )
        self._tokens_sent = event.start + len(event.token_ids)
        return self._piece(content, reasoning, event, offsets)

    def end(self, output: Output) -> Json:
        """Build the last chunk: remaining text, tool calls and finish reason."""
        check_output(output)
        text = self.writer.text(output)
        message, calls = self.writer.message(text, self.parsed) if self.chat else ({"content": text}, False)
        rest = slice_output(output, self._tokens_sent)
        offsets = [] if self.chat else self._decode(rest)
        choice = self._piece(message["content"] or "", message.get("reasoning_content") or "", rest, offsets)
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            choice["delta"]["tool_calls"] = numbered
        choice["finish_reason"] = "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
        choice["stop_reason"], choice["versions"] = output.stop_reason, output.versions
        return choice

    def _decode(self, event: StreamUpdate) -> list[int]:
        """Append the text of new tokens, of which some may be held back; returns where in it each one begins."""
        if self._detokenizer is None:
            request = event.request
            self._detokenizer = Detokenizer(self.writer.decode, request.params.skip_special_tokens, request.context)
        offsets = []
        for token in event.token_ids:
            offsets.append(len(self._text))
            self._text += self._detokenizer.add(token)
        return offsets

    def _piece(self, content: str, reasoning: str, event: StreamUpdate, offsets: list[int]) -> Json:
        """Build a chunk with the unsent suffixes of `content` and `reasoning`, which only grow."""
        choice: Json = {"index": self.index, "finish_reason": None, "logprobs": None}
        new, new_reasoning = content[self._sent :], reasoning[self._sent_reasoning :]
        self._sent, self._sent_reasoning = max(self._sent, len(content)), max(self._sent_reasoning, len(reasoning))
        if self.chat:
            parts = {"content": new, "reasoning_content": new_reasoning}
            choice["delta"] = {name: part for name, part in parts.items() if part}
        else:
            choice["text"] = new
        if self.parsed.logprobs:
            choice["logprobs"] = (
                self.writer.chat_logprobs(event.token_ids, event.logprobs, event.top_logprobs, self.parsed)
                if self.chat
                else self.writer.completion_logprobs(event, self.parsed, offsets)
            )
        if self.parsed.token_ids:
            choice["token_ids"] = event.token_ids
            if not self.chat and event.start == 0:
                choice["prompt_token_ids"] = event.request.prompt
        return choice


def slice_output(output: Output, start: int) -> StreamUpdate:
    """The tokens of a finished completion from `start` on."""
    return StreamUpdate(
        output.request, start, output.token_ids[start:], output.logprobs[start:], output.top_logprobs[start:]
    )


def describe_end(output: Output) -> Json:
    """Finish reason, weight versions and, if requested, sampling supports of a choice."""
    check_output(output)
    end: Json = {
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "versions": output.versions,
    }
    if output.sampling_support:
        end["sampling_support"] = base64.b64encode(output.sampling_support).decode()
    return end


def usage(prompts: list[list[int]], outputs: list[Output]) -> Json:
    """Token counts of a response; `outputs` are ordered by prompt, then by choice.

    A prompt counts once, whatever the number of its choices. So do its cached tokens: those that no choice computed.
    """
    num_prompt = sum(map(len, prompts))
    generated = sum(len(output.token_ids) for output in outputs)
    counts: Json = {"prompt_tokens": num_prompt, "completion_tokens": generated, "total_tokens": num_prompt + generated}
    num_choices = len(outputs) // len(prompts)
    groups = (outputs[start : start + num_choices] for start in range(0, len(outputs), num_choices))
    if cached := sum(min(output.num_cached for output in group) for group in groups):
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


def check_output(output: Output) -> None:
    """Raise HTTP 500 for a completion that failed in the engine, 503 if its prompt may be scored in part only."""
    if output.finish_reason == "error":
        raise ApiError(f"generation failed: {output.stop_reason}", status=500)
    if output.finish_reason == "abort" and output.request.params.prompt_logprobs is not None and not output.token_ids:
        raise ApiError("scoring was aborted: try again", status=503, retry_after_s=RETRY_AFTER_S)
