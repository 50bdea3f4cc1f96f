"""Five figures of a run, as plain data and as plotly figures.

Data that is missing gives no figure: a surface needs two steps, a curve one evaluation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Data = dict[str, Any]

NUM_BINS = 24
SCALE = "Viridis"
ACCENT = "#d62728"
LAYER = re.compile(r"(?:^|\.)(?:h|layers|blocks)\.(\d+)\.")


def density_data(samples: Mapping[int, Sequence[float]]) -> Data | None:
    """Distribution of samples per step: `density[step][bin]` are fractions; `mean` and `std` per step."""
    steps = sorted(step for step in samples if samples[step])
    if len(steps) < 2:
        return None
    low = min(min(samples[step]) for step in steps)
    high = max(max(samples[step]) for step in steps)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / NUM_BINS
    density = []
    for step in steps:
        counts = [0] * NUM_BINS
        for value in samples[step]:
            counts[min(int((value - low) / width), NUM_BINS - 1)] += 1
        density.append([count / len(samples[step]) for count in counts])
    means = [math.fsum(samples[step]) / len(samples[step]) for step in steps]
    return {
        "step": steps,
        "bin": [low + (i + 0.5) * width for i in range(NUM_BINS)],
        "density": density,
        "mean": means,
        "std": [
            math.sqrt(math.fsum((value - mean) ** 2 for value in samples[step]) / len(samples[step]))
            for step, mean in zip(steps, means, strict=True)
        ],
    }


def gradient_data(norms: Mapping[int, Mapping[str, float]]) -> Data | None:
    """log10 of the gradient's norm of every layer: `log10_norm[step][layer]`, None where it is 0."""
    steps = sorted(step for step in norms if norms[step])
    if len(steps) < 2:
        return None
    layers = list(dict.fromkeys(layer for step in steps for layer in norms[step]))
    values = [[norms[step].get(layer, 0.0) for layer in layers] for step in steps]
    return {
        "step": steps,
        "layer": layers,
        "log10_norm": [[math.log10(value) if value > 0 else None for value in row] for row in values],
    }


def layer_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """Norms of parameters as norms of layers, in the order of the network: squares add up.

    Parameters of `...h.3...` or `...layers.3...` are layer 3, those in front of all layers the embedding, the others
    the head.
    """
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        match = LAYER.search(name)
        layer = f"layer {int(match[1])}" if match else "embedding" if re.search("wte|embed", name) else "head"
        squares[layer] = squares.get(layer, 0.0) + norm**2

    def place(layer: str) -> tuple[int, int]:
        return (1, int(layer[6:])) if layer.startswith("layer ") else (0 if layer == "embedding" else 2, 0)

    return {layer: math.sqrt(squares[layer]) for layer in sorted(squares, key=place)}


def pass_at_k_data(evaluations: Mapping[int, Mapping[int, float]]) -> Data | None:
    """A curve over steps for each k: `value[i][j]` of the i-th k at the j-th step, None where it was not measured."""
    steps = sorted(step for step in evaluations if evaluations[step])
    if not steps:
        return None
    ks = sorted({k for step in steps for k in evaluations[step]})
    return {"step": steps, "k": ks, "value": [[evaluations[step].get(k) for step in steps] for k in ks]}


def draw_density(data: Data, title: str, what: str) -> Any:
    """A surface over step and value with the fraction of samples as height, plus lines of mean and deviation."""
    graph = _plotly()
    figure = graph.Figure(
        graph.Surface(
            x=data["step"],
            y=data["bin"],
            z=_transpose(data["density"]),
            colorscale=SCALE,
            opacity=0.9,
            colorbar={"title": "share", "len": 0.7},
            hovertemplate=f"step %{{x}}<br>{what} %{{y:.3f}}<br>share %{{z:.3f}}<extra></extra>",
        )
    )
    top = max(map(max, data["density"])) * 1.05
    for label, sign, width in ((f"mean {what}", 0, 5), ("mean + std", 1, 2), ("mean - std", -1, 2)):
        figure.add_scatter3d(
            x=data["step"],
            y=[mean + sign * std for mean, std in zip(data["mean"], data["std"], strict=True)],
            z=[top] * len(data["step"]),
            mode="lines",
            line={"width": width, "color": ACCENT, "dash": "dash" if sign else "solid"},
            name=label,
            hovertemplate=f"step %{{x}}<br>{label} %{{y:.3f}}<extra></extra>",
        )
    return _format_figure(figure, title, "step", what, "share of samples")


def draw_gradient_flow(data: Data) -> Any:
    """A surface over step and layer whose height is the logarithm of the gradient's norm."""
    graph = _plotly()
    figure = graph.Figure(
        graph.Surface(
            x=data["step"],
            y=list(range(len(data["layer"]))),
            z=_transpose(data["log10_norm"]),
            colorscale=SCALE,
            colorbar={"title": "log10 norm", "len": 0.7},
            hovertemplate="step %{x}<br>log10 norm %{z:.2f}<extra></extra>",
        )
    )
    figure = _format_figure(figure, "Gradient flow: norm of each layer", "step", "layer", "log10 of the norm")
    shown = range(0, len(data["layer"]), max(1, len(data["layer"]) // 12))
    return figure.update_scenes(yaxis={"tickvals": list(shown), "ticktext": [data["layer"][i] for i in shown]})


def draw_loss_surface(data: Data) -> Any:
    """The loss around the policy (marked) along two random directions."""
    graph = _plotly()
    figure = graph.Figure(
        graph.Surface(
            x=data["alpha"],
            y=data["beta"],
            z=_transpose(data["loss"]),
            colorscale=SCALE,
            colorbar={"title": "loss", "len": 0.7},
            contours={"z": {"show": True, "usecolormap": True, "project": {"z": True}}},
            hovertemplate="direction 1 %{x:.2f}<br>direction 2 %{y:.2f}<br>loss %{z:.4f}<extra></extra>",
        )
    )
    figure.add_scatter3d(
        x=[0.0],
        y=[0.0],
        z=[data["here"]],
        mode="markers",
        marker={"size": 5, "color": ACCENT},
        name="the policy",
    )
    return _format_figure(figure, f"Loss surface at step {data['step']}", "direction 1", "direction 2", "loss")


def draw_pass_at_k(data: Data) -> Any:
    """A line over steps for each k."""
    graph = _plotly()
    figure = graph.Figure()
    colors = _sample_scale(len(data["k"]))
    for k, values, color in zip(data["k"], data["value"], colors, strict=True):
        figure.add_scatter3d(
            x=data["step"],
            y=[math.log2(k)] * len(values),
            z=values,
            mode="lines+markers",
            line={"width": 5, "color": color},
            marker={"size": 3.5, "color": color},
            name=f"pass@{k}",
            hovertemplate=f"step %{{x}}<br>pass@{k} %{{z:.3f}}<extra></extra>",
        )
    figure = _format_figure(figure, "pass@k over training", "step", "k", "pass@k")
    ticks = {"tickvals": [math.log2(k) for k in data["k"]], "ticktext": [str(k) for k in data["k"]]}
    return figure.update_scenes(yaxis=ticks, zaxis={"range": [0, 1]})


def _plotly() -> Any:
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise ValueError(
            "figures need plotly: pip install 'prime-rl[plots]'; their data is written without it"
        ) from error
    return graph_objects


def _sample_scale(count: int) -> list[str]:
    from plotly.colors import sample_colorscale

    return list(sample_colorscale(SCALE, [0.9 * i / max(1, count - 1) for i in range(count)]))


def _transpose(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Transpose to plotly's layout: rows along y."""
    return [list(column) for column in zip(*rows, strict=True)]


def _format_figure(figure: Any, title: str, x: str, y: str, z: str) -> Any:
    return figure.update_layout(
        title={"text": title, "x": 0.5, "y": 0.96},
        template="plotly_white",
        width=900,
        height=700,
        margin={"l": 10, "r": 10, "t": 60, "b": 10},
        legend={"x": 0.02, "y": 0.92},
        scene={
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}},
            "zaxis": {"title": {"text": z}},
            "camera": {"eye": {"x": -1.4, "y": -1.5, "z": 0.9}, "center": {"x": 0, "y": 0, "z": -0.15}},
            "aspectmode": "cube",
        },
    )
