"""A run as one Slurm job: a batch script that starts every task with `srun` on its nodes."""

from __future__ import annotations

import re
from pathlib import Path

from prime_rl.deployment.config import SlurmDeployment
from prime_rl.deployment.layout import TEMPLATES, Layout, render_template, run_tool

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
    job = files / JOB_FILE
    output = run_tool(["sbatch", str(job)], f"run this on a Slurm login node, or `sbatch {job}` there")
    number = re.search(r"Submitted batch job (\d+)", output)
    if number is None:
        raise ValueError(f"sbatch rejected {job}: {output}")
    return number[1]
