"""Which tests execute which line: one coverage run with a context per test, kept as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mutation.sites import Site

SUITES = ("tests/unit", "tests/contract")
SETTINGS = """[run]
source = {tree}/src
data_file = {data}/coverage
parallel = true
sigterm = true
patch = _exit, fork
context = ${{MUTATE_CONTEXT-}}
"""


@dataclass(frozen=True)
class CoverageMap:
    """Tests by executed line, and the seconds of each test that passed."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def tests(self, tree: Path, site: Site) -> list[str]:
        """The tests that can detect a mutation: first those of files that name its function or class, quick ones first.

        Code that runs at import has no tests of its own: the tests of its file count, and those in test files that
        import its module or name the field that is defined.
        """
        texts = {name: (tree / name).read_text() for name in {test.split("::")[0] for test in self.seconds}}
        found = self._executing(site)
        if not site.in_function:
            module = site.path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            field = re.match(r"\w*", site.before)
            words = re.compile(rf"{re.escape(module)}|\b{field and field[0]}\b")
            naming = {file for file, text in texts.items() if words.search(text)}
            found |= {test for test in self.seconds if test.split("::")[0] in naming}
        own, name = Path(site.path).stem, site.where.split(".")[0]

        def rank(test: str) -> tuple[bool, float, str]:
            file = test.split("::")[0]
            return own not in file and name not in texts[file], self.sizes[test] * (1 + self.seconds[test]), test

        return sorted(found & self.seconds.keys(), key=rank)

    @cached_property
    def sizes(self) -> Counter[str]:
        """How many lines each test executes."""
        return Counter(test for by_line in self.lines.values() for tests in by_line.values() for test in tests)

    def _executing(self, site: Site) -> set[str]:
        executed = self.lines.get(site.path, {})
        first, last = site.lines if site.in_function else (1, sys.maxsize)
        return {test for line, tests in executed.items() if first <= line <= last for test in tests}


def record(tree: Path, data: Path, paths: list[str], workers: int) -> None:
    """Run the tests of `paths` (all by default) in `tree` under coverage, adding to what was recorded in `data`."""
    data.mkdir(parents=True, exist_ok=True)
    settings = data / "settings.ini"
    settings.write_text(SETTINGS.format(tree=tree, data=data))
    path = os.pathsep.join([str(tree / "src"), str(Path(__file__).parent)])
    environ = {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": path, "MUTATE_TESTS": str(data)}
    command = [sys.executable, "-m", "pytest", "-p", "contexts", "-p", "no:cacheprovider", "-q", "--timeout", "300"]
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    subprocess.run([*command, *spread, *(paths or SUITES)], cwd=tree, env=os.environ | environ)
    save_map(tree, data)


def save_map(tree: Path, data: Path) -> None:
    """Merge everything that was recorded in `data` into `data/map.json`."""
    from coverage import Coverage

    coverage = Coverage(data_file=str(data / "coverage"), config_file=str(data / "settings.ini"))
    coverage.combine(keep=True)
    found = coverage.get_data()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in found.measured_files():
        by_line = lines.setdefault(str(Path(file).relative_to(tree)), {})
        for line, contexts in found.contexts_by_lineno(file).items():
            if tests := sorted({name for context in contexts if (name := context.strip("|").split("|")[0])}):
                by_line[line] = tests
    seconds: dict[str, float] = {}
    for log in sorted(data.glob("tests-*.jsonl")):
        for row in map(json.loads, log.read_text().splitlines()):
            if row["outcomes"] == ["passed"] * 3:
                seconds[row["test"]] = row["s"]
    (data / "map.json").write_text(json.dumps({"lines": lines, "seconds": seconds}))


def load_map(data: Path, exist: set[str]) -> CoverageMap:
    """The map that `record` saved, of the tests that still `exist`."""
    raw = json.loads((data / "map.json").read_text())
    lines = {path: {int(line): tests for line, tests in by.items()} for path, by in raw["lines"].items()}
    return CoverageMap(lines, {test: seconds for test, seconds in raw["seconds"].items() if test in exist})
