"""Kills of `serve` at random moments: a session gets the bits of an undisturbed run, and every step is applied once."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from training_requests import build_pass

from prime_rl.training_api.config import ServeConfig
from prime_rl.training_api.request_log import RequestLog
from prime_rl.training_api.serve import serve
from prime_rl.training_api.wire import CLASSES

pytestmark = pytest.mark.timeout(300)
PROTO = {"content-type": "application/x-protobuf"}


def run_server(folder: Path, port: int, limits: dict[str, Any]) -> None:
    """The `serve` command, in a new process that has its modules already."""
    with (folder / "serve.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}}
    config = {"model": model, "port": port, "output_dir": folder / "serve", "snapshot_interval": 0.3, "limits": limits}
    serve(ServeConfig.model_validate(config))


class Server:
    """A `serve` process with a tiny model, forked from one that has imported everything, so that restarts are fast."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.folder, self.limits = folder, limits
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api/v1/"
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "transformers", "uvicorn", "prime_rl.training_api.service"])
        self.process = context.Process(target=run_server, args=(self.folder, self.port, self.limits))
        self.process.start()

    def wait(self) -> None:
        """Wait until requests are answered."""
        for _ in range(600):
            try:
                httpx.get(self.url + "healthz", headers={"x-api-key": "tml-k"}, timeout=30, trust_env=False)
                return
            except httpx.TransportError:
                assert self.process.is_alive(), self.read_log()
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def __enter__(self) -> Server:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def find_sessions(self, key: str) -> list[str]:
        reply = httpx.get(self.url + "sessions", headers={"x-api-key": key}, timeout=30, trust_env=False)
        sessions: list[str] = reply.json()["sessions"]
        return sessions

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def read_log(self) -> str:
        return (self.folder / "serve.log").read_text()


class Client:
    """A client of one key, which repeats requests after connection failures, as the stock client does."""

    def __init__(self, server: Server, key: str, seed: int) -> None:
        self.http = httpx.Client(base_url=server.url, headers={"x-api-key": key}, timeout=45, trust_env=False)
        self.server, self.rng, self.found, self.seq_id = server, np.random.default_rng(seed), [], 0
        self.session = self.post("create_session", json={})["session_id"]
        lora = {"rank": 4, "seed": seed}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny-qwen3", "lora_config": lora}
        promise = self.post("create_model", json=body)
        self.model_id = promise["model_id"]
        self.result(promise)

    def post(self, path: str, **options: Any) -> Any:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline, self.server.read_log()
            try:
                reply = self.http.post(path, **options)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if reply.status_code == 429:  # as the stock client: too many models, until a session ends
                time.sleep(0.2)
                continue
            assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}\n{self.server.read_log()}"
            is_json = reply.headers["content-type"] == "application/json"
            return reply.json() if is_json else reply.content

    def result(self, promise: Any) -> Any:
        while True:
            found = self.post("retrieve_future", json={"request_id": promise["request_id"]})
            if not isinstance(found, dict) or found.get("type") != "try_again":
                assert isinstance(found, bytes) or "error" not in found, found
                return found

    def send(self, route: str, **fields: Any) -> Any:
        self.seq_id += 1
        return self.post(route, json={"model_id": self.model_id, "seq_id": self.seq_id, **fields})

    def send_pass(self, *, forward_only: bool = False) -> Any:
        self.seq_id += 1
        data = []
        for length in self.rng.integers(4, 40, 3):
            tokens = self.rng.integers(0, 300, length + 1)
            data.append((tokens[:-1].tolist(), {"target_tokens": tokens[1:]}))
        body = build_pass(self.model_id, self.seq_id, data, forward_only=forward_only)
        return self.post("forward_backward", content=body, headers=PROTO)

    def run_cycle(self, number: int) -> None:
        """Two passes and a step in flight at once, a score, weights for sampling, and samples from them."""
        promises = [self.send_pass(), self.send_pass()]
        promises.append(self.send("optim_step", adam_params={"learning_rate": 0.01, "grad_clip_norm": 1.0}))
        promises.append(self.send_pass(forward_only=True))
        saved = self.send("save_weights_for_sampler", sampling_session_seq_id=number)
        self.found += [self.result(promise) for promise in promises]
        sampler = self.result(saved)["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": sampler, "prompt": prompt, "num_samples": 2, "prompt_logprobs": True}
        params = [{"max_tokens": 6, "stop": []}, {"max_tokens": 4, "stop": [], "seed": 3, "temperature": 0.5}]
        samples = [self.post("asample", json={**body, "seq_id": i, "sampling_params": p}) for i, p in enumerate(params)]
        for promise in samples:
            message = CLASSES["SampleResponse"].FromString(self.result(promise))
            self.found.append([message.prompt_logprobs, *[(s.tokens, s.logprobs) for s in message.sequences]])

    def finish(self) -> dict[str, Any]:
        """Everything that was received, and the final weights and number of steps."""
        self.send_pass()  # a gradient that waits for a step is part of the state
        self.result(self.send("save_weights", path="last"))
        folder = self.server.folder / "serve" / "training_runs" / self.model_id.replace(":", "_") / "weights" / "last"
        tensors = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
        steps = {str(tensors[name]) for name in tensors if name.startswith("step.")}
        return {"found": self.found, "weights": {k: v.tobytes() for k, v in tensors.items()}, "steps": steps}


def run_clients(server: Server, cycles: int, name: str) -> list[dict[str, Any]]:
    """Two keys at the same time."""

    def run(seed: int) -> dict[str, Any]:
        client = Client(server, f"tml-{name}-{seed}", seed)
        for number in range(cycles):
            client.run_cycle(number)
        return client.finish()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (1, 2)))


class Killer:
    """Kills and restarts a server at random moments while it is used."""

    def __init__(self, server: Server, keys: Sequence[str], seed: int, max_kills: int) -> None:
        self.server, self.keys, self.rng, self.max_kills = server, keys, random.Random(seed), max_kills
        self.num_kills, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not all(self.server.find_sessions(key) for key in self.keys):
            time.sleep(0.02)
        while self.num_kills < self.max_kills and not self._stop.wait(self.rng.random()):
            self.server.kill()
            self.num_kills += 1
            self.server.start()
            self.server.wait()

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_kills_change_no_bit_of_two_sessions(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        expected = run_clients(server, 4, "calm")
        with Killer(server, ("tml-killed-1", "tml-killed-2"), seed=1, max_kills=4) as killer:
            found = run_clients(server, 4, "killed")
        assert killer.num_kills >= 1
        assert found == expected
        assert [f["steps"] for f in found] == [{"4.0"}] * 2
        assert "another result when it is replayed" not in server.read_log()


def read_rss_mb(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_memory_stays_flat_over_1000_abandoned_sessions(tmp_path: Path) -> None:
    """Each has a model, results that are never fetched, and a request that waits for one that never comes."""
    server = Server(tmp_path, session_timeout=2)
    server.wait()

    def abandon(seed: int) -> None:
        client = Client(server, f"tml-{seed % 7}", seed)
        client.send_pass()
        client.seq_id += 1  # missing: the following requests wait until their session ends
        client.send_pass()
        sampler = client.post("create_sampling_session", json={
            "session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny-qwen3"})  # fmt: skip
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": sampler["sampling_session_id"], "prompt": prompt, "seq_id": 0}
        client.post("asample", json={**body, "sampling_params": {"max_tokens": 2}})
        client.http.close()

    rss = [read_rss_mb(server)]
    with ThreadPoolExecutor(2) as pool:
        for start in range(0, 1000, 250):
            list(pool.map(abandon, range(start, start + 250)))
            rss.append(read_rss_mb(server))
    print("RSS in MB before and after 250, 500, 750, 1000 sessions:", rss)
    assert rss[4] - rss[1] < 40
    for _ in range(100):
        if not any(server.find_sessions(f"tml-{key}") for key in range(7)):
            break
        time.sleep(0.2)
    folder = tmp_path / "serve"
    assert not list((folder / "snapshots").glob("*"))
    server.kill()
    tables = RequestLog(folder / "requests.sqlite", {})
    assert [tables.fetch(f"SELECT count(*) FROM {name}") for name in ("records", "requests", "results")] == [[(0,)]] * 3
