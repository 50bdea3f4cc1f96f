"""Training speed with random weights of the shapes that prime-rl publishes numbers for, and memory against `plan`.

As there: no generation, two micro-batches of one sequence of full length per step, on one device.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from dev.gpu.context import Context, Measured, small_shape, write_model
from dev.gpu.training import build, build_samples

from prime_rl.plan.config import PlanConfig
from prime_rl.plan.memory import trainer_memory
from prime_rl.plan.shapes import KNOWN, ModelShape, read_shape
from prime_rl.trainer.perf import PerfCounter, peak_memory_gib
from rollouts.training.batching import Share, pack_samples

NUM_STEPS = 3
MICRO_BATCHES = 2


def measure(
    context: Context, kind: str, shape: str, seq_len: int, published: float, model: dict[str, Any] | None = None
) -> Measured:
    """Tokens per second of steps after the first: forward, backward and optimizer, without publishing weights."""
    sizes = small_shape(True) if context.tiny else build_sizes(KNOWN[shape], seq_len)
    directory = write_model(context.folder("model"), sizes, weights=False)
    seq_len = 64 if context.tiny else seq_len
    trained = {"name": str(directory), "device": str(context.device), "debug": {"random_init": True}, **(model or {})}
    if kind == "rl":
        trained["seq_len"] = seq_len
    backend, loss = build({"model": trained, "output_dir": context.scratch / "trainer"}, kind)
    perf = PerfCounter(backend.model, context.device, backend.placement.dtype)
    samples = build_samples([seq_len] * MICRO_BATCHES, backend.model.config.vocab_size)
    [micros] = pack_samples(samples, seq_len, quadratic_cost=backend.quadratic_cost)
    lengths = [seq_len] * MICRO_BATCHES
    seconds, metrics = [], {}
    for step in range(1 + NUM_STEPS):
        context.synchronize()
        started = time.perf_counter()
        stats = backend.forward_backward(micros, loss)
        backend.optim_step(stats)
        context.synchronize()
        if step:
            seconds.append(time.perf_counter() - started)
            metrics = perf.observe(Share(micros, lengths), seconds[-1])
    if not math.isfinite(stats.summary()["loss/mean"]):
        raise RuntimeError("the loss is not finite")
    throughput = sum(lengths) / statistics.median(seconds)
    plan = plan_memory(str(directory) if context.tiny else shape, seq_len, model or {})
    peak = peak_memory_gib(context.device)
    share = f"{throughput / published:.2f} of prime-rl's {published:,.0f} on an H100"
    note = (
        f"{'tiny shape, no comparison' if context.tiny else share}; MFU {metrics['perf/mfu']:.1f} %, "
        f"peak {peak:.1f} GiB, plan {plan:.1f} GiB, attn {backend.placement.attn}"
    )
    return Measured(throughput, note, {"peak_gib": peak, "plan_gib": plan, "mfu": metrics["perf/mfu"]})


def build_sizes(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    """The entries of `config.json` for a shape of Qwen3."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": seq_len,
    }


def plan_memory(name: str, seq_len: int, model: dict[str, Any]) -> float:
    """GiB that `plan` estimates for this trainer on one GPU."""
    config = PlanConfig.model_validate(
        {
            "model": {"name": name},
            "seq_len": seq_len,
            "trainer": {"micro_bs": 1, "model": model},
            "cluster": {"nodes": 1, "gpus_per_node": 1},
        }
    )
    return trainer_memory(config, read_shape(name), config.trainer.parallel.resolve(1)).total / 2**30


def compare_memory(context: Context, of: str) -> Measured:
    """Peak memory of a throughput check over the estimate of `plan`."""
    values = context.values_of(f"throughput.{of}")
    return Measured(
        values["peak_gib"] / values["plan_gib"], f"{values['peak_gib']:.1f} of {values['plan_gib']:.1f} GiB"
    )
