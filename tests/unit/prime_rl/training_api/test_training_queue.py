"""The order of training requests."""

from __future__ import annotations

import asyncio

from prime_rl.training_api.requests import TrainingRequest
from prime_rl.training_api.training_queue import TrainingQueue


def request(model_id: str, seq_id: int) -> TrainingRequest:
    return TrainingRequest(model_id, seq_id, "optim_step", b"{}")


def add(queue: TrainingQueue, *names: tuple[str, int]) -> None:
    for model_id, seq_id in names:
        assert queue.is_open(model_id, seq_id)
        queue.add(request(model_id, seq_id))


def test_models_take_turns_in_the_order_of_numbers() -> None:
    queue = TrainingQueue()
    add(queue, ("a", 1), ("a", 0), ("b", 0), ("a", 2), ("b", 1), ("c", 1))
    started = []
    while found := queue.ready():
        queue.start(found[0])
        assert found[0].model_id not in [r.model_id for r in queue.ready()]
        queue.release(found[0].model_id)
        started.append(found[0].request_id)
    assert started == ["a:0", "b:0", "a:1", "b:1", "a:2"]
    assert [r.request_id for r in queue.remove("c")] == ["c:1"]
    assert not queue.is_open("b", 1)


def test_one_request_of_each_model_is_ready() -> None:
    queue = TrainingQueue()
    add(queue, ("a", 0), ("a", 1), ("b", 0), ("c", 3))
    assert [r.request_id for r in queue.ready()] == ["a:0", "b:0"]
    assert [r.request_id for r in queue.remove("a")] == ["a:0", "a:1"]
    assert [r.request_id for r in queue.ready()] == ["b:0"]


def test_wait_ends_when_the_missing_number_arrives() -> None:
    async def run() -> None:
        queue = TrainingQueue()
        add(queue, ("a", 1))
        waiting = asyncio.create_task(queue.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        add(queue, ("a", 0))
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())
