"""Asking a server how likely given tokens are: ours by packed numbers, any other by its prompt log-probs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import exp
from typing import Any

import msgspec

from prime_rl.utils.client import InferenceClient

FULL = -1


class PackedScores(msgspec.Struct):
    """The answer of /score; see `prime_rl.inference.score_route`."""

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    tail_mass: bytes = b""
    version: int = 0
    num_cached: int = 0


@dataclass(frozen=True)
class Scored:
    """Log-probs of the tokens that were asked about; the packed table has `top` (or the vocabulary's) columns."""

    logprobs: list[float]
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    tail_mass: bytes = b""
    num_cached: int = 0


@dataclass
class TokenScorer:
    """One teacher's servers, asked in turn; which route they know is found out with the first request."""

    clients: list[InferenceClient]
    model: str
    temperature: float = 1.0
    top: int = 0
    _turn: int = field(default=0)
    _packed: bool = field(default=True)

    async def score(self, tokens: list[int], start: int) -> Scored:
        """Log-probs of `tokens[start:]`; raises the client's errors, `ValueError` for what a server cannot tell."""
        self._turn += 1
        client = self.clients[self._turn % len(self.clients)]
        if self._packed:
            if (scored := await self._score_packed(client, tokens, start)) is not None:
                return scored
            self._packed = False
        return await self._score_prompt(client, tokens, start)

    async def _score_packed(self, client: InferenceClient, tokens: list[int], start: int) -> Scored | None:
        body = {"model": self.model, "tokens": tokens, "start": start, "top": self.top, "temperature": self.temperature}
        if (data := await client.ask_scores(body)) is None:
            return None
        found = msgspec.msgpack.decode(data, type=PackedScores)
        logprobs = array("f", found.logprobs).tolist()
        top = len(found.top_logprobs) // (4 * len(logprobs)) if self.top == FULL else self.top
        return Scored(logprobs, top, found.top_ids, found.top_logprobs, found.tail_mass, found.num_cached)

    async def _score_prompt(self, client: InferenceClient, tokens: list[int], start: int) -> Scored:
        """Through /completions with `prompt_logprobs`, as vLLM answers it: always at temperature 1."""
        if self.temperature != 1:
            raise ValueError(
                f"{client.base_url} tells log-probs at temperature 1 only, not at {self.temperature:g}: set "
                "orchestrator.sampling.temperature = 1, or teacher_model.temperature = 1"
            )
        if self.top == FULL:
            raise ValueError(
                f'{client.base_url} does not tell whole distributions: set trainer.loss.distill.estimator = "topk+tail"'
            )
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self.top}
        answer = await client.post("/completions", body=body)
        rows = answer["choices"][0].get("prompt_logprobs") or answer.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(tokens):
            raise ValueError(
                f"{client.base_url} told no prompt_logprobs: a teacher's server must know that field of /completions"
            )
        return _from_rows(rows[start:], tokens[start:], self.top)


def _from_rows(rows: list[dict[str, Any]], tokens: list[int], top: int) -> Scored:
    """Rows of `{token id: {"logprob", "rank"}}` as numbers; the token itself is in each, ranked or not."""
    logprobs = [float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens, strict=True)]
    if not top:
        return Scored(logprobs)
    ids, values, tails = array("i"), array("f"), array("f")
    for row in rows:
        best = sorted(((entry["logprob"], int(token)) for token, entry in row.items()), reverse=True)[:top]
        ids.extend(token for _, token in best)
        values.extend(value for value, _ in best)
        tails.append(max(0.0, 1.0 - sum(exp(value) for value, _ in best)))
    return Scored(logprobs, top, ids.tobytes(), values.tobytes(), tails.tobytes())
