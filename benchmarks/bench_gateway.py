"""CPU time of the gateway for each request of an agent, with many sessions at once.

python benchmarks/bench_gateway.py --sessions 1000 --requests 8     exit code 1 when a threshold is missed

Every session sends chats with a tool and a growing history over a connection of its own, from another process. The
engine is a stub in the process of the gateway that waits and answers, so that all sessions are in flight at once; the
stub's own time is subtracted. The client of the real engine is measured by bench_orchestrator.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from results import Row, describe_machine, finish

from prime_rl.client.http import HttpPool, ensure_open_files
from prime_rl.gateway.server import Gateway
from prime_rl.gateway.session import Session
from rollouts.training.environments.answers import Answer, AnswerMessage, Choice, Logprobs, TokenLogprob, Usage
from rollouts.training.environments.answers import as_completion as as_chat

NUM_TOKENS = 64
LATENCY_S = 2.0
APIS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": FUNCTION},
    "messages": {"name": "look_up", "description": "Looks up.", "input_schema": FUNCTION["parameters"]},
    "responses": {"type": "function", **FUNCTION},
}


class StubEngine:
    """Answers 64 tokens after a while; counts the requests that wait at once, and its own CPU time."""

    def __init__(self) -> None:
        self.waiting = self.most_waiting = 0
        self.cpu_s = 0.0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, *, messages: list[Any], **request: Any) -> Any:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await asyncio.sleep(LATENCY_S)
        self.waiting -= 1
        start = time.thread_time()
        content = AnswerMessage(content=f"answer {len(messages)} " + "a" * 200)
        logprobs = Logprobs(content=[TokenLogprob(-0.5) for _ in range(NUM_TOKENS)])
        ids = list(range(NUM_TOKENS))
        choice = Choice(message=content, finish_reason="stop", logprobs=logprobs, token_ids=ids)
        prompt = list(range(100 * len(messages)))
        answer = as_chat(Answer([choice], id="a", prompt_token_ids=prompt, usage=Usage(100, 64, 164)), chat=True)
        self.cpu_s += time.thread_time() - start
        return answer


async def measure(api: str, num_sessions: int, num_requests: int) -> list[Row]:
    """All requests of one API."""
    gateway, engine = Gateway(), StubEngine()
    sessions = [Session(engine, "policy", {"seed": number}) for number in range(num_sessions)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(gateway.open(session)) for session in sessions]
        plan = {
            "api": api,
            "requests": num_requests,
            "sessions": [[u, s.key] for u, s in zip(urls, sessions, strict=True)],
        }
        client = await asyncio.create_subprocess_exec(sys.executable, __file__, "--client", stdin=subprocess.PIPE)
        before = time.process_time()
        await client.communicate(json.dumps(plan).encode())
        cpu_ms = 1e3 * (time.process_time() - before - engine.cpu_s) / (num_sessions * num_requests)
    assert client.returncode == 0 and sum(len(session.turns) for session in sessions) == num_sessions * num_requests
    unmatched = sum(session.num_unmatched for session in sessions)
    return [
        Row(f"{api}: CPU milliseconds of a request", cpu_ms, "<=", 0.5),
        Row(f"{api}: requests in flight at once", engine.most_waiting, ">=", num_sessions),
        Row(f"{api}: unmatched requests", unmatched, "==", 0),
    ]


async def run_client(plan: dict[str, Any]) -> None:
    """Every session of the plan at once."""
    ensure_open_files(len(plan["sessions"]) + 100)
    first_url = plan["sessions"][0][0]
    pool = HttpPool(first_url, max_connections=len(plan["sessions"]), timeout_s=300)

    async def talk(url: str, key: str) -> None:
        path = url.partition("//")[2].partition("/")[2]
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        history: list[Any] = []
        for number in range(plan["requests"]):
            history.append({"role": "user", "content": f"question {number} " + "q" * 200})
            name = "input" if plan["api"] == "responses" else "messages"
            body = {"model": "m", "max_tokens": 100, name: history, "tools": [TOOLS[plan["api"]]]}
            reply = await pool.request("POST", f"/{path}{APIS[plan['api']]}", json.dumps(body).encode(), headers)
            assert reply.status == 200, reply
            answer = json.loads(reply.body)
            if plan["api"] == "chat":
                history.append(answer["choices"][0]["message"])
            elif plan["api"] == "messages":
                history.append({"role": "assistant", "content": answer["content"]})
            else:
                history += answer["output"]

    await asyncio.gather(*(talk(url, key) for url, key in plan["sessions"]))


def main() -> int:
    """Measure, show, write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the CPU time of the gateway.")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=8, help="requests of a session")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        asyncio.run(run_client(json.load(sys.stdin)))
        return 0
    machine = describe_machine()
    ensure_open_files(arguments.sessions + 100)
    rows = [row for api in APIS for row in asyncio.run(measure(api, arguments.sessions, arguments.requests))]
    return finish("gateway", rows, machine)


if __name__ == "__main__":
    raise SystemExit(main())
