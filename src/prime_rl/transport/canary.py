"""The canary: a prompt whose log-probs a trainer publishes with its weights, so that engines can be held to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

SCHEMA = 1
CANARY_FILE = "canary.json"
CANARY_TOKENS = 32
TOLERANCE = {"float32": 1e-3}
LOOSE_TOLERANCE = 0.1
"""Mean distance of log-probs that rounding to 16 bits may make; weights that differ by less are told by digests."""


class Canary(msgspec.Struct, frozen=True):
    """`logprobs[i]` is that of `token_ids[i + 1]` behind the tokens before it, as the trainer of `step` computes it.

    `exact`: by arithmetic that an exact engine repeats bit for bit.
    """

    schema: int
    step: int
    token_ids: list[int]
    logprobs: list[float]
    dtype: str
    exact: bool


def canary_tokens(vocab_size: int) -> list[int]:
    """Tokens spread over the vocabulary, the same for every version."""
    return [(7919 * i * i + 104729 * i + 17) % vocab_size for i in range(CANARY_TOKENS)]


def build_canary(step: int, token_ids: list[int], logprobs: list[float], dtype: str, exact: bool) -> Canary:
    """The canary of a version."""
    return Canary(SCHEMA, step, token_ids, logprobs, dtype, exact)


def write_canary(directory: Path, canary: Canary) -> None:
    """Write it into a directory that is being published."""
    (directory / CANARY_FILE).write_bytes(msgspec.json.encode(canary))


def read_canary(directory: Path) -> Canary | None:
    """The canary of a published directory, None when it has none; `ValueError` when it cannot be understood."""
    path = Path(directory) / CANARY_FILE
    if not path.is_file():
        return None
    try:
        canary = msgspec.json.decode(path.read_bytes(), type=Canary)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no canary: {error}") from error
    if canary.schema != SCHEMA:
        raise ValueError(f"{path} has schema {canary.schema}, this version reads schema {SCHEMA}")
    return canary


def compare_canary(canary: Canary, logprobs: Sequence[float], *, exact: bool = False, dtype: str = "") -> str | None:
    """What is wrong with an engine's log-probs of the canary, None when they are the trainer's.

    An `exact` engine must repeat an exact trainer's bit for bit, if it keeps numbers in the same format; others may be
    off by the mean distance that the coarser of both formats explains.
    """
    if len(logprobs) != len(canary.logprobs):
        return f"the canary has {len(canary.logprobs)} log-probs, the engine told {len(logprobs)}"
    distances = [abs(mine - theirs) for mine, theirs in zip(logprobs, canary.logprobs, strict=True)]
    worst = max(range(len(distances)), key=distances.__getitem__)
    shown = f"token {worst + 1} has {logprobs[worst]:.6f} in the engine and {canary.logprobs[worst]:.6f} in the trainer"
    if exact and canary.exact and dtype in ("", canary.dtype):
        return f"log-probs of the canary differ in exact mode: {shown}" if any(distances) else None
    mean = sum(distances) / len(distances)
    limit = max(TOLERANCE.get(name, LOOSE_TOLERANCE) for name in (canary.dtype, dtype or canary.dtype))
    if not mean <= limit:  # NaN must fail as well
        return f"log-probs of the canary are off by {mean:.4g} in the mean, {limit:g} is allowed: {shown}"
    return None
