"""A strict fake of the OpenAI API: requires a key, rejects unknown fields, returns text and usage but no tokens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Body = dict[str, Any]
KEY = "sk-test-key"
FIELDS = frozenset(
    "model messages temperature top_p max_tokens max_completion_tokens n seed stop stream tools tool_choice logprobs "
    "top_logprobs response_format user parallel_tool_calls presence_penalty frequency_penalty logit_bias".split()
)


def backwards(body: Body) -> str:
    """The right answer of the reverse-text environment."""
    return f"<reversed_text>{str(body['messages'][-1]['content'])[::-1]}</reversed_text>"


@dataclass
class FakeApi:
    """`reply(body)` is the assistant's text, or its whole message; `fail(body)` a status to answer with instead."""

    reply: Callable[[Body], str | Body] = backwards
    models: tuple[str, ...] = ("gpt-4.1-mini",)
    latency_s: float = 0.0
    fail: Callable[[Body], int | None] = lambda body: None
    requests: list[Body] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    answered: int = 0
    base_url: str = ""

    def refuse(self, status: int, message: str) -> JSONResponse:
        self.refusals.append(message)
        return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status)

    async def chat(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return self.refuse(401, "Incorrect API key provided")
        body = await request.json()
        if unknown := sorted(set(body) - FIELDS):
            return self.refuse(400, f"Unrecognized request argument supplied: {unknown[0]}")
        if body["model"] not in self.models:
            return self.refuse(404, f"The model {body['model']!r} does not exist")
        if not isinstance(body.get("seed", 0), int) or body.get("seed", 0) >= 2**63:
            return self.refuse(400, "seed is not an integer of 64 bits")
        self.requests.append(body)
        if (status := self.fail(body)) is not None:
            return JSONResponse({"error": {"message": "scripted failure"}}, status)
        await asyncio.sleep(self.latency_s)
        output = self.reply(body)
        message = {"role": "assistant", **(output if isinstance(output, dict) else {"content": output})}
        used = len(str(message.get("content") or ""))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None and used > limit:
            message["content"], used, finish = message["content"][:limit], limit, "length"
        self.answered += 1
        usage = {"prompt_tokens": 1, "completion_tokens": used, "total_tokens": 1 + used}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        return JSONResponse({**answer, "usage": usage})

    async def list_models(self, request: Request) -> Response:
        cards = [{"id": name, "object": "model", "created": 1, "owned_by": "test"} for name in self.models]
        return JSONResponse({"object": "list", "data": cards})

    @property
    def environ(self) -> dict[str, str]:
        """What a command needs to take this for the OpenAI API."""
        return {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": self.base_url}


@contextlib.contextmanager
def serve_api(api: FakeApi) -> Iterator[FakeApi]:
    """Run it on a free port in a thread; its `base_url` is set."""
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.list_models, methods=["GET"]),
    ]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        api.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        try:
            yield api
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()
