"""Speculative decoding of the embedded engine: tokens per second with and without it, taking turns in one process.

    OMP_NUM_THREADS=1 python benchmarks/bench_speculation.py [--model smollm2] [--repeats 5] [--output FILE]

Repeating answers copy or edit text of their prompt, in groups of one prompt; free answers continue short openings at
temperature 1. Prompts are new in every repeat. Both engines must return the same tokens and log-probs. Prints medians
with their thresholds, writes JSON, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from results import Row, describe_machine, finish  # noqa: E402

NAMES = "Ann Bo Cem Dora Eli Fay Gus Hana Ivo Jun Kai Lea Max Nia Oda Pia".split()
CITIES = "Oslo Bern Rome Lima Bonn Kyiv Cairo Paris Delhi Tokyo Quito Seoul Turin Malmo Basel Porto".split()
CODE = """def {0}(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def {1}(values):
    center = {0}(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
"""


def copy_prompt(rng: random.Random) -> str:
    """Lines of JSON that are repeated."""
    lines = "".join(
        json.dumps({"id": rng.randrange(1000), "name": name, "city": rng.choice(CITIES), "active": True}) + "\n"
        for name in rng.sample(NAMES, 6)
    )
    return f"{lines}\n{lines}\n" + lines.split("\n", maxsplit=1)[0] + "\n"


def edit_prompt(rng: random.Random) -> str:
    """Code in which a function was renamed, and other code."""
    edits = []
    for _ in range(2):
        first, second = (f"{rng.choice(NAMES)}_{rng.choice(CITIES)}".lower() for _ in range(2))
        code = CODE.format(first, second)
        edits.append(f"{code}\n# {first} renamed to average:\n\n{code.replace(first, 'average')}")
    return "\n\n".join(edits)[: -len(CODE.format("average", second)) + 4]


def free_prompt(rng: random.Random) -> str:
    """Text without anything to copy."""
    return f"{rng.choice(NAMES)} went to {rng.choice(CITIES)} because"


@dataclass(frozen=True)
class Case:
    """`num` completions at once, in groups of `group` with the same prompt."""

    name: str
    prompt: Callable[[random.Random], str]
    num: int
    group: int
    temperature: float
    new: int
    least: float  # ratio of throughput with and without speculation


def build_cases() -> list[Case]:
    """Groups of up to 8 that copy and edit, and free text."""
    tasks = {"copy": copy_prompt, "edit": edit_prompt}
    cases = [
        Case(f"{task}, temperature {temperature:g}, {num} at once", prompt, num, num, temperature, 96, 1.3)
        for task, prompt in tasks.items()
        for temperature in (0.0, 1.0)
        for num in (1, 4, 8)
    ]
    return cases + [Case(f"free text, {num} at once", free_prompt, num, 1, 1.0, 64, 0.98) for num in (1, 8, 32)]


def generate(engine: Any, case: Case, prompts: list[list[int]], seed: int) -> tuple[float, list[Any]]:
    """Seconds of this thread, and (tokens, log-probs) of every completion."""
    from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams

    requests = []
    for i in range(case.num):
        params = SamplingParams(max_tokens=case.new, temperature=case.temperature, seed=seed * 1009 + i)
        requests.append(GenerationRequest(prompts[i // case.group], params))
    found = {}
    start = time.process_time()
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Output):
                found[event.request] = (event.token_ids, event.logprobs)
    return time.process_time() - start, [found[request] for request in requests]


def main() -> int:
    """Measure all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fast", action="store_true", help="not exact")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    import torch

    from prime_rl.inference.embedded.engine import EmbeddedEngine
    from prime_rl.inference.embedded.loading import load_eos_ids
    from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
    from prime_rl.trainer.models.registry import load_decoder

    model_dir, tokenizer = resolve_model_dir(arguments.model), load_tokenizer(arguments.model)
    eos_ids = load_eos_ids(model_dir)

    engines = {}
    for speculation in (False, True):
        model = load_decoder(model_dir, dtype=getattr(torch, arguments.dtype))
        engines[speculation] = EmbeddedEngine(
            model, eos_ids=eos_ids, exact=not arguments.fast, speculation=speculation, max_running=64
        )
    rows, rates, machine = [], {}, describe_machine()
    for case in build_cases():
        if arguments.only not in case.name:
            continue
        ratios, speeds = [], []
        before = engines[True].stats()
        for seed in range(arguments.repeats + 1):
            rng = random.Random(f"{case.name} {seed}")  # new prompts for every repeat
            prompts = [tokenizer.encode(case.prompt(rng)) for _ in range(case.num // case.group)]
            seconds, outputs = {}, {}
            for speculation in (False, True) if seed % 2 else (True, False):
                seconds[speculation], outputs[speculation] = generate(engines[speculation], case, prompts, seed)
            if outputs[True] != outputs[False]:
                raise SystemExit(f"{case.name}: speculation changed the answers")
            if seed:  # the first round warms up
                ratios.append(seconds[False] / seconds[True])
                speeds.append(sum(len(tokens) for tokens, _ in outputs[True]) / seconds[True])
        after = engines[True].stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        detail = f"{statistics.median(speeds):.1f} tok/s, {accepted} of {drafted} drafted tokens accepted"
        rows.append(Row(case.name, statistics.median(ratios), ">=", case.least, detail))
        rates[case.name] = ratios
        print(f"{case.name}: {statistics.median(ratios):.2f} ({detail})", file=sys.stderr, flush=True)
    return finish("speculation", rows, machine, rates, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
