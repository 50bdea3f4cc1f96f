"""A real inference server in a thread, for the tests of its routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.engine import Event, GenerationEngine
from prime_rl.inference.server import bind, build_server
from prime_rl.inference.service import ServerState, build_service

DEADLINE_S = 30


class RunningServer:
    """The app served by uvicorn in a thread, on its own port."""

    def __init__(self, output_dir: Path | None, model_options: dict[str, Any] | None = None, **config: Any) -> None:
        model = {"name": "tiny-qwen3", "debug": {"random_init": True}, **(model_options or {})}
        self.config = InferenceConfig.model_validate({"model": model, "output_dir": output_dir, **config})
        self.service: ServerState = build_service(self.config)
        self._socket = bind("127.0.0.1", 0)
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = build_server(self.service)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server to start")
        self.http = httpx.Client(base_url=self.root, timeout=DEADLINE_S, trust_env=False)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"prime_rl_{name} "))

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def slow_down(engine: GenerationEngine) -> None:
    """Make each step take 2 ms more, so that a request does not end before a test has done something to it."""
    step = type(engine).step

    def step_slowly() -> list[Event]:
        time.sleep(0.002)
        return step(engine)

    engine.step = step_slowly  # type: ignore[method-assign]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.005)
