"""The stock `tinker` client against `serve`, and kills of the server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_server import PYTHON, Server

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


def run(server: Server, script: str, key: str = "tml-a", **known: Any) -> dict[str, Any]:
    """The report of a program of the stock client."""
    command = [str(PYTHON), "-W", "ignore", "-c", PRELUDE + script]
    environment = {**server.environment(key), "KNOWN": json.dumps(known)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
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
    found = run(server, SESSION)
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
    before = run(server, BEFORE_KILL)
    server.kill()
    server.start()
    after = run(server, AFTER_KILL, state=before["state"], model=before["model"])
    assert after["status"] == 200
    assert after["restored"] == before["expected"] and after["later"] == before["later"]
