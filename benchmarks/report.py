"""Writes `docs/benchmarks.md` from the results in `.bench/results`.

    python benchmarks/report.py [--results DIR] [--output docs/benchmarks.md]

Tables without new results are unchanged: those of other benchmarks and of other processors. Notes between the line of a
command and its table are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT, Row

HEAD = """# Benchmarks

Each section is the output of one command with thresholds, one table per kind of processor; the line above a table lists
the rows that miss their threshold. Peers are measured in the same run, alternating. `make bench` runs most of those
without options and rewrites this page, `make bench BENCH="grpo long_tail"` some; the command of each other section is
above its table.
"""
ABOUT = {
    "engine": "Generated tokens per second against vLLM and transformers; ratios.",
    "speculation": "Speculative decoding of the embedded engine: tokens per second with it over those without it.",
    "decode_gpu": "Decoding of the 0.6B shape on a GPU, with and without CUDA graphs, relative to memory bandwidth.",
    "trainer": "Tokens per CPU-second of a training step against TRL; ratios.",
    "prefix_tree": "Tokens and CPU time of a training step on samples that share beginnings, alone over shared.",
    "grpo": "CPU seconds of RL to a fixed reward against TRL; ratios.",
    "long_tail": "Asynchronous against synchronous RL where one rollout in 32 is slow: seconds to the same reward.",
    "orchestrator": "CPU time of a rollout in client and orchestrator.",
    "gateway": "CPU time of the gateway for each request of an agent; the client of the engine is not included.",
    "training_api": "Eight clients of `serve` at once against one, in an RL loop; latency of samples during training.",
    "fleet": "Orchestrator work per rollout from 10 to 1,000 engines, in virtual time.",
    "e2e": "The demo on three seeds: rewards and time.",
    "examples": "The tiny examples on two seeds: reward before and after RL.",
    "nanochat": "A nanochat model from random weights on two seeds: accuracy on AQuA-like problems, before and after.",
    "distill": "Context distillation in one process: number of seeds (of three) that pass each row.",
    "exact": "Log-probs of the engine compared with the trainer's, bit for bit.",
    "exact_paths": "Tokens and log-probs of batches, speculation, prefill and the trainer, compared bit for bit.",
    "memory": "Peak memory of an inference process with weight updates, and their pauses.",
    "sync": "Weight transfer from trainer to engine, relative to a plain copy of the bytes.",
    "sync_delta": "Weights published as the difference to the version before, against full weights, on a real model.",
    "startup": "Startup time of commands.",
}
"""Sections in order; `engine_smollm2` is a further one of the kind `engine`."""


def find_kind(title: str) -> str:
    """The name in `ABOUT` that a section's title begins with."""
    return max((name for name in ABOUT if title.startswith(name)), key=len, default="")


def describe_misses(rows: list[Row]) -> str:
    """A sentence on the thresholds."""
    bounded, missed = [r for r in rows if r.bound is not None], [r.name.strip() for r in rows if not r.ok]
    if not bounded:
        return "No thresholds."
    if not missed:
        return f"All thresholds hold ({len(bounded)})."
    return f"Misses {len(missed)} of {len(bounded)} thresholds: {'; '.join(missed)}."


def find_notes(body: str) -> list[str]:
    """The paragraphs between the first one of a table's text and the table."""
    return [part for part in body.split("\n\n")[1:] if not part.startswith("|")]


def build_table(report: dict[str, Any]) -> tuple[str, str, str]:
    """The processor of a result, the line above its table, and the table."""
    machine = report["machine"]
    rows = [Row(**{key: value for key, value in row.items() if key != "ok"}) for row in report["rows"]]
    summary = f"`{report['command']}`, {report['date']}, load {machine['load']:.1f}. {describe_misses(rows)}"
    lines = [
        "| | measured | threshold | | |",
        "|---|---|---|---|---|",
        *(f"| {r.name} | {r.value:.4g} | {r.threshold} | {r.verdict} | {r.detail} |" for r in rows),
    ]
    return f"{machine['cores']} x {machine['cpu']}", summary, "\n".join(lines)


def parse(text: str, mark: str) -> tuple[str, dict[str, str]]:
    """What is before the first heading of this level, and the text below each heading."""
    head, *parts = ("\n" + text).split(f"\n{mark} ")
    return head.strip(), {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


def merge(page: str, found: dict[str, dict[str, Any]]) -> str:
    """The page with the tables of new results; those of other processors and sections stay."""
    sections = parse(page, "##")[1]
    for title, report in found.items():
        head, tables = parse(sections.get(title, ""), "###")
        processor, summary, table = build_table(report)
        tables[processor] = "\n\n".join([summary, *find_notes(tables.get(processor, "")), table])
        parts = (f"### {name}\n\n{body}" for name, body in tables.items())
        sections[title] = "\n\n".join([ABOUT.get(find_kind(title), head), *parts]).strip()
    order = sorted(sections, key=lambda title: ([*ABOUT, ""].index(find_kind(title)), title))
    return "\n\n".join([HEAD.strip(), *(f"## {title}\n\n{sections[title]}" for title in order)]) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/benchmarks.md from the results.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))}
    if not found:
        raise SystemExit(f"error: {options.results} holds no results: run a benchmark first")
    page = options.output.read_text() if options.output.exists() else ""
    options.output.write_text(merge(page, found))
    print(f"{options.output}: {', '.join(found)}")


if __name__ == "__main__":
    main()
