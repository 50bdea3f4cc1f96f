"""`monitor`: live local pages of one run, or of all runs below a folder."""

from __future__ import annotations

import asyncio
import gzip
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from loguru import logger

from prime_rl.monitor.live_runs import LiveRuns
from prime_rl.monitor.local_runs import LocalRun, is_replaced
from prime_rl.monitor.logs import pack_logs
from prime_rl.monitor.page_data import (
    build_page_data,
    build_update,
    find_checkpoints,
    find_evals,
    find_weights,
    metrics_csv,
    read_tenants,
)
from prime_rl.monitor.report import render_page
from prime_rl.monitor.rollout_detail import rollout_detail
from prime_rl.monitor.rollout_index import SORTS, Query, RolloutIndex
from prime_rl.monitor.run_status import find_status
from prime_rl.monitor.vocabulary import Vocabulary, find_tokenizer
from prime_rl.runtime.http_access import find_foreign_host, find_foreign_origin, own_hosts
from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    import socket
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

POLL_S = 1.0
"""Seconds between comparisons of file sizes where the system cannot notify of changes."""

ALIVE_S = 4.0
"""Seconds between signs of life. The page reports a lost connection when it misses three of them."""

CONCLUSIONS = ("run", "findings", "checks", "alerts", "shares", "trends", "scores", "contexts", "configs")
"""Parts of the page that follow from the whole run."""

MAX_OPEN = 8
"""Runs of a folder that are indexed at the same time."""

MAX_PROMPTS = 200
DEFAULT_PORT = 8050
CHUNK = 8 << 20
"""Bytes of samples indexed between two notifications."""

Handler = Callable[[Any], Any]
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
        self._concluded = -1  # `changes` at that time
        self._is_behind = False
        self._problem = ""  # that was reported last
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

    @property
    def num_listeners(self) -> int:
        """Number of open pages."""
        return len(self._listeners)

    def listen(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` from another thread after each change; returns a function that unsubscribes."""
        self._listeners.add(wake)
        return lambda: self._listeners.discard(wake)

    def page_data(self) -> dict[str, Any]:
        """Data of the page without rollouts."""
        return {**build_page_data(self.run), "facts": self.index.facts()}

    def update(self, offset: int, first: str = "") -> dict[str, Any]:
        """Changes since `offset` of the metrics file; `is_replaced` if a new run has replaced it."""
        if is_replaced(self.run.metrics_path, offset, first):
            return {"is_replaced": True}
        disk = {
            "evals": find_evals(self.run),
            "weights": find_weights(self.run.files.weights),
            "checkpoints": find_checkpoints(self.run.files.checkpoints),
            "tenants": read_tenants(self.run.files.tenants),
        }
        findings, status = self._conclusions(), find_status(self.run)
        current = {"state": status.state, "status": status.text, "has_steps": status.has_steps}
        findings |= {"run": {**findings["run"], **current}}
        if offset:
            del findings["configs"]  # they are complete before the first metric
        return {**build_update(self.run, offset), **findings, **disk, "facts": self.index.facts()}

    def _conclusions(self) -> dict[str, Any]:
        """Findings of the run, recomputed at most 5 % of the time. Pages are notified when they are due."""
        now = time.monotonic()
        if now >= self._due:
            self._concluded = self.changes
            whole = build_page_data(self.run)
            self._cached_findings = {name: whole[name] for name in CONCLUSIONS}
            self._due = time.monotonic() + 20 * (time.monotonic() - now)
        self._is_behind = self._concluded != self.changes
        return dict(self._cached_findings)

    def vocabulary(self) -> Vocabulary | None:
        """The token table, loaded with the first opened rollout."""
        if self._vocabulary is None:
            path = find_tokenizer(self.run.path, self.run.config_value("model.name"))
            self._vocabulary = None if path is None else Vocabulary(path)
        return self._vocabulary

    def _follow(self) -> None:
        from watchfiles import watch
        from watchfiles._rust_notify import WatchfilesRustInternalError

        while not self.run.path.is_dir():  # the page waits for a run that has not started
            if self._stop.wait(0.5):
                return
        state = self._follow_once((), is_changed=True)
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
        try:
            for changes in watched:
                state = self._follow_once(state, is_changed=bool(changes))
        except (OSError, WatchfilesRustInternalError) as error:  # out of inotify watches or instances
            logger.warning(f"{self.run.name}: no notifications of changes ({error}), comparing file sizes instead")
        while not self._stop.wait(POLL_S):
            state = self._follow_once(state, is_changed=False)

    def _follow_once(self, before: tuple[object, ...], *, is_changed: bool) -> tuple[object, ...]:
        """Index what is new; returns the state of the files. After an error it is tried again at the next timeout."""
        try:
            # Some file systems send no notifications: compare sizes at every timeout as well. This comes before pages
            # are notified, whose requests may come before the next change.
            state = self._state()
            is_due = self._is_behind and time.monotonic() >= self._due
            if is_changed or state != before or is_due:
                self._is_behind = False  # until the next request that comes too early
                self._catch_up()
        except Exception as error:
            problem = f"{self.run.name} cannot be read, and its page is not up to date: {type(error).__name__}: {error}"
            if problem != self._problem:
                logger.warning(problem)
            self._problem = problem
            return ()
        return state

    def _catch_up(self) -> None:
        if self.index.is_outdated():
            self.index = RolloutIndex(self.run)
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


class OpenRuns:
    """The live runs of a folder that a page has requested; the least recently used one without a page is closed."""

    def __init__(self, runs: LiveRuns) -> None:
        self.runs = runs
        self._open: dict[str, LiveRun] = {}
        self._lock = threading.Lock()

    def find(self, key: str) -> LiveRun:
        """The run with this key, opened if necessary; `ValueError` if there is none."""
        run = self.runs.find(key)
        with self._lock:
            live = self._open.pop(key, None)
            if live is None:
                live = LiveRun(run)
                live.start()
            self._open[key] = live
            idle = [name for name, other in self._open.items() if not other.num_listeners and other is not live]
            for name in idle[: max(len(self._open) - MAX_OPEN, 0)]:
                self._open.pop(name).close()
            return live

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            for live in self._open.values():
                live.close()


def build_app(live: LiveRun | None = None, runs: OpenRuns | None = None) -> Starlette:
    """Read-only routes of one run at `/`, or of a folder: the list at `/` and each run at `/runs/KEY/`.

    They are restricted to this machine and its own host names.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if live is not None:
            live.start()
        yield
        _close(live, runs)

    if runs is None:
        assert live is not None
        table = run_routes(lambda _: live)
    else:
        folder = runs
        prefix = "/runs/{key:path}"
        run_table = run_routes(lambda request: folder.find(request.path_params["key"]), folder.runs.root)
        table = [*folder_routes(folder.runs), *((prefix + path, route) for path, route in run_table)]
    routes = [Route(path, _check_origin(route), methods=["GET"]) for path, route in table]
    return Starlette(routes=routes, exception_handlers={ValueError: _reject}, lifespan=lifespan)


def folder_routes(runs: LiveRuns) -> list[tuple[str, Handler]]:
    """Routes of the page of all runs."""
    page = render_page(None, "runs")

    async def show_page(request: Request) -> Response:
        return _respond(request, page, "text/html; charset=utf-8")

    async def list_runs(request: Request) -> Response:
        cards = await asyncio.to_thread(runs.cards)
        return _respond(request, {"root": runs.root.name, "time": time.time(), "runs": cards})

    async def show_curves(request: Request) -> Response:
        keys, metric = request.query_params.getlist("run"), request.query_params.get("metric")
        return _respond(request, await asyncio.to_thread(runs.curves, keys, metric))

    async def show_differences(request: Request) -> Response:
        keys = request.query_params.getlist("run")
        return _respond(request, await asyncio.to_thread(runs.config_differences, keys))

    return [
        ("/", show_page),
        ("/api/runs", list_runs),
        ("/api/curves", show_curves),
        ("/api/differences", show_differences),
    ]


def run_routes(find: Callable[[Request], LiveRun], root: Path | None = None) -> list[tuple[str, Handler]]:
    """Routes of the page of a run; `root` is the folder whose list the page links to."""
    page = render_page(None)

    def answer(build: Callable[[LiveRun, Request], Any]) -> Handler:
        async def route(request: Request) -> Response:
            live = await asyncio.to_thread(find, request)
            return _respond(request, await asyncio.to_thread(build, live, request))

        return route

    async def show_page(request: Request) -> Response:
        await asyncio.to_thread(find, request)
        return _respond(request, page, "text/html; charset=utf-8")

    async def stream_changes(request: Request) -> Response:
        return _events(await asyncio.to_thread(find, request))

    async def export_metrics(request: Request) -> Response:
        live = await asyncio.to_thread(find, request)
        text = await asyncio.to_thread(metrics_csv, live.run)
        return _respond(request, text.encode(), "text/csv; charset=utf-8")

    return [
        ("/", show_page),
        ("/metrics.csv", export_metrics),
        ("/api/run", answer(lambda live, _: {**live.page_data(), "home": root is not None})),
        ("/api/update", answer(_update)),
        ("/api/logs", answer(lambda live, _: pack_logs(live.run))),
        ("/api/prompts", answer(lambda live, _: live.index.prompts(MAX_PROMPTS))),
        ("/api/rollouts", answer(_find)),
        ("/api/rollouts/{number:int}", answer(_detail)),
        ("/api/rollouts/{number:int}/group", answer(_group)),
        ("/api/rollouts/{number:int}/history", answer(_history)),
        ("/api/events", stream_changes),
    ]


async def _reject(request: Request, error: Exception) -> Response:
    from starlette.responses import Response

    return Response(str(error), status_code=400, headers=_HEADERS, media_type="text/plain")


def _respond(request: Request, value: Any, kind: str = "application/json") -> Response:
    from starlette.responses import Response

    body = value if isinstance(value, bytes) else msgspec.json.encode(redact_fields(value))
    headers = dict(_HEADERS)
    if len(body) > 4000 and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 3), "gzip"
    return Response(body, media_type=kind, headers=headers)


def read_query(params: dict[str, str]) -> Query:
    """Parse the query of a request; `ValueError` for unknown conditions."""
    conditions: dict[str, Any] = {
        name: params.pop(name) for name in ("text", "env", "status", "kind", "sort") if name in params
    }
    conditions |= {name: int(params.pop(name)) for name in ("step", "group", "index") if name in params}
    for name in ("step", "group", "index"):
        if not -(2**63) <= conditions.get(name, 0) < 2**63:
            raise ValueError(f"{name} must have at most 64 bits")
    conditions |= {"equal": params.pop("equal") == "true"} if "equal" in params else {}
    conditions |= {f"{name}_reward": float(params.pop(name)) for name in ("min", "max") if name in params}
    conditions["descending"] = params.pop("descending", "true") == "true"
    if params or conditions.get("sort", SORTS[0]) not in SORTS:
        raise ValueError(f"unknown condition: {', '.join(params) or conditions['sort']}")
    return Query(**conditions)


def serve(
    target: LocalRun | LiveRuns, port: int | None, print_text: Callable[[str], None], *, open_browser: bool = False
) -> int:
    """Serve the page until stopped; returns the exit code.

    `port` None: 8050, or a free one if that is in use. Raises `ValueError` if a given port is in use.
    """
    import uvicorn

    from prime_rl.runtime.http_deadlines import build_protocol

    listener = _listen(port)
    live = LiveRun(target) if isinstance(target, LocalRun) else None
    folder = OpenRuns(target) if isinstance(target, LiveRuns) else None
    config = uvicorn.Config(
        build_app(live, folder),
        http=build_protocol(READ_TIMEOUT_S),
        ws="none",
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    name = target.name if isinstance(target, LocalRun) else f"all runs below {target.root}"
    url = f"http://{HOST}:{listener.getsockname()[1]}/"
    print_text(f"Serving {name} at {url} (Ctrl-C to stop)")
    if live is not None and find_status(live.run).state == "waiting":
        print_text(f"{live.run.name} holds no run yet: the page waits for it")
    if open_browser:
        _open_browser(url)
    server = uvicorn.Server(config)
    stop = server.handle_exit

    def handle_exit(sig: int, frame: FrameType | None) -> None:
        _close(live, folder)  # before the server, which waits for its open streams
        stop(sig, frame)

    server.handle_exit = handle_exit  # type: ignore[method-assign]
    server.run(sockets=[listener])
    return 0


def _open_browser(url: str) -> None:
    """Open a page in a browser with windows; one that runs in the terminal would take it over."""
    import webbrowser

    if sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))):
        webbrowser.open(url)


def _close(*pages: LiveRun | OpenRuns | None) -> None:
    for page in pages:
        if page is not None:
            page.close()


def _listen(port: int | None) -> socket.socket:
    """A listening socket; connections queue until the server starts."""
    import socket

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, DEFAULT_PORT if port is None else port))
    except OSError as error:
        if port is not None:
            listener.close()
            cure = "choose another, or 0 for any"
            raise ValueError(f"--port {port} cannot be used ({error.strerror}): {cure}") from error
        listener.bind((HOST, 0))
    listener.listen()
    return listener


def _check_origin(route: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Reject requests for foreign host names (DNS rebinding) and foreign origins."""

    async def guarded(request: Request) -> Any:
        from starlette.responses import Response

        headers = request.scope["headers"]
        if find_foreign_host(headers, own_hosts()) is not None or find_foreign_origin(headers) is not None:
            return Response("this page is for this machine only", status_code=403)
        return await route(request)

    return guarded


def _update(live: LiveRun, request: Request) -> dict[str, Any]:
    return live.update(int(request.query_params.get("offset", "0")), request.query_params.get("first", ""))


def _find(live: LiveRun, request: Request) -> dict[str, Any]:
    params = dict(request.query_params)
    offset, limit = int(params.pop("offset", 0)), min(int(params.pop("limit", 100)), 1000)
    numbers = live.index.select(read_query(params))
    return {"total": len(numbers), "rows": live.index.brief(numbers[offset : offset + limit])}


def _number(live: LiveRun, request: Request) -> int:
    number = int(request.path_params["number"])
    if number >= len(live.index):
        raise ValueError(f"there is no rollout {number}")
    return number


def _group(live: LiveRun, request: Request) -> list[dict[str, Any]]:
    return live.index.brief(live.index.siblings(_number(live, request)))


def _history(live: LiveRun, request: Request) -> list[dict[str, Any]]:
    return live.index.brief(live.index.history(_number(live, request)))


def _detail(live: LiveRun, request: Request) -> dict[str, Any]:
    number = _number(live, request)
    detail = rollout_detail(number, live.index.row(number))
    vocabulary = live.vocabulary()
    return {"detail": detail, "vocab": {} if vocabulary is None else vocabulary.table(detail["tokens"])}


def _events(live: LiveRun) -> StreamingResponse:
    """Server-sent events: `change` at once and after each change of the run, and `alive` at regular intervals."""
    from starlette.responses import StreamingResponse

    async def stream() -> AsyncIterator[bytes]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        changed.set()  # the run may have changed since the page has read it
        unsubscribe = live.listen(lambda: loop.call_soon_threadsafe(changed.set))
        try:
            yield b": open\n\n"
            while not live.closing:
                try:
                    await asyncio.wait_for(changed.wait(), ALIVE_S)
                except TimeoutError:
                    yield b"event: alive\ndata: 1\n\n"
                    continue
                changed.clear()
                yield f"event: change\ndata: {live.changes}\n\n".encode()
        finally:
            unsubscribe()

    return StreamingResponse(stream(), media_type="text/event-stream", headers=_HEADERS)
