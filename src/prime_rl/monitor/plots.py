"""Plots the training curves of a run: `loss.png`, `reward.png` and `optimizer.png`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from prime_rl.monitor.png import Canvas, Color, text_width
from prime_rl.monitor.run_kind import RunKind
from prime_rl.monitor.series import Series, smooth

PICTURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "loss.png": (("loss/mean",), ("entropy/mean",), ("mismatch_kl/mean",)),
    "reward.png": (("reward/mean", "val_reward/mean", "reward/*"), ("completion_len/mean",), ("is_truncated/mean",)),
    "optimizer.png": (("optim/grad_norm",), ("optim/lr",), ("perf/throughput",)),
}
"""File -> panels -> metrics of a panel; `name/*` matches all metrics with that prefix."""

DISTILLATION_PICTURE: tuple[tuple[str, ...], ...] = (
    ("teacher_kl/mean", "teacher_kl_reverse/mean", "teacher_kl_forward/mean"),
    ("distill/*/gap_closed", "distill/*/retention"),
    ("distill/*/student/avg", "distill/*/teacher_context/avg"),
)
"""Panels of `distillation.png`."""

INK, FAINT, GRID = (40, 44, 52), (120, 126, 138), (228, 230, 235)
COLORS: tuple[Color, ...] = (
    (51, 102, 204),
    (214, 96, 42),
    (38, 140, 93),
    (146, 77, 181),
    (190, 150, 20),
    (90, 90, 90),
)
EXACT = {"optim/lr"}
"""Scheduled values, which are not smoothed."""

WIDTH, PANEL = 880, 240
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 44, 34


def save_plots(series: Mapping[str, Series], directory: Path, kind: RunKind | None = None) -> list[Path]:
    """Draw the plots; returns the files. Panels without data are skipped.

    A run that learns from a teacher has `distillation.png` as well.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    pictures = dict(PICTURES)
    if kind is not None and kind.has_teacher:
        pictures["distillation.png"] = DISTILLATION_PICTURE
    if kind is not None and not kind.scores_rewards:
        pictures["reward.png"] = PICTURES["reward.png"][1:]
    for name, panels in pictures.items():
        filled = [lines for panel in panels if (lines := _choose(series, panel))]
        if not filled:
            continue
        canvas = Canvas(WIDTH, PANEL * len(filled) + 12)
        for number, lines in enumerate(filled):
            _draw_panel(canvas, number * PANEL, lines)
        canvas.save(directory / name)
        written.append(directory / name)
    return written


def _choose(series: Mapping[str, Series], names: Sequence[str]) -> dict[str, Series]:
    """The metrics of a panel with more than one point, at most one per color."""
    lines: dict[str, Series] = {}
    for name in names:
        found = [name] if "*" not in name else sorted(key for key in series if fnmatchcase(key, name))
        for key in found:
            points = series.get(key)
            if points and points not in lines.values():  # with one environment, its reward is the total
                lines[key] = points
    return dict(list(lines.items())[: len(COLORS)])


def _draw_panel(canvas: Canvas, top: int, lines: Mapping[str, Series]) -> None:
    values = [value for points in lines.values() for _, value in points]
    steps = [step for points in lines.values() for step, _ in points]
    low, high = _padded(min(values), max(values))
    first, last = min(steps), max(max(steps), min(steps) + 1)
    x0, x1, y0, y1 = LEFT, WIDTH - RIGHT, top + PANEL - BOTTOM, top + TOP

    def place(step: float, value: float) -> tuple[float, float]:
        return x0 + (x1 - x0) * (step - first) / (last - first), y0 - (y0 - y1) * (value - low) / (high - low)

    for tick in ticks(low, high, 4):
        _, y = place(first, tick)
        canvas.line([(x0, y), (x1, y)], GRID)
        canvas.text(x0 - 10, y + 4, number_text(tick), FAINT, 9, "right")
    for tick in ticks(first, last, 8):
        x, _ = place(tick, low)
        if float(tick).is_integer():
            canvas.text(x, y0 + 20, f"{tick:.0f}", FAINT, 9, "middle")
    canvas.line([(x0, y0), (x1, y0)], FAINT)
    x = float(x0)
    for (name, points), color in zip(lines.items(), COLORS, strict=False):
        canvas.line([(x, top + 22), (x + 16, top + 22)], color, 3)
        canvas.text(x + 24, top + 27, name, INK, 11)
        x += 24 + text_width(name, 11) + 30
        noisy = len(points) > 20 and name not in EXACT
        drawn = smooth(points, 0.6) if noisy else points
        if noisy:
            canvas.line([place(*point) for point in points], color, 1, 0.35)
        canvas.line([place(*point) for point in drawn], color, 2)
        end = place(*drawn[-1])
        canvas.line([end, end], color, 7)


def _padded(low: float, high: float) -> tuple[float, float]:
    """A non-empty value range with a margin."""
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - air, high + air


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between two values."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    start = math.ceil(low / step - 1e-9)
    return [k * step for k in range(start, math.floor(high / step + 1e-9) + 1)]


def number_text(value: float) -> str:
    """A number in few characters."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 0.001:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:.4g}"
