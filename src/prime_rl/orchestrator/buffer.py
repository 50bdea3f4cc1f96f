"""Which prompt comes next: environments mixed by ratio, difficulty pools, curriculum, quarantine; exactly resumable."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from prime_rl.orchestrator.config import BufferConfig
from rollouts.training.environments import Environment, Row
from rollouts.training.rollout_gen.groups import Outcome

Prompt = dict[str, Any]  # {"id": position, "env": name, "row": the environment's row}
Curriculum = Callable[..., bool]
POISON = "prompt failed"  # none of a prompt's rollouts succeeded
STRIKES = ("engine failed", "too few rollouts", "overtaken")  # may be bad luck, but not in batch after batch
MAX_STRIKES = 3
NORMAL, POOLS = "normal", ("easy", "hard", "quarantined")


@dataclass
class Shelf:
    """The rows of one environment, and which of them may be drawn."""

    name: str
    rows: Sequence[Row]
    first_id: int
    ratio: float
    cursor: int = 0  # rows looked at since the beginning of epoch 0
    num_drawn: int = 0
    pools: dict[str, dict[int, None]] = field(default_factory=lambda: {pool: {} for pool in POOLS})  # ordered sets
    _order: tuple[int, list[int]] | None = None

    @property
    def epoch(self) -> int:
        """Times the rows have been gone through."""
        return self.cursor // len(self.rows)

    def next_row(self, seed: int) -> int:
        """The row at the cursor, which moves on; epoch 0 in the environment's order, later ones shuffled."""
        epoch, offset = divmod(self.cursor, len(self.rows))
        self.cursor += 1
        if epoch == 0:
            return offset
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{seed}/{self.name}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][offset]

    def move(self, row: int, pool: str) -> bool:
        """Put a row into a pool; False when it is there already."""
        here = next((name for name, rows in self.pools.items() if row in rows), NORMAL)
        if here == pool:
            return False
        self.pools.get(here, {}).pop(row, None)
        if pool != NORMAL:
            self.pools[pool][row] = None
        return True

    def take_from(self, pool: str) -> int:
        """The row of a pool that waited longest; it stays there, as the last."""
        row = next(iter(self.pools[pool]))
        del self.pools[pool][row]
        self.pools[pool][row] = None
        return row

    def is_barred(self, row: int) -> bool:
        """Whether a row is passed over."""
        return any(row in rows for rows in self.pools.values())


class PromptBuffer:
    """Draws prompts over all environments; the order is a function of configuration and outcomes alone.

    Environments take turns so that after n draws each has had its ratio of n, to within one. Within one, rows come in
    order, epoch after epoch; rows in the easy or hard pool are passed over, but for the share that their fraction
    asks for; rows that the curriculum holds back wait; quarantined rows never come again.
    """

    def __init__(self, environments: Mapping[str, Environment], config: BufferConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.version = 0  # what the curriculum is told; set by the loop
        self.evicted: Counter[str] = Counter()
        self.shelves: list[Shelf] = []
        self._rewards: dict[int, float] = {}  # id -> mean reward of its last group, kept for the curriculum
        self._strikes: Counter[int] = Counter()
        self._curriculum = load_curriculum(config.curriculum)
        ratios = config.env_ratios or [0.0] * len(environments)
        first_id = 0
        for (name, environment), ratio in zip(environments.items(), ratios, strict=True):
            rows = environment.rows("train")
            if not rows:
                raise ValueError(f"environment {name!r} has no training prompts: check its arguments")
            self.shelves.append(Shelf(name, rows, first_id, ratio if config.env_ratios else float(len(rows))))
            first_id += len(rows)

    @property
    def epoch_id(self) -> int:
        """Whole passes over the environment that has had the fewest."""
        return min(shelf.epoch for shelf in self.shelves)

    @property
    def num_quarantined(self) -> int:
        """Prompts that are not drawn any more."""
        return sum(len(shelf.pools["quarantined"]) for shelf in self.shelves)

    def draw(self) -> tuple[int, Prompt]:
        """Id and prompt of the next one; `ValueError` when every prompt is quarantined."""
        open_shelves = [shelf for shelf in self.shelves if len(shelf.pools["quarantined"]) < len(shelf.rows)]
        if not open_shelves:
            raise ValueError("every prompt of every environment failed: see the errors in samples and log")
        total = sum(shelf.ratio for shelf in open_shelves)
        num = 1 + sum(shelf.num_drawn for shelf in open_shelves)
        shelf = max(open_shelves, key=lambda shelf: num * shelf.ratio / total - shelf.num_drawn)
        row = self._draw_row(shelf)
        shelf.num_drawn += 1
        return shelf.first_id + row, self.prompt_at(shelf.first_id + row)

    def prompt_at(self, position: int) -> Prompt:
        """The prompt with this id."""
        shelf = self._shelf_of(position)
        return {"id": position, "env": shelf.name, "row": dict(shelf.rows[position - shelf.first_id])}

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Move prompts between pools by what became of their groups in one batch."""
        # An outage hits a prompt many times within a batch: that is one strike.
        self._strikes.update({outcome.position for outcome in outcomes if outcome.reason in STRIKES})
        for outcome in outcomes:
            shelf, position = self._shelf_of(outcome.position), outcome.position
            if outcome.reason == POISON or self._strikes[position] >= MAX_STRIKES:
                shelf.move(position - shelf.first_id, "quarantined")
            elif outcome.reward is not None:
                self._strikes.pop(position, None)
                if self._curriculum is not None:
                    self._rewards[position] = outcome.reward
                pool = self._pool_for(outcome.reward)
                if shelf.move(position - shelf.first_id, pool) and pool != NORMAL:
                    self.evicted[pool] += 1

    def take_metrics(self) -> dict[str, float]:
        """Sizes of the pools as shares of all prompts, and prompts evicted since the last call."""
        total = sum(len(shelf.rows) for shelf in self.shelves)
        sizes = {pool: sum(len(shelf.pools[pool]) for shelf in self.shelves) for pool in POOLS}
        metrics = {f"pool/{pool}": size / total for pool, size in sizes.items()}
        metrics[f"pool/{NORMAL}"] = 1 - sum(sizes.values()) / total
        metrics |= {f"evicted_examples/{pool}": float(self.evicted[pool]) for pool in ("easy", "hard")}
        self.evicted.clear()
        return metrics

    def save_state(self) -> dict[str, Any]:
        """JSON-ready: cursors, pools, strikes; carries what is needed to notice other data."""
        return {
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "envs": [
                [s.name, s.cursor, s.num_drawn, {pool: list(rows) for pool, rows in s.pools.items()}]
                for s in self.shelves
            ],
            "strikes": sorted([position, count] for position, count in self._strikes.items() if count),
            "rewards": sorted(self._rewards.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raises `ValueError` when it belongs to other prompts."""
        if state["fingerprint"] != self.fingerprint:
            names = ", ".join(str(entry[0]) for entry in state["envs"])
            raise ValueError(
                f"the checkpoint belongs to other prompts (environments {names}): resume with the same environments, "
                "arguments and order"
            )
        self.seed = state["seed"]
        for shelf, (_, cursor, num_drawn, pools) in zip(self.shelves, state["envs"], strict=True):
            shelf.cursor, shelf.num_drawn = cursor, num_drawn
            shelf.pools = {pool: dict.fromkeys(rows) for pool, rows in pools.items()}
        self._strikes = Counter(dict(state["strikes"]))
        self._rewards = dict(state["rewards"])

    @property
    def fingerprint(self) -> str:
        """Hash over names and rows."""
        digest = hashlib.blake2b(digest_size=16)
        for shelf in self.shelves:
            digest.update(f"{shelf.name}:{len(shelf.rows)}\n".encode())
            for row in shelf.rows:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return digest.hexdigest()

    def _draw_row(self, shelf: Shelf) -> int:
        for pool, share in (("easy", self.config.easy_fraction), ("hard", self.config.hard_fraction)):
            # The k-th draw of a pool comes when `share` of all draws makes k whole.
            if shelf.pools[pool] and int((shelf.num_drawn + 1) * share) > int(shelf.num_drawn * share):
                return shelf.take_from(pool)
        if sum(map(len, shelf.pools.values())) == len(
            shelf.rows
        ):  # nothing is left to learn from but what was too easy or too hard
            logger.warning(f"environment {shelf.name!r}: all prompts are in the easy or hard pool; all are drawn again")
            shelf.pools |= {"easy": {}, "hard": {}}
        held_back: int | None = None
        for _ in range(2 * len(shelf.rows)):
            row = shelf.next_row(self.seed)
            if shelf.is_barred(row):
                continue
            if self._is_due(shelf, row):
                return row
            held_back = row if held_back is None else held_back
        assert held_back is not None, "two passes meet every row"
        return held_back  # the curriculum holds back all: better one too early than none

    def _is_due(self, shelf: Shelf, row: int) -> bool:
        if self._curriculum is None:
            return True
        last = self._rewards.get(shelf.first_id + row)
        return bool(self._curriculum(dict(shelf.rows[row]), env=shelf.name, version=self.version, reward=last))

    def _pool_for(self, reward: float) -> str:
        easy, hard = self.config.easy_threshold, self.config.hard_threshold
        if easy is not None and reward >= easy:
            return "easy"
        return "hard" if hard is not None and reward <= hard else NORMAL

    def _shelf_of(self, position: int) -> Shelf:
        return next(shelf for shelf in reversed(self.shelves) if shelf.first_id <= position)


def load_curriculum(path: str | None) -> Curriculum | None:
    """The function that `module:name` names; `ValueError` when it is not there."""
    return None if path is None else load_function(path, "buffer.curriculum")


def load_function(path: str, key: str) -> Any:
    """What `module:name` names, for the configuration key `key`; `ValueError` when it is not there."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key} = {path!r} was not found ({error}): write it as module:function") from error
    if not callable(found):
        raise ValueError(f"{key} = {path!r} is not a function")
    return found
