"""Several ranks from one command: when they are started, and what the console is shown."""

from __future__ import annotations

from prime_rl.trainer.config import ParallelDims
from prime_rl.trainer.launch import FirstRank, count_missing_ranks


def test_ranks_are_started_once() -> None:
    assert count_missing_ranks(ParallelDims(dp=3), {}) == 3
    assert count_missing_ranks(ParallelDims(dp=3), {"WORLD_SIZE": "3"}) == 0, "a rank starts none"
    assert count_missing_ranks(ParallelDims(dp=1), {}) == count_missing_ranks(ParallelDims(), {}) == 0


def test_the_console_shows_the_first_rank_until_it_fails() -> None:
    console = FirstRank("trainer_rank0")
    assert console("trainer_rank1", "12:00:00    INFO Step 1") is None
    assert console("trainer_rank0", "12:00:00    INFO Step 1") == "12:00:00    INFO Step 1"
    assert console("trainer_rank0", "12:00:00 FAILURE Traceback (most recent call last):") is None
    assert console("trainer_rank0", "  File ...") is None, "the launcher says what happened"
