"""A client for environment tests: a function in place of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec

from prime_rl.utils.client import InferenceClient
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments import Environment

Message = dict[str, Any]
Reply = Callable[[list[Message]], str | Message]


class ScriptedClient(InferenceClient):
    """`reply(messages)` is the assistant's text, or its whole message."""

    def __init__(self, reply: Reply) -> None:
        super().__init__("http://127.0.0.1:9/v1")
        self.reply = reply

    async def request(self, method: str, path: str, body: Any = None, *args: Any, **kwargs: Any) -> bytes:
        output = self.reply(body["messages"])
        message = output if isinstance(output, dict) else {"content": output}
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
        return msgspec.json.encode({"id": "x", "created": 1, "model": "m", "choices": [choice]})


def call_tool(name: str, **arguments: str) -> Message:
    """A message of the assistant that calls a tool."""
    function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
    return {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def play(env: Environment, rows: Sequence[Message], player: Callable[[Message], Reply]) -> list[Rollout]:
    """One rollout per row, by `player(row)`; asserts that none of them failed."""

    async def main() -> list[Rollout]:
        rollouts = []
        for row in rows:
            rollouts += await env.run_group(row, ScriptedClient(player(row)), "m", [{}])
        return rollouts

    rollouts = anyio.run(main)
    assert not [rollout.error for rollout in rollouts if rollout.failed]
    return rollouts
