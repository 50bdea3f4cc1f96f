"""Invariants of the rollout manager under failures, cancellation, saves and latencies."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_rollout_manager import PROMPTS, accepted, both_loops, conserved, group_indices
from virtual_time import run

from rollouts.training.datasets import DataBuffer
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.types import RolloutConfig, Sample


class World:
    """Random latencies, groups that fail once, and request counts."""

    def __init__(self, seed: int, size: int, n: int, factor: float, failing: set[int]) -> None:
        self.accept, self.n, self.failing = accepted(seed), n, set(failing)
        self.latency = random.Random(seed)
        self.generated: Counter[int] = Counter()
        self.rewarded: Counter[tuple[int, int]] = Counter()
        self.filtered: Counter[int] = Counter()
        self.manager: AsyncRolloutManager
        self.config = RolloutConfig(size, n, factor, reward_fn=self.reward, filter_fn=self.keep)

    def build(self, state: dict[str, Any] | None = None) -> AsyncRolloutManager:
        self.manager = AsyncRolloutManager(DataBuffer(PROMPTS), self.config, generate_group=self.generate)
        if state is not None:
            self.manager.load_state_dict(json.loads(json.dumps(state)))
        return self.manager

    async def generate(self, group_index: int, prompt: str) -> list[Sample]:
        self.generated[group_index] += 1
        conserved(self.manager.groups)
        await anyio.sleep(self.latency.random() * 10)
        conserved(self.manager.groups)
        if group_index in self.failing:
            self.failing.remove(group_index)
            raise OSError(f"engine of group {group_index} gone")
        return [
            Sample(prompt=prompt, response=f"{group_index}.{i}", tokens=[i], loss_mask=[1.0]) for i in range(self.n)
        ]

    def reward(self, sample: Sample) -> float:
        assert sample.group_index is not None and sample.index is not None
        self.rewarded[sample.group_index, sample.index] += 1
        return sample.group_index + sample.index / 10

    def keep(self, group: list[Sample]) -> bool:
        assert [s.reward for s in group] == [s.group_index + s.index / 10 for s in group], "filters see scored samples"
        self.filtered[group[0].group_index] += 1
        return self.accept(group[0].group_index)


worlds = {
    "seed": st.integers(0, 10**6),
    "size": st.integers(1, 4),
    "n": st.integers(1, 3),
    "factor": st.sampled_from([1.0, 1.15, 1.5, 3.0]),
    "failing": st.sets(st.integers(0, 12), max_size=3),
}


@both_loops
@settings(max_examples=40, deadline=None)
@given(**worlds, limits=st.lists(st.floats(0.1, 15), max_size=3), reload=st.booleans())
def test_failures_and_cancellation_lose_nothing(
    backend: str,
    seed: int,
    size: int,
    n: int,
    factor: float,
    failing: set[int],
    limits: list[float],
    reload: bool,
) -> None:
    """Invariants 0-4, 7, 12 and 14: errors, an outer scope that is cancelled, and loading what was left."""
    world = World(seed, size, n, factor, failing)

    async def main() -> list[int]:
        manager, emitted, waits = world.build(), list[int](), list(limits)
        while len(emitted) < 3 * size:
            limit = waits.pop() if waits else None
            with anyio.move_on_after(limit) as scope:
                try:
                    batch = await manager.generate_batch()
                except OSError as error:
                    assert "gone" in str(error)
                    conserved(manager.groups)
                    continue
                assert len(batch.samples) == size * n
                assert [s.response for s in batch.samples] == [f"{s.group_index}.{s.index}" for s in batch.samples]
                assert batch.rewards == [s.group_index + s.index / 10 for s in batch.samples]
                emitted += group_indices(batch.samples, n)
            conserved(manager.groups)
            assert not manager.groups.in_flight
            if scope.cancelled_caught and reload:
                manager = world.build(manager.state_dict())
        return emitted

    emitted = run(main, backend)
    assert emitted == [g for g in range(1000) if world.accept(g)][: 3 * size]
    assert set(world.filtered.values()) == {1} and set(world.rewarded.values()) == {1}
    assert set(world.rewarded) == {(g, i) for g in world.filtered for i in range(n)}


@both_loops
@settings(max_examples=40, deadline=None)
@given(**worlds, moments=st.lists(st.floats(0, 40), min_size=1, max_size=3))
def test_resumed_wave_equals_uninterrupted(
    backend: str, seed: int, size: int, n: int, factor: float, failing: set[int], moments: list[float]
) -> None:
    """Invariant 7 in mid-wave: what was ready is not generated again, what was running is."""
    world = World(seed, size, n, factor, set())

    async def take(manager: AsyncRolloutManager, num: int, out: list[tuple[int, str]]) -> None:
        while len(out) < num:
            batch = await manager.generate_batch()
            out += [(s.group_index or 0, s.response) for s in batch.samples]

    async def main() -> None:
        emitted: list[tuple[int, str]] = []
        saved: list[tuple[int, dict[str, Any], set[int]]] = []

        async def save(moment: float) -> None:
            await anyio.sleep(moment)
            state = world.manager.state_dict()
            settled = set(range(state["next_group_index"])) - {entry["group_index"] for entry in state["returned"]}
            saved.append((len(emitted), json.loads(json.dumps(state)), settled))

        async with anyio.create_task_group() as tasks:
            for moment in moments:
                tasks.start_soon(save, moment)
            await take(world.build(), 3 * size * n, emitted)
        for taken, state, settled in saved:
            again = World(seed + 1, size, n, factor, set())
            again.accept = world.accept
            rest: list[tuple[int, str]] = []
            await take(again.build(state), 3 * size * n - taken, rest)
            assert (emitted[:taken] + rest)[: 3 * size * n] == emitted
            assert not settled & set(again.generated), "a settled group was generated again"

    run(main, backend)


@both_loops
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), other=st.integers(0, 10**6), size=st.integers(1, 4), factor=st.sampled_from([1.0, 2])
)
def test_results_are_independent_of_latencies(backend: str, seed: int, other: int, size: int, factor: float) -> None:
    """Invariants 5, 6 and 13."""

    async def main() -> None:
        streams = []
        for latency, filtered in ((seed, False), (other, False), (other, True)):
            world = World(latency, size, 2, factor, set())
            world.accept = lambda group_index: True
            world.config = RolloutConfig(size, 2, factor, filter_fn=world.keep if filtered else None)
            if filtered:
                world.config = RolloutConfig(size, 2, factor, reward_fn=world.reward, filter_fn=world.keep)
            manager = world.build()
            streams.append([[s.response for s in (await manager.generate_batch()).samples] for _ in range(3)])
        assert streams[0] == streams[1] == streams[2]

    run(main, backend)


@given(size=st.integers(8, 30), seed=st.integers(0, 1000))
def test_other_seeds_give_other_orders_from_the_second_epoch_on(size: int, seed: int) -> None:
    """Invariant 6: among five seeds at least two orders differ, and epoch 0 is the same for all."""
    orders = []
    for offset in range(5):
        buffer = DataBuffer(list(range(size)), seed=seed + 1000 * offset)
        assert buffer.get_prompts(size) == list(range(size))
        orders.append(tuple(buffer.get_prompts(size)))
    assert len(set(orders)) > 1
