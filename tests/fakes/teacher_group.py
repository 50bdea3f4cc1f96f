"""One group of rollouts with their teacher, for the tests of teachers behind our engine and behind vLLM."""

from __future__ import annotations

import anyio

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.teacher import Teacher, build_teacher
from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.rollout_manager import GroupGenerator
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import build_engines
from prime_rl.utils.client import build_clients
from rollouts.training.environments import Environment
from rollouts.training.types import Sample


def roll_out(config: OrchestratorConfig, environment: Environment) -> tuple[list[Sample], Teacher]:
    """The samples of one group that went through environment (called `rows` in the config), engine and teacher."""
    teacher = build_teacher(config)
    assert teacher is not None

    async def run() -> list[Sample]:
        clients = build_clients(config.client, seq_len=config.seq_len)
        servers = ServerPool(clients, build_engines(config.client), PolicyVersion(), config.versions_dir)
        generator = GroupGenerator(config, {"rows": environment}, servers, teacher)
        try:
            return await generator(0, {"id": 0, "env": "rows", "row": environment.rows()[0]})
        finally:
            for client in (*clients, *teacher.scorer.clients):
                await client.close()

    return anyio.run(run), teacher
