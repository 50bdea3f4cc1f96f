"""State of the training server: sessions, models and sampling sessions of every tenant (a tenant is an API key)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from loguru import logger

from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.training_api.adapters import AdapterTrainer
from prime_rl.training_api.checkpoints import AdapterCheckpoint, AdapterStore, NotFound
from prime_rl.training_api.config import ServeConfig
from prime_rl.training_api.execution import Executor, Result
from prime_rl.training_api.futures import Future, Futures
from prime_rl.training_api.requests import Kind, Model, TrainingRequest
from prime_rl.training_api.sampling import Sampler
from prime_rl.training_api.training_queue import TrainingQueue

T = TypeVar("T")
MAX_EPHEMERAL = 32
"""Weights that a session keeps for sampling without a name; older ones are deleted when no request uses them."""

EPHEMERAL = "ephemeral_"
"""Name of unnamed weights, before the number of their sampling session."""

CLEANUP_S = 5.0


class TooMany(Exception):
    """A limit of the server is reached; the client repeats the request later."""


@dataclass
class ClientSession:
    """One client."""

    session_id: str
    owner: str
    metadata: dict[str, Any] | None
    display_name: str | None
    last_seen: float
    ephemeral: deque[AdapterCheckpoint] = field(default_factory=deque)


@dataclass
class SamplingSession:
    """Weights that a client samples from; `checkpoint` None: the base model."""

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    checkpoint: AdapterCheckpoint | None
    num_clients: int = 1
    num_requests: int = 0


def check_sampling_number(seq_id: Any) -> None:
    """`ValueError` for anything but a number from 0."""
    if type(seq_id) is not int or seq_id < 0:
        raise ValueError(f"sampling_session_seq_id must be a number from 0, got {seq_id!r}")


class TrainingService:
    """Everything that routes use; only the training thread calls the trainer."""

    def __init__(
        self, config: ServeConfig, trainer: AdapterTrainer, engine: AsyncEngine, store: AdapterStore, tokenizer: str
    ) -> None:
        self.config, self.trainer, self.engine, self.store, self.tokenizer = config, trainer, engine, store, tokenizer
        self.futures = Futures()
        self._thread = ThreadPoolExecutor(1, "training")
        self.queue = TrainingQueue()
        self.executor = Executor(trainer, store, config.model.name)
        self.sampler = Sampler(engine, store, config.max_loaded_adapters)
        self.sessions: dict[str, ClientSession] = {}
        self.models: dict[str, Model] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._seeds = 0

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names that clients may give."""
        return (self.config.model.name, *self.config.model.served_names)

    def next_seed(self) -> int:
        """Seed for a request without one."""
        self._seeds += 1
        return self.config.seed + self._seeds

    def start(self) -> None:
        """Start engine and background tasks; call inside the event loop."""
        self.engine.start()
        self._tasks = [asyncio.create_task(self._train()), asyncio.create_task(self._clean())]

    async def close(self) -> None:
        """Stop; a running request is finished first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self.engine.close)

    async def execute(self, work: Callable[[], T]) -> T:
        """Call `work` in the training thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Ownership: an id of another key is answered like an id that does not exist.

    def find_session(self, session_id: Any, owner: str) -> ClientSession:
        """A session of `owner`, which is now active; `NotFound` otherwise."""
        session = self.sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None or session.owner != owner:
            raise NotFound(f"there is no session {session_id!r} for this API key; a restarted server has none")
        session.last_seen = time.monotonic()
        return session

    def find_model(self, model_id: Any, owner: str) -> Model:
        """A model of `owner`; `NotFound` otherwise."""
        model = self.models.get(model_id) if isinstance(model_id, str) else None
        if model is None or model.owner != owner:
            raise NotFound(
                f"there is no model {model_id!r} for this API key: it was never created, it was unloaded, or the "
                "server restarted; create_training_client_from_state continues from a checkpoint"
            )
        self.find_session(model.session_id, owner)
        model.last_request = time.time()
        return model

    def find_sampling(self, sampling_session_id: Any, owner: str) -> SamplingSession:
        """A sampling session of `owner`; `NotFound` otherwise."""
        found = self.sampling.get(sampling_session_id) if isinstance(sampling_session_id, str) else None
        if found is None or found.owner != owner:
            raise NotFound(f"there is no sampling session {sampling_session_id!r} for this API key")
        self.find_session(found.session_id, owner)
        return found

    def find_future(self, request_id: Any, owner: str) -> Future | None:
        """A future of `owner`; None if there is none, or no longer."""
        future = self.futures.by_id.get(request_id) if isinstance(request_id, str) else None
        return future if future is not None and future.owner == owner else None

    def open_session(self, owner: str, metadata: Any, display_name: Any) -> ClientSession:
        """A new session; `TooMany` at the limit."""
        if len(self.sessions) >= self.config.limits.max_sessions:
            raise TooMany(f"{len(self.sessions)} sessions are open (limits.max_sessions)")
        session = ClientSession(f"session-{uuid.uuid4()}", owner, metadata, display_name, time.monotonic())
        self.sessions[session.session_id] = session
        return session

    def open_future(self, request_id: str, owner: str, session_id: str, queue: tuple[str, int] | None = None) -> Future:
        """A new pending future; `TooMany` at the limit."""
        self._check_pending()
        future = Future(request_id, owner, session_id, queue)
        self.futures.open(future)
        return future

    def _check_pending(self) -> None:
        if self.futures.num_pending >= self.config.limits.max_pending:
            raise TooMany(f"{self.futures.num_pending} requests are unfinished (limits.max_pending)")

    def submit(self, model: Model, seq_id: Any, kind: Kind, body: bytes) -> Future:
        """Queue a training request; a repeated number is the same request and returns its future."""
        if type(seq_id) is not int or not 0 <= seq_id < 2**31:
            raise ValueError(f"seq_id must be a number from 0, got {seq_id!r}")
        request = TrainingRequest(model.model_id, seq_id, kind, body)
        if (known := self.find_future(request.request_id, model.owner)) is not None:
            return known
        self.queue.check(model.model_id, seq_id)
        future = self.open_future(request.request_id, model.owner, model.session_id)
        self.queue.add(request)
        return future

    async def _train(self) -> None:
        while True:
            await self.queue.wait()
            request = self.queue.ready()[0]
            self.queue.start(request)
            await self.futures.run(self.futures.by_id[request.request_id], partial(self._run, request))

    async def _run(self, request: TrainingRequest) -> Result:
        """Execute a request; a model whose creation fails is forgotten."""
        model = self.models[request.model_id]
        try:
            result = await self.execute(lambda: self.executor.run(model, request))
        finally:
            if model.adapter is None:
                self.models.pop(model.model_id, None)
        if request.kind != "save_weights_for_sampler" or not request.fields()["ephemeral"]:
            return result
        assert isinstance(result, dict)
        session, checkpoint = (
            self.find_session(model.session_id, model.owner),
            self.store.find(result["path"], model.owner),
        )
        number = int(checkpoint.name.removeprefix(EPHEMERAL))
        opened = self.open_sampling(session, number, checkpoint, model.base_model)
        return {"type": request.kind, "sampling_session_id": opened.sampling_session_id}

    def reserve_model(self, model: Model) -> None:
        """Register a model that is about to be created; `TooMany` at the limit."""
        if len(self.models) >= self.config.limits.max_models:
            raise TooMany(f"{len(self.models)} models are loaded (limits.max_models): unload one")
        if not 1 <= model.config.rank <= self.config.limits.max_rank:
            raise ValueError(f"lora_config.rank must be from 1 to {self.config.limits.max_rank}: {model.config.rank}")
        self._check_pending()  # the request that creates it follows, and must not leave an empty model
        self.models[model.model_id] = model

    def open_sampling(
        self, session: ClientSession, seq_id: Any, checkpoint: AdapterCheckpoint | None, base_model: str
    ) -> SamplingSession:
        """A sampling session; the same one for a repeated number."""
        check_sampling_number(seq_id)
        name = f"{session.session_id}:sample:{seq_id}"
        if name not in self.sampling:
            self.sampling[name] = SamplingSession(name, session.session_id, session.owner, base_model, checkpoint)
            if checkpoint is not None and checkpoint.ephemeral:
                session.ephemeral.append(checkpoint)
        return self.sampling[name]

    async def unload(self, model_id: str) -> None:
        """Forget a model; its waiting requests fail."""
        self.models.pop(model_id, None)
        for request in self.queue.remove(model_id):
            future = self.futures.by_id[request.request_id]
            self.futures.close(future, None, (f"model {model_id} was unloaded", "user"))
        await self.execute(lambda: self.trainer.remove(model_id))

    async def end_session(self, session_id: str) -> None:
        """Unload a session's models, cancel its samples and delete its unnamed weights."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model in [m for m in self.models.values() if m.session_id == session_id]:
            await self.unload(model.model_id)
        self.futures.end_group(session_id)
        for name in [name for name, s in self.sampling.items() if s.session_id == session_id]:
            del self.sampling[name]
        for checkpoint in session.ephemeral:
            await self.delete(checkpoint)

    async def delete(self, checkpoint: AdapterCheckpoint) -> None:
        """Delete a checkpoint; `ValueError` while samples are drawn from it."""
        if self.sampler.in_use.get(checkpoint.path):
            raise ValueError(f"{checkpoint.path} is in use by running samples: delete it later")
        await self.sampler.unload(checkpoint.path)
        await asyncio.to_thread(self.store.delete, checkpoint)

    def _sampled_paths(self) -> dict[str, int]:
        """Checkpoints of open sampling sessions, which a time limit does not delete."""
        return {s.checkpoint.path: 1 for s in self.sampling.values() if s.checkpoint is not None}

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_S)
            try:
                await self.clean()
            except Exception:
                logger.exception("Cleanup failed; it is repeated")

    async def clean(self) -> None:
        """End abandoned sessions, and delete expired checkpoints and old unnamed weights."""
        oldest = time.monotonic() - self.config.limits.session_timeout
        for session in [s for s in self.sessions.values() if s.last_seen < oldest]:
            logger.info(f"{session.session_id} has ended: no request or heartbeat")
            await self.end_session(session.session_id)
        for session in self.sessions.values():
            while len(session.ephemeral) > MAX_EPHEMERAL and not self.sampler.in_use.get(session.ephemeral[0].path):
                await self.delete(session.ephemeral.popleft())
        for path in await asyncio.to_thread(self.store.delete_expired, self._sampled_paths()):
            logger.info(f"{path} has expired and was deleted")
            await self.sampler.unload(path)
