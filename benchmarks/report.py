"""Writes `docs/benchmarks.md` from the results in `.bench/results`.

    python benchmarks/report.py [--results DIR] [--output docs/benchmarks.md]

Sections without new results are unchanged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results import RESULTS, ROOT, Row

HEAD = """# Benchmarks

Each section is the output of one command with thresholds; peers are measured in the same run, alternating. `make bench`
runs all of them and writes this page, `make bench BENCH="grpo long_tail"` some. Missed thresholds are included.
"""
ABOUT = {
    "engine": (
        "python benchmarks/bench_engine.py",
        "Generated tokens per second against vLLM and transformers; ratios.",
    ),
    "decode_gpu": (
        "python benchmarks/bench_decode_gpu.py",
        "Decoding of the 0.6B shape on a GPU, with and without CUDA graphs, relative to memory bandwidth.",
    ),
    "trainer": ("python benchmarks/bench_trainer.py", "Tokens per CPU-second of a training step against TRL; ratios."),
    "prefix_tree": (
        "python benchmarks/bench_prefix_tree.py",
        "Tokens and CPU time of a training step on samples that share beginnings, alone over shared.",
    ),
    "grpo": ("python benchmarks/bench_grpo.py", "CPU seconds of RL to a fixed reward against TRL; ratios."),
    "long_tail": (
        "python benchmarks/bench_long_tail.py",
        "Asynchronous against synchronous RL where one rollout in 32 is slow: seconds to the same reward.",
    ),
    "orchestrator": ("python benchmarks/bench_orchestrator.py", "CPU time of a rollout in client and orchestrator."),
    "gateway": (
        "python benchmarks/bench_gateway.py",
        "CPU time of the gateway for each request of an agent; the client of the engine is not included.",
    ),
    "training_api": (
        "python benchmarks/bench_training_api.py",
        "Eight clients of `serve` at once against one, in an RL loop; latency of samples during training.",
    ),
    "fleet": (
        "python benchmarks/bench_fleet.py",
        "Orchestrator work per rollout from 10 to 1,000 engines, in virtual time.",
    ),
    "e2e": ("python benchmarks/bench_e2e.py", "The demo on three seeds: rewards and time."),
    "examples": ("python benchmarks/bench_examples.py", "The tiny examples on two seeds: reward before and after RL."),
    "nanochat": (
        "python benchmarks/bench_nanochat.py",
        "A nanochat model from random weights on two seeds: accuracy on AQuA-like problems before and after RL.",
    ),
    "distill": (
        "python benchmarks/bench_distill.py",
        "Context distillation in one process: number of seeds (of three) that pass each row.",
    ),
    "exact": ("python benchmarks/bench_exact.py", "Log-probs of the engine compared with the trainer's, bit for bit."),
    "exact_bfloat16": ("python benchmarks/bench_exact.py --dtype bfloat16", "The same, in bfloat16."),
    "sync": (
        "python benchmarks/bench_sync.py",
        "Weight transfer from trainer to engine, relative to a plain copy of the bytes.",
    ),
    "startup": ("python benchmarks/bench_startup.py", "Startup time of commands."),
}


def section(name: str, report: dict[str, Any]) -> str:
    """One benchmark as a table."""
    command, about = ABOUT.get(name, (f"python benchmarks/bench_{name}.py", ""))
    options, machine = report.get("options", ""), report["machine"]
    if options and not command.endswith(options):
        command = f"{command} {options}"
    rows = [Row(**{key: value for key, value in row.items() if key != "ok"}) for row in report["rows"]]
    lines = [
        f"## {name}",
        "",
        f"{about} `{command}`, {report['date']}, {machine['cores']} x {machine['cpu']}, load {machine['load']:.1f}.",
        "",
        "| | measured | threshold | | |",
        "|---|---|---|---|---|",
        *(f"| {r.name} | {r.value:.4g} | {r.threshold} | {r.verdict} | {r.detail} |" for r in rows),
    ]
    return "\n".join(lines)


def merge(page: str, new: dict[str, str]) -> str:
    """The page with its sections replaced or extended by `new`."""
    sections = {part.partition("\n")[0]: f"## {part.strip()}" for part in ("\n" + page).split("\n## ")[1:]}
    sections |= new
    order = sorted(sections, key=lambda name: (list(ABOUT).index(name) if name in ABOUT else len(ABOUT), name))
    return "\n\n".join([HEAD.strip(), *(sections[name] for name in order)]) + "\n"


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
    options.output.write_text(merge(page, {name: section(name, report) for name, report in found.items()}))
    print(f"{options.output}: {', '.join(found)}")


if __name__ == "__main__":
    main()
