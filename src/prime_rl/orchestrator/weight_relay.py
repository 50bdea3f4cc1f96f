"""Propagates published weights to the inference servers and releases rollout slots."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.server_pool import ServerPool, ServerUnavailable
from prime_rl.runtime.run_dir import RunDir
from prime_rl.transport.batches import BatchSender
from prime_rl.transport.broadcast import acknowledge
from prime_rl.transport.file_watch import wait_for
from prime_rl.utils.monitor import Monitor
from rollouts.training.rollout_gen.async_rollout_manager import AsyncRolloutManager
from rollouts.training.steps import complete_steps, is_complete, step_path
from rollouts.training.weight_sync import WeightSyncError, sync_weights_to_engines

LOG_INTERVAL_S = 30.0
MAX_ATTEMPTS = 4
UNREAD_GRACE_S = 5.0  # pause after which a trainer that reads no batches counts as finished


class WeightRelay:
    """Waits for `weights/step_N`, loads it on every server, then makes it the live version.

        trainer publishes N -> notification -> servers load it, canary verified -> version N is live -> slots of N free

    Intermediate versions are skipped if a newer one exists. In a new run, a version whose batch was never sent or
    received means that the trainer uses other data: this is logged once, and slots are no longer tied to versions.
    With `before_load`, every version is loaded in turn after that returns (strict asynchrony: running groups finish).
    Unreachable servers are skipped; the server pool updates them when they return.
    In a resumed run, such versions belong to the interrupted attempt and are ignored.
    """

    def __init__(
        self,
        servers: ServerPool,
        *,
        is_received: Callable[[int], bool],
        timeout_s: float,
        log_timeline: Callable[[str, float, float, int], None],
        before_load: Callable[[], Awaitable[None]] | None = None,
        ema_servers: ServerPool | None = None,
        alternate_dir: Path | None = None,
    ) -> None:
        self.servers, self.version, self.weights_dir = servers, servers.version, servers.weights_dir
        self.ema_servers = ema_servers
        """The teacher's servers, if they serve the EMA weights."""
        self.alternate_dir = alternate_dir
        """Where a trainer with the other `weight_broadcast.type` would publish; checked to report a mismatch."""
        self.unread = False
        self.update_s = 0.0  # of the last update
        self._is_received = is_received
        self._timeout_s = timeout_s
        self._log_timeline = log_timeline
        self._before_load = before_load
        self.num_sent = self._start = self.version.live  # the last batch sent
        self._start_time = time.time()
        self._waiting_since: float | None = None
        self._changed = anyio.Event()

    @property
    def waited_s(self) -> float | None:
        """Seconds since the next version became due; None if none is due."""
        return None if self._waiting_since is None else time.monotonic() - self._waiting_since

    async def run(self) -> None:
        """Relay versions until cancelled. Raises `WeightSyncError`, or `TimeoutError` if no version arrives."""
        while True:
            try:
                step = await wait_for(self._newest, self.weights_dir, timeout_s=LOG_INTERVAL_S, what="a new version")
            except TimeoutError:
                self._check_timeout()
                continue
            if self._before_load is not None:
                await self._before_load()
            await self.load(step)

    async def load(self, step: int) -> None:
        """Make `step` live on every server; skip it if its directory is pruned meanwhile."""
        path, start = step_path(self.weights_dir, step), time.time()
        async with self.version.lock:
            try:
                await self._update_servers(step, path)
            except WeightSyncError:
                if is_complete(path):
                    raise
                return
        self.update_s = time.time() - start
        acknowledge(path)
        self._waiting_since = time.monotonic() if self.num_sent > step else None
        self._log_timeline("update_weights", start, time.time(), step)
        if not self.unread and self._is_unread(step):
            self.unread = True
            logger.warning(
                f"Batches unread: the trainer published version {step} without reading batch {step}; it trains on "
                f"other data (fake data?), or {self.weights_dir} contains weights of another run"
            )
        self.version.update(live=step, released=self.num_sent if self.unread else step)
        self._wake()

    async def _update_servers(self, step: int, path: Path) -> None:
        """Load and verify the version on all servers; retry if one could not read it, recovered or is not required."""
        servers, attempts_left, loaded = self.servers, MAX_ATTEMPTS, dict[int, dict[str, Any]]()
        while True:
            reachable = servers.reachable
            try:
                return await servers.run_together(reachable, partial(self._update, reachable, step, path, loaded))
            except (WeightSyncError, ServerUnavailable) as failure:
                error = failure if isinstance(failure, WeightSyncError) else self._describe_lost(reachable, path)
                attempts_left, unreachable = attempts_left - 1, set(servers.unreachable)
                may_repeat = is_complete(path)
                if may_repeat:
                    may_repeat = await self._wait_for_recovery(error) if attempts_left else servers.leave_out(error)
                if not may_repeat:
                    raise error from (None if error is failure else failure)
                unreachable |= servers.unreachable.keys()
                for i in unreachable if servers.is_elastic else list(loaded):
                    loaded.pop(i, None)  # it may have restarted meanwhile
                if len(servers.reachable) < len(reachable):
                    attempts_left = MAX_ATTEMPTS  # among many servers one server may fail in every attempt

    async def _update(self, reachable: Sequence[int], step: int, path: Path, loaded: dict[int, dict[str, Any]]) -> None:
        """One attempt. `loaded` has the responses of servers that loaded the version in an earlier attempt; they do not
        load it again, so the cost does not grow with the number of failures."""
        engines = self.servers.engines
        pending = [i for i in reachable if i not in loaded]
        try:
            answers = await sync_weights_to_engines([engines[i] for i in pending], str(path)) if pending else []
        except WeightSyncError as error:
            loaded.update({i: answer for i, answer in zip(pending, error.answers, strict=False) if answer})
            raise
        loaded.update(zip(pending, answers, strict=True))
        try:
            if self.ema_servers is not None:
                await self._update_ema(self.ema_servers, step)
            await self.servers.canary.check(step, path, [engines[i] for i in reachable], [loaded[i] for i in reachable])
        except WeightSyncError:
            loaded.clear()
            raise

    async def _update_ema(self, servers: ServerPool, step: int) -> None:
        """Load the EMA weights of the same step, published before the version."""
        root = servers.weights_dir
        if not complete_steps(root):
            raise ValueError(f'{root} has no EMA weights though teacher_model.weights = "ema": set trainer.ema_decay')
        await sync_weights_to_engines(servers.engines, str(step_path(root, step)))

    async def _wait_for_recovery(self, error: WeightSyncError) -> bool:
        """Whether the update can be retried: see `ServerPool.wait_for_recovery`."""
        if not await self.servers.wait_for_recovery(error):
            return False
        if self.ema_servers is None or not error.is_transient:
            return True
        return await self.ema_servers.wait_for_recovery(error)

    def _describe_lost(self, reachable: Sequence[int], path: Path) -> WeightSyncError:
        """The error for servers that became unreachable during an update."""
        engines, unreachable = self.servers.engines, self.servers.unreachable
        lost = "unreachable: lost during the update"
        states = [(str(engines[i]), lost if i in unreachable else "ok") for i in reachable]
        return WeightSyncError(str(path), states, is_transient=True)

    def mark_sent(self, step: int) -> None:
        """Record that batch `step` is sent, so version `step` is due."""
        self.num_sent = step
        self._waiting_since = self._waiting_since or time.monotonic()
        if self.unread:
            self.version.update(live=self.version.live, released=step)

    async def wait_for_version(self, step: int) -> None:
        """Return when version `step` is live, or when an unread trainer publishes nothing for `UNREAD_GRACE_S`."""
        while self.version.live < step:
            with anyio.move_on_after(UNREAD_GRACE_S if self.unread else math.inf) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                return

    def _newest(self) -> int | None:
        """The next version to load; None if there is no new one."""
        steps = [step for step in complete_steps(self.weights_dir) if step > self.version.live]
        if self._start:
            steps = [step for step in steps if not self._is_unread(step)]
        return steps[0 if self._before_load else -1] if steps else None

    def _is_unread(self, step: int) -> bool:
        if step > self.num_sent:
            return True
        # After a resume the trainer may have read the interrupted attempt's copy of the first batch.
        is_first = self._start and step == self._start + 1
        return not self._is_received(step) and not (is_first and self.servers.has_resumed())

    def _check_timeout(self) -> None:
        """Log while a version is overdue; `TimeoutError` after `timeout_s`."""
        if self._waiting_since is None or self.unread:
            return
        waited = time.monotonic() - self._waiting_since
        self._check_alternate_dir()
        step = self.version.live + 1
        expected = f"version {step} in {self.weights_dir}"
        if self._start and not self._is_received(step):
            expected += (
                f", but the trainer has not read batch {step}; unless it is loading, it has read batches of the "
                "interrupted attempt (restart it with --resume) or fake data (leave out data.fake)"
            )
        if waited > self._timeout_s:
            problem = "the trainer is stuck or not running; if its steps take longer, raise weights_timeout"
            raise TimeoutError(f"waited {waited:.0f} s for {expected}: {problem}")
        if waited >= LOG_INTERVAL_S:
            logger.warning(f"Waiting for the trainer ({waited:.0f} s): {expected}")

    def _check_alternate_dir(self) -> None:
        """`ValueError` if the due version was published with the other broadcast type."""
        step = self.version.live + 1
        if self.alternate_dir is None or not is_complete(path := step_path(self.alternate_dir, step)):
            return
        if path.stat().st_mtime > self._start_time - 1:  # older ones are of an earlier run; file timestamps are coarse
            raise ValueError(
                f"the trainer published version {step} in {self.alternate_dir}, this orchestrator reads "
                f"{self.weights_dir}: give trainer, orchestrator and inference the same weight_broadcast.type"
            )

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def build_relay(
    config: OrchestratorConfig,
    servers: ServerPool,
    ema_servers: ServerPool | None,
    rollouts: AsyncRolloutManager,
    sender: BatchSender,
    monitor: Monitor,
) -> WeightRelay:
    """Build the relay of the trainer's versions."""
    run = RunDir(config.output_dir)
    alternate_dir = run.broadcasts if config.versions_dir == run.weights else run.weights
    return WeightRelay(
        servers,
        is_received=sender.is_received,
        timeout_s=config.weights_timeout,
        log_timeline=monitor.log_timeline,
        before_load=rollouts.wait_until_idle if config.strict_async_level else None,
        ema_servers=ema_servers,
        alternate_dir=None if config.weight_broadcast.delta else alternate_dir,  # an anchor precedes its delta
    )
