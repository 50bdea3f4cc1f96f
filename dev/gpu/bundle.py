"""Packages for a machine without a package index: `make gpu-bundle` downloads their wheels, `make gpu` unpacks them.

    python -m dev.gpu.bundle [--python 3.12]

The wheels are what `pyproject.toml` requires, at the versions installed here, except for what such a machine has
(torch, numpy) and what the checks do not need (verifiers, with datasets, and gguf). They are for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / ".gpu-bundle"
PRESENT = ("torch", "numpy")
UNUSED = ("verifiers", "gguf")
MAX_BYTES = 64 << 20
GLIBC_MINORS = (39, 38, 35, 34, 31, 28, 27, 24, 17, 12)
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS), "manylinux2014_x86_64", "manylinux1_x86_64")


def find_requirements() -> dict[str, str]:
    """Name and installed version of every package that the project's requirements need."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}

    def add(name: str) -> None:
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name in found or name in (*PRESENT, *UNUSED):
            return
        package = metadata.distribution(name)
        found[name] = package.version
        for text in package.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                add(requirement.name)

    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        add(Requirement(text).name)
    return found


def download(target: Path, python: str) -> int:
    """Download the wheels to `target`; their size in bytes. `CalledProcessError` if one does not exist."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    versions = [f"{name}=={version}" for name, version in sorted(find_requirements().items())]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options += [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *options]
    subprocess.run([*command, "-d", str(target), *versions], check=True, stderr=subprocess.DEVNULL)
    return sum(wheel.stat().st_size for wheel in target.glob("*.whl"))


def unpack_bundle(bundle: Path, site: Path) -> Path | None:
    """Unpack the wheels into `site`; None without a bundle, or if it is for another version of Python."""
    wheels = sorted(bundle.glob("*.whl"))
    tags = (f"cp{sys.version_info.major}{sys.version_info.minor}", "py3", "abi3")
    for wheel in wheels:
        if not any(tag in part.split(".") for part in wheel.stem.split("-")[2:] for tag in tags):
            print(f"==> {bundle} is not used: {wheel.name} is not for Python {platform.python_version()}")
            return None
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site if wheels else None


def main() -> int:
    """Download the wheels; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.bundle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    size = download(BUNDLE, parser.parse_args().python)
    print(
        f"==> {BUNDLE}: {len(list(BUNDLE.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB of at most {MAX_BYTES >> 20}"
    )
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
