"""Every route of the training API, without the stock client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from loguru import logger
from running_server import wait_until
from starlette.testclient import TestClient
from training_requests import PROTO, TOKENS, Server, build_pass

from prime_rl.inference.server import bind
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.run_state import read_run_state
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.training_api import routes
from prime_rl.training_api.config import LimitsConfig, ServeConfig, ServedModelConfig
from prime_rl.training_api.serve import (
    DRAIN_TIMEOUT_S,
    build_app,
    build_server,
    build_service,
    find_owner,
    find_tokenizer,
    serve,
)
from prime_rl.training_api.wire import CLASSES
from rollouts.training.json_files import read_json_file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServeConfig(
        model=ServedModelConfig(name="tiny-qwen3", served_names=["org/other"], debug={"random_init": True}),  # type: ignore[arg-type]
        output_dir=tmp_path_factory.mktemp("serve"),
        limits=LimitsConfig(max_request_mb=1, max_models=20, max_sessions=30),
        max_loaded_adapters=1,
    )
    service = build_service(config)
    with TestClient(build_app(service), base_url="http://127.0.0.1:8010") as client:
        yield Server(client, service)


@pytest.mark.parametrize(
    ("name", "host", "expected"),
    [
        ("owner/model", "127.0.0.1", "/cache/model"),
        ("owner/model", "0.0.0.0", "owner/model"),
        ("smollm2", "0.0.0.0", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("tiny-qwen3", "0.0.0.0", "/cache/model"),
    ],
)
def test_other_machines_load_the_tokenizer_by_hub_id(name: str, host: str, expected: str) -> None:
    config = ServeConfig.model_validate({"model": {"name": name}, "host": host})
    assert find_tokenizer(config, Path("/cache/model")) == expected


def test_service_routes(server: Server) -> None:
    assert server.call("GET", "healthz").json() == {"status": "ok"}
    models = server.call("GET", "get_server_capabilities").json()["supported_models"]
    assert [model["model_name"] for model in models] == ["tiny-qwen3", "org/other"]
    assert server.post("client/config")["custom_loss_server_side"] is False
    assert server.post("client/dynamic_config") == {"sample_cancel_enabled": True}
    assert server.post("telemetry", {"events": []}) == {"status": "accepted"}
    assert server.post("session_heartbeat", {"session_id": server.session}) == {"type": "session_heartbeat"}


def test_sessions_are_listed_and_finished(server: Server) -> None:
    made = server.post("create_session", {"tags": [], "user_metadata": {"a": "b"}})
    assert "train_unembed" in made["warning_message"]
    session = made["session_id"]
    assert session in server.call("GET", "sessions").json()["sessions"]
    assert server.call("GET", f"sessions/{session}").json()["user_metadata"] == {"a": "b"}
    model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-qwen3", "lora_config": {"rank": 4}}
    model_id = server.result(server.post("create_model", model))["model_id"]
    server.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert server.call("POST", "get_info", json={"model_id": model_id}).status_code == 404
    assert model_id not in server.service.trainer.adapters


def test_ends_may_be_repeated_and_heartbeats_stop(server: Server) -> None:
    session = server.post("create_session")["session_id"]
    model_id = server.create_model()
    server.result(server.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "one"}))
    for _ in range(2):
        assert server.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/one").status_code == 204
        assert server.post("unload_model", {"model_id": model_id})["model_id"] == model_id
        assert server.post(f"sessions/{session}/finish") == {}
    assert server.call("POST", "session_heartbeat", json={"session_id": session}).status_code == 410


def test_training_lowers_the_loss_and_info_names_the_rank(server: Server) -> None:
    model_id = server.create_model()
    losses = []
    for step in range(4):
        losses.append(server.run_pass(model_id, 1 + 2 * step)[1])
        assert server.step(model_id, 2 + 2 * step)["metrics"]["grad_norm"] > 0
    assert losses[-1] < losses[0]
    info = server.post("get_info", {"model_id": model_id})
    assert (info["lora_rank"], info["model_name"], info["is_lora"]) == (4, "tiny-qwen3", True)
    assert info["model_data"]["tokenizer_id"] == str(resolve_model_dir("tiny-qwen3"))
    runs = server.call("GET", "training_runs", params={"limit": 100}).json()["training_runs"]
    assert model_id in [run["training_run_id"] for run in runs]
    assert server.call("GET", f"training_runs/{model_id}").json()["lora_rank"] == 4


def test_repeated_requests_are_applied_once(server: Server) -> None:
    model_id = server.create_model()
    server.run_pass(model_id, 1)
    body = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    promises = [server.post("optim_step", body) for _ in range(3)]
    assert len({promise["request_id"] for promise in promises}) == 1
    assert server.result(promises[0]) == server.result(promises[2])
    assert server.service.trainer.adapters[model_id].num_steps == 1


def test_requests_run_in_the_order_of_their_numbers(server: Server) -> None:
    model_id = server.create_model()
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    promise = server.post("optim_step", step)  # before its gradient
    server.run_pass(model_id, 1)
    assert "metrics" in server.result(promise)


def test_sampled_and_trained_logprobs_are_equal_bit_for_bit(server: Server) -> None:
    model_id = server.create_model()
    server.run_pass(model_id, 1)
    server.step(model_id, 2)
    logprobs, _ = server.run_pass(model_id, 3, forward_only=True)
    save = {"model_id": model_id, "seq_id": 4, "sampling_session_seq_id": 0}
    sampler = server.result(server.post("save_weights_for_sampler", save))["sampling_session_id"]
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 3, "num_samples": 2}
    promise = server.sample(sampler, 0, {"max_tokens": 6, "seed": 5, "stop": []}, **fields)
    assert len(promise["sample_sequence_ids"]) == 2
    message = CLASSES["SampleResponse"].FromString(server.result(promise))
    scored = np.frombuffer(message.prompt_logprobs, dtype=np.float32)
    assert np.isnan(scored[0]) and scored[1:].tobytes() == logprobs.tobytes()
    assert (message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k) == (len(TOKENS), 2)
    for seq_id, sequence in enumerate(message.sequences):
        tokens = np.frombuffer(sequence.tokens, dtype=np.int32).tolist()
        assert len(tokens) == 6 and sequence.stop_reason == 1 and sequence.topk_sampled_logprobs.k == 3
        trained, _ = server.run_pass(model_id, 5 + seq_id, TOKENS + tokens, forward_only=True)
        assert trained[-6:].tobytes() == sequence.logprobs


def test_samples_repeat_with_their_seed_and_stop(server: Server) -> None:
    sampler = server.open_sampler(base_model="org/other")
    params = {"max_tokens": 8, "seed": 3, "stop": []}
    first, second = (server.result(server.sample(sampler, i, params)) for i in range(2))
    tokens = np.frombuffer(CLASSES["SampleResponse"].FromString(first).sequences[0].tokens, dtype=np.int32).tolist()
    assert CLASSES["SampleResponse"].FromString(second).sequences[0].tokens == np.array(tokens, np.int32).tobytes()
    stopped = server.result(server.sample(sampler, 2, {**params, "stop": [tokens[2]]}))
    sequence = CLASSES["SampleResponse"].FromString(stopped).sequences[0]
    assert sequence.stop_reason == 0
    assert np.frombuffer(sequence.tokens, np.int32).tolist() == tokens[: tokens.index(tokens[2]) + 1]
    last = server.result(server.sample(sampler, 3, params, prompt_logprobs=True, prompt_logprobs_last_n=4))
    scored = np.frombuffer(CLASSES["SampleResponse"].FromString(last).prompt_logprobs, dtype=np.float32)
    assert np.isnan(scored[:-4]).all() and not np.isnan(scored[-4:]).any()


def test_seeds_of_samples_do_not_depend_on_other_keys(server: Server) -> None:
    found = []
    for number, key in enumerate(("tml-x", "tml-y")):  # the client repeats a save under another number
        session = server.post("create_session", key=key)["session_id"]
        model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-qwen3", "lora_config": {"rank": 4}}
        model_id = server.result(server.post("create_model", model, key), key)["model_id"]
        save = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": number}
        sampler = server.result(server.post("save_weights_for_sampler", save, key), key)["sampling_session_id"]
        body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}}
        promises = [server.post("asample", {**body, "seq_id": i, "num_samples": 1}, key) for i in range(2)]
        found.append([server.result(promise, key) for promise in promises])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_polls_report_finished_samples_once(server: Server) -> None:
    sampler = server.open_sampler(base_model="tiny-qwen3")
    assert server.post("join_sampling_session", {"sampling_session_id": sampler})["client_counter"] == 1
    promises = [server.sample(sampler, i, {"max_tokens": 2}) for i in range(3)]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    seen: list[str] = []
    cursor = 0
    while len(seen) < 3:
        polled = server.post("retrieve_futures", {"target": target, "prev_cursor": cursor})
        seen += [completion["request_id"] for completion in polled["completions"]]
        cursor = polled["cursor"]
    assert sorted(seen) == sorted(promise["request_id"] for promise in promises)
    done = {"target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": seen}
    assert server.post("retrieve_futures", done)["completions"] == []
    assert server.call("POST", "retrieve_future", json={"request_id": seen[0]}).status_code == 410


def test_samples_have_numbers_up_to_those_of_any_client(server: Server) -> None:
    """A client numbers its requests from a random one, unless it joins the session."""
    sampler, clone = server.open_sampler(base_model="tiny-qwen3"), 10**9
    promise = server.sample(sampler, clone * 10**9 + 1, {"max_tokens": 2})
    assert isinstance(server.result(promise), bytes)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    [completion] = server.post("retrieve_futures", {"target": target, "prev_cursor": 0})["completions"]
    assert completion == {"state": "finished", "request_id": promise["request_id"]}
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}}
    assert server.call("POST", "asample", json={**body, "seq_id": 2**63}).status_code == 422


def test_canceled_samples_end(server: Server) -> None:
    sampler = server.open_sampler(base_model="tiny-qwen3")
    promise = server.sample(sampler, 0, {"max_tokens": 200, "stop": []}, num_samples=50)
    server.post("cancel_future", {"request_id": promise["request_id"]})
    assert server.result(promise) == {"error": "the request was canceled", "category": "user"}


def test_checkpoints_are_saved_loaded_and_managed(server: Server) -> None:
    model_id = server.create_model()
    server.run_pass(model_id, 1)
    server.step(model_id, 2)
    path = server.result(server.post("save_weights", {"model_id": model_id, "seq_id": 3, "path": "one"}))["path"]
    server.run_pass(model_id, 4)
    server.step(model_id, 5)
    expected = server.run_pass(model_id, 6, forward_only=True)[0]
    load = {"session_id": server.session, "model_seq_id": server.num_models, "path": path, "optimizer": True}
    server.num_models += 1
    other = server.result(server.post("load_weights", load))["model_id"]
    server.run_pass(other, 1)
    server.step(other, 2)
    assert server.run_pass(other, 3, forward_only=True)[0].tobytes() == expected.tobytes()
    server.result(server.post("load_weights", {"model_id": other, "seq_id": 4, "path": path, "optimizer": False}))

    save = {"model_id": model_id, "seq_id": 7, "path": "two", "ttl_seconds": 7200}
    sampled = server.result(server.post("save_weights_for_sampler", save))["path"]
    [saved] = server.service.config.output_dir.glob("training_runs/*/sampler_weights/two/adapter_config.json")
    assert read_json_file(saved)["base_model_name_or_path"] == str(resolve_model_dir("tiny-qwen3")), "as peft loads it"
    found = server.call("GET", f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
    assert [(c["tinker_path"], c["checkpoint_type"]) for c in found] == [(path, "training"), (sampled, "sampler")]
    assert found[0]["expires_at"] is None and found[1]["expires_at"] is not None
    assert server.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    sampler = server.open_sampler(model_path=sampled)
    assert server.call("GET", f"samplers/{sampler}").json()["model_path"] == sampled

    checkpoint = f"training_runs/{model_id}/checkpoints/sampler_weights/two"
    info = {"tinker_path": sampled}
    assert server.call("POST", "weights_info", "tml-b", json=info).status_code == 404
    assert server.call("POST", f"{checkpoint}/publish").status_code == 204
    assert server.call("POST", "weights_info", "tml-b", json=info).status_code == 200
    assert server.call("DELETE", checkpoint, "tml-b").status_code == 404
    assert server.call("DELETE", f"{checkpoint}/publish").status_code == 204
    assert server.call("PUT", f"{checkpoint}/ttl", json={"ttl_seconds": 60}).status_code == 422
    assert server.call("PUT", f"{checkpoint}/ttl", json={"ttl_seconds": None}).status_code == 204
    assert server.call("DELETE", checkpoint).status_code == 204
    assert server.call("GET", "checkpoints", params={"limit": 0}).json()["checkpoints"] == []
    assert sampled not in server.call("GET", "checkpoints").text


def test_checkpoints_of_another_base_model_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service, model_id = server.service, server.create_model()
    kinds, paths = ("save_weights", "save_weights_for_sampler"), []
    for i, kind in enumerate(kinds):
        save = {"model_id": model_id, "seq_id": 1 + i, "path": "one"}
        paths.append(server.result(server.post(kind, save))["path"])
    load = {"model_id": model_id, "path": paths[0], "optimizer": False}
    sample = {"session_id": server.session, "sampling_session_seq_id": 900, "model_path": paths[1]}
    with monkeypatch.context() as patch:  # another server with this output_dir
        patch.setattr(service.trainer, "base_digest", "of another one")
        patch.setattr(service.training.executor, "base_name", "org/other")
        loaded = server.result(server.post("load_weights", {**load, "seq_id": 3}))
        sampled = server.call("POST", "create_sampling_session", json={**sample, "base_model": "org/other"})
        base = resolve_model_dir("tiny-qwen3")
        for path, error in zip(paths, (loaded["error"], sampled.json()["detail"]), strict=True):
            refused = f"{path} was trained on other weights ({base}) than those of this server (org/other)"
            assert error == f"{refused}: start serve with that model"
        for path in paths:  # of an older version
            service.store.change(service.store.find(path, find_owner("tml-a")), base_digest=None)
        assert server.result(server.post("load_weights", {**load, "seq_id": 4}))["path"] == paths[0]
    assert server.open_sampler(model_path=paths[1])


def test_time_limits_spare_weights_in_use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = server.create_model()
    paths = []
    for i, name in enumerate(("used", "unused")):
        save = {"model_id": model_id, "seq_id": 1 + i, "path": name, "ttl_seconds": 3600}
        paths.append(server.result(server.post("save_weights_for_sampler", save))["path"])
    server.open_sampler(model_path=paths[0])
    later = time.time() + 4000
    monkeypatch.setattr("prime_rl.training_api.checkpoints.time.time", lambda: later)
    assert server.client.portal is not None
    server.client.portal.call(server.service.clean)
    left = [c["tinker_path"] for c in server.call("GET", f"training_runs/{model_id}/checkpoints").json()["checkpoints"]]
    assert left == paths[:1]


def test_time_limits_spare_checkpoints_that_wait_to_be_loaded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = server.create_model()
    save = {"model_id": model_id, "seq_id": 1, "path": "kept", "ttl_seconds": 3600}
    path = server.result(server.post("save_weights", save))["path"]
    load = server.post("load_weights", {"model_id": model_id, "seq_id": 3, "path": path, "optimizer": True})
    later = time.time() + 4000
    monkeypatch.setattr("prime_rl.training_api.checkpoints.time.time", lambda: later)
    assert server.client.portal is not None
    server.client.portal.call(server.service.clean)
    server.run_pass(model_id, 2, forward_only=True)
    assert server.result(load)["path"] == path
    server.client.portal.call(server.service.clean)
    assert server.call("POST", "weights_info", json={"tinker_path": path}).status_code == 404


def test_fetched_results_are_deleted_first(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = server.create_model()
    bodies = [{"model_id": model_id, "seq_id": i, "path": f"n{i}"} for i in (1, 2)]
    old, new = (server.post("save_weights", body) for body in bodies)
    server.result(new)
    assert server.client.portal is not None
    server.client.portal.call(server.service.clean)
    log = server.service.log
    [(kept,)] = server.client.portal.call(log.execute, "SELECT count(*) FROM results WHERE NOT fetched")
    server.client.portal.call(log.trim_results, kept * 2000)
    assert server.result(old)["path"].endswith("/n1")
    server.client.portal.call(log.trim_results, 0)
    assert server.call("POST", "retrieve_future", json={"request_id": new["request_id"]}).status_code == 410
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    monkeypatch.setitem(server.service.config.limits.__dict__, "max_results_mb", 1e-6)
    last = server.post("save_weights", {"model_id": model_id, "seq_id": 3, "path": "n3"})
    wait_until(lambda: last["request_id"] not in server.service.futures.by_id, "the result")
    server.client.portal.call(server.service.clean)
    logger.remove(sink)
    assert len(lines) == 1 and "deleted before their clients fetched them: raise limits.max_results_mb" in lines[0]


def test_unloaded_adapters_are_read_again(server: Server) -> None:
    model_id = server.create_model()
    samplers, results = [], []
    for i in range(3):
        server.run_pass(model_id, 1 + 3 * i)
        server.step(model_id, 2 + 3 * i)
        save = {"model_id": model_id, "seq_id": 3 + 3 * i, "path": f"w{i}"}
        path = server.result(server.post("save_weights_for_sampler", save))["path"]
        samplers.append(server.open_sampler(model_path=path))
    for seq_id in range(2):
        scores = {"prompt_logprobs": True}
        found = [server.result(server.sample(s, seq_id, {"max_tokens": 1, "seed": 1}, **scores)) for s in samplers]
        messages = [CLASSES["SampleResponse"].FromString(content) for content in found]
        results.append([(m.prompt_logprobs, m.sequences[0].tokens) for m in messages])
        assert server.service.sampler.num_loaded == 1
    assert results[0] == results[1] and len(set(results[0])) == 3


def test_errors_of_named_weights_say_what_to_do(server: Server) -> None:
    model_id = server.create_model()
    found = []
    for i, kind in enumerate(["save_weights", "save_weights_for_sampler"] * 2):
        found.append(server.result(server.post(kind, {"model_id": model_id, "seq_id": 1 + i, "path": "one"})))
    path = found[1]["path"]
    assert found[2]["error"].endswith("/one exists: choose another name, or overwrite=True")
    assert found[3]["error"] == f"{path} exists: choose another name"
    sampler = server.open_sampler(model_path=path)
    server.call("DELETE", f"training_runs/{model_id}/checkpoints/sampler_weights/one")
    refused = server.result(server.sample(sampler, 0, {"max_tokens": 1}))
    assert refused == {"error": f"{path} was deleted", "category": "user"}


def test_ids_of_another_key_do_not_exist(server: Server) -> None:
    model_id = server.create_model()
    promise = server.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "mine"})
    path = server.result(promise)["path"]
    sampler = server.open_sampler(base_model="tiny-qwen3")
    body = build_pass(model_id, 2, [([1], {"target_tokens": np.array([2])})])
    refused = [
        server.call("POST", "forward_backward", "tml-b", content=body, headers=PROTO),
        server.call("POST", "optim_step", "tml-b", json={"model_id": model_id, "seq_id": 2, "adam_params": {}}),
        server.call("POST", "get_info", "tml-b", json={"model_id": model_id}),
        server.call("POST", "load_weights", "tml-b", json={"path": path, "optimizer": False}),
        server.call("GET", f"samplers/{sampler}", "tml-b"),
    ]
    assert [reply.status_code for reply in refused] == [404] * len(refused)
    without_effect = [
        server.call("POST", "unload_model", "tml-b", json={"model_id": model_id}),
        server.call("POST", f"sessions/{server.session}/finish", "tml-b", json={}),
        server.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/mine", "tml-b"),
    ]
    assert [reply.status_code for reply in without_effect] == [200, 200, 204], "as for ids that do not exist"
    assert server.post("get_info", {"model_id": model_id})["lora_rank"] == 4
    assert server.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    heartbeat = {"session_id": server.session}
    assert server.call("POST", "session_heartbeat", "tml-b", json=heartbeat).status_code == 410
    request = {"request_id": promise["request_id"]}
    assert server.call("POST", "retrieve_future", "tml-b", json=request).status_code == 410
    assert server.call("GET", "checkpoints", "tml-b").json()["checkpoints"] == []
    server.post("unload_model", {"model_id": model_id})
    assert server.call("POST", "get_info", json={"model_id": model_id}).status_code == 404


def test_a_used_port_is_reported_by_its_key(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"Cannot bind port {port} on .*choose another --port"):
            serve(ServeConfig(port=port, output_dir=tmp_path))


def test_a_failed_server_is_recorded_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(engine=None, error=OSError("disk full"))
    monkeypatch.setattr("prime_rl.training_api.serve.build_service", lambda config: failed)
    monkeypatch.setattr("prime_rl.training_api.serve.build_server", lambda service: None)
    monkeypatch.setattr("prime_rl.inference.server.run_server", lambda server, listener, engine: listener.close())
    with pytest.raises(RuntimeError, match="The server failed: disk full"):
        serve(ServeConfig(port=find_free_port(), output_dir=tmp_path))
    state = read_run_state(tmp_path)
    assert state is not None and state.status == "failed"


def test_a_stopping_server_ends_polls_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}}
    service = build_service(ServeConfig.model_validate({"model": model, "output_dir": tmp_path}))
    web, listener = build_server(service), bind("127.0.0.1", 0)
    thread = threading.Thread(target=web.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/"
    with httpx.Client(base_url=url, headers={"x-api-key": "tml-a"}, timeout=30, trust_env=False) as http:

        def post(path: str, **body: Any) -> Any:
            return http.post(path, json=body).json()

        session = post("create_session")["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny-qwen3"}
        sampler = post("create_sampling_session", **opened)["sampling_session_id"]
        model_id = f"{session}:train:0"
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-qwen3", "lora_config": {"rank": 4}}
        post("create_model", **create)
        step = post("optim_step", model_id=model_id, seq_id=2, adam_params={})  # request 1 is missing
        target = {"sampling_session_id": sampler}
        with ThreadPoolExecutor(2) as pool:
            polls = [
                pool.submit(post, "retrieve_future", request_id=step["request_id"]),
                pool.submit(post, "retrieve_futures", target=target),
            ]
            wait_until(lambda: len(web.server_state.tasks) == 2, "both polls")
            web.should_exit = True
            started = time.monotonic()
            one, many = (poll.result(30) for poll in polls)
            seconds = time.monotonic() - started
    thread.join(30)
    assert seconds < DRAIN_TIMEOUT_S and not caplog.records and not thread.is_alive()
    assert one["type"] == "try_again" and many == {"completions": [], "cursor": 0}


def test_hostile_requests_get_clear_errors(server: Server) -> None:
    def status(method: str, path: str, **options: Any) -> tuple[int, str]:
        reply = server.call(method, path, **options)
        return reply.status_code, reply.json()["detail"]

    assert server.client.post("/api/v1/create_session", json={}).status_code == 401
    assert status("POST", "forward_backward", content=b"\xff" * 99, headers=PROTO)[0] == 422
    assert status("POST", "forward_backward", content=b"x" * 2**21, headers=PROTO) == (
        413,
        "the body exceeds 1048576 bytes (limits.max_request_mb)",
    )
    assert status("POST", "forward_backward", content=b"x", headers={**PROTO, "content-encoding": "zstd"})[0] == 422
    assert "valid JSON" in status("POST", "asample", content=b"{")[1]
    assert status("POST", "asample", content=b"[" * 100000)[0] == 422
    assert "not supported by this server" in status("POST", "copy_weights", json={})[1]
    assert "at most 65536 bytes" in status("POST", "create_session", json={"user_metadata": {"a": "x" * 2**17}})[1]
    huge = {"target": {"sampling_session_id": server.open_sampler(base_model="tiny-qwen3")}, "prev_cursor": 2**63}
    assert "prev_cursor" in status("POST", "retrieve_futures", json=huge)[1]
    assert status("POST", "retrieve_future", json={"request_id": ["x"]})[0] == 422
    origin = {"origin": "http://evil.example"}
    assert status("POST", "create_session", json={}, headers=origin)[0] == 403
    refused = status("POST", "create_session", json={}, headers={"host": "evil.example"})
    assert refused[0] == 403 and "unknown Host 'evil.example': use an IP address in TINKER_BASE_URL" in refused[1]
    for path in ("tinker://../../etc/weights/x", "tinker://m/weights/..", "/etc/passwd", "tinker://m/other/x"):
        assert status("POST", "weights_info", json={"tinker_path": path})[0] in (404, 422)
    model_id = server.create_model()
    for i, name in enumerate(("../x", "/", "a/b", ".hidden", "x" * 200)):
        refused = server.result(server.post("save_weights", {"model_id": model_id, "seq_id": 1 + i, "path": name}))
        assert refused["category"] == "user" and "checkpoint name" in refused["error"]
    assert not (Path(server.service.store.root).parent / "x").exists()
    model = {"session_id": server.session, "model_seq_id": 900, "base_model": "tiny-qwen3"}
    assert "rank" in status("POST", "create_model", json={**model, "lora_config": {"rank": 10**6}})[1]
    assert "available: tiny-qwen3" in status("POST", "create_model", json={**model, "base_model": "x"})[1]
    dimuon = {"optimizer_config": {"type": "dimuon"}, "lora_config": {"rank": 4}}
    assert "use adamw" in status("POST", "create_model", json={**model, **dimuon})[1]


def test_a_server_on_a_network_has_any_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "config", server.service.config.model_copy(update={"host": "0.0.0.0"}))
    client = TestClient(build_app(server.service), base_url="http://gpu.example:8010")
    key = {"x-api-key": "tml-a"}
    assert client.get("/api/v1/healthz", headers=key).status_code == 200
    for origin in ("http://gpu.example:8010", "http://evil.example"):  # pages of a rebound name, and of another one
        assert client.get("/api/v1/healthz", headers={**key, "origin": origin}).status_code == 403


def test_compressed_passes_give_the_same_bits(server: Server) -> None:
    zstandard = pytest.importorskip("zstandard")
    assert server.post("client/config")["proto_compress_fwdbwd"] is True
    compress, headers = zstandard.ZstdCompressor().compress, {**PROTO, "content-encoding": "zstd"}

    def send(body: bytes) -> Any:
        return server.call("POST", "forward_backward", content=body, headers=headers)

    model_id = server.create_model()
    expected = server.run_pass(model_id, 1)
    body = build_pass(model_id, 2, [(TOKENS[:-1], {"target_tokens": np.array(TOKENS[1:])})])
    found = CLASSES["ForwardBackwardOutput"].FromString(server.result(send(compress(body)).json()))
    assert found.loss_fn_outputs[0].fields["logprobs"].data == expected[0].tobytes()
    bomb, unsized = compress(bytes(2**21)), zstandard.ZstdCompressor(write_content_size=False).compress(body)
    assert len(bomb) < 1000 and send(bomb).status_code == 413
    for broken, reason in ((unsized, "size"), (compress(body)[:-4], "damaged"), (compress(body) + b"x", "damaged")):
        reply = send(broken)
        assert reply.status_code == 422 and reason in reply.json()["detail"]
    assert server.run_pass(model_id, 3)[1] == expected[1]


def test_compression_needs_its_package(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "supports_zstd", lambda: False)
    assert server.post("client/config")["proto_compress_fwdbwd"] is False
    reply = server.call("POST", "forward_backward", content=b"x", headers={**PROTO, "content-encoding": "zstd"})
    assert reply.status_code == 422 and "'zstd' is not supported" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "text chunks"),
        ({"prompt": {"chunks": [{"tokens": [10**7]}]}}, "token ids"),
        ({"num_samples": 10**6}, "num_samples"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"record_stability_info": True}, "choose another loss_fn than stable_reinforce"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
    ],
)
def test_bad_samples_are_refused(server: Server, fields: dict[str, Any], message: str) -> None:
    sampler = server.open_sampler(base_model="tiny-qwen3")
    body = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}, "sampling_session_id": sampler}
    reply = server.call("POST", "asample", json={**body, "seq_id": 0, **fields})
    assert reply.status_code == 422 and message in reply.json()["detail"]


def test_failed_passes_name_the_field(server: Server) -> None:
    model_id = server.create_model()
    found = server.run_pass(model_id, 1, loss_fn="ppo")
    assert found["category"] == "user" and "ppo needs loss_fn_inputs.logprobs" in found["error"]
    assert server.run_pass(model_id, 2)[1] > 0


def test_metrics_of_a_diverged_step_are_text(server: Server) -> None:
    model_id = server.create_model()
    inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.full(len(TOKENS) - 1, np.inf, dtype=np.float32)}
    body = build_pass(model_id, 1, [(TOKENS[:-1], inputs)])
    server.result(server.call("POST", "forward_backward", content=body, headers=PROTO).json())
    assert server.step(model_id, 2) == {"metrics": {"grad_norm": "nan"}}


def test_refused_training_requests_hold_up_no_later_ones(server: Server) -> None:
    model_id = server.create_model()
    image = CLASSES["ForwardBackwardRequest"](model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    image.data.add().model_input.add().image.SetInParent()
    bodies = {
        "save_weights": ({"path": "step 100"}, "checkpoint name 'step 100'"),
        "save_weights_for_sampler": ({"path": "final", "ttl_seconds": 60}, "ttl_seconds must be from 3600"),
        "load_weights": ({"path": "tinker://x/weights/none"}, "no checkpoint tinker://x/weights/none"),
        "optim_step": ({"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate is -1"),
    }
    posted = server.call("POST", "forward_backward", content=image.SerializeToString(), headers=PROTO)
    promises = [(posted.json(), "no image chunks")]
    for i, (path, (fields, message)) in enumerate(bodies.items()):
        promises.append((server.post(path, {"model_id": model_id, "seq_id": 2 + i, **fields}), message))
    for promise, message in promises:
        refused = server.result(promise)
        assert refused["category"] == "user" and message in refused["error"]
    assert server.run_pass(model_id, 6)[1] > 0


def test_a_model_refused_for_load_leaves_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service = server.service
    before = set(service.models)
    monkeypatch.setattr(service.futures, "num_bytes", 2**40)
    body = {"session_id": server.session, "model_seq_id": 77, "base_model": "tiny-qwen3", "lora_config": {"rank": 4}}
    assert server.call("POST", "create_model", json=body).status_code == 429
    assert set(service.models) == before


def test_abandoned_sessions_end_and_free_their_models(server: Server) -> None:
    service, limit = server.service, server.service.config.limits.max_sessions
    opened = []
    while len(service.sessions) < limit:
        opened.append(server.post("create_session")["session_id"])
    assert server.call("POST", "create_session", json={}).status_code == 429
    model = {"session_id": opened[0], "model_seq_id": 0, "base_model": "tiny-qwen3", "lora_config": {"rank": 4}}
    model_id = server.result(server.post("create_model", model))["model_id"]
    for session in opened:
        service.sessions[session].last_seen -= service.config.limits.session_timeout + 1
    assert server.client.portal is not None
    server.client.portal.call(service.clean)
    assert not set(opened) & service.sessions.keys() and model_id not in service.trainer.adapters
