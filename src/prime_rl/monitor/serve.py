"""`monitor RUN --serve`: the page of a run on this machine, which follows the run while it goes on."""

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
from prime_rl.monitor.vocabulary import Vocabulary, find_tokenizer

if TYPE_CHECKING:
    from types import FrameType

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

HOST = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost")
WATCHED = ("metrics.jsonl", "samples.jsonl", "trainer_logprobs.jsonl", "STABLE", "summary.json")
SETTLE_MS = 150
"""Changes closer together than this are told as one."""

KEEPALIVE_S = 15.0
CHUNK = 8 << 20
"""Bytes of samples that are indexed between two looks at who else wants to know something."""

_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class LiveRun:
    """A run with its index of rollouts, which a thread keeps up to date."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.index = RolloutIndex(run)
        self.changes = 0
        self._vocabulary: Vocabulary | None = None
        self._told: dict[str, Any] = {}
        self._due = 0.0
        self._stop = threading.Event()
        self._listeners: set[Callable[[], object]] = set()
        self._thread = threading.Thread(target=self._follow, name="monitor-index", daemon=True)

    def start(self) -> None:
        """Begin to index and to watch."""
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether listeners should go."""
        return self._stop.is_set()

    def close(self) -> None:
        """Stop watching, and tell the listeners to go."""
        self._stop.set()
        self._tell()

    def listen(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Have `wake` called, from another thread, after each change; returns what ends it."""
        self._listeners.add(wake)
        return lambda: self._listeners.discard(wake)

    def page_data(self) -> dict[str, Any]:
        """All but the rollouts."""
        return {**build_page_data(self.run), "facts": self.index.facts()}

    def update(self, offset: int) -> dict[str, Any]:
        """What is new since the page had read up to `offset` of the metrics."""
        disk = {
            "evals": find_evals(self.run),
            "weights": find_weights(self.run.path / "weights"),
            "checkpoints": find_checkpoints(self.run.path / "checkpoints"),
        }
        return {**build_update(self.run, offset), **self._conclusions(), **disk, "facts": self.index.facts()}

    def _conclusions(self) -> dict[str, Any]:
        """What is told from the whole run; of a long one it is told again only after 20 times as long as it took."""
        now = time.monotonic()
        if now >= self._due:
            whole = build_page_data(self.run)
            self._told = {name: whole[name] for name in ("findings", "shares")} | {"state": whole["run"]["state"]}
            self._due = time.monotonic() + 20 * (time.monotonic() - now)
        return self._told

    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's table, read when the first rollout is opened."""
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
            # Some file systems do not notify: look yourself at every timeout as well.
            before, size = size, self._state()
            if changes or size != before:
                self._catch_up()

    def _catch_up(self) -> None:
        while not self._stop.is_set() and self.index.grow(CHUNK):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        self.changes += 1
        for wake in list(self._listeners):
            wake()

    def _state(self) -> tuple[int, ...]:
        paths = (self.run.metrics_path, self.run.samples_path)
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        return (*sizes, *(place.written_ns for place in self.run.evaluations()))


def build_app(live: LiveRun) -> Starlette:
    """The routes of the page. Only reading, only for this machine, only under its own name."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    page = render_page(None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        live.start()
        yield
        live.close()

    def answer(request: Request, value: Any, kind: str = "application/json") -> Response:
        body = value if isinstance(value, bytes) else msgspec.json.encode(value)
        headers = dict(_HEADERS)
        if len(body) > 4000 and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 3), "gzip"
        return Response(body, media_type=kind, headers=headers)

    async def show_page(request: Request) -> Response:
        return answer(request, page, "text/html; charset=utf-8")

    def number_of(request: Request) -> int:
        number = int(request.path_params["number"])
        if number >= len(live.index):
            raise ValueError(f"there is no rollout {number}")
        return number

    async def show_run(request: Request) -> Response:
        return answer(request, await asyncio.to_thread(live.page_data))

    async def show_update(request: Request) -> Response:
        offset = int(request.query_params.get("offset", "0"))
        return answer(request, await asyncio.to_thread(live.update, offset))

    async def show_rollouts(request: Request) -> Response:
        words = dict(request.query_params)
        offset, limit = int(words.pop("offset", 0)), min(int(words.pop("limit", 100)), 1000)
        return answer(request, await asyncio.to_thread(_find, live.index, read_query(words), offset, limit))

    async def show_rollout(request: Request) -> Response:
        return answer(request, await asyncio.to_thread(_detail, live, number_of(request)))

    async def show_group(request: Request) -> Response:
        return answer(request, await asyncio.to_thread(_group, live.index, number_of(request)))

    async def tell_changes(request: Request) -> Response:
        return _events(live)

    async def refuse(request: Request, error: Exception) -> Response:
        return Response(str(error), status_code=400, headers=_HEADERS)

    table = (
        ("/", show_page),
        ("/api/run", show_run),
        ("/api/update", show_update),
        ("/api/rollouts", show_rollouts),
        ("/api/rollouts/{number:int}", show_rollout),
        ("/api/rollouts/{number:int}/group", show_group),
        ("/api/events", tell_changes),
    )
    routes = [Route(path, _own_name(route), methods=["GET"]) for path, route in table]
    return Starlette(routes=routes, exception_handlers={ValueError: refuse}, lifespan=lifespan)


def read_query(words: dict[str, str]) -> Query:
    """The conditions of a request; `ValueError` for what is none."""
    given: dict[str, Any] = {
        name: words.pop(name) for name in ("text", "env", "status", "kind", "sort") if name in words
    }
    given |= {name: int(words.pop(name)) for name in ("step", "group") if name in words}
    given |= {f"{name}_reward": float(words.pop(name)) for name in ("min", "max") if name in words}
    given["descending"] = words.pop("descending", "true") == "true"
    if words or given.get("sort", SORTS[0]) not in SORTS:
        raise ValueError(f"unknown condition: {', '.join(words) or given['sort']}")
    return Query(**given)


def serve(run: LocalRun, port: int, say: Callable[[str], None]) -> int:
    """Serve the page until stopped; returns the exit code. `ValueError` when the port is taken."""
    import socket

    import uvicorn

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"--port {port} cannot be used ({error.strerror}): choose another, or 0 for any") from error
    listener.listen()  # from here on the address answers, if late
    live = LiveRun(run)
    config = uvicorn.Config(
        build_app(live), log_level="warning", access_log=False, log_config=None, timeout_graceful_shutdown=1
    )
    say(f"{run.name} is shown at http://{HOST}:{listener.getsockname()[1]}/ (Ctrl-C ends it)")
    server = uvicorn.Server(config)
    stop = server.handle_exit

    def handle_exit(sig: int, frame: FrameType | None) -> None:
        live.close()  # first: the server waits for its open streams, which wait for changes
        stop(sig, frame)

    server.handle_exit = handle_exit  # type: ignore[method-assign]
    server.run(sockets=[listener])
    return 0


def _own_name(route: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Answer only requests for this machine's name: a foreign page cannot point its own name here and read along."""

    async def guarded(request: Request) -> Any:
        from starlette.responses import Response

        if request.url.hostname not in HOSTS:
            return Response("this page is for this machine only", status_code=403)
        return await route(request)

    return guarded


def _find(index: RolloutIndex, query: Query, offset: int, limit: int) -> dict[str, Any]:
    found = index.select(query)
    return {"total": len(found), "rows": index.brief([int(n) for n in found[offset : offset + limit]])}


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
        end = live.listen(lambda: loop.call_soon_threadsafe(changed.set))
        try:
            yield b": hello\n\n"
            while not live.closing:
                try:
                    await asyncio.wait_for(changed.wait(), KEEPALIVE_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                changed.clear()
                yield f"event: change\ndata: {live.changes}\n\n".encode()
        finally:
            end()

    return StreamingResponse(stream(), media_type="text/event-stream", headers=_HEADERS)
