"""Run every test, slow ones included, each file in the environment with its dependencies: `make test-all`.

Prints the output of pytest, then the counts of all runs together and each skip with its reason and cure. The exit code
is 0 if everything passed and only tests that need a GPU were skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "outputs" / "test-all"
NEEDS_GPU = "no GPU"
VLLM = [f"tests/integration/test_vllm{suffix}.py" for suffix in ("", "_exports", "_runs", "_sampling")]
PEERS = [
    "tests/unit/rollouts/test_loss_oracles.py",
    "tests/unit/rollouts/test_library_losses.py",
    "tests/unit/rollouts/test_distill.py",
    "tests/unit/prime_rl/pretrained/test_llama_cpp.py",
    "tests/integration/test_clusters.py",
]


@dataclass(frozen=True)
class Phase:
    """One run of pytest in one environment; `left_out` are files of `arguments` that another phase runs."""

    name: str
    environment: str
    arguments: tuple[str, ...]
    left_out: tuple[str, ...] = ()


PHASES = (
    Phase("unit", ".venv", ("tests/unit", "tests/contract", "-n", "auto", "--dist", "worksteal"), tuple(PEERS)),
    Phase("integration", ".venv", ("tests/integration",), (*VLLM, *PEERS)),
    Phase("peers", ".venv-peers", tuple(PEERS)),
    Phase("vllm", ".venv-vllm", tuple(VLLM)),
)


def run(phase: Phase) -> tuple[Counter[str], Counter[str]]:
    """Run a phase; tests by outcome, and skips by reason."""
    report = REPORTS / f"{phase.name}.xml"
    report.unlink(missing_ok=True)
    ignored = [f"--ignore={path}" for path in phase.left_out]
    command = [str(ROOT / phase.environment / "bin" / "python"), "-m", "pytest", *phase.arguments, *ignored]
    print(f"==> {phase.name} tests in {phase.environment}", flush=True)
    environ = {"PRIME_TEST_MESHES": "all", **os.environ}
    command += ["-m", "", f"--junitxml={report}"]
    done = subprocess.run(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL)
    outcomes, reasons = count(report) if report.is_file() else (Counter[str](), Counter[str]())
    if done.returncode and not outcomes["failed"]:  # pytest itself failed
        outcomes["failed"] += 1
    return outcomes, reasons


def count(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Counts in a JUnit report of pytest: tests by outcome, and skips by reason."""
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcomes["failed"] += 1
        elif skipped is None:
            outcomes["passed"] += 1
        elif skipped.get("type") == "pytest.skip":
            outcomes["skipped"] += 1
            reasons[str(skipped.get("message")).removeprefix("Skipped: ")] += 1
        else:
            outcomes["expected failures"] += 1
    return outcomes, reasons


def main() -> int:
    """Exit code of all phases together."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    start, total, reasons = time.monotonic(), Counter[str](), Counter[str]()
    for phase in PHASES:
        begun = time.monotonic()
        outcomes, skips = run(phase)
        print(f"==> {phase.name}: {describe(outcomes)} in {(time.monotonic() - begun) / 60:.0f} min", flush=True)
        total, reasons = total + outcomes, reasons + skips
    for reason, number in sorted(reasons.items()):
        print(f"{number} skipped: {reason}")
    print(f"==> all tests, {date.today()}: {describe(total)} in {(time.monotonic() - start) / 60:.0f} min")
    unseen = sum(number for reason, number in reasons.items() if not reason.startswith(NEEDS_GPU))
    if unseen:
        print(f"error: {unseen} tests were skipped that need no GPU", file=sys.stderr)
    return 1 if total["failed"] or unseen else 0


def describe(outcomes: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())


if __name__ == "__main__":
    sys.exit(main())
