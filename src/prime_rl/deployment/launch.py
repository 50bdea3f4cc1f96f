"""From a layout to files, and from files to a job: what `rl` and `sft` do with a `[deployment]`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from prime_rl.deployment import kubernetes, ray, slurm
from prime_rl.deployment.config import Cluster, KubernetesDeployment, RayDeployment, SlurmDeployment
from prime_rl.deployment.layout import Layout, build_scripts
from prime_rl.utils.config_toml import render_toml
from prime_rl.utils.pydantic_config import BaseConfig

FILES_DIR = "deployment"


def build_files(
    layout: Layout, configs: Mapping[str, BaseConfig], deployment: Cluster, out: Path, key: str = "<made at the start>"
) -> dict[str, str]:
    """Every file of a deployment by name: configurations, a script per task, and what the launcher reads."""
    tables = {f"{name}.toml": render_toml(config, config.provenance) for name, config in configs.items()}
    python = "python" if isinstance(deployment, KubernetesDeployment) else sys.executable
    scripts = build_scripts(layout, deployment, python)
    files, logs, workdir = out.resolve() / FILES_DIR, out.resolve() / "logs", Path.cwd()
    match deployment:
        case SlurmDeployment():
            launcher = slurm.build_files(layout, deployment, files, logs, workdir)
        case RayDeployment():
            launcher = ray.build_files(layout, deployment, files, logs, workdir)
        case KubernetesDeployment():
            _check_mounted(out, deployment)
            launcher = kubernetes.build_files(layout, deployment, scripts, tables, key)
    return {**launcher, **scripts, **tables}


def _check_mounted(out: Path, deployment: KubernetesDeployment) -> None:
    """Pods keep what they write on the claim alone."""
    if out.is_absolute() and not out.is_relative_to(deployment.mount_path):
        raise ValueError(
            f"output_dir {out} is not below deployment.mount_path {deployment.mount_path}, where pods can write: "
            "make it relative, or move it there"
        )


def show_files(files: Mapping[str, str]) -> str:
    """All files, one after the other, for --dry-run."""
    return "\n".join(f"# ----- {name} -----\n{text}" for name, text in files.items())


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Replace the directory's files of an earlier deployment; keys may be in them, so their owner alone reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        if old.is_file():
            old.unlink()
    for name, text in files.items():
        path = directory / name
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")


def deploy(layout: Layout, configs: Mapping[str, BaseConfig], deployment: Cluster, out: Path) -> int:
    """Write the files and hand the run in; returns the exit code."""
    files = build_files(layout, configs, deployment, out, key=secrets.token_hex(16))
    directory = out.resolve() / FILES_DIR
    write_files(files, directory)
    (out / "logs").mkdir(exist_ok=True)
    _say(f"wrote {len(files)} files to {directory}: {len(layout.tasks)} commands in {len(layout.places)} places")
    match deployment:
        case SlurmDeployment():
            _say(f"Slurm job {slurm.submit(directory)}; its log is {out / 'logs'}/job-*.log")
        case RayDeployment():
            answer = ray.submit(directory, deployment)
            if isinstance(answer, int):
                return answer
            _say(f"Ray job {answer}; logs in {out / 'logs'}")
        case KubernetesDeployment():
            _say(kubernetes.submit(directory))
            _say(f"end it with: kubectl delete -k {os.path.relpath(directory)}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
