"""Plots the training curves of a run with matplotlib: `loss.png`, `reward.png` and `optimizer.png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.monitor.run_kind import RunKind
from prime_rl.monitor.series import Series, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "loss.png": (("loss/mean", "val_loss/mean"), ("entropy/mean",), ("mismatch_kl/mean",)),
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

MAX_LINES = 6
"""Maximum number of metrics in a panel."""

SMOOTHED_POINTS = 20
"""Longer series are smoothed, except scheduled values."""

SCHEDULED = ("optim/lr",)
PANEL_INCHES = (8.8, 2.4)


def check_matplotlib() -> None:
    """Raise `ValueError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("--save-dir needs matplotlib: pip install 'prime-rl[plots]', or uvx --with matplotlib ...")


def save_plots(series: Mapping[str, Series], directory: Path, kind: RunKind | None = None) -> list[Path]:
    """Draw the plots; returns the files. Panels without data are skipped.

    A run with a teacher has `distillation.png` as well.
    """
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    pictures = dict(PICTURES)
    if kind is not None and kind.has_teacher:
        pictures["distillation.png"] = DISTILLATION_PICTURE
    if kind is not None and not kind.scores_rewards:
        pictures["reward.png"] = PICTURES["reward.png"][1:]
    for name, panels in pictures.items():
        filled = [curves for panel in panels if (curves := _choose_curves(series, panel))]
        if not filled:
            continue
        figure = Figure((PANEL_INCHES[0], PANEL_INCHES[1] * len(filled)), layout="constrained")
        for axes, curves in zip(figure.subplots(len(filled), squeeze=False).flat, filled, strict=True):
            _draw_panel(axes, curves)
        figure.savefig(directory / name)
        written.append(directory / name)
    return written


def _choose_curves(series: Mapping[str, Series], names: Sequence[str]) -> dict[str, Series]:
    """The metrics of a panel, each once."""
    curves: dict[str, Series] = {}
    for name in names:
        for key in sorted(key for key in series if fnmatchcase(key, name)):
            if series[key] and series[key] not in curves.values():  # with one environment, its reward is the total
                curves[key] = series[key]
    return dict(list(curves.items())[:MAX_LINES])


def _draw_panel(axes: Axes, curves: Mapping[str, Series]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        color, steps = f"C{number}", [step for step, _ in points]
        smoothed = points
        if len(points) > SMOOTHED_POINTS and name not in SCHEDULED:
            axes.plot(steps, [value for _, value in points], color=color, alpha=0.35, linewidth=1)
            smoothed = smooth(points, 0.6)
        axes.plot(steps, [value for _, value in smoothed], color=color, label=name, marker="o", markevery=[-1])
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    axes.grid(axis="y", alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
