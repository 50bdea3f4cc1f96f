"""Model servers: the OpenAI API, a running server, or a server started for a local model."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prime_rl.generation.rollout_jobs import is_openai_model, openai_url
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from prime_rl.configuration.sections import GenerationClientConfig, GenerationConfig
    from prime_rl.runtime.process import Supervisor

HOST = "127.0.0.1"
POLL_INTERVAL_S = 0.5
LIST_MODELS_TIMEOUT_S = 60.0
"""Timeout of the /models request."""


@dataclass(frozen=True)
class LocalServer:
    """An inference server started by this command."""

    supervisor: Supervisor
    port: int


def resolve_base_urls(config: GenerationConfig) -> tuple[str, ...]:
    """Addresses of the servers to use; empty: start one for the local model. `ValueError` for an unknown model."""
    from prime_rl.runtime.tokenizer import resolve_model_dir

    if config.client.base_url:
        return tuple(config.client.base_url)
    name = config.model.name
    if not is_openai_model(name):
        resolve_model_dir(name)
        return ()
    if not os.environ.get(config.client.api_key_var):
        raise ValueError(
            f"model.name {name!r} is not a local model and {config.client.api_key_var} is not set for the OpenAI API\n"
            "  pass a model directory, set that variable, or set --client.base-url"
        )
    return (openai_url(),)


@contextmanager
def start_server(config: GenerationConfig, process: str, options: Mapping[str, Any]) -> Iterator[LocalServer]:
    """Start a local server without waiting for it; its log is `<process>_inference.log`."""
    from prime_rl.configuration.sources import without_settings
    from prime_rl.runtime.core_lease import DIRECTORY_VARIABLE
    from prime_rl.runtime.machine import find_free_port
    from prime_rl.runtime.process import Supervisor

    port = find_free_port()
    # Ctrl-C raises KeyboardInterrupt as usual; leaving the context stops the server.
    with (
        tempfile.TemporaryDirectory(prefix="prime-rl-cores-") as leases,
        Supervisor(RunDir(config.output_dir).logs, handle_signals=False) as supervisor,
    ):
        env = {} if os.environ.get("OMP_NUM_THREADS") else {DIRECTORY_VARIABLE: leases}  # it uses all cores
        argv = build_server_argv(config, {**options, "server.port": port})
        with without_settings():
            supervisor.start(f"{process}_inference", argv, env=env)
        yield LocalServer(supervisor, port)


def wait_for_server(config: GenerationConfig, server: LocalServer) -> tuple[str, ...]:
    """Wait until the local server is healthy; returns its addresses."""
    from prime_rl.runtime.machine import is_healthy

    what = "the inference server to load the model"
    server.supervisor.wait_for(lambda: is_healthy(HOST, server.port), timeout_s=config.server_timeout, what=what)
    return (f"http://{HOST}:{server.port}/v1",)


def build_server_argv(config: GenerationConfig, options: Mapping[str, Any]) -> list[str]:
    """Command line of the local inference server."""
    debug = config.model.debug
    settings: dict[str, Any] = {"model.name": config.model.name, "log.file": "false"}
    settings |= {"model.debug.random_init": str(debug.random_init).lower(), "model.debug.seed": debug.seed}
    if debug.num_layers is not None:
        settings["model.debug.num_layers"] = debug.num_layers
    if config.model.max_model_len is not None:
        settings["model.max_model_len"] = config.model.max_model_len
    if config.model.dtype != "auto":
        settings["model.dtype"] = config.model.dtype
    if config.model.exact is not None:
        settings["exact"] = str(config.model.exact).lower()
    settings["model.tool_call_parser"] = config.model.tool_call_parser
    if config.model.reasoning_parser is not None:
        settings["model.reasoning_parser"] = config.model.reasoning_parser
    arguments = [argument for key, value in (settings | dict(options)).items() for argument in (f"--{key}", str(value))]
    return [sys.executable, "-m", "prime_rl.inference.server", *arguments]


def find_server_options(config: GenerationConfig) -> list[str]:
    """Keys of `model` that are set and concern only a server started by this command."""
    changed = config.model.model_dump(exclude_defaults=True, exclude={"name"})
    debug = changed.pop("debug", {})
    return [*(f"model.{key}" for key in changed), *(f"model.debug.{key}" for key in debug)]


@asynccontextmanager
async def connect(config: GenerationClientConfig, base_urls: Sequence[str]) -> AsyncIterator[list[Any]]:
    """One client per server; `ConnectionError` for an address that does not respond."""
    from prime_rl.configuration.sections import ClientConfig
    from prime_rl.utils.client import build_clients

    fields = {name: getattr(config, name) for name in ClientConfig.model_fields}
    clients = build_clients(ClientConfig(**{**fields, "base_url": list(base_urls)}))
    try:
        for client in clients:
            await list_models(client)
        yield clients
    finally:
        for client in clients:
            await client.close()


async def check_servers(config: GenerationClientConfig, base_urls: Sequence[str]) -> None:
    """`ConnectionError` for an address that does not respond, raised before environments are loaded."""
    async with connect(config, base_urls):
        pass


async def list_models(client: Any) -> list[str]:
    """Model names of a server; empty if it does not list them. `ConnectionError` if it does not respond."""
    import msgspec

    try:
        answer = msgspec.json.decode(await client.request("GET", "/models", timeout_s=LIST_MODELS_TIMEOUT_S))
    except (msgspec.DecodeError, RecursionError):
        return []
    except Exception as error:
        if hasattr(error, "status_code"):  # the server responds; the first request shows whether it is usable
            return []
        raise ConnectionError(
            f"client.base_url {client.base_url} does not respond: start that server (to wait for a starting one, set "
            "--client.reconnect-timeout SECONDS), or unset client.base_url to let this command serve a local model"
        ) from error
    cards = answer.get("data") if isinstance(answer, dict) else None
    return [str(card["id"]) for card in cards or [] if isinstance(card, dict) and "id" in card]


async def run_with_server(server: LocalServer | None, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`; if the local server fails meanwhile, cancel it and raise the server's error."""
    import anyio

    failure: list[Exception] = []

    async def watch_server() -> None:
        while server is not None:
            try:
                server.supervisor.check()
            except Exception as error:
                failure.append(error)
                tasks.cancel_scope.cancel()
                return
            await anyio.sleep(POLL_INTERVAL_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_server)
        await work()
        tasks.cancel_scope.cancel()
    if failure:
        raise failure[0]
