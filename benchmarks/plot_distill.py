"""The estimators' curves of bench_distill.py as a picture.

    python benchmarks/plot_distill.py .bench/results/distill.json curves.svg

One line per estimator: the mean over the seeds of the probability of the right answer, by training step up to LAST;
facts on the left, modes on the right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LAST = 120
WIDTH, HEIGHT, LEFT, TOP = 300, 220, 44, 30
PANEL = LEFT + WIDTH + 190
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888", "#000000", "#ff8800")


def main() -> int:
    """Read the results, write the picture."""
    source, target = map(Path, sys.argv[1:])
    rows = [row for row in json.loads(source.read_text())["raw"] if row["table"] == "estimators"]
    panels = {"facts": [r for r in rows if ":" not in r["name"]], "modes": [r for r in rows if ":" in r["name"]]}
    colors = dict(zip(dict.fromkeys(call(row) for row in rows), COLORS, strict=False))
    parts = [draw(title, found, PANEL * i, colors) for i, (title, found) in enumerate(panels.items()) if found]
    size = f'width="{PANEL * len(parts)}" height="{HEIGHT + TOP + 44}"'
    style = "<style>text{font-size:11px;font-family:sans-serif}</style>"
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    target.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{paper}{"".join(parts)}</svg>\n')
    return 0


def call(row: dict[str, Any]) -> str:
    """The estimator's name, the same in both panels."""
    return str(row["name"]).split(": ")[-1].removesuffix(" reverse").replace("the teacher", "teacher")


def draw(title: str, rows: list[dict[str, Any]], x0: int, colors: dict[str, str]) -> str:
    """One panel with its axes and its legend."""
    curves = {call(row): mean_curve(row) for row in rows}
    last = max(step for curve in curves.values() for step, _ in curve)
    out = [f'<g transform="translate({x0 + LEFT},{TOP})"><text x="0" y="-12" font-weight="bold">{title}</text>']
    out += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    for part in (0.0, 0.5, 1.0):
        out.append(f'<text x="-6" y="{HEIGHT * (1 - part) + 4:.0f}" text-anchor="end">{part:g}</text>')
    for step in range(0, last + 1, 20):
        out.append(f'<text x="{WIDTH * step / last:.0f}" y="{HEIGHT + 16}" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 32}" text-anchor="middle">step</text>')
    for place, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{WIDTH * step / last:.1f},{HEIGHT * (1 - value):.1f}" for step, value in curve)
        color, y = colors[name], 10 + 18 * place
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(f'<path d="M{WIDTH + 8} {y}h16" stroke="{color}" stroke-width="2"/>')
        out.append(f'<text x="{WIDTH + 28}" y="{y + 4}">{name}</text>')
    return "".join([*out, "</g>"])


def mean_curve(row: dict[str, Any]) -> list[tuple[int, float]]:
    """Step and mean accuracy over the seeds."""
    curves = [seed["curve"] for seed in row["seeds"]]
    means = [(points[0][0], sum(value for _, value in points) / len(points)) for points in zip(*curves, strict=True)]
    return [(step, mean) for step, mean in means if step <= LAST]


if __name__ == "__main__":
    raise SystemExit(main())
