"""The inference server under hostile requests: a client's latency, the server's memory, and every answer.

python benchmarks/bench_hostile.py                    1,000 hostile requests; one line of JSON, exit code 1 on a failure

One client, a process of its own, generates all the time. Hostile and quiet phases of the same length alternate, so that
a busy machine slows both down alike. The hostile requests are of the kinds in `KINDS`, over all routes, to 127.0.0.1.
What must hold: the client's 99th percentile stays below 3 times the quiet one, the server's memory grows by less than
64 MB after the first round, no answer is 5xx but 503, no hostile request changes the server, and in the end no
connection is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import orjson

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from prime_rl.runtime.process import find_free_port, is_healthy  # noqa: E402

T = TypeVar("T")
MAX_SLOWDOWN = 3.0
MAX_GROWTH_MB = 64.0
MAX_MODEL_LEN = 128
MAX_PREFIX_CACHE_TOKENS = 1024
READ_TIMEOUT_S = 4.0
CONCURRENT = 8
SETTLE_S = 1.0
WARM_UP_S = 4.0
PROBE_S = 0.02
"""Pause of the client between two of its requests."""

JSON_TYPE = "content-type: application/json"
GENERATE = ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions/tokens", "/v1/chat/completions/group"]
POSTS = (
    *GENERATE,
    *"/inference/v1/generate /tokenize /detokenize /score /update_weights /v1/load_lora_adapter".split(),
    *"/v1/unload_lora_adapter /init_broadcaster".split(),
)
CONTROL = "/pause /resume /reload_weights /update_weights /v1/load_lora_adapter /init_broadcaster".split()
GETS = "/v1/models /metrics /openapi.json /is_paused".split()
TEXT_FIELDS = ("/v1/completions", "/tokenize")
NUMBERS = ("NaN", "Infinity", "1e400", "-1", "1e308", "99999999999999999999", "true", '"1"', "[]", "{}", "null", "0.5")
SAMPLING = (
    "max_tokens temperature top_p top_k min_p repetition_penalty n seed stop stop_token_ids logit_bias logprobs "
    "min_tokens prompt_logprobs stream stream_options tools messages prompt"
).split()


class Attack:
    """Sends hostile requests and counts what came back."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.draw = random.Random(7)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, number: int) -> None:
        """Hostile request `number`."""
        name = list(KINDS)[number % len(KINDS)]
        try:
            async with asyncio.timeout(60):
                statuses = await KINDS[name](self)
        except (OSError, asyncio.IncompleteReadError):
            statuses = [0]
        except TimeoutError:
            self.wrong.append(f"{name}: not answered or closed within 60 s")
            return
        for status in statuses:
            self.seen[str(status) if status else "closed"] += 1
            if status >= 500 and status != 503:
                self.wrong.append(f"{name}: status {status}")
            if status == 200 and name not in HARMLESS:
                self.wrong.append(f"{name}: was accepted")

    async def send(self, head: list[str], body: bytes = b"", *, announced: int | None = None) -> int:
        """The status of the answer to one request on a connection of its own; 0 when it was closed without one."""
        length = len(body) if announced is None else announced
        names = {line.partition(":")[0].lower() for line in head[1:]}
        lines = [*head, *([] if "host" in names else ["host: 127.0.0.1"]), f"content-length: {length}"]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass") + body)
            return await self.status(reader)
        finally:
            writer.transport.abort()

    async def status(self, reader: asyncio.StreamReader) -> int:
        line = await reader.readline()
        return int(line.split(b" ")[1]) if line.startswith(b"HTTP/") else 0

    async def post(self, path: str, body: bytes | object, *headers: str) -> int:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.send([f"POST {path} HTTP/1.1", *(headers or [JSON_TYPE])], data)

    async def big_text(self) -> list[int]:
        size = self.draw.choice((10_000, 100_000, 900_000))
        text = self.draw.choice(("a", "word ", "ÿ", "<|im_end|>")) * size
        text = text[:size]
        path = self.draw.choice((*TEXT_FIELDS, "/v1/chat/completions"))
        body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        return [await self.post(path, body)]

    async def huge_body(self) -> list[int]:
        return [await self.post(self.draw.choice(POSTS), b'{"prompt": "' + b"a" * self.draw.choice((2, 8)) * 2**20)]

    async def chunked_body(self) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        path = self.draw.choice(POSTS)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(40):
                writer.write(b"10000\r\n" + b"[" * 2**16 + b"\r\n")
                await writer.drain()
            return [await self.status(reader)]
        finally:
            writer.transport.abort()

    async def many_items(self) -> list[int]:
        many = self.draw.choice((20_000, 80_000))
        body, path = self.draw.choice(
            (
                ({"prompt": [[1]] * many, "n": 256}, "/v1/completions"),
                ({"prompt": ["a"] * many}, "/v1/completions"),
                ({"messages": [{"role": "user", "content": ""}] * (many // 2)}, "/v1/chat/completions"),
                ({"prompt": [5], "stop": [""] * many}, "/v1/completions"),
                ({"prompt": [5], "stop_token_ids": [1] * many}, "/v1/completions"),
                ({"prompt": [5], "logit_bias": {str(i): 1 for i in range(many)}}, "/v1/completions"),
                ({"tokens": [1] * many}, "/score"),
                ({"tokens": [1] * many}, "/detokenize"),
                ({"token_ids": [1] * many, "sampling_params": {}}, "/inference/v1/generate"),
                ({"messages": [{"role": "user", "content": "a"}], "seeds": [1] * many}, "/v1/chat/completions/group"),
                ({f"key{i}": i for i in range(many)}, "/v1/completions"),
            )
        )
        return [await self.post(path, body)]

    async def deep_nesting(self) -> list[int]:
        depth = self.draw.choice((200, 900, 1020, 100_000))
        opening, closing = self.draw.choice((("[", "]"), ('{"a":', "}")))
        nested = opening * depth + ("1" if opening != "[" else "") + closing * depth
        field = self.draw.choice(
            (*SAMPLING, "tokens", "model", "weight_dir", "lora_name", "chat_template_kwargs", "host")
        )
        words = '"messages": [{"role": "user", "content": "a"}], "prompt": "a", "unused"'
        return [await self.post(self.draw.choice(POSTS), f'{{{words}: 1, "{field}": {nested}}}'.encode())]

    async def wrong_type(self) -> list[int]:
        field, value = self.draw.choice(SAMPLING), self.draw.choice(NUMBERS)
        return [await self.post(self.draw.choice(POSTS), f'{{"unknown": 1, "{field}": {value}}}'.encode())]

    async def not_json(self) -> list[int]:
        bodies = (b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"a": 1}{"b": 2}', b"[" * 9000, b"nul", b'"x"', b"[]")
        return [await self.post(self.draw.choice(POSTS), self.draw.choice(bodies))]

    async def senseless_chat(self) -> list[int]:
        arguments = '{"a": ' * 2000 + "1" + "}" * 2000
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}, "index": "é" * 9}
        messages = self.draw.choice(
            (
                [{"role": "evil", "content": "x"}],
                [{"role": "user"}],
                [{"role": ["user"], "content": "x"}],
                [{"role": "user", "content": [{"type": "image_url"}]}],
                [{"role": "assistant", "content": None}],
                [{"role": "assistant", "tool_calls": [call] * 3, "content": "x" * 500}],
                [],
                [None],
            )
        )
        more = self.draw.choice(({}, {"chat_template_kwargs": {"chat_template": "{{ 'x' * 10**9 }}"}}))
        return [await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})]

    async def foreign_origin(self) -> list[int]:
        path, origin = (
            self.draw.choice(CONTROL),
            self.draw.choice(("http://evil.example", "null", "http://localhost:1")),
        )
        return [await self.post(path, b"{}", f"origin: {origin}", "content-type: text/plain")]

    async def foreign_host(self) -> list[int]:
        method, path = self.draw.choice((*(("POST", path) for path in CONTROL), *(("GET", path) for path in GETS)))
        host = self.draw.choice(("evil.example", "localhost.evil.example", "[::1", "", "127.0.0.1.evil.example:80"))
        return [await self.send([f"{method} {path} HTTP/1.1", f"host: {host}"])]

    async def wrong_kind(self) -> list[int]:
        kind = self.draw.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"))
        return [await self.post(self.draw.choice(POSTS), b'{"prompt": "a"}', f"content-type: {kind}")]

    async def forbidden_path(self) -> list[int]:
        directory = self.draw.choice(("/etc", "../../..", "~", "\0", "a" * 100_000, "/proc/self"))
        path, body = self.draw.choice(
            (
                ("/update_weights", {"weight_dir": directory}),
                ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": directory}),
                ("/v1/unload_lora_adapter", {"lora_name": directory}),
                ("/init_broadcaster", {"host": directory, "port": 1}),
            )
        )
        return [await self.post(path, body)]

    async def long_head(self) -> list[int]:
        name, value = self.draw.choice((("x", "a"), ("authorization", "Bearer "), ("cookie", "b=1; ")))
        head = [f"GET /v1/nothing{'é' * self.draw.choice((0, 9))} HTTP/1.1", f"{name}: {value * 2**16}"]
        if self.draw.random() < 0.5:
            head += [f"h{i}: 1" for i in range(20_000)]
        return [await self.send(head)]

    async def odd_request(self) -> list[int]:
        line = self.draw.choice(
            (
                "DELETE /v1/models HTTP/1.1",
                "POST /health HTTP/1.1",
                "GET /../../etc/passwd HTTP/1.1",
                "GET /%00%ff HTTP/1.1",
                "BREW / HTTP/1.1",
                "GET / HTTP/9.9",
                "\x16\x03\x01",
                "GET " + "/a" * 30_000 + " HTTP/1.1",
            )
        )
        return [await self.send([line, "upgrade: websocket", "connection: upgrade"])]

    async def half_sent(self) -> list[int]:
        """A head or a body that never ends: the server must answer or close."""
        part = self.draw.choice(
            (
                b"",
                b"POST /v1/comp",
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
                b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n\r\n{"prompt',
                b"\r\n\r\n",
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(part)
            status = await self.status(reader)
            await reader.read()  # until it is closed
            return [status]
        finally:
            writer.transport.abort()

    async def slow_sender(self) -> list[int]:
        """One byte from time to time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = asyncio.create_task(self.status(reader))
        data = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n" + b" " * 90
        try:
            for byte in data if self.draw.random() < 0.5 else data[-90:].join([data[:-90], b""]):
                if answer.done() or writer.is_closing():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.2)
            return [await answer]
        finally:
            writer.transport.abort()

    async def slow_reader(self) -> list[int]:
        """A stream that is never read."""
        body = json.dumps({"prompt": [5, 6], "max_tokens": 100, "stream": True, "logprobs": 20, "ignore_eos": True})
        return await self.leave(body, self.draw.choice((0.5, 2.0)))

    async def hang_up(self) -> list[int]:
        """A request whose client leaves in its middle."""
        stream = self.draw.random() < 0.5
        body = json.dumps({"prompt": [5, 6], "max_tokens": 100, "stream": stream, "ignore_eos": True})
        return await self.leave(body, self.draw.choice((0.0, 0.001, 0.02)))

    async def leave(self, body: str, seconds: float) -> list[int]:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body[: len(body) if self.draw.random() < 0.7 else 20]).encode())
        await asyncio.sleep(seconds)
        writer.transport.abort()
        return [0]


KINDS: dict[str, Callable[[Attack], Awaitable[list[int]]]] = {
    name: getattr(Attack, name)
    for name in (
        "big_text huge_body chunked_body many_items deep_nesting wrong_type not_json senseless_chat foreign_origin "
        "foreign_host wrong_kind forbidden_path long_head odd_request half_sent slow_sender slow_reader hang_up"
    ).split()
}
HARMLESS = ("deep_nesting", "senseless_chat", "hang_up", "slow_reader", "odd_request", "long_head")
"""Kinds of which some are good requests: what is deep may lie in a field that is ignored."""


async def generate(port: int) -> None:
    """A client that generates all the time; writes a line `start latency good` for each answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": "abc"}]
    for number in itertools.count():
        body = json.dumps({"messages": messages, "max_tokens": 16, "ignore_eos": True, "seed": number}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{JSON_TYPE}\r\ncontent-length: {len(body)}"
        start = time.monotonic()
        writer.write(head.encode() + b"\r\n\r\n" + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        text = await reader.readexactly(length)
        latency = time.monotonic() - start
        good = answer.startswith(b"HTTP/1.1 200 ") and json.loads(text)["usage"]["completion_tokens"] == 16
        sys.stdout.write(f"{start} {latency} {int(good)}\n")
        await asyncio.sleep(PROBE_S)


async def attack_phase(attack: Attack, numbers: range) -> None:
    """These hostile requests, `CONCURRENT` at a time."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(number: int) -> None:
        async with gate:
            await attack.run(number)

    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(one(number))


Phase = tuple[str, float, float]


async def alternate(attack: Attack, pid: int, requests: int, rounds: int) -> tuple[list[Phase], list[float]]:
    """Hostile phases, each after a quiet one of the same length; the server's memory after each round."""
    phases: list[Phase] = []
    memory: list[float] = []
    for i in range(rounds):
        start = time.monotonic()
        await attack_phase(attack, range(i * requests // rounds, (i + 1) * requests // rounds))
        end = time.monotonic()
        memory.append(read_rss_mb(pid))
        await asyncio.sleep(SETTLE_S)
        quiet = time.monotonic()
        await asyncio.sleep(end - start)
        phases += [("hostile", start, end), ("quiet", quiet, time.monotonic())]
    return phases, memory


def read_rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_sockets(pid: int) -> int:
    """Sockets that the server holds, its listener included."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(link).startswith("socket:")
    return found


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def read_counters(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0].removeprefix("prime_rl_"): float(line.split()[1]) for line in lines if line[:1] != "#"}


def run_client(port: int, attack: Callable[[], Awaitable[T]]) -> tuple[T, list[tuple[float, float, bool]]]:
    """What `attack` returns, and `(start, latency, good)` of the answers that a client in another process got."""
    argv = [sys.executable, __file__, "--client", str(port)]
    with tempfile.TemporaryFile("w+") as lines:
        client = subprocess.Popen(argv, stdout=lines)
        try:
            time.sleep(WARM_UP_S)
            os.nice(10)  # what the attacker computes is not to slow the server down, only what it sends
            found = asyncio.run(attack())  # type: ignore[arg-type]
        finally:
            client.terminate()
            client.wait(10)
        lines.seek(0)
        rows = [line.split() for line in lines.read().splitlines()]
    return found, [(float(row[0]), float(row[1]), row[2] == "1") for row in rows if len(row) == 3]


def measure(requests: int, rounds: int) -> dict[str, object]:
    """The whole measurement; `problems` are the limits that were exceeded."""
    port = find_free_port()
    model = ["--model.name", "tiny-qwen3", "--model.debug.random_init", "true"]
    limits = ["--model.max_model_len", str(MAX_MODEL_LEN), "--server.read_timeout", str(READ_TIMEOUT_S)]
    limits += [
        "--cache.max_prefix_cache_tokens",
        str(MAX_PREFIX_CACHE_TOKENS),
    ]  # else the client's own answers fill the cache
    argv = [sys.executable, "-m", "prime_rl.inference.server", *model, *limits, "--server.port", str(port)]
    server = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.DEVNULL)
    attack, begin = Attack(port), time.monotonic()
    try:
        while not is_healthy(None, port):
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        sockets = count_sockets(server.pid)
        (phases, memory), answers = run_client(port, lambda: alternate(attack, server.pid, requests, rounds))
        deadline = time.monotonic() + 4 * READ_TIMEOUT_S
        while (left := count_sockets(server.pid) - sockets) > 0 and time.monotonic() < deadline:
            time.sleep(0.2)
        counters = read_counters(port)
    finally:
        server.terminate()
        server.wait(60)
    times = {
        kind: [latency for at, latency, _ in answers for name, a, b in phases if name == kind and a <= at < b]
        for kind in ("quiet", "hostile")
    }
    quiet, hostile = percentile(times["quiet"], 0.99), percentile(times["hostile"], 0.99)
    growth = max(memory) - memory[0]
    failed = sum(not good for _, _, good in answers)
    checks = {
        f"p99 {hostile * 1e3:.1f} ms is not below {MAX_SLOWDOWN:g} x {quiet * 1e3:.1f} ms": hostile
        >= MAX_SLOWDOWN * quiet,
        f"memory grew by {growth:.0f} MB, more than {MAX_GROWTH_MB:.0f}": growth > MAX_GROWTH_MB,
        f"{failed} answers to the client were wrong": failed > 0,
        f"{left} connections were not closed": left > 0,
        "requests are still held": counters["requests_running"] + counters["requests_waiting"] > 0,
        "the server was changed": counters["paused"] + counters["weight_updates_total"] > 0,
    }
    problems = [*attack.wrong, *(words for words, fails in checks.items() if fails)]
    return {
        "hostile_requests": requests,
        "kinds": len(KINDS),
        "seconds": round(time.monotonic() - begin, 1),
        "answers": dict(sorted(attack.seen.items())),
        "client_answers": {kind: len(found) for kind, found in times.items()},
        **{
            f"{kind}_ms": {f"p{p}": round(percentile(found, p / 100) * 1e3, 1) for p in (50, 99)}
            for kind, found in times.items()
        },
        "slowdown_p99": round(hostile / quiet, 2),
        "max_slowdown_p99": MAX_SLOWDOWN,
        "rss_mb": [round(mb) for mb in memory],
        "rss_growth_mb": round(growth, 1),
        "max_rss_growth_mb": MAX_GROWTH_MB,
        "connections_left": left,
        "problems": problems[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        asyncio.run(generate(given.client))
    found = measure(given.requests, given.rounds)
    sys.stdout.write(json.dumps(found) + "\n")
    return bool(found["problems"])


if __name__ == "__main__":
    sys.exit(main())
