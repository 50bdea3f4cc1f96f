"""The checks, in order of value: one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

DTYPES = {"float32": 1e-4, "bfloat16": 0.015}
"""Relative error (Frobenius norm) of results and gradients that is allowed in a data type."""


class Need(StrEnum):
    """What a check cannot run without; the value is the reason for skipping it."""

    NOTHING = ""
    DEVICE = "needs a CUDA device"
    TWO_DEVICES = "needs two CUDA devices"
    VLLM = "needs a CUDA device and vLLM"


@dataclass(frozen=True)
class Check:
    """One number and its bound. `function` is `module:function`, called with a `Context` and `options`."""

    name: str
    function: str
    relation: Literal["<=", ">="]
    bound: float
    unit: str
    limit_s: float = 60.0
    """Time limit on a device; five times that on a CPU, after the start of the process."""
    need: Need = Need.NOTHING
    is_speed: bool = False
    """The bound is one of speed or memory: it holds on a device only, with full sizes."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Module of the check; on a device, each has a process of its own."""
        name = self.function.partition(":")[0]
        return name if "." in name else f"dev.gpu.{name}"

    def holds(self, number: float) -> bool:
        """Whether the number is within the bound; NaN is not."""
        return number <= self.bound if self.relation == "<=" else number >= self.bound


def _numerics(name: str, function: str, dtype: str, need: Need = Need.NOTHING, **options: Any) -> Check:
    options = {"dtype": dtype, **options}
    return Check(f"{name}.{dtype}", function, "<=", DTYPES[dtype], "relative error", need=need, options=options)


def _training(name: str, bound: float = 0.04, limit_s: float = 60.0, **options: Any) -> Check:
    function = "training:compare_with_cpu"
    return Check(f"training.{name}", function, "<=", bound, "relative error", limit_s, options=options)


def _throughput(name: str, published: float, **options: Any) -> Check:
    function = "throughput:measure"
    options = {"published": published, **options}
    return Check(f"throughput.{name}", function, ">=", published, "tokens/s", 400.0, is_speed=True, options=options)


SIXTEEN, SIXTY_FOUR = 16384, 65536
LORA = {"lora": {"rank": 16}}
FULL_AC = {"ac": {"mode": "full"}}
SMALL, LARGE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B"

CHECKS = (
    Check("environment.versions", "environment:check_versions", "<=", 0, "too old"),
    Check("environment.packages", "environment:check_packages", "<=", 0, "missing"),
    Check("environment.copy", "environment:measure_copy", ">=", 0.75, "of data sheet", is_speed=True),
    Check("environment.matmul", "environment:measure_matmul", ">=", 0.6, "of data sheet", is_speed=True),
    *(
        _numerics(f"kernels.attention.{mode}", "kernels:compare_attention", dtype, need, mode=mode)
        for mode, dtype, need in (
            ("flash", "bfloat16", Need.DEVICE),
            ("sdpa", "bfloat16", Need.NOTHING),
            ("sdpa", "float32", Need.NOTHING),
            ("exact", "float32", Need.NOTHING),
        )
    ),
    *(
        _numerics(f"kernels.{kind}", "kernels:compare_operation", dtype, kind=kind)
        for kind in ("rms_norm", "rotary", "swiglu", "head")
        for dtype in DTYPES
    ),
    _numerics("kernels.experts", "kernels:compare_operation", "bfloat16", Need.DEVICE, kind="experts"),
    Check("kernels.muon", "kernels:compare_muon", "<=", 0.1, "relative error"),
    Check("kernels.sampler", "kernels:compare_sampler", ">=", 0.99, "equal tokens"),
    *(
        Check(f"decoder.{family}", "decoder:compare_logits", "<=", 1e-3, "relative error", options={"family": family})
        for family in ("qwen3", "qwen2", "llama", "qwen3_moe", "smollm3", "gemma3_text")
    ),
    Check("decoder.hf", "decoder:compare_packed", "<=", 1e-3, "relative error", options={"family": "olmo2"}),
    _training("float32", 1e-3, dtype="float32"),
    _training("bfloat16"),
    _training("rl", kind="rl"),
    _training("lora", model=LORA),
    _training("ac_full", model=FULL_AC),
    _training("ac_selective", model={"ac": {"mode": "selective"}}),
    _training("ac_offload", model={**FULL_AC, "ac_offloading": {}}),
    _training("optimizer_offload", model={"optim_cpu_offload": True}),
    _training("muon", 0.06, optim={"type": "muon"}),
    _training("compile", limit_s=180.0, model={"compile": {"fullgraph": True}}),
    Check("training.packing", "training:compare_packing", "<=", 0.02, "relative error"),
    Check("library.backend", "library:compare_backend", "<=", 1e-3, "relative error"),
    Check("library.nanochat", "library:compare_nanochat", "<=", 0.3, "of the change"),
    Check("engine.exact", "engine:compare_with_trainer", "<=", 1e-4, "nats", options={"exact": True}),
    Check("mismatch.bfloat16", "engine:compare_with_trainer", "<=", 0.005, "KL, nats", options={"exact": False}),
    Check("mismatch.lora", "engine:compare_with_trainer", "<=", 0.005, "KL, nats", options={"exact": False, "lora": 8}),
    Check("engine.graphs", "engine:compare_graphs", "<=", 0.03, "nats"),
    Check("engine.update", "engine:check_update", "<=", 0, "wrong digests"),
    Check("engine.prefix_sharing", "engine:measure_sharing", ">=", 1.2, "times as fast", is_speed=True),
    *(
        Check(f"engine.decode_{batch}", "engine:measure_decode", ">=", share, "of bandwidth", 120.0, is_speed=True,
              options={"batch": batch, "context_tokens": length})
        for batch, length, share in ((1, 256, 0.3), (32, 512, 0.5), (256, 1024, 0.7))
    ),
    Check("engine.decode_drawn", "engine:compare_decode", ">=", 0.9, "of greedy", 120.0, is_speed=True,
          options={"batch": 32, "context_tokens": 512, "temperature": 1.0}),
    Check("engine.decode_lora", "engine:compare_decode", ">=", 0.5, "of no adapter", 120.0, is_speed=True,
          options={"batch": 32, "context_tokens": 512, "rank": 16}),
    Check("engine.requests", "engine:measure_requests", ">=", 120, "requests/s", 120.0, is_speed=True),
    Check("engine.update_pause", "engine:measure_update_pause", "<=", 20, "ms", is_speed=True),
    Check("runs.sft", "runs:run_sft", "<=", 0.9, "last loss / first", 120.0),
    Check("runs.sft_resume", "runs:resume_sft", "<=", 1e-2, "relative difference", 120.0),
    Check("runs.profile", "runs:profile_sft", ">=", 2, "files", 120.0, Need.DEVICE),
    Check("runs.rl", "runs:run_rl", ">=", 0.05, "gain of reward", 240.0, Need.DEVICE),
    Check("runs.rl_resume", "runs:resume_rl", ">=", 4, "steps", 240.0),
    Check("runs.rl_gloo", "runs:run_rl", ">=", 0.0, "gain of reward", 240.0, Need.DEVICE,
          options={"options": ["--weight-broadcast.type", "gloo"], "num_steps": 8}),
    Check("runs.rl_vllm", "runs:run_rl", ">=", 0.0, "gain of reward", 400.0, Need.VLLM,
          options={"options": ["--inference.backend", "vllm", "--inference.vllm.gpu-memory-utilization", "0.4"],
                   "num_steps": 8}),
    Check("ranks.nccl", "runs:compare_ranks", "<=", 1e-2, "relative difference", 180.0, Need.TWO_DEVICES),
    Check("ranks.broadcast", "runs:run_rl", ">=", 0.0, "gain of reward", 240.0, Need.TWO_DEVICES,
          options={"options": ["--weight-broadcast.type", "nccl"], "num_steps": 8}),
    _throughput("sft_0.6b_8k", 26005, kind="sft", shape=SMALL, seq_len=8192),
    _throughput("rl_0.6b_16k", 11896, kind="rl", shape=SMALL, seq_len=SIXTEEN),
    _throughput("rl_0.6b_64k", 10147, kind="rl", shape=SMALL, seq_len=SIXTY_FOUR, model=FULL_AC),
    _throughput("rl_4b_lora_16k", 6229, kind="rl", shape=LARGE, seq_len=SIXTEEN, model={**LORA, **FULL_AC}),
    _throughput("rl_4b_lora_64k", 4164, kind="rl", shape=LARGE, seq_len=SIXTY_FOUR, model={**LORA, **FULL_AC}),
    *(
        Check(f"memory.{name}", "throughput:compare_memory", "<=", 1.0, "of plan", is_speed=True, options={"of": name})
        for name in ("sft_0.6b_8k", "rl_0.6b_16k", "rl_0.6b_64k", "rl_4b_lora_16k", "rl_4b_lora_64k")
    ),
)  # fmt: skip
"""Bounds of `throughput.*` are what prime-rl publishes for one H100 (its benchmarks, 2026-02)."""
