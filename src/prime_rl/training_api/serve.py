"""The `serve` command: one process that trains LoRA adapters and samples from them, for the `tinker` client.

python -m prime_rl serve --model.name smollm2
TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY=tml-local python my_recipe.py
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prime_rl.configuration.command import run_command

if TYPE_CHECKING:
    from pathlib import Path

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from prime_rl.training_api.checkpoints import AdapterStore
    from prime_rl.training_api.config import SamplingServerConfig, ServeConfig
    from prime_rl.training_api.routes import Handler
    from prime_rl.training_api.server_sampling import ServerSampling
    from prime_rl.training_api.service import TrainingService

PREFIX = "/api/v1"
DRAIN_TIMEOUT_S = 3.0


def find_owner(key: str) -> str:
    """The name of a tenant: a digest, so that no key is stored."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"training-api").hexdigest()


def build_app(service: TrainingService) -> Starlette:
    """Build the application."""
    import asyncio  # imported here to keep `--help` fast

    from loguru import logger
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from prime_rl.inference.access import Hosts, check_page
    from prime_rl.inference.async_engine import ClientGone
    from prime_rl.inference.intake import BodyLimit
    from prime_rl.inference.request_parsing import ApiError
    from prime_rl.runtime.http_access import LOOPBACK, own_hosts
    from prime_rl.training_api import routes

    host = service.config.host
    hosts = Hosts(own_hosts(host), host in LOOPBACK, "use an IP address in TINKER_BASE_URL, or set host to this name")

    def answer_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError | HTTPException):
            status = error.status if isinstance(error, ApiError) else error.status_code
            text = str(error) if isinstance(error, ApiError) else error.detail
            if status == 404:
                text = f"{request.method} {request.url.path} is not supported by this server"
            return routes.reply({"detail": text}, status)
        if isinstance(error, ClientGone):
            return routes.reply({"detail": "the client closed the connection"}, 499)
        text, status = routes.describe_error(request, error)
        if status == 500:
            logger.opt(exception=error).error(f"{request.method} {request.url.path} failed")
        return routes.reply({"detail": text[:2000]}, status)

    async def answer_http_error(request: Request, error: Exception) -> Response:
        return answer_error(request, error)

    def wrap(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            check_page(request, "read", hosts)
            key = request.headers.get("x-api-key", "")
            if not key:
                return routes.reply({"detail": "the header X-API-Key is missing: set TINKER_API_KEY to any key"}, 401)
            try:
                response = await handler(service, find_owner(key), request)
                await service.log.commit()  # nothing is acknowledged before it is on disk
                return response
            except ApiError:
                raise
            except asyncio.CancelledError:  # the server stops
                return routes.reply({"detail": "the server is stopping"}, 503)
            except Exception as error:
                return answer_error(request, error)

        return handle

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    limits = service.config.limits
    return Starlette(
        routes=[Route(PREFIX + path, wrap(handler), methods=[method]) for method, path, handler in routes.ROUTES],
        middleware=[
            Middleware(
                BodyLimit,
                max_bytes=round(limits.max_request_mb * 2**20),
                read_timeout_s=limits.read_timeout,
                answer_error=answer_error,
                section="limits",
            )
        ],
        exception_handlers={HTTPException: answer_http_error},
        lifespan=lifespan,
    )


def build_server(service: TrainingService) -> uvicorn.Server:
    """Build the web server of `service`, which ends long polls when it stops."""
    from prime_rl.inference.draining import DrainingServer
    from prime_rl.inference.server import build_uvicorn_config

    settings = build_uvicorn_config(build_app(service), service.config.limits.read_timeout, DRAIN_TIMEOUT_S)
    return DrainingServer(settings, 0.0, service.end_polls)


def build_service(config: ServeConfig) -> TrainingService:
    """Load the model once for training and sampling; `ValueError` for an invalid configuration."""
    import copy

    from prime_rl.inference.async_engine import AsyncEngine
    from prime_rl.inference.detokenizer import build_decode
    from prime_rl.inference.embedded.engine import EmbeddedEngine
    from prime_rl.runtime.machine import keep_freed_memory
    from prime_rl.runtime.tokenizer import load_tokenizer, resolve_model_dir
    from prime_rl.trainer.model import find_base_name
    from prime_rl.trainer.models.placement import limit_threads
    from prime_rl.trainer.models.registry import load_causal_lm, load_eos_ids
    from prime_rl.training_api.adapters import AdapterTrainer
    from prime_rl.training_api.checkpoints import AdapterStore
    from prime_rl.training_api.request_log import RequestLog
    from prime_rl.training_api.service import TrainingService

    limit_threads()
    keep_freed_memory()
    model_dir = resolve_model_dir(config.model.name)
    debug = config.model.debug
    model = load_causal_lm(
        model_dir,
        random_init=debug.random_init,
        num_layers=debug.num_layers,
        seed=debug.seed,
        max_len=config.model.max_model_len,
    )
    longest = model.config.max_position_embeddings
    if config.model.max_model_len is not None and config.model.max_model_len > longest:
        raise ValueError(f"model.max_model_len is {config.model.max_model_len}, the model supports at most {longest}")
    max_len = config.model.max_model_len or longest
    # Modules of its own for training, whose hooks the engine does not see, over the same tensors.
    trained = copy.deepcopy(model, {id(p): p for p in (*model.parameters(), *model.buffers())})
    trainer = AdapterTrainer(trained, max_len, config.micro_batch_tokens)
    engine = EmbeddedEngine(
        model,
        eos_ids=load_eos_ids(model_dir),
        decode=build_decode(load_tokenizer(config.model.name)),
        max_model_len=max_len,
        max_running=config.max_batch_size,
    )
    settings = {
        "model.name": config.model.name,
        "model.weights": trainer.base_digest,
        "model.debug": debug.model_dump(),
        "model.max_model_len": max_len,
        "micro_batch_tokens": config.micro_batch_tokens,
    }
    log = RequestLog(config.output_dir / "requests.sqlite", settings)  # refuses a second server
    store = AdapterStore(config.output_dir / "training_runs")  # removes what a killed server was writing
    sampling = build_sampling(config.sampling, store)
    names = find_base_name(config.model.name, model_dir), find_tokenizer(config, model_dir)
    return TrainingService(config, trainer, AsyncEngine(engine), store, log, *names, sampling)


def find_tokenizer(config: ServeConfig, model_dir: Path) -> str:
    """Name by which clients load the tokenizer: the model's directory, on other machines its hub id if it has one."""
    from prime_rl.pretrained.push import find_hub_id
    from prime_rl.runtime.http_access import LOOPBACK

    hub_id = None if config.host in LOOPBACK else find_hub_id(config.model.name)
    return hub_id or str(model_dir)


def build_sampling(config: SamplingServerConfig, store: AdapterStore) -> ServerSampling | None:
    """Build the connection to the inference server; None: this process samples."""
    from prime_rl.training_api.server_sampling import ServerSampling

    if config.url is None:
        return None
    key = os.environ.get(config.api_key_var) if config.api_key_var else None
    if config.api_key_var and not key:
        raise ValueError(f"sampling.api_key_var: the environment has no {config.api_key_var}")
    return ServerSampling(config.url, store.locate, key, config.timeout, config.reconnect_timeout)


def serve(config: ServeConfig) -> int:
    """Serve until stopped; returns the exit code."""
    from prime_rl.inference.server import bind, run_server
    from prime_rl.runtime.machine import share_heap

    share_heap()
    listener = bind(config.host, config.port, "port")
    from loguru import logger

    from prime_rl.runtime.http_access import LOOPBACK
    from prime_rl.runtime.run_dir import RunDir
    from prime_rl.runtime.run_state import StateRecorder
    from prime_rl.utils.logger import setup_logger

    setup_logger(config.name, config.log, RunDir(config.output_dir).logs)
    service = build_service(config)
    if config.host not in LOOPBACK:
        logger.warning(f"Listening on {config.host}: every machine that reaches it can use it, with any key")
    server = build_server(service)
    logger.info(f"Serving {config.model.name}: TINKER_BASE_URL=http://{config.host}:{config.port}")
    logger.info(f"Show its tenants, queues and tokens: monitor {config.output_dir} --serve")
    with StateRecorder(config.output_dir, "serve"):
        run_server(server, listener, service.engine)
        if service.error is not None:
            raise RuntimeError(f"The server failed: {service.error}") from service.error
    return 0


def main() -> None:
    """Entry point of the `serve` command."""
    run_command(
        "serve",
        "prime_rl.training_api.config:ServeConfig",
        serve,
        summary="Train LoRA adapters and sample from them, for programs of the tinker client.",
        record=lambda config: config,
        locks=lambda _: "serve",
    )


if __name__ == "__main__":
    main()
