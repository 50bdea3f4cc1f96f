"""Eight clients of the training API at once against one: wall time, bits, and latency of samples during training.

python benchmarks/bench_training_api.py                                                   tiny-qwen3, a minute
python benchmarks/bench_training_api.py --model smollm2 --name training_api_smollm2       smaller sizes, minutes

Every client runs the loop of `tinker_cookbook.recipes.rl_loop`: it samples groups from its newest weights, computes
rewards and advantages, and sends `forward_backward` (importance sampling) and `optim_step`. The same clients run one
after the other on the same server; each must get the same bits. There are two conditions:

    rewards take no time     the server is all that a client waits for; nearly all of its time is matrix products, whose
                             number grows with the clients, so the CPU time divided by the cores bounds the wall time
    rewards take time        `--environment-s` per step, as with a sandbox or a judge, in which others are served
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from results import Row, describe_machine, finish

from prime_rl.client.http import HttpPool
from prime_rl.training_api.wire import CLASSES, FLOAT32, INT64

RANK = 32
SIZES = {"steps": 4, "groups": 2, "tokens": 128, "alone": 8, "samples": 60, "batch": 8, "max_latency_ms": 100.0}
LARGE_SIZES = {"steps": 1, "groups": 1, "tokens": 32, "alone": 3, "samples": 30, "batch": 2, "max_latency_ms": 500.0}
"""Defaults for tiny-qwen3, and for other models."""


class Client:
    """A tenant with a model; `digest` covers every number that it receives."""

    def __init__(self, pool: HttpPool, model: str, tenant: int) -> None:
        self.pool, self.model, self.tenant = pool, model, tenant
        self.headers = {"x-api-key": f"tml-{tenant}", "content-type": "application/json"}
        self.digest = hashlib.blake2b(digest_size=16)
        self.seq_ids = itertools.count()
        self.samplers = itertools.count()

    async def post(self, path: str, body: Any) -> Any:
        """The reply: JSON, or protobuf bytes."""
        is_json = not isinstance(body, bytes)
        data = json.dumps(body).encode() if is_json else body
        kind = "application/json" if is_json else "application/x-protobuf"
        reply = await self.pool.request("POST", f"/api/v1/{path}", data, {**self.headers, "content-type": kind})
        assert reply.status == 200, reply
        return json.loads(reply.body) if reply.body.startswith(b"{") else reply.body

    async def result(self, promise: Any) -> Any:
        """The result of a request."""
        while isinstance(found := await self.post("retrieve_future", {"request_id": promise["request_id"]}), dict):
            assert "error" not in found, found
            if found.get("type") != "try_again":
                break
        return found

    async def train(self, path: str, **body: Any) -> Any:
        """The promise of a training request."""
        return await self.post(path, {"model_id": self.model_id, "seq_id": next(self.seq_ids), **body})

    async def open(self) -> None:
        """Create session and model."""
        self.session = (await self.post("create_session", {"tags": []}))["session_id"]
        lora = {"rank": RANK, "seed": self.tenant}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self.model, "lora_config": lora}
        self.model_id = (await self.result(await self.post("create_model", body)))["model_id"]
        next(self.seq_ids)

    async def open_sampler(self) -> str:
        """Save the weights and open a sampling session of them."""
        promise = await self.train("save_weights_for_sampler", sampling_session_seq_id=next(self.samplers))
        return str((await self.result(promise))["sampling_session_id"])

    async def sample(self, sampler: str, seq_id: int, prompt: list[int], num: int, tokens: int, seed: int) -> list[Any]:
        """Sampled tokens and log-probs."""
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "num_samples": num,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": tokens, "seed": seed, "temperature": 1.0},
        }
        found = CLASSES["SampleResponse"].FromString(await self.result(await self.post("asample", body)))
        return [(np.frombuffer(s.tokens, np.int32), np.frombuffer(s.logprobs, np.float32)) for s in found.sequences]

    async def pass_(self, data: list[tuple[list[int], dict[str, Any]]], loss_fn: str) -> Any:
        """The promise of a forward and backward pass."""
        message = CLASSES["ForwardBackwardRequest"](model_id=self.model_id, seq_id=next(self.seq_ids), loss_fn=loss_fn)
        for tokens, inputs in data:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
            for name, array in inputs.items():
                kind, dtype = (INT64, np.int64) if name == "target_tokens" else (FLOAT32, np.float32)
                values = np.asarray(array, dtype)
                tensor = CLASSES["Tensor"](dense=values.tobytes(), dtype=kind, shape=values.shape)
                datum.loss_fn_inputs[name].CopyFrom(tensor)
        return await self.post("forward_backward", message.SerializeToString())

    async def run(self, plan: argparse.Namespace, environment_s: float) -> None:
        """The loop of an RL recipe: rewards are the share of even tokens."""
        rng = np.random.default_rng(self.tenant)
        for step in range(plan.steps):
            sampler = await self.open_sampler()
            prompts = [rng.integers(5, 250, plan.prompt).tolist() for _ in range(plan.groups)]
            calls = (
                self.sample(sampler, i, prompt, plan.group_size, plan.tokens, 1000 * step + i)
                for i, prompt in enumerate(prompts)
            )
            groups = await asyncio.gather(*calls)
            for tokens, logprobs in itertools.chain(*groups):
                self.digest.update(tokens.tobytes() + logprobs.tobytes())
            await asyncio.sleep(environment_s)
            data = []
            for prompt, group in zip(prompts, groups, strict=True):
                rewards = np.array([np.mean(tokens % 2 == 0) for tokens, _ in group])
                for (tokens, logprobs), advantage in zip(group, rewards - rewards.mean(), strict=True):
                    whole, zeros = [*prompt, *tokens.tolist()], [0.0] * (len(prompt) - 1)
                    inputs = {
                        "target_tokens": whole[1:],
                        "logprobs": [*zeros, *logprobs],
                        "advantages": [*zeros, *[advantage] * len(tokens)],
                    }
                    data.append((whole[:-1], inputs))
            promises = [await self.pass_(data, "importance_sampling")]
            promises.append(await self.train("optim_step", adam_params={"learning_rate": 1e-3}))
            found, metrics = [await self.result(promise) for promise in promises]
            for record in CLASSES["ForwardBackwardOutput"].FromString(found).loss_fn_outputs:
                self.digest.update(record.fields["logprobs"].data)
            self.digest.update(json.dumps(metrics).encode())


@contextlib.contextmanager
def run_server(model: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Address and id of a `serve` process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "prime_rl", "serve", "--model.name", model, "--port", str(port)]
    command += ["--output_dir", str(folder / "serve"), "--log.level", "warning"]
    if model == "tiny-qwen3":
        command += ["--model.debug.random_init", "true"]
    process = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def read_cpu_s(process: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for(pool: HttpPool) -> None:
    """Wait until the server answers."""
    for _ in range(600):
        with contextlib.suppress(ConnectionError):
            await pool.request("GET", "/api/v1/healthz", headers={"x-api-key": "tml-0"})
            return
        await asyncio.sleep(0.2)
    raise RuntimeError("the server did not start")


async def run_clients(
    pool: HttpPool, plan: argparse.Namespace, tenants: list[int], server: int, environment_s: float = 0.0
) -> tuple[float, float, list[str]]:
    """Wall time of the loops of some tenants at once, CPU time of the server, and digests of what they received."""
    clients = [Client(pool, plan.model, tenant) for tenant in tenants]
    for client in clients:
        await client.open()
    start, cpu = time.perf_counter(), read_cpu_s(server)
    await asyncio.gather(*(client.run(plan, environment_s) for client in clients))
    wall, cpu = time.perf_counter() - start, read_cpu_s(server) - cpu
    for client in clients:
        await client.post(f"sessions/{client.session}/finish", {})
    return wall, cpu, [client.digest.hexdigest() for client in clients]


async def measure_latency(pool: HttpPool, plan: argparse.Namespace, *, training: bool) -> dict[int, list[float]]:
    """Seconds of single samples of 1 and 32 tokens of one tenant, while another trains without a pause or not."""
    sampling, other = Client(pool, plan.model, 100), Client(pool, plan.model, 101)
    found: dict[int, list[float]] = {}
    for client in (sampling, other):
        await client.open()
    sampler, rng = await sampling.open_sampler(), np.random.default_rng(0)
    whole = rng.integers(5, 250, (plan.batch, 513))
    batch = [(row[:-1].tolist(), {"target_tokens": row[1:], "weights": np.ones(512)}) for row in whole]

    async def train() -> None:
        while True:
            await other.result(await other.pass_(batch, "cross_entropy"))

    task = asyncio.create_task(train()) if training else None
    for tokens in (1, 32):
        found[tokens] = []
        for i in range(plan.samples):
            prompt = rng.integers(5, 250, plan.prompt).tolist()
            start = time.perf_counter()
            await sampling.sample(sampler, 1000 * tokens + i, prompt, 1, tokens, i)
            found[tokens].append(time.perf_counter() - start)
    if task is not None:
        assert not task.done(), task.exception()
        task.cancel()
    for client in (sampling, other):
        await client.post(f"sessions/{client.session}/finish", {})
    return found


def describe_latency(idle: dict[int, list[float]], busy: dict[int, list[float]], max_ms: float) -> list[Row]:
    """Percentiles of latency; `max_ms` bounds that of one token."""
    rows = []
    for tokens in idle:
        quiet, loud = sorted(idle[tokens]), sorted(busy[tokens])
        p99 = loud[min(len(loud) * 99 // 100, len(loud) - 1)]
        detail = f"p50 {1e3 * statistics.median(loud):.1f} ms; without training {1e3 * statistics.median(quiet):.1f} ms"
        name = f"p99 latency of {tokens} token{'s' * (tokens > 1)} during training, milliseconds"
        rows.append(Row(name, 1e3 * p99, *(("<=", max_ms) if tokens == 1 else ()), detail=detail))
    return rows


async def measure_clients(
    pool: HttpPool, plan: argparse.Namespace, server: int, environment_s: float, num_alone: int
) -> list[Row]:
    """All clients at once, between runs of `num_alone` of them alone."""
    tenants, half = list(range(plan.tenants)), num_alone // 2
    runs = [await run_clients(pool, plan, [tenant], server, environment_s) for tenant in tenants[:half]]
    together, cpu, digests = await run_clients(pool, plan, tenants, server, environment_s)
    runs += [await run_clients(pool, plan, [tenant], server, environment_s) for tenant in tenants[half:num_alone]]
    alone, alone_cpu = (statistics.median(run[i] for run in runs) for i in (0, 1))
    equal = sum(own == [digest] for (_, _, own), digest in zip(runs, digests, strict=False))
    title = f"rewards take {environment_s:g} s per step" if environment_s else "rewards take no time"
    detail = f"{together:.2f} s, one alone {alone:.2f} s (median)"
    cpu_detail = f"{cpu:.2f} s, one alone {alone_cpu:.2f} s"
    return [
        Row(f"{title}: clients of {num_alone} with the bits that they get alone", equal, "==", num_alone),
        Row(f"{title}: wall time of {len(tenants)} clients at once / of one", together / alone, "<=", 2.5, detail),
        Row(f"{title}: CPU time of the server, the same", cpu / alone_cpu, detail=cpu_detail),
        Row(f"{title}: CPU time / cores / wall time of one (lower bound)", cpu / (os.cpu_count() or 1) / alone),
    ]


async def measure(url: str, server: int, plan: argparse.Namespace) -> list[Row]:
    """All rows."""
    pool = HttpPool(url, max_connections=256, timeout_s=600)
    await wait_for(pool)
    await run_clients(pool, plan, [999], server)  # kernels are compiled, caches filled
    rows = await measure_clients(pool, plan, server, 0.0, min(plan.alone, plan.tenants))
    rows += await measure_clients(pool, plan, server, plan.environment_s, min(3, plan.tenants))
    latency = [await measure_latency(pool, plan, training=training) for training in (False, True)]
    await pool.close()
    return [*rows, *describe_latency(*latency, plan.max_latency_ms)]


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the training API with many clients.")
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--name", default="training_api", help="of the results")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--groups", type=int, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--prompt", type=int, default=30, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, help="tokens of a sample")
    parser.add_argument("--alone", type=int, help="clients that run alone, too")
    parser.add_argument("--samples", type=int, help="samples whose latency is measured, of each length")
    parser.add_argument("--batch", type=int, help="sequences of 512 tokens that are trained meanwhile")
    parser.add_argument("--max-latency-ms", type=float, help="threshold of the p99 latency of 1 token")
    parser.add_argument("--environment-s", type=float, default=2.0, help="seconds for the rewards of a step")
    plan = parser.parse_args()
    for name, value in (SIZES if plan.model == "tiny-qwen3" else LARGE_SIZES).items():
        if getattr(plan, name) is None:
            setattr(plan, name, value)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, run_server(plan.model, Path(folder)) as (url, server):
        rows = asyncio.run(measure(url, server, plan))
    return finish(plan.name, rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
