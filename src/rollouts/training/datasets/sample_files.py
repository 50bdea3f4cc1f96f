"""Samples in JSON lines files, to look at and to train on again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollouts.training.types import Sample

PER_TOKEN = ("tokens", "loss_mask", "inference_logprobs", "advantages", "teacher_logprobs", "versions")


def export_samples_to_jsonl(samples: Iterable[Sample], path: Path | str, include_tokens: bool = False) -> int:
    """One sample per line, replacing the file at once; returns how many. Per-token lists only with `include_tokens`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    count = 0
    try:
        with unfinished.open("wb") as file:
            for sample in samples:
                row = sample.to_dict()
                kept = row if include_tokens else {key: row[key] for key in row if key not in PER_TOKEN}
                file.write(msgspec.json.encode(kept) + b"\n")
                count += 1
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def load_samples_from_jsonl(path: Path | str) -> list[Sample]:
    """The inverse of `export_samples_to_jsonl`. `ValueError` names the line that is no sample."""
    samples = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                samples.append(Sample.from_dict(msgspec.json.decode(line, type=dict)))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return samples
