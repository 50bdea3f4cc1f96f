"""Tasksets of verifiers 0.4: the process that plays them, and the same rewards as by verifiers' own runner.

verifiers 0.4 has an environment of its own: `make test-tasksets` creates it; VERIFIERS_PYTHON names another one's
interpreter.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_runner import ROOT, metric_rows, runner, until

from prime_rl.envs import tasksets
from prime_rl.envs.tasksets import TasksetFailed, TasksetProcess
from prime_rl.runtime.machine import find_free_port, is_healthy

PYTHON = Path(os.environ.get("VERIFIERS_PYTHON") or ROOT / ".venv-v1" / "bin" / "python")
needs_verifiers = pytest.mark.skipif(not PYTHON.is_file(), reason="verifiers 0.4 is not installed: make test-tasksets")
UNTRAINED = ("--model.name", "tiny-qwen3", "--model.debug.random-init")
SETTINGS = {"taskset": {"id": "counting"}, "harness": None}
FAKE = """
import json, os, sys
print(json.dumps({"rows": [{"prompt": "a", "task_number": 0}], "eval_rows": []}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("task") == "end":
        os._exit(3)
    if "cancel" in request:
        open(os.environ["CANCELLED"], "w").write(str(request["cancel"]))
    elif request["task"] != "hang":
        print(json.dumps({"run": request["run"], "reward": request["task"], "error": None}), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TasksetProcess]:
    """The process, with a script that answers at once."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(tasksets, "SCRIPT", script)
    monkeypatch.setenv("CANCELLED", str(tmp_path / "cancelled"))
    started = TasksetProcess(Path(sys.executable), SETTINGS)
    yield started
    started.close()


def test_results_reach_their_rollouts(process: TasksetProcess) -> None:
    assert process.start()["rows"] == [{"prompt": "a", "task_number": 0}]

    async def run() -> list[dict[str, Any]]:
        return await asyncio.gather(*(process.run({"task": number}) for number in range(50)))

    assert [result["reward"] for result in asyncio.run(run())] == list(range(50))


def test_an_ended_process_fails_its_rollouts_and_restarts(process: TasksetProcess) -> None:
    process.start()

    async def run() -> None:
        waiting = asyncio.create_task(process.run({"task": "hang"}))
        await asyncio.sleep(0)
        with pytest.raises(TasksetFailed, match="process of taskset 'counting' ended"):
            await process.run({"task": "end"})
        with pytest.raises(TasksetFailed):
            await waiting
        assert (await process.run({"task": 5}))["reward"] == 5

    asyncio.run(run())


def test_a_cancelled_rollout_is_cancelled_there(process: TasksetProcess, tmp_path: Path) -> None:
    process.start()

    async def run() -> None:
        waiting = asyncio.create_task(process.run({"task": "hang"}))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    until(lambda: (tmp_path / "cancelled").exists(), "the cancellation")


def test_an_interpreter_without_verifiers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken.py"
    script.write_text('import json\nprint(json.dumps({"error": "ModuleNotFoundError: no verifiers"}), flush=True)\n')
    monkeypatch.setattr(tasksets, "SCRIPT", script)
    with pytest.raises(ValueError, match=r"'counting' did not load in .*: ModuleNotFoundError: no verifiers"):
        TasksetProcess(Path(sys.executable), SETTINGS).start()


class GymHandler(BaseHTTPRequestHandler):
    """A resource server of NeMo Gym whose reward is the similarity of the reply to a word."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        reply: dict[str, Any] = {}
        if self.path.endswith("/verify"):
            parts = [part for item in body["response"]["output"] for part in item.get("content") or []]
            text = "".join(part.get("text", "") for part in parts).strip()
            reward = difflib.SequenceMatcher(None, text, body["word"]).ratio()
            reply = {"reward": reward, "responses_create_params": None, "response": None}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def gym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The taskset `nemo-gym` with a resource server."""
    rows = tmp_path_factory.mktemp("gym") / "words.jsonl"
    words = [first + second for first in "abcdef" for second in "abcdef"] * 4
    rows.write_text(
        "".join(
            json.dumps({"word": w, "responses_create_params": {"input": [{"role": "user", "content": f"Repeat: {w}"}]}})
            + "\n"
            for w in words
        )
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), GymHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    yield {"id": "nemo-gym", "dataset": str(rows), "task": {"resources_url": url}}
    server.shutdown()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small word list in the place of NLTK's, which TextArena's games read."""
    root = tmp_path_factory.mktemp("nltk")
    folder = root / "corpora" / "words"
    folder.mkdir(parents=True)
    known = ["apple", "river", "stone", "cloud", "table", "horse", "light", "bread", "music", "paper", "green", "chair"]
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(known) + "\n")
    return root


def read_rewards_of_theirs(folder: Path) -> dict[int, tuple[float, list[str]]]:
    """Reward and replies of each task, as `vf-eval` wrote them."""
    [path] = folder.glob("*/traces.jsonl")
    found = {}
    for line in path.read_text().splitlines():
        episode = json.loads(line)
        [trace] = episode["traces"]
        assert episode["ok"], trace["errors"]
        reward = sum(part["score"] * part["weight"] for part in trace["rewards"].values())
        replies = [node["message"].get("content") or "" for node in trace["nodes"] if node["sampled"]]
        found[episode["task"]["data"]["idx"]] = (reward, replies)
    return found


def read_rewards_of_ours(path: Path) -> dict[int, tuple[float, list[str]]]:
    """Reward and replies of each row, as `eval` wrote them."""
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        replies = [message.get("content") or "" for message in row["completion"] if message["role"] == "assistant"]
        found[row["example_id"]] = (row["reward"], replies)
    return found


def write_inline(value: Any) -> str:
    """A value in TOML."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{key} = {write_inline(item)}" for key, item in value.items()) + "}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_verifiers
def test_rewards_equal_those_of_vf_eval(tmp_path: Path, gym: dict[str, Any], words: Path) -> None:
    cases = {
        "hangman": ({"id": "textarena", "game": "Hangman-v0"}, "player"),
        "search": ({"id": "textarena", "game": "WordSearch-v0"}, "player"),
        "gym": (gym, "agent"),
    }
    port = find_free_port()
    environment = {**os.environ, "NLTK_DATA": str(words), "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}
    shared = "max_tokens = 12\ntemperature = 0.0\nmin_tokens = 4\n"
    ours = f'num_examples = 6\noutput_dir = "ours"\nclient.base_url = ["http://127.0.0.1:{port}/v1"]\n'
    ours += f"[sampling]\n{shared}"
    with runner(tmp_path / "logs") as commands:
        server = commands.start("inference", *UNTRAINED, "--server.port", port)
        until(lambda: is_healthy(None, port), "the server answers", server)
        for name, (taskset, seat) in cases.items():
            (tmp_path / "theirs.toml").write_text(
                f'model = "tiny-qwen3"\npush = false\noutput_dir = "theirs/{name}"\nselect.limit = 6\n'
                f'[client]\nbase_url = "http://127.0.0.1:{port}/v1"\napi_key_var = "NO_KEY"\n'
                f"[sampling]\n{shared}[env]\ntaskset = {write_inline(taskset)}\n"
                f'[env.{seat}]\nharness.id = "null"\nruntime.type = "subprocess"\nmax_turns = 3\n'
            )
            command = [str(PYTHON.with_name("vf-eval")), "@", "theirs.toml"]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=400)
            ours += f'[[env]]\nname = "{name}"\ntaskset = {write_inline(taskset)}\npython = "{PYTHON}"\n'
            ours += 'harness = {id = "null", max_turns = 3}\nargs = {num_examples = 6, num_eval_examples = 0}\n'
        (tmp_path / "ours.toml").write_text(ours)
        command = [sys.executable, "-m", "prime_rl", "eval", "@", "ours.toml", "--model.name", "tiny-qwen3"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in cases:
        theirs = read_rewards_of_theirs(tmp_path / "theirs" / name)
        found = read_rewards_of_ours(tmp_path / "ours" / "evals" / name / "results.jsonl")
        assert found == {number: (pytest.approx(reward), replies) for number, (reward, replies) in theirs.items()}
        print(f"{name}: {len(found)} rollouts, {sum(len(r) for _, r in found.values())} turns, equal rewards and texts")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_verifiers
def test_rl_on_a_taskset_learns(tmp_path: Path, gym: dict[str, Any]) -> None:
    (tmp_path / "rl.toml").write_text(
        f"""
max_steps = 40
seq_len = 64
output_dir = "{tmp_path / "out"}"
model = {{name = "tiny-qwen3", debug = {{random_init = true}}}}
trainer = {{micro_bs = 32, optim = {{lr = 2e-3}}}}
[orchestrator]
batch_size = 128
rollouts_per_example = 16
sampling = {{max_tokens = 5}}
eval = {{interval = 20}}
[[orchestrator.env]]
taskset = {write_inline(gym)}
harness = {{id = "direct-harness"}}
python = "{PYTHON}"
"""
    )
    command = [sys.executable, "-m", "prime_rl", "rl", "@", str(tmp_path / "rl.toml")]
    folder = Path(__file__).with_name("tasksets")  # the working directory, where a harness is found
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [row["reward/mean"] for row in metric_rows(tmp_path / "out", "orchestrator", "reward/mean")]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"reward {first:.3f} -> {last:.3f}")
    assert last > first + 0.12
