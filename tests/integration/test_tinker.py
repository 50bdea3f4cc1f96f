"""The stock `tinker` client against `serve`, and kills of the server.

The client has an environment of its own: `make test-tinker` creates it; TINKER_PYTHON names another interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TINKER_PYTHON", ROOT / ".venv-tinker" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.is_file(), reason="tinker is not installed: make test-tinker"),
]
PRELUDE = """
import json, os, tinker
from tinker import types
KNOWN = json.loads(os.environ["KNOWN"])
service = tinker.ServiceClient()
tokens = list(range(5, 25))
def datum(shift=0):
    ids = [token + shift for token in tokens]
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
def train(client, steps):
    for step in steps:
        done = client.forward_backward([datum(step)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return done.result().metrics["loss:sum"]
def score(client):
    return [float(x) for x in client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data]
def report(**found):
    print("REPORT" + json.dumps(found), flush=True)
"""


class Server:
    """A `serve` process with a tiny model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "prime_rl", "serve", "--model.name", "tiny-qwen3"]
        command += ["--model.debug.random_init", "true", "--model.served_names", '["Qwen/Qwen3-8B"]']
        command += ["--port", str(self.port), "--output_dir", str(self.folder / "serve")]
        with (self.folder / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/v1/healthz", headers={"X-API-Key": "k"})
            try:
                with urllib.request.urlopen(request, timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, (self.folder / "serve.log").read_text()
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def environment(self, key: str = "tml-a", **known: Any) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hf"), "NO_PROXY": "127.0.0.1"}
        tinker = {"TINKER_BASE_URL": f"http://127.0.0.1:{self.port}", "TINKER_API_KEY": key}
        return {**clean, **offline, **tinker, "KNOWN": json.dumps(known)}

    def run(self, script: str, key: str = "tml-a", **known: Any) -> dict[str, Any]:
        """The report of a program of the stock client."""
        command = [str(PYTHON), "-W", "ignore", "-c", PRELUDE + script]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment(key, **known), timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
        found: dict[str, Any] = json.loads(line.removeprefix("REPORT"))
        return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.kill()


SESSION = """
client = service.create_lora_training_client(base_model="tiny-qwen3", rank=8, seed=3).result()
losses = [train(client, [0]) for _ in range(5)]
sampler = client.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokens)
scored = sampler.compute_logprobs(prompt).result()
params = types.SamplingParams(max_tokens=8, seed=1)
sampled = [sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2) for _ in range(20)]
sampled = [[list(s.tokens) for s in future.result().sequences] for future in sampled]
def loss(data, logprobs):
    return -sum(x.mean() for x in logprobs), {"x": 1.0}
custom = client.forward_backward_custom([datum()], loss).result().metrics
client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
state = client.save_state("one").result().path
saved = client.save_weights_for_sampler("two", ttl_seconds=7200).result().path
loaded = service.create_training_client_from_state_with_optimizer(state).result()
rest = service.create_rest_client()
paths = [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
rest.delete_checkpoint_from_tinker_path(saved).result()
report(losses=losses, equal=score(client) == score(loaded), sampled=sampled, custom=custom, paths=paths,
       exact=[float(x) for x in sampler.compute_logprobs(prompt).result()[1:]] == [float(x) for x in scored[1:]],
       rank=loaded.get_info().lora_rank, left=len(rest.list_user_checkpoints().result().checkpoints))
service.close("success").result()
"""


def test_stock_client_trains_samples_saves_and_loads(server: Server) -> None:
    found = server.run(SESSION)
    assert found["losses"][-1] < found["losses"][0]
    assert found["equal"] and found["exact"] and found["rank"] == 8
    assert all(sequences == found["sampled"][0] for sequences in found["sampled"])
    assert found["custom"]["x"] == 1.0 and found["custom"]["loss:sum"] > 0
    assert [path.split("/", 3)[3] for path in found["paths"]] == ["weights/one", "sampler_weights/two"]
    assert found["left"] == 1


BEFORE_KILL = """
client = service.create_lora_training_client(base_model="tiny-qwen3", rank=8, seed=3).result()
train(client, range(3))
state = client.save_state("kept").result().path
expected = score(client)
train(client, range(3, 5))
report(state=state, expected=expected, later=score(client), model=client.model_id)
os._exit(0)
"""
AFTER_KILL = """
import httpx
reply = httpx.post(os.environ["TINKER_BASE_URL"] + "/api/v1/get_info", json={"model_id": KNOWN["model"]},
                   headers={"X-API-Key": os.environ["TINKER_API_KEY"]})
client = service.create_training_client_from_state_with_optimizer(KNOWN["state"]).result()
restored = score(client)
train(client, range(3, 5))
report(status=reply.status_code, restored=restored, later=score(client))
"""


def test_killed_server_keeps_checkpoints_and_models(server: Server) -> None:
    before = server.run(BEFORE_KILL)
    server.kill()
    server.start()
    after = server.run(AFTER_KILL, state=before["state"], model=before["model"])
    assert after["status"] == 200
    assert after["restored"] == before["expected"] and after["later"] == before["later"]
