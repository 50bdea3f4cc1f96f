"""`monitor RUN --serve`: a live local page of a run."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.monitor.local_runs import LocalRun
from prime_rl.monitor.page_data import build_page_data, build_update, find_checkpoints, find_evals, find_weights
from prime_rl.monitor.report import render_page
from prime_rl.monitor.rollout_detail import rollout_detail
from prime_rl.monitor.rollout_index import SORTS, Query, RolloutIndex
from prime_rl.monitor.run_status import find_status
from prime_rl.monitor.vocabulary import Vocabulary, find_tokenizer
from prime_rl.runtime.http_access import find_foreign_host, find_foreign_origin, own_hosts
from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from types import FrameType

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

HOST = "127.0.0.1"
READ_TIMEOUT_S = 20.0
_RUN = RunDir(Path())
WATCHED = (_RUN.metrics.name, _RUN.samples.name, _RUN.trainer_logprobs.name, "STABLE", "summary.json")
SETTLE_MS = 150
"""Debounce interval of file changes."""

KEEPALIVE_S = 15.0
CHUNK = 8 << 20
"""Bytes of samples indexed between two notifications."""

_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class LiveRun:
    """A run with its rollout index, updated by a thread."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.index = RolloutIndex(run)
        self.changes = 0
        self._vocabulary: Vocabulary | None = None
        self._cached_findings: dict[str, Any] = {}
        self._due = 0.0
        self._stop = threading.Event()
        self._listeners: set[Callable[[], object]] = set()
        self._thread = threading.Thread(target=self._follow, name="monitor-index", daemon=True)

    def start(self) -> None:
        """Start indexing and watching."""
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether listeners should disconnect."""
        return self._stop.is_set()

    def close(self) -> None:
        """Stop watching and disconnect the listeners."""
        self._stop.set()
        self._notify()

    def listen(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` from another thread after each change; returns a function that unsubscribes."""
        self._listeners.add(wake)
        return lambda: self._listeners.discard(wake)

    def page_data(self) -> dict[str, Any]:
        """Data of the page without rollouts."""
        return {**build_page_data(self.run), "facts": self.index.facts()}

    def update(self, offset: int) -> dict[str, Any]:
        """Changes since `offset` of the metrics file."""
        disk = {
            "evals": find_evals(self.run),
            "weights": find_weights(self.run.files.weights),
            "checkpoints": find_checkpoints(self.run.files.checkpoints),
        }
        findings, status = self._conclusions(), find_status(self.run)
        findings |= {"run": {**findings["run"], "state": status.state, "status": status.text}}
        return {**build_update(self.run, offset), **findings, **disk, "facts": self.index.facts()}

    def _conclusions(self) -> dict[str, Any]:
        """Run-level findings; recomputed at most 5 % of the time on large runs."""
        now = time.monotonic()
        if now >= self._due:
            whole = build_page_data(self.run)
            self._cached_findings = {name: whole[name] for name in ("run", "findings", "shares", "trends", "scores")}
            self._due = time.monotonic() + 20 * (time.monotonic() - now)
        return dict(self._cached_findings)

    def vocabulary(self) -> Vocabulary | None:
        """The token table, loaded with the first opened rollout."""
        if self._vocabulary is None:
            path = find_tokenizer(self.run.path, self.run.config_value("model.name"))
            self._vocabulary = None if path is None else Vocabulary(path)
        return self._vocabulary

    def _follow(self) -> None:
        from watchfiles import watch

        self._catch_up()
        watched = watch(
            self.run.path,
            watch_filter=lambda _, path: Path(path).name in WATCHED,
            stop_event=self._stop,
            debounce=SETTLE_MS,
            step=50,
            rust_timeout=1000,
            yield_on_timeout=True,
            ignore_permission_denied=True,
        )
        size = self._state()
        for changes in watched:
            # Some file systems send no notifications: compare sizes at every timeout as well.
            before, size = size, self._state()
            if changes or size != before:
                self._catch_up()

    def _catch_up(self) -> None:
        while not self._stop.is_set() and self.index.grow(CHUNK):
            self._notify()
        self._notify()

    def _notify(self) -> None:
        self.changes += 1
        for wake in list(self._listeners):
            wake()

    def _state(self) -> tuple[object, ...]:
        paths = (self.run.metrics_path, self.run.samples_path)
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        # A killed process changes no file.
        return (*sizes, find_status(self.run).text, *(place.written_ns for place in self.run.evaluations()))


def build_app(live: LiveRun) -> Starlette:
    """Read-only routes of the page, restricted to this machine and its own host names."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    page = render_page(None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        live.start()
        yield
        live.close()

    def respond(request: Request, value: Any, kind: str = "application/json") -> Response:
        body = value if isinstance(value, bytes) else msgspec.json.encode(redact_fields(value))
        headers = dict(_HEADERS)
        if len(body) > 4000 and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 3), "gzip"
        return Response(body, media_type=kind, headers=headers)

    async def show_page(request: Request) -> Response:
        return respond(request, page, "text/html; charset=utf-8")

    def rollout_number(request: Request) -> int:
        number = int(request.path_params["number"])
        if number >= len(live.index):
            raise ValueError(f"there is no rollout {number}")
        return number

    async def show_run(request: Request) -> Response:
        return respond(request, await asyncio.to_thread(live.page_data))

    async def show_update(request: Request) -> Response:
        offset = int(request.query_params.get("offset", "0"))
        return respond(request, await asyncio.to_thread(live.update, offset))

    async def show_rollouts(request: Request) -> Response:
        params = dict(request.query_params)
        offset, limit = int(params.pop("offset", 0)), min(int(params.pop("limit", 100)), 1000)
        return respond(request, await asyncio.to_thread(_find, live.index, read_query(params), offset, limit))

    async def show_rollout(request: Request) -> Response:
        return respond(request, await asyncio.to_thread(_detail, live, rollout_number(request)))

    async def show_group(request: Request) -> Response:
        return respond(request, await asyncio.to_thread(_group, live.index, rollout_number(request)))

    async def stream_changes(request: Request) -> Response:
        return _events(live)

    async def reject(request: Request, error: Exception) -> Response:
        return Response(str(error), status_code=400, headers=_HEADERS)

    table = (
        ("/", show_page),
        ("/api/run", show_run),
        ("/api/update", show_update),
        ("/api/rollouts", show_rollouts),
        ("/api/rollouts/{number:int}", show_rollout),
        ("/api/rollouts/{number:int}/group", show_group),
        ("/api/events", stream_changes),
    )
    routes = [Route(path, _check_origin(route), methods=["GET"]) for path, route in table]
    return Starlette(routes=routes, exception_handlers={ValueError: reject}, lifespan=lifespan)


def read_query(params: dict[str, str]) -> Query:
    """Parse the query of a request; `ValueError` for unknown conditions."""
    conditions: dict[str, Any] = {
        name: params.pop(name) for name in ("text", "env", "status", "kind", "sort") if name in params
    }
    conditions |= {name: int(params.pop(name)) for name in ("step", "group") if name in params}
    conditions |= {f"{name}_reward": float(params.pop(name)) for name in ("min", "max") if name in params}
    conditions["descending"] = params.pop("descending", "true") == "true"
    if params or conditions.get("sort", SORTS[0]) not in SORTS:
        raise ValueError(f"unknown condition: {', '.join(params) or conditions['sort']}")
    return Query(**conditions)


def serve(run: LocalRun, port: int, print_text: Callable[[str], None]) -> int:
    """Serve the page until stopped; returns the exit code. `ValueError` if the port is in use."""
    import socket

    import uvicorn

    from prime_rl.runtime.http_deadlines import build_protocol

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--port {port} cannot be used ({error.strerror}): choose another, or 0 for any") from error
    listener.listen()  # connections queue until the server starts
    live = LiveRun(run)
    config = uvicorn.Config(
        build_app(live),
        http=build_protocol(READ_TIMEOUT_S),
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    print_text(f"Serving {run.name} at http://{HOST}:{listener.getsockname()[1]}/ (Ctrl-C to stop)")
    server = uvicorn.Server(config)
    stop = server.handle_exit

    def handle_exit(sig: int, frame: FrameType | None) -> None:
        live.close()  # before the server, which waits for its open streams
        stop(sig, frame)

    server.handle_exit = handle_exit  # type: ignore[method-assign]
    server.run(sockets=[listener])
    return 0


def _check_origin(route: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Reject requests for foreign host names (DNS rebinding) and foreign origins."""

    async def guarded(request: Request) -> Any:
        from starlette.responses import Response

        headers = request.scope["headers"]
        if find_foreign_host(headers, own_hosts()) is not None or find_foreign_origin(headers) is not None:
            return Response("this page is for this machine only", status_code=403)
        return await route(request)

    return guarded


def _find(index: RolloutIndex, query: Query, offset: int, limit: int) -> dict[str, Any]:
    numbers = index.select(query)
    return {"total": len(numbers), "rows": index.brief(numbers[offset : offset + limit])}


def _group(index: RolloutIndex, number: int) -> list[dict[str, Any]]:
    return index.brief(index.siblings(number))


def _detail(live: LiveRun, number: int) -> dict[str, Any]:
    detail = rollout_detail(number, live.index.row(number))
    vocabulary = live.vocabulary()
    return {"detail": detail, "vocab": {} if vocabulary is None else vocabulary.table(detail["tokens"])}


def _events(live: LiveRun) -> StreamingResponse:
    """Server-sent events: one `change` after each change of the run."""
    from starlette.responses import StreamingResponse

    async def stream() -> AsyncIterator[bytes]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        unsubscribe = live.listen(lambda: loop.call_soon_threadsafe(changed.set))
        try:
            yield b": open\n\n"
            while not live.closing:
                try:
                    await asyncio.wait_for(changed.wait(), KEEPALIVE_S)
                except TimeoutError:
                    yield b": keepalive\n\n"
                    continue
                changed.clear()
                yield f"event: change\ndata: {live.changes}\n\n".encode()
        finally:
            unsubscribe()

    return StreamingResponse(stream(), media_type="text/event-stream", headers=_HEADERS)
