"""Speculative decoding of the embedded engine: tokens per second with and without it, step by step in one process.

    python benchmarks/bench_speculation.py [--model smollm2] [--threads 2] [--repeats 5] [--output FILE]

Answers copy or edit text of their prompt, in groups of one prompt; free answers continue short openings at temperature
1. Answers repeat at temperature 0, and at temperature 1 after `TRAIN_STEPS` steps of `sft` on such tasks, as in RL of a
trained model: these cases end with "trained". Without training, half of the tokens at temperature 1 differ from those
of the prompt. Prompts are new in every repeat. Both must give the same tokens and log-probs. Prints medians
of wall time on an idle machine with their thresholds, writes JSON, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from results import Row, describe_machine, finish  # noqa: E402

TRAIN_STEPS = 20
MIN_REPEATING, MIN_OTHER = 1.3, 0.98
"""Least ratio of the throughput with and without speculation, where answers repeat and where they do not."""
OTHER_REPEATS = 3
"""Cases whose threshold is almost 1 are repeated so many times as often, because noise would decide."""
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


def copy_task(rng: random.Random) -> tuple[str, str]:
    """An instruction to change a field of records, and its answer."""
    records = copy_prompt(rng).split("\n\n", maxsplit=1)[0] + "\n"
    return f"Set active to false in every record:\n\n{records}", records.replace("true", "false")


def edit_task(rng: random.Random) -> tuple[str, str]:
    """An instruction to rename a function, and its answer."""
    first, second = (f"{rng.choice(NAMES)}_{rng.choice(CITIES)}".lower() for _ in range(2))
    code = CODE.format(first, second)
    return f"Rename {first} to average:\n\n{code}", code.replace(first, "average")


TASKS = {"copy": copy_task, "edit": edit_task}


def train(model: str, folder: Path) -> Path:
    """Fine-tune a model on the tasks with `sft`; returns the directory of its weights."""
    rng, data, out = random.Random(0), folder / "tasks.jsonl", folder / "sft"
    with data.open("w") as file:
        for i in range(40 * TRAIN_STEPS):
            question, answer = [*TASKS.values()][i % len(TASKS)](rng)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    options = {
        "model.name": model,
        "model.dtype": "bfloat16",
        "data.name": data,
        "data.seq_len": 1024,
        "data.batch_size": 4,
        "max_steps": TRAIN_STEPS,
        "optim.lr": 1e-4,
        "output_dir": out,
    }
    command = [sys.executable, "-m", "prime_rl.trainer.sft.train"]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out / "weights" / f"step_{TRAIN_STEPS}"


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
    """Groups of up to 8 that copy and edit, and free text, for the given model."""
    tasks = {"copy": copy_prompt, "edit": edit_prompt}
    cases = [
        Case(f"{task}, temperature {temperature:g}, {num} at once", prompt, num, num, temperature, 96, least)
        for task, prompt in tasks.items()
        for temperature, least in ((0.0, MIN_REPEATING), (1.0, MIN_OTHER))
        for num in (1, 4, 8)
    ]
    return cases + [Case(f"free text, {num} at once", free_prompt, num, 1, 1.0, 64, MIN_OTHER) for num in (1, 8, 32)]


def build_trained_cases(tokenizer: Any) -> list[Case]:
    """Groups of up to 8 that answer the tasks, for the fine-tuned model."""

    def ask(task: Callable[[random.Random], tuple[str, str]], rng: random.Random) -> str:
        messages = [{"role": "user", "content": task(rng)[0]}]
        text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    return [
        Case(f"{name}, temperature 1, {num} at once, trained", partial(ask, task), num, num, 1.0, 160, MIN_REPEATING)
        for name, task in TASKS.items()
        for num in (1, 4, 8)
    ]


def generate(
    engines: dict[bool, Any], case: Case, prompts: list[list[int]], seed: int
) -> dict[bool, tuple[float, Any]]:
    """With and without speculation: seconds, and (tokens, log-probs) of every completion.

    The next step is that of the engine that has taken less time: what disturbs the machine disturbs both alike.
    """
    from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams

    requests: dict[bool, list[GenerationRequest]] = {}
    for speculation, engine in engines.items():
        engine._scheduler.clear_prefix_cache()
        params = [SamplingParams(case.new, case.temperature, seed=seed * 1009 + i) for i in range(case.num)]
        requests[speculation] = [GenerationRequest(prompts[i // case.group], each) for i, each in enumerate(params)]
        for request in requests[speculation]:
            engine.add(request)
    seconds: dict[bool, float] = dict.fromkeys(engines, 0.0)
    found: dict[GenerationRequest, Any] = {}
    while working := [speculation for speculation, engine in engines.items() if engine.has_work()]:
        speculation = min(working, key=seconds.__getitem__)
        start = time.perf_counter()
        events = engines[speculation].step()
        seconds[speculation] += time.perf_counter() - start
        found |= {event.request: (event.token_ids, event.logprobs) for event in events if isinstance(event, Output)}
    return {key: (seconds[key], [found[request] for request in requests[key]]) for key in engines}


def build_engines(arguments: argparse.Namespace, model_dir: Path) -> dict[bool, Any]:
    """Engines with and without speculation."""
    import torch

    from prime_rl.inference.embedded.engine import EmbeddedEngine
    from prime_rl.trainer.models.registry import load_decoder, load_eos_ids

    model, eos_ids = load_decoder(model_dir, dtype=getattr(torch, arguments.dtype)), load_eos_ids(model_dir)
    engines = {
        speculation: EmbeddedEngine(
            model, eos_ids=eos_ids, exact=not arguments.fast, max_running=64, speculation=speculation
        )
        for speculation in (True, False)
    }
    engines[False]._runner.decoder = engines[True]._runner.decoder  # of two copies, one may be in slower memory
    return engines


def measure(arguments: argparse.Namespace, model_dir: Path, cases: list[Case]) -> list[tuple[Case, list[float], str]]:
    """Each chosen case, its ratios, and speeds and drafts in words."""
    from prime_rl.runtime.tokenizer import load_tokenizer

    tokenizer, found, engines = load_tokenizer(str(model_dir)), [], build_engines(arguments, model_dir)
    for case in cases:
        if arguments.only not in case.name:
            continue
        ratios, speeds = [], []
        before = engines[True].stats()
        repeats = arguments.repeats * (OTHER_REPEATS if case.least == MIN_OTHER else 1)
        for seed in range(repeats + 1):
            rng = random.Random(f"{case.name} {seed}")  # new prompts for every repeat
            prompts = [tokenizer.encode(case.prompt(rng)) for _ in range(case.num // case.group)]
            outcomes = generate(engines, case, prompts, seed)
            (seconds, outputs), (plain_seconds, plain_outputs) = outcomes[True], outcomes[False]
            if outputs != plain_outputs:
                raise SystemExit(f"{case.name}: speculation changed the answers")
            if seed:  # the first round warms up
                ratios.append(plain_seconds / seconds)
                speeds.append(sum(len(tokens) for tokens, _ in outputs) / seconds)
        after = engines[True].stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        detail = f"{statistics.median(speeds):.1f} tok/s, {accepted} of {drafted} drafted tokens accepted"
        print(f"{case.name}: {statistics.median(ratios):.2f} ({detail})", file=sys.stderr, flush=True)
        found.append((case, ratios, detail))
    return found


def main() -> int:
    """Measure all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fast", action="store_true", help="not exact")
    parser.add_argument("--threads", type=int, default=2, help="one for each core")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    import torch

    from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir

    torch.set_num_threads(arguments.threads)
    machine, tokenizer = describe_machine(), load_tokenizer(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        trained_cases = [case for case in build_trained_cases(tokenizer) if arguments.only in case.name]
        found = measure(arguments, resolve_model_dir(arguments.model), build_cases())
        if trained_cases:
            found += measure(arguments, train(arguments.model, Path(folder)), trained_cases)
    rows = [Row(case.name, statistics.median(ratios), ">=", case.least, detail) for case, ratios, detail in found]
    rates = {case.name: ratios for case, ratios, _ in found}
    return finish("speculation", rows, machine, rates, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
