"""Orchestrator overhead: CPU ms per single-turn rollout with a short completion, by component.

    python benchmarks/bench_orchestrator.py [--rollouts 512] [--rounds 5] [--in-flight 10000] [--output-dir DIR]

A fake server answers at once what our server would. In every round each part is measured in turn, and together with
`verifiers`' own `generate` with the `openai` client, so that the ratios hold on a busy machine; the table shows
medians. Then `--in-flight` rollouts run at the same time, on one core, and none may be lost; 4,096 start and end while
the lag of the event loop is measured; and batches with the lengths of GSM8K and AQuA-RAT are packed. Prints every
number beside its threshold, writes `.bench/results/orchestrator.json`, exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from results import Row, describe_machine, finish  # noqa: E402

from prime_rl.configuration.sections import EnvConfig, SamplingConfig  # noqa: E402
from prime_rl.envs.worker_pool import EnvironmentWorkers  # noqa: E402
from prime_rl.orchestrator.advantages import build_advantages  # noqa: E402
from prime_rl.orchestrator.buffer import PromptBuffer  # noqa: E402
from prime_rl.orchestrator.config import OrchestratorConfig  # noqa: E402
from prime_rl.orchestrator.policy_version import PolicyVersion  # noqa: E402
from prime_rl.orchestrator.rollout_manager import GroupGenerator, build_rollouts  # noqa: E402
from prime_rl.orchestrator.server_pool import ServerPool  # noqa: E402
from prime_rl.transport.batches import FilesystemBatchSender  # noqa: E402
from prime_rl.utils.client import InferenceClient  # noqa: E402
from prime_rl.utils.vf import build_sampling_args, open_environments  # noqa: E402
from rollouts.training.agent_integration import Rollout, rollout_to_samples  # noqa: E402
from rollouts.training.batching import pack_share  # noqa: E402
from rollouts.training.environments import VerifiersEnvironment, load_environment  # noqa: E402
from rollouts.training.types import Sample  # noqa: E402
from rollouts.training.weight_sync import PrimeEngine  # noqa: E402

ENV = {"num_train_examples": 64, "num_eval_examples": 8}
GROUP = 8
CONCURRENT_GROUPS = 8
TOKENS = 45
SAMPLING = SamplingConfig(max_tokens=64)
STEADY, STEADY_LATENCY_S = 4096, 12.0
PROBE_S = 0.005
LENGTHS = {
    "GSM8K": (34, 71, 81, 89, 96, 102, 109, 114, 121, 128, 134, 142, 149, 158, 167, 177, 189, 204, 224, 254, 469),
    "AQuA-RAT": (17, 50, 63, 71, 78, 83, 89, 94, 99, 103, 109, 115, 121, 126, 134, 143, 153, 163, 181, 207, 362),
}
"""Twentieths of the lengths of problems with their solutions, in tokens of 3.6 letters."""


@contextmanager
def fake_server(latency_s: float = 0.0, hold: int = 0) -> Iterator[str]:
    """Address of a fake server in a process of its own."""
    argv = [sys.executable, str(ROOT / "benchmarks" / "fake_server.py"), "--latency-s", str(latency_s)]
    argv += ["--hold", str(hold)]
    server = subprocess.Popen([*argv, "--tokens", str(TOKENS)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


class Bench:
    """The measured calls; each runs `num` rollouts and gives the CPU ms of this process for one."""

    def __init__(self, url: str, num: int, pool: EnvironmentWorkers, out: Path) -> None:
        self.url, self.num, self.pool, self.out = url, num, pool, out
        self.environment = load_environment("reverse-text", ENV)
        assert isinstance(self.environment, VerifiersEnvironment)
        self.rows = self.environment.rows()
        self.theirs: Any = load_environment("reverse-text", ENV).env  # type: ignore[attr-defined]
        self.rollouts: list[Rollout] = []

    def cpu_ms(self, work: Callable[[], Awaitable[Any]]) -> float:
        """CPU time of `work` per rollout."""
        gc.collect()
        started = time.process_time()
        asyncio.run(work())  # type: ignore[arg-type]
        return 1e3 * (time.process_time() - started) / self.num

    async def ask(self) -> None:
        """The client alone."""
        client, places = InferenceClient(self.url), asyncio.Semaphore(GROUP * CONCURRENT_GROUPS)

        async def one(i: int) -> None:
            async with places:
                args = build_sampling_args(SAMPLING, i)
                args["max_completion_tokens"] = args.pop("max_tokens")
                messages = self.rows[i % len(self.rows)]["prompt"]
                await client.open_conversation().chat.completions.create(model="m", messages=messages, **args)

        await asyncio.gather(*map(one, range(self.num)))
        await client.close()

    async def run_groups(self, environment: Any) -> None:
        """Groups of an environment: client, the library's bookkeeping, scoring."""
        client, places = InferenceClient(self.url), asyncio.Semaphore(CONCURRENT_GROUPS)

        async def one(i: int) -> list[Rollout]:
            async with places:
                args = [build_sampling_args(SAMPLING, i * GROUP + k) for k in range(GROUP)]
                found: list[Rollout] = await environment.run_group(self.rows[i % len(self.rows)], client, "m", args, 2)
                return found

        groups = await asyncio.gather(*map(one, range(self.num // GROUP)))
        self.rollouts = [rollout for group in groups for rollout in group]
        assert len(self.rollouts) == self.num and not any(rollout.failed for rollout in self.rollouts)
        await client.close()

    async def run_groups_unscored(self) -> None:
        """The same without scoring."""
        rubric = self.environment.env.rubric  # type: ignore[attr-defined]
        kept, rubric.score_group = rubric.score_group, _score_nothing
        try:
            await self.run_groups(self.environment)
        finally:
            rubric.score_group = kept

    async def make_samples(self) -> list[Sample]:
        """Tokens to samples."""
        samples = []
        for i, rollout in enumerate(self.rollouts):
            for sample in rollout_to_samples(rollout, group_index=i // GROUP, index=i % GROUP):
                sample.validate()
                samples.append(sample)
        return samples

    async def write_batch(self, samples: list[Sample]) -> None:
        """Advantages, and one published batch."""
        build_advantages(OrchestratorConfig())(samples)
        FilesystemBatchSender(self.out / f"rollouts-{time.monotonic_ns()}").send(1, samples)

    async def orchestrate(self, environment: Any) -> None:
        """Everything at once, by the orchestrator's own parts: slots, groups, samples, advantages, batches."""
        config = OrchestratorConfig.model_validate(
            {"batch_size": self.num // 4, "rollouts_per_example": GROUP, "max_steps": 4, "sampling": SAMPLING}
            | {"max_concurrent": GROUP * CONCURRENT_GROUPS, "max_async_level": 1}
        )
        client = InferenceClient(self.url)
        version, environments = PolicyVersion(), {"reverse-text": environment}
        servers = ServerPool([client], [PrimeEngine(self.url)], version, self.out / "weights")
        generator = GroupGenerator(config, environments, servers)
        rollouts = build_rollouts(config, PromptBuffer(environments, config.buffer, 0, version), generator)
        assign_advantages = build_advantages(config)
        sender = FilesystemBatchSender(self.out / f"all-{time.monotonic_ns()}")
        async with rollouts:
            for step in range(1, 5):
                samples = (await rollouts.generate_batch()).samples
                assert len(samples) == config.batch_size
                assign_advantages(samples)
                sender.send(step, samples)
                rollouts.release(step)
        await client.close()

    async def library(self) -> None:
        """`verifiers` by itself, with the client it is made for."""
        import openai

        rows = [dict(self.rows[i % len(self.rows)]) for i in range(self.num // GROUP) for _ in range(GROUP)]
        async with openai.AsyncOpenAI(base_url=self.url, api_key="none") as client:
            args = build_sampling_args(SAMPLING, 1)
            limits = {"max_concurrent": GROUP * CONCURRENT_GROUPS}
            await self.theirs.generate(rows, client, "m", args, **limits)

    def measure(self) -> dict[str, float]:
        """One round."""
        found = {"client": self.cpu_ms(self.ask)}
        found["unscored"] = self.cpu_ms(self.run_groups_unscored)
        found["scored"] = self.cpu_ms(lambda: self.run_groups(self.environment))
        samples: list[Sample] = []

        async def make() -> None:
            samples.extend(await self.make_samples())

        found["samples"] = self.cpu_ms(make)
        found["batch"] = self.cpu_ms(lambda: self.write_batch(samples))
        found["all"] = self.cpu_ms(lambda: self.orchestrate(self.environment))
        before = worker_cpu_s(self.pool)
        found["all with workers"] = self.cpu_ms(lambda: self.orchestrate(self.pool))
        found["in the worker"] = 1e3 * (worker_cpu_s(self.pool) - before) / self.num
        found["library"] = self.cpu_ms(self.library)
        return found


async def _score_nothing(states: list[Any], **_: Any) -> None:
    for state in states:
        state["reward"], state["metrics"] = 0.0, {}


def worker_cpu_s(pool: EnvironmentWorkers) -> float:
    """CPU seconds that the worker processes have taken so far."""
    total = 0.0
    for pid in pool.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure_parts(num: int, rounds: int, out: Path) -> list[Row]:
    """Medians over the rounds; the first round warms up."""
    config = EnvConfig(id="reverse-text", args=ENV, num_workers=1)
    with fake_server(0.005) as url, open_environments([config]) as environments:
        pool = environments["reverse-text"]
        assert isinstance(pool, EnvironmentWorkers)
        bench = Bench(url, num, pool, out)
        found = [bench.measure() for _ in range(rounds + 1)][1:]
    ms = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return [
        Row("client and orchestrator, environment in process: CPU ms per rollout", ms["all"], "<=", 1.0),
        Row("  client", ms["client"]),
        Row("  environment", statistics.median(one["unscored"] - one["client"] for one in found)),
        Row("  scoring", statistics.median(one["scored"] - one["unscored"] for one in found)),
        Row("  tokens to samples", ms["samples"]),
        Row("  advantages and batch writing", ms["batch"]),
        Row(
            "  slots, groups, the rest",
            statistics.median(one["all"] - one["scored"] - one["samples"] - one["batch"] for one in found),
        ),
        Row("orchestrator with an environment worker: CPU ms per rollout", ms["all with workers"], "<=", 0.5),
        Row("  and in the worker (client, environment, scoring)", ms["in the worker"], "<=", 1.0),
        Row("verifiers.generate with the openai client: CPU ms per rollout", ms["library"]),
        Row("  times ours", statistics.median(one["library"] / one["all"] for one in found), ">=", 2.0),
    ]


def measure_in_flight(num: int, in_worker: bool) -> list[Row]:
    """`num` rollouts at the same time, on one core: the server answers once all requests have arrived."""
    where = "in a worker" if in_worker else "in process"
    config = EnvConfig(id="reverse-text", args=ENV, num_workers=int(in_worker))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(num + 512, hard) if soft < num + 512 else soft, hard))
    cores = os.sched_getaffinity(0)
    with fake_server(hold=num) as url:
        os.sched_setaffinity(0, {min(cores)})
        try:
            with open_environments([config]) as environments:
                environment = environments["reverse-text"]
                rows = environment.rows()
                started, cpu = time.monotonic(), time.process_time()
                rollouts, most_open = asyncio.run(_all_at_once(environment, rows, url, num))
                seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        finally:
            os.sched_setaffinity(0, cores)
    seeds = {(rollout.example_id, id(rollout)) for rollout in rollouts}
    bad = sum(rollout.failed or len(rollout.turns) != 1 for rollout in rollouts)
    return [
        Row(f"{num} at once, {where}: requests that the server held at the same time", most_open, "==", num),
        Row(f"{num} at once, {where}: lost", num - len(seeds) + bad, "==", 0),
        Row(f"{num} at once, {where}: seconds until the last answer", seconds),
        Row(f"{num} at once, {where}: CPU ms per rollout in this process", 1e3 * cpu / num, "<=", 2.0),
        Row(f"{num} at once, {where}: MiB of this process at most", _peak_mib(), "<=", 2048),
    ]


async def _all_at_once(environment: Any, rows: list[Any], url: str, num: int) -> tuple[list[Rollout], int]:
    client = InferenceClient(url, max_connections=num)

    async def one(i: int) -> list[Rollout]:
        args = [build_sampling_args(SAMPLING, i * GROUP + k) for k in range(GROUP)]
        found: list[Rollout] = await environment.run_group(rows[i % len(rows)], client, "m", args, 0)
        return found

    groups = await asyncio.gather(*map(one, range(num // GROUP)))
    most_open = int(await client.copy(base_url=client.root_url).request("GET", "/most_open"))
    await client.close()
    return [rollout for group in groups for rollout in group], most_open


def measure_lag(num: int, in_worker: bool) -> list[Row]:
    """Event loop lag with `num` rollouts in flight while groups start and end.

    In process, the environment's own code causes the lag; with a worker it does not block the orchestrator.
    """
    where = "in a worker" if in_worker else "in process"
    config = EnvConfig(id="reverse-text", args=ENV, num_workers=int(in_worker))
    with fake_server(STEADY_LATENCY_S) as url, open_environments([config]) as environments:
        environment = environments["reverse-text"]
        late, done = asyncio.run(_come_and_go(environment, environment.rows(), url, num))
    late.sort()
    return [
        Row(
            f"{num} in flight, {where}: event loop late, p99",
            1e3 * late[int(0.99 * len(late))],
            *(("<=", 10.0) if in_worker else ()),
            detail=f"ms, median {1e3 * late[len(late) // 2]:.2f}; {done / (2 * STEADY_LATENCY_S):.0f} rollouts/s",
        ),
    ]


async def _come_and_go(environment: Any, rows: list[Any], url: str, num: int) -> tuple[list[float], int]:
    """Seconds by which the loop is late, and rollouts done, in two latencies after all places are taken."""
    client = InferenceClient(url, max_connections=num)
    begun = time.monotonic()
    steady, end = begun + STEADY_LATENCY_S, begun + 3 * STEADY_LATENCY_S
    late: list[float] = []
    done = 0

    async def place(i: int) -> None:
        nonlocal done
        await asyncio.sleep(STEADY_LATENCY_S * i * GROUP / num)  # they begin one after another
        while time.monotonic() < end:
            args = [build_sampling_args(SAMPLING, i * GROUP + k) for k in range(GROUP)]
            await environment.run_group(rows[i % len(rows)], client, "m", args, 0)
            done += GROUP if steady <= time.monotonic() < end else 0

    async def probe() -> None:
        while time.monotonic() < end:
            start = time.monotonic()
            await asyncio.sleep(PROBE_S)
            if start >= steady:
                late.append(time.monotonic() - start - PROBE_S)

    await asyncio.gather(probe(), *map(place, range(num // GROUP)))
    await client.close()
    return late, done


def measure_packing() -> list[Row]:
    """Real tokens among those that are computed, 512 samples of a mix of lengths on 8 ranks; packs are not padded."""
    found = []
    for mix, twentieths in LENGTHS.items():
        rng = random.Random(0)
        picked = rng.choices(range(20), k=512)
        drawn = [round(twentieths[i] + rng.random() * (twentieths[i + 1] - twentieths[i])) for i in picked]
        samples = [Sample(prompt="", tokens=[1] * n, loss_mask=[1.0] * n) for n in drawn]
        share = pack_share(samples, seq_len=2048, num_ranks=8)
        found += [
            Row(f"packing, lengths of {mix}: real tokens of all computed", 1 - share.padding_ratio, ">=", 0.98),
            Row(f"packing, lengths of {mix}: work of the busiest of 8 ranks beyond the mean", share.imbalance),
        ]
    return found


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure what a rollout costs client and orchestrator.")
    parser.add_argument("--rollouts", type=int, default=512, help="rollouts per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=10_000, help="rollouts at the same time; 0 leaves it out")
    parser.add_argument("--output-dir", type=Path, default=None, help="default: a new temporary directory")
    arguments = parser.parse_args()
    out = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="bench_orchestrator_"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Progress bars would overwrite the table and count as our CPU time.
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    machine = describe_machine()
    rows = measure_parts(arguments.rollouts, arguments.rounds, out)
    if in_flight := arguments.in_flight // GROUP * GROUP:
        rows += measure_in_flight(in_flight, False) + measure_in_flight(in_flight, True)
    rows += measure_lag(STEADY, False) + measure_lag(STEADY, True) + measure_packing()
    return finish("orchestrator", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
