"""A run as Kubernetes objects below one kustomization: `kubectl apply -k <directory>`.

Job           one per finite task (trainer: indexed, a pod per node; orchestrator; or single-node rl)
StatefulSet   one per kind of server, a pod per server, with restarts
Service       one headless service: DNS names of pods before they are ready
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl.deployment.config import KubernetesDeployment
from prime_rl.deployment.layout import KEY_VARIABLE, TEMPLATES, Layout, Task, render_template, run_tool

KUSTOMIZATION, MANIFEST, KEY_FILE = "kustomization.yaml", "run.yaml", "key.env"


@dataclass(frozen=True)
class PodGroup:
    """A Job or a StatefulSet: the pods of one finite task, or of all servers of one configuration."""

    name: str
    role: str
    num_gpus: int
    tasks: tuple[Task, ...]
    places: tuple[int, ...]
    is_work: bool


def build_files(
    layout: Layout, config: KubernetesDeployment, scripts: Mapping[str, str], configs: Mapping[str, str], key: str
) -> dict[str, str]:
    """Manifests, kustomization and API key of the servers, by file name."""
    groups, addresses = group_pods(layout, config), find_addresses(layout, config)
    return {
        MANIFEST: render_template(TEMPLATES / "kubernetes.yaml", config=config, groups=groups, addresses=addresses),
        KUSTOMIZATION: render_template(
            TEMPLATES / KUSTOMIZATION, config=config, scripts=list(scripts), configs=list(configs)
        ),
        KEY_FILE: f"{KEY_VARIABLE}={key}\n",
    }


def group_pods(layout: Layout, config: KubernetesDeployment) -> list[PodGroup]:
    """The objects of a run; a finite task runs in all its places, a server in its own."""
    groups = []
    for _, grouped in groupby(layout.tasks, key=lambda task: (task.is_work, task.config)):
        tasks = tuple(grouped)
        places = tuple(place for task in tasks for place in task.places)
        node = layout.places[places[0]]
        name = f"{config.name}-{node.role}"
        groups.append(PodGroup(name, node.role, node.num_gpus, tasks, places, tasks[0].is_work))
    return groups


def find_addresses(layout: Layout, config: KubernetesDeployment) -> dict[str, str]:
    """HOST_i -> name of the pod at place i."""
    return {
        f"HOST_{place}": f"{group.name}-{index}.{config.name}"
        for group in group_pods(layout, config)
        for index, place in enumerate(group.places)
    }


def submit(files: Path, config: KubernetesDeployment) -> str:
    """Apply the objects; returns the output of kubectl. Raises `ValueError` with its error, or if the run is active."""
    argv = ["kubectl", "apply", "-k", str(files)]
    elsewhere = f"run `{' '.join(argv)}` on a machine that has it"
    delete_earlier_start(files, config, elsewhere)
    return run_tool(argv, elsewhere)


def delete_earlier_start(files: Path, config: KubernetesDeployment, elsewhere: str) -> None:
    """Delete Jobs and StatefulSets of an earlier start and wait for their pods; `ValueError` if a Job has not ended.

    Jobs cannot be changed, and servers of the earlier start would reject the new key until their pod is replaced. The
    logs go with them, so kubectl must accept the new objects first: on the client, as the server would compare them
    with the ended Jobs.
    """
    labels = (
        f"app.kubernetes.io/name=prime-rl,app.kubernetes.io/instance={config.name}"  # others use the instance alone
    )
    listed = run_tool(
        ["kubectl", "get", "jobs,statefulsets", "-n", config.namespace, "-o", "json", "-l", labels], elsewhere
    )
    found = json.loads(listed)["items"]
    if active := [item["metadata"]["name"] for item in found if item["kind"] == "Job" and not _has_ended(item)]:
        raise ValueError(
            f"deployment.name = {config.name!r} is in use, as these jobs have not ended: {', '.join(active)}\n"
            f"  wait for them, delete the run with `kubectl delete -k {files}`, or give another name"
        )
    if found:
        names = [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in found]
        run_tool(["kubectl", "apply", "--dry-run=client", "-k", str(files)], elsewhere)
        run_tool(["kubectl", "delete", "-n", config.namespace, "--cascade=foreground", *names], elsewhere)


def _has_ended(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(item["type"] in ("Complete", "Failed") and item["status"] == "True" for item in conditions)
