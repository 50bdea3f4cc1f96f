"""An environment in the process of the orchestrator (`env.num_workers = 0`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prime_rl.envs.worker import decode_finished, run_encoded
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.protocol import Environment, Row, fail_rollout


class InProcessEnvironment:
    """An environment whose exceptions fail the rollouts of their group, as in a worker process."""

    def __init__(self, environment: Environment) -> None:
        self.id, self._environment = environment.id, environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def rows(self, split: str = "train") -> list[Row]:
        """See `Environment.rows`."""
        return self._environment.rows(split)

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`."""
        error = ("", "")
        for _ in range(retries + 1):
            message = await run_encoded(self._environment, 0, row, client, model, sampling_args, retries)
            finished = decode_finished(message)
            if finished.error is None:
                return finished.rollouts
            error = finished.error
        return [fail_rollout(row, args, *error) for args in sampling_args]
