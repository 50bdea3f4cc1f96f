"""A cheap inference server with fixed responses after a delay, for measuring its clients.

    python benchmarks/fake_server.py [--latency-s 0.05] [--tokens 45] [--hold 0]     (prints its port)

With --hold N no request is answered before N of them wait at the same time; then all are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
from typing import ClassVar

PROMPT_TOKENS = 26
CHUNKED = b"application/x-ndjson\r\ntransfer-encoding: chunked"


def build_answer(num_tokens: int) -> bytes:
    """The answer to a chat, as our server gives it."""
    ids = [100 + i % 50 for i in range(num_tokens)]
    content = [{"token": f"t{i}", "logprob": -0.25 - i / 1000, "bytes": [116], "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * (num_tokens // 5), "tool_calls": None},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": ids,
        "versions": [[0, 0]],
    }
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
    }
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return json.dumps({**head, "choices": [choice], "prompt_token_ids": list(range(PROMPT_TOKENS))}).encode()


class Answering(asyncio.Protocol):
    """One connection: every request gets the same answer, `latency_s` later, or when `hold` of them wait."""

    answer = b""
    grouped = False
    num_open = 0
    latency_s = 0.0
    hold = 0
    waiting: ClassVar[dict[Answering, int]] = {}
    """How many answers a connection waits for: one, or one for each seed of a group."""
    most_open = 0
    """Answers that were waited for at the same time, at most."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if len(body) < int(length or b"0"):
            return
        self._data = b""
        if head.startswith(b"GET /most_open"):
            text = str(Answering.most_open).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
            return
        self.grouped = b"/group " in head.partition(b"\r\n")[0]
        self.waiting[self] = len(json.loads(body)["seeds"]) if self.grouped else 1
        Answering.num_open += self.waiting[self]
        Answering.most_open = max(Answering.most_open, Answering.num_open)
        if not self.hold:
            asyncio.get_running_loop().call_later(self.latency_s, self._reply)
        elif Answering.num_open >= self.hold:
            Answering.hold = 0
            for connection in list(self.waiting):
                connection._reply()

    def _reply(self) -> None:
        num = self.waiting.pop(self)
        Answering.num_open -= num
        if self._transport.is_closing():
            return
        head, data = b"application/json\r\ncontent-length: %d" % len(self.answer), self.answer
        if self.grouped:
            lines = b"".join(b'{"index":%d,"status":200,"answer":%s}\n' % (i, self.answer) for i in range(num))
            head, data = CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(lines), lines)
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n\r\n%s" % (head, data))


async def serve(latency_s: float, num_tokens: int, hold: int) -> None:
    """Answer until this process is ended."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Answering.answer, Answering.latency_s, Answering.hold = build_answer(num_tokens), latency_s, hold
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0, backlog=16384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-s", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=45)
    parser.add_argument("--hold", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.latency_s, arguments.tokens, arguments.hold))
