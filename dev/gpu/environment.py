"""Versions, packages, and the speeds that later numbers are compared with."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import tomllib
from importlib import metadata

import torch
from dev.gpu.bundle import UNUSED
from dev.gpu.context import Context, Measured
from dev.gpu.runner import ROOT


def _requirements() -> dict[str, str]:
    """Version range of every requirement of the project that these checks need, by name."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    parts = [re.fullmatch(r"([\w-]+)(.*)", line) for line in lines]
    return {part[1]: part[2] for part in parts if part is not None and part[1] not in UNUSED}


def check_versions(context: Context) -> Measured:
    """Number of packages that are older than required, with Python and torch; writes environment.json."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    versions = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    (context.out / "environment.json").write_text(
        json.dumps(
            {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "device": context.gpu,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "packages": dict(sorted(versions.items())),
            },
            indent=2,
        )
    )
    ranges = _requirements()
    installed = {name: _find_version(name) for name in ranges}
    old = [
        f"{name} {version}, needs {ranges[name]}"
        for name, version in installed.items()
        if version and not SpecifierSet(ranges[name]).contains(Version(version), prereleases=True)
    ]
    if context.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(context.device)
        about = f"{context.gpu}, compute capability {major}.{minor}, CUDA {torch.version.cuda}"
    else:
        about = context.gpu
    return Measured(
        len(old), "; ".join([f"{about}, Python {platform.python_version()}, torch {torch.__version__}", *old])
    )


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_packages(context: Context) -> Measured:
    """Number of required packages that are missing."""
    modules = {"pyzmq": "zmq", "huggingface-hub": "huggingface_hub", "protobuf": "google.protobuf"}
    missing = [name for name in _requirements() if importlib.util.find_spec(modules.get(name, name)) is None]
    return Measured(len(missing), " ".join([*missing, "- make gpu-bundle carries them" if missing else ""]).strip())


def measure_copy(context: Context) -> Measured:
    """Copy bandwidth as a share of the data sheet; of itself where the device is unknown."""
    from dev.gpu.engine import bench, measure_bandwidth

    found = measure_bandwidth(context)
    sheet = next((value for part, value in bench.BANDWIDTHS.items() if part in context.gpu), found)
    return Measured(found / sheet, f"{found / 1e9:,.0f} GB/s", {"bytes_per_s": found})


def measure_matmul(context: Context) -> Measured:
    """FLOP/s of a bf16 matrix product as a share of the data sheet, and the largest error of an fp32 one."""
    from dev.gpu.engine import find_shortest

    from prime_rl.trainer.perf import find_peak_flops

    size = 8192 if context.device.type == "cuda" else 256
    a = torch.randn(size, size, device=context.device, dtype=torch.bfloat16)
    found = 2 * size**3 / find_shortest(context, lambda: a @ a)
    sheet = find_peak_flops(context.device, torch.bfloat16)
    wide = torch.randn(512, size, device=context.device)
    error = float((wide @ wide.T - (wide.double() @ wide.double().T)).abs().max())
    if error > 1e-2:
        raise RuntimeError(f"fp32 products have an error of {error:.2g}: is TF32 enabled?")
    return Measured(found / sheet, f"{found / 1e12:,.1f} TFLOP/s", {"flops": found})
