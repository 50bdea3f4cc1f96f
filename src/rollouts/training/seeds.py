"""Seeds of the requests of one rollout."""

from __future__ import annotations

import random


def derive_seed(seed: int, number: int) -> int:
    """Seed of request `number` of a rollout with `seed`. An engine draws by seed and position: with the same seed,
    answers to prompts of equal length would be the same quantile of their distributions."""
    return random.Random(f"{seed}:{number}").getrandbits(31)
