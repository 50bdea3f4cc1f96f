"""One unmodified program of the stock `tinker` client while its server is killed 200 times at random moments."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from test_serve_restart import Killer, Server
from tinker_server import PYTHON

NUM_KILLS = int(os.environ.get("SERVE_KILLS", "200"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not PYTHON.is_file(), reason="tinker is not installed: make test-tinker"),
]
PROGRAM = """
import json, os, threading, tinker
from tinker import types

def datum(start, length):
    ids = [(start * 7 + i * i) % 300 for i in range(length + 1)]
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})

def run(name, found):
    service = tinker.ServiceClient(api_key=f"tml-{os.environ['RUN']}-{name}")
    client = service.create_lora_training_client(base_model="tiny-qwen3", rank=4 + name).result()
    prompt = types.ModelInput.from_ints(list(range(5, 15)))
    for step in range(24):
        passes = [client.forward_backward([datum(3 * step + i, 9 + 5 * i)] * 3, "cross_entropy") for i in range(3)]
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        scored = client.forward([datum(step, 12)], "cross_entropy")
        if step % 3 == 1:
            found.append(client.save_state(f"s{step}").result().path.split("/")[-1])
        sampler = client.save_weights_and_get_sampling_client().result()
        samples = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=6, seed=seed)) for seed in (None, 7)]
        found += [done.result().metrics for done in passes] + [stepped.result().metrics]
        found.append([float(x) for x in scored.result().loss_fn_outputs[0]["logprobs"].data])
        found += [[[list(s.tokens), list(s.logprobs)] for s in done.result().sequences] for done in samples]
        found.append([float(x) for x in sampler.compute_logprobs(prompt).result()[1:]])
    client.forward_backward([datum(1, 9)], "cross_entropy").result()
    state = client.save_state("last").result().path
    loaded = service.create_training_client_from_state_with_optimizer(state).result()
    scored = loaded.forward([datum(0, 12)], "cross_entropy").result()
    found.append([float(x) for x in scored.loss_fn_outputs[0]["logprobs"].data])
    rest = service.create_rest_client()
    found.append(sorted(c.checkpoint_id for c in rest.list_user_checkpoints().result().checkpoints))
    paths[name] = state

reports, paths = {1: [], 2: []}, {}
threads = [threading.Thread(target=run, args=item) for item in reports.items()]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("REPORT" + json.dumps([reports, paths]), flush=True)
os._exit(0)
"""


def run_program(server: Server, name: str) -> Any:
    """What the program received, and the weights, moments and number of steps that it saved last."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE"))}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(server.folder / "hf"), "NO_PROXY": "127.0.0.1"}
    tinker = {"TINKER_BASE_URL": f"http://127.0.0.1:{server.port}", "TINKER_API_KEY": "tml-unused", "RUN": name}
    command = [str(PYTHON), "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**clean, **offline, **tinker}, timeout=3600, check=False
    )
    assert "REPORT" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:] + server.read_log()[-4000:]
    reports, paths = json.loads(done.stdout.partition("REPORT")[2].splitlines()[0])
    assert all(len(report) == 24 * 8 + 8 + 2 for report in reports.values()), done.stderr[-4000:]
    saved = {}
    for model, path in paths.items():
        model_id, kind, checkpoint = path.removeprefix("tinker://").split("/")
        folder = server.folder / "serve" / "training_runs" / model_id.replace(":", "_") / kind / checkpoint
        tensors = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
        steps = json.loads((folder / "checkpoint.json").read_text())["num_steps"]
        saved[model] = (steps, {tensor: array.tobytes() for tensor, array in tensors.items()})
    return reports, saved


def test_the_stock_client_does_not_notice_200_kills(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        expected = run_program(server, "calm")
        assert [saved[0] for saved in expected[1].values()] == [24, 24]
        num_kills = num_programs = 0
        while num_kills < NUM_KILLS:
            name = f"killed-{num_programs}"
            keys = [f"tml-{name}-{number}" for number in (1, 2)]
            with Killer(server, keys, num_programs, NUM_KILLS - num_kills) as killer:
                found = run_program(server, name)
            num_kills, num_programs = num_kills + killer.num_kills, num_programs + 1
            print(f"{num_kills} kills, {num_programs} programs", flush=True)
            for number, received in expected[0].items():
                assert [i for i, result in enumerate(received) if found[0][number][i] != result] == []
            assert found[1] == expected[1]
        assert "another result when it is replayed" not in server.read_log()
