"""Mutation tests: change the sources at random places, one at a time, and run the tests.

    python -m venv --system-site-packages /tmp/v && /tmp/v/bin/pip install coverage     # only for `record`
    python dev/mutate.py record                  # once: which test executes which line (the unit and contract tests)
    python dev/mutate.py run --seed 17 --num 300 # continues an interrupted run
    python dev/mutate.py record tests/unit/test_x.py    # after writing a test
    python dev/mutate.py run --again             # the survivors, with the current tests (or those of some files)
    python dev/mutate.py run --site "max_async_level + 2"    # every mutation whose line has this text
    python dev/mutate.py report

Works on a copy below `--dir`, never in the checkout. A mutation is killed by a failing or hanging test; it survives
when all covering tests pass (or `--budget` seconds of them), and when no test executes it. The tests that
killed are run without a mutation at the end; what was killed by a test that fails by itself is tried without that test.
`dev/mutation/exceptions.toml` lists files that are left out and mutations that change no behavior, with the reasons.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mutation.coverage_map import SUITES, CoverageMap, load_map, record
from mutation.forked import collect_tests, import_tests, run_tests, warm_up
from mutation.patching import Codes, LiveFunctions, changed_codes
from mutation.sites import Site, find_sites

ROOT = Path(__file__).resolve().parents[1]
EXCEPTIONS = Path(__file__).parent / "mutation" / "exceptions.toml"
NOT_COPIED = (".git", ".venv*", "__pycache__", "outputs", ".mypy_cache", ".ruff_cache", ".hypothesis", ".pytest_cache")
MAX_TESTS = 1000  # per mutation
NUM_FIRST = 12  # of them, before the others are collected
TEST_LIMIT_S = 90
KILLED = ("killed", "timeout")
Result = dict[str, Any]


@dataclass
class Workplace:
    """The copy of the checkout, its recorded coverage, and the results."""

    directory: Path

    @property
    def tree(self) -> Path:
        """The copy."""
        return self.directory / "tree"

    @property
    def data(self) -> Path:
        """Coverage."""
        return self.directory / "data"

    @cached_property
    def exceptions(self) -> dict[str, Any]:
        """Files left out and survivors accepted."""
        return tomllib.loads(EXCEPTIONS.read_text())

    @property
    def accepted(self) -> dict[str, dict[str, str]]:
        """Survivors that no unit test can kill: their kind and the reason."""
        return {entry["key"]: entry for entry in self.exceptions.get("accepted", [])}

    def copy(self) -> None:
        """Bring the copy up to date with the checkout; times are kept, so that only changed files compile again."""
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)

    def sites(self) -> list[Site]:
        """All places of the copy's sources, without files that are left out."""
        paths = sorted(str(p.relative_to(self.tree)) for p in (self.tree / "src").rglob("*.py"))
        kept = [p for p in paths if not any(fnmatch(p, pattern) for pattern in self.exceptions["excluded"])]
        return [site for path in kept for site in find_sites(self.tree, path)]


def show(line: str) -> None:
    """Write a line to the console at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def draw(sites: list[Site], seed: int, num: int) -> list[Site]:
    """One random mutation on each of `num` random lines."""
    by_line: dict[tuple[str, int], list[Site]] = {}
    for site in sites:
        by_line.setdefault((site.path, site.line), []).append(site)
    rng = random.Random(seed)
    return [rng.choice(by_line[line]) for line in rng.sample(sorted(by_line), num)]


def choose_tests(candidates: list[str], seconds: dict[str, float], budget_s: float) -> list[str]:
    """The first tests that fit the budget, at least one."""
    chosen, total = candidates[:1], sum(seconds[test] for test in candidates[:1])
    for test in candidates[1:MAX_TESTS]:
        if total + seconds[test] <= budget_s:
            chosen.append(test)
            total += seconds[test]
    return chosen


def no_patch() -> None:
    """A fork that imports the mutated module needs no other change."""


@dataclass
class Runner:
    """Tries mutations: those of functions in forks that have imported everything, others in forks that have not."""

    place: Workplace
    covered: CoverageMap
    budget_s: float
    files: tuple[str, ...] = ("",)
    """What the names of tests begin with."""
    unreliable: set[str] = field(default_factory=set)
    live: LiveFunctions | None = None

    def tests(self, site: Site) -> tuple[list[str], int]:
        """The tests to run, and how many could be."""
        found = self.covered.tests(self.place.tree, site)
        candidates = [test for test in found if test not in self.unreliable and test.startswith(self.files)]
        return choose_tests(candidates, self.covered.seconds, self.budget_s), len(candidates)

    def import_tests(self, sites: list[Site]) -> None:
        """Import all test files that these sites need."""
        files = sorted({test.split("::")[0] for site in sites for test in self.tests(site)[0]})
        import_tests(files)
        self.live = LiveFunctions()

    def codes(self, site: Site) -> Codes | None:
        """The changed functions, where the mutation changes nothing else."""
        path = self.place.tree / site.path
        return changed_codes(path, path.read_bytes(), site.apply(path.read_bytes()))

    def try_mutation(self, site: Site) -> Result:
        """Run the covering tests against the mutated copy, a few of them first, and restore the copy."""
        tests, num = self.tests(site)
        result = {"key": site.key, "line": site.line, "operator": site.operator, "tests": f"{len(tests)} of {num}"}
        if not tests:
            return {**result, "outcome": "uncovered"}
        path, started = self.place.tree / site.path, time.monotonic()
        codes = self.codes(site) if self.live else None
        before = partial(self.live.patch, path, codes) if self.live and codes else no_patch
        original, stat = path.read_bytes(), path.stat()
        code: int | None = 0
        failed: list[str] = []
        try:
            path.write_bytes(site.apply(original))
            for part in (tests[:NUM_FIRST], tests[NUM_FIRST:]):
                if part and code == 0:
                    limit_s = 240 + 10 * sum(self.covered.seconds[test] for test in part)
                    options = ("-x", f"--timeout={TEST_LIMIT_S}")
                    code, failed = run_tests(self.place.tree, part, limit_s, *options, before=before)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        outcome = {0: "survived", None: "timeout"}.get(code, "killed")
        return {**result, "outcome": outcome, "by": failed[:1], "code": code, "s": round(time.monotonic() - started, 1)}


def find_unreliable(place: Workplace, results: dict[str, Result]) -> set[str]:
    """Tests that killed a mutation and fail without one."""
    killers = sorted({test for result in results.values() for test in result.get("by", [])})
    if not killers:
        return set()
    return set(run_tests(place.tree, killers, 240 + 20 * len(killers), f"--timeout={TEST_LIMIT_S}")[1])


def run(runner: Runner, results_file: Path, todo: list[Site], results: dict[str, Result]) -> None:
    """Try `todo`; append each result to `results_file`."""
    place = runner.place
    numbers = itertools.count(1)

    def try_all(sites: list[Site]) -> None:
        for site in sites:
            result = results[site.key] = runner.try_mutation(site)
            with results_file.open("a") as file:
                file.write(json.dumps(result) + "\n")
            show(f"{next(numbers)}/{len(todo)} {result['outcome']}: {site.line} {site.key}")

    at_import = [site for site in todo if runner.codes(site) is None]
    try_all(at_import)
    in_functions = [site for site in todo if site not in at_import]
    if in_functions:
        runner.import_tests(in_functions)
        try_all(in_functions)
    while found := find_unreliable(place, {s.key: results[s.key] for s in todo if s.key in results}):
        show(f"Tests that fail without a mutation, or not always: {sorted(found)}")
        runner.unreliable |= found
        try_all([s for s in todo if s.key in results and found & set(results[s.key].get("by", []))])


def report(place: Workplace, seed: int, sites: list[Site], results: dict[str, Result]) -> None:
    """Print the score of the drawn mutations and the survivors, with the reason where one is known."""
    accepted = place.accepted
    done = [results[s.key] for s in sites if s.key in results]
    alive = sorted((r for r in done if r["outcome"] not in KILLED), key=lambda r: (r["key"] in accepted, r["key"]))
    kinds = Counter(accepted[r["key"]]["kind"] for r in alive if r["key"] in accepted)
    for result in alive:
        path, change = result["key"].split("::", 1)
        show(f"{result['outcome']} ({result['tests']} tests) {path}:{result['line']} {change}")
        if reason := accepted.get(result["key"]):
            show(f"    {reason['kind']}: {reason['reason']}")
    counts = Counter(r["outcome"] for r in done)
    killed, counted = sum(counts[outcome] for outcome in KILLED), len(done) - sum(kinds.values())
    show(f"seed {seed}: {len(done)} mutations, {dict(counts)}; of the survivors: {dict(kinds)}")
    show(f"score: {killed} of {counted} = {killed / max(counted, 1):.1%}")


def main() -> None:
    """Parse the command line and run the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "run", "report"])
    parser.add_argument("paths", nargs="*", help="test files, instead of all")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/mutation"))
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of covering tests per mutation")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--site", help="instead of random ones: mutations whose file, function or line has this text")
    args = parser.parse_intermixed_args()
    place = Workplace(args.dir.resolve())
    place.copy()
    if args.command == "record":
        record(place.tree, place.data, args.paths, args.workers)
        return
    sites = place.sites()
    chosen = [s for s in sites if args.site in s.key] if args.site else draw(sites, args.seed, args.num)
    results_file = place.directory / (f"results-{args.seed}.jsonl" if not args.site else "results-sites.jsonl")
    lines = results_file.read_text().splitlines() if results_file.exists() else []
    results = {row["key"]: row for row in map(json.loads, lines)}
    if args.command == "run":
        again = args.again or args.site
        alive = {key for key, result in results.items() if result["outcome"] not in KILLED} - place.accepted.keys()
        todo = [s for s in chosen if s.key not in results or (again and s.key in alive)]
        warm_up(place.tree)
        covered = load_map(place.data, collect_tests(place.tree, SUITES))
        run(Runner(place, covered, args.budget, tuple(args.paths or [""])), results_file, todo, results)
    report(place, args.seed, chosen, results)


if __name__ == "__main__":
    sys.exit(main())
