"""Hosts as network namespaces on one bridge, each with its own address, which can be disconnected.

Needs root and `ip`. They share the file system and the processor of this machine, nothing of its network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"


def why_not() -> str | None:
    """What this machine lacks for such hosts; None: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root; cure: run as root"
    if shutil.which("ip") is None:
        return "ip is not installed; cure: apt-get install iproute2"
    name = f"try{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "network namespaces are not allowed; cure: a machine or container that allows `ip netns add`"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass(frozen=True)
class Hosts:
    """`names[i]` is a namespace with address `addresses[i]`; this machine is `gateway`."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    gateway: str

    def wrap(self, i: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on host `i`."""
        return ["nsenter", f"--net=/run/netns/{self.names[i]}", *argv]  # `ip netns exec` would hide cgroups

    def cut(self, i: int) -> None:
        """Nothing goes to or from host `i` any more; its processes live on."""
        _ip("link", "set", f"{self.names[i]}v", "down")

    def join(self, i: int) -> None:
        """The inverse of `cut`."""
        _ip("link", "set", f"{self.names[i]}v", "up")


@contextmanager
def open_hosts(number: int) -> Iterator[Hosts]:
    """Create `num` hosts; at the end they and their processes are removed."""
    tag, subnet = f"h{os.getpid() % 100000}", f"10.{os.getpid() % 200 + 20}.7"
    bridge, gateway = f"{tag}b", f"{subnet}.254"
    hosts = Hosts(
        tuple(f"{tag}{chr(97 + i)}" for i in range(number)), tuple(f"{subnet}.{i + 1}" for i in range(number)), gateway
    )
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{gateway}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("link", "set", f"{name}v", "master", bridge, "up")
            for words in (f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"):
                _ip("-n", name, *words.split())
            _ip("-n", name, "route", "add", "default", "via", gateway)
        yield hosts
    finally:
        for name in hosts.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-9", pid], capture_output=True)
            # Links of a namespace stay until its last process has ended, and the next hosts have the same names.
            subprocess.run(["ip", "link", "del", f"{name}v"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
