"""Proxies and certificates that the environment configures, and socket options, the same for all requests."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in {"TCP_KEEPIDLE": 120, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 6}.items()
        if hasattr(socket, name)
    ),
]
"""Probes of a connection that waits (Linux): a machine that is gone closes none, which shows after five minutes."""


def needs_proxy(url: str) -> bool:
    """Whether the environment (HTTP_PROXY, NO_PROXY, ...) configures a proxy for `url`; never for this machine."""
    from urllib.request import getproxies, proxy_bypass  # imported here to keep the module import fast

    parts = urlsplit(url)
    host = parts.hostname or ""
    return host not in LOOPBACK_HOSTS and parts.scheme in getproxies() and not proxy_bypass(host)


def exclude_from_proxies(host: str, variables: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY and no_proxy of `variables`, with `host`; programs read either."""
    hosts = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    if hosts != "*":
        hosts = f"{hosts},{host}" if hosts else host
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def build_http_client(url: str, headers: Mapping[str, str], max_connections: int = 1) -> httpx.AsyncClient:
    """A client for requests to `url`, without a time limit."""
    import ssl

    import httpx

    # Loading certificates takes 30 ms, so only for https.
    verify = ssl.create_default_context() if url.startswith("https://") else False
    limits, proxied = httpx.Limits(max_connections=max_connections), needs_proxy(url)
    transport = None
    if not proxied:  # whose connections end at the proxy
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=KEEP_ALIVE)
    return httpx.AsyncClient(
        timeout=None, headers=headers, limits=limits, trust_env=proxied, verify=verify, transport=transport
    )
