"""Ports and servers of this machine."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from prime_rl.runtime.machine import check_port_free, find_free_port, is_healthy


def test_a_port_in_use_names_key_and_fix() -> None:
    port = find_free_port()
    check_port_free(None, port)
    server = HTTPServer(("localhost", port), BaseHTTPRequestHandler)
    try:
        with pytest.raises(ValueError, match=rf"inference\.server\.port: port {port} .* --inference\.server\.port \d+"):
            check_port_free(None, port)
    finally:
        server.server_close()


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_used_again() -> None:
    script = """
import ctypes, resource, sys
from prime_rl.runtime.machine import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 64 << 20
for _ in range(6):
    place = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(place, 1, size)
    libc.free(place)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    kept, default = (
        int(subprocess.run([sys.executable, "-c", script, how], check=True, capture_output=True, text=True).stdout)
        for how in ("kept", "default")
    )
    assert default - kept > 4 * (64 << 20) / resource.getpagesize()


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
