"""Configuration of the deployment of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from prime_rl.configuration.schema import KEEPS_CASE
from prime_rl.utils.pydantic_config import BaseConfig

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
Word = Annotated[str, StringConstraints(pattern=r"^[^\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class LocalDeployment(BaseConfig):
    """All processes on this machine."""

    type: Literal["local"] = "local"


class NodesConfig(BaseConfig):
    """Number of nodes per role."""

    num_train_nodes: int = Field(default=1, ge=1)
    """Trainer nodes; the orchestrator runs on the first."""

    num_infer_nodes: int = Field(default=0, ge=0)
    """Inference nodes; 0: single-node run with the GPU lists of `rl`."""

    num_infer_replicas: int | None = Field(default=None, ge=1)
    """Total number of inference servers; unset: as many as fit, with parallel.tp * parallel.dp GPUs each."""

    num_teacher_nodes: int = Field(default=0, ge=0)
    """Nodes of the teacher's servers, if it has its own servers."""

    gpus_per_node: int = Field(default=8, ge=0)
    """GPUs per node; 0: CPU-only nodes."""

    master_port: int = Field(default=29500, ge=1, le=65535)
    """Rendezvous port on the first trainer node."""

    env: Annotated[dict[Variable, str], KEEPS_CASE] = {}
    """Environment variables of every process, such as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""


class SlurmDeployment(NodesConfig):
    """One Slurm job over all nodes (sbatch); requires a shared file system."""

    type: Literal["slurm"] = "slurm"

    job_name: Label = "prime-rl"
    """Job name."""

    partition: Word | None = None
    """Partition; unset: the cluster's default."""

    time: str | None = Field(default=None, pattern=r"^[0-9:-]+$")
    """Time limit, such as 30 (minutes), 12:00:00 or 2-00:00:00; unset: the partition's."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], Word] = {}
    """Additional #SBATCH options by their long names, such as account, qos or mem."""

    template: Path | None = None
    """Custom Jinja2 template of the job (docs/deployment.md)."""


class RayDeployment(NodesConfig):
    """A Ray placement group with one bundle per node; requires a shared file system."""

    type: Literal["ray"] = "ray"

    address: str = "auto"
    """http://host:8265 submits the job there; host:port or auto (local cluster) runs the driver here."""

    num_cpus: float = Field(default=1, gt=0)
    """CPUs reserved on each node."""

    timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the nodes."""


class KubernetesDeployment(NodesConfig):
    """Jobs for trainer and orchestrator, StatefulSets of servers, combined by kustomize."""

    type: Literal["kubernetes"] = "kubernetes"

    name: Label = "prime-rl"
    """Name prefix of all objects."""

    namespace: Label = "default"
    """Existing namespace."""

    image: str
    """Image with this package installed."""

    claim: Label
    """PersistentVolumeClaim that every pod can write (ReadWriteMany)."""

    mount_path: Path = Path("/shared")
    """Mount path of the claim; relative paths of the configuration are resolved there."""

    gpu_resource: str = "nvidia.com/gpu"
    """Resource name of a GPU."""

    shm_gb: float = Field(default=16, gt=0)
    """Size of /dev/shm, used for communication between the ranks of a pod."""


Deployment = Annotated[
    LocalDeployment | SlurmDeployment | RayDeployment | KubernetesDeployment, Field(discriminator="type")
]
Cluster = SlurmDeployment | RayDeployment | KubernetesDeployment
