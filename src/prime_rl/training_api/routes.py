"""Handlers of the routes, as functions of (service, owner, request)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from prime_rl.inference.intake import RESERVED, read_body
from prime_rl.training_api.adapters import AdapterConfig
from prime_rl.training_api.checkpoints import AdapterCheckpoint, NotFound, check_name, find_expiry, split_path
from prime_rl.training_api.compression import ENCODING, decompress, read_size, supports_zstd
from prime_rl.training_api.requests import Kind, Model
from prime_rl.training_api.service import EPHEMERAL, TooMany, TrainingService, check_sampling_number
from prime_rl.training_api.wire import decode_target

Json = dict[str, Any]
Handler = Callable[[TrainingService, str, Request], Awaitable[Response]]
POLL_S = 25.0
"""Duration of a long poll; the client's own limit is 45 s."""

MAX_COMPLETIONS = 1000
"""Finished samples that one poll reports."""

MAX_NUMBER = 2**63
"""SQLite stores numbers below it; the `seq_id` of a sample reaches 10**18."""

MAX_LABEL_BYTES = 2**16
PROTOBUF = "application/x-protobuf"
UNEMBED_WARNING = "train_unembed has no effect: this server adapts attention and MLP matrices, not the output head"


def reply(content: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def read(request: Request) -> Json:
    """The JSON object of a request; `ValueError` for anything else. An empty body is an empty object."""
    data = await read_body(request)
    request.scope[RESERVED].release()
    try:
        body = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def field(body: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field of the type `kind`, or the default where it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}"[:300])
    return value


def _read_labels(body: Json) -> tuple[Json | None, str | None]:
    """`user_metadata` and `display_name`, which stay in memory; `ValueError` if they are large."""
    labels = field(body, "user_metadata", dict), field(body, "display_name", str)
    if len(orjson.dumps(labels)) > MAX_LABEL_BYTES:
        raise ValueError(f"user_metadata and display_name may have at most {MAX_LABEL_BYTES} bytes")
    return labels


def _submit(
    service: TrainingService, model: Model, seq_id: Any, kind: Kind, read_fields: Callable[[], Json]
) -> Response:
    """Queue a request; a `ValueError` of `read_fields` fails its future.

    The client has reserved the number, so later requests wait until a request with it has finished.
    """
    try:
        fields = read_fields()
    except ValueError as error:
        kind, fields = "refused", {"error": str(error)[:2000]}
    return _promise(service.submit(model, seq_id, kind, orjson.dumps(fields)), model_id=model.model_id)


def _promise(request_id: str, **fields: Any) -> Response:
    return reply({"request_id": request_id, **fields})


async def client_config(service: TrainingService, owner: str, request: Request) -> Response:
    """Flags of the client: polls of many futures, cancelation, chunks of a pass one after the other."""
    return reply(
        {
            "parallel_fwdbwd_chunks": False,
            "proto_compress_fwdbwd": supports_zstd(),
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": False,
            "use_pyqwest_transport": False,
        }
    )


async def dynamic_config(service: TrainingService, owner: str, request: Request) -> Response:
    """Flags that the client reads again from time to time."""
    return reply({"sample_cancel_enabled": True})


async def health(service: TrainingService, owner: str, request: Request) -> Response:
    """Readiness."""
    return reply({"status": "ok"})


async def telemetry(service: TrainingService, owner: str, request: Request) -> Response:
    """Accept and drop the client's telemetry."""
    await read_body(request)
    return reply({"status": "accepted"})


async def capabilities(service: TrainingService, owner: str, request: Request) -> Response:
    """The base model under each of its names."""
    length = service.trainer.max_len
    fields = {"max_context_length": length, "trainable": True, "sampleable": True}
    return reply({"supported_models": [{"model_name": name, **fields} for name in service.base_names]})


async def create_session(service: TrainingService, owner: str, request: Request) -> Response:
    """Open a session."""
    session = await service.open_session(owner, *_read_labels(await read(request)))
    return reply({"type": "create_session", "session_id": session.session_id, "warning_message": UNEMBED_WARNING})


async def heartbeat(service: TrainingService, owner: str, request: Request) -> Response:
    """Keep a session open; the client stops its heartbeats after 410."""
    try:
        service.find_session((await read(request)).get("session_id"), owner)
    except NotFound as error:
        return reply({"detail": str(error)}, 410)
    return reply({"type": "session_heartbeat"})


# The client repeats a request whose response is lost, so what is gone already counts as ended, unloaded or deleted.


async def finish_session(service: TrainingService, owner: str, request: Request) -> Response:
    """End a session, if it is open."""
    with contextlib.suppress(NotFound):
        session = service.find_session(request.path_params["session_id"], owner)
        await service.end_session(session.session_id)
    return reply({})


async def list_sessions(service: TrainingService, owner: str, request: Request) -> Response:
    """The open sessions of a key."""
    return reply({"sessions": [s.session_id for s in service.sessions.values() if s.owner == owner]})


async def get_session(service: TrainingService, owner: str, request: Request) -> Response:
    """A session's models and sampling sessions."""
    session = service.find_session(request.path_params["session_id"], owner)
    mine = session.session_id
    return reply(
        {
            "training_run_ids": [m.model_id for m in service.models.values() if m.session_id == mine],
            "sampler_ids": [s.sampling_session_id for s in service.sampling.values() if s.session_id == mine],
            "user_metadata": session.metadata,
            "display_name": session.display_name,
        }
    )


def _check_base(service: TrainingService, name: Any) -> str:
    if name not in service.base_names:
        raise ValueError(f"base_model {name!r} is not served; available: {', '.join(service.base_names)}")
    return str(name)


def _check_optimizer(body: Json) -> None:
    kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind != "adamw":
        raise ValueError(f"optimizer {kind!r} is not supported by this server: use adamw")


def _new_model(service: TrainingService, owner: str, body: Json, base_model: str, config: AdapterConfig) -> Model:
    session = service.find_session(body.get("session_id"), owner)
    number = field(body, "model_seq_id", int)
    if number is None or number < 0:
        raise ValueError("model_seq_id must be a number from 0")
    model_id = f"{session.session_id}:train:{number}"
    metadata, _ = _read_labels(body)
    return Model(model_id, session.session_id, owner, base_model, config, metadata, time.time())


async def create_model(service: TrainingService, owner: str, request: Request) -> Response:
    """Create a LoRA adapter."""
    body = await read(request)
    base_model = _check_base(service, body.get("base_model"))
    _check_optimizer(body)
    lora = field(body, "lora_config", dict)
    if lora is None:
        raise ValueError("lora_config is missing: this server trains LoRA adapters, not full models")
    seed = field(lora, "seed", int)
    session = service.find_session(body.get("session_id"), owner)
    config = AdapterConfig(
        rank=field(lora, "rank", int, 0),
        seed=service.find_seed(session, f"model:{body.get('model_seq_id')}") if seed is None else seed,
        train_attn=field(lora, "train_attn", bool, True),
        train_mlp=field(lora, "train_mlp", bool, True),
    )
    model = _new_model(service, owner, body, base_model, config)
    service.reserve_model(model)
    return _submit(service, model, 0, "create_model", dict)


def _load_fields(service: TrainingService, owner: str, body: Json) -> Json:
    _check_optimizer(body)
    checkpoint = service.store.find(field(body, "path", str, ""), owner)
    _check_base(service, body.get("base_model") or checkpoint.base_model)
    return {"path": checkpoint.path, "optimizer": field(body, "optimizer", bool, False)}


async def load_weights(service: TrainingService, owner: str, request: Request) -> Response:
    """Load a checkpoint into a model, or create a model from it."""
    body = await read(request)
    if body.get("model_id") is not None:
        model, seq_id = service.find_model(body["model_id"], owner), body.get("seq_id")
        return _submit(service, model, seq_id, "load_weights", lambda: _load_fields(service, owner, body))
    fields = _load_fields(service, owner, body)
    checkpoint = service.store.find(fields["path"], owner)
    base_model = body.get("base_model") or checkpoint.base_model
    model = _new_model(service, owner, body, base_model, AdapterConfig(**checkpoint.config))
    service.reserve_model(model)
    return _submit(service, model, 0, "load_weights", lambda: fields)


async def forward_backward(service: TrainingService, owner: str, request: Request) -> Response:
    """Forward pass, and backward pass unless the request is forward only."""
    encoding = request.headers.get("content-encoding", "identity")
    supported = ("identity", ENCODING) if supports_zstd() else ("identity",)
    if encoding not in supported:
        raise ValueError(f"content-encoding {encoding!r} is not supported by this server: {' or '.join(supported)}")
    data = await read_body(request)
    if encoding == ENCODING:
        request.scope[RESERVED].grow(read_size(data))  # the limit of bodies holds for both sizes
        data = await asyncio.to_thread(decompress, data)
    target = await asyncio.to_thread(decode_target, data)
    request.scope[RESERVED].release()
    model = service.find_model(target.model_id, owner)
    kind: Kind = "forward" if target.forward_only else "forward_backward"
    return _promise(service.submit(model, target.seq_id, kind, data), model_id=model.model_id)


ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


def parse_adam(body: Json) -> dict[str, float]:
    """Hyperparameters of a step; `ValueError` for other optimizers, unknown keys and impossible values."""
    given = field(body, "adam_params", dict)
    if given is None:
        raise ValueError("optim_step needs adam_params: this server has AdamW only")
    if unknown := sorted(given.keys() - ADAM.keys()):
        raise ValueError(f"adam_params.{unknown[0]} is not supported: it has {', '.join(ADAM)}")
    params = {**ADAM, **given}
    for name, value in params.items():
        high = 1.0 if name.startswith("beta") else math.inf
        if type(value) not in (int, float) or not 0 <= value < high:
            raise ValueError(f"adam_params.{name} is {value!r}: it must be a number from 0")
    return params


async def optim_step(service: TrainingService, owner: str, request: Request) -> Response:
    """One AdamW step."""
    body = await read(request)
    model = service.find_model(body.get("model_id"), owner)
    return _submit(service, model, body.get("seq_id"), "optim_step", lambda: parse_adam(body))


def _save_fields(body: Json) -> Json:
    metadata, _ = _read_labels(body)
    return {"expires": find_expiry(body.get("ttl_seconds")), "user_metadata": metadata}


def _save_weights_fields(body: Json) -> Json:
    name = check_name(body.get("path") or f"{body.get('seq_id')}")
    return {**_save_fields(body), "name": name, "overwrite": field(body, "overwrite", bool, False)}


async def save_weights(service: TrainingService, owner: str, request: Request) -> Response:
    """Save weights and optimizer."""
    body = await read(request)
    model = service.find_model(body.get("model_id"), owner)
    return _submit(service, model, body.get("seq_id"), "save_weights", lambda: _save_weights_fields(body))


def _save_for_sampler_fields(body: Json) -> Json:
    if field(body, "kind", str, "snapshot") != "snapshot":
        raise ValueError("kind 'inflight' is not supported by this server: use 'snapshot'")
    number, unnamed = body.get("sampling_session_seq_id"), body.get("path") is None
    if unnamed:
        check_sampling_number(number)
    name = check_name(f"{EPHEMERAL}{number}" if unnamed else body["path"])
    return {**_save_fields(body), "name": name, "ephemeral": unnamed}


async def save_for_sampler(service: TrainingService, owner: str, request: Request) -> Response:
    """Save weights to sample from, under a name or as a new sampling session."""
    body = await read(request)
    model, seq_id = service.find_model(body.get("model_id"), owner), body.get("seq_id")
    return _submit(service, model, seq_id, "save_weights_for_sampler", lambda: _save_for_sampler_fields(body))


async def get_info(service: TrainingService, owner: str, request: Request) -> Response:
    """Base model, rank and tokenizer of a model."""
    model = service.find_model((await read(request)).get("model_id"), owner)
    names = {"model_name": model.base_model, "tokenizer_id": service.tokenizer}
    architecture = {"arch": service.trainer.model.config.model_type, **names}
    fields = {"is_lora": True, "lora_rank": model.config.rank, "model_name": model.base_model}
    return reply({"type": "get_info", "model_id": model.model_id, "model_data": architecture, **fields})


async def unload_model(service: TrainingService, owner: str, request: Request) -> Response:
    """Forget a model, if it is loaded."""
    model_id = field(await read(request), "model_id", str, "")
    with contextlib.suppress(NotFound):
        await service.training.unload(service.find_model(model_id, owner).model_id)
    return reply({"type": "unload_model", "model_id": model_id})


async def create_sampling_session(service: TrainingService, owner: str, request: Request) -> Response:
    """Open a sampling session of saved weights or of the base model."""
    body = await read(request)
    session, path = service.find_session(body.get("session_id"), owner), field(body, "model_path", str)
    if path is None and body.get("base_model") is None:
        raise ValueError("create_sampling_session needs model_path or base_model")
    checkpoint = None if path is None else service.store.find(path, owner)
    saved_base = None if checkpoint is None else checkpoint.base_model
    base_model = _check_base(service, body.get("base_model") or saved_base)
    if checkpoint is not None:
        if checkpoint.kind != "sampler_weights":
            raise ValueError(f"{path} is a training checkpoint: sample from one of save_weights_for_sampler")
        service.training.executor.check_base(checkpoint)
    opened = service.open_sampling(session, body.get("sampling_session_seq_id"), checkpoint, base_model)
    return reply({"type": "create_sampling_session", "sampling_session_id": opened.sampling_session_id})


async def join_sampling_session(service: TrainingService, owner: str, request: Request) -> Response:
    """Number a further client of a sampling session."""
    found = service.find_sampling((await read(request)).get("sampling_session_id"), owner)
    return reply({"type": "join_sampling_session", "client_counter": service.join_sampling(found)})


async def get_sampler(service: TrainingService, owner: str, request: Request) -> Response:
    """Base model and path of a sampling session."""
    found = service.find_sampling(request.path_params["sampler_id"], owner)
    path = None if found.checkpoint is None or found.checkpoint.ephemeral else found.checkpoint.path
    return reply({"sampler_id": found.sampling_session_id, "base_model": found.base_model, "model_path": path})


async def asample(service: TrainingService, owner: str, request: Request) -> Response:
    """Sample completions, and score the prompt."""
    body = await read(request)
    if body.get("sampling_session_id") is None:
        raise ValueError("asample needs a sampling_session_id: call create_sampling_session")
    found = service.find_sampling(body["sampling_session_id"], owner)
    seq_id = field(body, "seq_id", int)
    if seq_id is None or not 0 <= seq_id < MAX_NUMBER:
        raise ValueError("asample needs seq_id, a number from 0")
    parsed = service.parse_sample(found, seq_id, body)
    request_id = service.submit_sample(found, seq_id, orjson.dumps(body))
    ids = [f"{request_id}:{i}" for i in range(parsed.num_samples)]
    return _promise(request_id, sample_sequence_ids=ids)


async def retrieve_future(service: TrainingService, owner: str, request: Request) -> Response:
    """The result of a request; waits for it, up to the length of a long poll."""
    request_id = field(await read(request), "request_id", str)
    if (future := service.find_future(request_id, owner)) is not None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(future.done.wait(), POLL_S)
        if service.futures.by_id.get(future.request_id) is future:
            return reply({"type": "try_again", "request_id": request_id, "queue_state": "active"})
    query = "SELECT is_json, payload, error, category FROM results WHERE id = ? AND owner = ?"
    rows = await service.log.execute(query, request_id, owner)
    if not rows:  # the client repeats a lost sample after 410, and reports a lost training request
        message = f"there is no result of {request_id!r} for this API key: its session ended, or it is no longer kept"
        return reply({"detail": message}, 410)
    [(is_json, payload, error, category)] = rows

    async def mark() -> None:  # of the list that is there when all has been sent
        service.futures.fetched.append(request_id)

    content = payload if error is None else orjson.dumps({"error": error, "category": category})
    media_type = "application/json" if is_json else PROTOBUF
    return Response(content, media_type=media_type, background=BackgroundTask(mark))


async def retrieve_futures(service: TrainingService, owner: str, request: Request) -> Response:
    """Which requests of a sampling session have finished since the last poll."""
    body = await read(request)
    target = field(body, "target", dict, {})
    found = service.find_sampling(target.get("sampling_session_id"), owner)
    name, clone = found.sampling_session_id, field(target, "cloned_sampler_id", int, 0)
    after, timeout = field(body, "prev_cursor", int, 0), body.get("timeout")
    if timeout is not None and (type(timeout) not in (int, float) or timeout < 0):
        raise ValueError(f"timeout must be a number of seconds, got {timeout!r}")
    if not (abs(after) < MAX_NUMBER and abs(clone) < MAX_NUMBER):
        raise ValueError("prev_cursor and cloned_sampler_id must be numbers from 0")
    if retrieved := field(body, "retrieved_request_ids", list, []):
        query = "DELETE FROM results WHERE target = ? AND id IN (SELECT value FROM json_each(?))"
        service.log.put(query, name, orjson.dumps(retrieved).decode())
    completed = found.completed  # before the query, so that no completion is missed
    query = (
        "SELECT id, error IS NULL, cursor FROM results WHERE target = ? AND clone = ? AND cursor > ? "
        f"ORDER BY cursor LIMIT {MAX_COMPLETIONS}"
    )
    rows = await service.log.execute(query, name, clone, after)
    if not rows and timeout != 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(completed.wait(), POLL_S if timeout is None else min(timeout, POLL_S))
            rows = await service.log.execute(query, name, clone, after)
    completions = [{"state": "finished" if ok else "failed", "request_id": name} for name, ok, _ in rows]
    return reply({"completions": completions, "cursor": rows[-1][2] if rows else after})


async def cancel_future(service: TrainingService, owner: str, request: Request) -> Response:
    """Cancel a sample; finished and training requests are left alone."""
    future = service.find_future((await read(request)).get("request_id"), owner)
    if future is not None and future.task is not None:
        future.task.cancel()
    return reply({})


async def weights_info(service: TrainingService, owner: str, request: Request) -> Response:
    """What is needed to load a checkpoint."""
    info = service.store.find(field(await read(request), "tinker_path", str, ""), owner)
    choices = {key: info.config[key] for key in ("train_mlp", "train_attn")}
    fields = {"base_model": info.base_model, "is_lora": True, "lora_rank": info.config["rank"]}
    return reply({**fields, **choices, "train_unembed": False})


def _page(request: Request, items: list[Any], name: str) -> Response:
    given = request.query_params
    offset, limit = (given.get(key, default) for key, default in (("offset", "0"), ("limit", "100")))
    if not (offset.isdigit() and limit.isdigit() and len(offset) < 10 and len(limit) < 10):
        raise ValueError("offset and limit must be numbers from 0")
    start, count = int(offset), int(limit)
    cursor = {"offset": start, "limit": count, "total_count": len(items)}
    return reply({name: items[start : start + count], "cursor": cursor})


async def list_all_checkpoints(service: TrainingService, owner: str, request: Request) -> Response:
    """The checkpoints of a key."""
    found = await asyncio.to_thread(service.store.find_all, owner)
    return _page(request, [info.describe() for info in found], "checkpoints")


async def list_checkpoints(service: TrainingService, owner: str, request: Request) -> Response:
    """The checkpoints of a model."""
    found = await asyncio.to_thread(service.store.find_all, owner, request.path_params["model_id"])
    return reply({"checkpoints": [info.describe() for info in found]})


def _describe_run(service: TrainingService, owner: str, model_id: str, saved: list[AdapterCheckpoint]) -> Json:
    model = service.models.get(model_id)
    last = {info.kind: info.describe() for info in saved}
    seconds = model.last_request if model is not None else saved[-1].created
    return {
        "training_run_id": model_id,
        "base_model": model.base_model if model is not None else saved[-1].base_model,
        "model_owner": owner,
        "is_lora": True,
        "lora_rank": model.config.rank if model is not None else saved[-1].config["rank"],
        "last_request_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": None if model is None else model.metadata,
    }


async def _find_runs(service: TrainingService, owner: str) -> list[Json]:
    saved: dict[str, list[AdapterCheckpoint]] = {m.model_id: [] for m in service.models.values() if m.owner == owner}
    for info in await asyncio.to_thread(service.store.find_all, owner):
        saved.setdefault(info.model_id, []).append(info)
    return [_describe_run(service, owner, model_id, infos) for model_id, infos in saved.items()]


async def list_runs(service: TrainingService, owner: str, request: Request) -> Response:
    """Models in training and models with checkpoints."""
    return _page(request, await _find_runs(service, owner), "training_runs")


async def get_run(service: TrainingService, owner: str, request: Request) -> Response:
    """One model."""
    name = request.path_params["model_id"]
    found = next((run for run in await _find_runs(service, owner) if run["training_run_id"] == name), None)
    if found is None:
        raise NotFound(f"there is no training run {name!r} for this API key")
    return reply(found)


def _read_path(request: Request) -> str:
    params = request.path_params
    path = f"tinker://{params['model_id']}/{params['kind']}/{params['name']}"
    split_path(path)
    return path


def _check_owner(info: AdapterCheckpoint, owner: str) -> AdapterCheckpoint:
    if info.owner != owner:
        raise NotFound(f"{info.path} belongs to another API key: it can be read, not changed")
    return info


def _own_checkpoint(service: TrainingService, owner: str, request: Request) -> AdapterCheckpoint:
    return _check_owner(service.store.find(_read_path(request), owner), owner)


async def delete_checkpoint(service: TrainingService, owner: str, request: Request) -> Response:
    """Delete a checkpoint, if it exists."""
    path = _read_path(request)
    try:
        info = service.store.find(path, owner)
    except NotFound:
        return Response(status_code=204)
    await service.delete(_check_owner(info, owner))
    return Response(status_code=204)


async def publish_checkpoint(service: TrainingService, owner: str, request: Request) -> Response:
    """Allow or forbid other keys to read a checkpoint."""
    service.store.change(_own_checkpoint(service, owner, request), public=request.method == "POST")
    return Response(status_code=204)


async def set_ttl(service: TrainingService, owner: str, request: Request) -> Response:
    """Set or remove the time after which a checkpoint is deleted."""
    expires = find_expiry((await read(request)).get("ttl_seconds"))
    service.store.change(_own_checkpoint(service, owner, request), expires=expires)
    return Response(status_code=204)


CHECKPOINT = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/healthz", health),
    ("POST", "/client/config", client_config),
    ("POST", "/client/dynamic_config", dynamic_config),
    ("POST", "/telemetry", telemetry),
    ("GET", "/get_server_capabilities", capabilities),
    ("POST", "/create_session", create_session),
    ("POST", "/session_heartbeat", heartbeat),
    ("GET", "/sessions", list_sessions),
    ("GET", "/sessions/{session_id}", get_session),
    ("POST", "/sessions/{session_id}/finish", finish_session),
    ("POST", "/create_model", create_model),
    ("POST", "/get_info", get_info),
    ("POST", "/unload_model", unload_model),
    ("POST", "/forward_backward", forward_backward),
    ("POST", "/optim_step", optim_step),
    ("POST", "/save_weights", save_weights),
    ("POST", "/save_weights_for_sampler", save_for_sampler),
    ("POST", "/load_weights", load_weights),
    ("POST", "/weights_info", weights_info),
    ("POST", "/create_sampling_session", create_sampling_session),
    ("POST", "/join_sampling_session", join_sampling_session),
    ("GET", "/samplers/{sampler_id}", get_sampler),
    ("POST", "/asample", asample),
    ("POST", "/retrieve_future", retrieve_future),
    ("POST", "/retrieve_futures", retrieve_futures),
    ("POST", "/cancel_future", cancel_future),
    ("GET", "/training_runs", list_runs),
    ("GET", "/training_runs/{model_id}", get_run),
    ("GET", "/training_runs/{model_id}/checkpoints", list_checkpoints),
    ("GET", "/checkpoints", list_all_checkpoints),
    ("DELETE", CHECKPOINT, delete_checkpoint),
    ("POST", f"{CHECKPOINT}/publish", publish_checkpoint),
    ("DELETE", f"{CHECKPOINT}/publish", publish_checkpoint),
    ("PUT", f"{CHECKPOINT}/ttl", set_ttl),
]
"""Method, path below /api/v1, and handler."""


def describe_error(request: Request, error: Exception) -> tuple[str, int]:
    """Message and HTTP status of a failed request."""
    if isinstance(error, NotFound):
        return str(error), 404
    if isinstance(error, ValueError | RecursionError):
        return str(error), 422  # the client repeats requests after 400
    if isinstance(error, TooMany):
        return str(error), 429
    return f"the server failed: {type(error).__name__}: {error}", 500
