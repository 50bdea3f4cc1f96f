"""Strict fakes of SGLang and vLLM servers, old and new: they accept weights and reject what the real ones reject."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route


@dataclass
class FakeServer:
    """Records every call. Unknown fields get HTTP 400."""

    calls: list[str] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    version: Any = "default"
    loaded: str | None = None
    slow: threading.Event | None = None  # a load blocks until this is set
    wrong_version: bool = False
    refuse: bool = False

    async def read(self, request: Request, fields: set[str], required: set[str] = frozenset()) -> dict[str, Any]:
        """The body, checked; raises `Refused`."""
        self.calls.append(route_of(request))
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.bodies[route_of(request)] = body
        if unknown := set(body) - fields:
            raise Refused(f"unknown field {sorted(unknown)}")
        if missing := required - set(body):
            raise Refused(f"missing field {sorted(missing)}")
        return body

    async def hold(self) -> None:
        while self.slow is not None and not self.slow.is_set():
            await anyio.sleep(0.01)


def route_of(request: Request) -> str:
    """The path without the mount prefix."""
    return "/" + request.url.path.split("/", 2)[2]


class Refused(Exception):
    """Answered with 400."""


async def refused(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"success": False, "message": str(error)}, 400)


@dataclass
class FakeSGLang(FakeServer):
    """`edition` "new" reports its version at /model_info, "middle" at /get_weight_version, "old" has none."""

    edition: str = "new"
    paused: bool = False

    def routes(self) -> list[Route]:
        routes = [Route("/update_weights_from_disk", self.update, methods=["POST"])]
        if self.edition == "old":
            return [*routes, Route("/model_info", self.model_info)]
        where = "/model_info" if self.edition == "new" else "/get_weight_version"
        return [
            *routes,
            Route(where, self.model_info),
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.resume, methods=["POST"]),
        ]

    async def model_info(self, request: Request) -> JSONResponse:
        self.calls.append(route_of(request))
        return JSONResponse({"model_path": "m"} | ({} if self.edition == "old" else {"weight_version": self.version}))

    async def pause(self, request: Request) -> JSONResponse:
        body = await self.read(request, {"mode"}, {"mode"} if self.edition == "new" else set())
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            raise Refused("mode")
        self.paused = True
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> JSONResponse:
        if self.edition == "new" and not await request.body():
            raise Refused("a body is required")
        await self.read(request, {"torch_empty_cache"})
        self.paused = False
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: Request) -> JSONResponse:
        known = {"model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "flush_cache"}
        body = await self.read(request, {"model_path"} if self.edition == "old" else known, {"model_path"})
        await self.hold()
        if self.refuse:
            return JSONResponse({"success": False, "message": "Failed to get weights iterator"}, 400)
        self.loaded = body["model_path"]
        if "weight_version" in body:
            self.version = "-1" if self.wrong_version else body["weight_version"]
        return JSONResponse(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )


@dataclass
class FakeVLLM(FakeServer):
    """`edition` "new" has four-phase transfer and a version, "old" two phases, "plain" no development mode."""

    edition: str = "new"
    paused: bool = False
    cached_prefixes: bool = True

    def routes(self) -> list[Route]:
        if self.edition == "plain":
            return [Route("/health", self.weight_info)]
        routes = [
            Route("/collective_rpc", self.rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset, methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
        ]
        if self.edition == "new":
            routes += [
                Route("/weight_info", self.weight_info),
                Route("/update_weight_version", self.set_version, methods=["POST"]),
            ]
        return routes

    async def rpc(self, request: Request) -> Response:
        body = await self.read(request, {"method", "args", "kwargs", "timeout"}, {"method"})
        if body["method"] != "reload_weights" or body.get("args") or set(body.get("kwargs", {})) != {"weights_path"}:
            raise Refused("reload_weights() got an unexpected keyword argument")
        await self.hold()
        if self.refuse:
            return Response("EngineCore died", 500)
        self.loaded = body["kwargs"]["weights_path"]
        return Response() if self.edition == "old" else JSONResponse({"results": [None]})

    async def reset(self, request: Request) -> Response:
        await self.read(request, set())
        self.cached_prefixes = False
        return Response()

    async def pause(self, request: Request) -> JSONResponse:
        await self.read(request, set())
        if set(request.query_params) - {"mode", "clear_cache"} or request.query_params["mode"] not in ("wait", "abort"):
            raise Refused("query")
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> JSONResponse:
        await self.read(request, set())
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def weight_info(self, request: Request) -> JSONResponse:
        self.calls.append(route_of(request))
        return JSONResponse({"weight_version": None if self.version == "default" else self.version})

    async def set_version(self, request: Request) -> JSONResponse:
        body = await self.read(request, {"new_version"}, {"new_version"})
        self.version = "-1" if self.wrong_version else body["new_version"]
        return JSONResponse({"success": True, "new_version": body["new_version"]})


@contextlib.contextmanager
def serve_fakes(*fakes: FakeServer) -> Iterator[None]:
    """Run the fakes in a thread on one free port, each under its own path prefix."""
    mounts = [Mount(f"/{i}", routes=fake.routes()) for i, fake in enumerate(fakes)]  # type: ignore[attr-defined]
    app = Starlette(routes=mounts, exception_handlers={Refused: refused})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # connections made before the thread starts are queued
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        for i, fake in enumerate(fakes):
            fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{i}"
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(timeout=20)
