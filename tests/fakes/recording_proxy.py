"""A proxy in front of an inference server that records every completion, and finds them again in training batches."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import msgspec
import uvicorn
from running_server import wait_until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prime_rl.inference.server import bind
from rollouts.training.types import Sample

ALL = httpx.Limits(max_connections=None)
COMPLETIONS = ("/chat/completions", "/chat/completions/tokens")


@dataclass
class Recorder:
    """Prompt and sampled tokens of every completion, as the server sent them."""

    target: str
    root: str = ""
    drawn: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    http: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=600, trust_env=False, limits=ALL))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(completion) for _, completion in self.drawn)

    async def forward(self, request: Request) -> Response:
        """Forward a request; the route for whole groups is left out, so that chats come one by one."""
        if request.url.path.endswith("/group"):
            return Response(status_code=404)
        url = httpx.URL(self.target, path=request.url.path, query=request.url.query.encode())
        headers = {name: value for name, value in request.headers.items() if name == "content-type"}
        answer = await self.http.request(request.method, url, content=await request.body(), headers=headers)
        if answer.status_code == 200 and request.url.path.removeprefix("/v1") in COMPLETIONS:
            body = msgspec.json.decode(answer.content)
            self.drawn += [(tuple(body["prompt_token_ids"]), tuple(c["token_ids"])) for c in body["choices"]]
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """A running recorder in front of the server at `target`."""
    recorder = Recorder(target)
    methods = ["GET", "POST", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", recorder.forward, methods=methods)])
    listener = bind("127.0.0.1", 0)
    recorder.root = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the proxy to start")
    try:
        yield recorder
    finally:
        server.should_exit = True
        thread.join(30)


def compare(samples: Sequence[Sample], recorder: Recorder) -> tuple[int, int]:
    """Trained tokens, and how many of them are not tokens that the engine sampled after the tokens before them.

    Each completion is used once, so that a token that is trained twice counts as a difference.
    """
    left: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for prompt, completion in recorder.drawn:
        left[prompt].append(completion)
    num_tokens = num_different = 0
    for sample in samples:
        tokens, position = tuple(sample.tokens), 0
        while position < len(tokens):
            if not sample.loss_mask[position]:
                position += 1
                continue
            found = next((c for c in left[tokens[:position]] if tokens[position : position + len(c)] == c), None)
            if found is None or not all(sample.loss_mask[position : position + len(found)]):
                num_different += 1
                num_tokens += 1
                position += 1
                continue
            left[tokens[:position]].remove(found)
            num_tokens += len(found)
            position += len(found)
    return num_tokens, num_different
