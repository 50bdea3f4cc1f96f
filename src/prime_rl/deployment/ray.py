"""A run as a Ray job: the plan that `ray_job` executes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from prime_rl.deployment.config import RayDeployment
from prime_rl.deployment.layout import Layout
from prime_rl.deployment.ray_job import RayPlan, RayTask, render_plan

PLAN_FILE = "ray.json"
FORWARDED_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "VIRTUAL_ENV")
"""Variables copied from the submitting shell to the nodes."""


def build_files(layout: Layout, config: RayDeployment, files: Path, logs: Path, workdir: Path) -> dict[str, str]:
    """The plan, as JSON."""
    claim = {"CPU": config.num_cpus} | ({"GPU": float(config.gpus_per_node)} if config.gpus_per_node else {})
    tasks = [
        RayTask(t.name, str(files / f"{t.name}.sh"), list(t.places), t.max_restarts, t.is_work, t.is_optional)
        for t in layout.tasks
    ]
    env = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    address = "auto" if config.address.startswith("http") else config.address
    bundles = [claim] * len(layout.places)
    return {PLAN_FILE: render_plan(RayPlan(address, config.timeout, bundles, str(workdir), str(logs), env, tasks))}


def submit(files: Path, config: RayDeployment) -> int | str:
    """Submit the job to the head node and return its name, or run the driver here and return the exit code.

    Raises `ValueError` with Ray's error.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError('deployment.type = "ray" but Ray is not installed here: pip install ray[default]')
    driver = [sys.executable, "-m", "prime_rl.deployment.ray_job", str(files / PLAN_FILE)]
    if not config.address.startswith("http"):
        return subprocess.run(driver).returncode
    client = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--no-wait", "--address", config.address]
    result = subprocess.run([*client, "--", *driver], capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"ray job submit: {(result.stderr or result.stdout).strip().splitlines()[-1:]}")
    return next((word.strip("'") for word in result.stdout.split() if "raysubmit_" in word), "submitted")
