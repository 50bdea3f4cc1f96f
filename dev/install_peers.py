"""Install what oracle and cluster tests need into the environment of the Python that runs it: `make test-peers`.

The environment extends `.venv` without changing it. verl and Liger require versions that conflict with the rest; the
parts that the tests use need the listed packages only.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = ("trl==1.16.0", "ray[default]==2.60.0", "kubernetes-validate==1.37.0", "llama-cpp-python==0.3.36")
WITHOUT_REQUIREMENTS = (
    *("verl==0.9.1", "liger-kernel==0.8.5", "triton==3.9.0", "tensordict==0.15.3", "torchdata==0.11.0"),
    *("omegaconf==2.3.0", "hydra-core==1.3.8", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "pyvers==0.2.3"),
    "cloudpickle==3.1.2",
)
OF_NEWER_PYTHON = ("skyrl==0.4.0",)
"""Declared for Python 3.12 and later; the module of losses that the tests use needs no newer one."""


def main() -> None:
    """Install everything; exits with pip's code on failure."""
    site = Path(sysconfig.get_path("purelib"))
    base = ROOT / ".venv" / site.relative_to(sys.prefix)
    (site / "base.pth").write_text(f"{base}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    without = ("--no-deps", *WITHOUT_REQUIREMENTS)
    newer = ("--no-deps", "--ignore-requires-python", *OF_NEWER_PYTHON)
    for words in ((*PEERS, "-c", str(ROOT / "constraints.txt")), without, newer):
        if code := subprocess.run([*pip, *words]).returncode:
            raise SystemExit(code)


if __name__ == "__main__":
    main()
