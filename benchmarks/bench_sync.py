"""Weights from a trainer into an engine, over files and over a process group: seconds per GB, and of a plain copy.

    python benchmarks/bench_sync.py [--megabytes 200] [--repeats 5]

Publishing writes, syncs, hashes and renames; loading reads, checks every tensor's hash, fills the model, lays it out
for decoding and digests what is held. Over a process group (gloo on the loopback device) the trainer copies and hashes,
and one receiver fetches and verifies. The copy is `memcpy` of the same bytes in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import ROOT, Row, describe_machine, finish

sys.path.insert(0, str(ROOT / "src"))
import torch

from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import read_tensors
from prime_rl.transport.broadcast import WeightSender, receive_weights
from prime_rl.transport.weights import publish_weights, read_manifest, verify_tensors
from rollouts.training.steps import step_path

HIDDEN = 512
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": HIDDEN // 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LAYER_BYTES = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * 4 * HIDDEN)


def best(work: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and least seconds of `work(i)`."""
    times = []
    for i in range(repeats + 1):
        started = time.perf_counter()
        work(i)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]), min(times[1:])


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure how long weights take from trainer to engine.")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine(1)
    layers = max(options.megabytes * 10**6 // LAYER_BYTES, 1)
    model = CausalLM(DecoderConfig.from_hf(SHAPE | {"num_hidden_layers": layers}))
    init_weights(model, 0)
    tensors = {name: tensor.clone() for name, tensor in tensor_names(model).items()}
    gigabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 1e9
    engine = EmbeddedEngine(model)
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    rows, shipped = [], resolve_model_dir("tiny-qwen3")
    trainer = WeightSender("gloo", "localhost", 0, 60.0, torch.device("cpu"))
    trainer.open()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:

        def published(i: int) -> Path:
            return step_path(Path(root), i + 1)

        works: dict[str, Callable[[int], object]] = {
            "copy of the bytes": lambda i: [target[name].copy_(tensor) for name, tensor in tensors.items()],
            "publish (write, hash, rename)": lambda i: publish_weights(Path(root), i + 1, tensors, shipped),
            "read and verify": lambda i: verify_tensors(read_tensors(published(i)), read_manifest(published(i))),
            "offer to a process group (copy, hash)": lambda i: trainer.offer(0, tensors, None),
            "receive over it and verify": lambda i: receive_weights(trainer.address, 0, "bench", torch.device("cpu")),
            "engine takes them (fill, lay out, digest)": lambda i: engine.load_weights(tensors, i + 1),
        }
        plain = 0.0
        for name, work in works.items():
            median, least = best(work, options.repeats)
            plain = plain or median
            detail = f"s per GB, least {least / gigabytes:.2f}, {median / plain:.1f} x the copy"
            rows.append(Row(name, median / gigabytes, detail=detail))
    trainer.close()
    pause = Row("update of an idle engine", (rows[-1].value) * gigabytes * 1000, detail=f"ms for {gigabytes:.2f} GB")
    return finish("sync", [*rows, pause], machine)


if __name__ == "__main__":
    raise SystemExit(main())
