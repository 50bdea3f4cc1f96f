"""Write the files of a layout and submit them as a job, for `rl` and `sft` with a `[deployment]`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from prime_rl.configuration.render import render_toml
from prime_rl.deployment import kubernetes, ray, slurm
from prime_rl.deployment.config import Cluster, KubernetesDeployment, RayDeployment, SlurmDeployment
from prime_rl.deployment.layout import Layout, build_scripts
from prime_rl.runtime.redaction import Redactor, find_secret_variables
from prime_rl.runtime.run_dir import RunDir
from prime_rl.utils.pydantic_config import BaseConfig


def build_files(
    layout: Layout,
    configs: Mapping[str, BaseConfig],
    deployment: Cluster,
    out: Path,
    key: str = "<generated at submission>",
) -> dict[str, str]:
    """Files of a deployment by name: configurations, a script per task, and the launcher's files."""
    tables = {f"{name}.toml": render_toml(config, config.provenance, config.given) for name, config in configs.items()}
    python = "python" if isinstance(deployment, KubernetesDeployment) else sys.executable
    run, workdir = RunDir(out.resolve()), Path.cwd()
    # The files of a pod are on another volume, and no pod is started again.
    num_starts = None if isinstance(deployment, KubernetesDeployment) else run.count_starts("trainer", "sft")
    scripts = build_scripts(layout, deployment, python, num_starts)
    directory, logs = run.deployment, run.logs
    match deployment:
        case SlurmDeployment():
            launcher = slurm.build_files(layout, deployment, directory, logs, workdir)
        case RayDeployment():
            launcher = ray.build_files(layout, deployment, directory, logs, workdir)
        case KubernetesDeployment():
            _check_mounted(out, deployment)
            launcher = kubernetes.build_files(layout, deployment, scripts, tables, key)
    files = {**launcher, **scripts, **tables}
    _check_secrets(files)
    return files


def _check_secrets(files: Mapping[str, str]) -> None:
    """`ValueError` if a file contains the value of a secret environment variable."""
    for variable, value in find_secret_variables().items():
        redactor = Redactor([value])
        for name, text in files.items():
            for line in text.splitlines():
                if redactor.redact(line) != line:
                    key = redactor.redact(line.partition("=")[0].strip())
                    raise ValueError(
                        f"{name}: {key} is the value of {variable}, a secret: give the name of the variable "
                        "(api_key_var), or set it where the job runs"
                    )


def _check_mounted(out: Path, deployment: KubernetesDeployment) -> None:
    """`ValueError` if the output directory is not on the claim, the only persistent volume of the pods."""
    if out.is_absolute() and deployment.mount_path not in out.parents:
        raise ValueError(
            f"output_dir {out} is not below deployment.mount_path {deployment.mount_path}, where pods can write: "
            "make it relative, or name a directory below that path"
        )


def show_files(files: Mapping[str, str]) -> str:
    """All files, concatenated for --dry-run."""
    return "\n".join(f"# ----- {name} -----\n{text}" for name, text in files.items())


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Replace files of the same names only. Only their owner can read them, as they may contain keys."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = directory / name
        path.unlink(missing_ok=True)
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")


def deploy(layout: Layout, configs: Mapping[str, BaseConfig], deployment: Cluster, out: Path) -> int:
    """Write the files and submit the run; returns the exit code."""
    files = build_files(layout, configs, deployment, out, key=secrets.token_hex(16))
    if isinstance(deployment, KubernetesDeployment) and out.is_absolute():  # on the claim, which is not mounted here
        out = out.relative_to(deployment.mount_path)
    directory = RunDir(out.resolve()).deployment
    write_files(files, directory)
    RunDir(out).logs.mkdir(exist_ok=True)
    _log(f"Wrote {len(files)} files to {directory}: {len(layout.tasks)} tasks on {len(layout.places)} nodes")
    match deployment:
        case SlurmDeployment():
            _log(f"Slurm job {slurm.submit(directory)}; logs in {RunDir(out).logs}/job-*.log")
        case RayDeployment():
            result = ray.submit(directory, deployment)
            if isinstance(result, int):
                return result
            _log(f"Ray job {result}; logs in {RunDir(out).logs}")
        case KubernetesDeployment():
            _log(kubernetes.submit(directory, deployment))
            _log(f"Delete it with: kubectl delete -k {os.path.relpath(directory)}")
    return 0


def _log(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
