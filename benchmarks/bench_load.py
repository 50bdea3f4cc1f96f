"""Inference server under many streaming clients that disconnect at random: constant memory, no leaked slots, exact.

python benchmarks/bench_load.py --clients 1000 --seconds 600     one line of JSON; exit code 1 when something fails

Each client asks again and again for 1 to 64 tokens after prompts of 1 to 200, as a stream. Most read to the end; some
hang up in the middle, some before the first byte. Afterwards the server must hold no request, its count of answered
requests and tokens must fit what clients saw, and its memory must not have grown from the second third to the last.
The server keeps keys and values of finished requests up to `cache.max_prefix_cache_tokens`: the first third must fill
that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from prime_rl.client.http import ensure_open_files  # noqa: E402
from prime_rl.runtime.process import find_free_port, is_healthy  # noqa: E402

HANG_UP, GIVE_UP = 0.1, 0.1
"""Shares of the requests whose client leaves in the middle of the stream, and before its beginning."""
MEMORY_GROWTH = 1.05
MAX_PREFIX_CACHE_TOKENS = 16384
LOOK_EVERY_S = 5.0


class Crowd:
    """All clients and what they saw."""

    def __init__(self, port: int, until: float) -> None:
        self.port, self.until = port, until
        self.seen: Counter[str] = Counter()
        self.latencies: list[float] = []

    async def client(self, number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < self.until:
            try:
                await self.ask(draw)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.seen[f"error {type(error).__name__}"] += 1
                await asyncio.sleep(draw.random())

    async def ask(self, draw: random.Random) -> None:
        """One request on a connection of its own."""
        length, wanted = draw.randint(1, 200), draw.randint(1, 64)
        body = json.dumps(
            {
                "prompt": [draw.randrange(5, 250) for _ in range(length)],
                "max_tokens": wanted,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        fate = draw.random()
        start = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
            )
            head += "\r\n\r\n"
            writer.write(head.encode() + body.encode())
            await writer.drain()
            if fate < GIVE_UP:
                self.seen["gave up"] += 1
                return
            if fate < GIVE_UP + HANG_UP:
                await reader.readuntil(b"data: ")
                self.seen["hung up"] += 1
                return
            await self.read(reader, wanted)
            self.latencies.append(time.monotonic() - start)
        finally:
            writer.close()

    async def read(self, reader: asyncio.StreamReader, wanted: int) -> None:
        """To the end of the stream, whose count of tokens must be the one that was asked for."""
        text = (await reader.read()).decode()
        status = text.split(" ", 2)[1]
        if status != "200":
            self.seen[f"status {status}"] += 1
            return
        usage = [json.loads(line[6:])["usage"] for line in text.splitlines() if '"usage":{' in line]
        exact = text.rstrip().endswith("data: [DONE]") or "data: [DONE]" in text
        if not exact or len(usage) != 1 or usage[0]["completion_tokens"] != wanted:
            self.seen["wrong stream"] += 1
            return
        self.seen["finished"] += 1
        self.seen["tokens"] += wanted


def read_metrics(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0].removeprefix("prime_rl_"): float(line.split()[1]) for line in lines if line[:1] != "#"}


def read_rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch(crowd: Crowd, pid: int) -> list[tuple[float, float]]:
    """Megabytes, and tokens kept of ended requests, from time to time."""
    seen = []
    while time.monotonic() < crowd.until:
        told = await asyncio.to_thread(read_metrics, crowd.port)
        seen.append((read_rss_mb(pid), told["kept_tokens"]))
        await asyncio.sleep(LOOK_EVERY_S)
    return seen


async def run(crowd: Crowd, clients: int, pid: int) -> list[tuple[float, float]]:
    async with asyncio.TaskGroup() as tasks:
        seen = tasks.create_task(watch(crowd, pid))
        for number in range(clients):
            tasks.create_task(crowd.client(number))
    return seen.result()


def measure(clients: int, seconds: float) -> dict[str, object]:
    """The whole measurement; `problems` says what does not hold."""
    ensure_open_files(2 * clients)
    port = find_free_port()
    model = ["--model.name", "tiny-qwen3", "--model.debug.random_init", "true", "--model.max_model_len", "512"]
    cache = ["--cache.max_prefix_cache_tokens", str(MAX_PREFIX_CACHE_TOKENS)]
    argv = [sys.executable, "-m", "prime_rl.inference.server", *model, *cache, "--server.port", str(port)]
    server = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.DEVNULL)
    try:
        while not is_healthy(None, port):
            time.sleep(0.5)
        crowd = Crowd(port, time.monotonic() + seconds)
        looks = asyncio.run(run(crowd, clients, server.pid))
        deadline = time.monotonic() + 60
        while (told := read_metrics(port))["requests_running"] + told[
            "requests_waiting"
        ] and time.monotonic() < deadline:
            time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(60)
    rss, third = [mb for mb, _ in looks], max(1, len(looks) // 3)
    growth = fmean(rss[-third:]) / fmean(rss[third : 2 * third] or rss)
    full = next((i for i, (_, kept) in enumerate(looks) if kept > MAX_PREFIX_CACHE_TOKENS - 512), len(looks))
    seen, held = crowd.seen, told["requests_running"] + told["requests_waiting"]
    problems = []
    if held:
        problems.append(f"{held:.0f} requests are still held")
    if full > third:
        problems.append(
            f"the first third did not fill the {MAX_PREFIX_CACHE_TOKENS} tokens of ended requests: ask for longer"
        )
    if growth > MEMORY_GROWTH:
        problems.append(f"memory grew by a factor of {growth:.3f} from the second third to the last")
    if told["generated_tokens_total"] < seen["tokens"] or told["requests_finished_total"] < seen["finished"]:
        problems.append("the server counts fewer tokens or requests than clients received")
    problems += [f"{count} x {name}" for name, count in seen.items() if name.startswith(("status", "wrong", "error"))]
    latencies = sorted(crowd.latencies) or [0.0]
    return {
        "clients": clients,
        "seconds": seconds,
        **seen,
        "requests_per_s": round(seen["finished"] / seconds, 1),
        "latency_p50_s": round(latencies[len(latencies) // 2], 3),
        "latency_p99_s": round(latencies[int(0.99 * (len(latencies) - 1))], 3),
        "max_prefix_cache_tokens": MAX_PREFIX_CACHE_TOKENS,
        "full_after_s": round(full * LOOK_EVERY_S),
        "rss_mb": [round(mb) for mb in rss[:: max(1, len(rss) // 12)]],
        "memory_growth": round(growth, 4),
        "server_tokens": told["generated_tokens_total"],
        "server_finished": told["requests_finished_total"],
        "still_held": held,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    given = parser.parse_args()
    found = measure(given.clients, given.seconds)
    sys.stdout.write(json.dumps(found) + "\n")
    return bool(found["problems"])


if __name__ == "__main__":
    sys.exit(main())
