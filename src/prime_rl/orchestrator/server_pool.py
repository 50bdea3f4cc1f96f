"""Reachability of the inference servers and the work running on each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

Result = TypeVar("Result")


class ServerPool:
    """Assigns work to servers. If fewer than all are required, work moves to the reachable ones:

        lost --> its work restarts on other servers, updates skip it --> returns --> loads the current version

    If all are required, work waits for its assigned server, so that runs are exactly repeatable.
    """

    def __init__(self, num_servers: int, min_servers: int | None = None) -> None:
        if min_servers is not None and min_servers > num_servers:
            raise ValueError(f"min_servers = {min_servers} but client.base_url lists {num_servers}: lower it")
        self.num_servers, self.min_servers = num_servers, min_servers or num_servers
        self.unreachable: dict[int, tuple[float, str]] = {}
        """Server -> time of its loss and the reason."""
        self._work: list[set[anyio.CancelScope]] = [set() for _ in range(num_servers)]

    @property
    def is_elastic(self) -> bool:
        """Whether the run continues without some servers."""
        return self.min_servers < self.num_servers

    @property
    def is_below_minimum(self) -> bool:
        """Whether fewer servers are reachable than the run requires."""
        return self.num_servers - len(self.unreachable) < self.min_servers

    @property
    def reachable(self) -> list[int]:
        """Servers that take part in weight updates; all if the pool is not elastic, or if none is reachable."""
        available = [i for i in range(self.num_servers) if i not in self.unreachable]
        return available if self.is_elastic and available else list(range(self.num_servers))

    def choose(self, number: int) -> int:
        """The server for work item `number`; items of a lost server are spread over the others."""
        home = number % self.num_servers
        if not self.is_elastic or home not in self.unreachable:
            return home
        step = number // self.num_servers + 1
        candidates = ((number + i * step) % self.num_servers for i in range(1, self.num_servers))
        return next((i for i in candidates if i not in self.unreachable), self.reachable[0])

    async def run(self, number: int, work: Callable[[int], Awaitable[Result]]) -> Result:
        """The result of `work(server)`, restarted on another server whenever its server is lost."""
        while True:
            server = self.choose(number)
            with anyio.CancelScope() as scope:
                self._work[server].add(scope)
                try:
                    return await work(server)
                finally:
                    self._work[server].discard(scope)

    async def run_together(self, servers: Iterable[int], work: Callable[[], Awaitable[Result]]) -> Result:
        """The result of work that uses all `servers`; raises `ServerUnavailable` as soon as one is lost."""
        servers = list(servers)
        with anyio.CancelScope() as scope:
            for server in servers:
                self._work[server].add(scope)
            try:
                return await work()
            finally:
                for server in servers:
                    self._work[server].discard(scope)
        raise ServerUnavailable

    def cancel_server_work(self, server: int) -> None:
        """Cancel the work of a lost server, whose responses will never arrive."""
        if self.is_elastic:
            for scope in list(self._work[server]):
                scope.cancel()


class ServerUnavailable(Exception):
    """A server was lost while in use."""
