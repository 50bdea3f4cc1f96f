"""Concurrent generation of batches of scored groups, in over-sampled waves or as a stream bounded by slots."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from rollouts.training.concurrency import run_concurrently
from rollouts.training.datasets.data_buffer import DataBuffer
from rollouts.training.rollout_gen.groups import DropReason, GroupBuffer, Outcome, mean_reward
from rollouts.training.rollout_gen.token_ledger import TokenLedger, count_sampled
from rollouts.training.types import RolloutBatch, RolloutConfig, Sample, Status, settle

STATE_VERSION = 1
MAX_INCOMPLETE_TRIES = 3
REJECTED_BATCHES = 10  # batches' worth of groups dropped in a row before an error
MAX_RESTARTS = 3  # of a group whose weights become too old while it runs
GenerateGroup = Callable[[int, Any], Awaitable[list[Sample]]]


class PromptSource(Protocol):
    """A source of prompts, such as a `DataBuffer`."""

    @property
    def epoch_id(self) -> int:
        """Number of completed passes over the prompts."""

    def draw(self) -> tuple[int, Any]:
        """Position and content of the next prompt."""

    def prompt_at(self, position: int) -> Any:
        """The prompt that was drawn as `position`."""

    def save_state(self) -> dict[str, Any]:
        """The state, serializable as JSON."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved."""


@dataclass(frozen=True)
class StalenessLimits:
    """Maximum age of a group: versions behind the one it trains, and weight updates during its generation.

    Older groups are generated again with the new weights, at most `MAX_RESTARTS` times, and then dropped.
    """

    max_staleness: int | None = None
    max_updates: int | None = None


@dataclass(frozen=True)
class PendingBatch:
    """A batch whose version is not live yet."""

    step: int
    num_groups: int
    outcomes: list[Outcome]


class GroupDropped(Exception):
    """Raised by a group's generator to drop the group; `reason` is a `DropReason` or a text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoTrainableGroupsError(RuntimeError):
    """Too many groups in a row were dropped; `reasons` counts why."""

    def __init__(self, reasons: dict[str, int]) -> None:
        self.reasons = reasons
        listed = ", ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        super().__init__(f"{sum(reasons.values())} groups in a row were dropped: {listed}")


class AsyncRolloutManager:
    """Draws prompts, generates groups of `n_samples_per_prompt` samples, scores, filters, and emits them in order.

    `config.batch_size` counts groups: a batch has batch_size * n_samples_per_prompt samples. Without `slots`, each
    `generate_batch` runs a wave of ceil(needed * over_sampling_factor) groups and caches the surplus. With `slots`,
    inside `async with manager`, groups are generated continuously: drawing a prompt takes a slot, which is freed when
    the group is dropped, or by `release(version)` after its batch has been trained. With (L + 1) * batch_size slots, no
    sample is more than L versions old when its batch is trained. `max_batches` ends the stream: groups for later
    batches are not started. With `in_order=False` a batch takes the groups that finish first; more slots then mean
    over-sampling, and `staleness_limits` bounds the age instead. At most `max_running` groups run at a time; a
    prompt is drawn when its group starts.

    `group_filter` returns the reason to reject a scored group, or None; it runs after the config's `filter_fn`, and may
    be async. `on_outcomes` receives the outcomes of a batch's prompts when its version is live, so that a curriculum
    based on them is deterministic.

    `tokens` accounts for every sampled token; a `generate_group` that discards tokens shares it and calls `receive`.

    `generate_group(group_index, prompt)` generates a whole group; without it `config.generate_fn([prompt], **kwargs)`
    is called once per sample, with `seed` if it has that parameter. Runs under asyncio and trio.
    """

    def __init__(
        self,
        data_buffer: PromptSource,
        config: RolloutConfig,
        *,
        generate_group: GenerateGroup | None = None,
        group_filter: Callable[[list[Sample]], Any] | None = None,
        on_outcomes: Callable[[list[Outcome]], None] = lambda outcomes: None,
        slots: int | None = None,
        max_running: int | None = None,
        in_order: bool = True,
        staleness_limits: StalenessLimits = StalenessLimits(),
        max_batches: int | None = None,
        max_rejected_groups: int | None = None,
        seed: int = 0,
        rollout_kwargs: dict[str, Any] | None = None,
        tokens: TokenLedger | None = None,
    ) -> None:
        if generate_group is None and config.generate_fn is None:
            raise ValueError("RolloutConfig.generate_fn must be provided")
        if slots is not None and slots < config.batch_size:
            raise ValueError(f"slots {slots} must be at least one batch of {config.batch_size} groups")
        if slots is None and max_batches is not None:
            raise ValueError(f"max_batches {max_batches} has no effect without slots: set slots, or leave it out")
        if max_running is not None and max_running < 1:
            raise ValueError(f"max_running {max_running} must be at least 1 group, or None for all")
        self.data_buffer = data_buffer
        self.config = config
        self.slots = slots
        self.max_running = max_running
        self.in_order = in_order
        self.staleness_limits = staleness_limits
        self.version = 0  # the last released
        self.idle_s = 0.0  # seconds without a running group: all slots wait for versions
        self.restarts: Counter[str] = Counter()  # restarted groups by reason
        self._group_filter = group_filter
        self._on_outcomes = on_outcomes
        self._max_batches = max_batches
        self.max_rejected_groups = max_rejected_groups or REJECTED_BATCHES * config.batch_size
        self.seed = seed
        self.rollout_kwargs = rollout_kwargs or {}
        self.step_count = 0
        self.groups = GroupBuffer()
        self.tokens = tokens or TokenLedger()
        self._generate_group = generate_group or self._generate_samples
        self._unreleased: deque[PendingBatch] = deque()
        self.reward_fn = config.reward_fn
        """Scores groups; that of `generate_batch` takes precedence."""
        self._wave_reward_fn: Callable[[Sample], Any] | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._running: dict[int, anyio.CancelScope] = {}
        self._start_versions: dict[int, int] = {}  # running group -> version that was live at its start
        self._num_restarts: Counter[int] = Counter()  # group -> number of restarts
        self._idle_since: float | None = None
        self._changed = anyio.Event()
        self._error: BaseException | None = None
        self._abort_requested = False

    async def __aenter__(self) -> AsyncRolloutManager:
        if self._tasks is not None:
            raise RuntimeError("the manager is already entered: run_rl_training enters it itself")
        if self.slots is not None:
            self._tasks = anyio.create_task_group()
            await self._tasks.__aenter__()
            self._refill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._tasks is None:
            return None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        try:
            return await tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if isinstance(error, Exception) and group.exceptions == (error,):
                return False  # it leaves the block as it is, not in a group
            raise

    @property
    def num_slots_used(self) -> int:
        """Open groups, plus those in batches whose version is not live yet."""
        return self.groups.num_open + sum(batch.num_groups for batch in self._unreleased)

    @property
    def num_running(self) -> int:
        """Groups in generation."""
        return len(self._running)

    @property
    def ready_samples(self) -> list[Sample]:
        """Samples of the finished groups that are not emitted yet."""
        return [sample for samples in self.groups.ready.values() for sample in samples]

    async def generate_batch(self, reward_fn: Callable[[Sample], Any] | None = None) -> RolloutBatch:
        """The next batch of groups, in index order; `reward_fn` overrides the config's for groups started by this call.

        Raises `NoTrainableGroupsError` after too many dropped groups in a row, `RuntimeError` once after
        `request_abort`, and errors of generators and of the source of prompts; finished groups are cached and
        unfinished ones run in the next call.
        """
        if self.slots is None:
            samples = await self._generate_wave(reward_fn)
        elif reward_fn is not None:
            raise ValueError("with slots, groups start before generate_batch is called: set reward_fn in the config")
        else:
            samples = await self._next_in_stream()
        self.step_count += 1
        self.tokens.emit(self.step_count, samples)
        if self.slots is not None:
            self._unreleased.append(PendingBatch(self.step_count, self.config.batch_size, self.groups.take_outcomes()))
            self._return_stale_groups()
            self._refill()
        else:
            self.tokens.release(self.step_count)
            self._on_outcomes(self.groups.take_outcomes())
        metadata = {"epoch_id": self.data_buffer.epoch_id, "step_id": self.step_count}
        return RolloutBatch.from_samples(samples, metadata)

    def release(self, version: int) -> None:
        """Free the slots of all batches up to `version`: they are trained and their weights are live."""
        self.version = max(self.version, version)
        self.tokens.release(version)
        while self._unreleased and self._unreleased[0].step <= version:
            self._on_outcomes(self._unreleased.popleft().outcomes)
        self._return_stale_groups()
        self._refill()

    async def wait_until_idle(self) -> None:
        """Wait until no group is in generation, that is, until every slot waits for a version."""
        while self._running:
            await self._changed.wait()

    def request_abort(self) -> None:
        """Cancel all running groups; the current `generate_batch` raises. No effect if nothing is running."""
        if self._running:
            self._abort_requested = True
            for scope in self._running.values():
                scope.cancel()

    def state_dict(self, *, keep_ready: bool = True) -> dict[str, Any]:
        """The state, serializable as JSON; running groups are saved as returned and run again after loading.

        `keep_ready`: false saves finished groups as returned, too. Processes that share the groups of a batch, each
        with samples of its own groups only, can then load the state of one of them.
        """
        tokens = self.tokens.state_dict()
        if not keep_ready:
            tokens["running"] += count_sampled(self.ready_samples)
        return {
            "version": STATE_VERSION,
            "buffer_state": self.data_buffer.save_state(),
            "step_count": self.step_count,
            "unreleased": [o.to_list() for batch in self._unreleased for o in batch.outcomes],
            "tokens": tokens,
            "restarts": dict(self.restarts),
            **self.groups.state_dict(keep_ready=keep_ready),
        }

    def load_state_dict(
        self, state: dict[str, Any], *, is_usable: Callable[[list[Sample]], bool] = lambda samples: True
    ) -> None:
        """Restore `state`. Its batches count as released: a resumed run has their weights.

        Finished groups are generated again unless they are usable, and if they would be too old when they are trained,
        because this manager has a smaller bound on staleness than that of `state`.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"rollout state has version {state.get('version')}, this code reads {STATE_VERSION}")
        if self._running:
            raise RuntimeError("load the state before generation starts")
        self.data_buffer.load_state(state["buffer_state"])
        self.step_count = self.version = state["step_count"]
        self.groups.load_state_dict(state)
        self.tokens.load_state_dict(state.get("tokens"), self.ready_samples)
        self.restarts = Counter(state.get("restarts", {}))  # not in states of earlier versions
        self._unreleased.clear()
        self._num_restarts.clear()
        self._error, self._abort_requested = None, False
        self._on_outcomes([Outcome.from_list(values) for values in state["unreleased"]])
        for group_index, samples in self.groups.ready.items():
            if not is_usable(samples):
                self.tokens.drop_samples(samples, DropReason.INTERRUPTED)
                self.groups.return_group(group_index)
        if self.slots is not None and self.in_order:
            max_staleness = (self.slots - 1) // self.config.batch_size
            ready = self.groups.ready
            for i, group_index in enumerate(sorted({*self.groups.returned, *ready})):
                oldest = self.step_count + i // self.config.batch_size - max_staleness
                self._return_if_older(group_index, ready.get(group_index, []), oldest)
        else:
            self._return_stale_groups()

    async def _generate_wave(self, reward_fn: Callable[[Sample], Any] | None) -> list[Sample]:
        """Run waves until a batch is ready; the surplus of the last wave is cached."""
        self._wave_reward_fn = reward_fn
        size = self.config.batch_size
        while self._failure() is None and (self.groups.num_ready < size or self.groups.returned):
            needed = max(size - self.groups.num_ready, 0)
            wave = math.ceil(needed * self.config.over_sampling_factor - 1e-9)
            async with anyio.create_task_group() as tasks:
                for _ in range(max(wave, len(self.groups.returned))):
                    while not self._has_place():
                        await self._changed.wait()
                    if self._failure() is not None:
                        break
                    self._start_group(tasks)
        self._raise_failure()
        return self._take()

    async def _next_in_stream(self) -> list[Sample]:
        if self._tasks is None:
            raise RuntimeError("a manager with slots generates inside `async with manager`")
        if self._max_batches is not None and self.step_count >= self._max_batches:
            raise RuntimeError(f"the stream has ended after {self.step_count} batches: raise max_batches")
        self._raise_failure()
        self._refill()  # restarts generation after a failure
        while (ready := self._take_or_none()) is None:
            self._raise_failure()
            await self._changed.wait()
        return ready

    def _refill(self) -> None:
        """Start a group for every free slot."""
        if self._tasks is None or self.slots is None or self._failure() is not None:
            return
        while self._can_start() and self._has_slot(self.slots):
            self._start_group(self._tasks)
            if self._error is not None:
                return
        self._update_idle_time()

    def _has_slot(self, slots: int) -> bool:
        """Whether the next group has one of the slots.

        A returned group still has that of its draw. In a resumed run with fewer slots it waits until the groups before
        it leave one free: they are trained before it.
        """
        if self.groups.returned:
            return self.num_slots_used - self.groups.num_from_returned < slots
        return self.num_slots_used < slots and not self._has_drawn_all()

    def _has_place(self) -> bool:
        """Whether `max_running` allows another group."""
        return self.max_running is None or len(self._running) < self.max_running

    def _can_start(self) -> bool:
        """Whether there is a place, and the current version is fresh enough for the next batch."""
        return self._has_place() and not self._is_stale(self.version)

    def _is_stale(self, version: int) -> bool:
        """Whether samples of `version` are too old for the next batch, which trains version `step_count`."""
        limit = self.staleness_limits.max_staleness
        return limit is not None and version < self.step_count - limit

    def _return_stale_groups(self) -> None:
        """Cancel or return groups that are too old; they are generated again before new ones."""
        limit = self.staleness_limits.max_updates
        for group_index, start_version in list(self._start_versions.items()):
            if self._is_stale(start_version) or (limit is not None and self.version - start_version > limit):
                self._start_versions.pop(group_index)
                self._running[group_index].cancel()
                self._num_restarts[group_index] += 1
                self.restarts["stale" if self._is_stale(start_version) else "off_policy"] += 1
        if (max_staleness := self.staleness_limits.max_staleness) is None:
            return
        for group_index, samples in self.groups.ready.items():
            self._return_if_older(group_index, samples, self.step_count - max_staleness)

    def _return_if_older(self, group_index: int, samples: list[Sample], version: int) -> None:
        """Return a finished group with tokens of an older version."""
        if min((v for s in samples for _, v in s.versions), default=version) < version:
            self.tokens.drop_samples(samples, DropReason.STALE)
            self.groups.return_group(group_index)
            self.restarts["stale"] += 1

    def _has_drawn_all(self) -> bool:
        """Whether the open groups are enough for the remaining batches; a resumed run may have another batch size."""
        if self._max_batches is None:
            return False
        return self.groups.num_open >= (self._max_batches - self.step_count) * self.config.batch_size

    def _update_idle_time(self) -> None:
        now = anyio.current_time()
        if self._idle_since is not None:
            self.idle_s += now - self._idle_since
        self._idle_since = None if self._running else now

    def _start_group(self, tasks: anyio.abc.TaskGroup) -> None:
        """Draw a prompt and generate its group; an error of the source of prompts is one of the manager."""
        try:
            if returned := self.groups.returned:
                position = returned[min(returned)]
                prompt = self.data_buffer.prompt_at(position)
            else:
                position, prompt = self.data_buffer.draw()
        except Exception as error:
            return self._fail(error)
        group_index, _ = self.groups.draw(position)
        scope = self._running[group_index] = anyio.CancelScope()
        self._start_versions[group_index] = self.version
        tasks.start_soon(self._run_group, group_index, prompt, scope)

    async def _run_group(self, group_index: int, prompt: Any, scope: anyio.CancelScope) -> None:
        """Generate, score and filter a group; it always ends as ready, dropped or returned."""
        try:
            with scope:
                samples = await self._generate_group(group_index, prompt)
                _assign_indices(samples, group_index)
                if not self.tokens.has_received(group_index):
                    self.tokens.receive(group_index, count_sampled(samples))
                await self._score(samples)
                reason = await self._rejection(samples)
                # The last request may have been answered before the cancellation: nothing after it has waited.
                await anyio.lowlevel.checkpoint_if_cancelled()
                if reason is None:
                    self.groups.finish(group_index, samples)
                    self.tokens.settle(group_index)
                else:
                    self.tokens.drop(group_index, reason)
                    self.groups.drop(group_index, reason, mean_reward(samples) if samples else None)
        except GroupDropped as drop:
            self.tokens.drop(group_index, drop.reason)
            self.groups.drop(group_index, drop.reason)
        except Exception as error:
            self._fail(error)
        finally:
            if group_index in self.groups.in_flight:
                is_stale = group_index not in self._start_versions
                self.tokens.drop(group_index, DropReason.STALE if is_stale else DropReason.INTERRUPTED)
                self._return_group(group_index)
            else:
                self._num_restarts.pop(group_index, None)
            del self._running[group_index]
            self._start_versions.pop(group_index, None)
            self._notify()
        self._refill()

    def _fail(self, error: Exception) -> None:
        """Cancel all running groups; the current or next `generate_batch` raises `error`."""
        self._error = self._error or error
        for scope in self._running.values():
            scope.cancel()
        self._notify()

    def _return_group(self, group_index: int) -> None:
        """Return an interrupted group, or drop it after `MAX_RESTARTS` restarts due to weight updates."""
        if self._num_restarts[group_index] > MAX_RESTARTS:
            del self._num_restarts[group_index]
            self.groups.drop(group_index, DropReason.STALE)
        else:
            self.groups.return_group(group_index)

    async def _score(self, samples: list[Sample]) -> None:
        reward_fn = self._wave_reward_fn or self.reward_fn
        if reward_fn is None:
            return
        for sample in samples:
            reward = await settle(reward_fn(sample))
            try:
                if isinstance(reward, str):
                    raise TypeError("it is text")
                sample.reward = float(reward)
            except (TypeError, ValueError) as error:
                raise TypeError(f"reward_fn returned {reward!r}: it must return one number per sample") from error
            if not math.isfinite(sample.reward):
                raise ValueError(
                    f"reward {sample.reward} of sample {sample.index} in group {sample.group_index} is not finite: "
                    "fix the reward function"
                )

    async def _rejection(self, samples: list[Sample]) -> str | None:
        """Name of the filter that rejects the group, or None."""
        if not samples:
            return DropReason.EMPTY
        accept = self.config.filter_fn
        if accept is not None and not await settle(accept(samples)):
            return getattr(accept, "__name__", "filter_fn")
        return None if self._group_filter is None else await settle(self._group_filter(samples))

    async def _generate_samples(self, group_index: int, prompt: Any) -> list[Sample]:
        """Generate a group with the per-sample `generate_fn`; retry missing, aborted and failed samples.

        After `MAX_INCOMPLETE_TRIES` the group is dropped with the last error as reason.
        """
        n = self.config.n_samples_per_prompt
        answers: list[list[Sample]] = [[] for _ in range(n)]

        async def fill(index: int) -> None:
            for _ in range(MAX_INCOMPLETE_TRIES):
                answers[index] = await self._call_generate_fn(prompt, sample_seed(self.seed, group_index, index))
                if len(answers[index]) == 1 and answers[index][0].status not in (Status.ABORTED, Status.FAILED):
                    answers[index][0].validate()
                    answers[index][0].index = index  # samples with one index are parts of one rollout
                    return
            raise GroupDropped(next((s.error for s in answers[index] if s.error), DropReason.INCOMPLETE))

        await run_concurrently(fill, range(n))
        return [answer[0] for answer in answers]

    async def _call_generate_fn(self, prompt: Any, seed: int) -> list[Sample]:
        function = self.config.generate_fn
        assert function is not None
        kwargs = dict(self.rollout_kwargs)
        if "seed" in inspect.signature(function).parameters:
            kwargs.setdefault("seed", seed)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            result = await function([prompt], **kwargs)
        else:
            # In a tuple, because trio refuses a coroutine as the result of a thread.
            (result,) = await anyio.to_thread.run_sync(lambda: (function([prompt], **kwargs),))
        return _check_generated(await settle(result))

    def _failure(self) -> BaseException | None:
        """The error that the next `generate_batch` raises."""
        if self._error is not None:
            return self._error
        if self._abort_requested:
            return RuntimeError("Abort requested during batch generation")
        if self.groups.rejected_streak.total() >= self.max_rejected_groups:
            return NoTrainableGroupsError(dict(self.groups.rejected_streak))
        return None

    def _raise_failure(self) -> None:
        """Raise the pending failure once; a later call continues with the cached groups."""
        failure = self._failure()
        if failure is None or self._running:
            return
        self._error, self._abort_requested = None, False
        self.groups.rejected_streak.clear()
        raise failure

    def _take(self) -> list[Sample]:
        taken = self._take_or_none()
        assert taken is not None, "a finished wave leaves no group open"
        return taken

    def _take_or_none(self) -> list[Sample] | None:
        groups = self.groups.take(self.config.batch_size, in_order=self.in_order)
        return None if groups is None else [sample for group in groups for sample in group]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def generate_rollout_batch(
    data_buffer: DataBuffer,
    config: RolloutConfig,
    reward_fn: Callable[[Sample], Any] | None = None,
    **rollout_kwargs: Any,
) -> RolloutBatch:
    """One batch from a temporary manager. The surplus of over-sampling is lost; use one manager for several batches."""
    return await AsyncRolloutManager(data_buffer, config, rollout_kwargs=rollout_kwargs).generate_batch(reward_fn)


def sample_seed(run_seed: int, group_index: int, index: int) -> int:
    """Seed of one sample, independent of scheduling; 53 bits, which a JSON number represents exactly."""
    digest = hashlib.blake2b(f"{run_seed}/{group_index}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 11


def _check_generated(answer: Any) -> list[Sample]:
    """The result of `generate_fn` for one prompt: a sample, or an empty list if it has to be called again."""
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise TypeError(f"generate_fn returned a {type(answer).__name__}: it must return a list of one Sample")
    samples = list(answer)
    if wrong := [sample for sample in samples if not isinstance(sample, Sample)]:
        raise TypeError(f"generate_fn returned a list with a {type(wrong[0]).__name__}: it must contain a Sample")
    if len(samples) > 1:
        raise ValueError(
            f"generate_fn returned {len(samples)} samples for one prompt: it is called once per sample, return one"
        )
    return samples


def _assign_indices(samples: list[Sample], group_index: int) -> None:
    for index, sample in enumerate(samples):
        sample.group_index = group_index
        if sample.index is None:
            sample.index = index
