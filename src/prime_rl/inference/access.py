"""Access control of routes: API key, loopback-only routes, and protection against requests from web pages."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loguru import logger
from starlette.requests import HTTPConnection

from prime_rl.inference.request_parsing import ApiError
from prime_rl.runtime.http_access import LOOPBACK, find_foreign_host, find_foreign_origin, own_hosts

if TYPE_CHECKING:
    from prime_rl.inference.config import ServerConfig

Access = Literal["open", "read", "api", "control"]
"""Access level of a route. open: no check; read, api: API key, if configured (api also requires loaded weights);
control: API key, or without one only from this machine."""


@dataclass(frozen=True)
class Hosts:
    """Host names of a server; `local`: it listens on loopback only; `cure`: what allows another name."""

    names: frozenset[str]
    local: bool
    cure: str = "add it to server.allowed_hosts, or set a key"


def build_hosts(server: ServerConfig) -> Hosts:
    """Collect the host names of a server."""
    return Hosts(own_hosts(server.host, *server.allowed_hosts), server.host in LOOPBACK)


def read_api_key(key: str, variable: str | None) -> str | None:
    """The API key in the environment variable that config key `key` names; `ValueError` if it is not set."""
    if variable is None:
        return None
    if not (value := os.environ.get(variable)):
        raise ValueError(f"{key} names {variable}, which is not set: export it or leave the key out")
    return value


def read_server_key(server: ServerConfig) -> str | None:
    """The API key of a server; logs a warning if other machines need none."""
    key = read_api_key("server.api_key_var", server.api_key_var)
    if key is None and server.host not in LOOPBACK:
        logger.warning(f"Serving on {server.host} without an API key: set server.api_key_var")
    return key


def check_access(api_key: str | None, request: HTTPConnection, access: Access, hosts: Hosts | None = None) -> None:
    """Check the API key; without a configured key, restrict control routes to this machine and reject web pages."""
    if access == "open":
        return
    if api_key is not None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError("the bearer token is missing or wrong", status=401, kind="authentication_error")
        return
    if access == "control" and request.client is not None and request.client.host not in LOOPBACK:
        raise _forbidden(f"{request.url.path} is limited to this machine only: set server.api_key_var and send its key")
    check_page(request, access, hosts or Hosts(frozenset({"localhost"}), local=True))


def check_page(request: HTTPConnection, access: Access, hosts: Hosts) -> None:
    """`ApiError` for cross-site requests by a browser (CSRF and DNS rebinding).

    A server on a network may be addressed by unknown host names. Requests with such a `Host` are accepted on
    read-only routes if they have no `Origin` header.
    """
    headers = request.scope["headers"]
    origin, host = find_foreign_origin(headers), find_foreign_host(headers, hosts.names)
    if origin is not None:
        raise _forbidden(f"{request.url.path} rejects cross-origin requests (Origin: {origin})")
    from_page = any(name == b"origin" for name, _ in headers)
    if host is not None and (hosts.local or access == "control" or from_page):
        raise _forbidden(f"unknown Host {host!r}: {hosts.cure}")


def _forbidden(message: str) -> ApiError:
    return ApiError(message, status=403, kind="permission_error")
