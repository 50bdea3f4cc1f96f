"""Tasks of a taskset: those to train on and those that are held out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prime_rl.envs.taskset_runner import ENDLESS, read_tasks


class Tasks:
    def __init__(self, number: int, bounded: bool = True) -> None:
        self.bounded, self._number = bounded, number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._number))


@pytest.mark.parametrize(
    ("taskset", "limits", "num_rows", "num_held_out"),
    [
        (Tasks(500), (10, 100), 10, 100),
        (Tasks(5000, bounded=False), (64, 100), 64, 100),
        (Tasks(5000, bounded=False), (None, 100), ENDLESS, 100),
        (Tasks(500), (None, 100), 400, 100),
        (Tasks(60), (None, 100), 30, 30),
        (Tasks(60), (10, 100), 10, 50),
        (Tasks(60), (50, 100), 30, 30),
        (Tasks(60), (50, 10), 50, 10),
        (Tasks(55), (50, 10), 45, 10),
    ],
)
def test_training_tasks_come_before_those_held_out(
    taskset: Tasks, limits: tuple[int | None, int], num_rows: int, num_held_out: int
) -> None:
    rows, held_out = read_tasks(taskset, *limits)
    assert (len(rows), len(held_out)) == (num_rows, num_held_out) and rows + held_out == [
        *range(num_rows + num_held_out)
    ]
