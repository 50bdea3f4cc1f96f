"""Turns of passes, and what happens to a pack when it fails or a model is unloaded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from prime_rl.training_api import pass_scheduler
from prime_rl.training_api.adapters import AdapterTrainer
from prime_rl.training_api.pass_scheduler import PassScheduler
from prime_rl.training_api.passes import RunningPass
from prime_rl.training_api.wire import Datum, PassRequest


class StubTrainer:
    """Records packs; a request is the sizes of its micro-batches."""

    mixes, micro_batch_tokens = True, 100

    def __init__(self) -> None:
        self.packs: list[list[str]] = []
        self.fails = False

    def start_pass(self, name: str, request: PassRequest) -> RunningPass:
        return RunningPass(name, request, [], {}, deque([i] for i in range(len(request.data))))

    def choose_mix(self, passes: Iterable[RunningPass]) -> list[RunningPass]:
        return AdapterTrainer.choose_mix(self, passes)  # type: ignore[arg-type]

    def advance(self, passes: Sequence[RunningPass]) -> None:
        self.packs.append([p.name for p in passes])
        if self.fails:
            raise MemoryError("full")
        for p in passes:
            p.add([], torch.zeros(()))


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> StubTrainer:
    monkeypatch.setattr(pass_scheduler, "decode_pass", lambda sizes: make_request(*sizes))
    return StubTrainer()


def make_request(*sizes: int) -> PassRequest:
    return PassRequest([Datum([0] * size, {}) for size in sizes], "cross_entropy", {}, False)


def run(
    trainer: StubTrainer, work: Callable[[PassScheduler, Any], Any], count_threads: Callable[[], int] = lambda: 1
) -> Any:
    """Call `work` with a scheduler whose packs each wait for a permit."""

    async def main() -> Any:
        permits = asyncio.Semaphore(0)

        async def execute(function: Callable[[], None]) -> None:
            await permits.acquire()
            function()

        return await work(PassScheduler(trainer, execute, "abcd", count_threads), permits)  # type: ignore[arg-type]

    return asyncio.run(asyncio.wait_for(main(), 20))


async def start(scheduler: PassScheduler, name: str, *sizes: int) -> asyncio.Task[bytes]:
    task = asyncio.create_task(scheduler.run(name, sizes))  # type: ignore[arg-type]
    while name not in [p.name for p in scheduler._running]:
        await asyncio.sleep(0)
    return task


def test_small_passes_go_between_the_parts_of_a_big_one(trainer: StubTrainer) -> None:
    async def work(scheduler: PassScheduler, permits: asyncio.Semaphore) -> None:
        tasks = [await start(scheduler, "a", 100, 100, 100), await start(scheduler, "b", 60)]
        tasks += [await start(scheduler, "c", 30), await start(scheduler, "d", 50, 50)]
        for _ in range(6):
            permits.release()
        await asyncio.gather(*tasks)

    run(trainer, work)
    assert trainer.packs == [["a"], ["b", "c"], ["d"], ["a"], ["d"], ["a"]]


def test_free_threads_share_what_waits(trainer: StubTrainer) -> None:
    threads = [1]

    async def work(scheduler: PassScheduler, permits: asyncio.Semaphore) -> None:
        tasks = [await start(scheduler, "a", 20), await start(scheduler, "b", 20)]
        tasks += [await start(scheduler, "c", 20, 20), await start(scheduler, "d", 20)]
        threads[0] = 2
        for _ in range(4):
            permits.release()
        await asyncio.gather(*tasks)

    run(trainer, work, lambda: threads[0])
    assert trainer.packs == [["a"], ["b", "c"], ["d"], ["c"]]


def test_a_failed_pack_fails_its_passes_only(trainer: StubTrainer) -> None:
    async def work(scheduler: PassScheduler, permits: asyncio.Semaphore) -> list[Any]:
        trainer.fails = True
        tasks = [await start(scheduler, "a", 90, 90), await start(scheduler, "b", 90)]
        permits.release()
        with pytest.raises(MemoryError):
            await tasks[0]
        trainer.fails = False
        permits.release()
        return [await tasks[1]]

    assert run(trainer, work) and trainer.packs == [["a"], ["b"]]


def test_an_unloaded_model_leaves_the_mix(trainer: StubTrainer) -> None:
    async def work(scheduler: PassScheduler, permits: asyncio.Semaphore) -> None:
        tasks = [await start(scheduler, "a", 50, 50, 50), await start(scheduler, "b", 50, 50)]
        permits.release()
        while not trainer.packs or not permits.locked():
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # the next pack has both, and waits
        scheduler.remove("a")
        with pytest.raises(ValueError, match="a was unloaded"):
            await tasks[0]
        permits.release()
        permits.release()
        await tasks[1]

    run(trainer, work)
    assert trainer.packs == [["a"], ["b", "a"], ["b"]]


def test_a_pass_of_an_unloaded_model_does_not_start(trainer: StubTrainer) -> None:
    async def work(scheduler: PassScheduler, permits: asyncio.Semaphore) -> None:
        with pytest.raises(ValueError, match="x was unloaded"):
            await scheduler.run("x", (5,))  # type: ignore[arg-type]

    run(trainer, work)
    assert not trainer.packs
