"""From a published version to engines that hold it, and to freed slots."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from loguru import logger

from prime_rl.orchestrator.canary import CanaryCheck
from prime_rl.orchestrator.engines import Attendance, ServerLeft
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.watch import wait_for
from rollouts.training.steps import complete_steps, is_complete, step_path
from rollouts.training.weight_sync import InferenceEngine, WeightSyncError, sync_weights_to_engines

REMIND_S = 30.0
MAX_TRIES = 4
QUIET_S = 5.0  # a trainer that reads no batches owes us nothing: its versions are relayed as long as they come


class WeightRelay:
    """Waits for `weights/step_N`, lets every engine load it, and tells `on_live(N)` once all of them hold it.

        trainer publishes N -> notification -> engines load, answers, canary verified -> version = N -> slots of N free

    Intermediate versions that were overtaken are skipped. When a version appears whose batch was not sent, or was not
    received by anybody, the trainer trains on something else: this is said once, and slots no longer wait for it.
    With `before_load` they are loaded one by one, each when that returns: strict asynchrony lets running groups finish.
    Engines that are away (`attendance`) are left out; whoever watches them brings them to the version later.
    In a resumed run, versions of batches not yet sent are leftovers of the interrupted one and are not looked at.
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
        canary_interval: int | None = None,
        attendance: Attendance | None = None,
        other_dir: Path | None = None,
    ) -> None:
        self.weights_dir = Path(weights_dir)
        self.other_dir = other_dir
        """Where a trainer would publish that hands weights over in the other way, by files or over process groups."""
        self.engines = engines
        self.version = version
        self.unread = False
        self.update_s = 0.0  # of the last update
        self._on_live = on_live
        self._is_received = is_received
        self._timeout_s = timeout_s
        self._log_timeline = log_timeline
        self._before_load = before_load
        self.attendance = attendance or Attendance(max(1, len(engines)))
        self.canary = CanaryCheck(canary_interval)
        self.lock = anyio.Lock()
        """Held while engines change their version."""
        self.followers: tuple[Path, Sequence[InferenceEngine]] | None = None
        """Where versions of the moving average are, and the engines of a teacher that hold them."""
        self.wait_back: Callable[[WeightSyncError], Awaitable[bool]] | None = None
        """Set by whoever watches the engines: whether those that failed were away and are back."""
        self._num_sent = version
        self._start = version
        self._began = time.time()
        self._waiting_since: float | None = None
        self._changed = anyio.Event()

    @property
    def num_sent(self) -> int:
        """The last batch that went out."""
        return self._num_sent

    @property
    def waited_s(self) -> float | None:
        """Seconds for which a version has been due; None: none is."""
        return None if self._waiting_since is None else time.monotonic() - self._waiting_since

    async def run(self) -> None:
        """Relay versions until cancelled. Raises `WeightSyncError`, or `TimeoutError` when the trainer is silent."""
        while True:
            try:
                step = await wait_for(
                    self._newest, self.weights_dir, timeout_s=REMIND_S, what=f"weights of step {self.version + 1}"
                )
            except TimeoutError:
                self._check_patience()
                continue
            if self._before_load is not None:
                await self._before_load()
            await self.load(step)

    async def load(self, step: int) -> None:
        """Make `step` live in every engine; a directory that is pruned meanwhile is left to the next look."""
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
                f"batches unread: the trainer published version {step} without reading batch {step}; it trains on "
                f"something else (fake data?), or {self.weights_dir} holds weights of another run"
            )
        self._on_live(self._num_sent if self.unread else step)
        self._wake()

    async def _update_engines(self, step: int, path: Path) -> None:
        """The engines load the version and are verified; tried again when one was away, and is back or may stay so."""
        tries_left, held = MAX_TRIES, dict[int, dict[str, Any]]()
        while True:
            present = self.attendance.present
            try:
                return await self.attendance.run_together(present, partial(self._update, present, step, path, held))
            except (WeightSyncError, ServerLeft) as failure:
                error = failure if isinstance(failure, WeightSyncError) else self._describe_absence(present, path)
                tries_left, away = tries_left - 1, set(self.attendance.away)
                if not (tries_left and is_complete(path) and self.wait_back and await self.wait_back(error)):
                    raise error from (None if error is failure else failure)
                away |= self.attendance.away.keys()
                for i in away if self.attendance.is_elastic else list(held):
                    held.pop(i, None)  # it may have fallen and started again meanwhile
                if len(self.attendance.present) < len(present):
                    tries_left = MAX_TRIES  # in a large fleet one may leave in every try

    async def _update(self, present: Sequence[int], step: int, path: Path, held: dict[int, dict[str, Any]]) -> None:
        """One try. `held` are the answers of engines that took the version in an earlier one: they are not told again,
        so that an update costs as much however many leave meanwhile."""
        untold = [i for i in present if i not in held]
        try:
            answers = await sync_weights_to_engines([self.engines[i] for i in untold], str(path)) if untold else []
        except WeightSyncError as error:
            held.update({i: answer for i, answer in zip(untold, error.answers, strict=False) if answer})
            raise
        held.update(zip(untold, answers, strict=True))
        try:
            await self._update_followers(step)
            await self.canary.check(step, path, [self.engines[i] for i in present], [held[i] for i in present])
        except WeightSyncError:
            held.clear()
            raise

    def _describe_absence(self, present: Sequence[int], path: Path) -> WeightSyncError:
        """Which of the engines left during an update."""
        away = self.attendance.away
        left = "unreachable: left during the update"
        return WeightSyncError(str(path), [(str(self.engines[i]), left if i in away else "ok") for i in present])

    async def _update_followers(self, step: int) -> None:
        """The teacher's engines load the average of the same step, which is published before the version is."""
        if self.followers is None:
            return
        root, engines = self.followers
        if not complete_steps(root):
            raise ValueError(f'{root} holds no average though teacher_model.weights = "ema": set trainer.ema_decay')
        await sync_weights_to_engines(engines, str(step_path(root, step)))

    def sent(self, step: int) -> None:
        """Batch `step` is on its way: version `step` is due."""
        self._num_sent = step
        self._waiting_since = self._waiting_since or time.monotonic()
        if self.unread:
            self._on_live(step)

    async def wait_version(self, step: int) -> None:
        """Return when version `step` is live; when nobody reads our batches, also once the trainer falls silent."""
        while self.version < step:
            with anyio.move_on_after(QUIET_S if self.unread else math.inf) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                return

    def _newest(self) -> int | None:
        """The newest version to load, or None while there is nothing new."""
        last = self._num_sent if self._start else math.inf
        steps = [step for step in complete_steps(self.weights_dir) if self.version < step <= last]
        return steps[0 if self._before_load else -1] if steps else None

    def _is_unread(self, step: int) -> bool:
        if step > self._num_sent:
            return True
        # Just resumed, the trainer may have read the interrupted run's copy of the first batch before we replaced it.
        return not self._is_received(step) and not (self._start and step == self._start + 1)

    def _check_patience(self) -> None:
        """Remind, and at last give up, while a version is due and does not come."""
        if self._waiting_since is None or self.unread:
            return
        waited = time.monotonic() - self._waiting_since
        self._check_way()
        wanted = f"version {self.version + 1} in {self.weights_dir}"
        if waited > self._timeout_s:
            raise TimeoutError(f"waited {waited:.0f} s for {wanted}: the trainer is not running or stuck")
        if waited >= REMIND_S:
            logger.warning(f"waiting for the trainer since {waited:.0f} s: {wanted}")

    def _check_way(self) -> None:
        """`ValueError` when the version that is due has been published in the other way."""
        if self.other_dir is None or not is_complete(found := step_path(self.other_dir, self.version + 1)):
            return
        if found.stat().st_mtime > self._began - 1:  # else of an earlier run; file systems count time more coarsely
            raise ValueError(
                f"the trainer published version {self.version + 1} in {self.other_dir}, this orchestrator looks in "
                f"{self.weights_dir}: give trainer, orchestrator and inference the same weight_broadcast.type"
            )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
