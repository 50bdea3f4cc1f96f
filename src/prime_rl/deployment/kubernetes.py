"""A run as Kubernetes objects below one kustomization: `kubectl apply -k <directory>`.

Job           one per finite task (trainer: indexed, a pod per node; orchestrator; or single-node rl)
StatefulSet   one per kind of server, a pod per server, with restarts
Service       one headless service: DNS names of pods before they are ready
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl.deployment.config import KubernetesDeployment
from prime_rl.deployment.layout import KEY_VARIABLE, Layout, Task

Object = dict[str, Any]
MOUNTED = "/deployment"
KUSTOMIZATION, MANIFEST, KEY_FILE = "kustomization.yaml", "run.yaml", "key.env"
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def build_files(
    layout: Layout, config: KubernetesDeployment, scripts: Mapping[str, str], configs: Mapping[str, str], key: str
) -> dict[str, str]:
    """Manifests, kustomization and API key of the servers, by file name."""
    objects = [_service(config)]
    for tasks in _kinds(layout):
        objects += [_job(tasks[0], layout, config)] if tasks[0].is_work else [_servers(tasks, layout, config)]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": config.namespace,
        "resources": [MANIFEST],
        "configMapGenerator": [{"name": f"{config.name}-scripts", "files": sorted(scripts)}],
        # Configurations may contain secrets: environment arguments, headers.
        "secretGenerator": [
            {"name": f"{config.name}-configs", "files": sorted(configs)},
            {"name": f"{config.name}-key", "envs": [KEY_FILE]},
        ],
    }
    return {
        MANIFEST: _dump(*objects),
        KUSTOMIZATION: _dump(kustomization),
        KEY_FILE: f"{KEY_VARIABLE}={key}\n",
    }


def find_addresses(layout: Layout, config: KubernetesDeployment) -> dict[str, str]:
    """HOST_i -> name of the pod at place i."""
    names: dict[str, str] = {}
    for tasks in _kinds(layout):
        places = tasks[0].places if tasks[0].is_work else [task.places[0] for task in tasks]
        for index, place in enumerate(places):
            names[f"HOST_{place}"] = f"{_name(tasks[0], layout, config)}-{index}.{config.name}"
    return names


def _kinds(layout: Layout) -> list[list[Task]]:
    """Group tasks into objects: servers of one configuration share one."""
    return [list(tasks) for _, tasks in groupby(layout.tasks, key=lambda task: (task.is_work, task.config))]


def _name(task: Task, layout: Layout, config: KubernetesDeployment) -> str:
    return f"{config.name}-{layout.places[task.places[0]].role}"


def _service(config: KubernetesDeployment) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": config.name, "labels": _labels(config)},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(config)},
    }


def _labels(config: KubernetesDeployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "prime-rl", "app.kubernetes.io/instance": config.name}


def _job(task: Task, layout: Layout, config: KubernetesDeployment) -> Object:
    """A finite task with one pod per place; no retries, since resuming is a new run."""
    rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_FIELD}}}
    pod = _pod(task, layout, config, f"exec bash {MOUNTED}/{task.name}.sh", [rank])
    pod["spec"]["restartPolicy"] = "Never"
    spec = {"completionMode": "Indexed", "completions": len(task.places), "parallelism": len(task.places)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _name(task, layout, config), "labels": _labels(config)},
        "spec": {**spec, "backoffLimit": 0, "template": pod},
    }


def _servers(tasks: list[Task], layout: Layout, config: KubernetesDeployment) -> Object:
    """Replicated servers; the index in the pod's name selects its script."""
    prefix = tasks[0].name.rpartition("_")[0]
    pod = _pod(tasks[0], layout, config, f'exec bash {MOUNTED}/{prefix}_"${{HOSTNAME##*-}}".sh', [])
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": _name(tasks[0], layout, config), "labels": _labels(config)},
        "spec": {
            "serviceName": config.name,
            "replicas": len(tasks),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _role(tasks[0], layout, config)},
            "template": pod,
        },
    }


def _role(task: Task, layout: Layout, config: KubernetesDeployment) -> dict[str, str]:
    return {**_labels(config), "app.kubernetes.io/component": layout.places[task.places[0]].role}


def _pod(task: Task, layout: Layout, config: KubernetesDeployment, command: str, env: list[Object]) -> Object:
    """A pod of a task: its script from the kustomization, the shared directory, its GPUs."""
    num_gpus = layout.places[task.places[0]].num_gpus
    addresses = [{"name": name, "value": value} for name, value in find_addresses(layout, config).items()]
    container: Object = {
        "name": layout.places[task.places[0]].role,
        "image": config.image,
        "command": ["bash", "-c", command],
        "workingDir": str(config.mount_path),
        "env": [*addresses, *env],
        "envFrom": [{"secretRef": {"name": f"{config.name}-key"}}],
        "volumeMounts": [
            {"name": "deployment", "mountPath": MOUNTED, "readOnly": True},
            {"name": "shared", "mountPath": str(config.mount_path)},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if num_gpus:
        container["resources"] = {"limits": {config.gpu_resource: num_gpus}}
    if task.port is not None:
        container["ports"] = [{"containerPort": task.port}]
    sources = [{"configMap": {"name": f"{config.name}-scripts"}}, {"secret": {"name": f"{config.name}-configs"}}]
    volumes = [
        {"name": "deployment", "projected": {"sources": sources}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": config.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(config.shm_gb * 1024)}Mi"}},
    ]
    return {
        "metadata": {"labels": _role(task, layout, config)},
        "spec": {"subdomain": config.name, "containers": [container], "volumes": volumes},
    }


def _dump(*objects: Object) -> str:
    import yaml

    # The JSON round trip removes shared objects, which YAML would write as anchors.
    return str(yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False, width=120))


def submit(files: Path) -> str:
    """Apply the objects; returns the output of kubectl. Raises `ValueError` with its error."""
    try:
        result = subprocess.run(["kubectl", "apply", "-k", str(files)], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(
            f"kubectl is not installed here: run `kubectl apply -k {files}` on a machine that has it"
        ) from None
    if result.returncode:
        raise ValueError(f"kubectl rejected {files}: {result.stderr.strip()}")
    return result.stdout.strip()
