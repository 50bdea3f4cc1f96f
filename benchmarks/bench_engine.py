"""Tokens per second of the embedded engine, vLLM on this CPU, transformers' `generate` and llama.cpp, in one run.

    python benchmarks/bench_engine.py [--quick] [--model smollm2] [--prompt 32] [--vllm-python PATH | --no-vllm]
        [--output FILE]

Every engine runs in its own process with the same model, prompts, lengths and sampling (temperature 1, log-prob of
every sampled token); the processes alternate, so that load on the machine affects all of them equally. A peer that is
less than half as fast as the best one is not measured again. The peak of products and the bandwidth (`roofline.py`) are
measured before and after each run of ours; the share of this roofline is that of our fast mode, prompts included.
`prefill` measures the time to the first token of a long prompt, without vLLM; the group case also compares peak memory.
Without `--vllm-python` vLLM is installed into `.bench/vllm` (minutes, 3 GB). Prints medians and ratios with their
thresholds, writes JSON, and exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from models import write_model  # noqa: E402
from results import Row, describe_machine, finish, read_peak_gb  # noqa: E402
from roofline import BandwidthMeter, Bound, Meter, Resources, Speed, compute_bound, read_decoder  # noqa: E402

SIZES = ("3M", "25M")
PROMPTS = (32, 256)
"""Default prompt tokens: of single requests, and those that a group shares."""
VLLM_BLOCK = 128
"""Tokens of a cache block of vLLM on a CPU."""
PREFILLS = (1024, 4096)
"""Prompt tokens of the case `prefill`."""


@dataclass(frozen=True)
class Case:
    """One workload: `groups` prompts of `prompt` tokens, `group` completions of `new` tokens each."""

    name: str
    groups: int
    group: int
    prompt: int
    new: int
    vocab: int

    @property
    def num(self) -> int:
        """Requests at once."""
        return self.groups * self.group

    @property
    def is_prefill(self) -> bool:
        """Whether only the time to the first token is measured."""
        return self.new == 1

    @property
    def tokens(self) -> int:
        """Tokens that are generated, or those of the prompt."""
        return self.num * (self.prompt if self.is_prefill else self.new)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the cache in blocks of `VLLM_BLOCK`, those of a prompt once."""
        shared = self.prompt // VLLM_BLOCK
        own = -(-(self.prompt + self.new) // VLLM_BLOCK) - shared
        return VLLM_BLOCK * (self.groups * shared + self.num * own)

    def prompts(self, seed: int) -> list[list[int]]:
        """Random prompts, new for every repeat, so that no prefix cache is hit."""
        rng = random.Random(f"{self.name} {seed}")
        alone = [[rng.randrange(self.vocab) for _ in range(self.prompt)] for _ in range(self.groups)]
        return [prompt for prompt in alone for _ in range(self.group)]


@dataclass
class Peer:
    """A process that runs `engine_peers.py`."""

    kind: str
    process: subprocess.Popen[str]
    clock: str = "seconds"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    speeds: dict[str, list[Speed]] = field(default_factory=dict)
    peak_gb: dict[str, float] = field(default_factory=dict)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer; `SystemExit` when the process has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.kind} has ended with {self.process.wait()}: see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, case: Case, seed: int) -> None:
        """Run a case once and note its seconds."""
        answer = self.ask({"prompts": case.prompts(seed), "new": case.new, "seed": seed})
        self.seconds.setdefault(case.name, []).append(answer[self.clock])

    def measure_beside(self, meter: Meter, num_bytes: int, case: Case, seed: int) -> None:
        """As `measure`, and note the speed of the machine with reads of `num_bytes`: the mean of before and after."""
        before = meter.measure(num_bytes)
        self.measure(case, seed)
        after = meter.measure(num_bytes)
        speed = Speed((before.flops + after.flops) / 2, (before.bandwidth + after.bandwidth) / 2)
        self.speeds.setdefault(case.name, []).append(speed)

    def find_share(self, case: Case, bound: Bound) -> float:
        """Median share of the roofline over the runs of a case, each by the speed beside it."""
        runs = zip(self.speeds[case.name], self.seconds[case.name], strict=True)
        return statistics.median(bound.seconds(speed) / seconds for speed, seconds in runs)

    def find_speed(self, case: Case) -> Speed:
        """Median speed beside the runs of a case."""
        speeds = self.speeds[case.name]
        return Speed(*(statistics.median(getattr(each, name) for each in speeds) for name in ("flops", "bandwidth")))

    def reset_peak(self) -> None:
        """Start to measure the peak memory of a case."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def read_peak(self, case: Case) -> None:
        """Note the peak memory of the process and of those below it."""
        self.peak_gb[case.name] = sum(map(read_peak_gb, self._pids()))

    def _pids(self) -> list[int]:
        process = psutil.Process(self.process.pid)
        return [each.pid for each in (process, *process.children(recursive=True))]


@contextmanager
def running_peer(
    kind: str, source: Path, dtype: str, token_bytes: int, cases: list[Case], python: str, arguments: argparse.Namespace
) -> Iterator[Peer]:
    """Start an engine and wait until it is ready; it ends with the context.

    vLLM takes all memory of its cache at the start: the gigabytes that the cases need, rounded up.
    """
    cache_bytes = max(case.cached_tokens for case in cases) * token_bytes
    environment = os.environ | {
        "OMP_NUM_THREADS": str(arguments.threads),
        "PYTHONPATH": "" if kind in ("vllm", "llama") else str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_bytes / 2**30)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "BENCH_VLLM_EAGER": "1" if arguments.vllm_eager else "",
        "BENCH_MAX_LEN": str(max(case.prompt + case.new for case in cases) + 1),
    }
    argv = [python, str(ROOT / "benchmarks" / "engine_peers.py"), kind, str(source), dtype, str(arguments.threads)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        peer = Peer(kind, process, "cpu_seconds" if arguments.cpu else "seconds")
        peer.hear()
        yield peer
    finally:
        process.kill()
        process.wait()


def install_peer(name: str, *command: str) -> str:
    """The Python of an environment of its own in which `python COMMAND` has installed a peer, on the first call."""
    home = ROOT / ".bench" / name
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"installing {name} into {home} (minutes)", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([str(python), *command], check=True)
        (home / "installed").touch()
    return str(python)


CASES = ("1", "8", "32", "128", "groups", "prefill")
PEERS = ("transformers-static", "transformers-dynamic", "vllm", "llama")
LLAMA = "llama-cpp-python==0.3.36"
"""Peer only where it is asked for: it is compiled for a quarter of an hour."""


def build_cases(arguments: argparse.Namespace, vocab: int) -> list[Case]:
    """Concurrent requests, or groups that share a long prompt."""
    new = arguments.new or (64 if arguments.quick else 128)
    single, shared = (arguments.prompt or default for default in PROMPTS)
    groups = Case(f"8 groups of 16, prompt {shared}", 8, 16, shared, new, vocab)
    suffix = "" if single == PROMPTS[0] else f", prompt {single}"
    cases = {
        "groups": [groups],
        "prefill": [Case(f"prefill of {prompt:,}", 1, 1, prompt, 1, vocab) for prompt in PREFILLS],
    }
    for name in arguments.cases:
        if name not in cases:
            cases[name] = [Case(f"{name} at once{suffix}", int(name), 1, single, new, vocab)]
    return [case for name in arguments.cases for case in cases[name]]


def read_vocab(model_dir: Path) -> int:
    """Number of tokens of a model."""
    return int(json.loads((model_dir / "config.json").read_text())["vocab_size"])


def measure_offline(
    size: str, dtype: str, arguments: argparse.Namespace, pythons: dict[str, str], work: Path
) -> tuple[list[Row], dict[str, Any]]:
    """All engines on one model, taking turns."""
    model_dir = write_model(size, work / size)
    gguf = work / f"{Path(size).name}-{dtype}.gguf"
    if "llama" in arguments.peers:
        from prime_rl.pretrained.gguf_writer import write_gguf

        write_gguf(model_dir, gguf, {"float32": "f32", "bfloat16": "bf16"}[dtype])
    kinds = ["ours", "ours-exact", "ours-unshared", *(["ours-int8"] if dtype == "bfloat16" else [])]
    kinds += [kind for kind in arguments.peers if kind in pythons or kind.startswith("transformers")]
    cases = build_cases(arguments, read_vocab(model_dir))
    cases_of = {kind: found for kind in kinds if (found := [case for case in cases if takes_part(kind, case)])}
    token_bytes = read_decoder(model_dir, dtype).token_bytes
    resources = Resources(arguments.threads, arguments.cpu)
    bounds = {
        kind: compute_bounds(model_dir, dtype, kind, cases_of[kind])
        for kind in ("ours", "ours-int8")
        if kind in cases_of
    }
    most = max(each.num_bytes for found in bounds.values() for each in found.values())
    bandwidth = BandwidthMeter(most, resources)
    meters = {kind: Meter("int8" if kind == "ours-int8" else dtype, bandwidth, resources) for kind in bounds}
    with ExitStack() as stack:
        peers = [
            stack.enter_context(
                running_peer(
                    kind,
                    gguf if kind == "llama" else model_dir,
                    dtype,
                    token_bytes,
                    own,
                    pythons.get(kind, sys.executable),
                    arguments,
                )
            )
            for kind, own in cases_of.items()
        ]
        for case in cases:
            watched = peers if case.group > 1 and sys.platform == "linux" else []
            for peer in watched:
                peer.reset_peak()
            for repeat in range(-1, arguments.repeats):
                slow = find_slow(case, peers)
                for peer in peers:
                    if peer.kind in slow or case not in cases_of[peer.kind]:
                        continue
                    if peer.kind in bounds:
                        peer.measure_beside(meters[peer.kind], bounds[peer.kind][case.name].num_bytes, case, repeat)
                    else:
                        peer.measure(case, repeat)
                    if repeat < 0:  # the first round warms up
                        peer.seconds[case.name].clear()
                        peer.speeds.pop(case.name, None)
                        continue
                    show(f"{size} {dtype} {case.name}: {peer.kind} {case.tokens / last(peer, case):,.0f} tok/s")
            for peer in watched:
                peer.read_peak(case)
    return judge(size, dtype, cases, peers, bounds), {
        peer.kind: {case.name: rates(peer, case) for case in cases if case.name in peer.seconds} for peer in peers
    }


def compute_bounds(model_dir: Path, dtype: str, kind: str, cases: list[Case]) -> dict[str, Bound]:
    """The operations and bytes of every case."""
    decoder = read_decoder(model_dir, dtype, quantized=kind == "ours-int8")
    return {c.name: compute_bound(decoder, c.groups, c.group, c.prompt, c.new) for c in cases}


def takes_part(kind: str, case: Case) -> bool:
    """Whether a case is run by this engine."""
    if case.is_prefill:
        return kind in ("ours", "ours-exact", "transformers-dynamic")
    return case.group > 1 if kind == "ours-unshared" else case.group == 1 or kind != "llama"


def find_slow(case: Case, peers: list[Peer]) -> set[str]:
    """Peers that cannot become the best one; repeating them would take most of the time."""
    others = {p.kind: statistics.median(p.seconds[case.name]) for p in peers if p.seconds.get(case.name)}
    others = {kind: seconds for kind, seconds in others.items() if not kind.startswith("ours")}
    return {kind for kind, seconds in others.items() if seconds > 2 * min(others.values())}


def last(peer: Peer, case: Case) -> float:
    """Seconds of the latest run; infinite in the warm-up."""
    seconds = peer.seconds[case.name]
    return seconds[-1] if seconds else float("inf")


def rates(peer: Peer, case: Case) -> list[float]:
    """Generated tokens per second of every repeat."""
    return [case.tokens / seconds for seconds in peer.seconds[case.name]]


def find_threshold(size: str, dtype: str, case: Case) -> float:
    """Least ratio to the best peer."""
    is_large = case.num >= 32
    if case.is_prefill:
        return 1.2
    if size in SIZES:
        return 1.5 if is_large else 1.0
    if dtype == "float32":
        return 1.3
    return 1.5 if is_large else 1.2


def judge(
    size: str, dtype: str, cases: list[Case], peers: list[Peer], bounds: dict[str, dict[str, Bound]]
) -> list[Row]:
    """The ratios of this model with their thresholds."""
    rows = []
    of = {peer.kind: peer for peer in peers}
    for case in cases:
        median = {kind: statistics.median(rates(p, case)) for kind, p in of.items() if case.name in p.seconds}
        shares = {
            kind: of[kind].find_share(case, found[case.name]) for kind, found in bounds.items() if case.name in found
        }
        others = {kind: value for kind, value in median.items() if not kind.startswith("ours")}
        name = f"{size} {dtype}, {case.name}"
        ours = median["ours"]
        if others:
            best = max(others, key=lambda kind: others[kind])
            detail = f"{ours:,.0f} tok/s, {best} {others[best]:,.0f}"
            must = find_threshold(size, dtype, case)
            rows.append(Row(f"{name}: best peer", ours / others[best], ">=", must, detail))
        must = None if size in SIZES or case.is_prefill else 0.7 if case.num <= 8 else 0.5
        least = bounds["ours"][case.name].describe(of["ours"].find_speed(case))
        rows.append(Row(f"{name}: share of the roofline", shares["ours"], ">=", must, least))
        exact = median["ours-exact"]
        rows.append(Row(f"{name}: cost of exactness", ours / exact, "<=", 2.0, f"exact {exact:,.0f} tok/s"))
        if "ours-int8" in median:
            int8, must = median["ours-int8"], 1.5 if case.num <= 8 else 1.0
            detail = f"int8 {int8:,.0f} tok/s, {shares['ours-int8']:.0%} of its roofline; bf16 {ours:,.0f}"
            rows.append(Row(f"{name}: int8", int8 / ours, ">=", must, detail))
        if case.group > 1:
            alone = median["ours-unshared"]
            rows.append(Row(f"{name}: sharing", ours / alone, ">=", 2.0, f"unshared {alone:,.0f} tok/s"))
        if "vllm" in of and case.name in of["vllm"].peak_gb:
            mine, theirs = (of[kind].peak_gb[case.name] for kind in SERVERS)
            detail = f"{mine:.2f} GB, vllm {theirs:.2f} GB"
            rows.append(Row(f"{name}: peak memory, share of vLLM's", mine / theirs, "<=", 1.0, detail))
    return rows


SERVERS = ("ours", "vllm")


def server_command(kind: str, model_dir: Path, dtype: str, port: int, python: str, eager: bool) -> list[str]:
    """The real commands: our `inference`, vLLM's server (`vllm serve` does not start in `vllm-cpu`)."""
    if kind == "ours":
        code = "import sys; from prime_rl.inference.server import main; sys.exit(main())"
        options = ["--model.name", str(model_dir), "--model.dtype", dtype, "--server.port", str(port)]
        return [sys.executable, "-c", code, *options, "--no-exact"]
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    argv += ["--port", str(port), "--dtype", dtype]
    argv += ["--max-model-len", "1024", "--max-num-seqs", "256", "--logprobs-mode", "processed_logprobs"]
    return argv + (["--enforce-eager"] if eager else [])


@contextmanager
def running_server(kind: str, argv: list[str], threads: int, port: int, log: Path) -> Iterator[str]:
    """Start a server, wait for its /health, give its address; it ends with the context."""
    import httpx

    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": "" if kind == "vllm" else str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(argv, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                if httpx.get(f"{address}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{kind} does not serve:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


async def load(address: str, model: str, prompts: list[list[int]], lengths: list[int], clients: int) -> float:
    """Seconds until `clients` clients have had all prompts answered by so many tokens, with log-probs and token ids.

    Uses the project's client for both servers: the pool of `httpx` would take more CPU than a server.
    """
    from prime_rl.client.http import HttpPool

    queue = list(zip(range(len(prompts)), prompts, lengths, strict=True))
    pool = HttpPool(address, max_connections=clients, timeout_s=600)
    headers = {"content-type": "application/json"}

    async def work() -> None:
        while queue:
            seed, prompt, new = queue.pop()
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": new,
                "temperature": 1.0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
                "seed": seed,
            }
            reply = await pool.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
            assert reply.status == 200, reply.body
            assert len(json.loads(reply.body)["choices"][0]["token_ids"]) == new

    try:
        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(clients)))
        return time.perf_counter() - start
    finally:
        await pool.close()


def measure_http(
    size: str, dtype: str, arguments: argparse.Namespace, python: str, work: Path
) -> tuple[list[Row], Any]:
    """Both servers with 64 clients, taking turns. Answers of one length start and end together, others do not."""
    from prime_rl.runtime.machine import find_free_port

    model_dir = write_model(size, work / size)
    new = arguments.new or (32 if arguments.quick else 128)
    vocab, prompt = read_vocab(model_dir), arguments.prompt or PROMPTS[0]
    cases = [Case("HTTP, 64 clients", 128, 1, prompt, new, vocab)]
    cases.append(Case(f"HTTP, 64 clients, {new // 2} to {new + new // 2} tokens", 256, 1, prompt, new, vocab))
    rates: dict[str, dict[str, list[float]]] = {case.name: {kind: [] for kind in SERVERS} for case in cases}
    with ExitStack() as stack:
        address = {}
        for kind in SERVERS:
            port = find_free_port()
            argv = server_command(kind, model_dir, dtype, port, python, arguments.vllm_eager)
            log = work / f"{kind}.log"
            address[kind] = stack.enter_context(running_server(kind, argv, arguments.threads, port, log))
        for repeat, case, kind in itertools.product(range(-1, arguments.repeats), cases, SERVERS):
            rng = random.Random(repeat)
            spread = 0 if case is cases[0] else new // 2
            lengths = [new + rng.randint(-spread, spread) for _ in range(case.num)]
            took = asyncio.run(load(address[kind], str(model_dir), case.prompts(repeat), lengths, clients=64))
            if repeat >= 0:
                rates[case.name][kind].append(sum(lengths) / took)
            show(f"{size} {dtype} {case.name}: {kind} {sum(lengths) / took:,.0f} tok/s")
    rows = []
    for name, rate in rates.items():
        ours, theirs = (statistics.median(rate[kind]) for kind in SERVERS)
        detail = f"{ours:,.0f} tok/s, vllm {theirs:,.0f}"
        rows.append(Row(f"{size} {dtype}, {name}: vLLM's server", ours / theirs, ">=", 1.5, detail))
    return rows, rates


def show(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the embedded engine beside vLLM and transformers.")
    parser.add_argument("--quick", action="store_true", help="2 repeats, half the tokens")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--model", help="instead of the sizes: a model directory or known model (smollm2)")
    parser.add_argument("--prompt", type=int, default=None, help="prompt tokens (default: 32, and 256 of groups)")
    parser.add_argument("--new", type=int, default=None, help="new tokens (default: 128, with --quick 64)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="so many requests at once, groups of one prompt"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS[:-1]), help="offline")
    parser.add_argument("--repeats", type=int, default=None, help="default: 5, with --quick 2")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds offline: for a machine that is busy")
    parser.add_argument("--vllm-python", default=None, help="Python of an environment with vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="start vLLM without its compiler (faster to start)")
    parser.add_argument("--no-vllm", action="store_true", help="leave vLLM out")
    parser.add_argument("--no-offline", action="store_true", help="measure the servers only")
    parser.add_argument("--no-http", action="store_true", help="leave the servers out")
    parser.add_argument("--output", type=Path, default=None, help="default: .bench/results/engine.json")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (2 if arguments.quick else 5)
    pythons = {}
    if not arguments.no_vllm:
        installer = str(ROOT / "dev" / "install_vllm.py")
        pythons["vllm"] = arguments.vllm_python or install_peer("vllm", installer, "--cpu")
    if "llama" in arguments.peers:
        pythons["llama"] = install_peer("llama", "-m", "pip", "install", "--quiet", LLAMA)
    machine = describe_machine(arguments.threads)
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench_engine_") as work:
        for size in [arguments.model] if arguments.model else arguments.sizes:
            for dtype in arguments.dtypes:
                if not arguments.no_offline:
                    new, raw[f"{size} {dtype}"] = measure_offline(size, dtype, arguments, pythons, Path(work))
                    rows += new
                if "vllm" in pythons and not arguments.no_http:
                    new, raw[f"{size} {dtype} http"] = measure_http(size, dtype, arguments, pythons["vllm"], Path(work))
                    rows += new
    machine |= {"clock": "CPU seconds" if arguments.cpu else "seconds"}
    return finish("engine", rows, machine, {"tokens_per_second": raw}, arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
