"""Ports and servers of this machine."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from prime_rl.runtime import machine
from prime_rl.runtime.machine import (
    check_interfaces,
    check_port_free,
    find_available_memory,
    find_free_port,
    find_gpus,
    find_listen_address,
    find_memory,
    is_healthy,
)


@pytest.mark.parametrize(
    ("host", "address", "listens"),
    [
        ("node001", "127.0.1.1", ""),
        ("node001", "192.0.2.7", "192.0.2.7"),
        ("localhost.localdomain", "127.0.0.1", "127.0.0.1"),
        ("ip6-localhost", "::1", "::1"),
        ("127.1", "127.0.0.1", "127.0.0.1"),
        ("0::1", "::1", "::1"),
    ],
)
def test_only_names_of_machines_listen_everywhere(
    host: str, address: str, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert find_listen_address(host) == (family, listens)


def test_a_port_in_use_names_key_and_fix() -> None:
    port = find_free_port()
    check_port_free(None, port)
    server = HTTPServer(("localhost", port), BaseHTTPRequestHandler)
    try:
        with pytest.raises(ValueError, match=rf"inference\.server\.port: port {port} .* --inference\.server\.port \d+"):
            check_port_free(None, port)
    finally:
        server.server_close()


def test_a_port_of_an_ipv6_address_is_checked() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} on ::1 .*address already in use"):
            check_port_free("::1", port)
    check_port_free("::1", port)


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        *(("", True), ("eth", True), ("ib0,eth", True), ("=eth0", True), ("eth0:5000", True), ("^nope", True)),
        *(("nope", False), ("nope,ib0", False), ("=nope", False)),
    ],
)
def test_interfaces_that_are_missing_are_named(value: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    if fits:
        check_interfaces("NCCL_SOCKET_IFNAME")
        return
    with pytest.raises(ValueError, match=rf"NCCL_SOCKET_IFNAME = '{value}' .* \(lo, eth0\): unset it"):
        check_interfaces("NCCL_SOCKET_IFNAME")


def test_a_host_without_an_address_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_free_port", lambda: 8001)
    monkeypatch.setattr(socket, "create_server", Mock(side_effect=socket.gaierror(-2, "Name or service not known")))
    with pytest.raises(ValueError, match=r"on nowhere .*\(name or service not known\)"):
        machine.check_port_free("nowhere", 8000)


@pytest.mark.parametrize("present", [(0, 1, 2), (1, 3, 5)], ids=["machine", "container"])
@pytest.mark.parametrize(
    ("visible", "found"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("", []), ("-1", []), ("GPU-bb, GPU-aa11", [1, 0]), ("MIG-9,1,7", [1])],
)
def test_gpus_by_number_and_by_uuid(
    visible: str | None, found: list[int], present: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids count the GPUs that are present, which in a container are some of the machine's."""
    for number, uuid in zip(present, ("GPU-aa11", "GPU-bb22", "GPU-cc33"), strict=True):
        (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "gpus" / f"{number}").mkdir(parents=True)
        facts = f"Model: \t X\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n"
        (tmp_path / "gpus" / f"{number}" / "information").write_text(facts)
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == found


def test_cached_files_are_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path)
    whole = find_available_memory()
    for name, text in (("max", "1000000\n"), ("current", "900000\n"), ("stat", "anon 5\ninactive_file 300000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert find_available_memory() == 400_000 and find_memory() == 1_000_000
    (tmp_path / "memory.stat").unlink()
    assert find_available_memory() == 100_000, "some systems have no memory.stat"
    (tmp_path / "memory.max").write_text("max\n")
    assert find_available_memory() == pytest.approx(whole, rel=0.2)
    assert find_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_memory_limits_of_a_job_and_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of containers a process sees the whole tree, in which a limit may be at any level."""
    own = tmp_path / "tree" / "system.slice" / "job_7" / "step_0"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/x\n0::/system.slice/job_7/step_0\n")
    monkeypatch.setattr(machine, "CONTROL_GROUP", tmp_path / "tree")
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "cgroup")
    (own / "memory.max").write_text("max\n")
    for group, limit, current in ((own.parent, 900_000, 100_000), (own.parents[1], 2_000_000, 1_700_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.max").write_text("5\n")  # not in the tree
    assert find_memory() == 900_000 and find_available_memory() == 300_000


def test_health() -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("localhost", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert is_healthy("localhost", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    assert not is_healthy(None, server.server_port)


needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
ALLOCATE = """
import ctypes, resource, sys, threading
from prime_rl.runtime.machine import keep_freed_memory, share_heap
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]

def allocate(size):
    for _ in range(6):
        place = libc.malloc(size)
        ctypes.memset(place, 1, size)
        libc.free(place)
"""


def count_faults(script: str) -> int:
    """Page faults of a process that runs `script`."""
    script = f"{ALLOCATE}{script}\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)"
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


@needs_glibc
def test_freed_memory_is_used_again() -> None:
    default = count_faults("allocate(64 << 20)")
    kept = count_faults("keep_freed_memory(); allocate(64 << 20)")
    assert default - kept > 4 * (64 << 20) / resource.getpagesize()


@needs_glibc
def test_threads_use_memory_that_others_have_freed() -> None:
    size = 40 << 20
    run = f"keep_freed_memory(); allocate({size}); thread = threading.Thread(target=allocate, args=[{size}]); "
    run += "thread.start(); thread.join()"
    assert count_faults(run) - count_faults(f"share_heap(); {run}") > 0.9 * size / resource.getpagesize()


@needs_glibc
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_reserved_heap_takes_no_memory() -> None:
    """Also where the limit of a process does not allow it."""
    script = "keep_freed_memory(); assert libc.malloc(1 << 20)"
    limit = "resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, 1 << 28)); "
    assert count_faults(script) < 20_000 and count_faults(limit + script) < 20_000
    script = f"{ALLOCATE}{script}; print(*open('/proc/self/status'))"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    [peak] = re.findall(r"VmHWM:\s*(\d+) kB", out)
    assert int(peak) < 200_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_that_is_free_below_other_memory_is_returned() -> None:
    script = """
import ctypes, os
from prime_rl.runtime.machine import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 100 << 10  # from the heap, not mapped
places = [libc.malloc(ctypes.c_size_t(size)) for _ in range(640)]
for place in places:
    ctypes.memset(place, 1, size)
for place in places[:-1]:
    libc.free(place)
before = resident()
return_freed_memory()
print(before - resident())
"""
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert int(out) > 56 << 20
