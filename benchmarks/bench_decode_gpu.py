"""Decoding on a GPU: tokens per second with and without CUDA graphs, relative to the limit of memory bandwidth.

    python benchmarks/bench_decode_gpu.py [--repeats 3] [--output FILE]
    python benchmarks/bench_decode_gpu.py --tiny            # the same on a CPU with a tiny model, to test the script

A random model of the shape of Qwen3-0.6B in bf16, greedy, all requests at once. A step must read every weight and the
keys and values of every row once, so their bytes over the bandwidth bound its speed. Also measured: the cost of exact
mode, requests per second including prompts, and how long a weight update (with digests of all tensors) pauses a busy
engine. Each workload has a warm-up run, in which its graphs are captured.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import ROOT, Row, describe_machine, finish

sys.path.insert(0, str(ROOT / "src"))
import torch

from prime_rl.inference.embedded.cuda_graphs import GraphCapturer, Step, build_recorder
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, SamplingParams
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BANDWIDTHS = {"A100": 2.04e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8.0e12}
"""Bytes per second by data sheet."""


@dataclass(frozen=True)
class Case:
    """`batch` sequences with contexts of `context` tokens; minimum rate and share of the bandwidth."""

    batch: int
    context: int
    rate: float | None = None
    share: float | None = None


CASES = [Case(1, 256, rate=900), Case(256, 512, rate=40_000, share=0.7), Case(256, 1024, rate=22_000, share=0.7)]
SMALL = [Case(1, 40), Case(4, 150)]


class Rerun:
    """Replacement of CUDA graphs: a captured step is computed again."""

    def warm_up(self, step: Step) -> torch.Tensor:
        """As `GraphCapturer`."""
        return step()

    def record(self, step: Step) -> Step:
        """As `GraphCapturer`."""
        return step


def build_model(device: torch.device, tiny: bool) -> CausalLM:
    """The shape with random weights, in bf16."""
    with device:
        model = CausalLM(DecoderConfig.from_hf(SHAPE | (TINY if tiny else {}))).bfloat16()
    init_weights(model, 0)
    return model


def find_bandwidth(device: torch.device) -> float:
    """Bytes per second of the device's memory: by data sheet for a known GPU, otherwise of the best of a few copies."""
    if device.type == "cuda":
        for part, bandwidth in BANDWIDTHS.items():
            if part in torch.cuda.get_device_name(device):
                return bandwidth
    source = torch.ones(1 << (28 if device.type == "cuda" else 24), device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        best = min(best, clock(device, lambda: target.copy_(source)))
    return 2 * source.numel() * source.element_size() / best


def clock(device: torch.device, work: Any) -> float:
    """Seconds that `work` takes, on the device too."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def count_bytes(model: CausalLM, case: Case) -> int:
    """What a step must read: every weight, and the keys and values of every row."""
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size = model.embedding().element_size()
    return size * (sum(p.numel() for p in model.parameters()) + case.batch * case.context * per_token)


def build_engine(model: CausalLM, **options: Any) -> EmbeddedEngine:
    """An engine, built after the previous one's memory is freed."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    return EmbeddedEngine(model, **options)


def start(
    engine: EmbeddedEngine,
    batch: int,
    prompt: int,
    new: int,
    seed: int,
    adapter: str | None = None,
    temperature: float = 0.0,
) -> None:
    """Queue random prompts."""
    draw = torch.Generator().manual_seed(seed)
    for i, tokens in enumerate(torch.randint(engine.vocab_size, (batch, prompt), generator=draw).tolist()):
        params = SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True, seed=i)
        engine.add(GenerationRequest(tokens, params, adapter=adapter))


def draw_adapter(model: CausalLM, rank: int) -> dict[str, torch.Tensor]:
    """A random LoRA adapter of all products of all layers, by PEFT's names."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            a = torch.randn(rank, module.in_features) / module.in_features**0.5
            b = torch.randn(module.out_features, rank) / 100
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    return tensors


def time_steps(
    model: CausalLM,
    case: Case,
    steps: int,
    repeats: int,
    rank: int | None = None,
    temperature: float = 0.0,
    **options: Any,
) -> Iterator[float]:
    """Seconds of a decode step of all rows, the mean over `steps` around the wanted context; the first run warms up.

    `rank`: that of a LoRA adapter that all rows have.
    """
    engine = build_engine(model, max_running=case.batch, enable_prefix_caching=False, **options)
    adapter = None if rank is None else "adapter"
    if rank is not None:
        engine.load_adapter("adapter", draw_adapter(model, rank), AdapterSpec(rank, 2.0 * rank, 0))
    for repeat in range(-1, repeats):
        start(engine, case.batch, case.context - steps // 2 - 4, steps + 8, repeat, adapter, temperature)
        before = engine.stats().generated_tokens
        while engine.stats().generated_tokens < before + 4 * case.batch:
            engine.step()
        seconds = clock(engine.model.embedding().device, lambda: [engine.step() for _ in range(steps)])
        if repeat >= 0:
            yield seconds / steps
        engine.abort()


def measure(model: CausalLM, cases: list[Case], steps: int, repeats: int, recorder: GraphCapturer) -> list[Row]:
    """Rates with graphs, without, and in exact mode."""
    bandwidth = find_bandwidth(model.embedding().device)
    rows: list[Row] = []
    for case in cases:
        options: dict[str, dict[str, Any]] = {
            "graphs": {"exact": False, "recorder": recorder},
            "eager": {"exact": False},
            "exact": {"exact": True},
        }
        rate = {}
        for kind, chosen in options.items():
            rate[kind] = case.batch / statistics.median(time_steps(model, case, steps, repeats, **chosen))
        best = case.batch * bandwidth / count_bytes(model, case)
        name, cost = f"{case.batch} at once, context {case.context}", 1.5 if case.rate else None
        rows += [
            Row(f"{name}: tokens/s", rate["graphs"], ">=", case.rate, f"eager {rate['eager']:,.0f}"),
            Row(f"{name}: share of the bandwidth", rate["graphs"] / best, ">=", case.share, f"at best {best:,.0f}/s"),
            Row(f"{name}: graphs over eager", rate["graphs"] / rate["eager"]),
            Row(f"{name}: cost of exactness", rate["graphs"] / rate["exact"], "<=", cost, f"{rate['exact']:,.0f}/s"),
        ]
    return rows


def measure_requests(model: CausalLM, tiny: bool, recorder: GraphCapturer) -> Row:
    """Whole requests: 512 tokens in, 128 out."""
    batch, prompt, new = (4, 16, 8) if tiny else (512, 512, 128)
    engine = build_engine(model, exact=False, recorder=recorder)
    seconds = 0.0
    for seed in range(2):
        start(engine, batch, prompt, new, seed)
        seconds = clock(
            model.embedding().device, lambda: list(iter(lambda: engine.has_work() and engine.step(), False))
        )
    threshold = None if tiny else 120
    return Row(f"{prompt} tokens in, {new} out: requests/s", batch / seconds, ">=", threshold, f"{batch} at once")


def measure_update(model: CausalLM, tiny: bool, recorder: GraphCapturer, repeats: int) -> Row:
    """Seconds without new tokens of a busy engine during an update with weights on the same device."""
    engine = build_engine(model, exact=False, recorder=recorder)
    tensors = {name: tensor.clone() for name, tensor in tensor_names(model).items()}
    start(engine, 4, 16, 8 * (repeats + 2), 0)
    times = []
    for version in range(repeats + 1):
        for _ in range(8):
            engine.step()
        times.append(clock(model.embedding().device, lambda v=version: engine.load_weights(tensors, v)()))
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    pause = 1000 * statistics.median(times[1:])
    return Row("update pause (ms)", pause, "<=", None if tiny else 20, f"{gigabytes:.2g} GB, digests included")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure decoding on a GPU.")
    parser.add_argument("--tiny", action="store_true", help="a toy on a CPU or GPU, to try this script")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="default: .bench/results/decode_gpu.json")
    arguments = parser.parse_args(argv)
    if not arguments.tiny and not torch.cuda.is_available():
        print(
            "bench_decode_gpu needs a GPU, and torch sees none here: --tiny tries the script on a CPU", file=sys.stderr
        )
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recorder = build_recorder(device, exact=False, eager=False) or Rerun()
    model, tiny = build_model(device, arguments.tiny), arguments.tiny
    machine = describe_machine() | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})
    rows = measure(model, SMALL if tiny else CASES, 4 if tiny else 64, arguments.repeats, recorder)
    rows += [measure_requests(model, tiny, recorder), measure_update(model, tiny, recorder, arguments.repeats)]
    return finish("decode_gpu", rows, machine, path=arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
