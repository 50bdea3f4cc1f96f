"""Launcher: GPU assignment, output directory, written configs and failure reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl import rl
from prime_rl.config import RLConfig
from prime_rl.launcher.summary import summarize
from prime_rl.runtime.process import ChildFailed, Supervisor
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.steps import publish_step


def parse(*argv: str) -> RLConfig:
    return parse_argv(RLConfig, ["--model.name", "tiny-qwen3", *argv], "rl")[0]


def publish(root: Path, step: int) -> Path:
    return publish_step(root, step, lambda directory: (directory / "file").write_text("x"))


def test_invalid_input_of_a_process_is_reported_verbatim(tmp_path: Path) -> None:
    import sys

    says = "import sys; print('loading'); print('error: env \"x\" was not found\\n  try y'); sys.exit(2)"
    with pytest.raises(ChildFailed) as failure, Supervisor(tmp_path, handle_signals=False) as run:
        run.start("orchestrator", [sys.executable, "-c", says])
        run.wait(["orchestrator"])
    with pytest.raises(ValueError, match=r'^orchestrator: env "x" was not found\n  try y$'):
        rl.report_failure(failure.value)


def test_commands_that_we_print_can_be_typed_into_a_shell() -> None:
    """`eval` alone is a shell builtin, so documents and summaries must not print it bare."""
    root = Path(__file__).resolve().parents[3]
    files = [root / "README.md", *root.glob("examples/**/*.md"), *root.glob("examples/**/*.toml")]
    files += [*root.glob("configs/**/*.toml"), root / "scripts" / "demo.py"]
    bare = re.compile(r"(?<!env )(?<!run )\beval +@")
    found = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if bare.search(line)]
    assert found == []
    assert bare.search("next  eval @ x.toml") and not bare.search("env eval @ x.toml")
    assert "env eval @" in summarize(parse(), 1.0)
