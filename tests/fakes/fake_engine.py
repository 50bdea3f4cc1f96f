"""A fake inference server with scripted completions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Reply = Callable[[dict[str, Any]], str]


@dataclass
class FakeEngine:
    """`reply(request body)` returns the completion; characters are tokens; `fail` returns an error status instead."""

    reply: Reply
    base_url: str = ""
    version: int = 0
    awaits_weights: bool = False  # restarted: rejects requests until weights are loaded
    latency_s: float = 0.0
    finish_reason: str = "stop"
    max_model_len: int = 10_000
    fail: Callable[[dict[str, Any]], int | None] = lambda body: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    disconnects: int = 0

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        version = self.version
        if (status := self.fail(body)) is not None:
            return JSONResponse({"error": {"message": "scripted failure"}}, status)
        try:
            await asyncio.sleep(self.latency_s)
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        prompt_ids = [ord(c) for m in body["messages"] for c in f"{m['role'][0]}:{m['content'] or ''};"]
        if len(prompt_ids) > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return JSONResponse({"error": {"message": message}}, 400)
        text = self.reply(body)[: body.get("max_completion_tokens")]
        ids = [ord(c) for c in text]
        finish = "length" if len(text) == body.get("max_completion_tokens") else self.finish_reason
        content = [{"token": c, "logprob": -0.5 - i, "bytes": None, "top_logprobs": []} for i, c in enumerate(text)]
        half = len(ids) // 2
        spans = [[0, version]] if self.version == version or not half else [[0, version], [half, self.version]]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish,
            "versions": spans,
        }
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            choice["token_ids"], answer["prompt_token_ids"] = ids, prompt_ids
        return JSONResponse(answer)

    async def update(self, request: Request) -> JSONResponse:
        path = Path((await request.json())["weight_dir"])
        self.updates.append(path.name)
        self.version, self.awaits_weights = int(re.sub(r"\D", "", path.name)), False
        manifest = path / "manifest.json"
        tensors = json.loads(manifest.read_text())["tensors"] if manifest.exists() else {}
        return JSONResponse(
            {"status": "ok", "version": self.version, "digests": {name: t["digest"] for name, t in tensors.items()}}
        )

    async def reload(self, request: Request) -> JSONResponse:
        self.updates.append("reload")
        self.version, self.awaits_weights = 0, False
        return JSONResponse({"status": "ok", "version": 0})

    async def health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "version": self.version, "awaits_weights": self.awaits_weights})


@contextlib.contextmanager
def serve(engine: FakeEngine) -> Iterator[FakeEngine]:
    """Run the engine on a free port in a thread; its `base_url` is set."""
    routes = [
        Route("/v1/chat/completions", engine.chat, methods=["POST"]),
        Route("/update_weights", engine.update, methods=["POST"]),
        Route("/reload_weights", engine.reload, methods=["POST"]),
        Route("/health", engine.health),
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections made before the thread starts are queued
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        engine.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        try:
            yield engine
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
