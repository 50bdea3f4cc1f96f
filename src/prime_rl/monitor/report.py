"""`monitor RUN --report report.html`: a self-contained page of a run in one file."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.logs import pack_logs
from prime_rl.monitor.page_data import build_page_data
from prime_rl.monitor.rollout_detail import STREAMS, rollout_detail
from prime_rl.monitor.rollout_index import RolloutIndex
from prime_rl.monitor.vocabulary import Vocabulary, find_tokenizer
from prime_rl.runtime.redaction import redact_fields

MAX_ROLLOUTS = 2000
MAX_BYTES = 3_000_000
PAGE_BYTES = 200_000
LOG_BYTES = 30_000
"""Bytes at the end of each log that a report contains."""

SCRIPTS = (
    "dom",
    "metric_help",
    "source",
    "export",
    "chart",
    "timeline",
    "tokens",
    "difference",
    "messages",
    "rollouts",
    "prompts",
    "overview",
    "curves",
    "logs",
    "config",
    "runs",
    "app",
)
STYLES = ("base", "parts", "rollouts")

TEXT_SHARE = 0.6
"""Maximum share of the budget for texts before they are truncated, so that some rollouts keep their tokens."""

# (rollouts, characters of a text): successive limits while the texts exceed their budget.
_LADDER = (
    *((MAX_ROLLOUTS, characters) for characters in (1 << 30, 8000, 2000)),
    *((1000, 1200), (400, 800), (100, 400), (0, 0)),
)


def write_report(run: LocalRun, path: Path, max_bytes: int = MAX_BYTES) -> dict[str, int]:
    """Write the page; returns the counts `rollouts`, `total`, `with_tokens` and `bytes`."""
    index = RolloutIndex(run)
    index.grow()
    shared = build_page_data(run) | {"logs": pack_logs(run, LOG_BYTES)}
    tokenizer = find_tokenizer(run.path, shared["run"]["model"])
    vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
    budget = (max_bytes - PAGE_BYTES) * 3 // 4  # base64 encodes three bytes as four characters
    groups = index.groups()
    pack = partial(encode_payload, shared, index, vocabulary=vocabulary)
    for most, characters in _LADDER:
        chosen = choose_groups(groups, most)
        bare = len(pack(chosen, [], characters))
        if bare <= TEXT_SHARE * budget or not chosen:
            break
    with_tokens, payload = chosen, pack(chosen, chosen, characters)
    limit = sum(map(len, chosen))
    while len(payload) > budget and limit:
        # Token streams are the largest part: keep as many as fit.
        limit = int(limit * 0.95 * max(budget - bare, 0) / (len(payload) - bare))
        with_tokens = choose_groups(chosen, limit)
        payload = pack(chosen, with_tokens, characters)
    page = render_page(payload)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(page)
    counts = {"rollouts": sum(map(len, chosen)), "total": index.facts()["count"]}
    return {**counts, "with_tokens": sum(map(len, with_tokens)), "bytes": len(page)}


def choose_groups(groups: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Groups spread evenly over the run, at most `limit` rollouts in total."""
    total = sum(map(len, groups))
    if total <= limit:
        return list(groups)
    count = max(int(limit / (total / len(groups))), 1)
    chosen: list[list[int]] = []
    for k in sorted({round(k) for k in np.linspace(0, len(groups) - 1, count)}):
        if sum(map(len, chosen)) + len(groups[k]) <= limit:
            chosen.append(groups[k])
    return chosen


def encode_payload(
    shared: dict[str, Any],
    index: RolloutIndex,
    chosen: Sequence[list[int]],
    with_tokens: Sequence[list[int]],
    characters: int,
    vocabulary: Vocabulary | None,
) -> bytes:
    """gzip of: length of the JSON (4 bytes, little endian), the JSON, then the streams as columns of small integers."""
    numbers, kept = list(chain.from_iterable(chosen)), set(chain.from_iterable(with_tokens))
    details, columns = [], _Columns()
    used: set[int] = set()
    for number in numbers:
        row = index.row(number)
        detail = rollout_detail(number, row)
        tokens, mask, streams = detail.pop("tokens"), detail.pop("mask"), detail.pop("streams")
        detail |= {name: _cut(detail[name], characters) for name in ("prompt", "completion", "answer", "info")}
        keep = number in kept
        used.update(tokens if keep else ())
        detail["length"] = columns.add(tokens, mask, streams) if keep else 0
        details.append(detail)
    head = {
        **shared,
        "rollouts": {
            "rows": index.brief(numbers),
            "details": details,
            "facts": index.facts(),
            "layout": columns.layout(),
        },
        "vocab": vocabulary.table(used) if vocabulary is not None else {},
    }
    encoded = msgspec.json.encode(redact_fields(head))
    return gzip.compress(len(encoded).to_bytes(4, "little") + encoded + columns.data(), 7, mtime=0)


class _Columns:
    """Per-token streams of all rollouts in columns, at the precision of a color scale.

    Log-probs are stored as round(64 sqrt(-logprob)) in a byte, differences and advantages as round(32 sqrt(|x|)) with
    their sign: about 3 % apart, finest around 0.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._streams: dict[str, list[float]] = {name: [] for name in STREAMS}
        self._has: set[str] = set()

    def add(self, tokens: list[int], mask: list[float], streams: dict[str, list[float]]) -> int:
        """Append one rollout; returns its number of tokens."""
        if len(mask) != len(tokens):
            return 0
        self._tokens += tokens
        self._mask += [1 if m else 0 for m in mask]
        for name, column in self._streams.items():
            column += streams.get(name, [0.0] * len(tokens))
        self._has |= set(streams)
        return len(tokens)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        wide = max(self._tokens, default=0) > 0xFFFF
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.array(self._tokens, dtype="<u4" if wide else "<u2"),
            "mask": np.array(self._mask, dtype="u1"),
        }
        for name in (name for name in STREAMS if name in self._has):
            values = np.array(self._streams[name])
            if name == "logprob":
                arrays[name] = np.minimum(np.rint(np.sqrt(np.maximum(-values, 0)) * 64), 255).astype("u1")
            elif name == "version":
                arrays[name] = values.astype("<u4")
            else:
                arrays[name] = np.clip(np.rint(np.sign(values) * np.sqrt(np.abs(values)) * 32), -127, 127).astype("i1")
        return arrays

    def layout(self) -> list[list[Any]]:
        """`[name, type, count]` of each column."""
        return [[name, array.dtype.str.lstrip("<|"), len(array)] for name, array in self._arrays().items()]

    def data(self) -> bytes:
        """The columns, each at a multiple of four bytes."""
        return b"".join(array.tobytes() + b"\0" * (-array.nbytes % 4) for array in self._arrays().values())


def page_parts() -> tuple[str, str, str]:
    """Frame, style and script of the page."""
    folder = files("prime_rl.monitor") / "page"
    frame = (folder / "page.html").read_text(encoding="utf-8")
    style = "\n".join((folder / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    script = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return frame, style, script


def render_page(payload: bytes | None, view: str = "run") -> bytes:
    """The page with an embedded run, or without one for the live server; `view`: of a run, or of all `runs`.

    The content security policy allows only this script, by its hash.
    """
    frame, style, script = page_parts()
    script = f"\n{script}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "connect-src 'self'" if payload is None else "connect-src 'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    data = "" if payload is None else base64.b64encode(payload).decode()
    parts = {"policy": policy, "view": view, "style": style, "data": data, "script": script}
    for name, text in parts.items():
        frame = frame.replace(f"<!--{name}-->", text, 1)
    return frame.encode()


def _cut(value: Any, characters: int) -> Any:
    """Truncate long texts in the middle."""
    if isinstance(value, str) and len(value) > characters:
        half = characters // 2
        return f"{value[:half]}\n[... {len(value) - characters} characters left out ...]\n{value[len(value) - half :]}"
    if isinstance(value, list):
        return [_cut(part, characters) for part in value]
    if isinstance(value, dict):
        return {key: _cut(part, characters) for key, part in value.items()}
    return value
