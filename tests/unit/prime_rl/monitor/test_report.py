"""Reports: chosen rollouts, packed columns and size limits."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from page_runs import (
    HOSTILE,
    index_of,
    sample_rows,
    write_page_run,
)

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.report import MAX_BYTES, _Columns, choose_groups, write_report
from rollouts.training.metrics import append_jsonl, load_jsonl


def test_reports_choose_whole_groups_from_all_over_the_run(run_dir: Path) -> None:
    index = index_of(run_dir)
    groups = index.groups()
    assert choose_groups(groups, 10_000) == groups
    chosen = [number for group in choose_groups(groups, 50) for number in group]
    assert len(chosen) <= 50 and len(chosen) % 4 == 0
    steps = {index.row(n)["step"] for n in chosen}
    assert min(steps) == 1 and max(steps) == 12 and len(steps) >= 9
    assert choose_groups(groups, 3) == []


def unpack(page: str) -> tuple[dict[str, Any], bytes]:
    """The data of a report: JSON and columns."""
    [data] = re.findall(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)
    raw = gzip.decompress(base64.b64decode(data))
    length = int.from_bytes(raw[:4], "little")
    return json.loads(raw[4 : 4 + length]), raw[4 + length :]


def test_report_is_self_contained(run_dir: Path, tmp_path: Path) -> None:
    held = write_report(open_run(run_dir), tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert held == {"rollouts": 144, "total": 144, "with_tokens": 144, "bytes": len(page.encode())}
    assert held["bytes"] < MAX_BYTES
    assert "window.hacked" not in page and page.count("<script") == 2 and page.count("</script>") == 2
    assert not re.findall(r"""(?:src|href)=["'](?!#)|https?://(?!www\.w3\.org/)|url\(|@import""", page)
    data, columns = unpack(page)
    assert data["run"]["state"] == "finished" and set(data["series"]["curves"]) == {"trainer", "orchestrator"}
    assert data["rollouts"]["details"][0]["completion"] == HOSTILE
    layout = {name: (kind, count) for name, kind, count in data["rollouts"]["layout"]}
    assert set(layout) == {"tokens", "mask", "logprob", "advantage", "teacher", "trainer", "version"}
    assert sum(detail["length"] for detail in data["rollouts"]["details"]) == layout["tokens"][1]
    assert len(columns) == sum(-(-n * int(kind[1]) // 4) * 4 for kind, n in layout.values())
    number = layout["tokens"][1]
    tokens = np.frombuffer(columns[: 2 * number], dtype="<u2")
    rows = list(load_jsonl(run_dir / "samples.jsonl"))
    assert tokens.tolist() == [token for row in rows for token in row["tokens"]]
    assert data["vocab"]["900"] == "<end>"


def test_report_drops_tokens_then_texts_then_rollouts(tmp_path: Path) -> None:
    rng = random.Random(1)
    run = write_page_run(tmp_path / "run", num_steps=3, groups=2, size=2)

    def long_row(row: dict[str, Any]) -> dict[str, Any]:
        tokens = [rng.randrange(60_000) for _ in range(600)]
        streams = {"tokens": tokens, "loss_mask": [1] * 600, "logprobs": [-(t % 97) / 9 for t in tokens]}
        return {**row, **streams, "teacher_logprobs": None, "trainer_logprobs": None}

    rows = [long_row(row) for step in range(4, 14) for row in sample_rows(rng, step)]
    append_jsonl(run / "samples.jsonl", rows)
    held = write_report(open_run(run), tmp_path / "report.html", max_bytes=310_000)
    assert held["bytes"] <= 310_000 and held["rollouts"] == held["total"] == 132
    assert 20 <= held["with_tokens"] < 132
    few = write_report(open_run(run), tmp_path / "report.html", max_bytes=170_000)
    assert few["bytes"] <= 170_000 and few["with_tokens"] < held["with_tokens"]


def test_columns_of_a_report_are_aligned() -> None:
    """At multiples of four bytes, where a browser can read them in place."""
    columns = _Columns()
    columns.add([7, 8, 9], [0, 1, 1], {"logprob": [0.0, -1.0, -4.0]})
    data, found, offset = columns.data(), {}, 0
    for name, dtype, count in columns.layout():
        found[name] = np.frombuffer(data, dtype, count, offset).tolist()
        offset += -(-np.dtype(dtype).itemsize * count // 4) * 4
    assert found == {"tokens": [7, 8, 9], "mask": [0, 1, 1], "logprob": [0, 64, 128]} and offset == len(data)
