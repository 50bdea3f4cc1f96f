"""The rollout manager in virtual time: invariants for all latencies, failures, aborts and save points."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from rollouts.training.datasets import DataBuffer
from rollouts.training.rollout_gen.async_rollout_manager import (
    AsyncRolloutManager,
    GroupDropped,
    NoTrainableGroupsError,
    StalenessLimits,
    sample_seed,
)
from rollouts.training.rollout_gen.groups import GroupBuffer
from rollouts.training.types import RolloutConfig, Sample, Status

PROMPTS = [f"p{i}" for i in range(5)]


both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def accepted(seed: int) -> Callable[[int], bool]:
    return lambda group_index: random.Random(f"{seed}/{group_index}").random() < 0.7


def keep_by(accept: Callable[[int], bool]) -> Callable[[list[Sample]], bool]:
    def keep(group: list[Sample]) -> bool:
        assert group[0].group_index is not None
        return accept(group[0].group_index)

    return keep


def make_generate(seed: int, n: int) -> Callable[[int, str], Awaitable[list[Sample]]]:
    """Groups that take random time; their content depends on the group index alone."""
    latency = random.Random(seed)

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        await anyio.sleep(latency.random() * 10)
        return [Sample(prompt=prompt, response=f"{group_index}.{i}", tokens=[i], loss_mask=[1.0]) for i in range(n)]

    return generate


def conserved(groups: GroupBuffer) -> None:
    open_or_done = len(groups.in_flight) + len(groups.returned) + groups.num_ready + groups.num_emitted
    assert groups.next_group_index == open_or_done + groups.drops.total()


def group_indices(samples: list[Sample], n: int) -> list[int]:
    """Group indices of a batch; checks that each group is whole, contiguous and of one prompt."""
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    for group in groups:
        assert len({s.group_index for s in group}) == 1 and len({str(s.prompt) for s in group}) == 1
        assert [s.index for s in group] == list(range(n))
    return [group[0].group_index for group in groups]  # type: ignore[misc]


@both_loops
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    factor=st.sampled_from([1.0, 1.15, 1.5, 3.0]),
    size=st.integers(1, 5),
    n=st.integers(1, 3),
    max_running=st.sampled_from([None, 1, 3]),
    aborts=st.lists(st.floats(0.1, 30), max_size=2),
    save_after=st.integers(0, 3),
)
def test_waves_emit_the_accepted_groups_in_order(
    backend: str,
    seed: int,
    factor: float,
    size: int,
    n: int,
    max_running: int | None,
    aborts: list[float],
    save_after: int,
) -> None:
    """The oracle is one line: groups 0, 1, 2, ... that the filter accepts."""
    accept = accepted(seed)
    config = RolloutConfig(size, n, factor, filter_fn=keep_by(accept))

    def build() -> AsyncRolloutManager:
        return AsyncRolloutManager(
            DataBuffer(PROMPTS), config, generate_group=make_generate(seed, n), max_running=max_running
        )

    async def main() -> list[int]:
        manager = build()
        delays, emitted = list(aborts), list[int]()
        while len(emitted) < 4 * size:
            async with anyio.create_task_group() as tasks:
                for delay in delays:
                    tasks.start_soon(abort_after, manager, delay)
                try:
                    batch = await manager.generate_batch()
                except RuntimeError as error:
                    assert str(error) == "Abort requested during batch generation"
                    delays.pop()
                    tasks.cancel_scope.cancel()
                    continue
                tasks.cancel_scope.cancel()
            assert len(batch.samples) == size * n
            emitted += group_indices(batch.samples, n)
            conserved(manager.groups)
            assert manager.groups.num_open <= math.ceil(size * factor - 1e-9) - size, "more than one wave is cached"
            if manager.step_count == save_after:
                state = json.loads(json.dumps(manager.state_dict()))
                manager = build()
                manager.load_state_dict(state)
        return emitted

    emitted = run(main, backend)
    assert emitted == [g for g in range(1000) if accept(g)][: 4 * size]


async def abort_after(manager: AsyncRolloutManager, delay: float) -> None:
    await anyio.sleep(delay)
    manager.request_abort()


@both_loops
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    level=st.integers(0, 3),
    size=st.integers(1, 4),
    drop_rate=st.sampled_from([0.0, 0.3]),
    train_time=st.floats(0, 20),
)
def test_slots_bound_the_staleness(
    backend: str, seed: int, level: int, size: int, drop_rate: float, train_time: float
) -> None:
    """Against a trainer of random speed: staleness <= level, in order, nothing lost, and the slots are really used."""
    num_steps, noise = 6, random.Random(seed)
    live = {"version": 0}
    drawn_at: dict[int, int] = {}

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        drawn_at.setdefault(group_index, live["version"])
        await anyio.sleep(noise.random() * 10)
        if random.Random(f"{seed}/{group_index}").random() < drop_rate:
            raise GroupDropped("unlucky")
        return [Sample(prompt=prompt, versions=[(0, drawn_at[group_index])])]

    async def main() -> list[int]:
        manager = AsyncRolloutManager(
            DataBuffer(PROMPTS), RolloutConfig(size), generate_group=generate, slots=(level + 1) * size
        )
        send, receive = anyio.create_memory_object_stream[int](100)

        async def trainer() -> None:
            async for step in receive:
                await anyio.sleep(noise.random() * train_time)
                live["version"] = step
                manager.release(step)

        emitted: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer)
            async with manager:
                for step in range(1, num_steps + 1):
                    batch = await manager.generate_batch()
                    for sample in batch.samples:
                        assert 0 <= step - 1 - sample.versions[0][1] <= level
                    emitted += batch.group_indices
                    conserved(manager.groups)
                    assert manager.num_slots_used == (level + 1) * size, "a free slot was left unused"
                    await send.send(step)
            tasks.cancel_scope.cancel()
            conserved(manager.groups)
            assert not manager.groups.in_flight
        return emitted

    emitted = run(main, backend)
    kept = [g for g in range(1000) if random.Random(f"{seed}/{g}").random() >= drop_rate]
    assert emitted == kept[: num_steps * size]


@both_loops
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), stop_at=st.floats(0, 60), size=st.integers(1, 4))
def test_resumed_stream_equals_uninterrupted(backend: str, seed: int, stop_at: float, size: int) -> None:
    accept = accepted(seed)
    config = RolloutConfig(size, filter_fn=keep_by(accept))

    def build(latency: int) -> AsyncRolloutManager:
        return AsyncRolloutManager(
            DataBuffer(PROMPTS), config, generate_group=make_generate(latency, 1), slots=2 * size
        )

    async def take(manager: AsyncRolloutManager, steps: int) -> list[tuple[int, str]]:
        out = []
        for _ in range(steps):
            batch = await manager.generate_batch()
            manager.release(manager.step_count)
            out += [(s.group_index or 0, str(s.prompt)) for s in batch.samples]
        return out

    async def main() -> tuple[list[Any], list[Any]]:
        async with build(seed) as whole:
            expected = await take(whole, 6)
        first: list[Any] = []
        manager = build(seed + 1)
        with anyio.move_on_after(stop_at):
            async with manager:
                for _ in range(6):
                    first += await take(manager, 1)
        state = json.loads(json.dumps(manager.state_dict()))
        resumed = build(seed + 2)
        resumed.load_state_dict(state)
        async with resumed:
            return expected, first + await take(resumed, 6 - len(first) // size)

    expected, resumed = run(main, backend)
    assert resumed == expected


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_resumed_stream_may_have_another_batch_size(size: int, level: int) -> None:
    """It ends after `max_batches`, with open groups from the checkpoint, and starts no group that is not trained."""
    num_batches, saved_after = 9, 4

    def build(batch_size: int) -> AsyncRolloutManager:
        return AsyncRolloutManager(
            DataBuffer(PROMPTS),
            RolloutConfig(batch_size),
            generate_group=make_generate(0, 1),
            slots=(level + 1) * batch_size,
            max_batches=num_batches,
        )

    async def take(manager: AsyncRolloutManager, until: int) -> None:
        async with manager:
            while manager.step_count < until:
                with anyio.fail_after(10_000):
                    assert len((await manager.generate_batch()).samples) == manager.config.batch_size
                manager.release(manager.step_count)

    async def main() -> None:
        first, resumed = build(4), build(size)
        await take(first, saved_after)
        state = json.loads(json.dumps(first.state_dict()))
        num_saved = first.groups.num_open
        resumed.load_state_dict(state)
        await take(resumed, num_batches)
        num_trained = (num_batches - saved_after) * size
        assert resumed.groups.num_open == max(0, num_saved - num_trained)

    run(main)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("size", "level"), [(4, 3), (4, 0), (4, 1), (1, 1), (2, 3), (3, 0), (5, 0)])
def test_a_resumed_stream_keeps_its_own_staleness(size: int, level: int, in_order: bool) -> None:
    """A checkpoint with open groups of a higher level, or of larger batches, does not make samples older."""

    def build(batch_size: int, level: int) -> AsyncRolloutManager:
        async def generate(group_index: int, prompt: str) -> list[Sample]:
            version = manager.version
            await anyio.sleep(random.Random(group_index).random() * 10)
            return [Sample(prompt=prompt, tokens=[1], loss_mask=[1.0], versions=[(0, version)])]

        manager = AsyncRolloutManager(
            DataBuffer(PROMPTS),
            RolloutConfig(batch_size),
            generate_group=generate,
            slots=(level + 1) * batch_size,
            in_order=in_order,
            staleness_limits=StalenessLimits(None if in_order else level),
        )
        return manager

    async def take(manager: AsyncRolloutManager, level: int) -> list[int]:
        emitted = []
        async with manager:
            for _ in range(8):
                with anyio.fail_after(10_000):
                    batch = await manager.generate_batch()
                assert max(manager.step_count - 1 - s.versions[0][1] for s in batch.samples) <= level
                emitted += batch.group_indices
                await anyio.sleep(5)
                manager.release(manager.step_count)
        manager.tokens.check(manager.ready_samples)
        return emitted

    async def main() -> None:
        first, resumed = build(4, 3), build(size, level)
        emitted = await take(first, 3)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        emitted += await take(resumed, level)
        conserved(resumed.groups)
        assert not in_order or emitted == list(range(32 + 8 * size))

    run(main)


def test_a_group_that_ends_as_it_becomes_stale_restarts() -> None:
    """Its answer is there, but the group has not continued yet, when the first batch is taken, at level 0."""
    answered = anyio.Event()

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        version = manager.version
        if group_index == 1 and not answered.is_set():
            await answered.wait()
        return [Sample(prompt=prompt, tokens=[1], loss_mask=[1.0], versions=[(0, version)])]

    def answer_other(samples: list[Sample]) -> None:
        asyncio.get_running_loop().call_soon(answered.set)

    manager = AsyncRolloutManager(
        DataBuffer(PROMPTS),
        RolloutConfig(1),
        generate_group=generate,
        group_filter=answer_other,
        slots=2,
        in_order=False,
        staleness_limits=StalenessLimits(0),
    )

    async def main() -> None:
        async with manager:
            await manager.generate_batch()
            await manager.wait_until_idle()
            assert not manager.groups.num_ready and manager.restarts == {"stale": 1}
            state = json.loads(json.dumps(manager.state_dict()))
            manager.release(1)
            batch = await manager.generate_batch()
            assert batch.group_indices == [1] and batch.samples[0].versions == [(0, 1)]
        manager.tokens.check(manager.ready_samples)
        manager.restarts.clear()
        manager.load_state_dict(state)
        assert manager.restarts == {"stale": 1}, "a resumed run continues the count"

    anyio.run(main)


def test_a_resume_with_part_of_a_batch_more_keeps_finished_groups() -> None:
    """With 3 slots and batches of 2, group 2 is drawn with group 0 and trained a version later."""

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        return [Sample(prompt=prompt, tokens=[1], loss_mask=[1.0], versions=[(0, 0)])]

    def build() -> AsyncRolloutManager:
        return AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(2), generate_group=generate, slots=3)

    async def main() -> None:
        first, resumed = build(), build()
        async with first:
            await first.generate_batch()
            await first.wait_until_idle()
        assert list(first.groups.ready) == [2]
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(resumed.groups.ready) == [2] and not resumed.restarts

    run(main)


def test_a_loaded_state_has_no_error_of_an_earlier_run() -> None:
    async def main() -> None:
        good = make_generate(0, 1)

        async def fail(group_index: int, prompt: str) -> list[Sample]:
            raise OSError("lost server")

        manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(1), generate_group=fail, slots=1)
        state = manager.state_dict()
        async with manager:
            await manager.wait_until_idle()
        manager._generate_group = good
        manager.load_state_dict(state)
        async with manager:
            assert len((await manager.generate_batch()).samples) == 1

    run(main)


def test_ranks_that_share_groups_resume_from_the_state_of_one() -> None:
    """Rank r generates the groups r, r + 2, ...; others are placeholders without tokens."""

    def build(rank: int) -> AsyncRolloutManager:
        async def generate(group_index: int, prompt: str) -> list[Sample]:
            is_own = group_index % 2 == rank
            return [Sample(prompt, tokens=[group_index], loss_mask=[1.0])] if is_own else [Sample(prompt)]

        return AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(2), generate_group=generate, slots=6)

    async def main() -> None:
        async with build(0) as manager:
            await manager.generate_batch()
            await manager.wait_until_idle()
            state = json.loads(json.dumps(manager.state_dict(keep_ready=False)))
        assert state["partial_samples"] == [] and [group["group_index"] for group in state["returned"]] == [2, 3, 4, 5]
        tokens: list[int] = []
        for rank in range(2):
            resumed = build(rank)
            resumed.load_state_dict(state)
            resumed.tokens.check([])
            async with resumed:
                for _ in range(3):
                    tokens += [token for sample in (await resumed.generate_batch()).samples for token in sample.tokens]
                    resumed.release(resumed.step_count)
                conserved(resumed.groups)
        assert sorted(tokens) == list(range(2, 8)), "each group once, by its own rank"

    run(main)


def test_drops_have_reasons_and_starvation_raises() -> None:
    async def main() -> None:
        for slots in (None, 4):
            config = RolloutConfig(2, filter_fn=lambda group: False)
            manager = AsyncRolloutManager(
                DataBuffer(PROMPTS), config, generate_group=make_generate(0, 1), slots=slots, max_rejected_groups=7
            )
            async with manager:
                with pytest.raises(NoTrainableGroupsError, match=r"<lambda> \((7|8|9|10)\)") as starved:
                    await manager.generate_batch()
                assert starved.value.reasons["<lambda>"] >= 7
                conserved(manager.groups)

    run(main)


def test_starvation_names_the_reasons_of_the_last_drops() -> None:
    async def generate(group_index: int, prompt: str) -> list[Sample]:
        if group_index != 1:
            raise GroupDropped("early" if group_index == 0 else "late")
        return [Sample(prompt=prompt)]

    async def main() -> None:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(1), generate_group=generate, slots=1)
        async with manager:
            await manager.generate_batch()
            manager.release(1)
            with pytest.raises(
                NoTrainableGroupsError, match=r"10 groups in a row were dropped: late \(10\)"
            ) as starved:
                await manager.generate_batch()
        assert starved.value.reasons == {"late": 10} and manager.groups.drops == {"early": 1, "late": 10}

    run(main)


@both_loops
@pytest.mark.parametrize("slots", [None, 9])
def test_max_running_bounds_the_groups_in_generation(slots: int | None, backend: str) -> None:
    running: list[int] = []

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        running.append(manager.num_running)
        await anyio.sleep(10 - group_index)
        return [Sample(prompt=prompt)]

    config = RolloutConfig(3, over_sampling_factor=3.0)
    manager = AsyncRolloutManager(DataBuffer(PROMPTS), config, generate_group=generate, slots=slots, max_running=2)

    async def main() -> None:
        async with manager:
            assert (await manager.generate_batch()).group_indices == [0, 1, 2]

    run(main, backend)
    assert max(running) == 2


@both_loops
@pytest.mark.parametrize("slots", [None, 6])
def test_error_keeps_finished_groups_and_reruns_others(slots: int | None, backend: str) -> None:
    calls: Counter[int] = Counter()

    async def generate(group_index: int, prompt: str) -> list[Sample]:
        calls[group_index] += 1
        await anyio.sleep(group_index)
        if group_index == 2 and calls[2] == 1:
            raise OSError("engine gone")
        return [Sample(prompt=prompt)]

    async def main() -> None:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(4), generate_group=generate, slots=slots)
        async with manager:
            with pytest.raises(OSError, match="engine gone"):
                await manager.generate_batch()
            conserved(manager.groups)
            batch = await manager.generate_batch()
        assert batch.group_indices == [0, 1, 2, 3]
        assert [str(s.prompt) for s in batch.samples] == PROMPTS[:4]
        assert calls[0] == calls[1] == 1 and calls[2] == 2

    run(main, backend)


@both_loops
@pytest.mark.parametrize("slots", [None, 6])
@pytest.mark.parametrize("last", [0, 3, 7])
def test_an_error_of_the_prompt_source_arrives_as_itself(last: int, slots: int | None, backend: str) -> None:
    class Source(DataBuffer):
        def draw(self) -> tuple[int, Any]:
            if self.position == last:
                raise OSError("no more prompts")
            return super().draw()

    source = Source(PROMPTS)

    async def main() -> None:
        manager = AsyncRolloutManager(source, RolloutConfig(4), generate_group=make_generate(0, 1), slots=slots)
        async with manager:
            with pytest.raises(OSError, match="no more prompts"):
                for step in range(2):
                    await manager.generate_batch()
                    manager.release(step + 1)
            conserved(manager.groups)
            assert not manager.groups.in_flight
            nonlocal last
            last = -1
            assert len((await manager.generate_batch()).samples) == 4

    run(main, backend)


@both_loops
def test_a_stream_that_is_entered_twice_says_so(backend: str) -> None:
    async def main() -> None:
        generate = make_generate(0, 1)
        async with AsyncRolloutManager(
            DataBuffer(PROMPTS), RolloutConfig(2), generate_group=generate, slots=4
        ) as manager:
            with pytest.raises(RuntimeError, match="already entered"):
                await manager.__aenter__()
            assert len((await manager.generate_batch()).samples) == 2

    run(main, backend)


def test_a_stream_that_has_ended_says_so() -> None:
    async def main() -> None:
        generate = make_generate(0, 1)
        manager = AsyncRolloutManager(
            DataBuffer(PROMPTS), RolloutConfig(2), generate_group=generate, slots=4, max_batches=2
        )
        async with manager:
            for step in range(2):
                await manager.generate_batch()
                manager.release(step + 1)
            with anyio.fail_after(60), pytest.raises(RuntimeError, match="ended after 2 batches: raise max_batches"):
                await manager.generate_batch()

    run(main)


def test_abort_with_nothing_under_way_is_nothing() -> None:
    async def main() -> None:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(2), generate_group=make_generate(0, 1))
        manager.request_abort()
        assert len((await manager.generate_batch()).samples) == 2

    run(main)


def test_the_documented_generate_fn() -> None:
    """One call per sample with a list of one prompt, sync or async; rewards come before filters, once per sample."""
    rewarded: Counter[str] = Counter()

    def reward_fn(sample: Sample) -> float:
        rewarded[sample.response] += 1
        return float(sample.response)

    async def generate(prompts: list[str], seed: int, suffix: str) -> list[Sample]:
        assert len(prompts) == 1 and suffix == "!"
        return [Sample(prompt=prompts[0], response=str(seed), tokens=[1], loss_mask=[1.0], index=0)]

    async def main() -> None:
        config = RolloutConfig(2, 3, generate_fn=generate, filter_fn=lambda group: all(s.reward > 0 for s in group))
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), config, rollout_kwargs={"suffix": "!"}, seed=5)
        batch = await manager.generate_batch(reward_fn=reward_fn)
        assert group_indices(batch.samples, 3) == [0, 1]
        assert batch.rewards == [float(sample_seed(5, g, i)) for g, i in itertools.product(range(2), range(3))]
        assert set(rewarded.values()) == {1}

    run(main)


def test_filters_and_rewards_may_be_coroutines() -> None:
    async def reward(sample: Sample) -> float:
        await anyio.sleep(1)
        return float(sample.group_index or 0)

    async def odd(group: list[Sample]) -> bool:
        await anyio.sleep(1)
        return group[0].reward % 2 == 1

    config = RolloutConfig(2, reward_fn=reward, filter_fn=odd)
    manager = AsyncRolloutManager(DataBuffer(PROMPTS), config, generate_group=make_generate(0, 1))
    assert group_indices(run(manager.generate_batch).samples, 1) == [1, 3] and manager.groups.drops["odd"] == 2


def test_a_sync_generate_fn_runs_in_a_thread() -> None:
    config = RolloutConfig(
        3, generate_fn=lambda prompts: [Sample(prompt=p, tokens=[1], loss_mask=[1]) for p in prompts]
    )
    batch = anyio.run(AsyncRolloutManager(DataBuffer(PROMPTS), config).generate_batch)
    assert [s.prompt for s in batch.samples] == PROMPTS[:3]


@both_loops
def test_a_sync_generate_fn_may_return_a_coroutine(backend: str) -> None:
    async def generate(prompts: list[str]) -> list[Sample]:
        await anyio.sleep(0)
        return [Sample(prompt=p, tokens=[1], loss_mask=[1]) for p in prompts]

    config = RolloutConfig(3, generate_fn=lambda prompts: generate(prompts))
    batch = anyio.run(AsyncRolloutManager(DataBuffer(PROMPTS), config).generate_batch, backend=backend)
    assert [s.prompt for s in batch.samples] == PROMPTS[:3]


def test_sample_with_a_wrong_mask_is_named() -> None:
    async def generate(prompts: list[str]) -> list[Sample]:
        return [Sample(prompt=prompts[0], tokens=[1], loss_mask=[0.0, 1.0])]

    manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(2, 2, generate_fn=generate))
    with pytest.raises(ValueError, match="1 tokens but 2 entries in `loss_mask`"):
        run(manager.generate_batch)


def test_incomplete_groups_are_retried_then_dropped() -> None:
    calls: Counter[str] = Counter()

    async def generate(prompts: list[str]) -> list[Sample]:
        calls[prompts[0]] += 1
        status = Status.ABORTED if prompts[0] == "p0" else Status.COMPLETED
        return [] if prompts[0] == "p1" and calls["p1"] < 3 else [Sample(prompts[0], "", [1], [1.0], status=status)]

    manager = AsyncRolloutManager(DataBuffer(PROMPTS), RolloutConfig(1, generate_fn=generate))
    assert run(manager.generate_batch).samples[0].prompt == "p1"
    assert calls == {"p0": 3, "p1": 3} and manager.groups.drops == {"incomplete": 1}


def test_configs_that_cannot_work() -> None:
    buffer = DataBuffer(PROMPTS)
    with pytest.raises(ValueError, match="generate_fn must be provided"):
        AsyncRolloutManager(buffer, RolloutConfig(1))
    with pytest.raises(ValueError, match="at least one batch of 4"):
        AsyncRolloutManager(buffer, RolloutConfig(4), generate_group=make_generate(0, 1), slots=3)
    with pytest.raises(ValueError, match="max_batches 3 has no effect without slots"):
        AsyncRolloutManager(buffer, RolloutConfig(4), generate_group=make_generate(0, 1), max_batches=3)
    with pytest.raises(ValueError, match="max_running 0 must be at least 1"):
        AsyncRolloutManager(buffer, RolloutConfig(4), generate_group=make_generate(0, 1), max_running=0)
    for bad in (
        {"batch_size": 0},
        {"batch_size": 1, "over_sampling_factor": 0.9},
        {"batch_size": 1, "n_samples_per_prompt": 0},
    ):
        with pytest.raises(ValueError, match=r"must be a .*number of at least 1"):
            RolloutConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version 99"):
        AsyncRolloutManager(buffer, RolloutConfig(1), generate_group=make_generate(0, 1)).load_state_dict(
            {"version": 99}
        )


def test_sample_seeds_are_stable_different_and_fit_a_json_number() -> None:
    seeds = {sample_seed(s, g, i) for s, g, i in itertools.product(range(5), range(20), range(8))}
    assert len(seeds) == 5 * 20 * 8 and max(seeds) < 2**53
    assert sample_seed(7, 3, 1) == 6610984345205423
