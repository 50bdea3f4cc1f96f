"""Ports and servers of this machine."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

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
