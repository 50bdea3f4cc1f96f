"""Batched generation with a KV cache, per-sample seeds and tool calls.

A prompt that several requests share is computed once. What a request draws is a function of its seed and of the
probabilities alone; requests differ from their first token on. The end of a turn is part of what was sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nanochat.calculator import use_calculator
from nanochat.common import autocast
from nanochat.gpt import GPT, GPTConfig, causal_attention
from nanochat.tokenizer import NanochatTokenizer
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.sampling import keep_top_k, sample_tokens, uniform

MAX_ROWS = 256
"""Maximum number of requests decoded in one batch."""


@dataclass(frozen=True)
class Request:
    """A generation request: temperature 0 is greedy, `top_k` None or 0 samples from all tokens."""

    prompt: tuple[int, ...]
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 42


@dataclass
class Completion:
    """Generated tokens, including the end of the turn; `mask` is 0 for tokens of tool outputs.

    `logprobs` are of the distribution really sampled from (of the untempered one where greedy), 0 where `mask` is.
    `finish_reason` is "stop" or, at the length limit, "length".
    """

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class NanochatKVCache:
    """KV cache of `rows` sequences of different lengths, which grow one token at a time after the prompt."""

    def __init__(self, config: GPTConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layer, rows, config.n_kv_head, length, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self._longest = 0

    def positions(self, num_tokens: int) -> Int[Tensor, "rows tokens"]:
        """Positions of the next tokens of each row."""
        return self.lengths[:, None] + torch.arange(num_tokens, device=self.lengths.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys and values of the next tokens, [rows, tokens, heads, dim], with causal attention per row."""
        num_tokens = q.shape[1]
        places = self.positions(num_tokens)
        rows = torch.arange(len(places), device=places.device)[:, None]
        self.k[layer][rows, :, places] = k.to(self.k.dtype)
        self.v[layer][rows, :, places] = v.to(self.v.dtype)
        end = self._longest + num_tokens
        seen = torch.arange(end, device=places.device) <= places[:, None, :, None]
        keys, values = self.k[layer, :, :, :end], self.v[layer, :, :, :end]
        q = q.transpose(1, 2).to(keys.dtype)
        y = F.scaled_dot_product_attention(q, keys, values, seen, enable_gqa=q.shape[1] != keys.shape[1])
        return y.transpose(1, 2)

    def advance(self, num_tokens: int) -> None:
        """Advance the position after all layers have appended their tokens."""
        self.lengths += num_tokens
        self._longest += num_tokens

    def fill(self, rows: Tensor, sources: Tensor, keys: list[Tensor], values: list[Tensor], lengths: Tensor) -> None:
        """Begin `rows` with computed prompts: layer by layer [prompts, tokens, heads, dim], of which row i takes
        `sources[i]`, as far as its length.
        """
        width = keys[0].shape[1]
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.k[layer, rows, :, :width] = k[sources].transpose(1, 2).to(self.k.dtype)
            self.v[layer, rows, :, :width] = v[sources].transpose(1, 2).to(self.v.dtype)
        self.lengths[rows] = lengths
        self._longest = int(self.lengths.max())

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.k, self.v, self.lengths = self.k[:, rows], self.v[:, rows], self.lengths[rows]
        self._longest = int(self.lengths.max()) if len(rows) else 0


@dataclass
class _Row:
    """A running request with the state of its tool call."""

    request: Request
    index: int
    done: Completion = field(default_factory=Completion)
    forced: deque[int] = field(default_factory=deque)
    expression: list[int] | None = None


class Engine:
    """Generates with the current weights of `model`. Not thread-safe."""

    def __init__(
        self,
        model: GPT,
        tokenizer: NanochatTokenizer,
        *,
        dtype: torch.dtype = torch.float32,
        max_rows: int = MAX_ROWS,
        use_tools: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.dtype, self.max_rows, self.use_tools = (
            model,
            tokenizer,
            dtype,
            max_rows,
            use_tools,
        )
        self._stop = {tokenizer.encode_special("<|assistant_end|>"), tokenizer.get_bos_token_id()}
        names = ("python_start", "python_end", "output_start", "output_end")
        self._tool = {name: tokenizer.encode_special(f"<|{name}|>") for name in names}

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and answer."""
        return self.model.max_length

    def check(self, request: Request) -> None:
        """Raise `ValueError` for a request that cannot be generated."""
        if request.max_tokens < 1 or (request.top_k or 0) < 0:
            raise ValueError(
                f"max_tokens is {request.max_tokens} and top_k {request.top_k}: they must be at least 1 and 0"
            )
        length = len(request.prompt) + request.max_tokens
        if length > self.max_length:
            raise ValueError(
                f"prompt and answer may have {length} tokens, the model reads at most {self.max_length}: "
                "lower max_tokens or shorten the prompt"
            )

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all requests; results in the same order."""
        done: list[Completion] = [Completion() for _ in requests]
        # Sorted by length to reduce padding; equal prompts are computed once.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].prompt, i))
        for start in range(0, len(order), self.max_rows):
            rows = [_Row(requests[i], i) for i in order[start : start + self.max_rows]]
            for _ in self._decode(rows):
                pass
            for row in rows:
                done[row.index] = row.done
        return done

    def generate(
        self,
        tokens: Sequence[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """One column of tokens and of masks (1: sampled) per step, for `num_samples` samples of one prompt.

        A finished sample repeats its last token with mask 0. `max_tokens` None: as far as the rotary tables reach.
        """
        limit = max_tokens or self.max_length - len(tokens)
        rows = [
            _Row(Request(tuple(tokens), limit, temperature, top_k, sample_seed(seed, 0, i)), i)
            for i in range(num_samples)
        ]
        for stepped in self._decode(rows):
            live = {row.index for row in stepped}
            yield (
                [row.done.tokens[-1] for row in rows],
                [row.done.mask[-1] if row.index in live else 0 for row in rows],
            )

    def generate_batch(
        self, tokens: Sequence[int], num_samples: int = 1, **options: float | int | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Sequences with prompt and end-of-turn token, and their masks.

        `options` are those of `generate`.
        """
        results: list[list[int]] = [list(tokens) for _ in range(num_samples)]
        masks: list[list[int]] = [[0] * len(tokens) for _ in range(num_samples)]
        ended = [False] * num_samples
        for column, mask in self.generate(tokens, num_samples, **options):  # type: ignore[arg-type]
            for i, (token, weight) in enumerate(zip(column, mask, strict=True)):
                if not ended[i]:
                    results[i].append(token)
                    masks[i].append(weight)
                    ended[i] = token in self._stop
        return results, masks

    @torch.no_grad()
    def _decode(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Generate for `rows` as a batch; yields rows that received a token."""
        config, device = self.model.config, self.model.get_device()
        for row in rows:
            self.check(row.request)
        longest = max(len(row.request.prompt) + row.request.max_tokens for row in rows)
        cache = NanochatKVCache(config, len(rows), longest, self.dtype, device)
        with autocast(device, self.dtype):
            logits = self._prefill(rows, cache)
        live = rows
        while True:
            self._extend(live, logits)
            yield live
            kept = [i for i, row in enumerate(live) if row.done.finish_reason is None]
            if not kept:
                return
            if len(kept) < len(live):
                cache.keep(torch.tensor(kept, device=device))
                live = [live[i] for i in kept]
            last = torch.tensor([[row.done.tokens[-1]] for row in live], device=device)
            with autocast(device, self.dtype):
                logits = self.model(last, kv_cache=cache)[:, -1]

    def _prefill(self, rows: list[_Row], cache: NanochatKVCache) -> Float[Tensor, "rows vocab"]:
        """Compute each distinct prompt once and copy it to the cache of its rows; returns their next logits."""
        device = self.model.get_device()
        places: dict[tuple[int, ...], int] = {}
        sources = [places.setdefault(row.request.prompt, len(places)) for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in places])
        width = int(lengths.max())
        tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in places], device=device)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return causal_attention(layer, q, k, v)

        hidden = self.model.hidden(tokens, torch.arange(width, device=device), attend)
        last = hidden[torch.arange(len(places)), lengths - 1]
        of_row = torch.tensor(sources, device=device)
        cache.fill(torch.arange(len(rows), device=device), of_row, keys, values, lengths.to(device)[of_row])
        return self.model.logits(last)[of_row]

    def _extend(self, rows: list[_Row], logits: Float[Tensor, "rows vocab"]) -> None:
        """Append the next token of every row: forced by a tool, else sampled."""
        tokens, logprobs = _draw([row.request for row in rows], [len(row.done.tokens) for row in rows], logits)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            done, is_forced = row.done, bool(row.forced)
            token = row.forced.popleft() if is_forced else token
            done.tokens.append(token)
            done.mask.append(0 if is_forced else 1)
            done.logprobs.append(0.0 if is_forced else logprob)
            if token in self._stop:
                done.finish_reason = "stop"
            elif len(done.tokens) == row.request.max_tokens:
                done.finish_reason = "length"
            elif self.use_tools:
                self._follow_tool(row, token)

    def find_mask(self, tokens: Sequence[int]) -> list[int]:
        """The mask of a completion of this engine (0: inserted by the tool); it follows from the tokens."""
        row, mask = _Row(Request((), len(tokens)), 0), []
        for token in tokens:
            mask.append(0 if row.forced else 1)
            if row.forced:
                row.forced.popleft()
            elif self.use_tools:
                self._follow_tool(row, token)
        return mask

    def _follow_tool(self, row: _Row, token: int) -> None:
        """Collect a tool expression; at its end, force the calculator's result, if any."""
        if token == self._tool["python_start"]:
            row.expression = []
        elif token == self._tool["python_end"] and row.expression is not None:
            answer = use_calculator(self.tokenizer.decode(row.expression))
            row.expression = None
            if answer is not None:
                ends = self._tool["output_start"], self._tool["output_end"]
                row.forced.extend([ends[0], *self.tokenizer.encode(answer), ends[1]])
        elif row.expression is not None:
            row.expression.append(token)


def _draw(
    requests: Sequence[Request], counts: Sequence[int], logits: Float[Tensor, "rows vocab"]
) -> tuple[list[int], list[float]]:
    """Sample a token per row, with its log-prob; `counts`: number of tokens each row already has."""
    greedy = torch.tensor([r.temperature == 0 for r in requests], device=logits.device)
    temperature = torch.tensor([r.temperature or 1.0 for r in requests], device=logits.device)
    widths = {r.top_k or 0 for r in requests}
    if len(widths) == 1:
        logits = keep_top_k(logits, widths.pop())
    else:
        logits = torch.cat([keep_top_k(row[None], r.top_k) for row, r in zip(logits, requests, strict=True)])
    seeds = np.array([r.seed & (1 << 64) - 1 for r in requests], dtype=np.uint64)
    noise = torch.from_numpy(uniform(seeds, np.array(counts, dtype=np.int64))).to(logits.device)
    tokens, logprobs = sample_tokens(logits / temperature[:, None], noise, greedy)
    return tokens.tolist(), logprobs.tolist()
