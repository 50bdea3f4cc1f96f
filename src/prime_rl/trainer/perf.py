"""Trainer performance: time per phase, throughput, model FLOP utilization and peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.value import VALUE
from rollouts.kernels.linear import linear
from rollouts.training.batching import MicroBatch, Share
from rollouts.training.numerics import using_threads

WINDOW_STEPS = 10
BF16_PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 FLOP/s from data sheets, by a substring of the device name."""


class StepTimer:
    """Times the phases of a step; each is reported as an interval when it ends."""

    def __init__(self, report: Callable[[str, float, float], None]) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self.current: tuple[str, float] | None = None
        """Current phase and its start time."""

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Time a phase; phases of the same name add up."""
        start = time.time()
        self.current = (what, start)
        try:
            yield
        finally:
            end = time.time()
            self.current = None
            self.seconds[what] = self.seconds.get(what, 0.0) + end - start
            self.report(what, start, end)

    def lap(self) -> dict[str, float]:
        """Return the times of the step as metrics `time/<what>` and reset."""
        metrics = {f"time/{what}": seconds for what, seconds in self.seconds.items()}
        self.seconds = {}
        return metrics


class PerfCounter:
    """Throughput and model FLOP utilization over a window of whole steps, waiting included, over all ranks."""

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        dtype: torch.dtype,
        num_ranks: int = 1,
        num_concurrent: int = 1,
    ) -> None:
        """`num_concurrent`: micro-batches of a rank that are computed at once, each by a thread of its own."""
        self.config = model.config
        self.parameters = count_matmul_parameters(model)
        self.peak = num_concurrent * find_peak_flops(device, dtype)
        self.device = device
        self.num_ranks = num_ranks
        self._window: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_STEPS)

    def observe(self, share: Share, seconds: float) -> dict[str, float]:
        """Add a step on this batch and its duration; returns `perf/...` metrics."""
        computed = count_computed(share.micros)
        flops = compute_train_flops(self.config, self.parameters, share.lengths, *computed)
        flops *= share.passes * (1 - share.skipped_ratio)
        self._window.append((sum(share.lengths), flops, seconds))
        tokens, flops, seconds = (sum(column) for column in zip(*self._window, strict=True))
        throughput = tokens / max(seconds, 1e-9)
        return {
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.num_ranks,
            "perf/mfu": 100 * flops / max(seconds, 1e-9) / (self.peak * self.num_ranks),
            "perf/peak_memory": peak_memory_gib(self.device),
        }


@dataclass(frozen=True)
class MatmulParameters:
    """Parameters in matrix products per token, without embedding lookups; `frozen_` counts those not trained."""

    layers: int
    """Matrices and active experts."""
    head: int
    frozen_layers: int = 0
    frozen_head: int = 0
    num_backbones: int = 1
    """2 with a critic that has its own."""


def count_matmul_parameters(model: CausalLM) -> MatmulParameters:
    """Count the parameters in matrix products of a model and of the backbone of its critic."""
    critic: CausalLM | None = getattr(getattr(model, VALUE, None), "backbone", None)
    backbones = [model] if critic is None else [model, critic]
    layers = [p for backbone in backbones for layer in backbone.layers() for p in layer.parameters()]
    head = model.lm_head.weight

    def count(parameters: Sequence[Tensor]) -> int:
        experts = sum(p.numel() for p in parameters if p.ndim == 3)
        chosen = experts * model.config.num_experts_per_tok // max(model.config.num_experts, 1)
        return sum(p.numel() for p in parameters if p.ndim == 2) + chosen

    frozen = count([p for p in layers if not p.requires_grad])
    frozen_head = 0 if head.requires_grad else head.numel()
    return MatmulParameters(count(layers), head.numel(), frozen, frozen_head, len(backbones))


def count_computed(micros: Sequence[MicroBatch]) -> tuple[float, float, float]:
    """Fractions of the tokens that pass through the layers (shared prefixes once) and the head (with a loss), and of
    the token pairs that attention computes."""
    micros = [micro for micro in micros if micro.sample_ids]
    num = sum(micro.num_tokens for micro in micros)
    if not num:
        return 1.0, 1.0, 1.0
    pairs = sum(n * n for micro in micros for n in micro.lengths)
    shared_pairs = sum(n * n for micro in micros for n in micro.shared or ())
    labeled = sum(mask > 0 for micro in micros for mask in micro.loss_mask)
    return sum(micro.num_computed for micro in micros) / num, labeled / num, 1 - shared_pairs / pairs


def compute_train_flops(
    config: DecoderConfig,
    parameters: MatmulParameters,
    lengths: Sequence[int],
    in_layers: float = 1.0,
    in_head: float = 1.0,
    in_attention: float = 1.0,
) -> float:
    """FLOPs of forward and backward: 6 per parameter and token, and 12 L h d per attended token pair (n^2 / 2).

    Frozen parameters need no weight gradient: 4 per parameter and token. Of the tokens, the fraction `in_layers` passes
    through the layers and `in_head` through the head; of the pairs, attention computes the fraction `in_attention`.
    """
    width = parameters.num_backbones * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    of_layers = 6.0 * parameters.layers - 2.0 * parameters.frozen_layers
    of_head = 6.0 * parameters.head - 2.0 * parameters.frozen_head
    pairs = in_attention * sum(n * n / 2 for n in lengths)
    return (of_layers * in_layers + of_head * in_head) * sum(lengths) + 12.0 * width * pairs


def find_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of the device: data sheet value for bf16 on a known GPU, otherwise measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in BF16_PEAKS.items():
            if part in name:
                return peak
    return measure_peak_flops(device, dtype)


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 768) -> float:
    """Best FLOP/s of a few square matrix products, with torch and with our linear kernel.

    On a CPU that of one thread, by its CPU time (some 10 ms in all), times the number of threads: what the cores reach
    when nothing else runs.
    """
    if device.type == "cuda":
        return _measure_product(device, dtype, 8192, time.perf_counter)
    threads = torch.get_num_threads()
    with using_threads(1):
        return threads * _measure_product(device, dtype, size, time.thread_time)


def _measure_product(device: torch.device, dtype: torch.dtype, size: int, clock: Callable[[], float]) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for product in (torch.matmul, linear) * 5:
        start = clock()
        product(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return 2.0 * size**3 / best


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory: of the GPU allocator, or resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
