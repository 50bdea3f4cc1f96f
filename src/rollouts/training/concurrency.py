"""Concurrent calls whose first failure is raised as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import anyio


async def run_concurrently(work: Callable[[int], Awaitable[None]], numbers: Iterable[int]) -> None:
    """Await `work` for every number; the first failure cancels the others and is raised without an exception group."""
    failures: list[Exception] = []

    async def run(number: int) -> None:
        try:
            await work(number)
        except Exception as error:
            failures.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number in numbers:
            tasks.start_soon(run, number)
    if failures:
        raise failures[0]
