"""Log-prob check of engines against the trainer's canary: first versions, then at intervals and after restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from loguru import logger

from prime_rl.transport.canary import Canary, compare_canary, read_canary
from rollouts.training.weight_sync import EngineError, FailureKind, InferenceEngine, PrimeEngine, WeightSyncError

FIRST_VERSIONS = 3
"""Versions that are always checked before the interval applies."""


class CanaryMismatch(WeightSyncError):
    """An engine's log-probs differ from the trainer's."""


class CanaryCheck:
    """Scores the canary on every engine for the first versions, then every `interval` versions; None: never."""

    def __init__(self, interval: int | None) -> None:
        self.interval = interval
        self.num_checked = 0
        self._last = 0

    def is_due(self, step: int) -> bool:
        """Whether `step` must be checked."""
        if self.interval is None:
            return False
        return self.num_checked < FIRST_VERSIONS or step >= self._last + self.interval

    async def check(
        self, step: int, path: Path, engines: Sequence[InferenceEngine], answers: Sequence[dict[str, Any]]
    ) -> None:
        """Check the engines if `step` is due; `answers` are their responses to the weight update.

        Raises `CanaryMismatch` if an engine's log-probs differ, after pausing it, and `WeightSyncError` if one is
        unreachable.
        """
        if self.is_due(step) and await self._compare(path, engines, answers):
            self._last = step
            self.num_checked += 1
            logger.info(f"Verified version {step}: engine log-probs match the trainer")

    async def check_restarted(self, path: Path, engine: InferenceEngine, answer: dict[str, Any]) -> None:
        """Check a new engine, or one of a resumed run, regardless of the interval; raises as `check`."""
        if self.interval is not None and await self._compare(path, [engine], [answer]):
            logger.info(f"Verified {path.name} on {engine}: log-probs match the trainer")

    async def _compare(self, path: Path, engines: Sequence[InferenceEngine], answers: Sequence[dict[str, Any]]) -> bool:
        """Whether every engine was checked and matches."""
        canary = read_canary(path)
        if canary is None:
            return False
        problems: dict[int, str | None] = {}
        failures: list[EngineError] = []

        async def compare(i: int) -> None:
            engine = engines[i]
            if not isinstance(engine, PrimeEngine):
                return
            try:
                problems[i] = await _compare_engine(engine, canary, answers[i])
            except EngineError as error:
                problems[i] = f"the canary could not be scored: {error}"
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for i in range(len(engines)):
                tasks.start_soon(compare, i)
        if any(problems.values()):
            states = [(str(engine), problems.get(i) or "ok") for i, engine in enumerate(engines)]
            if sum(map(bool, problems.values())) > len(failures):
                raise CanaryMismatch(str(path), states)
            raise WeightSyncError(str(path), states, is_transient=all(error.is_transient for error in failures))
        return bool(problems) and None not in problems.values()


async def _compare_engine(engine: PrimeEngine, canary: Canary, answer: dict[str, Any]) -> str | None:
    """The problem of an engine, which is then paused; "": none; None: it does not score prompts.

    Raises `EngineError` if it is unreachable.
    """
    logprobs, rejection = await _score(engine, canary)
    if rejection is not None and not any(logprobs):
        logger.warning(
            f"{engine} does not score prompts, so its log-probs are not compared with the trainer's: {rejection}"
        )
        return None
    dtype, arithmetic = (str(answer.get(key, "")) for key in ("dtype", "arithmetic"))
    problem = compare_canary(canary, logprobs, exact=bool(answer.get("exact")), dtype=dtype, arithmetic=arithmetic)
    if problem is None:
        return ""
    try:
        await engine.post("/pause")
    except EngineError as error:
        return f"{problem} (and it could not be paused: {error})"
    return f"{problem} (the engine is paused)"


async def _score(engine: PrimeEngine, canary: Canary) -> tuple[list[list[float] | None], EngineError | None]:
    """Log-probs of each prompt, None where the engine rejects it, and the rejection. Raises `EngineError` otherwise."""
    logprobs: list[list[float] | None] = [None] * len(canary.prompts)
    rejections: list[EngineError] = []
    failures: list[EngineError] = []

    async def score(i: int) -> None:
        try:
            logprobs[i] = await engine.score_prompt(canary.prompts[i].token_ids)
        except EngineError as error:
            (rejections if error.kind is FailureKind.REFUSED else failures).append(error)

    async with anyio.create_task_group() as tasks:
        for i in range(len(canary.prompts)):
            tasks.start_soon(score, i)
    if failures:
        raise failures[0]
    return logprobs, rejections[0] if rejections else None
