"""Bitwise equality of the paths that can compute a token of a pretrained model: batches, speculation, prefill, trainer.

    python benchmarks/bench_exact_paths.py [--model smollm2] [--tokens 100000] [--threads 1] [--output FILE]

For every number format, the same requests are decoded twice: in large batches without speculation, and in small ones,
in another order, with speculation; then prompts and completions are computed as prompts, in chunks. Tokens and
log-probs of all three must be equal: in int8, too, they do not depend on the batch. In exact float32 and bfloat16 they
must also equal the trainer's. One engine exists at a time, with a cache of `CACHE_TOKENS`, so peak memory is bounded.
Writes JSON and exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from bench_exact import MAX_GB, Tally, compare, draw_chat
from results import Row, describe_machine, finish, read_peak_gb

from prime_rl.inference.embedded import speculation
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.models.registry import load_decoder

FORMATS = {
    "float32, exact": (torch.float32, {"exact": True}),
    "bfloat16, exact": (torch.bfloat16, {"exact": True}),
    "int8": (torch.bfloat16, {"exact": False, "quantization": "int8"}),
}
GROUP, NEW, CACHE_TOKENS = 4, 128, 20_000
COLD = 0.3
"""Temperature of every second group: its completions resemble each other, so that drafts are accepted."""


def run(engine: EmbeddedEngine, requests: Iterable[GenerationRequest]) -> dict[GenerationRequest, Output]:
    """The outputs of all requests."""
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work():
        found |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    return found


def count_differences(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of positions that differ, missing ones included."""
    return sum(a != b for a, b in zip(left, right, strict=False)) + abs(len(left) - len(right))


def build_scoring(output: Output) -> GenerationRequest:
    """A request that computes a completion as a prompt."""
    prompt, sampling = output.request.prompt, output.request.params
    params = SamplingParams(
        max_tokens=0, prompt_logprobs=0, prompt_start=len(prompt), prompt_temperature=sampling.temperature
    )
    return GenerationRequest(prompt + output.token_ids, params)


def check_format(name: str, model_dir: Path, requests: list[GenerationRequest], rng: random.Random) -> list[Row]:
    """All paths of one number format."""
    dtype, settings = FORMATS[name]

    def build(max_running: int, max_num_batched_tokens: int, speculates: bool) -> EmbeddedEngine:
        gc.collect()  # the previous decoder is in a reference cycle
        return EmbeddedEngine(
            load_decoder(model_dir, dtype=dtype),
            max_model_len=512,
            max_running=max_running,
            max_num_batched_tokens=max_num_batched_tokens,
            max_cache_tokens=CACHE_TOKENS,
            speculation=speculates,
            **settings,  # type: ignore[arg-type]
        )

    speculation.MIN_GAIN = 0.0  # drafts wherever they are possible, also where they are too slow
    expected = run(build(64, 2048, speculates=False), requests)
    show(f"{name}: decoded")
    engine = build(24, 200, speculates=True)
    again = run(engine, rng.sample(requests, len(requests)))
    accepted = engine.stats().accepted_tokens
    show(f"{name}: decoded again")
    scorings = {build_scoring(output): output for output in expected.values()}
    scored = run(engine, scorings)
    show(f"{name}: computed as prompts")
    del engine
    num = sum(len(output.token_ids) for output in expected.values())
    decoded = sum(
        count_differences(
            list(zip(output.token_ids, output.logprobs, strict=True)),
            list(zip(again[request].token_ids, again[request].logprobs, strict=True)),
        )
        for request, output in expected.items()
    )
    prefilled = sum(
        count_differences(output.logprobs, scored[scoring].prompt_logprobs.logprobs)  # type: ignore[union-attr]
        for scoring, output in scorings.items()
    )
    detail = f"of {num:,} tokens"
    rows = [
        Row(f"{name}: batch of 24 with speculation / of 64 without", decoded, "==", 0, detail),
        Row(f"{name}: tokens accepted from drafts", accepted, ">=", 1),
        Row(f"{name}: prefill / decoding", prefilled, "==", 0, detail),
    ]
    if settings["exact"]:
        gc.collect()
        trained, tally = load_decoder(model_dir, dtype=dtype).float().requires_grad_(False), Tally()
        for output in expected.values():
            compare(output, {0: trained}, dtype, tally)
        rows.append(Row(f"{name}: trainer / decoding", tally.differences, "==", 0, f"of {tally.tokens:,} tokens"))
        show(f"{name}: computed by the trainer")
    return rows


def show(line: str) -> None:
    """Progress, to stderr."""
    print(f"{line}; at most {read_peak_gb(os.getpid()):.1f} GB", file=sys.stderr, flush=True)


def main() -> int:
    """Check every format; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the bits of batches, speculation, prefill and the trainer.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine, rng = describe_machine(arguments.threads), random.Random(0)
    tokenizer, rows = load_tokenizer(arguments.model), []
    requests: list[GenerationRequest] = []
    while len(requests) * NEW < arguments.tokens:
        first = draw_chat(tokenizer, rng, len(requests), NEW)
        changes = {"temperature": COLD} if len(requests) % (2 * GROUP) else {}
        sampling = (SamplingParams(**vars(first.params) | changes | {"seed": len(requests) + i}) for i in range(GROUP))
        requests += [GenerationRequest(first.prompt, params) for params in sampling]
    for name in arguments.formats:
        rows += check_format(name, resolve_model_dir(arguments.model), requests, rng)
    rows.append(Row("peak memory, GB", read_peak_gb(os.getpid()), "<=", MAX_GB))
    return finish("exact_paths", rows, machine, None, arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
