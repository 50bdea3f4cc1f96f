"""What a decode step on a CPU costs by its rows: estimated from the output head, corrected by the steps themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollouts.kernels.cpu import PackedWeight

MAX_ROWS = 48
"""Maximum rows of a step with drafts."""
FREE_ROWS = 3.0
"""Where it is not measured, a step of n rows takes the time of `FREE_ROWS + n`."""
MEASURED_ROWS = (1, 4, 8, 12, 16, 24, 32, MAX_ROWS)
BETWEEN = np.stack([np.interp(range(MAX_ROWS + 1), MEASURED_ROWS, each) for each in np.eye(len(MEASURED_ROWS))], 1)
"""Weights `[rows, measured]` of linear interpolation."""
NEAR = 0.5 ** abs(BETWEEN @ np.arange(len(MEASURED_ROWS)) - np.arange(len(MEASURED_ROWS))[:, None]).T
"""Weight of the time of a step for other numbers of rows `[rows, measured]`."""
MEASUREMENTS = 5
MIN_MEASURED_BYTES = 1 << 24
"""A smaller output head stays in the CPU's cache, other than the weights of a step."""
OTHER_COST = 1 / 64
"""Attention and sampling of a row, as a share of the step of one row."""
PLAIN_INTERVAL = 64
"""After so many steps with drafts there is one without, so that the time of these stays known."""
FORGETTING = 1 / 512
"""Part of what was learned of drafts that is forgotten in a step without: they may have become cheaper."""
MAX_ERROR = 1 / 4
"""Greatest relative error of which is learned: other processes may have interrupted a step."""
SMOOTHING = 1 / 8


class StepCosts:
    """Relative time of a decode step by its rows: `estimates`, corrected by the steps that are measured.

    Few rows take the time in which the weights are read, many the time of their products; where the one becomes the
    other depends on CPU, number format and threads, and on how fast memory is at the moment.
    """

    def __init__(self, estimates: Sequence[float], is_fixed: bool = False) -> None:
        self._estimates, self._is_fixed = np.array(estimates), is_fixed
        self._scales: dict[int, NDArray[np.float64]] = {}  # by threads: seconds by estimate at `MEASURED_ROWS`
        self._threads = 0
        self._num_drafted = 0  # steps with drafts since the last one without

    @classmethod
    def of_head(cls, head: PackedWeight) -> StepCosts:
        """Estimates from the output head, which is measured; fixed ones if it is too small for that."""
        if head.data.nbytes < MIN_MEASURED_BYTES:
            return cls([FREE_ROWS + rows for rows in range(MAX_ROWS + 1)], is_fixed=True)
        seconds = dict.fromkeys(MEASURED_ROWS, float("inf"))
        for _ in range(MEASUREMENTS):  # in turns and the least of each: other processes may disturb them
            for num in MEASURED_ROWS:
                x, start = torch.ones(num, head.inputs), time.perf_counter()
                head(x)
                seconds[num] = min(seconds[num], time.perf_counter() - start)
        least = np.maximum.accumulate(list(seconds.values()))
        rows = np.arange(MAX_ROWS + 1)
        return cls((np.interp(rows, MEASURED_ROWS, least) + least[0] * OTHER_COST * rows).tolist())

    @property
    def needs_plain(self) -> bool:
        """Whether the next step must be one without drafts, because the time of these is unknown or old."""
        return not self._is_fixed and (self._threads not in self._scales or self._num_drafted >= PLAIN_INTERVAL)

    def by_rows(self) -> list[float]:
        """Costs of 0 to `MAX_ROWS` rows."""
        scales = self._scales.get(self._threads)
        costs: list[float] = (self._estimates if scales is None else self._estimates * (BETWEEN @ scales)).tolist()
        return costs

    def learn(self, num: int, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows, of which `num` are no drafts."""
        if self._is_fixed or rows > MAX_ROWS:
            return
        self._threads = torch.get_num_threads()
        self._num_drafted = 0 if rows == num else self._num_drafted + 1
        scales = self._scales.get(self._threads)
        if scales is None:
            if rows == num:
                self._scales[self._threads] = np.full(len(MEASURED_ROWS), seconds / self._estimates[num])
            return
        scale = BETWEEN[rows] @ scales
        error = seconds / (self._estimates[rows] * scale) - 1
        scales *= 1 + SMOOTHING * min(max(error, -MAX_ERROR), MAX_ERROR) * NEAR[rows]
        if rows == num:
            scales += FORGETTING * (scale - scales)
