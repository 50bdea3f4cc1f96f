"""Placement of the processes of `rl` on several nodes.

 node 0 .. T-1           T ..                          then
+----------------+      +---------------------+       +-----------------+
| trainer ranks  |      | inference servers   |       | teacher servers |
| orchestrator   |      | (GPUs / (tp * dp))  |       |                 |
+----------------+      +---------------------+       +-----------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from prime_rl.config import RLConfig, given_gpus, teacher_follows_policy
from prime_rl.deployment.config import Cluster, KubernetesDeployment, LocalDeployment, NodesConfig
from prime_rl.deployment.layout import KEY_VARIABLE, Layout, Node, Task, build_rank_task, split_first_options
from prime_rl.inference.config import InferenceConfig
from prime_rl.launcher.output_dir import find_single_use
from prime_rl.runtime.http_access import LOOPBACK
from prime_rl.utils.pydantic_config import BaseConfig

TRAINER, ORCHESTRATOR, SERVER = (
    "prime_rl.trainer.rl.train",
    "prime_rl.orchestrator.orchestrator",
    "prime_rl.inference.server",
)


@dataclass(frozen=True)
class Servers:
    """Servers of one configuration, spread evenly over nodes of their own, each with its own GPUs and port."""

    name: str
    config: InferenceConfig
    first_node: int
    first_port: int
    number: int
    per_node: int
    num_gpus: int
    """GPUs of each server."""

    @property
    def nodes(self) -> list[Node]:
        """Their nodes."""
        return [Node(self.name.split("_")[0], self.num_gpus * self.per_node)] * (self.number // self.per_node)

    @property
    def urls(self) -> str:
        """Comma-separated addresses, as an option value."""
        return ",".join(f"http://$HOST_{self.find_node(i)}:{self.first_port + i}/v1" for i in range(self.number))

    @property
    def api_key_var(self) -> str:
        """Environment variable with the API key."""
        return self.config.server.api_key_var or KEY_VARIABLE

    def find_node(self, i: int) -> int:
        """The node of server `i`."""
        return self.first_node + i // self.per_node

    def find_gpus(self, i: int) -> tuple[int, ...]:
        """The GPUs of server `i` on its node."""
        first = i % self.per_node * self.num_gpus
        return tuple(range(first, first + self.num_gpus))


def is_single_node(deployment: NodesConfig, has_servers: bool) -> bool:
    """Whether the run uses a single node, on which `rl` itself is started."""
    return deployment.num_train_nodes == 1 and deployment.num_infer_nodes == 0 and has_servers


def plan_cluster(config: RLConfig) -> tuple[Layout, dict[str, BaseConfig]]:
    """Nodes and tasks of a run and their configurations; `ValueError` if the nodes do not fit."""
    deployment = config.deployment
    assert not isinstance(deployment, LocalDeployment)
    if is_single_node(deployment, config.inference is not None):
        return build_single_node_layout(config, deployment)
    check_nodes(config, deployment)
    nodes = [Node("trainer", deployment.gpus_per_node)] * deployment.num_train_nodes
    servers: list[Servers] = []
    for name, server, num_nodes, num_replicas in (
        ("inference", config.inference, deployment.num_infer_nodes, deployment.num_infer_replicas),
        ("teacher_inference", config.teacher_inference, deployment.num_teacher_nodes, None),
    ):
        if server is None:
            continue
        gpus_per_node = 0 if server.backend == "sglang" else deployment.gpus_per_node  # SGLang has its own
        number = count_servers(name, server, gpus_per_node, num_nodes, num_replicas)
        port = max([server.server.port, *(group.first_port + group.number for group in servers)])
        per_node = 1 if isinstance(deployment, KubernetesDeployment) else number // num_nodes  # a server per pod
        num_gpus = server.parallel.tp * server.parallel.dp if gpus_per_node else 0
        servers.append(Servers(name, server, len(nodes), port, number, per_node, num_gpus))
        nodes += servers[-1].nodes
    return build_layout(config, deployment, servers, nodes)


def build_single_node_layout(config: RLConfig, deployment: Cluster) -> tuple[Layout, dict[str, BaseConfig]]:
    """`rl` as on this machine, on one node of the cluster."""
    if deployment.num_teacher_nodes or deployment.num_infer_replicas:
        raise ValueError(
            "deployment.num_infer_nodes = 0 runs rl on a single node: leave num_teacher_nodes and "
            "num_infer_replicas out, or set num_infer_nodes"
        )
    # Steps that --clean removes are removed at submission where possible: a job that is queued again keeps its own.
    cleans = config.clean and isinstance(deployment, KubernetesDeployment)
    # `rl` shortens the schedule itself: its file sets only given keys, and shortened ones would be fitted again.
    trainer = config.trainer.model_copy(update={"scheduler": config.trainer.whole_scheduler})
    local = config.model_copy(update={"deployment": LocalDeployment(), "clean": cleans, "trainer": trainer})
    local, first_options = split_first_options(local, find_single_use(config))
    task = Task("rl", "prime_rl.rl", "rl.toml", (0,), first_options=first_options, gpus=None, is_work=True)
    return Layout((Node("rl", deployment.gpus_per_node),), (task,)), {"rl": local}


def check_nodes(config: RLConfig, deployment: NodesConfig) -> None:
    """`ValueError` for keys that multi-node runs do not support, and for missing nodes."""
    if given := given_gpus(config):
        raise ValueError(f"{next(iter(given))} applies to one machine: on several, set deployment.gpus_per_node")
    for name, server, num_nodes in (
        ("inference", config.inference, deployment.num_infer_nodes),
        ("teacher", config.teacher_inference, deployment.num_teacher_nodes),
    ):
        key = "num_infer_nodes" if name == "inference" else "num_teacher_nodes"
        if server is not None and not num_nodes:
            raise ValueError(f"{name} has no nodes: set deployment.{key}")
        if server is None and num_nodes:
            raise ValueError(f"deployment.{key} = {num_nodes} but rl starts no {name} server: leave it out")


def count_servers(
    name: str, config: InferenceConfig, gpus_per_node: int, num_nodes: int, num_replicas: int | None
) -> int:
    """Number of servers on `num_nodes` nodes: `num_replicas`, else as many as fit; `ValueError` if they do not fit."""
    size = config.parallel.tp * config.parallel.dp
    capacity = gpus_per_node // size if gpus_per_node else num_replicas or num_nodes
    if not capacity:
        raise ValueError(
            f"{name}.parallel: tp * dp = {size} is more than deployment.gpus_per_node = {gpus_per_node}: "
            "a server cannot span nodes; lower tp or dp and use several servers"
        )
    number = num_replicas or (capacity if gpus_per_node else 1) * num_nodes
    if number % num_nodes or number // num_nodes > capacity:
        raise ValueError(
            f"deployment.num_infer_replicas = {number} does not fit evenly on {num_nodes} nodes with capacity for "
            f"{capacity} each"
        )
    if config.backend == "sglang":
        check_gateways(name, str(config.sglang.base_url), number, num_nodes)
    return number


def check_gateways(name: str, sglang_url: str, number: int, num_nodes: int) -> None:
    """`ValueError` if several gateways would update the weights of one SGLang server."""
    if (number // num_nodes if urlsplit(sglang_url).hostname in LOOPBACK else number) > 1:
        raise ValueError(
            f"{name}.sglang.base_url = {sglang_url} is one SGLang server, but the deployment starts {number} gateways: "
            "use one node for them, or the loopback address if each node runs an SGLang server; leave "
            "num_infer_replicas out"
        )


def build_layout(
    config: RLConfig, deployment: Cluster, servers: Sequence[Servers], nodes: list[Node]
) -> tuple[Layout, dict[str, BaseConfig]]:
    """Tasks and configurations, trainer first."""
    dims = config.trainer.parallel
    num_ranks = deployment.num_train_nodes * deployment.gpus_per_node or dims.num_ranks
    dims.resolve(num_ranks)
    single_use = config.trainer.find_single_use()
    trainer_config, first_options = split_first_options(config.trainer, single_use)
    trainer = build_rank_task("trainer", TRAINER, "trainer.toml", deployment, num_ranks)
    trainer = replace(trainer, first_options=first_options)
    at = 0
    if isinstance(deployment, KubernetesDeployment):
        at = len(nodes)
        nodes.append(Node("orchestrator"))
    options = build_server_options(config, servers)
    if config.transport.type == "zmq":
        options += ["--transport.host", f"$HOST_{at}"]
        trainer = replace(trainer, options=("--transport.host", f"$HOST_{at}"))
    if config.weight_broadcast.type != "filesystem":
        trainer = replace(trainer, options=(*trainer.options, "--weight-broadcast.host", "$HOST_0"))
    orchestrator_config, first_options = split_first_options(
        config.orchestrator, {key: -1 for key in single_use if key == "ckpt.resume_step"}
    )
    orchestrator = Task("orchestrator", ORCHESTRATOR, "orchestrator.toml", (at,), tuple(options), is_work=True)
    orchestrator = replace(orchestrator, first_options=first_options)
    tasks = [trainer, orchestrator, *(task for group in servers for task in build_tasks(config, group))]
    configs: dict[str, BaseConfig] = {"trainer": trainer_config, "orchestrator": orchestrator_config}
    configs |= {group.name: group.config for group in servers}
    return Layout(tuple(nodes), tuple(tasks)), configs


def build_tasks(config: RLConfig, group: Servers) -> list[Task]:
    """One command per server."""
    options = ["--server.host", "0.0.0.0", "--server.api-key-var", group.api_key_var]
    if group.name == "inference" or teacher_follows_policy(config):
        # A (re)started server rejects requests until the orchestrator has set its weights version.
        options += ["--server.wait-for-weights", "true"]
    return [
        Task(
            f"{group.name}_{i}",
            SERVER,
            f"{group.name}.toml",
            (group.find_node(i),),
            (*options, "--server.port", str(group.first_port + i), "--name", f"{group.name}_{i}"),
            group.find_gpus(i),
            max_restarts=config.max_restarts,
            port=group.first_port + i,
            is_optional=group.name == "inference" and config.orchestrator.min_servers is not None,
        )
        for i in range(group.number)
    ]


def build_server_options(config: RLConfig, servers: Sequence[Servers]) -> list[str]:
    """Orchestrator options with the addresses of the student's and the teacher's servers."""
    options: list[str] = []
    teacher, student = config.orchestrator.teacher_model, config.orchestrator.client.base_url
    for group in servers:
        sections = ["client" if group.name == "inference" else "teacher_model.client"]
        if group.name == "inference" and teacher is not None and teacher.client.base_url == student:
            sections.append("teacher_model.client")
        for section in sections:
            options += [f"--{section}.base-url", group.urls, f"--{section}.api-key-var", group.api_key_var]
    return options
