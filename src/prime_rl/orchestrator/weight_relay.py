"""Propagates published weights to the inference servers and releases rollout slots."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from loguru import logger

from prime_rl.orchestrator.canary import CanaryCheck
from prime_rl.orchestrator.server_pool import ServerPool, ServerUnavailable
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.file_watch import wait_for
from rollouts.training.steps import complete_steps, is_complete, step_path
from rollouts.training.weight_sync import InferenceEngine, WeightSyncError, sync_weights_to_engines

LOG_INTERVAL_S = 30.0
MAX_ATTEMPTS = 4
UNREAD_GRACE_S = 5.0  # pause after which a trainer that reads no batches counts as finished


class WeightRelay:
    """Waits for `weights/step_N`, loads it on every engine, then calls `on_live(N)`.

        trainer publishes N -> notification -> engines load it, canary verified -> version = N -> slots of N free

    Intermediate versions are skipped if a newer one exists. A version whose batch was never sent or received means
    that the trainer uses other data: this is logged once, and slots are no longer tied to versions.
    With `before_load`, every version is loaded in turn after that returns (strict asynchrony: running groups finish).
    Unreachable servers (`server_pool`) are skipped; the server monitor updates them when they return.
    In a resumed run, versions of batches not yet sent belong to the interrupted attempt and are ignored.
    """

    def __init__(
        self,
        weights_dir: Path,
        engines: Sequence[InferenceEngine],
        *,
        version: int,
        on_live: Callable[[int], None],
        is_received: Callable[[int], bool],
        timeout_s: float,
        log_timeline: Callable[[str, float, float, int], None],
        before_load: Callable[[], Awaitable[None]] | None = None,
        weight_check_interval: int | None = None,
        server_pool: ServerPool | None = None,
        alternate_dir: Path | None = None,
    ) -> None:
        self.weights_dir = Path(weights_dir)
        self.alternate_dir = alternate_dir
        """Where a trainer with the other `weight_broadcast.type` would publish; checked to report a mismatch."""
        self.engines = engines
        self.version = version
        self.unread = False
        self.update_s = 0.0  # of the last update
        self._on_live = on_live
        self._is_received = is_received
        self._timeout_s = timeout_s
        self._log_timeline = log_timeline
        self._before_load = before_load
        self.server_pool = server_pool or ServerPool(max(1, len(engines)))
        self.canary = CanaryCheck(weight_check_interval)
        self.lock = anyio.Lock()
        """Locked while engines change their version."""
        self.ema_engines: tuple[Path, Sequence[InferenceEngine]] | None = None
        """Directory of the EMA weights, and the teacher's engines that serve them."""
        self.wait_for_recovery: Callable[[WeightSyncError], Awaitable[bool]] | None = None
        """Set by the server monitor: whether the failed engines were unreachable and an update can be retried."""
        self._num_sent = version
        self._start = version
        self._start_time = time.time()
        self._waiting_since: float | None = None
        self._changed = anyio.Event()

    @property
    def num_sent(self) -> int:
        """Number of the last batch sent."""
        return self._num_sent

    @property
    def waited_s(self) -> float | None:
        """Seconds since the next version became due; None if none is due."""
        return None if self._waiting_since is None else time.monotonic() - self._waiting_since

    async def run(self) -> None:
        """Relay versions until cancelled. Raises `WeightSyncError`, or `TimeoutError` if no version arrives."""
        while True:
            try:
                step = await wait_for(
                    self._newest, self.weights_dir, timeout_s=LOG_INTERVAL_S, what=f"weights of step {self.version + 1}"
                )
            except TimeoutError:
                self._check_timeout()
                continue
            if self._before_load is not None:
                await self._before_load()
            await self.load(step)

    async def load(self, step: int) -> None:
        """Make `step` live on every engine; skip it if its directory is pruned meanwhile."""
        path, start = step_path(self.weights_dir, step), time.time()
        async with self.lock:
            try:
                await self._update_engines(step, path)
            except WeightSyncError:
                if is_complete(path):
                    raise
                return
            self.version, self.update_s = step, time.time() - start
        acknowledge(path)
        self._waiting_since = time.monotonic() if self._num_sent > step else None
        self._log_timeline("update_weights", start, time.time(), step)
        if not self.unread and self._is_unread(step):
            self.unread = True
            logger.warning(
                f"Batches unread: the trainer published version {step} without reading batch {step}; it trains on "
                f"other data (fake data?), or {self.weights_dir} contains weights of another run"
            )
        self._on_live(self._num_sent if self.unread else step)
        self._wake()

    async def _update_engines(self, step: int, path: Path) -> None:
        """Load and verify the version on all engines; retry if an unreachable one recovered or is not required."""
        attempts_left, loaded = MAX_ATTEMPTS, dict[int, dict[str, Any]]()
        while True:
            reachable = self.server_pool.reachable
            try:
                return await self.server_pool.run_together(
                    reachable, partial(self._update, reachable, step, path, loaded)
                )
            except (WeightSyncError, ServerUnavailable) as failure:
                error = failure if isinstance(failure, WeightSyncError) else self._describe_unreachable(reachable, path)
                attempts_left, unreachable = attempts_left - 1, set(self.server_pool.unreachable)
                if not (
                    attempts_left
                    and is_complete(path)
                    and self.wait_for_recovery
                    and await self.wait_for_recovery(error)
                ):
                    raise error from (None if error is failure else failure)
                unreachable |= self.server_pool.unreachable.keys()
                for i in unreachable if self.server_pool.is_elastic else list(loaded):
                    loaded.pop(i, None)  # it may have restarted meanwhile
                if len(self.server_pool.reachable) < len(reachable):
                    attempts_left = MAX_ATTEMPTS  # in a large fleet one server may fail in every attempt

    async def _update(self, reachable: Sequence[int], step: int, path: Path, loaded: dict[int, dict[str, Any]]) -> None:
        """One attempt. `loaded` has the responses of engines that loaded the version in an earlier attempt; they do not
        load it again, so the cost does not grow with the number of failures."""
        pending = [i for i in reachable if i not in loaded]
        try:
            answers = await sync_weights_to_engines([self.engines[i] for i in pending], str(path)) if pending else []
        except WeightSyncError as error:
            loaded.update({i: answer for i, answer in zip(pending, error.answers, strict=False) if answer})
            raise
        loaded.update(zip(pending, answers, strict=True))
        try:
            await self._update_ema_engines(step)
            await self.canary.check(step, path, [self.engines[i] for i in reachable], [loaded[i] for i in reachable])
        except WeightSyncError:
            loaded.clear()
            raise

    async def check_restarted(self, answers: Mapping[int, dict[str, Any]]) -> None:
        """Check the canary on restarted engines and on those of a resumed run; `answers` by engine index."""
        path = step_path(self.weights_dir, self.version)
        for i, answer in answers.items():
            await self.canary.check_restarted(path, self.engines[i], answer)

    def _describe_unreachable(self, reachable: Sequence[int], path: Path) -> WeightSyncError:
        """The error for engines that became unreachable during an update."""
        unreachable = self.server_pool.unreachable
        lost = "unreachable: lost during the update"
        return WeightSyncError(
            str(path), [(str(self.engines[i]), lost if i in unreachable else "ok") for i in reachable]
        )

    async def _update_ema_engines(self, step: int) -> None:
        """Load the EMA weights of the same step, published before the version, on the teacher's engines."""
        if self.ema_engines is None:
            return
        root, engines = self.ema_engines
        if not complete_steps(root):
            raise ValueError(f'{root} has no EMA weights though teacher_model.weights = "ema": set trainer.ema_decay')
        await sync_weights_to_engines(engines, str(step_path(root, step)))

    def mark_sent(self, step: int) -> None:
        """Record that batch `step` is sent, so version `step` is due."""
        self._num_sent = step
        self._waiting_since = self._waiting_since or time.monotonic()
        if self.unread:
            self._on_live(step)

    async def wait_for_version(self, step: int) -> None:
        """Return when version `step` is live, or when an unread trainer publishes nothing for `UNREAD_GRACE_S`."""
        while self.version < step:
            with anyio.move_on_after(UNREAD_GRACE_S if self.unread else math.inf) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                return

    def _newest(self) -> int | None:
        """The next version to load; None if there is no new one."""
        last = self._num_sent if self._start else math.inf
        steps = [step for step in complete_steps(self.weights_dir) if self.version < step <= last]
        return steps[0 if self._before_load else -1] if steps else None

    def _is_unread(self, step: int) -> bool:
        if step > self._num_sent:
            return True
        # After a resume the trainer may have read the interrupted attempt's copy of the first batch.
        return not self._is_received(step) and not (self._start and step == self._start + 1)

    def _check_timeout(self) -> None:
        """Log while a version is overdue; `TimeoutError` after `timeout_s`."""
        if self._waiting_since is None or self.unread:
            return
        waited = time.monotonic() - self._waiting_since
        self._check_alternate_dir()
        expected = f"version {self.version + 1} in {self.weights_dir}"
        if waited > self._timeout_s:
            raise TimeoutError(f"waited {waited:.0f} s for {expected}: the trainer is stuck or not running")
        if waited >= LOG_INTERVAL_S:
            logger.warning(f"Waiting for the trainer ({waited:.0f} s): {expected}")

    def _check_alternate_dir(self) -> None:
        """`ValueError` if the due version was published with the other broadcast type."""
        if self.alternate_dir is None or not is_complete(path := step_path(self.alternate_dir, self.version + 1)):
            return
        if path.stat().st_mtime > self._start_time - 1:  # older ones are of an earlier run; file timestamps are coarse
            raise ValueError(
                f"the trainer published version {self.version + 1} in {self.alternate_dir}, this orchestrator reads "
                f"{self.weights_dir}: give trainer, orchestrator and inference the same weight_broadcast.type"
            )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
