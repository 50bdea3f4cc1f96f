"""A run as one Slurm job: a batch script that starts every task with `srun` on its nodes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from prime_rl.deployment.config import SlurmDeployment
from prime_rl.deployment.layout import TEMPLATES, Layout, render_template

JOB_FILE = "job.sbatch"


def build_files(layout: Layout, config: SlurmDeployment, files: Path, logs: Path, workdir: Path) -> dict[str, str]:
    """Render the batch script. Raises `ValueError` if the template cannot be read or rendered."""
    import jinja2

    template = config.template or TEMPLATES / "slurm.sbatch"
    values = config.model_dump(exclude={"type", "template"})
    try:
        return {
            JOB_FILE: render_template(
                template, **values, places=layout.places, tasks=layout.tasks, files=files, logs=logs, workdir=workdir
            )
        }
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ValueError(f"deployment.template {template}: {error}") from error


def submit(files: Path) -> str:
    """Submit the job; returns its number. Raises `ValueError` with the error of sbatch."""
    try:
        result = subprocess.run(["sbatch", str(files / JOB_FILE)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(
            f"sbatch is not installed here: run this on a Slurm login node, or `sbatch {files / JOB_FILE}` there"
        ) from None
    number = re.search(r"Submitted batch job (\d+)", result.stdout)
    if result.returncode or number is None:
        raise ValueError(f"sbatch rejected {files / JOB_FILE}: {(result.stderr or result.stdout).strip()}")
    return number[1]
