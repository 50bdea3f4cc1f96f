"""Trainer performance: time per phase, throughput, model FLOP utilization and peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels.linear import linear

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
    """Throughput and model FLOP utilization over a window of steps, over all ranks."""

    def __init__(self, model: CausalLM, device: torch.device, dtype: torch.dtype, num_ranks: int = 1) -> None:
        self.config = model.config
        self.num_matmul_parameters = count_matmul_parameters(model)
        self.num_frozen = count_matmul_parameters(model, frozen=True)
        self.peak = find_peak_flops(device, dtype)
        self.device = device
        self.num_ranks = num_ranks
        self._window: deque[tuple[int, float, float]] = deque(maxlen=WINDOW_STEPS)

    def observe(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Add a step with sequences of these lengths and its duration; returns `perf/...` metrics."""
        flops = compute_train_flops(self.config, self.num_matmul_parameters, lengths, self.num_frozen)
        self._window.append((sum(lengths), flops, seconds))
        tokens, flops, seconds = (sum(column) for column in zip(*self._window, strict=True))
        throughput = tokens / max(seconds, 1e-9)
        return {
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.num_ranks,
            "perf/mfu": 100 * flops / max(seconds, 1e-9) / (self.peak * self.num_ranks),
            "perf/peak_memory": peak_memory_gib(self.device),
        }


def count_matmul_parameters(model: CausalLM, *, frozen: bool = False) -> int:
    """Parameters in matrix products per token: matrices, active experts and head, without embedding lookups.

    `frozen` counts only those that are not trained.
    """
    counted = [p for layer in model.layers() for p in layer.parameters()] + [model.lm_head.weight]
    shapes = [p.shape for p in counted if not (frozen and p.requires_grad)]
    experts = sum(shape.numel() for shape in shapes if len(shape) == 3)
    chosen = experts * model.config.num_experts_per_tok // max(model.config.num_experts, 1)
    return sum(shape.numel() for shape in shapes if len(shape) == 2) + chosen


def compute_train_flops(
    config: DecoderConfig, num_matmul_parameters: int, lengths: Sequence[int], num_frozen: int = 0
) -> float:
    """FLOPs of forward and backward: 6 per parameter and token, and 12 L h d per attended token pair (n^2 / 2).

    Frozen parameters need no weight gradient: 4 per parameter and token.
    """
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    per_token = 6.0 * num_matmul_parameters - 2.0 * num_frozen
    return per_token * sum(lengths) + 12.0 * width * sum(n * n / 2 for n in lengths)


def find_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of the device: data sheet value for bf16 on a known GPU, otherwise measured."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for part, peak in BF16_PEAKS.items():
            if part in name:
                return peak
    return measure_peak_flops(device, dtype)


def measure_peak_flops(device: torch.device, dtype: torch.dtype, size: int = 384, repeats: int = 5) -> float:
    """Best FLOP/s of a few square matrix products, with torch and with our linear kernel (milliseconds on a CPU)."""
    if device.type == "cuda":
        size = 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for product in (torch.matmul, linear) * repeats:
        start = time.perf_counter()
        product(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory: of the GPU allocator, or resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
