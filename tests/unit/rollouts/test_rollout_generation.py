"""Synchronous rollout generation, and samples as one batch."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import anyio
import pytest

from rollouts.training.datasets import DataBuffer
from rollouts.training.rollout_gen import (
    AsyncRolloutManager,
    RolloutManager,
    convert_to_batch,
    generate_rollout_batches,
)
from rollouts.training.rollout_gen.async_rollout_manager import NoTrainableGroupsError, generate_rollout_batch
from rollouts.training.types import RolloutConfig, Sample, Status

PROMPTS = ["a", "b", "c"]


def answer(prompts: list[str], seed: int = 0, suffix: str = "") -> list[Sample]:
    return [Sample(prompt=p, response=f"{p}{suffix}", tokens=[seed % 97, 1], loss_mask=[0.0, 1.0]) for p in prompts]


async def answer_async(prompts: list[str], seed: int, suffix: str = "") -> list[Sample]:
    await anyio.sleep(random.random() / 200)
    return answer(prompts, seed, suffix)


@pytest.mark.parametrize("generate_fn", [answer, answer_async])
def test_generator_and_manager_yield_equal_batches(generate_fn: object) -> None:
    config = RolloutConfig(2, 3, generate_fn=generate_fn)  # type: ignore[arg-type]
    batches = list(itertools.islice(generate_rollout_batches(DataBuffer(PROMPTS), config, suffix="!"), 3))

    async def main() -> list[list[Sample]]:
        manager = AsyncRolloutManager(DataBuffer(PROMPTS), config, rollout_kwargs={"suffix": "!"})
        return [(await manager.generate_batch()).samples for _ in range(3)]

    assert [batch.samples for batch in batches] == anyio.run(main)
    assert [batch.group_indices[::3] for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert batches[0].metadata["responses"] == ["a!"] * 3 + ["b!"] * 3
    assert [batch.metadata["step_id"] for batch in batches] == [1, 2, 3]


def test_batches_are_generated_lazily() -> None:
    buffer = DataBuffer(PROMPTS)
    batches = generate_rollout_batches(buffer, RolloutConfig(2, generate_fn=answer))
    assert buffer.position == 0
    next(batches)
    assert buffer.position == 2


def test_rewards_precede_filters_and_drops_are_replaced() -> None:
    config = RolloutConfig(
        2,
        generate_fn=answer,
        reward_fn=lambda sample: float(sample.prompt != "b"),
        filter_fn=lambda group: group[0].reward > 0,
    )
    batch = next(generate_rollout_batches(DataBuffer(PROMPTS), config))
    assert [s.prompt for s in batch.samples] == ["a", "c"] and batch.group_indices == [0, 2] and batch.rewards == [1, 1]


def test_it_works_inside_a_running_event_loop() -> None:
    async def main() -> int:
        config = RolloutConfig(2, generate_fn=answer_async)
        return len(next(generate_rollout_batches(DataBuffer(PROMPTS), config)).tokens)

    assert anyio.run(main) == anyio.run(main, backend="trio") == 2


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_unclosed_generator_does_not_block_exit(kind: str) -> None:
    code = f"""if True:
        from rollouts.training.datasets import DataBuffer
        from rollouts.training.rollout_gen import generate_rollout_batches
        from rollouts.training.types import RolloutConfig, Sample

        {kind} generate(prompts):
            return [Sample(prompt, "", [1], [1.0]) for prompt in prompts]

        batches = generate_rollout_batches(DataBuffer(["a"]), RolloutConfig(1, generate_fn=generate))
        print(next(batches).group_indices, next(batches).group_indices)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[0] [1]\n"), done.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts us in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_stops_generation(interruptible: None) -> None:
    started = threading.Event()

    async def generate(prompts: list[str]) -> list[Sample]:
        if not started.is_set():
            started.set()
            await anyio.sleep(3600)
        return answer(prompts)

    def interrupt() -> None:
        assert started.wait(timeout=30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    config = RolloutConfig(2, generate_fn=generate)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(generate_rollout_batches(DataBuffer(PROMPTS), config))
    thread.join(timeout=30)
    assert not [t for t in threading.enumerate() if t.daemon and "work" in t.name]


def test_async_calls_share_one_loop_from_batch_to_batch() -> None:
    loops = set()

    async def generate(prompts: list[str]) -> list[Sample]:
        loops.add(asyncio.get_running_loop())
        return answer(prompts)

    batches = generate_rollout_batches(DataBuffer(PROMPTS), RolloutConfig(2, generate_fn=generate))
    for _ in range(3):
        next(batches)
    assert len(loops) == 1


def test_event_loops_are_closed() -> None:
    """At the end of a generator, and after each batch of the sync manager; an open loop keeps its sockets."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def generate(prompts: list[str]) -> list[Sample]:
        loops.append(asyncio.get_running_loop())
        return answer(prompts)

    config = RolloutConfig(2, generate_fn=generate)
    batches = generate_rollout_batches(DataBuffer(PROMPTS), config)
    next(batches)
    assert not loops[-1].is_closed()
    batches.close()  # type: ignore[attr-defined]
    assert loops[-1].is_closed()
    with pytest.warns(DeprecationWarning):
        RolloutManager(DataBuffer(PROMPTS), config).generate_batch()
    assert len(set(loops)) == 2 and loops[-1].is_closed()


def test_what_it_cannot_do_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"over_sampling_factor 1\.5 .*AsyncRolloutManager"):
        generate_rollout_batches(DataBuffer(PROMPTS), RolloutConfig(2, 1, 1.5, generate_fn=answer))
    with pytest.raises(ValueError, match="generate_fn must be provided"):
        generate_rollout_batches(DataBuffer(PROMPTS), RolloutConfig(2))


def test_an_error_of_generate_fn_arrives_as_itself() -> None:
    def broken(prompts: list[str]) -> list[Sample]:
        raise OSError("engine gone")

    with pytest.raises(OSError, match="engine gone"):
        next(generate_rollout_batches(DataBuffer(PROMPTS), RolloutConfig(2, generate_fn=broken)))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    config = RolloutConfig(2, generate_fn=answer, reward_fn=lambda sample: bad if sample.prompt == "b" else 1.0)
    with pytest.raises(ValueError, match=f"reward {bad} of sample 0 in group 1 is not finite"):
        next(generate_rollout_batches(DataBuffer(PROMPTS), config))


def test_failed_samples_are_retried_and_keep_the_error() -> None:
    calls = []

    def failing(prompts: list[str]) -> list[Sample]:
        calls.append(prompts[0])
        return [Sample(prompt=prompts[0], status=Status.FAILED, error="no route")]

    with pytest.raises(NoTrainableGroupsError, match=r"no route \(10\)"):
        next(generate_rollout_batches(DataBuffer(PROMPTS), RolloutConfig(1, generate_fn=failing)))
    assert len(calls) == 30


def test_convert_to_batch() -> None:
    samples = [
        Sample("p", "r", [1, 2, 3], [0.0, 1.0, 1.0], 0.5, metadata={"correct": True}),
        Sample("q", "s", [4], [1.0], 1.5, metadata={"hard": 2}),
    ]
    batch = convert_to_batch(samples, epoch_id=3, step_id=7)
    assert batch.tokens == [[1, 2, 3], [4]] and batch.loss_masks == [[0.0, 1.0, 1.0], [1.0]]
    assert batch.rewards == [0.5, 1.5] and batch.response_lengths == [2, 1] and batch.samples == samples
    assert batch.metadata == {
        "epoch_id": 3,
        "step_id": 7,
        "batch_size": 2,
        "prompts": ["p", "q"],
        "responses": ["r", "s"],
        "sample_correct": [True, None],
        "sample_hard": [None, 2],
    }
    with pytest.raises(ValueError, match="at least one sample"):
        convert_to_batch([])
    with pytest.raises(ValueError, match="1 tokens but 2 entries in `loss_mask`"):
        convert_to_batch([Sample("p", "r", [1], [0.0, 1.0])])


def test_one_batch_without_a_manager() -> None:
    config = RolloutConfig(2, 1, 1.5, generate_fn=answer)
    batch = anyio.run(generate_rollout_batch, DataBuffer(PROMPTS), config, lambda sample: 2.0)
    assert batch.rewards == [2.0, 2.0]


def test_deprecated_manager_warns_and_resumes() -> None:
    config = RolloutConfig(2, generate_fn=answer)
    with pytest.warns(DeprecationWarning, match="AsyncRolloutManager"):
        manager, other = RolloutManager(DataBuffer(PROMPTS), config), RolloutManager(DataBuffer(PROMPTS), config)
    assert manager.generate_batch().group_indices == [0, 1]
    state = manager.state_dict()
    assert {"buffer_state", "step_count"} <= set(state)
    other.load_state_dict(state)
    assert other.generate_batch(lambda sample: 1.0).samples == manager.generate_batch(lambda sample: 1.0).samples
