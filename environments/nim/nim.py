"""Nim with one heap, for self-play: players take stones in turn, and the one that takes the last stone wins."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rollouts.training.environments import Frozen, SeatEnvironment

SEATS = ("first", "second")
MAX_TAKE = 3


class Nim:
    """A game; a move that is no number from 1 to `MAX_TAKE`, or more than there are stones, loses at once."""

    def __init__(self, stones: int, system_prompt: str = "") -> None:
        self.stones, self.system_prompt = stones, system_prompt
        self.num_moves = 0
        self.winner: str | None = None

    @property
    def seat(self) -> str | None:
        """The seat to move; None after the end."""
        return None if self.winner else SEATS[self.num_moves % 2]

    def messages(self) -> list[dict[str, Any]]:
        """The number of stones; earlier moves do not matter."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": str(self.stones)}]

    def move(self, text: str) -> None:
        """Take the stones that the text names."""
        seat, text = SEATS[self.num_moves % 2], text.strip()
        self.num_moves += 1
        if text not in map(str, range(1, min(MAX_TAKE, self.stones) + 1)):
            self.winner = SEATS[self.num_moves % 2]
            return
        self.stones -= int(text)
        if self.stones == 0:
            self.winner = seat

    def rewards(self) -> dict[str, float]:
        """1 for the winner, -1 for the loser."""
        return {seat: 1.0 if seat == self.winner else -1.0 for seat in SEATS}


def load_environment(
    min_stones: int = 4,
    max_stones: int = 12,
    num_train_examples: int = 1000,
    num_eval_examples: int = 128,
    system_prompt: str = "",
    opponent: Mapping[str, str] | None = None,
    seed: int = 0,
) -> SeatEnvironment:
    """Games from a random number of stones. The policy plays both seats, or against `opponent`, alternately from the
    first and the second seat: {model = "...", base_url = "..."}, without base_url a model of the policy's server.
    """
    if not 1 <= min_stones <= max_stones:
        raise ValueError(f"min_stones {min_stones} must lie between 1 and max_stones {max_stones}")
    other = None if opponent is None else Frozen(**opponent)
    draw = random.Random(seed)
    rows = [
        {"prompt": str(stones), "stones": stones, "frozen_seat": SEATS[1 - i % 2]}
        for i in range(num_train_examples + num_eval_examples)
        for stones in [draw.randint(min_stones, max_stones)]
    ]
    return SeatEnvironment(
        rows[:num_train_examples],
        lambda row: Nim(row["stones"], system_prompt),
        frozen=lambda row: {} if other is None else {row["frozen_seat"]: other},
        eval_dataset=rows[num_train_examples:],
        id="nim",
    )


def best_move(stones: int) -> int:
    """The move that wins if the number of stones is no multiple of 4; else 1."""
    return stones % (MAX_TAKE + 1) or 1


def build_sft_examples(num_examples: int, max_stones: int = 12, seed: int = 1) -> list[dict[str, str]]:
    """Random legal moves: a model trained on them knows the rules and not the strategy."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_examples):
        stones = draw.randint(1, max_stones)
        rows.append({"prompt": str(stones), "completion": str(draw.randint(1, min(MAX_TAKE, stones)))})
    return rows
