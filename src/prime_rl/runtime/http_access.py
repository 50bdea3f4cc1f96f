"""Protection of local servers against web pages by checks of the `Host` and `Origin` headers.

A browser sends requests to local servers for any page that it shows, with the page's origin in `Origin`. If the page
resolves its own domain name to this machine (DNS rebinding), that name is in `Host`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Iterable

LOOPBACK = ("127.0.0.1", "localhost", "::1", "::ffff:127.0.0.1")
Headers = Iterable[tuple[bytes, bytes]]
"""Request headers as in ASGI, with lower-case names."""


def own_hosts(*configured: str) -> frozenset[str]:
    """Names of this machine: localhost, its host name, and the configured ones."""
    return frozenset(name.lower() for name in ("localhost", os.uname().nodename, *configured))


def find_foreign_origin(headers: Headers) -> str | None:
    """The `Origin` of a cross-origin request; None for any other request."""
    hosts, origins = _values(headers, b"host"), _values(headers, b"origin")
    own = {f"{scheme}://{host}" for host in hosts[:1] for scheme in ("http", "https")}
    return next((origin for origin in origins if origin.lower() not in own), None)


def find_foreign_host(headers: Headers, own: Collection[str]) -> str | None:
    """The `Host` of a request if it is neither an IP address nor one of the names in `own`; else None.

    IP addresses are always accepted: DNS rebinding needs a name. Requests without `Host` are accepted too: browsers
    always send it.
    """
    hosts = _values(headers, b"host")
    if len(hosts) > 1:
        return ", ".join(hosts)
    return next((host for host in hosts if not _is_own(host, own)), None)


def _is_own(host: str, own: Collection[str]) -> bool:
    name = host.lower()
    if name.startswith("["):
        name, bracket, port = name[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return False
    elif name.count(":") == 1:
        name, _, port = name.partition(":")
        if not port.isdigit():
            return False
    if name.rstrip(".") in own:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key == name]
