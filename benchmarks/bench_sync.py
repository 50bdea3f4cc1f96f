"""Weights from a trainer into an engine, over files and over a process group: seconds per GB, and of a plain copy.

    python benchmarks/bench_sync.py [--megabytes 200] [--repeats 5] [--delta smollm2]

Publishing writes, syncs, hashes and renames; loading reads, checks every tensor's hash, fills the model, lays it out
for decoding and digests what is held. Over a process group (gloo on the loopback device) the trainer copies and hashes,
and one receiver fetches and verifies. The copy is `memcpy` of the same bytes in one process.

With `--delta MODEL`, instead: what `weight_broadcast.delta` publishes of a pretrained model in bfloat16 after steps of
AdamW at a learning rate of 1e-6, against the full weights: bytes, and CPU-seconds to publish and to load. Adam's first
update has the full learning rate everywhere, so the first step changes most.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from models import write_model
from results import ROOT, Row, describe_machine, finish

sys.path.insert(0, str(ROOT / "src"))
import torch

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.loading import WeightReader
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import load_decoder, read_tensors
from prime_rl.transport.broadcast import WeightSender, receive_weights
from prime_rl.transport.canary import build_canary
from prime_rl.transport.deltas import DELTA_FILE, DeltaPublisher
from prime_rl.transport.weights import WEIGHTS_FILE, publish_weights, verify_tensors
from rollouts.training.batching import pack_samples
from rollouts.training.manifests import read_manifest
from rollouts.training.rl_losses import nll_loss
from rollouts.training.steps import step_path
from rollouts.training.types import Sample

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


DELTA_LR, DELTA_TOKENS, MAX_DELTA_SHARE = 1e-6, 128, 0.05


def measure_deltas(name: str, root: Path, num_steps: int) -> list[Row]:
    """Train `num_steps` steps; every version is published and loaded as a delta and whole, in turns."""
    model = {"name": str(write_model(name, root / "model")), "dtype": "bfloat16"}
    backend = build_backend(TrainConfig.model_validate({"model": model, "optim": {"lr": DELTA_LR}}))
    tokens = load_tokenizer(model["name"]).encode((ROOT / "README.md").read_text())
    engine, run = EmbeddedEngine(load_decoder(backend.model_dir)), RunDir(root)
    reader = WeightReader(InferenceConfig(output_dir=root), backend.model_dir, engine)
    deltas, canary = DeltaPublisher(run.broadcasts, num_steps + 1), build_canary(0, [], [], "bfloat16", False)
    seconds: dict[str, list[float]] = {}
    shares = []

    def measure(what: str, work: Callable[[], object]) -> Any:
        started = time.process_time()
        found = work()
        seconds.setdefault(what, []).append(time.process_time() - started)
        return found

    for step in range(num_steps + 1):
        if step:
            part = tokens[(step - 1) * DELTA_TOKENS : step * DELTA_TOKENS]
            sample = Sample("", tokens=part, loss_mask=[0.0] + [1.0] * (len(part) - 1))
            backend.optim_step(backend.forward_backward(pack_samples([sample], DELTA_TOKENS)[0], nll_loss))
        tensors = backend.export_state_dict()
        version = step + 1
        publish_full = partial(publish_weights, run.weights, version, tensors, backend.model_dir)
        full = measure("publish full", publish_full)
        delta = measure("publish delta", partial(deltas.publish, version, tensors, canary, is_anchor=step == 0))
        whole = measure("read full", partial(reader.read_step, full))
        found = measure("read delta", partial(reader.read_step, delta)) if step else whole
        measure("swap", partial(engine.load_weights, *found))
        if step:
            shares.append((delta / DELTA_FILE).stat().st_size / (full / WEIGHTS_FILE).stat().st_size)
            shutil.rmtree(full)  # the engine starts from what it holds
    medians = {what: statistics.median(times[1:]) for what, times in seconds.items()}
    listed = ", ".join(f"{share:.2%}" for share in shares)
    rows = [Row("delta: largest share of the bytes", max(shares), "<=", MAX_DELTA_SHARE, f"by step: {listed}")]
    for what in ("publish", "read"):
        ratio = f"{medians[f'{what} delta'] / medians[f'{what} full']:.1f} x full weights, both in memory"
        rows += [Row(f"{what}: full weights", medians[f"{what} full"], detail="CPU-s")]
        rows += [Row(f"{what}: delta", medians[f"{what} delta"], detail=f"CPU-s, {ratio}")]
    return [*rows, Row("swap into the engine (its pause)", medians["swap"], detail="CPU-s, the same for both")]


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure how long weights take from trainer to engine.")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--delta", metavar="MODEL", help="smollm2, a directory, or a shape of `models.py`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine(1)
    if options.delta:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
            rows = measure_deltas(options.delta, Path(root), options.repeats + 1)
        return finish(f"sync_delta_{Path(options.delta).name}", rows, machine)
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
            "engine takes them (fill, lay out, digest)": lambda i: engine.load_weights(tensors, i + 1)(),
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
