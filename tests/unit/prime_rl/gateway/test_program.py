"""Environments whose turns a program runs: task, reward, output, timeouts and leftover processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from recorded_client import RecordedClient

from prime_rl.envs.worker import build_agent
from prime_rl.gateway.program import (
    MAX_OUTPUT_BYTES,
    ProgramAgent,
    _build_environment,
    check_command,
    record_session,
    run_program,
)
from prime_rl.gateway.session import Session
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments.plain import PlainEnvironment, agent_reward
from rollouts.training.types import Status

ASK = """
import json, os, sys, urllib.request
def post(url, body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(*messages):
    body = {"model": "m", "messages": list(messages)}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
task = json.load(sys.stdin)
user = {"role": "user", "content": task["prompt"][-1]["content"]}
"""


def run(code: str, *, client: Any = None, rewards: Any = agent_reward, timeout_s: float = 20.0) -> Rollout:
    """One rollout of a program."""
    env = PlainEnvironment([{"prompt": "Say hi.", "answer": "secret", "level": 3}], rewards)
    env.agent, env.timeout_s = ProgramAgent([sys.executable, "-S", "-c", ASK + code]), timeout_s
    [rollout] = asyncio.run(env.run_group(env.rows()[0], client or RecordedClient(), "policy", [{"max_tokens": 9}]))
    return rollout


def test_a_program_reads_its_task_and_reports_its_reward() -> None:
    rollout = run("""
answer = ask(user)
assert task["level"] == 3 and "answer" not in task and json.load(open(os.environ["TASK_FILE"])) == task
post(os.environ["REWARD_URL"], {"reward": 0.25})
""")
    assert (rollout.status, rollout.reward, rollout.error) == (Status.COMPLETED, 0.25, None)
    assert rollout.completion == [{"role": "assistant", "content": "Hello."}]
    [sample] = rollout_to_samples(rollout)
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 1, 7, 8], [0.0, 0.0, 1.0, 1.0, 1.0])


def test_an_answer_after_the_end_is_not_scored() -> None:
    rollout, session = Rollout(prompt=[]), Session(RecordedClient(), "m", {})
    record_session(rollout, session)
    session.turns.append(Turn([1], [2], [0.0]))
    assert rollout.turns == []


def test_without_a_report_the_exit_code_is_the_reward() -> None:
    assert [run(f"ask(user); sys.exit({code})").reward for code in (0, 3)] == [1.0, 0.0]


def test_the_tools_of_the_last_conversation_are_recorded() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    first, last = "ask(user)", f"post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', dict(body, tools={tools}))"
    body = "body = {'messages': [user]}"
    assert run(f"{body}; {first}; {last}").tools == tools
    assert run(f"{body}; {last}; {first}").tools is None


def test_reward_functions_see_what_the_program_printed() -> None:
    def reward(state: dict[str, Any], completion: str, answer: str) -> float:
        assert (state["exit_code"], state["stderr"], completion, answer) == (0, "", "Hello.", "secret")
        return float(state["stdout"].strip() == "HELLO.")

    assert run("print(ask(user)['content'].upper())", rewards=reward).reward == 1.0


def test_every_branch_becomes_a_sample() -> None:
    rollout = run("first = ask(user); ask({'role': 'system', 'content': 'Summarize.'}, user)")
    assert [sample.tokens for sample in rollout_to_samples(rollout)] == [[1, 2, 1, 7, 8], [1, 2, 2, 7, 8]]


def test_reward_functions_see_every_conversation() -> None:
    def reward(state: dict[str, Any], prompt: Any, messages: Any) -> float:
        contents = [[message["content"] for message in messages] for messages in state["conversations"]]
        return float(contents == [["Say hi.", "Hello."], ["Sum up.", "Say hi.", "Hello."]] and len(messages) == 1)

    assert run("ask(user); ask({'role': 'system', 'content': 'Sum up.'}, user)", rewards=reward).reward == 1.0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ask(user); os.kill(os.getpid(), 9)", "the program was killed by SIGKILL"),
        ("sys.exit('no such file')", "the program ended with code 1 before its first request to the model: no such"),
        ("pass", "the program ended with code 0 before its first request to the model"),
    ],
)
def test_a_killed_or_silent_program_fails_the_rollout(code: str, error: str) -> None:
    rollout = run(code)
    assert rollout.failed and error in (rollout.error or "")


def test_a_failure_of_the_engine_fails_the_rollout() -> None:
    rollout = run("ask(user)", client=RecordedClient(ConnectionError("engine is gone")))
    assert (rollout.error_type, rollout.error) == ("ConnectionError", "engine is gone")


def refuse(param: str) -> openai.BadRequestError:
    """The answer of a server that refuses a request."""
    content = orjson.dumps({"error": {"message": f"{param} is bad", "type": "invalid_request_error", "param": param}})
    response = httpx.Response(400, content=content, request=httpx.Request("POST", "http://engine"))
    return openai.BadRequestError(f"answered 400: {param} is bad", response=response, body=None)


@pytest.mark.parametrize("param", ["messages", "tools"])
def test_chats_that_the_template_refuses_fail_the_rollout(param: str) -> None:
    for script in ([refuse(param)], ["Hello.", refuse(param)]):
        rollout = run("; ".join(["ask(user)"] * len(script)), client=RecordedClient(*script))
        assert (rollout.error_type, rollout.error) == ("RequestError", f"answered 400: {param} is bad")


def test_other_refusals_are_of_the_program() -> None:
    twice = "try: ask(user)\nexcept OSError: pass\nask(user)"
    assert run(twice, client=RecordedClient(refuse("messages"), "Hello.")).reward == 1.0, "it found another way"
    assert run("ask(user); ask(user)", client=RecordedClient("Hello.", refuse("stop"))).reward == 0.0
    rollout = run("ask(user)", client=RecordedClient(refuse("stop")))
    assert rollout.error == "the program ended with code 1 after its request was refused: answered 400: stop is bad"
    rollout = run("post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', {'messages': [user], 'n': 2})")
    assert "code 1 after its request was refused: n must be 1 for agents in training" in (rollout.error or "")


def test_a_program_may_shorten_its_first_request() -> None:
    response = httpx.Response(400, text="maximum context length is 9", request=httpx.Request("POST", "http://engine"))
    overlong = openai.BadRequestError("too long", response=response, body=None)
    rollout = run("try: ask(user)\nexcept OSError: ask(user)", client=RecordedClient(overlong, "Hello."))
    assert (rollout.status, rollout.reward, len(rollout.turns)) == (Status.COMPLETED, 1.0, 1)
    assert run("ask(user)", client=RecordedClient(overlong)).error_type == "OverlongPrompt"


@pytest.mark.parametrize(("num_workers", "limit"), [(1, 8), (3, 2), (16, 1)])
def test_workers_share_the_starts_of_a_machine(monkeypatch: pytest.MonkeyPatch, num_workers: int, limit: int) -> None:
    monkeypatch.setattr("prime_rl.gateway.program.num_cores", lambda: 4)
    agent = build_agent([sys.executable], num_workers)
    assert isinstance(agent, ProgramAgent) and agent._starts._value == limit


@pytest.mark.parametrize("detached", [False, True])
def test_a_timeout_ends_the_program_and_its_children(tmp_path: Path, detached: bool) -> None:
    pids = tmp_path / "pids"
    started = time.monotonic()
    rollout = run(
        f"""
import subprocess, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep, start_new_session={detached})
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(60)
""",
        timeout_s=1.0,
    )
    assert rollout.error_type == "RolloutTimeout" and time.monotonic() - started < 10
    assert not any(is_running(int(pid)) for pid in pids.read_text().split()), "a process of the program is left"


def test_programs_start_in_turn_and_waiting_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.gateway.program.num_cores", lambda: 1)
    monkeypatch.setattr("prime_rl.gateway.program.STARTS_PER_CORE", 1)
    log = tmp_path / "log"
    code = f"""
import time
def note(text):
    with open({str(log)!r}, "a") as file:
        file.write(text)
note("s")
time.sleep(0.4)
note("a")
ask(user)
time.sleep(1.0)
"""
    env = PlainEnvironment([{"prompt": "Say hi."}], agent_reward)
    env.agent, env.timeout_s = ProgramAgent([sys.executable, "-S", "-c", ASK + code]), 2.5
    rollouts = asyncio.run(env.run_group(env.rows()[0], RecordedClient(), "policy", [{"max_tokens": 9}] * 7))
    assert [rollout.status for rollout in rollouts] == [Status.COMPLETED] * 7
    assert log.read_text() == "sa" * 7, "a program starts when the one before it has asked"


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_long_outputs_are_cut_to_their_end() -> None:
    sizes: list[int] = []

    def reward(state: dict[str, Any]) -> float:
        sizes.append(len(state["stdout"]))
        return float(state["stdout"].endswith("end\n"))

    rollout = run("ask(user); print('x' * 3_000_000 + 'end')", rewards=reward)
    assert (rollout.reward, sizes) == (1.0, [MAX_OUTPUT_BYTES])


def test_programs_leave_no_open_files() -> None:
    async def count() -> int:
        ended = await run_program([sys.executable, "-S", "-c", "print(1)"], {}, dict(os.environ))
        assert ended == {"exit_code": 0, "stdout": "1\n", "stderr": ""}
        await asyncio.sleep(0)  # closing a transport takes a turn of the loop
        return len(os.listdir("/proc/self/fd"))

    async def compare() -> tuple[int, int]:
        return await count(), await count()

    first, second = asyncio.run(compare())
    assert second == first


def test_keys_of_the_user_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "real")
    rollout = run("ask(user); sys.exit('sk-real' in os.environ.values() or 'real' in os.environ.values())")
    assert rollout.reward == 1.0


def test_addresses_of_the_user_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "OPENAI_API_BASE ANTHROPIC_API_BASE ANTHROPIC_API_URL OPENAI_ORGANIZATION OPENAI_API_TYPE".split()
    for name in names:
        monkeypatch.setenv(name, "of the user")
    found = _build_environment("http://gateway", "key")
    told = {name: found.get(name) for name in names}
    assert told == dict.fromkeys(names) | {
        "OPENAI_API_BASE": "http://gateway/v1",
        "ANTHROPIC_API_BASE": "http://gateway",
    }


def test_no_proxy_is_between_a_program_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert run("ask(user)").reward == 1.0


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ValueError, match=r"env.command: there is no program 'no-such-agent'"):
        check_command(["no-such-agent", "--fast"])
