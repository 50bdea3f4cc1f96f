"""Chaos tests: random faults of processes, sockets, disk and files in a small `rl` run, with invariants.

seed --> faults and moments --> rl ... (fails) --> rl ... --resume --> equal to the undisturbed run, bit for bit

Run it with `make chaos`, or `python tests/integration/chaos.py --seeds 0-19`. Each trial is a function of its seed as
far as the machine is: which faults, which victims, which moments, and whether weights go over files or gloo. At level 0
every file of the last version and the last commit must have the bytes of the undisturbed run's; at level 2 the
invariants of `check_asynchronous` must hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
# A trainer without inference beside it would use more threads, and round differently from the undisturbed run.
os.environ["OMP_NUM_THREADS"] = "1"
from cli_runner import ROOT, Command, Runner, read_command_line, runner, until

from prime_rl.runtime.machine import find_free_port
from prime_rl.transport.weights import check_directory
from rollouts.training.metrics import load_jsonl, load_last_attempts
from rollouts.training.steps import complete_steps, find_damage, step_path

CONFIG = ROOT / "tests" / "integration" / "chaos.toml"
NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 6, 16, 4
PARTS = ("trainer", "orchestrator")
MAX_ATTEMPTS = 5
DISK_MB = 160
GENTLE = ("kill inference", "stop", "cut", "kill worker")
"""What a run must survive without being started again."""
NOTHING_TO_RESUME = "no complete checkpoint to resume from"
FATAL = ("kill trainer", "kill orchestrator", "kill launcher", "full disk", "truncate")
"""What ends a run, which must then go on with --resume."""


@dataclass(frozen=True)
class Fault:
    """A fault and its time: seconds after the start, or after version `version` was published."""

    kind: str
    version: int
    delay_s: float


@dataclass
class Trial:
    """One disturbed run."""

    seed: int
    out: Path
    level: int
    faults: list[Fault]
    draw: random.Random
    way: str = "filesystem"
    """Transport of weights, which must not affect the result."""
    hits: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    begin_again: bool = False
    """Crashed between the first version and the first checkpoint: nothing to resume from."""
    ballast: Path | None = None
    settings: tuple[object, ...] = ()
    """Further options of the command."""


def draw_trial(seed: int, out: Path) -> Trial:
    """Faults rotate over all kinds; times and victims are random."""
    draw = random.Random(seed)

    def moment(kind: str) -> tuple[int, float]:
        if draw.random() < 0.2 and kind != "truncate":  # which needs a file
            return 0, draw.uniform(0, 8)  # while everything is starting
        return draw.randint(1, NUM_STEPS - 1), draw.uniform(0, 0.8)

    kinds = [GENTLE[seed % len(GENTLE)], FATAL[seed % len(FATAL)]]
    faults = sorted((Fault(kind, *moment(kind)) for kind in kinds), key=lambda fault: (fault.version, fault.delay_s))
    return Trial(seed, out, 2 if seed % 3 == 2 else 0, faults, draw, "gloo" if seed % 7 > 3 else "filesystem")


class Proxy:
    """Proxy between clients and a server; `cut` closes all connections and blocks new ones for a while."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = set[socket.socket]()
        self._closed_until = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Now, and for `seconds`."""
        self._closed_until = time.monotonic() + seconds
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For good."""
        self._listener.close()
        self.cut(1e9)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if time.monotonic() < self._closed_until:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                for one, other in ((near, far), (far, near)):
                    self._open.add(one)
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def options(trial: Trial, port: int) -> list[object]:
    """Command line of an attempt."""
    found: list[object] = ["@", CONFIG, "--output_dir", trial.out, "--max_async_level", trial.level]
    found += ["--weight-broadcast.type", trial.way, *trial.settings]
    if trial.attempts:
        found.append("--clean" if trial.begin_again else "--resume")
    return [*found, "--inference.server.port", port]


@contextlib.contextmanager
def serving(run: Runner, trial: Trial, port: int) -> Iterator[tuple[Proxy | None, list[object]]]:
    """For trials that cut connections: a separate server behind a proxy, and options with its address."""
    if all(fault.kind != "cut" for fault in trial.faults):
        yield None, []
        return
    base = ["--model.name", "tiny-qwen3", "--model.debug.random_init", "true", "--output_dir", trial.out]
    base += ["--weight-broadcast.type", trial.way]
    server = run.start("inference", *base, "--model.max_model_len", 64, "--server.port", port)
    proxy = Proxy(port)
    try:
        yield proxy, ["--no-inference", "--orchestrator.client.base_url", f"http://127.0.0.1:{proxy.port}/v1"]
    finally:
        proxy.close()
        server.process.terminate()
        server.wait()


def run_trial(trial: Trial, run: Runner) -> None:
    """Inject faults until the run has completed; raises `AssertionError` with violated invariants."""
    port = find_free_port()
    with serving(run, trial, port) as (proxy, more):
        while True:
            given = options(trial, port)
            if proxy is not None:
                given = [*given[:-2], *more]
            command = run.start("rl", *given)
            trial.attempts += 1
            disturb(trial, command, proxy)
            code = command.wait()
            until(lambda command=command: not command.pids(), "the end of every process of the run", deadline_s=20)
            free_disk(trial)
            if code == 0:
                break
            trial.begin_again = code == 2 and not has_sound_commit(trial.out) and NOTHING_TO_RESUME in command.err
            if trial.begin_again:
                continue
            why = f"attempt {trial.attempts} of seed {trial.seed} ended with {code}"
            assert trial.attempts < MAX_ATTEMPTS, f"{why} once too often:\n{command.out[-3000:]}\n{command.err[-3000:]}"
            assert code != 2, f"{why}, which is for wrong input:\n{command.err[-3000:]}"
            assert trial.hits, f"{why} without any fault:\n{command.out[-3000:]}\n{command.err[-3000:]}"


def has_sound_commit(out: Path) -> bool:
    """Whether a checkpoint is complete and undamaged."""
    paths = [step_path(out / "checkpoints", step) for step in complete_steps(out / "checkpoints", PARTS)]
    return any(all(find_damage(path / part) is None for part in PARTS) for path in paths)


def disturb(trial: Trial, command: Command, proxy: Proxy | None) -> None:
    """Inject the remaining faults while the run lasts; returns after a fatal one."""
    started = time.monotonic()
    while trial.faults:
        fault = trial.faults[0]
        weights = trial.out / "weights"
        until(lambda: ended(command) or (fault.version in (0, *complete_steps(weights))), f"version {fault.version}")  # noqa: B023
        due = fault.delay_s + (started if not fault.version else time.monotonic())
        while time.monotonic() < due and not ended(command):
            time.sleep(0.02)
        if ended(command):
            return
        while not strike(trial, fault.kind, command, proxy):  # its victim is still starting
            if ended(command):
                return
            time.sleep(0.05)
        trial.faults.pop(0)
        trial.hits[fault.kind] += 1
        if fault.kind in FATAL:
            return


def ended(command: Command) -> bool:
    return command.process.poll() is not None


def strike(trial: Trial, kind: str, command: Command, proxy: Proxy | None) -> bool:
    """Inject a fault; False if its victim does not exist."""
    draw, (verb, _, victim) = trial.draw, kind.partition(" ")
    if kind == "cut":
        assert proxy is not None
        proxy.cut(draw.uniform(0, 2))
        return True
    if kind == "full disk":
        return fill_disk(trial)
    if kind == "truncate":
        command.process.kill()
        command.wait()
        until(lambda: not command.pids(), "the end of every process of the run", deadline_s=20)
        truncate(trial)
        return True
    if kind == "kill launcher":
        command.process.kill()
        return True
    pids = find_victims(
        command, victim if verb == "kill" else draw.choice(["trainer", "orchestrator", "inference", "worker"])
    )
    for pid in pids[:1]:
        with contextlib.suppress(ProcessLookupError):
            if verb == "kill":
                os.kill(pid, signal.SIGKILL)
                return True
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.2, 3))
            os.kill(pid, signal.SIGCONT)
            return True
    return False


def find_victims(command: Command, name: str) -> list[int]:
    """Processes of a run by their module."""
    module = {
        "trainer": "prime_rl.trainer.rl.train",
        "orchestrator": "prime_rl.orchestrator.orchestrator",
        "inference": "prime_rl.inference.server",
        "worker": "prime_rl.envs.worker",
    }[name]
    return [pid for pid in command.pids() if module in read_command_line(pid)]


def fill_disk(trial: Trial) -> bool:
    """Fill the trial's own disk, so that no checkpoint fits."""
    if not os.path.ismount(trial.out.parent):
        return False
    disk = os.statvfs(trial.out.parent)
    trial.ballast = trial.out.parent / "ballast"
    room = disk.f_bavail * disk.f_frsize - trial.draw.randrange(3_000_000)
    with trial.ballast.open("wb") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(room, 1))
    return True


def free_disk(trial: Trial) -> None:
    if trial.ballast is not None:
        trial.ballast.unlink(missing_ok=True)
        trial.ballast = None


def truncate(trial: Trial) -> None:
    """Truncate a file of the newest checkpoint, version or batch, or a log, at a random position."""
    draw, found = trial.draw, list[Path]()
    for name in ("checkpoints", "weights", "broadcasts", "rollouts"):
        steps = complete_steps(trial.out / name, PARTS if name == "checkpoints" else ())
        if steps:
            found += [path for path in step_path(trial.out / name, steps[-1]).rglob("*") if path.is_file()]
    found += [path for path in (trial.out / "metrics.jsonl", trial.out / "samples.jsonl") if path.exists()]
    found = sorted(path for path in found if path.stat().st_size)
    path = draw.choice(found)
    os.truncate(path, draw.randrange(path.stat().st_size))


def check(trial: Trial, reference: Path) -> None:
    """Invariants at the end of every run."""
    out = trial.out
    assert complete_steps(out / "weights")[-1] == NUM_STEPS
    assert complete_steps(out / "checkpoints", PARTS)[-1] == NUM_STEPS
    for part in PARTS:
        assert find_damage(step_path(out / "checkpoints", NUM_STEPS) / part) is None
    assert check_directory(step_path(out / "weights", NUM_STEPS))[0] == NUM_STEPS
    left = [
        path for name in ("weights", "broadcasts", "rollouts", "checkpoints") for path in (out / name).glob(".tmp*")
    ]
    assert not left, f"garbage is left: {left}"
    if trial.level == 0:
        check_exact(out, reference)
    check_asynchronous(out, trial.level)


def check_exact(out: Path, reference: Path) -> None:
    """The last version and the last commit, with optimizer, random states and data position, byte for byte."""
    for part in (f"weights/step_{NUM_STEPS}", *(f"checkpoints/step_{NUM_STEPS}/{name}" for name in PARTS)):
        ours, theirs = (sorted((root / part).iterdir()) for root in (out, reference))
        assert [path.name for path in ours] == [path.name for path in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.read_bytes() == other.read_bytes(), f"{part}/{one.name} differs from the undisturbed run's"


def check_asynchronous(out: Path, level: int) -> None:
    """No rollout lost or trained twice, no version skipped, nothing staler than the budget."""
    orchestrator = json.loads((step_path(out / "checkpoints", NUM_STEPS) / "orchestrator" / "state.json").read_bytes())
    trainer = json.loads((step_path(out / "checkpoints", NUM_STEPS) / "trainer" / "state.json").read_bytes())
    assert orchestrator["totals"]["samples"] == NUM_STEPS * BATCH_SIZE == trainer["progress"]["total_samples"]
    assert orchestrator["totals"]["tokens"] == trainer["progress"]["total_tokens"], "sent and trained on are the same"
    assert trainer["stepper"]["num_steps"] == NUM_STEPS and trainer["stepper"]["num_skipped"] == 0
    rollouts = orchestrator["rollouts"]
    assert rollouts["num_emitted"] == NUM_STEPS * BATCH_SIZE // GROUP_SIZE and not rollouts["drops"], rollouts["drops"]
    tokens = rollouts["tokens"]
    ready = sum(sum(sample["loss_mask"]) for sample in rollouts["partial_samples"])
    fates = tokens["trained"] + tokens["pending"] + sum(tokens["dropped"].values()) + tokens["unscored"]
    assert tokens["generated"] == fates + tokens["running"] + ready, tokens
    assert tokens["trained"] + tokens["pending"] > 0
    for row in metric_lines(out, "orchestrator", "tokens/generated"):
        fates = sum(row[f"tokens/{fate}"] for fate in ("trained", "dropped", "unscored", "in_flight"))
        assert row["tokens/generated"] == fates, row
    for row in metric_lines(out, "orchestrator", "batch/off_policy_level/max"):
        assert 0 <= row["batch/off_policy_level/max"] <= level
    if level == 0:
        assert all(row["mismatch_kl/max"] == 0 for row in metric_lines(out, "trainer", "mismatch_kl/max"))
    reported = [(row["step"], row["group_index"], row["index"]) for row in load_last_attempts(out / "samples.jsonl")]
    assert {step for step, _, _ in reported} <= set(range(1, NUM_STEPS + 1))
    assert len(reported) == len(set(reported)), "rollouts of abandoned attempts are counted again"


def metric_lines(out: Path, process: str, key: str) -> list[dict[str, float]]:
    return [row for row in load_jsonl(out / "metrics.jsonl") if row.get("process") == process and key in row]


def run_reference(folder: Path, settings: tuple[object, ...] = ()) -> Path:
    """Reference run without faults for exact trials."""
    out = folder / "reference"
    with runner(folder / "said-reference") as run:
        run.run_well("rl", *options(Trial(-1, out, 0, [], random.Random(), settings=settings), find_free_port()))
    return out


def run_one(seed: int, folder: Path, reference: Path) -> Trial:
    """Run a trial below `folder`, which is kept only on failure."""
    trial = draw_trial(seed, folder / "out")
    with runner(folder.parent / f"said-{seed}") as run:
        run_trial(trial, run)
        check(trial, reference)
    return trial


def with_own_disk(argv: list[str], folder: Path) -> list[str]:
    """The command in a mount namespace with a small disk at `folder`; unchanged if namespaces are not allowed."""
    script = f'mount -t tmpfs -o size={DISK_MB}m chaos "$0" && exec "$@"'
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(folder)]
    able = (
        subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0
        if shutil.which("unshare")
        else False
    )
    return [*own, *argv] if able else argv


def run_seed(seed: int, folder: Path, reference: Path) -> dict[str, object]:
    """Run a trial in a subprocess; returns its report."""
    place = folder / f"trial-{seed}"
    place.mkdir(parents=True)
    argv = [sys.executable, str(Path(__file__).resolve()), "--one", str(seed), str(place), str(reference)]
    if "full disk" in {fault.kind for fault in draw_trial(seed, place).faults}:
        argv = with_own_disk(argv, place)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    try:
        report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        report = {"seed": seed, "problem": (done.stdout + done.stderr)[-6000:], "hits": {}}
    if "problem" not in report:
        shutil.rmtree(place, ignore_errors=True)
    return report


def report_one(seed: int, place: Path, reference: Path) -> None:
    """Entry of `--one`: one JSON line on standard output."""
    began = time.monotonic()
    trial = run_one(seed, place, reference)
    seconds = round(time.monotonic() - began, 1)
    answer = {"seed": seed, "level": trial.level, "way": trial.way, "hits": trial.hits, "attempts": trial.attempts}
    answer["seconds"] = seconds
    sys.stdout.write(json.dumps(answer) + "\n")


def run_seeds(seeds: range, folder: Path, say: Callable[[str], object]) -> tuple[Counter[str], list[dict[str, object]]]:
    """Run all trials; returns fault counts and reports of failed trials."""
    reference, hits, lost = run_reference(folder), Counter[str](), list[dict[str, object]]()
    for seed in seeds:
        report = run_seed(seed, folder, reference)
        hits.update(report["hits"])  # type: ignore[arg-type]
        if "problem" in report:
            lost.append(report)
        say(json.dumps(report) + "\n")
    return hits, lost


def say(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-59", help="first-last")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        report_one(int(given.one[0]), Path(given.one[1]), Path(given.one[2]))
        return 0
    first, _, last = given.seeds.partition("-")
    seeds, began = range(int(first), int(last or first) + 1), time.monotonic()
    name = tempfile.mkdtemp(prefix="chaos-")
    hits, lost = run_seeds(seeds, Path(name), say)
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(hits.items()))
    minutes = (time.monotonic() - began) / 60
    sys.stdout.write(
        f"chaos: {len(seeds)} trials in {minutes:.1f} min, {hits.total()} faults ({faults}), losses {len(lost)}\n"
    )
    if lost:
        sys.stdout.write(f"left for inspection: {name}\n")
    else:
        shutil.rmtree(name)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
