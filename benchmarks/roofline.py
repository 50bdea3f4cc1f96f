"""The least time that generation can take on this machine, from its measured arithmetic peak and memory bandwidth.

A forward pass takes at least the time of its products at the peak, and at least the time to read its weights, keys and
values. Both speeds are measured here with as many threads as the engine has, each as the best of several ways and
repeats. They change from second to second on a virtual machine, whose cores and memory others use, so they are measured
beside every run of the engine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
ROWS, SIZE = 512, 2048
"""Rows, inputs and outputs of the products that measure the peak."""
REPEATS = 5


@dataclass(frozen=True)
class Resources:
    """Threads, and the clock that counts: wall time, or the CPU time of all threads on a machine that is shared."""

    threads: int
    counts_cpu: bool = False

    def find_least(self, work: Callable[[], object]) -> float:
        """Seconds of the fastest repeat, after one that warms up."""
        import torch

        torch.set_num_threads(self.threads)
        clock = time.process_time if self.counts_cpu else time.perf_counter
        seconds = []
        for _ in range(REPEATS + 1):
            start = clock()
            work()
            seconds.append(clock() - start)
        return min(seconds[1:])


@dataclass(frozen=True)
class Speed:
    """Operations per second of matrix products, and bytes per second that are read from memory."""

    flops: float
    bandwidth: float


class Meter:
    """Measures the speed of a machine: of products in `dtype`, and of reads by `bandwidth`, which meters may share."""

    def __init__(self, dtype: str, bandwidth: BandwidthMeter, resources: Resources) -> None:
        self._peak = PeakMeter(dtype, resources)
        self._bandwidth = bandwidth

    def measure(self, num_bytes: int) -> Speed:
        """The speed now; reads are of `num_bytes` bytes."""
        return Speed(self._peak.measure(), self._bandwidth.measure(num_bytes))


class PeakMeter:
    """Measures the peak of matrix products: the faster of oneDNN's and those of our kernels."""

    def __init__(self, dtype: str, resources: Resources) -> None:
        import torch

        from rollouts.kernels import cpu, native
        from rollouts.kernels.onednn import pack_weight, packed_linear

        x, weight = torch.randn(ROWS, SIZE), torch.randn(SIZE, SIZE)
        self._resources = resources
        self._products: list[Callable[[], object]] = []
        if dtype == "float32" or (dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            narrow, packed = x.to(getattr(torch, dtype)), pack_weight(weight.to(getattr(torch, dtype)))
            self._products.append(lambda: packed_linear(narrow, packed))
        if native.library() is not None:
            rounded = weight.bfloat16() if dtype == "bfloat16" else weight
            kernel = cpu.PackedWeight(rounded, rounded=True, quantized=dtype == "int8")
            self._products.append(lambda: kernel(x))

    def measure(self) -> float:
        """Operations per second."""
        import torch

        with torch.inference_mode():
            return 2 * ROWS * SIZE * SIZE / min(map(self._resources.find_least, self._products))


class BandwidthMeter:
    """Measures the bandwidth of reads of up to `max_bytes` bytes."""

    def __init__(self, max_bytes: int, resources: Resources) -> None:
        import torch

        from rollouts.kernels.huge_pages import map_memory

        self._memory = map_memory(max(max_bytes // 4, 1) * 4).view(torch.float32).fill_(1)
        self._resources = resources

    def measure(self, num_bytes: int) -> float:
        """Bytes per second when as many are read again and again: from memory if they are more than the caches hold."""
        buffer = self._memory[: max(num_bytes // 4, 1)]
        return 4 * len(buffer) / min(map(self._resources.find_least, (buffer.sum, buffer.max)))


@dataclass(frozen=True)
class Decoder:
    """Sizes of a dense decoder whose products and weights are in `dtype`, keys and values in `cache_dtype`."""

    config: dict[str, Any]
    dtype: str
    cache_dtype: str

    @property
    def num_weights(self) -> int:
        """Weights of the layers' products."""
        c = self.config
        attention = 2 * c["hidden_size"] * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
        return int(c["num_hidden_layers"] * (attention + 3 * c["hidden_size"] * c["intermediate_size"]))

    @property
    def num_head_weights(self) -> int:
        """Weights of the output head."""
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        c = self.config
        values = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        return int(values * WEIGHT_BYTES[self.cache_dtype])

    def count_attention(self, keys: float) -> float:
        """Operations of the attention of one query to `keys` keys in all layers."""
        c = self.config
        return float(4 * keys * c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"])

    def count_operations(self, rows: int, keys: float, sampled: int) -> float:
        """Operations of `rows` tokens with `keys` keys each, of which `sampled` go through the head."""
        products = 2.0 * (rows * self.num_weights + sampled * self.num_head_weights)
        return products + rows * self.count_attention(keys)

    def count_bytes(self, keys: float) -> int:
        """Bytes of all weights, and of `keys` keys and values."""
        return int((self.num_weights + self.num_head_weights) * WEIGHT_BYTES[self.dtype] + keys * self.token_bytes)


@dataclass(frozen=True)
class Bound:
    """Operations of the prompts and of each decode step, and the bytes that this step reads."""

    prefill: float
    steps: int
    operations: float
    num_bytes: int

    def seconds(self, speed: Speed) -> float:
        """Least seconds in all."""
        return self.prefill / speed.flops + self.steps * self._step_seconds(speed)

    def _step_seconds(self, speed: Speed) -> float:
        return max(self.operations / speed.flops, self.num_bytes / speed.bandwidth)

    def describe(self, speed: Speed) -> str:
        """The least time of a step, or of a prompt."""
        peak = f"at {speed.flops / 1e12:.2f} TFLOP/s"
        if not self.steps:
            return f"at least {self.prefill / speed.flops * 1e3:.0f} ms {peak}"
        products = f"products {self.operations / speed.flops * 1e3:.2f} {peak}"
        reads = f"reads {self.num_bytes / speed.bandwidth * 1e3:.2f} at {speed.bandwidth / 1e9:.0f} GB/s"
        return f"a step at least {self._step_seconds(speed) * 1e3:.2f} ms: {products}, {reads}"


def compute_bound(decoder: Decoder, groups: int, group: int, prompt: int, new: int) -> Bound:
    """The bound of `groups` prompts, each computed and read once, with `group` completions of `new` tokens each."""
    rows = groups * group
    prefill = decoder.count_operations(groups * prompt, (prompt + 1) / 2, groups)
    written = (new - 1) / 2  # by the middle step; both bounds are linear in it, and one of them is mostly the larger
    operations = decoder.count_operations(rows, prompt + written, rows)
    return Bound(prefill, new - 1, operations, decoder.count_bytes(groups * prompt + rows * written))


def read_decoder(model_dir: Path, dtype: str, quantized: bool = False) -> Decoder:
    """The sizes in a model directory."""
    config = json.loads((model_dir / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return Decoder(config, "int8" if quantized else dtype, dtype)
