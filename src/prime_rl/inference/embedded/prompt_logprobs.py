"""Prompt scoring: log-prob of every prompt token, the top tokens, and the remaining probability mass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.inference.engine import FULL, PromptLogprobs, TopLogprobs
from rollouts.kernels.log_softmax import log_softmax
from rollouts.training.numerics import pad_rows
from rollouts.training.sampling_support import Support

ROWS_AT_ONCE = 512
"""Maximum rows per product with the head, which bounds the memory of logits."""

Head = Callable[[Float[Tensor, "rows hidden"]], Float[Tensor, "rows vocab"]]


@dataclass
class PromptScorer:
    """Accumulates scores chunk by chunk; `top` as `SamplingParams.prompt_logprobs`.

    With a `support`, the log-probs of the prompt tokens are renormalized over it; top tokens, tail mass and
    distributions are those of the whole vocabulary.
    """

    top: int
    temperature: float
    support: Support | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    tail_mass: list[float] = field(default_factory=list)
    full: list[Tensor] = field(default_factory=list)

    def add(self, hidden: Float[Tensor, "rows hidden"], head: Head, targets: list[int]) -> None:
        """Score `targets[i]` by row i, with the trainer's expression, so equal logits give bitwise equal results."""
        for start in range(0, len(targets), ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, len(targets)))
            logits = head(hidden[rows]).float()
            scale = torch.full((len(logits), 1), self.temperature, device=logits.device)
            self._add(log_softmax(logits / scale), targets[rows])

    @property
    def has_nan(self) -> bool:
        """Whether the model is broken, so that keys and values may not be finite."""
        return any(map(math.isnan, self.logprobs))

    def result(self) -> PromptLogprobs:
        """Return the accumulated scores."""
        full = torch.cat(self.full) if self.full else None
        return PromptLogprobs(self.logprobs, self.top_logprobs, self.tail_mass, full)

    def _add(self, logprobs: Float[Tensor, "rows vocab"], targets: list[int]) -> None:
        index = torch.tensor(targets, device=logprobs.device)
        table = logprobs
        if self.support is not None:
            rows = torch.arange(len(self.logprobs), len(self.logprobs) + len(targets))
            table = self.support.select(rows).to(logprobs.device).renormalize(logprobs)
        self.logprobs += table.gather(1, index[:, None]).squeeze(1).tolist()
        if self.top == FULL:
            self.full.append(logprobs.cpu())  # here, not in the event loop, which copying gigabytes would block
        best = logprobs.topk(min(max(self.top, 0), logprobs.shape[1]), dim=-1)
        self.tail_mass += _sum_others(logprobs, best.indices).tolist()
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        self.top_logprobs += [list(zip(ids, values, strict=True)) for ids, values in pairs]


def _sum_others(logprobs: Float[Tensor, "rows vocab"], ids: Int[Tensor, "rows top"]) -> Float[Tensor, " rows"]:
    """Probability of all tokens but `ids`: where these have nearly all, 1 - their sum is 0 or rounding noise.

    Its bits do not depend on the number of rows: torch splits the sum of a single row on a CPU, and of few on a GPU.
    """
    if not ids.shape[1]:
        return logprobs.new_ones(len(logprobs))
    others = pad_rows(logprobs.scatter(1, ids, -torch.inf).exp_(), 2)
    return others.sum(-1, dtype=torch.float64 if others.is_cuda else None).float()[: len(logprobs)]
