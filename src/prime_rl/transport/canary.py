"""The canary: trainer log-probs of a few prompts, published with the weights and verified on every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

SCHEMA = 2
CANARY_FILE = "canary.json"
VOCABULARY_LENGTHS = (8, 16, 32)
"""Lengths of the prompts with tokens spread over the vocabulary."""
MAX_PROMPT_TOKENS = 64
MAX_OTHER_TOKENS = 128
"""Maximum number of further batch tokens that are scored, besides the prefixes of two samples."""


class Tolerance(msgspec.Struct, frozen=True):
    """Allowed mean log-prob difference: `factor` times the trainer's numerical noise, within bounds."""

    least: float
    most: float
    factor: float


TOLERANCE = {
    "float64": Tolerance(5e-5, 1e-3, 32),
    "float32": Tolerance(5e-5, 1e-3, 32),
    "float16": Tolerance(0.02, 0.1, 8),
    "bfloat16": Tolerance(0.05, 0.1, 8),
    "int8": Tolerance(0.3, 0.3, 8),
}
PEAK = 20
"""Allowed difference of a single log-prob as a multiple of the allowed mean."""
LIKELY = -10.0
"""About the log-prob of a token that is drawn uniformly. Differences of lower log-probs count by the ratio of this one
to theirs, since rounding changes them by more: in bfloat16 the one of a token at -21 by 1.1 (SmolLM2-135M)."""


class CanaryPrompt(msgspec.Struct, frozen=True):
    """`logprobs[i]` is the log-prob of `token_ids[i + 1]` given the preceding tokens."""

    token_ids: list[int]
    logprobs: list[float]


class Canary(msgspec.Struct, frozen=True):
    """Log-probs of the trainer at `step` for some prompts.

    `exact`: computed with arithmetic that an exact engine reproduces bit for bit. `noise`: mean difference between two
    trainer computations with different batching and attention kernels. `routed`: mixture of experts, where rounding
    may select another expert and so change single log-probs by any amount. `arithmetic`: as `CausalLM.arithmetic`.
    """

    schema: int
    step: int
    prompts: list[CanaryPrompt]
    dtype: str
    exact: bool
    noise: float = 0.0
    routed: bool = False
    arithmetic: str = ""

    @property
    def logprobs(self) -> list[list[float]]:
        """Log-probs of each prompt."""
        return [prompt.logprobs for prompt in self.prompts]

    def limit(self, dtype: str = "") -> float:
        """Allowed mean difference to an engine that computes in `dtype` (unset: the trainer's).

        The noise was measured in one dtype, so between two dtypes the maximum of the coarser one applies.
        """
        own, other = (TOLERANCE.get(name, TOLERANCE["bfloat16"]) for name in (self.dtype, dtype or self.dtype))
        if own is not other or self.routed:
            return max(own.most, other.most)
        return min(max(own.factor * self.noise, own.least), own.most)


def canary_tokens(vocab_size: int, num: int = max(VOCABULARY_LENGTHS)) -> list[int]:
    """Tokens spread over the vocabulary, the same for every version."""
    return [(7919 * i * i + 104729 * i + 17) % vocab_size for i in range(num)]


def canary_prompts(vocab_size: int, texts: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """Prompts of several lengths: tokens spread over the vocabulary, prefixes of two texts, and up to
    `MAX_OTHER_TOKENS` other tokens of the texts.

    A prompt from texts is never longer than the longest text, so an engine that generated the texts accepts it.
    """
    spread = canary_tokens(vocab_size, sum(VOCABULARY_LENGTHS))
    prompts = []
    for length in VOCABULARY_LENGTHS:
        prompts.append(spread[:length])
        spread = spread[length:]
    longest = max(map(len, texts), default=0)
    if longest > 1:
        width = min(MAX_PROMPT_TOKENS, longest - 1)
        prompts += [list(texts[i][:width]) for i in sorted({0, len(texts) // 2})]
        scored = {token for prompt in prompts for token in prompt[:-1]}
        others = sorted({token for text in texts for token in text} - scored)
        others = others[:: math.ceil(len(others) / MAX_OTHER_TOKENS) or 1]
        size = max(1, width - 1)
        # The last token of a prompt affects no log-prob as input, so each prompt repeats its first token at the end.
        chunks = [others[start : start + size] for start in range(0, len(others), size)]
        prompts += [[*chunk, chunk[0]] for chunk in chunks]
    return [prompt for prompt in prompts if len(prompt) > 1]


def build_canary(
    step: int,
    prompts: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    dtype: str,
    exact: bool,
    noise: float = 0.0,
    routed: bool = False,
    arithmetic: str = "",
) -> Canary:
    """The canary of a version."""
    rows = [CanaryPrompt(list(p), list(row)) for p, row in zip(prompts, logprobs, strict=True)]
    return Canary(SCHEMA, step, rows, dtype, exact, noise, routed, arithmetic)


def write_canary(directory: Path, canary: Canary) -> None:
    """Write the canary into a directory that is being published."""
    (directory / CANARY_FILE).write_bytes(msgspec.json.encode(canary))


def read_canary(directory: Path) -> Canary | None:
    """The canary of a published directory, None if there is none; raises `ValueError` if it is invalid."""
    path = Path(directory) / CANARY_FILE
    if not path.is_file():
        return None
    data = path.read_bytes()
    try:
        schema = msgspec.json.decode(data, type=_SchemaVersion).schema
        if schema != SCHEMA:
            raise ValueError(f"{path} has schema {schema}, this version reads schema {SCHEMA}")
        return msgspec.json.decode(data, type=Canary)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path} is no canary: {error}") from error


class _SchemaVersion(msgspec.Struct):
    schema: int


def compare_canary(
    canary: Canary,
    logprobs: Sequence[Sequence[float] | None],
    *,
    exact: bool = False,
    dtype: str = "",
    arithmetic: str = "",
) -> str | None:
    """Compare an engine's log-probs with the canary's; returns a description of the mismatch, or None.

    A None entry is a prompt that the engine did not score. An `exact` engine must reproduce an exact trainer's
    log-probs bit for bit if it has the same dtype and arithmetic; for others see `Canary.limit`, `PEAK` and `LIKELY`.
    """
    distances: list[tuple[float, int, int]] = []
    for number, (mine, theirs) in enumerate(zip(logprobs, canary.logprobs, strict=True)):
        if mine is None:
            continue
        if len(mine) != len(theirs):
            return f"prompt {number + 1} of the canary has {len(theirs)} log-probs, the engine returned {len(mine)}"
        pairs = zip(mine, theirs, strict=True)
        distances += [(abs(a - b) / max(1.0, b / LIKELY), number, i) for i, (a, b) in enumerate(pairs)]
    if not distances:
        return "the engine scored no prompt of the canary"
    worst, number, i = max(distances, key=lambda row: math.inf if math.isnan(row[0]) else row[0])
    scored = logprobs[number]
    assert scored is not None
    shown = (
        f"token {i + 1} of prompt {number + 1} has {scored[i]:.6f} in the engine and "
        f"{canary.logprobs[number][i]:.6f} in the trainer"
    )
    if exact and canary.exact and dtype in ("", canary.dtype) and arithmetic == canary.arithmetic:
        # NaN must fail as well, here and below
        return None if worst == 0 else f"log-probs of the canary differ in exact mode: {shown}"
    mean, limit = fmean(row[0] for row in distances), canary.limit(dtype)
    if not mean <= limit:
        return f"log-probs of the canary are off by {mean:.4g} in the mean, {limit:g} is allowed: {shown}"
    if not (canary.routed or worst <= PEAK * limit):
        scale = max(1.0, canary.logprobs[number][i] / LIKELY)
        worst, most = worst * scale, PEAK * limit * scale
        return f"one log-prob of the canary is off by {worst:.4g}, {most:.4g} is allowed: {shown}"
    return None
