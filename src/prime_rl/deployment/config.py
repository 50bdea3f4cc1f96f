"""Configuration of where a run's processes are started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from prime_rl.utils.pydantic_config import BaseConfig

Label = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
Word = Annotated[str, StringConstraints(pattern=r"^[^\n\r]*$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class LocalDeployment(BaseConfig):
    """Everything on this machine."""

    type: Literal["local"] = "local"


class NodesConfig(BaseConfig):
    """How many machines do what."""

    num_train_nodes: int = Field(default=1, ge=1)
    """Machines of the trainer; the orchestrator runs on the first."""

    num_infer_nodes: int = Field(default=0, ge=0)
    """Machines of inference servers; 0: `rl` runs whole on one machine, by its own GPU lists."""

    num_infer_replicas: int | None = Field(default=None, ge=1)
    """Inference servers, all together; unset: as many as the GPUs hold, parallel.tp * parallel.dp each."""

    num_teacher_nodes: int = Field(default=0, ge=0)
    """Machines of the teacher's servers, where there is a teacher with servers of its own."""

    gpus_per_node: int = Field(default=8, ge=0)
    """GPUs that each machine gives; 0: machines without."""

    master_port: int = Field(default=29500, ge=1, le=65535)
    """Port on the first trainer machine where the ranks meet."""

    env: dict[Variable, str] = {}
    """Variables of every process, such as NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""


class SlurmDeployment(NodesConfig):
    """One Slurm job over all machines, by sbatch; they share a file system."""

    type: Literal["slurm"] = "slurm"

    job_name: Label = "prime-rl"
    """Name of the job."""

    partition: Word | None = None
    """Partition; unset: the cluster's own choice."""

    time: str | None = Field(default=None, pattern=r"^[0-9:-]+$")
    """Limit, such as 30 (minutes), 12:00:00 or 2-00:00:00; unset: the partition's."""

    options: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")], Word] = {}
    """Further #SBATCH options by their long names, such as account, qos or mem."""

    template: Path | None = None
    """A Jinja2 template of the job instead of ours (docs/deployment.md)."""


class RayDeployment(NodesConfig):
    """A placement group with one bundle per machine of a Ray cluster; they share a file system."""

    type: Literal["ray"] = "ray"

    address: str = "auto"
    """http://host:8265 hands the job in there; host:port or auto (this machine's) runs its driver here."""

    num_cpus: float = Field(default=1, gt=0)
    """CPUs that are claimed on each machine."""

    timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the machines."""


class KubernetesDeployment(NodesConfig):
    """Jobs for trainer and orchestrator, a StatefulSet of inference servers, put together by kustomize."""

    type: Literal["kubernetes"] = "kubernetes"

    name: Label = "prime-rl"
    """What all objects are called, the process behind it."""

    namespace: Label = "default"
    """Namespace, which exists."""

    image: str
    """Image with this package installed."""

    claim: Label
    """PersistentVolumeClaim that every pod can write (ReadWriteMany)."""

    mount_path: Path = Path("/shared")
    """Where the claim is mounted; relative paths of the configuration begin there."""

    gpu_resource: str = "nvidia.com/gpu"
    """What the cluster calls a GPU."""

    shm_gb: float = Field(default=16, gt=0)
    """Size of /dev/shm, by which ranks of one pod talk."""


Deployment = Annotated[
    LocalDeployment | SlurmDeployment | RayDeployment | KubernetesDeployment, Field(discriminator="type")
]
Cluster = SlurmDeployment | RayDeployment | KubernetesDeployment
