"""Prompt sampling: environment ratios, difficulty pools, curriculum and quarantine. The state is exactly resumable."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from loguru import logger

from prime_rl.configuration.imports import check_arguments, import_function
from prime_rl.orchestrator.config import BufferConfig, OrchestratorConfig
from prime_rl.orchestrator.policy_version import PolicyVersion
from rollouts.training.environments import Environment, Row
from rollouts.training.metrics import reaches
from rollouts.training.rollout_gen.groups import DropReason, Outcome
from rollouts.training.row_digests import encode_row

Prompt = dict[str, Any]  # {"id": position, "env": name, "row": the environment's row}
Curriculum = Callable[..., bool]
TRANSIENT_REASONS = frozenset({DropReason.ENGINE_ERROR, DropReason.TOO_FEW})
MAX_FAILED_BATCHES = 3
"""A prompt dropped for transient reasons in this many batches without a success between them is quarantined."""


class PromptPool(StrEnum):
    """Prompts that are not drawn in normal order."""

    EASY = "easy"
    HARD = "hard"
    QUARANTINED = "quarantined"


@dataclass
class EnvCursor:
    """The rows of one environment, its cursor and its pools."""

    name: str
    rows: Sequence[Row]
    first_id: int
    ratio: float
    cursor: int = 0  # rows visited since the start of epoch 0
    num_drawn: int = 0
    pools: dict[PromptPool, dict[int, None]] = field(default_factory=lambda: {pool: {} for pool in PromptPool})
    """Rows of every pool, as ordered sets."""
    num_offered: Counter[str] = field(default_factory=Counter)
    """Draws by pool while it had rows."""
    num_pool_drawn: Counter[str] = field(default_factory=Counter)
    """Draws by pool from it."""
    _order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Completed passes over the rows."""
        return self.cursor // len(self.rows)

    def next_row(self, seed: int) -> int:
        """Return the row at the cursor and advance. Epoch 0 is in environment order, later epochs are shuffled."""
        epoch, offset = divmod(self.cursor, len(self.rows))
        self.cursor += 1
        if epoch == 0:
            return offset
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{seed}/{self.name}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][offset]

    def move(self, row: int, pool: PromptPool | None) -> bool:
        """Move a row to a pool, or to none; False if it is already there."""
        current = next((name for name, rows in self.pools.items() if row in rows), None)
        if current == pool:
            return False
        if current is not None:
            del self.pools[current][row]
        if pool is not None:
            self.pools[pool][row] = None
        return True

    def next_pool(self, shares: Mapping[PromptPool, float]) -> PromptPool | None:
        """Count a draw, and return the pool that lacks most draws of its share; None if none lacks a whole one.

        Draws while a pool is empty do not count for it: it would get all of them in a row once it has rows.
        """
        filled = [pool for pool in shares if self.pools[pool]]
        self.num_offered.update(filled)
        missing = {pool: shares[pool] * self.num_offered[pool] - self.num_pool_drawn[pool] for pool in filled}
        pool = max(filled, key=missing.__getitem__, default=None)
        return pool if pool is not None and missing[pool] >= 1 else None

    def rotate_pool(self, pool: PromptPool) -> int:
        """Return the oldest row of a pool and move it to the end."""
        self.num_pool_drawn[pool] += 1
        row = next(iter(self.pools[pool]))
        del self.pools[pool][row]
        self.pools[pool][row] = None
        return row

    def pool_rows(self) -> dict[str, list[int]]:
        """The rows of every pool, JSON-ready."""
        return {str(pool): list(rows) for pool, rows in self.pools.items()}

    def pool_draws(self) -> dict[str, list[int]]:
        """Draws of every pool with a share, while it had rows and from it, JSON-ready."""
        return {str(pool): [num, self.num_pool_drawn[pool]] for pool, num in sorted(self.num_offered.items())}

    def is_skipped(self, row: int) -> bool:
        """Whether a row is in a pool and not drawn in normal order."""
        return any(row in rows for rows in self.pools.values())


class PromptBuffer:
    """Draws prompts over all environments; the order depends only on the configuration and the outcomes.

    After n draws each environment has had its ratio of n, to within one. Within an environment rows come in order,
    epoch by epoch. Rows in the easy or hard pool are skipped except for `easy_fraction` and `hard_fraction` of the
    draws, rows that the curriculum defers are skipped for now, and quarantined rows are never drawn again. Rows of
    `references`, environments whose rewards are ignored, are in neither pool.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        config: BufferConfig,
        seed: int,
        version: PolicyVersion,
        references: Collection[str] = (),
    ) -> None:
        self.config = config
        self.seed = seed
        self.version = version
        self.references = references
        self.evicted: Counter[str] = Counter()
        self.envs: list[EnvCursor] = []
        self._rewards: dict[int, float] = {}  # id -> mean reward of its last group, for the curriculum
        self._num_failures: Counter[int] = Counter()
        self._curriculum = load_curriculum(config.curriculum)
        ratios = config.env_ratios or [0.0] * len(environments)
        first_id = 0
        for (name, environment), ratio in zip(environments.items(), ratios, strict=True):
            rows = environment.rows("train")
            if not rows:
                raise ValueError(f"environment {name!r} has no training prompts: check its arguments")
            self.envs.append(EnvCursor(name, rows, first_id, ratio if config.env_ratios else float(len(rows))))
            first_id += len(rows)
        self.fingerprint = self._hash_prompts()  # now: rollouts in this process may change a row in place

    @property
    def epoch_id(self) -> int:
        """Completed passes over the environment with the fewest."""
        return min(env.epoch for env in self.envs)

    @property
    def num_quarantined(self) -> int:
        """Prompts that are no longer drawn."""
        return sum(len(env.pools[PromptPool.QUARANTINED]) for env in self.envs)

    def draw(self) -> tuple[int, Prompt]:
        """Id and prompt of the next draw; `ValueError` if every prompt is quarantined."""
        open_envs = [env for env in self.envs if len(env.pools[PromptPool.QUARANTINED]) < len(env.rows)]
        if not open_envs:
            raise ValueError(
                "every prompt of every environment failed: error/* in metrics.jsonl counts their errors by kind"
            )
        total = sum(env.ratio for env in open_envs)
        num = 1 + sum(env.num_drawn for env in open_envs)
        env = max(open_envs, key=lambda env: num * env.ratio / total - env.num_drawn)
        row = self._draw_row(env)
        env.num_drawn += 1
        return env.first_id + row, self.prompt_at(env.first_id + row)

    def prompt_at(self, position: int) -> Prompt:
        """The prompt with this id."""
        env = self._env_of(position)
        return {"id": position, "env": env.name, "row": dict(env.rows[position - env.first_id])}

    def record_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Move prompts between pools according to the outcomes of one batch."""
        # Repeated failures of a prompt within one batch, as in an outage, count once.
        self._num_failures.update({outcome.position for outcome in outcomes if outcome.reason in TRANSIENT_REASONS})
        for outcome in outcomes:
            env, position = self._env_of(outcome.position), outcome.position
            if outcome.reason == DropReason.ALL_FAILED or self._num_failures[position] >= MAX_FAILED_BATCHES:
                env.move(position - env.first_id, PromptPool.QUARANTINED)
            elif outcome.reward is not None:
                self._num_failures.pop(position, None)
                is_reference = env.name in self.references
                if self._curriculum is not None and not is_reference:
                    self._rewards[position] = outcome.reward
                pool = None if is_reference else self._pool_for(outcome.reward)
                if env.move(position - env.first_id, pool) and pool is not None:
                    self.evicted[pool] += 1

    def take_metrics(self) -> dict[str, float]:
        """Pool sizes as shares of all prompts, and the prompts evicted since the last call."""
        total = sum(len(env.rows) for env in self.envs)
        sizes = {pool: sum(len(env.pools[pool]) for env in self.envs) for pool in PromptPool}
        metrics = {f"pool/{pool}": size / total for pool, size in sizes.items()}
        metrics["pool/normal"] = 1 - sum(sizes.values()) / total
        metrics |= {
            f"evicted_examples/{pool}": float(self.evicted[pool]) for pool in (PromptPool.EASY, PromptPool.HARD)
        }
        self.evicted.clear()
        return metrics

    def save_state(self) -> dict[str, Any]:
        """JSON-ready: cursors, pools, failure counts, and a fingerprint of the prompts."""
        return {
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "envs": [[env.name, env.cursor, env.num_drawn, env.pool_rows(), env.pool_draws()] for env in self.envs],
            "shares": self._list_shares(),
            "strikes": sorted([position, count] for position, count in self._num_failures.items() if count),
            "rewards": sorted(self._rewards.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state; `ValueError` if it belongs to other prompts.

        Draws of a run with other shares do not count: what has a larger share now would get all draws until it has
        that of the whole run.
        """
        if state["fingerprint"] != self.fingerprint:
            names = ", ".join(str(entry[0]) for entry in state["envs"])
            raise ValueError(
                f"the checkpoint belongs to other prompts (environments {names}): resume with the same environments, "
                "arguments and order"
            )
        self.seed, shares = state["seed"], self._list_shares()
        is_same = state.get("shares", shares) == shares  # states of earlier versions have none
        thresholds = {PromptPool.EASY: self.config.easy_threshold, PromptPool.HARD: self.config.hard_threshold}
        for env, (_, cursor, num_drawn, pools, *draws) in zip(self.envs, state["envs"], strict=True):
            env.cursor, env.num_drawn = cursor, num_drawn if is_same else 0
            counts = draws[0] if draws and is_same else {}  # without them shares count from here on
            env.num_offered = Counter({pool: offered for pool, (offered, _) in counts.items()})
            env.num_pool_drawn = Counter({pool: drawn for pool, (_, drawn) in counts.items()})
            env.pools = {PromptPool(pool): dict.fromkeys(rows) for pool, rows in pools.items()}
            for pool, threshold in thresholds.items():
                if threshold is None or env.name in self.references:  # nothing would ever leave it
                    env.pools[pool] = {}
        self._num_failures = Counter(dict(state["strikes"]))
        rewards = dict(state["rewards"]).items()
        self._rewards = {at: reward for at, reward in rewards if self._env_of(at).name not in self.references}

    def _list_shares(self) -> list[float]:
        """The ratios of the environments and the fractions of the pools, JSON-ready."""
        return [*(env.ratio for env in self.envs), self.config.easy_fraction, self.config.hard_fraction]

    def _hash_prompts(self) -> str:
        """Hash over names and rows."""
        digest = hashlib.blake2b(digest_size=16)
        for env in self.envs:
            digest.update(f"{env.name}:{len(env.rows)}\n".encode())
            for row in env.rows:
                digest.update(encode_row(row) + b"\n")
        return digest.hexdigest()

    def _draw_row(self, env: EnvCursor) -> int:
        shares = {PromptPool.EASY: self.config.easy_fraction, PromptPool.HARD: self.config.hard_fraction}
        if (pool := env.next_pool(shares)) is not None:
            return env.rotate_pool(pool)
        if sum(map(len, env.pools.values())) == len(env.rows):
            logger.warning(f"All prompts of environment {env.name!r} are in the easy or hard pool: emptied the pools")
            env.pools |= {PromptPool.EASY: {}, PromptPool.HARD: {}}
        deferred: int | None = None
        for _ in range(2 * len(env.rows)):
            row = env.next_row(self.seed)
            if env.is_skipped(row):
                continue
            if self._is_due(env, row):
                return row
            deferred = row if deferred is None else deferred
        assert deferred is not None, "two passes visit every row"
        return deferred  # the curriculum defers every row: draw the first one anyway

    def _is_due(self, env: EnvCursor, row: int) -> bool:
        if self._curriculum is None:
            return True
        last = self._rewards.get(env.first_id + row)
        return bool(self._curriculum(dict(env.rows[row]), env=env.name, version=self.version.live, reward=last))

    def _pool_for(self, reward: float) -> PromptPool | None:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        if easy is not None and reaches(reward, easy):
            return PromptPool.EASY
        return PromptPool.HARD if hard is not None and reaches(hard, reward) else None

    def _env_of(self, position: int) -> EnvCursor:
        return next(env for env in reversed(self.envs) if env.first_id <= position)


def build_buffer(
    config: OrchestratorConfig, environments: Mapping[str, Environment], version: PolicyVersion
) -> PromptBuffer:
    """Build the prompt buffer of the training environments."""
    seed = config.seed if config.buffer.seed is None else config.buffer.seed
    references = [env.display_name for env in config.env if env.teacher == "reference"]
    return PromptBuffer(environments, config.buffer, seed, version, references)


def load_curriculum(path: str | None) -> Curriculum | None:
    """The curriculum function at `module:name`; `ValueError` if there is none, or if it takes other arguments."""
    if path is None:
        return None
    function = import_function(path, "buffer.curriculum")
    check_arguments(function, path, "buffer.curriculum", dict.fromkeys(("env", "version", "reward")), ["row"])
    return function
