"""Weights over process groups: every tensor arrives or is rejected, and no process waits for a dead peer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from running_server import RunningServer

from prime_rl.orchestrator.policy_version import PolicyVersion
from prime_rl.orchestrator.server_pool import ServerPool
from prime_rl.orchestrator.servers import BroadcastEngine
from prime_rl.orchestrator.weight_relay import WeightRelay
from prime_rl.runtime.framing import receive_frame, send_frame
from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.rl.train import train
from prime_rl.transport import broadcast
from prime_rl.transport import point_to_point as pair
from prime_rl.transport.broadcast import (
    Broadcast,
    BroadcastFailed,
    WeightSender,
    acknowledge,
    announce,
    is_taken,
    read_broadcast,
    receive_weights,
)
from prime_rl.transport.canary import build_canary
from rollouts.training.manifests import Manifest, read_manifest
from rollouts.training.steps import complete_steps, publish_dir, step_path
from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines

CPU = torch.device("cpu")
CANARY = build_canary(1, [[1, 2]], [[-0.5]], "float32", False)
TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "narrow": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "single": torch.tensor(7, dtype=torch.int64),
    "nothing": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture
def trainer() -> Iterator[WeightSender]:
    opened = WeightSender("gloo", "localhost", 0, 2.0, CPU, max_versions=3)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    running = [RunningServer(None, weight_broadcast={"type": "gloo"}, name=f"server_{i}") for i in range(2)]
    yield running
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """What a trainer publishes, after a step."""
    model = {"name": "tiny-qwen3", "debug": {"random_init": True, "seed": 5}}
    return build_backend(TrainConfig.model_validate({"model": model})).export_state_dict()


def spoil(trainer: WeightSender, step: int, number: int = 0) -> None:
    """One byte of a tensor is sent otherwise than it was offered."""
    trainer._versions[step][1][number].view(torch.uint8).flatten()[:1] ^= 1


# A trainer and receivers


def test_every_tensor_arrives_at_several_receivers_at_once(
    trainer: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "PIECE_BYTES", 7)
    manifest = trainer.offer(3, TENSORS, {"r": 8})
    arrived: list[Any] = []

    def receive(i: int) -> None:
        arrived.append(receive_weights(trainer.address, 3, f"receiver {i}", CPU))

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(arrived) == 3
    for received in arrived:
        assert received.manifest == manifest and received.adapter_config == {"r": 8}
        assert list(received.tensors) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert received.tensors[name].dtype == tensor.dtype and torch.equal(received.tensors[name], tensor)


def test_offered_versions_are_copies(trainer: WeightSender) -> None:
    parameter = torch.ones(4)
    trainer.offer(1, {"w": parameter}, None)
    parameter.zero_()
    assert receive_weights(trainer.address, 1, "late", CPU).tensors["w"].tolist() == [1.0] * 4


def test_a_tensor_corrupted_in_transit_is_named(trainer: WeightSender) -> None:
    trainer.offer(2, TENSORS, None)
    spoil(trainer, 2, 1)
    with pytest.raises(ValueError, match=r"weights of step 2 do not match their manifest: narrow$"):
        receive_weights(trainer.address, 2, "server", CPU)


def test_missing_versions_and_other_backends_are_rejected(trainer: WeightSender) -> None:
    for step in (2, 3, 4, 5, 6):
        trainer.offer(step, {"w": torch.ones(1)}, None)
    assert sorted(trainer._versions) == [4, 5, 6], "at most max_versions"
    trainer.forget_before(5)
    with pytest.raises(ValueError, match=r"version 4 is not available from the trainer; it has 5, 6"):
        receive_weights(trainer.address, 4, "server", CPU)
    place = trainer.address
    other = Broadcast(place.schema, "nccl", place.host, place.port, place.timeout)
    with pytest.raises(ValueError, match=r"sends over gloo, not nccl: set the same weight_broadcast\.type"):
        receive_weights(other, 5, "server", CPU)
    with pytest.raises(ValueError, match=r'"nccl" but the trainer computes on cpu: use "gloo"'):
        WeightSender("nccl", "localhost", 0, 1.0, CPU)
    with pytest.raises(ValueError, match=r"cannot listen at 192\.0\.2\.1:0 .* set weight_broadcast\.host"):
        WeightSender("gloo", "192.0.2.1", 0, 1.0, CPU).open()


def knock(place: Broadcast) -> socket.socket:
    return socket.create_connection((place.host, place.port), timeout=5)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_the_listener_outlives_a_failed_accept(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = socket.socket.accept, [error]

    def accept(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    sender = WeightSender("gloo", "localhost", 0, 2.0, CPU)
    sender.open()
    try:
        with pytest.raises(ValueError, match="version 1 is not available"):
            receive_weights(sender.address, 1, "server", CPU)
        assert not failures
    finally:
        sender.close()


def test_failed_receivers_do_not_block_others(trainer: WeightSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers that disconnect, send garbage, stay silent or fail mid-transfer do not affect a healthy one."""
    trainer.offer(1, {"small": torch.ones(2), "big": torch.arange(1 << 20)}, None)
    knock(trainer.address).close()
    with knock(trainer.address) as link:
        send_frame(link, b"\xff")
        assert link.recv(1) == b""
    with knock(trainer.address) as link:
        send_frame(link, msgspec.msgpack.encode(broadcast._WeightRequest(9, 1, "gloo", "newer")))
        assert link.recv(1) == b""
    good = msgspec.msgpack.encode(broadcast._WeightRequest(1, 1, "gloo", "leaves"))
    with knock(trainer.address) as link:
        send_frame(link, good)
    with knock(trainer.address) as silent:
        send_frame(silent, good)
        with monkeypatch.context() as patched:
            original = pair.ProcessGroupPair.broadcast

            def broadcast_tensor(self: Any, tensor: torch.Tensor) -> None:
                if self._rank == 1 and tensor.numel() > 2:
                    raise RuntimeError("killed")
                original(self, tensor)

            patched.setattr(pair.ProcessGroupPair, "broadcast", broadcast_tensor)
            with pytest.raises(BroadcastFailed, match="killed"):
                receive_weights(trainer.address, 1, "dies", CPU)
        received = receive_weights(trainer.address, 1, "lives", CPU)
    assert torch.equal(received.tensors["big"], torch.arange(1 << 20))


@pytest.mark.parametrize("ends", ["before", "silent", "after the manifest", "other step"])
def test_a_missing_or_silent_trainer_raises_in_time(ends: str, trainer: WeightSender) -> None:
    trainer.offer(2, TENSORS, None)
    with socket.create_server(("127.0.0.1", 0)) as door:
        place = Broadcast(1, "gloo", "127.0.0.1", door.getsockname()[1], 0.3 if ends == "silent" else 5.0)

        def answer() -> None:
            link, _ = door.accept()
            with link:
                receive_frame(link)
                if ends == "silent":
                    done.wait(5)
                elif ends != "before":
                    send_frame(link, trainer._versions[2][0])

        done, thread = threading.Event(), threading.Thread(target=answer)
        thread.start()
        kind = ValueError if ends == "other step" else BroadcastFailed
        with pytest.raises(
            kind, match=r"the trainer at 127\.0\.0\.1:\d+ did not send|requested version 1, the trainer"
        ):
            receive_weights(place, 1 if ends == "other step" else 2, "server", CPU)
        done.set()
        thread.join(5)
    with pytest.raises(BroadcastFailed, match="Connection refused"):
        receive_weights(place, 1, "server", CPU)


def test_announcements_are_read_back_and_acknowledged(trainer: WeightSender, tmp_path: Path) -> None:
    manifest = trainer.offer(3, TENSORS, None)
    path = announce(tmp_path, manifest, trainer.address, CANARY)
    assert read_broadcast(path) == trainer.address and read_manifest(path) == manifest
    assert complete_steps(tmp_path) == [3] and not is_taken(path)
    acknowledge(path)
    assert is_taken(path)
    acknowledge(publish_dir(tmp_path / "files", lambda directory: None))
    assert not is_taken(tmp_path / "files")
    (path / "broadcast.json").write_text('{"schema": 2, "type": "gloo", "host": "h", "port": 1, "timeout": 1}')
    with pytest.raises(ValueError, match=r"broadcast\.json has schema 2, this version reads 1"):
        read_broadcast(path)


# Servers


def prepare(trainer: WeightSender, root: Path, step: int, weights: dict[str, torch.Tensor]) -> tuple[Path, Manifest]:
    manifest = trainer.offer(step, weights, None)
    return announce(root, manifest, trainer.address, CANARY), manifest


def build(servers: list[RunningServer]) -> list[BroadcastEngine]:
    number = len(servers)
    return [BroadcastEngine(s.root, 20.0, server_rank=i, num_servers=number) for i, s in enumerate(servers)]


def test_several_servers_receive_and_verify_a_version(
    servers: list[RunningServer], weights: dict[str, torch.Tensor], trainer: WeightSender, tmp_path: Path
) -> None:
    path, manifest = prepare(trainer, tmp_path / "broadcasts", 4, weights)
    answers = anyio.run(sync_weights_to_engines, build(servers), str(path))
    digests = {name: entry.digest for name, entry in manifest.tensors.items()}
    for server, reported in zip(servers, answers, strict=True):
        assert reported["version"] == 4 and {name: reported["digests"][name] for name in digests} == digests
        assert server.http.get("/health").json()["version"] == 4


def test_a_corrupted_version_is_rejected_and_the_old_one_stays(
    servers: list[RunningServer], weights: dict[str, torch.Tensor], trainer: WeightSender, tmp_path: Path
) -> None:
    engines = build(servers)
    anyio.run(sync_weights_to_engines, engines, str(prepare(trainer, tmp_path / "broadcasts", 5, weights)[0]))
    path, _ = prepare(trainer, tmp_path / "broadcasts", 6, weights)
    spoil(trainer, 6)
    with pytest.raises(WeightSyncError, match=f"answered 400: .*do not match their manifest: {next(iter(weights))}"):
        anyio.run(sync_weights_to_engines, engines, str(path))
    assert all(server.http.get("/health").json()["version"] == 5 for server in servers)


def test_a_dead_server_does_not_affect_others_and_may_return(
    servers: list[RunningServer], weights: dict[str, torch.Tensor], trainer: WeightSender, tmp_path: Path
) -> None:
    path, _ = prepare(trainer, tmp_path / "broadcasts", 7, weights)
    engines = [build(servers)[0], BroadcastEngine("http://127.0.0.1:9", 20.0)]
    with pytest.raises(WeightSyncError) as error:
        anyio.run(sync_weights_to_engines, engines, str(path))
    assert [state.split(":")[0] for _, state in error.value.states] == ["ok", "unreachable"]
    assert servers[0].http.get("/health").json()["version"] == 7
    [late] = anyio.run(sync_weights_to_engines, build(servers)[1:], str(path))
    assert late["version"] == 7


def test_servers_fall_back_to_files_without_the_trainer(
    servers: list[RunningServer], weights: dict[str, torch.Tensor], trainer: WeightSender, tmp_path: Path
) -> None:
    path, _ = prepare(trainer, tmp_path / "broadcasts", 8, weights)
    trainer.close()
    [engine] = build(servers)[:1]
    with pytest.raises(WeightSyncError, match=r"answered 503: .*the trainer at localhost:\d+ does not answer"):
        anyio.run(sync_weights_to_engines, [engine], str(path))
    publish_dir(step_path(tmp_path / "weights", 8), lambda directory: None)
    with pytest.raises(WeightSyncError, match=r"does not answer.*answered 403: .*step_8 is not below") as failure:
        anyio.run(sync_weights_to_engines, [engine], str(path))
    assert failure.value.is_transient, "the trainer may return"


def test_a_server_without_trainer_or_type_rejects_with_a_reason(servers: list[RunningServer], tmp_path: Path) -> None:
    def refused(body: Any, words: str, path: str = "/init_broadcaster", status: int = 400) -> None:
        reply = fresh.post(path, body)
        assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text

    fresh = servers[1]
    fresh.service.broadcast = None
    refused({"weight_dir": None, "step": 1}, "POST /init_broadcaster first", "/update_weights", 409)
    refused({"weight_dir": None}, '"step": N', "/update_weights")
    refused({"weight_dir": None, "step": True}, "step must be an integer", "/update_weights")
    good = {"host": "localhost", "port": 1, "server_rank": 0, "num_inference_server": 2, "timeout": 1}
    refused({**good, "host": ""}, "host must be the address of the trainer")
    refused({**good, "port": 70000}, "port must be an integer from 1 to 65535")
    refused({**good, "timeout": -1}, "timeout must be a number of seconds above 0")
    refused({**good, "server_rank": 2}, "server_rank 2 is not below num_inference_server 2")
    refused({**good, "type": "nccl"}, "the trainer sends over 'nccl', this server receives over 'gloo'", status=409)
    refused(good, "the trainer at localhost:1 does not answer", status=503)


def test_adapters_are_broadcast_too(servers: list[RunningServer], trainer: WeightSender, tmp_path: Path) -> None:
    model = {"name": "tiny-qwen3", "debug": {"random_init": True}, "lora": {"rank": 8}}
    backend = build_backend(TrainConfig.model_validate({"model": model}))
    for name, parameter in backend.parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    manifest = trainer.offer(9, backend.export_state_dict(), backend.adapter_config)
    path = announce(tmp_path, manifest, trainer.address, backend.compute_canary(9))
    [engine] = build(servers)[:1]

    async def load() -> list[float]:
        await engine.reload_weights()  # an adapter does not change the initial weights
        [reported] = await sync_weights_to_engines([engine], str(path))
        assert reported["version"] == 9 and reported["digests"] == {n: e.digest for n, e in manifest.tensors.items()}
        return await engine.score_prompt(backend.compute_canary(9).prompts[2].token_ids)

    reported = anyio.run(load)
    assert max(abs(a - b) for a, b in zip(reported, backend.compute_canary(9).logprobs[2], strict=True)) < 1e-4
    anyio.run(PrimeEngine(servers[0].root).reload_weights)


# The trainer's loop


def config_of(out: Path, **more: Any) -> TrainConfig:
    model = {"name": "tiny-qwen3", "seq_len": 48, "debug": {"random_init": True}}
    data = {"fake": {"batch_size": 8}}
    given = {"model": model, "data": data, "max_steps": 4, "output_dir": out, "log": {"file": False}}
    return TrainConfig.model_validate({**given, "optim": {"lr": 1e-3}, "max_async_level": 1, **more})


def test_a_run_announces_all_versions_and_saves_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights as a run over files, which writes all of them; a resumed run offers them again."""
    over_groups: dict[str, Any] = {"weight_broadcast": {"type": "gloo"}, "ckpt": {"interval": 2}}
    gloo, files = tmp_path / "gloo", tmp_path / "files"
    assert train(config_of(gloo, **over_groups)) == 0
    assert train(config_of(files)) == 0
    assert complete_steps(gloo / "broadcasts") == [2, 3, 4] and complete_steps(gloo / "weights") == [2, 4]
    assert complete_steps(files / "weights") == [2, 3, 4] and not (files / "broadcasts").exists()
    for step in (2, 3, 4):
        assert read_manifest(step_path(gloo / "broadcasts", step)) == read_manifest(step_path(files / "weights", step))
    with pytest.raises(ValueError, match=r"holds an earlier run \(.*broadcasts up to step_4"):
        train(config_of(gloo))
    first = read_broadcast(step_path(gloo / "broadcasts", 4))
    over_groups["ckpt"]["resume_step"] = 2
    announced, begin = [], RunDir.begin_attempt

    def record(run: RunDir, *given: Any) -> int:
        announced.append(complete_steps(run.broadcasts))
        return begin(run, *given)

    monkeypatch.setattr(RunDir, "begin_attempt", record)
    train(config_of(gloo, **over_groups))
    assert complete_steps(gloo / "broadcasts") == [2, 3, 4]
    assert announced == [[]], "an orchestrator that waits for this attempt finds none of the last one"
    found = {read_broadcast(step_path(gloo / "broadcasts", step)) for step in (2, 3, 4)}
    assert len(found) == 1 and first not in found, "version 2 is offered again by the resumed trainer"


def test_a_run_offers_the_announced_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_async_level + 2` of them, in memory as on disk: an engine may still fetch each of these and no other."""
    close, fetched = WeightSender.close, []

    def fetch_then_close(broadcaster: WeightSender) -> None:
        assert broadcaster.address.port >= 1024  # any that is free, unless one is configured
        announced = complete_steps(tmp_path / "broadcasts")
        fetched.extend(receive_weights(broadcaster.address, step, "late", CPU).manifest.step for step in announced)
        with pytest.raises(ValueError, match=r"version 1 is not available from the trainer; it has 2, 3, 4$"):
            receive_weights(broadcaster.address, 1, "late", CPU)
        close(broadcaster)

    monkeypatch.setattr(WeightSender, "close", fetch_then_close)
    assert train(config_of(tmp_path, weight_broadcast={"type": "gloo"}, max_async_level=1)) == 0
    assert fetched == [2, 3, 4]


def test_mismatched_broadcast_types_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.weight_relay.LOG_INTERVAL_S", 0.05)

    async def run() -> None:
        relay = WeightRelay(
            ServerPool([], [], PolicyVersion(), tmp_path / "weights"),
            is_received=lambda step: True,
            timeout_s=60,
            log_timeline=lambda *interval: None,
            alternate_dir=tmp_path / "broadcasts",
        )
        relay.mark_sent(1)
        publish_dir(tmp_path / "broadcasts" / "step_1", lambda directory: None)
        with anyio.fail_after(20):
            await relay.run()

    with pytest.raises(ValueError, match=r"trainer, orchestrator and inference the same weight_broadcast\.type"):
        anyio.run(run)
