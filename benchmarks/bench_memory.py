"""Memory and pauses of an inference process whose weights are updated while it generates, as in a run of `rl`.

    python benchmarks/bench_memory.py [--model smollm2] [--updates 4] [--prompts 24] [--group 8]

Groups of short completions run while versions of the weights are published and loaded. The peak of the resident memory
must not exceed two copies of the weights, the keys and values of the cached tokens at their peak, and 0.5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from results import ROOT, Row, describe_machine, finish, read_peak_gb

sys.path.insert(0, str(ROOT / "src"))
from prime_rl.runtime.machine import find_free_port, is_healthy
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import load_hf_config, read_tensors
from prime_rl.transport.weights import publish_weights

PROMPT_TOKENS, NEW_TOKENS = 40, 14
MAX_PAUSE_S, OVERHEAD_GB = 0.3, 0.5


def post(port: int, route: str, body: dict[str, Any]) -> Any:
    """Send a request and return the parsed response."""
    request = Request(f"http://127.0.0.1:{port}{route}", json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=600) as response:
        return json.load(response)


def complete(port: int, name: str, seed: int, group: int) -> None:
    """Run one group of completions of a random prompt."""
    prompt = random.Random(seed).choices(range(1000), k=PROMPT_TOKENS)
    sampling = {"n": group, "max_tokens": NEW_TOKENS, "seed": seed, "ignore_eos": True}
    post(port, "/v1/completions", {"model": name, "prompt": prompt, **sampling})


def read_metric(port: int, name: str) -> float:
    """A metric of the server."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"prime_rl_{name}"))


def measure(model: str, updates: int, prompts: int, group: int) -> tuple[list[float], float, int]:
    """Pauses of the updates in seconds, peak memory in GB, peak of the cached tokens."""
    model_dir, port = resolve_model_dir(model), find_free_port()
    tensors = read_tensors(model_dir)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        argv = ["--model.name", str(model_dir), "--server.port", str(port), "--output_dir", str(out)]
        command = [sys.executable, "-m", "prime_rl.inference.server", *argv, "--model.max_model_len", "128"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        peak_tokens, done = 0, threading.Event()

        def watch() -> None:
            nonlocal peak_tokens
            while not done.wait(0.1):
                peak_tokens = max(peak_tokens, int(read_metric(port, "cached_tokens")))

        try:
            while not is_healthy(None, port):
                time.sleep(0.2)
            watcher = threading.Thread(target=watch)
            watcher.start()
            with ThreadPoolExecutor(prompts) as pool:
                for step in range(1, updates + 1):
                    seeds = range(step * prompts, (step + 1) * prompts)
                    running = [pool.submit(complete, port, str(model_dir), seed, group) for seed in seeds]
                    changed = {name: tensor * (1 + 1e-4 * step) for name, tensor in tensors.items()}
                    directory = publish_weights(out / "weights", step, changed, model_dir)
                    del changed
                    post(port, "/update_weights", {"weight_dir": str(directory)})
                    for each in running:
                        each.result()
            done.set()
            watcher.join()
            return read_pauses(out), read_peak_gb(server.pid), peak_tokens
        finally:
            done.set()
            server.terminate()
            server.wait(60)


def read_pauses(out: Path) -> list[float]:
    """Pauses of the updates that the server has logged, in seconds."""
    rows = [json.loads(line) for file in out.rglob("metrics*.jsonl") for line in file.read_text().splitlines()]
    return [row["time/update_weights_pause"] for row in rows if "time/update_weights_pause" in row]


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the memory of an inference process with weight updates.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args()
    machine = describe_machine(1)
    model_dir = resolve_model_dir(options.model)
    config = DecoderConfig.from_hf(load_hf_config(model_dir))
    weights = sum(tensor.numel() for tensor in read_tensors(model_dir).values()) * 4 / 1e9
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 / 1e9
    pauses, peak, tokens = measure(options.model, options.updates, options.prompts, options.group)
    bound = 2 * weights + tokens * token + OVERHEAD_GB
    detail = f"GB; {weights:.2f} GB of weights in fp32, {tokens} cached tokens of {token * 1e6:.0f} kB"
    rows = [
        Row("peak memory of the process", peak, "<=", round(bound, 2), detail),
        Row("pause of an update", median(pauses), "<=", MAX_PAUSE_S, f"s, median of {len(pauses)}"),
    ]
    return finish("memory", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
