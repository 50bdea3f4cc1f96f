"""Page of a run: first paint and filter latency of the live page, size of the report.

    python benchmarks/bench_page.py [--rollouts 100000] [--tokens 60] [--report-tokens 400] [--json FILE]

The run is synthetic: groups of eight, words of an artificial language. The live page is the real command in a real
Chromium (needs playwright and a browser): first paint is from the request to the first numbers on the screen, a filter
from a key (the event's own time stamp) to the frame after the one with the new count; `slowest` is the maximum over all
keys, `filter_server_ms` the server's part. The measured report contains 2,000 rollouts of `--report-tokens` tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
PAINT_S, FILTER_S, REPORT_BYTES = 1.0, 0.2, 3_000_000
TYPED = ("bar son", "gult men", "xyz", "e ba")
TIMER = """() => {
  let key = null;
  addEventListener("keydown", event => { key = event.timeStamp; }, true);
  new MutationObserver(() => {
    const begun = key;
    key = null;
    if (begun !== null) requestAnimationFrame(() => requestAnimationFrame(now => window.taken.push(now - begun)));
  }).observe(document.querySelector(".filters output"), { childList: true, characterData: true, subtree: true });
}"""
WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s", "lt", "nd")]


def make_run(path: Path, num_rollouts: int, num_tokens: int) -> Path:
    """A run directory with this many rollouts of this many tokens."""
    import msgspec
    from page_runs import VOCAB, metric_rows, write_page_run

    write_page_run(path, num_steps=1, groups=1, size=1)
    (path / "samples.jsonl").unlink()
    rng, encode = random.Random(0), msgspec.json.Encoder().encode
    num_steps = max(num_rollouts // 1000, 10)
    per_step = num_rollouts // num_steps
    with (path / "samples.jsonl").open("wb") as file:
        for number in range(num_rollouts):
            file.write(encode(_row(rng, number, number // per_step + 1, num_tokens, VOCAB)) + b"\n")
    with (path / "metrics.jsonl").open("wb") as file:
        for step in range(1, num_steps + 1):
            extra = {f"further/metric_{k}": rng.random() for k in range(100)}
            for row in metric_rows(step):
                file.write(encode({**row, **(extra if "loss/mean" in row else {})}) + b"\n")
    return path


def _row(rng: random.Random, number: int, step: int, num_tokens: int, vocab: dict[str, int]) -> dict[str, Any]:
    half = num_tokens // 2
    text = " ".join(rng.choices(WORDS, k=half // 4 + 1))[: num_tokens - half]
    tokens = [vocab.get(c, 0) for c in text.ljust(num_tokens, "e")][:num_tokens]
    mask = [0] * half + [1] * (num_tokens - half)
    reward = round(rng.random(), 2)
    return {
        "step": step,
        "timestamp": 0.0,
        "process": "orchestrator",
        "env": rng.choice(("alpha", "beta", "gamma")),
        "group_index": number // 8,
        "index": number % 8,
        "prompt": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=12))}],
        "completion": text,
        "reward": reward,
        "advantage": reward - 0.5,
        "metrics": {"exact": 0.5},
        "status": "completed",
        "stop_reason": "stop",
        "error": None,
        "versions": [[half, step - 1]],
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": [-rng.expovariate(2) if m else 0.0 for m in mask],
    }


def serve(run: Path) -> Iterator[str]:
    """The address of the live page; ends the server afterwards."""
    command = [sys.executable, "-m", "prime_rl.monitor.wandb_monitor", str(run), "--serve", "--port", "0"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        yield re.findall(r"http://\S+/", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(30)


def measure_live(run: Path, rounds: int = 5) -> dict[str, float]:
    """Seconds to the first paint (the index still grows, then complete), to index all, and of filters."""
    from playwright.sync_api import sync_playwright

    out: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        warm = browser.new_page()
        warm.goto("about:blank")
        for url in serve(run):
            started = time.monotonic()
            out["paint_while_indexing_s"] = _paint(browser, url)
            page = browser.new_page()
            page.goto(url + "#rollouts")
            while True:
                page.wait_for_selector(".filters output")
                shown = page.locator(".filters output").inner_text()
                if shown.startswith("100,000") or time.monotonic() - started > 120:
                    break
                page.wait_for_timeout(50)
            out["index_s"] = time.monotonic() - started
            out["paint_s"] = statistics.median(_paint(browser, url) for _ in range(rounds))
            page.evaluate(TIMER)
            seconds = [second for word in TYPED for second in _type(page, word)]
            out["filter_text_s"], out["filter_slowest_s"] = statistics.median(seconds), max(seconds)
            out["filter_keys"] = len(seconds)
            out["filter_server_ms"] = statistics.median(_ask(page, url) for _ in range(rounds))
        browser.close()
    return out


def _paint(browser: Any, url: str) -> float:
    page = browser.new_page()
    start = time.monotonic()
    page.goto(url, wait_until="commit")
    page.wait_for_selector(".tile b")
    seconds = time.monotonic() - start
    page.close()
    return seconds


def _type(page: Any, word: str) -> list[float]:
    """Seconds of every key of a word that changed the count."""
    page.fill(".filters input[type=search]", "")
    page.wait_for_timeout(300)
    page.evaluate("() => { window.taken = []; }")
    for letter in word:
        page.locator(".filters input[type=search]").press_sequentially(letter)
        page.wait_for_timeout(400)
    return [milliseconds / 1000 for milliseconds in page.evaluate("() => window.taken")]


def _ask(page: Any, url: str) -> float:
    ask = "async url => { const t = performance.now(); await (await fetch(url)).json(); return performance.now() - t; }"
    return float(page.evaluate(ask, f"{url}api/rollouts?text=lar+b&min=0.5&sort=reward&limit=100"))


def main() -> None:
    """Make runs, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--report-tokens", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from prime_rl.monitor.local_runs import open_run
    from prime_rl.monitor.report import write_report

    result: dict[str, Any] = {"load": os.getloadavg()[0], "rollouts": options.rollouts}
    with tempfile.TemporaryDirectory() as folder:
        small = make_run(Path(folder) / "small", 2000, options.report_tokens)
        start = time.monotonic()
        held = write_report(open_run(small), Path(folder) / "report.html")
        result["report"] = {**held, "seconds": time.monotonic() - start}
        run = make_run(Path(folder) / "run", options.rollouts, options.tokens)
        result["samples_mb"] = (run / "samples.jsonl").stat().st_size / 1e6
        result["live"] = measure_live(run)
    live, report = result["live"], result["report"]
    result["good"] = {
        f"first paint <= {PAINT_S} s": live["paint_s"] <= PAINT_S,
        f"filter <= {FILTER_S} s": live["filter_text_s"] <= FILTER_S,
        f"slowest filter <= {FILTER_S} s": live["filter_slowest_s"] <= FILTER_S,
        "report of 2,000 rollouts <= 3 MB": report["bytes"] <= REPORT_BYTES and report["rollouts"] == 2000,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
