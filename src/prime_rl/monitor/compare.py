"""`monitor --diff A B`: the first step, token and tensor at which two runs differ, and differing settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from prime_rl.configuration.render import render_value
from prime_rl.monitor.local_runs import LocalRun, parse_toml
from prime_rl.monitor.series import read_series
from rollouts.training.manifests import read_manifest
from rollouts.training.steps import complete_steps, step_path

MEASURED = (
    "time/", "perf/", "system/", "event_loop_lag", "worker", "generation_ms", "scoring_ms", "inference/", "groups/",
    "tokens/", "progress/ckpt_step", "batch/async_level", "restarts/",
)  # fmt: skip
"""Beginnings of the names of metrics that depend on timing and scheduling, as those that end in `/time` do."""

SHOWN = 8
PLACES = ("output_dir", "base_url", "port", "wandb.name", "wandb.group", "trackio.name", "deployment.name")
"""Ends of the keys of settings that differ between any two runs."""


@dataclass(frozen=True)
class Difference:
    """One difference between two runs; `step` is None for settings."""

    what: str
    step: int | None
    text: str


def compare_runs(a: LocalRun, b: LocalRun) -> list[Difference]:
    """The first difference of each kind (settings, samples, metrics, weights), ordered by step."""
    differences = [*compare_configs(a, b)]
    later = [d for d in (compare_samples(a, b), compare_metrics(a, b), compare_weights(a, b)) if d is not None]
    order = {"sample": 0, "metric": 1, "weights": 2}  # order within a step: inputs, then results
    return [*differences, *sorted(later, key=lambda d: (d.step or 0, order[d.what]))]


def differences_text(a: LocalRun, b: LocalRun, differences: list[Difference]) -> str:
    """The comparison as text."""
    lines = [f"A  {a.name}", f"B  {b.name}", ""]
    settings = [d for d in differences if d.step is None]
    lines += [f"settings: {d.text}" for d in settings[:SHOWN]]
    if len(settings) > SHOWN:
        lines.append(f"settings: and {len(settings) - SHOWN} more")
    dated = [d for d in differences if d.step is not None]
    for number, d in enumerate(dated):
        lines.append(f"{'first difference' if number == 0 else 'then'}: step {d.step}, {d.what}: {d.text}")
    if not dated:
        lines.append("samples, metrics and weights are equal, as far as both runs have them")
    return "\n".join(lines)


def compare_configs(a: LocalRun, b: LocalRun) -> Iterator[Difference]:
    """Differing settings of common processes, except output paths."""
    ours, theirs = a.configs(), b.configs()
    for process in sorted(ours.keys() & theirs.keys() - {"rl"}):
        left, right = (flat_config(text) for text in (ours[process], theirs[process]))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key) and not is_place(key):
                yield Difference("setting", None, f"{process} {key} = {left.get(key)} / {right.get(key)}")


def compare_samples(a: LocalRun, b: LocalRun) -> Difference | None:
    """The first sample by step and group whose tokens, log-probs or reward differ."""
    for left, right in zip_longest(a.samples(), b.samples()):
        if left is None or right is None:
            row = left or right or {}
            return Difference("sample", row.get("step"), f"only {'A' if left else 'B'} has {_place(row)}")
        if left.get("step") != right.get("step"):
            step = min(left.get("step", 0), right.get("step", 0))
            return Difference("sample", step, f"A has {_place(left)} where B has {_place(right)}")
        text = _first_difference(left, right)
        if text is not None:
            return Difference("sample", left.get("step"), f"{_place(left)}: {text}")
    return None


def compare_metrics(a: LocalRun, b: LocalRun) -> Difference | None:
    """The first common step at which a metric that does not measure time differs."""
    ours, theirs = read_series(a.rows()), read_series(b.rows())
    first: tuple[int, str, float, float] | None = None
    for process in sorted(ours.keys() & theirs.keys()):
        for name in sorted(ours[process].keys() & theirs[process].keys()):
            if name.startswith(MEASURED) or name.endswith("/time"):
                continue
            right = dict(theirs[process][name])
            changed = next(((s, v, right[s]) for s, v in ours[process][name] if s in right and v != right[s]), None)
            if changed is not None and (first is None or changed[0] < first[0]):
                first = (changed[0], f"{process} {name}", changed[1], changed[2])
    return None if first is None else Difference("metric", first[0], f"{first[1]} = {first[2]!r} / {first[3]!r}")


def compare_weights(a: LocalRun, b: LocalRun) -> Difference | None:
    """The first common version whose tensors differ."""
    roots = a.files.weights, b.files.weights
    for step in sorted(set(complete_steps(roots[0])) & set(complete_steps(roots[1]))):
        names, number = find_changed(*roots, step)
        if names:
            distance = _distance_text(*roots, step, names[0])
            return Difference("weights", step, f"{names[0]}{distance}; {len(names)} of {number} tensors differ")
    return None


def find_changed(a: Path, b: Path, step: int) -> tuple[list[str], int]:
    """The tensors of a version that differ between two directories of weights, and the number of those in `a`."""
    left, right = (read_manifest(step_path(root, step)).tensors for root in (a, b))
    return [name for name in {**left, **right} if left.get(name) != right.get(name)], len(left)


def _first_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """The first difference of two samples, or None."""
    ours, theirs = left.get("tokens") or [], right.get("tokens") or []
    at = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), None)
    if at is not None:
        return f"token {at} is {ours[at]} / {theirs[at]}"
    if len(ours) != len(theirs):
        return f"{len(ours)} / {len(theirs)} tokens, the first {min(len(ours), len(theirs))} alike"
    for name in ("logprobs", "teacher_logprobs", "loss_mask"):
        x, y = left.get(name) or [], right.get(name) or []
        at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), None)
        if at is not None:
            return f"{name} of token {at} (id {ours[at]}) is {x[at]!r} / {y[at]!r}"
    for name in ("reward", "advantage"):
        if left.get(name) != right.get(name):
            return f"{name} {left.get(name)!r} / {right.get(name)!r}"
    return None


def _place(row: Mapping[str, Any]) -> str:
    return f"step {row.get('step')} group {row.get('group_index')} rollout {row.get('index')}"


def _distance_text(a: Any, b: Any, step: int, name: str) -> str:
    """Distance of two tensors, if they are comparable."""
    from safetensors import SafetensorError, safe_open

    try:
        tensors = []
        for root in (a, b):
            with safe_open(step_path(root, step) / "model.safetensors", "numpy") as file:
                tensors.append(file.get_tensor(name).astype("float64"))
        distance = float(abs(tensors[0] - tensors[1]).max())
    except (OSError, ValueError, TypeError, SafetensorError):
        return ""
    return f" (up to {distance:.3g} apart)" if math.isfinite(distance) else " (not finite)"


def is_place(key: str) -> bool:
    """Whether a setting names where a run is, which differs between any two runs."""
    return any(f".{key}".endswith(f".{place}") for place in PLACES)


def flat_config(text: str) -> dict[str, str]:
    """Dotted key -> value of a resolved configuration, as TOML; entries of lists of tables are numbered."""
    return dict(_flatten("", parse_toml(text)))


def _flatten(key: str, value: Any) -> Iterator[tuple[str, str]]:
    below = value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        below = dict(enumerate(value))
    if isinstance(below, dict) and (below or not key):
        for name, item in below.items():
            yield from _flatten(f"{key}.{name}".lstrip("."), item)
    else:
        yield key, render_value(value)
