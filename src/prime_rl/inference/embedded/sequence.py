"""A request in the engine: its tokens, what of them is cached, and when it is finished."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.inference.detokenizer import StopStringMatcher
from prime_rl.inference.embedded.prompt_logprobs import PromptScorer
from prime_rl.inference.engine import FinishReason, GenerationRequest, Output, SamplingParams, TopLogprobs
from prime_rl.inference.grammar import GrammarState


@dataclass(eq=False)
class Sequence:
    """State of a request: `tokens` are prompt and completion, `num_cached` of them have cached keys."""

    request: GenerationRequest
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    """Tokens that end the completion, EOS included unless it is ignored."""
    tokens: list[int]
    num_prompt: int
    max_tokens: int  # prompt + completion
    stop_strings: StopStringMatcher | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)  # of the cache, for each block (`PagedBlocks`)
    num_shared_blocks: int = 0  # blocks in pages that another sequence has written
    num_cached: int = 0
    order: int = 0  # of admission
    num_shared: int = 0  # prompt tokens read from the prefix cache
    cache_namespace: Hashable = None  # keys are shared only within it
    epoch: int = 0  # weights epoch of its first keys
    is_registered: bool = False  # in the prefix index
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    scores: PromptScorer | None = None
    grammar: GrammarState | None = None
    can_draft: bool = True  # not if logits depend on the tokens by a penalty or grammar
    prompt_key: int = 0  # equal for equal prompts
    source: list[int] = field(default_factory=list)  # tokens that continue this sequence from `source_at` on
    source_at: int = 0
    num_predicted: int = 0  # tokens in a row that the source predicted
    num_indexed: int = 0  # tokens available as drafts

    @property
    def params(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.request.params

    @cached_property
    def bias(self) -> tuple[Int[Tensor, " biased"], Float[Tensor, " biased"]]:
        """Token ids and values of the request's logit bias, which may name the whole vocabulary."""
        ids, values = zip(*self.params.logit_bias, strict=True)
        return torch.tensor(ids), torch.tensor(values, dtype=torch.float32)

    @property
    def num_generated(self) -> int:
        """Number of completion tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens remain to be scored, and so must all be computed."""
        return self.params.prompt_logprobs is not None and self.num_generated == 0

    def mark_version(self, version: int) -> None:
        """Record `version` from the next token on."""
        start = self.num_generated
        if self.versions and self.versions[-1][0] == start:
            self.versions.pop()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((start, version))

    def discard_keys(self) -> None:
        """Start over: all keys are to be computed again, and scores of a prompt that is not completely scored."""
        self.num_cached, self.is_registered = 0, False
        if self.wants_scores:
            self.scores = None

    def append(
        self, token: int, logprob: float, top: TopLogprobs | None, support: bytes | None = None
    ) -> Output | None:
        """Append a sampled token; returns the output if it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.grammar is not None:
            self.grammar.advance(token)
        if support is not None:
            self.supports.append(support)
        if top is not None:
            self.top_logprobs.append(top)
        if self.stop_strings is not None:
            stop = self.stop_strings.add(token, active=self.num_generated >= self.params.min_tokens)
            if stop is not None:
                return self.output("stop", stop, self.stop_strings.text)
        if token in self.stop_ids:
            return self.output("stop", None if token in self.eos_ids else token)
        return self.output("length") if len(self.tokens) >= self.max_tokens else None

    def describe_failure(self) -> str:
        """Why the last log-prob is not finite."""
        error = "" if self.grammar is None else self.grammar.error
        return f"the grammar cannot be continued: {error}" if error else "the model's log-probs are not finite"

    def output(self, reason: FinishReason, stop: str | int | None = None, text: str | None = None) -> Output:
        """The tokens so far as the request's output."""
        return Output(
            request=self.request,
            token_ids=self.tokens[self.num_prompt :],
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            versions=self.versions,
            finish_reason=reason,
            stop_reason=stop,
            text=text,
            prompt_logprobs=None if self.scores is None else self.scores.result(),
            num_cached=self.num_shared,
            sampling_support=b"".join(self.supports),
        )
