"""Who answers: the OpenAI API, a server that already runs, or one that this command starts for a local model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.utils.asking import openai_url

if TYPE_CHECKING:
    from prime_rl.utils.config import AskConfig, AskedClientConfig
    from prime_rl.utils.process import Supervisor

HOST = "127.0.0.1"
WATCH_S = 0.5
ANSWER_S = 60.0
"""So long a server may take to say which models it has."""


@dataclass(frozen=True)
class Server:
    """The inference server that we started."""

    supervisor: Supervisor
    port: int


def find_base_urls(config: AskConfig) -> tuple[str, ...]:
    """Addresses of the servers that answer; none: we serve the model ourselves. `ValueError` for an unknown model."""
    from prime_rl.utils.tokenizer import resolve_model_dir

    if config.client.base_url:
        return tuple(config.client.base_url)
    name = config.model.name
    if not is_openai_model(name):
        resolve_model_dir(name)
        return ()
    if not os.environ.get(config.client.api_key_var):
        raise ValueError(
            f"model.name {name!r} is no local model and {config.client.api_key_var} is not set for the OpenAI API\n"
            "  give a model directory, set that variable, or name a server by --client.base-url"
        )
    return (openai_url(),)


def is_openai_model(name: str) -> bool:
    """A name without a slash such as gpt-4.1-mini or o4-mini; a misspelt path or shipped model is not one."""
    return re.match(r"(gpt-|chatgpt-|o\d)[\w.:-]*$", name) is not None and not Path(name).exists()


@contextmanager
def start_server(config: AskConfig, process: str, options: Mapping[str, Any]) -> Iterator[Server]:
    """Our own server while it loads; its log is `<process>_inference.log`."""
    from prime_rl.utils.process import Supervisor, find_free_port

    port = find_free_port()
    # Ctrl-C raises KeyboardInterrupt as anywhere, and leaving the context stops the server.
    with Supervisor(config.output_dir / "logs", handle_signals=False) as supervisor:
        supervisor.start(f"{process}_inference", build_server_argv(config, {**options, "server.port": port}))
        yield Server(supervisor, port)


def wait_for_server(config: AskConfig, server: Server) -> tuple[str, ...]:
    """The addresses of our own server, once it answers."""
    from prime_rl.utils.process import is_healthy

    what = "the inference server to load the model"
    server.supervisor.wait_for(lambda: is_healthy(HOST, server.port), timeout_s=config.server_timeout, what=what)
    return (f"http://{HOST}:{server.port}/v1",)


def build_server_argv(config: AskConfig, options: Mapping[str, Any]) -> list[str]:
    """The command line of our own inference server."""
    debug = config.model.debug
    found: dict[str, Any] = {"model.name": config.model.name, "log.file": "false"}
    found |= {"model.debug.random_init": str(debug.random_init).lower(), "model.debug.seed": debug.seed}
    if debug.num_layers is not None:
        found["model.debug.num_layers"] = debug.num_layers
    if config.model.max_model_len is not None:
        found["model.max_model_len"] = config.model.max_model_len
    words = [word for key, value in (found | dict(options)).items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "prime_rl.inference.server", *words]


@asynccontextmanager
async def connect(config: AskedClientConfig, base_urls: Sequence[str]) -> AsyncIterator[list[Any]]:
    """One client per server; `ValueError` for an address where nobody answers."""
    from prime_rl.utils.client import build_clients
    from prime_rl.utils.config import ClientConfig

    fields = {name: getattr(config, name) for name in ClientConfig.model_fields}
    clients = build_clients(ClientConfig(**{**fields, "base_url": list(base_urls)}))
    try:
        for client in clients:
            await list_models(client)
        yield clients
    finally:
        for client in clients:
            await client.close()


async def check_servers(config: AskedClientConfig, base_urls: Sequence[str]) -> None:
    """`ValueError` for an address where nobody answers: told before environments are loaded."""
    async with connect(config, base_urls):
        pass


async def list_models(client: Any) -> list[str]:
    """Names of the models that a server has; none where it does not say. `ValueError` when nobody answers."""
    import msgspec

    try:
        answer = msgspec.json.decode(await client.request("GET", "/models", timeout_s=ANSWER_S))
    except msgspec.DecodeError:
        return []
    except Exception as error:
        if hasattr(error, "status_code"):  # somebody is there; the first request tells whether they serve us
            return []
        raise ValueError(
            f"client.base_url {client.base_url} does not answer: start that server (if it is starting, wait for it by "
            "--client.reconnect-timeout SECONDS), or leave client.base_url out and a local model is served by this "
            "command itself"
        ) from error
    cards = answer.get("data") if isinstance(answer, dict) else None
    return [str(card["id"]) for card in cards or [] if isinstance(card, dict) and "id" in card]


async def run_beside(server: Server | None, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`; when the server falls meanwhile that ends at once, with the server's error."""
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
            await anyio.sleep(WATCH_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_server)
        await work()
        tasks.cancel_scope.cancel()
    if failure:
        raise failure[0]
