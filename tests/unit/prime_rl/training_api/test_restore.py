"""Restarts and failures of the training server, without processes: the state continues with the same bits."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from training_requests import PROTO, TOKENS, Server, build_pass

from prime_rl.runtime.run_dir import lock_output_dir
from prime_rl.training_api import passes
from prime_rl.training_api.config import ServeConfig, ServedModelConfig
from prime_rl.training_api.serve import build_app, build_service, main
from rollouts.training.tensor_files import save_tensors


def open_server(folder: Path, snapshot_interval: float, max_trained_adapters: int = 8) -> tuple[TestClient, Server]:
    model = ServedModelConfig(name="tiny-qwen3", debug={"random_init": True, "num_layers": 1})  # type: ignore[arg-type]
    limits = {"snapshot_interval": snapshot_interval, "max_trained_adapters": max_trained_adapters}
    config = ServeConfig(model=model, output_dir=folder, **limits)  # type: ignore[arg-type]
    service = build_service(config)
    client = TestClient(build_app(service), base_url="http://127.0.0.1:8010")
    client.__enter__()
    return client, Server(client, service)


def finish(server: Server, model_id: str, seq_id: int = 6) -> Any:
    """What a model computes from its parameters, moments and waiting gradient."""
    found = [server.step(model_id, seq_id)]
    for i in (1, 3):
        logprobs, loss = server.run_pass(model_id, seq_id + i)
        found += [logprobs.tobytes(), loss, server.step(model_id, seq_id + i + 1)]
    return found


def wait_for_eviction(server: Server, kept: list[str]) -> None:
    """Until the trainer holds these models: others are evicted after the result of a request has been sent."""
    deadline = time.monotonic() + 20
    while list(server.service.trainer.adapters) != kept and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(server.service.trainer.adapters) == kept


def train(server: Server, seed: int | None) -> str:
    """A step, and two passes whose gradient waits."""
    model_id = server.create_model(seed=seed)
    server.run_pass(model_id, 1)
    server.step(model_id, 2)
    server.run_pass(model_id, 3, list(range(30, 60)))
    server.run_pass(model_id, 4, list(range(7, 19)))
    server.run_pass(model_id, 5, forward_only=True)
    return model_id


@pytest.mark.parametrize("snapshot_interval", [0.0, 1e9])
def test_a_copy_of_the_files_continues_with_the_same_bits(tmp_path: Path, snapshot_interval: float) -> None:
    client, server = open_server(tmp_path / "a", snapshot_interval)
    model_id = train(server, None)
    sampler = server.open_sampler(base_model="tiny-qwen3")
    sampled = server.result(server.sample(sampler, 0, {"max_tokens": 4}))
    promise = server.post("optim_step", {"model_id": model_id, "seq_id": 99, "adam_params": {}})  # never runs
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a kill leaves
    expected = finish(server, model_id)
    client.__exit__(None, None, None)

    client, other = open_server(tmp_path / "b", snapshot_interval)
    assert promise["request_id"] in other.service.futures.by_id
    assert finish(other, model_id) == expected
    assert other.result(other.sample(sampler, 0, {"max_tokens": 4})) == sampled
    assert other.service.trainer.adapters[model_id].num_steps == 4
    client.__exit__(None, None, None)


def test_refused_requests_keep_their_numbers_after_a_restart(tmp_path: Path) -> None:
    client, server = open_server(tmp_path / "a", 1e9)
    model_id = server.create_model()
    refused = server.post("save_weights", {"model_id": model_id, "seq_id": 2, "path": "a b"})  # waits for 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    client.__exit__(None, None, None)

    client, other = open_server(tmp_path / "b", 1e9)
    assert other.run_pass(model_id, 1)[1] > 0
    assert "checkpoint name 'a b'" in other.result(refused)["error"]
    assert "metrics" in other.step(model_id, 3)
    client.__exit__(None, None, None)


def test_a_failed_pass_leaves_no_partial_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = open_server(tmp_path, 1e9)
    healthy, failed = train(server, 1), train(server, 1)
    expected = finish(server, healthy)
    trainer = server.service.trainer
    compute = passes._compute_logprobs
    calls: list[int] = []

    def fail_later(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("out of memory between micro-batches")
        return compute(*args, **options)

    monkeypatch.setattr(trainer, "micro_batch_tokens", 1)
    monkeypatch.setattr(passes, "_compute_logprobs", fail_later)
    body = build_pass(failed, 6, [(TOKENS[:-1], {"target_tokens": np.array(TOKENS[1:])})] * 2)
    found = server.result(server.call("POST", "forward_backward", content=body, headers=PROTO).json())
    assert found["category"] == "server" and "out of memory" in found["error"] and len(calls) == 2
    monkeypatch.undo()
    assert finish(server, failed, 7) == expected
    client.__exit__(None, None, None)


def test_evicted_models_continue_with_the_same_bits(tmp_path: Path) -> None:
    client, server = open_server(tmp_path, 1e9, max_trained_adapters=1)
    first = train(server, 1)
    second = train(server, 1)
    wait_for_eviction(server, [second])
    assert finish(server, first) == finish(server, second)
    wait_for_eviction(server, [second])
    third = train(server, 1)
    with_first = [server.step(third, 6), server.run_pass(first, 11, forward_only=True)[0].tobytes()]
    assert with_first[1] == server.run_pass(second, 11, forward_only=True)[0].tobytes()
    wait_for_eviction(server, [second])
    client.__exit__(None, None, None)


def test_a_pass_holds_up_no_other_model_and_keeps_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = open_server(tmp_path, 1e9)
    first, second = train(server, 1), train(server, 2)
    trainer = server.service.trainer
    started, go_on, advance = threading.Event(), threading.Event(), trainer.advance

    def wait(passes: Any) -> None:
        started.set()
        assert go_on.wait(20)
        advance(passes)

    monkeypatch.setattr(trainer, "advance", wait)
    body = build_pass(first, 6, [(TOKENS[:-1], {"target_tokens": np.array(TOKENS[1:])})])
    promise = server.call("POST", "forward_backward", content=body, headers=PROTO).json()
    assert started.wait(20)
    assert "grad_norm" in server.step(second, 6)["metrics"]
    with ThreadPoolExecutor(1) as pool:
        unloaded = pool.submit(server.post, "unload_model", {"model_id": first})
        assert "was unloaded" in server.result(promise)["error"]
        assert first in trainer.adapters and not unloaded.done()
        go_on.set()
        unloaded.result(20)
    assert list(trainer.adapters) == [second]
    client.__exit__(None, None, None)


def test_a_log_that_cannot_be_written_stops_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = open_server(tmp_path, 1e9)
    stopped: list[int] = []
    server.service.engine.on_failure = lambda: stopped.append(1)

    def fail(batch: Any) -> None:
        raise OSError("no space left on the disk")

    monkeypatch.setattr(server.service.log, "_write", fail)
    for _ in range(2):
        reply = server.call("POST", "create_session", json={})
        assert reply.status_code == 500 and "no space left on the disk" in reply.json()["detail"]
    assert stopped == [1] and server.service.error is not None
    client.__exit__(None, None, None)


def test_a_session_may_end_while_its_model_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = open_server(tmp_path, 1e9, max_trained_adapters=1)
    service, ended = server.service, server.session
    train(server, 1)
    server.session, server.num_models = server.post("create_session")["session_id"], 0

    def save_late(*args: Any) -> None:
        assert client.portal is not None
        client.portal.start_task_soon(service.end_session, ended)
        time.sleep(0.1)
        save_tensors(*args)

    monkeypatch.setattr("prime_rl.training_api.snapshots.save_tensors", save_late)
    second = train(server, 1)  # evicts the first
    assert ended not in service.sessions and service.error is None
    assert list(service.trainer.adapters) == [second]
    assert not list((tmp_path / "snapshots").glob("*/step_*"))
    client.__exit__(None, None, None)


def test_samples_that_a_stop_interrupts_are_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = open_server(tmp_path, 1e9)
    base, trained = server.open_sampler(base_model="tiny-qwen3"), server.train_sampler()
    engine, futures = server.service.engine.engine, server.service.futures
    step, cancel, stepping, stopped = engine.step, futures.cancel, threading.Event(), threading.Event()

    def step_late() -> Any:
        stepping.set()
        assert stopped.wait(20)
        return step()

    def cancel_first(*args: Any) -> Any:
        canceled = cancel(*args)
        stopped.set()
        return canceled

    monkeypatch.setattr(engine, "step", step_late)
    monkeypatch.setattr(futures, "cancel", cancel_first)
    running = server.sample(base, 0, {"max_tokens": 8, "stop": []})
    assert stepping.wait(20)
    waiting = server.sample(trained, 0, {"max_tokens": 4})  # for its adapter, until the step has ended
    client.__exit__(None, None, None)

    client, other = open_server(tmp_path, 1e9)
    assert isinstance(other.result(waiting), bytes) and isinstance(other.result(running), bytes)
    client.__exit__(None, None, None)


def test_a_second_server_is_refused_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["serve", "--model.name", "tiny-qwen3", "--output-dir", str(tmp_path)])
    with lock_output_dir(tmp_path, "serve"), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "in use by another run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [".lock-serve"]


def test_open_sessions_keep_the_weights_of_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = open_server(tmp_path, 1e9)
    client.__exit__(None, None, None)
    monkeypatch.setattr("prime_rl.training_api.adapters.digest_frozen", lambda model: "of another one")
    with pytest.raises(ValueError, match="open sessions with other settings"):
        open_server(tmp_path, 1e9)


def test_a_refused_server_keeps_unfinished_checkpoints(tmp_path: Path) -> None:
    client, _ = open_server(tmp_path, 1e9)
    unfinished = tmp_path / "training_runs" / "model" / "weights" / ".tmp-a"
    unfinished.mkdir(parents=True)
    with pytest.raises(ValueError, match="another server may use this output_dir"):
        open_server(tmp_path, 1e9)
    assert unfinished.exists()
    client.__exit__(None, None, None)
    client, _ = open_server(tmp_path, 1e9)
    assert not unfinished.exists()
    client.__exit__(None, None, None)
