"""Holding engines to the trainer's log-probs of the canary: at the first version, then every so many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from loguru import logger

from prime_rl.transport.canary import Canary, compare_canary, read_canary
from rollouts.training.weight_sync import EngineError, InferenceEngine, PrimeEngine, WeightSyncError


class CanaryCheck:
    """Scores the canary of every `interval`-th version at every engine; with None nothing is checked."""

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self.num_checked = 0
        self._last: int | None = None

    async def check(
        self, step: int, path: Path, engines: Sequence[InferenceEngine], answers: Sequence[dict[str, Any]]
    ) -> None:
        """Nothing, or `WeightSyncError` when an engine computes something else; that engine is then paused.

        `answers` are what the engines said when they loaded the version.
        """
        if self.interval is None or (self._last is not None and step < self._last + self.interval):
            return
        canary = read_canary(path)
        if canary is None:
            return
        problems: dict[int, str | None] = {}

        async def score(i: int) -> None:
            engine = engines[i]
            if isinstance(engine, PrimeEngine):
                problems[i] = await _judge(engine, canary, answers[i])

        async with anyio.create_task_group() as tasks:
            for i in range(len(engines)):
                tasks.start_soon(score, i)
        if any(problems.values()):
            states = [(str(engine), problems.get(i) or "ok") for i, engine in enumerate(engines)]
            raise WeightSyncError(str(path), states)
        if not problems or None in problems.values():
            return
        self._last = step
        self.num_checked += 1
        logger.info(f"canary of version {step}: every engine computes what the trainer does")


async def _judge(engine: PrimeEngine, canary: Canary, answer: dict[str, Any]) -> str | None:
    """What is wrong with an engine, which then draws no further token; empty: nothing is; None: it does not score."""
    try:
        logprobs = await engine.score_prompt(canary.token_ids)
    except EngineError as error:
        if error.kind != "refused":
            return f"the canary could not be scored: {error}"
        logger.warning(
            f"{engine} does not score prompts, so its log-probs are not compared with the trainer's: {error}"
        )
        return None
    exact, dtype = bool(answer.get("exact")), str(answer.get("dtype", ""))
    problem = compare_canary(canary, logprobs, exact=exact, dtype=dtype)
    if problem is None:
        return ""
    try:
        await engine.post("/pause")
    except EngineError as error:
        return f"{problem} (and it could not be paused: {error})"
    return f"{problem} (the engine is paused)"
