"""State of the training server: sessions, models and sampling sessions of every tenant (a tenant is an API key)."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import torch
from loguru import logger

from prime_rl.inference.async_engine import AsyncEngine
from prime_rl.runtime.machine import num_cores
from prime_rl.training_api.adapters import AdapterConfig, AdapterTrainer
from prime_rl.training_api.checkpoints import AdapterCheckpoint, AdapterStore, NotFound
from prime_rl.training_api.config import ServeConfig
from prime_rl.training_api.execution import Executor, Result
from prime_rl.training_api.futures import Future, Futures
from prime_rl.training_api.metrics import ServerMetrics
from prime_rl.training_api.request_log import RequestLog
from prime_rl.training_api.requests import ClientSession, Kind, Model, SamplingSession, TrainingRequest
from prime_rl.training_api.sampling import EngineSampling, Sampler, SampleRequest, SamplingBackend, parse_sample
from prime_rl.training_api.snapshots import SnapshotStore
from prime_rl.training_api.training_loop import TrainingLoop

MAX_EPHEMERAL = 32
"""Weights that a session keeps for sampling without a name; older ones are deleted when no request uses them."""

EPHEMERAL = "ephemeral_"
"""Name of unnamed weights, before the number of their sampling session."""

CLEANUP_S = 5.0


class TooMany(Exception):
    """A limit of the server is reached; the client repeats the request later."""


def check_sampling_number(seq_id: Any) -> None:
    """`ValueError` for anything but a number from 0."""
    if type(seq_id) is not int or seq_id < 0:
        raise ValueError(f"sampling_session_seq_id must be a number from 0, got {seq_id!r}")


async def _repeat(interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await work()
        except Exception:
            logger.exception(f"Background task {work.__name__} failed; it goes on")


class TrainingService:
    """Everything that routes use; only threads of `TrainingLoop` call the trainer.

    `base_name` and `tokenizer` are names by which `peft` loads the base model, and clients its tokenizer.
    """

    def __init__(
        self,
        config: ServeConfig,
        trainer: AdapterTrainer,
        engine: AsyncEngine,
        store: AdapterStore,
        log: RequestLog,
        base_name: str,
        tokenizer: str,
        sampling: SamplingBackend | None = None,
    ) -> None:
        self.config, self.trainer, self.engine, self.store, self.tokenizer = config, trainer, engine, store, tokenizer
        self.log = log
        self.metrics = ServerMetrics(config.output_dir)
        self.futures = Futures(log, self.metrics.observe)
        self.training = TrainingLoop(
            Executor(trainer, store, base_name),
            log,
            self.futures,
            SnapshotStore(config.output_dir / "snapshots"),
            config.snapshot_interval,
            config.max_trained_adapters,
            self._open_saved_weights,
            self._count_pass_threads,
        )
        self.models, self.queue = self.training.models, self.training.queue
        self.sampler = Sampler(sampling or EngineSampling(engine, store), config.max_loaded_adapters)
        self.sessions: dict[str, ClientSession] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.error: BaseException | None = None

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names that clients may give."""
        return (self.config.model.name, *self.config.model.served_names)

    def _count_pass_threads(self) -> int:
        """Number of passes that may be computed at the same time: one core is left to samples while there are any."""
        cores = num_cores() // torch.get_num_threads()
        return max(cores - (self.engine.num_requests > 0), 1)

    def find_seed(self, session: ClientSession, name: str) -> int:
        """Seed for a request without one: that of another session differs, other keys have no effect."""
        text = f"{self.config.seed}:{session.number}:{name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def start(self) -> None:
        """Restore what the request log holds, and start engine and background tasks; call inside the event loop."""
        self.engine.start()
        self._restore()
        repeated = _repeat(CLEANUP_S, self.clean), _repeat(self.config.metrics_interval, self.log_metrics)
        work = (self.log.run(), self.training.run(), *repeated)
        self._tasks = [asyncio.create_task(task) for task in work]
        for task in self._tasks:
            task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """Stop the server when a background task has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.opt(exception=error).error("The server stops")
            self.error = error
            self.engine.on_failure()

    def _restore(self) -> None:
        for kind, data, next_seq, snapshot in self.log.fetch("SELECT kind, data, next_seq, snapshot FROM records"):
            fields = orjson.loads(data)
            if kind == "session":
                self.sessions[fields["session_id"]] = ClientSession(**fields)
            elif kind == "model":
                config = AdapterConfig(**fields.pop("config"))
                model = Model(**fields, config=config, snapshot=snapshot)
                self.models[model.model_id] = model
                self.queue.restore(model.model_id, next_seq)
            else:
                saved = fields.pop("checkpoint")
                found = SamplingSession(**fields, checkpoint=None if saved is None else AdapterCheckpoint(**saved))
                self.sampling[found.sampling_session_id] = found
        weights = {s.checkpoint.path: s.checkpoint for s in self.sampling.values() if s.checkpoint is not None}
        self.store.delete_ephemeral(weights)
        for checkpoint in sorted(weights.values(), key=lambda c: c.created):
            session = self.sessions.get(checkpoint.model_id.partition(":")[0])
            if checkpoint.ephemeral and session is not None:
                session.ephemeral.append(checkpoint)
        self.training.snapshots.keep_only(self.models)
        for target, seq_id, kind, body in self.log.fetch("SELECT target, seq_id, kind, body FROM requests"):
            if target in self.sampling:
                self._start_sample(self.sampling[target], seq_id, body)
            elif target in self.models and self.queue.is_open(target, seq_id):
                self._start_request(self.models[target], TrainingRequest(target, seq_id, kind, body))
        if self.sessions:
            logger.info(f"Restored {len(self.sessions)} sessions, {len(self.futures.by_id)} requests are unfinished")

    def end_polls(self) -> None:
        """End all long polls, as if their time was over."""
        for future in self.futures.by_id.values():
            future.done.set()
        for found in self.sampling.values():
            found.completed.set()

    async def close(self) -> None:
        """Stop; a running training request is finished first, and unfinished samples are drawn after a restart."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self.futures.cancel(lambda future: future.kind == "asample"), return_exceptions=True)
        await asyncio.to_thread(self.training.close)
        await asyncio.to_thread(self.engine.close)
        await asyncio.to_thread(self.log.close)

    # Ownership: an id of another key is answered like an id that does not exist.

    def find_session(self, session_id: Any, owner: str) -> ClientSession:
        """A session of `owner`, which is now active; `NotFound` otherwise."""
        session = self.sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None or session.owner != owner:
            raise NotFound(f"there is no session {session_id!r} for this API key: it was finished, or abandoned")
        session.last_seen = time.monotonic()
        return session

    def find_model(self, model_id: Any, owner: str) -> Model:
        """A model of `owner`; `NotFound` otherwise."""
        model = self.models.get(model_id) if isinstance(model_id, str) else None
        if model is None or model.owner != owner:
            raise NotFound(
                f"there is no model {model_id!r} for this API key: it was never created, it was unloaded, or its "
                "session ended; create_training_client_from_state continues from a checkpoint"
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
        """An unfinished request of `owner`, whose session is now active; None if there is none."""
        future = self.futures.by_id.get(request_id) if isinstance(request_id, str) else None
        if future is None or future.owner != owner:
            return None
        if (session := self.sessions.get(future.session_id)) is not None:
            session.last_seen = time.monotonic()
        return future

    async def open_session(self, owner: str, metadata: Any, display_name: Any) -> ClientSession:
        """A new session; `TooMany` at the limit."""
        if len(self.sessions) >= self.config.limits.max_sessions:
            raise TooMany(f"{len(self.sessions)} sessions are open (limits.max_sessions)")
        [(number,)] = await self.log.execute(
            "INSERT INTO owners VALUES (?, 1) ON CONFLICT DO UPDATE SET num_sessions = num_sessions + 1 "
            "RETURNING num_sessions",
            owner,
        )
        session = ClientSession(f"session-{uuid.uuid4()}", owner, number, metadata, display_name)
        self.sessions[session.session_id] = session
        self.log.add_record(session.session_id, "session", session.session_id, session.describe())
        return session

    def _check_pending(self, num_bytes: int = 0) -> None:
        limits, futures = self.config.limits, self.futures
        if len(futures.by_id) >= limits.max_pending:
            raise TooMany(f"{len(futures.by_id)} requests are unfinished (limits.max_pending)")
        if futures.num_bytes + num_bytes > limits.max_pending_mb * 2**20:
            raise TooMany(f"unfinished requests have {futures.num_bytes / 2**20:.0f} MB (limits.max_pending_mb)")

    def submit(self, model: Model, seq_id: Any, kind: Kind, body: bytes) -> str:
        """Queue a training request; returns its id. A repeated number is the same request."""
        if type(seq_id) is not int or not 0 <= seq_id < 2**31:
            raise ValueError(f"seq_id must be a number from 0, got {seq_id!r}")
        request = TrainingRequest(model.model_id, seq_id, kind, body)
        if request.request_id not in self.futures.by_id and self.queue.is_open(model.model_id, seq_id):
            self._check_pending(len(body))
            self.log.add_request(request.request_id, model.session_id, model.model_id, seq_id, kind, body)
            self._start_request(model, request)
        return request.request_id

    def _start_request(self, model: Model, request: TrainingRequest) -> None:
        name, num_bytes = request.request_id, len(request.body)
        self.futures.open(
            Future(name, model.owner, model.session_id, model.model_id, request.seq_id, num_bytes, request.kind)
        )
        self.queue.add(request)

    def submit_sample(self, found: SamplingSession, seq_id: int, body: bytes) -> str:
        """Start a validated sample request; returns its id. A repeated number gives the same result."""
        request_id = f"{found.sampling_session_id}:{seq_id}"
        if request_id not in self.futures.by_id:
            self._check_pending(len(body))
            name = found.sampling_session_id
            self.log.add_request(request_id, found.session_id, name, seq_id, "asample", body)
            self._start_sample(found, seq_id, body)
        return request_id

    def _start_sample(self, found: SamplingSession, seq_id: int, body: bytes) -> None:
        name = found.sampling_session_id
        future = Future(f"{name}:{seq_id}", found.owner, found.session_id, name, seq_id, len(body))
        self.futures.open(future)

        async def work() -> Result:
            return await self.sampler.sample(self.parse_sample(found, seq_id, orjson.loads(body)), found.checkpoint)

        async def run() -> None:
            try:
                await self.futures.run(future, work)
            finally:
                completed, found.completed = found.completed, asyncio.Event()
                completed.set()

        future.task = asyncio.create_task(run())

    def parse_sample(self, found: SamplingSession, seq_id: int, body: dict[str, Any]) -> SampleRequest:
        """Validate a sample request; its seed, unless given, follows from its number.

        The client gives unnamed weights another number when it repeats the request that saves them, so that these
        are identified by their request.
        """
        saved, name = found.checkpoint, found.sampling_session_id
        if saved is not None and saved.ephemeral and saved.request_id is not None:
            name = saved.request_id
        seed = self.find_seed(self.sessions[found.session_id], f"{name.partition(':')[2]}:{seq_id}")
        return parse_sample(body, self.trainer.max_len, self.engine.engine.vocab_size, seed)

    def _open_saved_weights(self, model: Model, request: TrainingRequest, result: Result) -> Result:
        """Open the sampling session of weights that were saved without a name."""
        if request.kind != "save_weights_for_sampler" or not request.fields()["ephemeral"]:
            return result
        assert isinstance(result, dict)
        checkpoint = self.store.find(result["path"], model.owner)
        session = self.sessions.get(model.session_id)
        if session is None:
            self.store.delete(checkpoint)
            raise NotFound(f"{model.session_id} has ended")
        number = int(checkpoint.name.removeprefix(EPHEMERAL))
        opened = self.open_sampling(session, number, checkpoint, model.base_model)
        session.ephemeral.append(checkpoint)
        return {"type": request.kind, "sampling_session_id": opened.sampling_session_id}

    def reserve_model(self, model: Model) -> None:
        """Register a model that is about to be created, unless it is; `TooMany` at the limit."""
        if model.model_id in self.models:
            return
        if len(self.models) >= self.config.limits.max_models:
            raise TooMany(f"{len(self.models)} models are loaded (limits.max_models): unload one")
        if not 1 <= model.config.rank <= self.config.limits.max_rank:
            raise ValueError(f"lora_config.rank must be from 1 to {self.config.limits.max_rank}: {model.config.rank}")
        self._check_pending()  # the request that creates it follows, and must not leave an empty model
        self.models[model.model_id] = model
        self.log.add_record(model.model_id, "model", model.session_id, model.describe())

    def open_sampling(
        self, session: ClientSession, seq_id: Any, checkpoint: AdapterCheckpoint | None, base_model: str
    ) -> SamplingSession:
        """A sampling session; the same one for a repeated number."""
        check_sampling_number(seq_id)
        name = f"{session.session_id}:sample:{seq_id}"
        if name not in self.sampling:
            found = SamplingSession(name, session.session_id, session.owner, base_model, checkpoint)
            self.sampling[name] = found
            self.log.add_record(name, "sampling session", session.session_id, found.describe())
        return self.sampling[name]

    def join_sampling(self, found: SamplingSession) -> int:
        """The number of a further client of a sampling session."""
        found.num_clients += 1
        self.log.add_record(found.sampling_session_id, "sampling session", found.session_id, found.describe())
        return found.num_clients - 1

    async def end_session(self, session_id: str) -> None:
        """Forget a session: unload its models, cancel its samples and delete its unnamed weights."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        models = [m.model_id for m in self.models.values() if m.session_id == session_id]
        for model_id in models:
            self.training.remove(model_id)
        canceled = self.futures.cancel(lambda future: future.session_id == session_id)
        for name in [name for name, s in self.sampling.items() if s.session_id == session_id]:
            del self.sampling[name]
        self.log.remove_session(session_id)
        await asyncio.gather(*canceled, return_exceptions=True)
        for model_id in models:
            await self.training.unload(model_id)
        for checkpoint in session.ephemeral:
            if not self.sampler.in_use.get(checkpoint.path):  # by another session; a restart deletes it
                await self.delete(checkpoint)

    async def delete(self, checkpoint: AdapterCheckpoint) -> None:
        """Delete a checkpoint; `ValueError` while samples are drawn from it."""
        if self.sampler.in_use.get(checkpoint.path):
            raise ValueError(f"{checkpoint.path} is in use by running samples: delete it later")
        self.store.delete(checkpoint)
        await self.sampler.unload(checkpoint.path)

    def is_used(self, checkpoint: AdapterCheckpoint) -> bool:
        """Whether an open sampling session or a waiting request needs a checkpoint: a time limit does not delete it."""
        sampled = (s.checkpoint.path for s in self.sampling.values() if s.checkpoint is not None)
        return checkpoint.path in sampled or checkpoint.path in self.queue.find_loads()

    async def log_metrics(self) -> None:
        """Write a row of metrics, unless the server is idle."""
        unfinished = [future.kind for future in self.futures.by_id.values()]
        current: dict[str, dict[str, int]] = {}
        for name, items in (("sessions", self.sessions), ("models", self.models), ("waiting", self.futures.by_id)):
            for item in items.values():
                counts = current.setdefault(item.owner, {"sessions": 0, "models": 0, "waiting": 0})
                counts[name] += 1
        gauges = {
            "queue/training": len(unfinished) - unfinished.count("asample"),
            "queue/sampling": unfinished.count("asample"),
            "open/tenants": len(current),
            "open/sessions": len(self.sessions),
            "open/models": len(self.models),
            "open/loaded_adapters": self.sampler.num_loaded,
        }
        if (row := self.metrics.read(gauges)) is not None:
            await asyncio.to_thread(self.metrics.write, row, current)

    async def clean(self) -> None:
        """End abandoned sessions, and delete expired checkpoints and old unnamed weights."""
        oldest = time.monotonic() - self.config.limits.session_timeout
        for session in [s for s in self.sessions.values() if s.last_seen < oldest]:
            logger.info(f"{session.session_id} has ended: no request or heartbeat")
            await self.end_session(session.session_id)
        for session in list(self.sessions.values()):
            while len(session.ephemeral) > MAX_EPHEMERAL and not self.sampler.in_use.get(session.ephemeral[0].path):
                await self._delete_ephemeral(session.ephemeral.popleft())
        for checkpoint in await asyncio.to_thread(self.store.find_expired):
            if not self.is_used(checkpoint):
                await self.delete(checkpoint)
                logger.info(f"{checkpoint.path} has expired and was deleted")
        fetched, self.futures.fetched = self.futures.fetched, []
        for name in fetched:
            self.log.put("UPDATE results SET fetched = 1 WHERE id = ?", name)
        max_bytes = round(self.config.limits.max_results_mb * 2**20)
        if self.futures.num_result_bytes > max_bytes / 16:
            self.futures.num_result_bytes = 0
            if num_lost := await self.log.trim_results(max_bytes):
                logger.warning(
                    f"{num_lost} results were deleted before their clients fetched them: raise limits.max_results_mb"
                )

    async def _delete_ephemeral(self, checkpoint: AdapterCheckpoint) -> None:
        """Delete unnamed weights with their sampling session."""
        for name in [name for name, s in self.sampling.items() if s.checkpoint == checkpoint]:
            self.log.remove_target(self.sampling.pop(name).sampling_session_id)
        await self.delete(checkpoint)
