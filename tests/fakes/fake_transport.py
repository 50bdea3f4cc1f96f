"""An inference server without sockets: a tokenizer with several spellings, a template with quirks, scripted answers."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import openai

from prime_rl.utils.client import InferenceClient
from rollouts.training.types import Sample

END, OPEN = 900, 901  # end of a turn, and its beginning
PAIR = 500  # a token of two characters: PAIR + 10 a + b


def encode(text: str) -> list[int]:
    """Characters are tokens, two digits in a row are one: so text has several spellings, and only one is canonical."""
    ids, at = [], 0
    while at < len(text):
        if text[at : at + 2].isdigit() and len(text[at : at + 2]) == 2:
            ids.append(PAIR + int(text[at : at + 2]))
            at += 2
        else:
            ids.append({"|": END, "[": OPEN}.get(text[at], ord(text[at])))
            at += 1
    return ids


def decode(ids: list[int]) -> str:
    return "".join(
        f"{i - PAIR:02d}" if PAIR <= i < PAIR + 100 else {END: "", OPEN: "["}.get(i, chr(i % 256)) for i in ids
    )


@dataclass
class Wire(InferenceClient):
    """A server without sockets. `quirks`: deviations of its chat template from appending."""

    quirks: frozenset[str] = frozenset()
    script: list[dict[str, Any]] = field(default_factory=list)
    seq_len: int | None = None
    has_tokens: bool = True
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sampled: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        InferenceClient.__init__(self, "http://nobody:1/v1", seq_len=self.seq_len)
        self._logprobs = itertools.count(1)

    def render(self, messages: list[dict[str, Any]], tools: Any, head: bool) -> str:
        text = f"[t{json.dumps(tools)}|" if tools else ""
        if "default system" in self.quirks and messages[0]["role"] != "system":
            text += "[sbe good|"
        last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            content = message["content"] or ""
            thought = message.get("reasoning_content") or ""
            if message["role"] == "assistant" and "drops thoughts" in self.quirks and i < last_user:
                thought, content = "", content.split(")")[-1]
            if message["role"] == "assistant" and "strips" in self.quirks:
                content = content.strip()
            calls = "".join(
                f"<{c['function']['name']}{c['function']['arguments']}>" for c in message.get("tool_calls") or []
            )
            text += f"[{message['role'][0]}{thought}{content}{calls}"
            text += {"newline": "|\n", "bare": "\n", "space": " |"}.get(self.ending, "|")
        return text + ("[a" if head else "")

    @property
    def ending(self) -> str:
        return next((q for q in ("newline", "bare", "space") if q in self.quirks), "")

    async def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 0, max_retries: int = 3
    ) -> bytes:
        return json.dumps(self.answer(path, json.loads(json.dumps(body)))).encode()

    def copy(self, *, base_url: str) -> Wire:
        return self

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((path, body))
        if path == "/tokenize":
            if "prompt" in body:
                return {"tokens": encode(body["prompt"])}
            head = body.get("add_generation_prompt", True)
            return {"tokens": encode(self.render(body["messages"], body.get("tools"), head))}
        if path == "/detokenize":
            return {"prompt": decode(body["tokens"])}
        if path == "/chat/completions/tokens":
            if not self.has_tokens:
                raise openai.NotFoundError("no route", response=_response(404), body=None)
            prompt = body["tokens"]
        elif path == "/completions":
            prompt = body["prompt"] if isinstance(body["prompt"], list) else encode(body["prompt"])
        else:
            prompt = encode(self.render(body["messages"], body.get("tools"), True))
        output = self.script[min(len(self.sampled), len(self.script) - 1)]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 10**6
        ids = output["ids"][:limit]
        logprobs = [-float(next(self._logprobs)) for _ in ids]
        self.sampled.append((prompt, ids, logprobs))
        finish = "length" if len(output["ids"]) > limit else "stop"
        text = decode(ids)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": ids,
            "versions": [[0, len(self.sampled)]],
        }
        if path == "/completions":
            if (stop := next((stop for stop in body.get("stop") or () if stop in text), None)) is not None:
                text, choice["stop_reason"] = text[: text.index(stop)], stop
            choice |= {"text": text, "logprobs": {"token_logprobs": logprobs}, "prompt_token_ids": prompt}
            return {"choices": [choice]}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if output.get("thought") and ")" in text:
            message["reasoning_content"], message["content"] = text[: text.index(")") + 1], text[text.index(")") + 1 :]
        if output.get("call"):
            call = output["call"] if isinstance(output["call"], dict) else {"name": "f", "arguments": "{}"}
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
        choice |= {"message": message, "logprobs": {"content": [{"token": "", "logprob": lp} for lp in logprobs]}}
        return {"choices": [choice], "prompt_token_ids": prompt}


def _response(status: int) -> Any:
    import httpx

    return httpx.Response(status, request=httpx.Request("POST", "http://nobody"))


def check(wire: Wire, samples: list[Sample]) -> None:
    """Every sampled token stands in exactly one place, with its log-prob, after the tokens it was sampled after."""
    expected = {
        -logprob: (token, prompt + ids[:i])
        for prompt, ids, logprobs in wire.sampled
        for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
    }
    found: dict[float, tuple[int, list[int]]] = {}
    for sample in samples:
        sample.validate()
        assert sample.inference_logprobs is not None
        for at, (token, mask, logprob) in enumerate(
            zip(sample.tokens, sample.loss_mask, sample.inference_logprobs, strict=True)
        ):
            assert (mask == 1.0) == (logprob != 0.0) and mask in (0.0, 1.0)
            if mask:
                assert -logprob not in found
                found[-logprob] = (token, sample.tokens[:at])
    assert found == expected


def turn(ids: list[int], **extra: Any) -> dict[str, Any]:
    return {"ids": ids, **extra}
