"""Runs an agent's program for one rollout: its process, its environment variables and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from prime_rl.client.http import ensure_open_files
from prime_rl.gateway.chat import RequestError
from prime_rl.gateway.server import HOST, Gateway
from prime_rl.gateway.session import Session
from prime_rl.runtime.machine import num_cores
from prime_rl.runtime.process_tree import TOKEN_VARIABLE, add_token, die_with_parent, kill_run_processes, signal_group
from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.protocol import Row, pause_timeout
from rollouts.training.proxies import exclude_from_proxies
from rollouts.training.types import Status

MAX_OUTPUT_BYTES = 64 << 10
"""How much of the end of each output is kept."""
MAX_ERROR_CHARS = 300
STARTS_PER_CORE = 2
START_S = 10.0
"""A program has started when it sends its first request, or after this time."""
MAX_OPEN_FILES = 16384
"""Pipes and connections of programs that run at the same time."""
DRAIN_S = 1.0
"""Time for the rest of the output after the program has ended."""
UNRENDERED = ("messages", "tools")
"""Fields that the chat template cannot render: no fault of the model, so the rollout has no reward."""
HIDDEN_FIELDS = ("answer",)
"""Fields of a row that the program does not see."""
HIDDEN_VARIABLES = frozenset(
    "ANTHROPIC_AUTH_TOKEN ANTHROPIC_API_URL OPENAI_ORG_ID OPENAI_ORGANIZATION OPENAI_PROJECT_ID OPENAI_API_TYPE".split()
)
"""Keys, addresses and settings of the user's own accounts."""


class ProgramFailed(Exception):
    """The program was killed, or ended without an answer of the model."""


class ProgramAgent:
    """Runs `command` once per rollout instead of the environment's own turns; an `Agent` of a `PlainEnvironment`.

    The program reads its task, the row as JSON without `answer`, from standard input or the file TASK_FILE. The model
    is at OPENAI_BASE_URL or ANTHROPIC_BASE_URL, with OPENAI_API_KEY or ANTHROPIC_API_KEY, under any name. The program
    may POST {"reward": number} to REWARD_URL with the same key. Reward functions see `exit_code`, `stdout`, `stderr`,
    `reward` and `conversations` in `state`. The end of a rollout, a timeout included, kills all of its processes.

    Importing a client takes seconds of CPU time, so few programs per core start at once, a share of them in each of
    `num_workers` processes. Waiting for that does not count for the timeout.
    """

    def __init__(self, command: Sequence[str], num_workers: int = 1) -> None:
        self.command = list(command)
        ensure_open_files(MAX_OPEN_FILES)
        self.gateway = Gateway()
        self._starts = asyncio.Semaphore(max(STARTS_PER_CORE * num_cores() // num_workers, 1))

    async def __call__(
        self, rollout: Rollout, row: Row, state: dict[str, Any], client: Any, model: str, args: Mapping[str, Any]
    ) -> None:
        """Run the program and record its turns; raises `ProgramFailed`, or the error of the engine or the template."""
        session = Session(client, model, args)
        with pause_timeout():
            await self._starts.acquire()
        asyncio.create_task(self._end_start(session))  # noqa: RUF006
        try:
            async with self.gateway.open(session) as url:
                task = {name: value for name, value in row.items() if name not in HIDDEN_FIELDS}
                state |= await run_program(self.command, task, _build_environment(url, session.key))
        finally:
            session.first_request.set()
            record_session(rollout, session)
        state |= {"reward": session.reward, "conversations": session.conversations}
        if session.error is not None:
            raise session.error
        if session.refusal is not None and session.refusal.param in UNRENDERED:
            raise session.refusal
        if state["exit_code"] < 0 or not session.conversations:
            raise ProgramFailed(_describe_end(state, session.refusal))

    async def _end_start(self, session: Session) -> None:
        try:
            with anyio.move_on_after(START_S):
                await session.first_request.wait()
        finally:
            self._starts.release()


async def run_program(command: Sequence[str], task: Mapping[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Run a program to its end; returns `exit_code` (negative: the signal that ended it), `stdout` and `stderr`.

    Kills its process group, and processes that have left the group (Linux).
    """
    with tempfile.TemporaryDirectory(prefix="task-") as directory:
        file = Path(directory) / "task.json"
        file.write_text(json.dumps(task, default=str))
        token = Path(directory).name
        with await _Output.open() as out, await _Output.open() as err:
            with file.open("rb") as standard_input:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=standard_input,
                    stdout=out.sink,
                    stderr=err.sink,
                    env={**environment, "TASK_FILE": str(file), TOKEN_VARIABLE: add_token(token)},
                    start_new_session=True,
                    preexec_fn=die_with_parent(os.getpid()),
                )
            out.close_sink()
            err.close_sink()
            try:
                exit_code = await process.wait()
            finally:
                signal_group(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
                    await asyncio.to_thread(kill_run_processes, token)
            return {"exit_code": exit_code, "stdout": await out.read_end(), "stderr": await err.read_end()}


class _Output(contextlib.AbstractContextManager["_Output"]):
    """A pipe whose last bytes are kept. With asyncio's own pipes, `wait` would wait for every process that has one."""

    def __init__(self, sink: int, transport: asyncio.ReadTransport, reader: asyncio.Task[str]) -> None:
        self.sink, self._transport, self._reader = sink, transport, reader

    @classmethod
    async def open(cls) -> _Output:
        source, sink = os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(source, "rb", 0)
        )
        return cls(sink, transport, asyncio.create_task(_read_end(stream)))

    async def read_end(self) -> str:
        """The end of the output, once no process has the pipe; "" if one keeps it."""
        await asyncio.wait([self._reader], timeout=DRAIN_S)
        return self._reader.result() if self._reader.done() else ""

    def __exit__(self, *exception: object) -> None:
        self.close_sink()
        self._reader.cancel()
        self._transport.close()

    def close_sink(self) -> None:
        """Close this process's end for writing."""
        if self.sink >= 0:
            os.close(self.sink)
            self.sink = -1


def check_command(command: Sequence[str]) -> None:
    """Raise `ValueError` if the program does not exist."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"env.command: there is no program {command[0]!r}: give its path, or install it")


async def _read_end(stream: asyncio.StreamReader) -> str:
    """The last bytes of a stream."""
    kept = bytearray()
    with contextlib.suppress(ConnectionError):
        while chunk := await stream.read(MAX_OUTPUT_BYTES):
            kept += chunk
            del kept[:-MAX_OUTPUT_BYTES]
    return kept.decode(errors="replace")


def _build_environment(url: str, key: str) -> dict[str, str]:
    """The variables of this process, with the addresses and the key of a session instead of real keys."""
    own = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",  # the names that LangChain and LiteLLM prefer
        "ANTHROPIC_API_BASE": url,
        "OPENAI_API_KEY": key,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would go to OpenAI, with this key
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "REWARD_URL": f"{url}/reward",
        **exclude_from_proxies(HOST, os.environ),
    }
    return {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES} | own


def record_session(rollout: Rollout, session: Session) -> None:
    """Copy the turns of a session, also of one that is being cancelled, and how they ended.

    Answers that arrive later are not part of what is scored.
    """
    rollout.turns, rollout.num_turns = list(session.turns), len(session.conversations)
    rollout.completion_tokens, rollout.stop_reason = session.num_completion_tokens, session.finish_reason
    rollout.metrics = {"unmatched_requests": float(session.num_unmatched)}
    rollout.completion, rollout.tools = [], session.tools
    if session.conversations:
        rollout.prompt, rollout.completion = session.split_last()
    if session.is_overlong:
        rollout.status, rollout.stop_reason = Status.TRUNCATED, "prompt_too_long"
    elif session.finish_reason == "length":
        rollout.status = Status.TRUNCATED


def _describe_end(state: Mapping[str, Any], refusal: RequestError | None) -> str:
    code = state["exit_code"]
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if refusal is not None:
        return f"the program {end} after its request was refused: {str(refusal)[:MAX_ERROR_CHARS]}"
    when = "" if state["conversations"] else " before its first request to the model"
    last = (str(state["stderr"]).strip() or str(state["stdout"]).strip()).splitlines()[-1:]
    detail = f": {last[0][:MAX_ERROR_CHARS]}" if last else ""
    return f"the program {end}{when}{detail}"
