"""Seeds of the requests of one rollout."""

from __future__ import annotations

import random
from collections import Counter


class RequestSeeds:
    """Seeds of the requests of one rollout, which environments send with the same seed: the first has that seed, later
    ones have seeds derived from it and their number, so that turns are drawn independently."""

    def __init__(self) -> None:
        self._num_requests: Counter[int] = Counter()  # by seed

    def take(self, seed: int) -> int:
        """The seed of the next request with `seed`."""
        number = self._num_requests[seed]
        self._num_requests[seed] += 1
        return derive_seed(seed, number) if number else seed


def derive_seed(seed: int, number: int) -> int:
    """Seed of request `number` of a rollout with `seed`. An engine draws by seed and position: with the same seed,
    answers to prompts of equal length would be the same quantile of their distributions."""
    return random.Random(f"{seed}:{number}").getrandbits(31)
