"""Log-probs of given tokens from a server: by our packed /score route, or by `prompt_logprobs` of /completions."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from math import exp, fsum
from typing import Any, Protocol

import msgspec

from prime_rl.utils.client import InferenceClient

FULL = -1
TOO_LARGE = 413
MIN_TAIL_MASS = 2.0**-24
"""Resolution of 1 - p in fp32: where the top tokens have more, the mass of the others is unknown, but not 0."""


class PackedScores(msgspec.Struct):
    """The response of /score for `tokens[start:]`: packed float32 and int32 in native byte order.

    `top_ids` and `top_logprobs` are `[tokens, top]`, most likely first; `tail_mass` is the probability of all others.
    With the full vocabulary, `top_ids` and `tail_mass` are empty.
    """

    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    tail_mass: bytes = b""
    version: int = 0
    num_cached: int = 0


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probs of the scored tokens; the packed table has `top` (or vocabulary size) columns."""

    logprobs: list[float]
    top: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    tail_mass: bytes = b""
    num_cached: int = 0


class ServerChoice(Protocol):
    """Servers that may be lost and return; `prime_rl.orchestrator.server_pool.ServerPool` is one."""

    @property
    def reachable(self) -> list[int]:
        """Numbers of the servers that respond."""

    async def run(self, number: int, work: Callable[[int], Awaitable[ScoredTokens]]) -> ScoredTokens:
        """The result of `work(server)`, restarted on another server if its server is lost."""


@dataclass
class TokenScorer:
    """Scores tokens on a teacher's servers in round-robin order; the first request detects the supported route."""

    clients: list[InferenceClient]
    model: str
    temperature: float = 1.0
    top: int = 0
    servers: ServerChoice | None = None
    """Chooses among `clients`, server by server; None: all of them respond."""
    _turn: int = field(default=0)
    _packed: bool = field(default=True)

    async def score(self, tokens: list[int], start: int, support: bytes = b"") -> ScoredTokens:
        """Log-probs of `tokens[start:]`, over their `support`; raises the client's errors, or `ValueError` for
        unsupported requests."""
        self._turn += 1
        if self.servers is None:
            return await self._score_on(self.clients[self._turn % len(self.clients)], tokens, start, support)
        return await self.servers.run(
            self._turn, lambda server: self._score_on(self.clients[server], tokens, start, support)
        )

    @property
    def reachable(self) -> list[InferenceClient]:
        """Clients of the servers that respond."""
        return self.clients if self.servers is None else [self.clients[i] for i in self.servers.reachable]

    async def _score_on(self, client: InferenceClient, tokens: list[int], start: int, support: bytes) -> ScoredTokens:
        if self._packed:
            if (scored := await self._score_packed(client, tokens, start, support)) is not None:
                return scored
            self._packed = False
        if support:
            raise ValueError(
                f"{client.base_url} scores the whole vocabulary only, not the tokens that top_p, top_k or min_p leave: "
                "unset them in orchestrator.sampling, or set orchestrator.sampling_support_replay = false"
            )
        return await self._score_prompt(client, tokens, start)

    async def _score_packed(
        self, client: InferenceClient, tokens: list[int], start: int, support: bytes
    ) -> ScoredTokens | None:
        body = {"model": self.model, "tokens": tokens, "start": start, "top": self.top, "temperature": self.temperature}
        body |= {"support": b64encode(support).decode()} if support else {}
        try:
            data = await client.request_scores(body)
        except Exception as error:
            if getattr(error, "status_code", None) != TOO_LARGE:
                raise
            raise ValueError(
                f"{client.base_url} refuses to score {len(tokens)} tokens with {len(support)} bytes of sampling "
                f"supports: raise server.max_request_mb of that server, or lower orchestrator.sampling.top_k ({error})"
            ) from error
        if data is None:
            return None
        scores = msgspec.msgpack.decode(data, type=PackedScores)
        logprobs = array("f", scores.logprobs).tolist()
        if len(logprobs) != len(tokens) - start:
            raise ValueError(f"{client.base_url} returned {len(logprobs)} log-probs of {len(tokens) - start} tokens")
        top = len(scores.top_logprobs) // (4 * len(logprobs)) if self.top == FULL else self.top
        return ScoredTokens(logprobs, top, scores.top_ids, scores.top_logprobs, scores.tail_mass, scores.num_cached)

    async def _score_prompt(self, client: InferenceClient, tokens: list[int], start: int) -> ScoredTokens:
        """Score with `prompt_logprobs` of /completions as in vLLM, which is always at temperature 1."""
        if self.temperature != 1:
            raise ValueError(
                f"{client.base_url} returns log-probs at temperature 1 only, not at {self.temperature:g}: set "
                "orchestrator.sampling.temperature = 1, or teacher_model.temperature = 1"
            )
        if self.top == FULL:
            raise ValueError(
                f"{client.base_url} does not return whole distributions: set trainer.loss.distill.estimator = "
                '"topk+tail"'
            )
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self.top}
        answer = await client.post("/completions", body=body)
        rows = answer["choices"][0].get("prompt_logprobs") or answer.get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(tokens):
            raise ValueError(
                f"{client.base_url} returned no prompt_logprobs: a teacher's server must support them in /completions"
            )
        return _from_rows(rows[start:], tokens[start:], self.top)


def _from_rows(rows: list[dict[str, Any]], tokens: list[int], top: int) -> ScoredTokens:
    """Convert rows of `{token id: {"logprob", "rank"}}`; each row has the token itself, even if not in the top.

    Without a table if the server returns fewer than `top` tokens.
    """
    logprobs = [float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens, strict=True)]
    if not top or any(len(row) < top for row in rows):
        return ScoredTokens(logprobs)
    ids, values, tails = array("i"), array("f"), array("f")
    for row in rows:
        best = sorted(((entry["logprob"], int(token)) for token, entry in row.items()), reverse=True)[:top]
        ids.extend(token for _, token in best)
        values.extend(value for value, _ in best)
        tails.append(compute_tail_mass(value for value, _ in best))
    return ScoredTokens(logprobs, top, ids.tobytes(), values.tobytes(), tails.tobytes())


def compute_tail_mass(top_logprobs: Iterable[float]) -> float:
    """The probability of all other tokens, at least `MIN_TAIL_MASS`, from the fp32 log-probs of the top tokens."""
    return max(MIN_TAIL_MASS, 1.0 - fsum(map(exp, top_logprobs)))
