"""Bitwise equality of engine and trainer log-probs over a million sampled tokens under varying conditions.

    python benchmarks/bench_exact.py [--tokens 1000000] [--dtype float32] [--threads 1] [--seed 0]
        [--model NAME] [--distributions 10000] [--truncated] [--output FILE]

Random arrivals, batch sizes, chunk sizes, memory limits, shared and continued prompts, cancellations and weight updates
in flight, over several shapes; every log-prob of every span is compared with the trainer's for the same tokens under
that version's weights. `--model smollm2` (or a directory) does so for a pretrained model; for the first
`--distributions` tokens it compares the log-probs of the whole vocabulary. With `--truncated` every request has
`top_p`, `top_k`, `min_p` or several of them, and the trainer's log-probs are those over the returned supports; the mean
ratio without supports shows the bias. Writes JSON and exits with 1 on the first difference.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from results import Row, describe_machine, finish, read_peak_gb
from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from prime_rl.inference.embedded import model_runner  # noqa: E402
from prime_rl.inference.embedded.engine import EmbeddedEngine  # noqa: E402
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams  # noqa: E402
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir  # noqa: E402
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention  # noqa: E402
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names  # noqa: E402
from prime_rl.trainer.models.decoder_config import DecoderConfig  # noqa: E402
from prime_rl.trainer.models.registry import load_decoder  # noqa: E402
from rollouts.kernels.cpu import arithmetic_dtype  # noqa: E402
from rollouts.kernels.linear import linear  # noqa: E402
from rollouts.kernels.log_softmax import log_softmax  # noqa: E402
from rollouts.training.datasets.chat import render_chat  # noqa: E402
from rollouts.training.numerics import MIN_TOKENS  # noqa: E402
from rollouts.training.rl_losses import compute_logprobs  # noqa: E402
from rollouts.training.sampling_support import decode_supports  # noqa: E402

MAX_GB = 6.0
"""Limit of the peak memory with a pretrained model of the size of SmolLM2-135M."""
VOCAB, MAX_LEN, NUM_VERSIONS = 320, 768, 3
SHAPES = {  # hidden, layers, heads, key heads, head dim, inner
    "qwen3, 128 wide": ("qwen3", 128, 2, 4, 2, 32, 384),
    "llama, 192 wide": ("llama", 192, 3, 6, 6, 32, 512),
    "qwen2, 256 wide": ("qwen2", 256, 2, 8, 2, 32, 704),
}

FILTERS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 100, "min_p": 0.02},
)


@dataclass
class Tally:
    """Counts of compared tokens and of events."""

    tokens: int = 0
    differences: int = 0
    spans: int = 0
    cancelled: int = 0
    updates: int = 0
    preempted: int = 0
    shared_tokens: int = 0
    worst: float = 0.0
    distributions: int = 0
    distribution_differences: int = 0
    whole_ratios: float = 0.0
    """Sum of the ratios of trainer to engine that a trainer without supports would have."""
    support_bytes: int = 0
    shapes: dict[str, int] = field(default_factory=dict)


def build_model(shape: str, seed: int, dtype: torch.dtype) -> CausalLM:
    """Random weights far enough from uniform that a wrong token shows; in `dtype`."""
    kind, hidden, layers, heads, kv_heads, dim, inner = SHAPES[shape]
    config = DecoderConfig.from_hf(
        {
            "model_type": kind,
            "vocab_size": VOCAB,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": dim,
            "intermediate_size": inner,
            "max_position_embeddings": MAX_LEN,
            "tie_word_embeddings": True,
        }
    )
    model = CausalLM(config)
    init_weights(model, seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.05)
    return model.requires_grad_(False).to(dtype)


Digests = dict[tuple[GenerationRequest, int], bytes]
"""Hashes of the log-probs of the whole vocabulary, by request and position of the sampled token."""


def hash_rows(logprobs: torch.Tensor) -> list[bytes]:
    """One hash for each row [rows, vocab], of its bits."""
    return [xxhash.xxh3_128_digest(row) for row in logprobs.numpy()]


@contextmanager
def record_distributions(digests: Digests, limit: int) -> Iterator[None]:
    """Hash the distributions from which engines sample, until there are `limit`."""
    sample, num_recorded = model_runner.sample, 0

    def record(logits: torch.Tensor, batch: Any, positions: Any, *noise: Any) -> Any:
        nonlocal num_recorded
        if num_recorded < limit:
            num_recorded += len(logits)
            temperature = 1.0 if batch.temperature is None else batch.temperature
            logprobs = log_softmax(logits.float() / temperature)
            keys = ((row.request, int(position)) for row, position in zip(batch.rows, positions, strict=True))
            digests.update(zip(keys, hash_rows(logprobs), strict=True))
        return sample(logits, batch, positions, *noise)

    model_runner.sample = record
    try:
        yield
    finally:
        model_runner.sample = sample


@torch.no_grad()
def compare(
    output: Output, models: dict[int, CausalLM], dtype: torch.dtype, tally: Tally, digests: Digests | None = None
) -> None:
    """Every log-prob against the trainer's under the version of its span; whole distributions where recorded."""
    prompt, ids = output.request.prompt, output.token_ids
    # Products of fewer rows round differently: a trainer's pack is never shorter either.
    tokens = torch.tensor(prompt + ids + [0] * (MIN_TOKENS - len(prompt) - len(ids)))
    ends = [start for start, _ in output.versions[1:]] + [len(ids)]
    for (start, version), end in zip(output.versions, ends, strict=True):
        model = models[version]
        model.round_inputs(dtype)
        attend = RoundedAttention(PackedAttention([len(tokens)], rounded=model.rounds_inputs), dtype)
        hidden = model(tokens, torch.arange(len(tokens)), attend)
        scale = torch.full((len(tokens), 1), output.request.params.temperature)
        # as the losses multiply, whatever the number of rows
        logits = linear(hidden, model.lm_head.weight, rounded=model.rounds_inputs).float()
        expected = log_softmax(logits / scale)
        rows = torch.arange(len(prompt) + start, len(prompt) + end) - 1
        labels, logprobs = torch.tensor(ids[start:end], dtype=torch.long), torch.tensor(output.logprobs[start:end])
        if output.sampling_support:
            tally.whole_ratios += float((expected[rows, labels] - logprobs).exp().sum())
            support = decode_supports(output.sampling_support, len(ids)).select(torch.arange(start, end))
            trainer_logprobs, _ = compute_logprobs(logits[rows], labels, scale[rows, 0], support)
        else:
            trainer_logprobs = expected[rows, labels]
        apart = (logprobs - trainer_logprobs).abs()
        tally.differences += int((apart != 0).sum())
        tally.worst = max(tally.worst, float(apart.max())) if len(apart) else tally.worst
        tally.spans += 1
        for row in rows.tolist() if digests else ():
            if (found := digests.pop((output.request, row + 1), None)) is not None:
                tally.distributions += 1
                tally.distribution_differences += found != hash_rows(expected[row : row + 1])[0]
    tally.tokens += len(ids)
    tally.support_bytes += len(output.sampling_support)


def run_round(
    shape: str, dtype: torch.dtype, rng: random.Random, tally: Tally, truncated: bool, num_requests: int = 160
) -> None:
    """One engine with random limits, driven at random until everything has ended."""
    models = {version: build_model(shape, rng.randrange(1 << 30), dtype) for version in range(NUM_VERSIONS)}
    arithmetic = arithmetic_dtype(dtype, torch.device("cpu"))
    served = build_model(shape, 0, dtype)
    served.load_state_dict(models[0].state_dict())
    engine = EmbeddedEngine(
        served,
        max_running=rng.choice([3, 16, 64, 256]),
        max_num_batched_tokens=rng.choice([16, 100, 512, 2048]),
        max_cache_tokens=rng.choice([None, 128 * rng.randint(10, 60)]),
        max_prefix_cache_tokens=rng.choice([0, 2000, 50000]),
    )
    trained = {version: model.to(arithmetic) for version, model in models.items()}
    longest = rng.choice([12, 60, 300, 500])
    shared = [rng.choices(range(VOCAB), k=rng.randint(1, longest)) for _ in range(3)]
    alive: list[GenerationRequest] = []
    ended: list[Output] = []
    left = num_requests
    while left or engine.has_work():
        while left and rng.random() < 0.6:
            left -= 1
            alive.append(_build_request(rng, shared, ended, longest, left, truncated))
            engine.add(alive[-1])
        if alive and rng.random() < 0.02:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
            tally.cancelled += 1
        if engine.version + 1 < NUM_VERSIONS and rng.random() < 0.01:
            engine.load_weights(tensor_names(models[engine.version + 1]), engine.version + 1)
            tally.updates += 1
        new = [event for event in engine.step() if isinstance(event, Output)] if engine.has_work() else []
        for output in new:
            compare(output, trained, dtype, tally)
            alive = [one for one in alive if one is not output.request]
        ended = (ended + new)[-8:]
    stats = engine.stats()
    tally.preempted += stats.preempted
    tally.shared_tokens += stats.shared_prompt_tokens


TOPICS = "rivers, old cars, bread, the moon, chess, whales, glass, winter, volcanoes, violins, maps, bees".split(", ")
ASK = ("Tell me about {}.", "Write a poem on {}.", "What is {} + {}?", "List three facts about {}.", "Why {}?")


def draw_chat(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, seed: int, new: int, **options: Any
) -> GenerationRequest:
    """A request of `new` tokens about random topics."""
    topics = rng.choices([*TOPICS, *map(str, range(10, 20))], k=2)
    prompt = render_chat(tokenizer, [{"role": "user", "content": rng.choice(ASK).format(*topics)}])
    temperature = rng.choice([1.0, 1.0, 0.7, 1.3])
    params = SamplingParams(max_tokens=new, temperature=temperature, seed=seed, ignore_eos=True, **options)
    return GenerationRequest(prompt, params)


def run_pretrained(
    name: str, dtype: torch.dtype, rng: random.Random, tally: Tally, tokens: int, limit: int, truncated: bool
) -> None:
    """Rounds of 128 completions of chats; every other round has a weight update in flight."""
    directory = resolve_model_dir(name)
    tokenizer = load_tokenizer(name)
    trained = {version: load_decoder(directory, dtype=dtype).requires_grad_(False) for version in range(2)}
    noise = torch.Generator().manual_seed(0)
    for parameter in trained[1].parameters():  # an update of about one percent
        parameter.data *= 1 + 0.01 * torch.randn(parameter.shape, generator=noise)
    arithmetic = arithmetic_dtype(dtype, torch.device("cpu"))
    trained = {version: model.to(arithmetic) for version, model in trained.items()}
    updates = False
    while tally.tokens < tokens and not tally.differences:
        requests = []
        for number in range(128):
            filters: dict[str, Any] = rng.choice(FILTERS) if truncated else {}
            requests.append(draw_chat(tokenizer, rng, number, 128, return_support=truncated, **filters))
        updates = not updates
        engine = EmbeddedEngine(
            load_decoder(directory, dtype=dtype),
            max_model_len=512,
            max_running=rng.choice([48, 128]),
            max_num_batched_tokens=rng.choice([512, 2048]),
            max_cache_tokens=20_000,
            speculation=tally.distributions >= limit,  # rejected drafts have distributions as well
        )
        run_chats(engine, requests, trained, dtype, tally, limit, updates)
        del engine
        gc.collect()  # its decoder, two copies of the weights, is in a reference cycle
        counts = f"{tally.tokens:,} tokens, {tally.differences} differ"
        print(f"{counts}, at most {read_peak_gb(os.getpid()):.1f} GB", file=sys.stderr, flush=True)


def run_chats(
    engine: EmbeddedEngine,
    requests: list[GenerationRequest],
    trained: dict[int, CausalLM],
    dtype: torch.dtype,
    tally: Tally,
    limit: int,
    updates: bool,
) -> None:
    """Sample and compare the completions of all requests; with `updates`, load the second version in between."""
    digests: Digests = {}
    for request in requests:
        engine.add(request)
    with record_distributions(digests, limit - tally.distributions):
        while engine.has_work():
            if updates and engine.version == 0 and engine.stats().generated_tokens > 4000:
                engine.load_weights(tensor_names(trained[1]), 1)
                tally.updates += 1
            for event in engine.step():
                if isinstance(event, Output):
                    compare(event, trained, dtype, tally, digests)
    assert not digests, "a recorded distribution was not compared"


def _build_request(
    rng: random.Random, shared: list[list[int]], ended: list[Output], longest: int, seed: int, truncated: bool
) -> GenerationRequest:
    """A new prompt, one of a group, or a conversation that goes on."""
    kind = rng.random()
    if kind < 0.4:
        prompt = rng.choice(shared)
    elif kind < 0.6 and ended:
        last = rng.choice(ended)
        prompt = [*last.request.prompt, *last.token_ids, *rng.choices(range(VOCAB), k=rng.randint(1, 20))]
    else:
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, longest))
    prompt = prompt[: MAX_LEN - 2]
    params = SamplingParams(
        max_tokens=rng.choice([1, 8, 40, 120, 250]),
        temperature=rng.choice([1.0, 0.7, 1.3]),
        seed=seed,
        return_support=truncated,
        **(rng.choice(FILTERS) if truncated else {}),
    )
    return GenerationRequest(prompt, params)


def main() -> int:
    """Run rounds until enough tokens were compared; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the engine's log-probs with the trainer's, bit for bit.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=None, help="a pretrained model instead of random ones")
    parser.add_argument("--truncated", action="store_true", help="sample with top_p, top_k and min_p")
    parser.add_argument("--distributions", type=int, default=10_000, help="tokens with complete distributions")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="default: .bench/results/exact[_pretrained][_bfloat16][_truncated].json",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = describe_machine(arguments.threads)
    rng, tally, start = random.Random(arguments.seed), Tally(), time.monotonic()
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is not None:
        run_pretrained(
            arguments.model, dtype, rng, tally, arguments.tokens, arguments.distributions, arguments.truncated
        )
    while arguments.model is None and tally.tokens < arguments.tokens and not tally.differences:
        shape = rng.choice(list(SHAPES))
        before = tally.tokens
        run_round(shape, dtype, rng, tally, arguments.truncated)
        tally.shapes[shape] = tally.shapes.get(shape, 0) + tally.tokens - before
        print(f"{tally.tokens:,} tokens, {tally.differences} differ", file=sys.stderr, flush=True)
    rows = [
        Row("log-probs that differ", tally.differences, "==", 0, f"of {tally.tokens:,} sampled tokens"),
        Row("sampled tokens", tally.tokens, ">=", arguments.tokens, f"{time.monotonic() - start:.0f} s"),
    ]
    if arguments.model is not None:
        different = tally.distribution_differences
        rows += [
            Row("distributions that differ", different, "==", 0, f"of {tally.distributions:,} with all log-probs"),
            Row("distributions", tally.distributions, ">=", min(arguments.distributions, tally.tokens)),
            Row("peak memory, GB", read_peak_gb(os.getpid()), "<=", MAX_GB),
        ]
    if arguments.truncated:
        mean_ratio = tally.whole_ratios / max(tally.tokens, 1)
        rows += [
            Row("mean ratio without supports", mean_ratio, "<=", 0.98, "below 1: biased"),
            Row("bytes of the supports per token", tally.support_bytes / max(tally.tokens, 1), "<=", 16_384),
        ]
    name = "exact" if arguments.model is None else "exact_pretrained"
    name += "" if arguments.dtype == "float32" else "_bfloat16"
    name += "_truncated" if arguments.truncated else ""
    return finish(name, rows, machine, vars(tally), arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
