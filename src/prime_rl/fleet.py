"""Where the processes of `rl` go when they have several machines.

 place 0 .. T-1          T ..                          then
+----------------+      +---------------------+       +-----------------+
| trainer ranks  |      | inference servers   |       | teacher servers |
| orchestrator   |      | (GPUs / (tp * dp))  |       |                 |
+----------------+      +---------------------+       +-----------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prime_rl.config import RLConfig, given_gpus, has_versions
from prime_rl.deployment.config import Cluster, KubernetesDeployment, LocalDeployment, NodesConfig
from prime_rl.deployment.layout import KEY_VARIABLE, Layout, Place, Task, lay_out_ranks
from prime_rl.inference.config import InferenceConfig
from prime_rl.utils.pydantic_config import BaseConfig

TRAINER, ORCHESTRATOR, SERVER = (
    "prime_rl.trainer.rl.train",
    "prime_rl.orchestrator.orchestrator",
    "prime_rl.inference.server",
)


@dataclass(frozen=True)
class Servers:
    """Servers of one configuration: where they are and what they listen on."""

    name: str
    config: InferenceConfig
    places: tuple[int, ...]
    gpus: tuple[tuple[int, ...], ...]
    first_port: int

    @property
    def urls(self) -> str:
        """Their addresses, as an option takes them."""
        return ",".join(f"http://$HOST_{place}:{self.first_port + i}/v1" for i, place in enumerate(self.places))


def is_whole(deployment: NodesConfig, has_servers: bool) -> bool:
    """Whether one machine does everything, so that `rl` itself is started there."""
    return deployment.num_train_nodes == 1 and deployment.num_infer_nodes == 0 and has_servers


def lay_out(config: RLConfig) -> tuple[Layout, dict[str, BaseConfig]]:
    """Places and tasks of a run, and the configurations that they read; `ValueError` for machines that do not fit."""
    deployment = config.deployment
    assert not isinstance(deployment, LocalDeployment)
    if is_whole(deployment, config.inference is not None):
        return lay_out_whole(config, deployment)
    check_machines(config, deployment)
    places = [Place("trainer", deployment.gpus_per_node)] * deployment.num_train_nodes
    fleets: list[Servers] = []
    for name, server, num_nodes, wanted in (
        ("inference", config.inference, deployment.num_infer_nodes, deployment.num_infer_replicas),
        ("teacher_inference", config.teacher_inference, deployment.num_teacher_nodes, None),
    ):
        if server is not None:
            taken = {fleet.first_port + i for fleet in fleets for i in range(len(fleet.places))}
            port = max([server.server.port, *(number + 1 for number in taken)])
            fleets.append(place_servers(name, server, num_nodes, wanted, deployment, places, port))
    return build_layout(config, deployment, fleets, places)


def lay_out_whole(config: RLConfig, deployment: Cluster) -> tuple[Layout, dict[str, BaseConfig]]:
    """`rl` as it runs here, on one machine of the cluster."""
    if deployment.num_teacher_nodes or deployment.num_infer_replicas:
        raise ValueError(
            "deployment.num_infer_nodes = 0 runs rl whole on one machine: leave num_teacher_nodes and "
            "num_infer_replicas out, or give inference machines of its own"
        )
    local = config.model_copy(update={"deployment": LocalDeployment()})
    task = Task("rl", "prime_rl.rl", "rl.toml", (0,), gpus=None, is_work=True)
    return Layout((Place("rl", deployment.gpus_per_node),), (task,)), {"rl": local}


def check_machines(config: RLConfig, deployment: NodesConfig) -> None:
    """What several machines cannot do, or lack."""
    if given := given_gpus(config):
        raise ValueError(
            f"{next(iter(given))} names GPUs of one machine: on several, deployment.gpus_per_node counts them"
        )
    for name, server, num_nodes in (
        ("inference", config.inference, deployment.num_infer_nodes),
        ("teacher", config.teacher_inference, deployment.num_teacher_nodes),
    ):
        key = "num_infer_nodes" if name == "inference" else "num_teacher_nodes"
        if server is not None and not num_nodes:
            raise ValueError(f"the {name} has no machine: set deployment.{key}")
        if server is None and num_nodes:
            raise ValueError(f"deployment.{key} = {num_nodes} but rl starts no {name} server: leave it out")


def place_servers(
    name: str,
    config: InferenceConfig,
    num_nodes: int,
    wanted: int | None,
    deployment: Cluster,
    places: list[Place],
    port: int,
) -> Servers:
    """Servers side by side on their machines, each with GPUs of its own; adds their places. Pods have one server."""
    size = config.parallel.tp * config.parallel.dp
    room = deployment.gpus_per_node // size if deployment.gpus_per_node else wanted or num_nodes
    if not room:
        raise ValueError(
            f"{name}.parallel: tp * dp = {size} is more than deployment.gpus_per_node = {deployment.gpus_per_node}: "
            "a server does not reach over machines; lower tp or dp and let several servers share the load"
        )
    number = wanted or (room if deployment.gpus_per_node else 1) * num_nodes
    if number % num_nodes or number // num_nodes > room:
        raise ValueError(
            f"deployment.num_infer_replicas = {number} do not fit evenly on {num_nodes} machines with room for {room} "
            "each"
        )
    role, each = name.split("_")[0], number // num_nodes
    size = size if deployment.gpus_per_node else 0
    if isinstance(deployment, KubernetesDeployment):
        each, num_nodes = 1, number
    first = len(places)
    places += [Place(role, size * each)] * num_nodes
    where = tuple(first + i // each for i in range(number))
    gpus = tuple(tuple(range(i % each * size, (i % each + 1) * size)) for i in range(number))
    return Servers(name, config, where, gpus, port)


def build_layout(
    config: RLConfig, deployment: Cluster, fleets: Sequence[Servers], places: list[Place]
) -> tuple[Layout, dict[str, BaseConfig]]:
    """The tasks, trainer first."""
    dims = config.trainer.parallel
    num_ranks = deployment.num_train_nodes * deployment.gpus_per_node or dims.num_ranks
    dims.resolve(num_ranks)
    trainer = lay_out_ranks("trainer", TRAINER, "trainer.toml", deployment, num_ranks)
    at = 0
    if isinstance(deployment, KubernetesDeployment):
        at = len(places)
        places.append(Place("orchestrator"))
    options = find_servers(config, fleets)
    if config.transport.type == "zmq":
        options += ["--transport.host", f"$HOST_{at}"]
        trainer = replace(trainer, options=("--transport.host", f"$HOST_{at}"))
    if config.weight_broadcast.type != "filesystem":
        trainer = replace(trainer, options=(*trainer.options, "--weight-broadcast.host", "$HOST_0"))
    conductor = Task("orchestrator", ORCHESTRATOR, "orchestrator.toml", (at,), tuple(options), is_work=True)
    tasks = [trainer, conductor, *(task for fleet in fleets for task in build_tasks(config, fleet))]
    configs: dict[str, BaseConfig] = {"trainer": config.trainer, "orchestrator": config.orchestrator}
    configs |= {fleet.name: fleet.config for fleet in fleets}
    return Layout(tuple(places), tuple(tasks)), configs


def build_tasks(config: RLConfig, fleet: Servers) -> list[Task]:
    """One command per server."""
    key = fleet.config.server.api_key_var or KEY_VARIABLE
    options = ["--server.host", "0.0.0.0", "--server.api-key-var", key]
    if fleet.name == "inference" or has_versions(config):
        # Whoever starts, or starts again, speaks for no weights before the orchestrator has told it which.
        options += ["--server.await-weights", "true"]
    return [
        Task(
            f"{fleet.name}_{i}",
            SERVER,
            f"{fleet.name}.toml",
            (place,),
            (*options, "--server.port", str(fleet.first_port + i), "--name", f"{fleet.name}_{i}"),
            fleet.gpus[i],
            max_restarts=config.max_restarts,
            port=fleet.first_port + i,
        )
        for i, place in enumerate(fleet.places)
    ]


def find_servers(config: RLConfig, fleets: Sequence[Servers]) -> list[str]:
    """Options by which the orchestrator finds the servers of student and teacher."""
    options: list[str] = []
    teacher, student = config.orchestrator.teacher_model, config.orchestrator.client.base_url
    for fleet in fleets:
        sections = ["client" if fleet.name == "inference" else "teacher_model.client"]
        if fleet.name == "inference" and teacher is not None and teacher.client.base_url == student:
            sections.append("teacher_model.client")
        key = fleet.config.server.api_key_var or KEY_VARIABLE
        for section in sections:
            options += [f"--{section}.base-url", fleet.urls, f"--{section}.api-key-var", key]
    return options
