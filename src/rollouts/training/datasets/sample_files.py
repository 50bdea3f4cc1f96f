"""Reads and writes samples in JSONL files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rollouts.training.datasets.prompts import read_prompt
from rollouts.training.types import Sample

PER_TOKEN = (
    "tokens",
    "loss_mask",
    "inference_logprobs",
    "advantages",
    "teacher_logprobs",
    "versions",
    "sampling_support",
)


def export_samples_to_jsonl(samples: Iterable[Sample], path: Path | str, include_tokens: bool = False) -> int:
    """One sample per line, replacing the file at once; returns how many. Per-token lists only with `include_tokens`."""
    rows = (sample.to_dict() for sample in samples)
    left_out = () if include_tokens else PER_TOKEN
    return _write_rows(({key: row[key] for key in row if key not in left_out} for row in rows), Path(path))


def export_samples_to_huggingface_format(samples: Iterable[Sample], path: Path | str) -> int:
    """Rows of `messages` and `metadata`, which `load_dataset("json", data_files=...)` of `datasets` and ours read.

    Returns how many. A prompt that is text becomes a user message, the response the assistant's. No message is added to
    a prompt that is the whole conversation, as those of `load_sft_dataset`. A sample does not have the messages between
    an agent's turns, whose texts are one message here: write `Trajectory.messages` instead.
    """
    return _write_rows(map(_to_conversation, samples), Path(path))


def _to_conversation(sample: Sample) -> dict[str, Any]:
    data = sample.to_dict()
    prompt = data["prompt"]
    prompt = read_prompt(prompt, "a sample's prompt") if isinstance(prompt, dict) else prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if sample.response or not messages or messages[-1].get("role") != "assistant":
        messages = [*messages, {"role": "assistant", "content": sample.response}]
    return {"messages": messages, "metadata": data["metadata"]}


def load_samples_from_jsonl(path: Path | str, limit: int | None = None) -> list[Sample]:
    """The inverse of `export_samples_to_jsonl`, for at most `limit` samples; `ValueError` names a line that is none."""
    samples: list[Sample] = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(samples) >= limit:
                break
            if not line.strip():
                continue
            try:
                samples.append(Sample.from_dict(msgspec.json.decode(line.decode("utf-8-sig"), type=dict)))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return samples


def _write_rows(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write JSON lines beside the file, then put them in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    count = 0
    try:
        with unfinished.open("wb") as file:
            for row in rows:
                file.write(msgspec.json.encode(row) + b"\n")
                count += 1
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
