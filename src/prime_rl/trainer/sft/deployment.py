"""Deployment layout of `sft`."""

from __future__ import annotations

from dataclasses import replace

from prime_rl.deployment.config import LocalDeployment
from prime_rl.deployment.layout import Layout, Node, build_rank_task, split_first_options
from prime_rl.trainer.config import SFTConfig
from prime_rl.utils.pydantic_config import BaseConfig


def build_layout(config: SFTConfig) -> tuple[Layout, dict[str, BaseConfig]]:
    """One task over all nodes, and its config; `ValueError` for inconsistent node counts."""
    nodes = config.deployment
    assert not isinstance(nodes, LocalDeployment)
    for key in ("num_infer_nodes", "num_infer_replicas", "num_teacher_nodes"):
        if getattr(nodes, key):
            raise ValueError(f"deployment.{key} = {getattr(nodes, key)}: sft starts no servers, leave it out")
    num_ranks = nodes.num_train_nodes * nodes.gpus_per_node or config.parallel.num_ranks
    config.parallel.resolve(num_ranks)
    task = build_rank_task("sft", "prime_rl.trainer.sft.train", "sft.toml", nodes, num_ranks)
    # The task shortens the schedule itself: its file sets only given keys, and shortened ones would be fitted again.
    local = config.model_copy(update={"deployment": LocalDeployment(), "scheduler": config.whole_scheduler})
    local, first_options = split_first_options(local, config.find_single_use())
    task = replace(task, first_options=first_options)
    return Layout((Node("sft", nodes.gpus_per_node),) * nodes.num_train_nodes, (task,)), {"sft": local}
