"""The wheel, installed in an environment of its own, from a directory without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SFT = ("sft", "@", "examples/reverse_text/tiny/sft.toml", "--max-steps", 2, "--output-dir", "outputs/sft")
RL = (
    *("rl", "@", "examples/reverse_text/tiny/rl.toml", "--model.name", "outputs/sft/weights/step_2"),
    *("--max-steps", 2, "--output-dir", "outputs/rl"),
)
EVAL = (
    *("eval", "@", "examples/reverse_text/tiny/eval.toml", "--model.name", "outputs/rl/weights/step_2"),
    *("--num-examples", 4, "--output-dir", "outputs/rl"),
)
NEW_RL = ("rl", "@", "environments/my_task/rl.toml", "--max-steps", 2, "--no-orchestrator.eval")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its dependencies are those of this process."""
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    if "No matching distribution" in built.stderr or "Could not fetch" in built.stderr:
        pytest.skip("no package index for the build backend; cure: network access for pip")
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    into = ["--python", str(folder / "venv" / "bin" / "python")]
    install = ["install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *into, *install], check=True)
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv"


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_commands_of_the_wheel_run_in_any_directory(environment: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(command: str, *words: object) -> str:
        done = subprocess.run(
            [environment / "bin" / command, *map(str, words)],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, f"{command} {words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    code = "import prime_rl, rollouts; prime_rl.train; print(prime_rl.__file__, rollouts.__file__)"
    assert all(path.startswith(str(environment)) for path in run("python", "-c", code).split())
    assert run("rl", "--version").startswith("prime-rl ") and "rl init NAME" in run("rl", "--help")
    run(*map(str, SFT))
    assert "reward" in run(*map(str, RL))
    assert (tmp_path / "outputs/rl/weights/step_2/model.safetensors").is_file()
    run(*map(str, EVAL))
    assert list(tmp_path.glob("outputs/rl/evals/**/*.json*"))
    assert "reward" in run("monitor", "outputs/rl")
    run("monitor", "outputs/rl", "--report", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 100_000
    run("rl", "init", "my_task")
    assert "2 passed" in run("python", "-m", "pytest", "-q", "environments/my_task")
    assert "weights" in run(*map(str, NEW_RL))
    assert "Convert a GGUF file" in run("python", "-m", "prime_rl", "convert", "--help")
