"""Tasks of a taskset: those to train on, those that are held out, their rows, and the variables of its process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
from fake_transport import END, Wire, encode, turn
from pydantic import BaseModel

from prime_rl.envs.taskset_runner import ENDLESS, NO_PROMPT, Runner, describe_task, read_tasks
from prime_rl.envs.tasksets import TasksetAgent, _build_environment, verifiers_reward
from rollouts.training.environments.plain import PlainEnvironment


class Tasks:
    def __init__(self, number: int, bounded: bool = True) -> None:
        self.bounded, self._number = bounded, number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._number))


@pytest.mark.parametrize(
    ("taskset", "limits", "num_rows", "num_held_out"),
    [
        (Tasks(500), (10, 100), 10, 100),
        (Tasks(5000, bounded=False), (64, 100), 64, 100),
        (Tasks(5000, bounded=False), (None, 100), ENDLESS, 100),
        (Tasks(500), (None, 100), 400, 100),
        (Tasks(60), (None, 100), 30, 30),
        (Tasks(60), (10, 100), 10, 50),
        (Tasks(60), (50, 100), 30, 30),
        (Tasks(60), (50, 10), 50, 10),
        (Tasks(55), (50, 10), 45, 10),
    ],
)
def test_training_tasks_come_before_those_held_out(
    taskset: Tasks, limits: tuple[int | None, int], num_rows: int, num_held_out: int
) -> None:
    rows, held_out = read_tasks(taskset, *limits)
    assert (len(rows), len(held_out)) == (num_rows, num_held_out) and rows + held_out == [
        *range(num_rows + num_held_out)
    ]


class UserMessage(BaseModel):
    """As in verifiers 0.4: the role is a default."""

    role: Literal["user"] = "user"
    content: str
    name: str | None = None


class TaskData(BaseModel):
    prompt: str | list[UserMessage] | None = None
    system_prompt: str | None = None
    answer: Any = None
    idx: int = 0


def test_messages_of_a_row_have_roles_and_content() -> None:
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    data = TaskData(prompt=[UserMessage(content="a")], system_prompt="b", answer=3, idx=7)
    row = describe_task(SimpleNamespace(data=data), 4)
    assert row == {"prompt": [system, user], "task_number": 4, "answer": "3"}
    PlainEnvironment([row], lambda: 0.0)
    assert describe_task(SimpleNamespace(data=TaskData()), 0) == {"prompt": NO_PROMPT, "task_number": 0}


def test_no_proxy_is_between_a_taskset_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "near.example")
    monkeypatch.delenv("no_proxy", raising=False)
    assert _build_environment("/bin")["no_proxy"] == "near.example,127.0.0.1"


def test_a_rollout_that_a_library_cancels_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(self: Runner, request: dict[str, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError("Cancelled by cancel scope")

    async def run() -> None:
        runner._running[3] = asyncio.create_task(runner._run(3, {}))
        await asyncio.wait(runner._running.values())

    monkeypatch.setattr(Runner, "_play", play)
    out = io.StringIO()
    runner = Runner(None, [], out)
    asyncio.run(run())
    assert json.loads(out.getvalue()) == {"run": 3, "error": "CancelledError: Cancelled by cancel scope"}


@pytest.mark.parametrize(("error", "kind"), [("SandboxError: gone", "InfraError"), ("TaskError: 1", "TasksetFailed")])
def test_a_failed_sandbox_is_no_failure_of_the_task(error: str, kind: str) -> None:
    class Process:
        async def run(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"error": error}

    environment = PlainEnvironment([{"prompt": "a", "task_number": 0}], verifiers_reward)
    environment.agent = TasksetAgent(Process())  # type: ignore[arg-type]
    [rollout] = asyncio.run(environment.run_group(environment.rows()[0], Wire(), "m", [{}]))
    assert (rollout.error_type, rollout.error) == (kind, error)


@pytest.mark.parametrize(("max_tokens", "stop_reason"), [(5, "length"), (50, "agent_completed")])
def test_a_cut_answer_ends_a_rollout_by_its_length(max_tokens: int, stop_reason: str) -> None:
    class Process:
        async def run(self, request: dict[str, Any]) -> dict[str, Any]:
            body = {"model": request["model"], "messages": [{"role": "user", "content": "a"}]}
            async with httpx.AsyncClient(headers={"x-api-key": request["key"]}, trust_env=False) as client:
                (await client.post(f"{request['base_url']}/chat/completions", json=body)).raise_for_status()
            return {"error": None, "reward": 1.0, "stop": "agent_completed"}

    environment = PlainEnvironment([{"prompt": "a", "task_number": 0}], verifiers_reward)
    environment.agent = TasksetAgent(Process())  # type: ignore[arg-type]
    wire, args = Wire(script=[turn([*encode("no" * 9), END])]), [{"max_tokens": max_tokens}]
    [rollout] = asyncio.run(environment.run_group(environment.rows()[0], wire, "m", args))
    assert (rollout.error, rollout.reward, rollout.stop_reason) == (None, 1.0, stop_reason)
