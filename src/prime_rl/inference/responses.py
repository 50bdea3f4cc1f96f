"""From finished completions to the JSON of the OpenAI API, as plain dicts (no model per token, which costs most)."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.inference.engine import Output, Progress, TopLogprobs
from prime_rl.inference.requests import ApiError, Wish
from prime_rl.inference.text import TOOL_OPEN, Decode, Detokenizer, TokenNames, parse_tool_calls

Json = dict[str, Any]


@dataclass
class Writer:
    """Writes answers of one served model."""

    model: str
    decode: Decode
    names: TokenNames
    _run: str = field(default_factory=lambda: os.urandom(6).hex())
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def head(self, kind: str, prefix: str) -> Json:
        """The fields every answer begins with."""
        number = f"{prefix}-{self._run}{next(self._numbers):x}"
        return {"id": number, "object": kind, "created": int(time.time()), "model": self.model}

    def chat(self, prompt: list[int], outputs: list[Output], wish: Wish) -> Json:
        """A `chat.completion`."""
        answer = self.head("chat.completion", "chatcmpl")
        answer["choices"] = [self._chat_choice(i, output, wish) for i, output in enumerate(outputs)]
        answer["usage"] = usage(len(prompt), outputs)
        if wish.token_ids:
            answer["prompt_token_ids"] = prompt
        return answer

    def completion(self, prompts: list[list[int]], outputs: list[Output], wish: Wish) -> Json:
        """A `text_completion`; `outputs` are all choices of the first prompt, then those of the next."""
        answer = self.head("text_completion", "cmpl")
        answer["choices"] = []
        for i, output in enumerate(outputs):
            choice = self._end(i, output, wish)
            choice["text"] = self.text(output)
            choice["logprobs"] = self.completion_logprobs(output, wish) if wish.logprobs else None
            if wish.token_ids:
                choice["prompt_token_ids"] = prompts[i // wish.num_choices]
            answer["choices"].append(choice)
        answer["usage"] = usage(sum(map(len, prompts)), outputs)
        return answer

    def text(self, output: Output) -> str:
        """What the user reads: without the token that ended the answer, up to the stop string."""
        if output.text is not None:
            return output.text
        params = output.request.params
        ends = output.finish_reason == "stop" and not params.include_stop
        return self.decode(output.token_ids[:-1] if ends else output.token_ids, params.skip_special_tokens)

    def chat_logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs], wish: Wish
    ) -> Json:
        """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`."""
        names, as_ids = self.names, wish.names_as_ids

        def entry(token: int, logprob: float) -> Json:
            text, raw = names[token]
            return {"token": f"token_id:{token}" if as_ids else text, "logprob": logprob, "bytes": raw}

        content = [entry(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        for i, item in enumerate(content):
            item["top_logprobs"] = [entry(*pair) for pair in tops[i]] if tops else []
        return {"content": content, "refusal": None}

    def completion_logprobs(self, output: Output | Progress, wish: Wish, offset: int = 0) -> Json:
        """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`."""

        def name(token: int) -> str:
            return f"token_id:{token}" if wish.names_as_ids else self.names[token][0]

        tokens = [name(token) for token in output.token_ids]
        offsets = list(itertools.accumulate((len(token) for token in tokens), initial=offset))[:-1]
        tops = [{name(token): logprob for token, logprob in top} for top in output.top_logprobs]
        # Clients expect the sampled token among its alternatives even when it is none of the most likely ones.
        for i, top in enumerate(tops):
            top.setdefault(tokens[i], output.logprobs[i])
        return {
            "tokens": tokens,
            "token_logprobs": output.logprobs,
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }

    def message(self, text: str, wish: Wish) -> tuple[Json, bool]:
        """The assistant's message, and whether it calls tools."""
        if not wish.tools or TOOL_OPEN not in text:
            return {"role": "assistant", "content": text}, False
        content, calls = parse_tool_calls(text)
        if not calls:
            return {"role": "assistant", "content": text}, False
        return {"role": "assistant", "content": content, "tool_calls": calls[:1] if wish.single_tool else calls}, True

    def _chat_choice(self, index: int, output: Output, wish: Wish) -> Json:
        choice = self._end(index, output, wish)
        choice["message"], calls = self.message(self.text(output), wish)
        if calls and output.finish_reason == "stop":
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = (
            self.chat_logprobs(output.token_ids, output.logprobs, output.top_logprobs, wish) if wish.logprobs else None
        )
        return choice

    def _end(self, index: int, output: Output, wish: Wish) -> Json:
        """How a choice ended, which versions drew it, and its token ids if wanted."""
        check_output(output)
        choice: Json = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "versions": output.versions,
        }
        if wish.token_ids:
            choice["token_ids"] = output.token_ids
        return choice


@dataclass
class ChoiceStream:
    """Writes the pieces of one streamed choice; what could still become a stop string or a tool call is held back."""

    writer: Writer
    index: int
    wish: Wish
    chat: bool
    _text: str = ""
    _sent: int = 0
    _tokens_sent: int = 0
    _detokenizer: Detokenizer | None = None

    def progress(self, event: Progress) -> Json:
        """A piece with what `event` adds."""
        params = event.request.params
        if self._detokenizer is None:
            self._detokenizer = Detokenizer(self.writer.decode, params.skip_special_tokens)
        for token in event.token_ids:
            self._text += self._detokenizer.add(token)
        held = 0 if params.include_stop else max((len(stop) - 1 for stop in params.stop), default=0)
        safe = len(self._text) - held
        if self.wish.tools:
            at = self._text.find(TOOL_OPEN)
            safe = min(safe, at if at >= 0 else len(self._text) - len(TOOL_OPEN) + 1)
        piece = self._text[self._sent : max(safe, self._sent)]
        self._sent += len(piece)
        self._tokens_sent = event.start + len(event.token_ids)
        return self._piece(piece, event)

    def end(self, output: Output) -> Json:
        """The last piece: the rest of the text, tool calls, and how it ended."""
        check_output(output)
        text = self.writer.text(output)
        message, calls = self.writer.message(text, self.wish) if self.chat else ({"content": text}, False)
        rest = Progress(
            output.request,
            self._tokens_sent,
            output.token_ids[self._tokens_sent :],
            output.logprobs[self._tokens_sent :],
            output.top_logprobs[self._tokens_sent :],
        )
        choice = self._piece((message["content"] or "")[self._sent :], rest)
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            choice["delta"]["tool_calls"] = numbered
        choice["finish_reason"] = "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason
        choice["stop_reason"], choice["versions"] = output.stop_reason, output.versions
        return choice

    def _piece(self, text: str, event: Progress) -> Json:
        choice: Json = {"index": self.index, "finish_reason": None, "logprobs": None}
        if self.chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        if self.wish.logprobs:
            choice["logprobs"] = (
                self.writer.chat_logprobs(event.token_ids, event.logprobs, event.top_logprobs, self.wish)
                if self.chat
                else self.writer.completion_logprobs(event, self.wish, self._sent)
            )
        if self.wish.token_ids:
            choice["token_ids"] = event.token_ids
        return choice


def usage(num_prompt: int, outputs: list[Output]) -> Json:
    """Token counts of an answer."""
    drawn = sum(len(output.token_ids) for output in outputs)
    return {"prompt_tokens": num_prompt, "completion_tokens": drawn, "total_tokens": num_prompt + drawn}


def check_output(output: Output) -> None:
    """A completion that broke off inside the engine is an error of the server, not an answer."""
    if output.finish_reason == "error":
        raise ApiError(f"generation failed: {output.stop_reason}", status=500)
