"""`make test-all` counts what ran, and every skip is printed with its reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

def test_passes(): pass

@pytest.mark.parametrize("i", range(2))
def test_skips(i): pytest.skip("no chromium; cure: apt-get install chromium")

@pytest.mark.skip(reason="no GPU; cure: a machine with CUDA")
def test_skips_by_mark(): pass

def test_fails(): assert False

@pytest.fixture
def broken(): raise RuntimeError

def test_has_an_error(broken): pass

@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_all_script", ROOT / "dev" / "test_all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_skips_are_printed_and_counted_by_reason(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "conftest", "-p", "no:cacheprovider"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, f"--junitxml={report}", "test_some.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert "\n1 skipped: no GPU; cure: a machine with CUDA\n" in done.stdout, done.stdout + done.stderr
    assert "\n2 skipped: no chromium; cure: apt-get install chromium\n" in done.stdout
    outcomes, reasons = script.count(report)
    assert outcomes == {"passed": 1, "skipped": 3, "failed": 2, "expected failures": 1}
    assert reasons == {"no chromium; cure: apt-get install chromium": 2, "no GPU; cure: a machine with CUDA": 1}


def test_every_test_file_belongs_to_one_phase(script: ModuleType) -> None:
    """A file that a phase leaves out is run by exactly one other."""
    files = [
        path for folder in ("unit", "contract", "integration") for path in (ROOT / "tests" / folder).glob("test_*")
    ]
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        phases = [
            phase.name
            for phase in script.PHASES
            if name not in phase.left_out and any(name.startswith(start) for start in phase.arguments)
        ]
        assert len(phases) == 1, (name, phases)
    assert all((ROOT / name).is_file() for phase in script.PHASES for name in phase.left_out)
