"""Publishing: which versions become files, and the end of a run that sends weights from memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer import publisher
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.concurrent_micros import ConcurrentMicros
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.publisher import Publisher, Retention
from prime_rl.transport.broadcast import WeightSender
from prime_rl.transport.canary import read_canary
from prime_rl.transport.weights import read_model_files
from rollouts.training.backends.ranks import Ranks
from rollouts.training.steps import complete_steps, publish_step


class Sender:
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def build(out: Path, sender: Sender | None, rank: int = 0) -> Publisher:
    backend = SimpleNamespace(ranks=Ranks(rank, 2), stepper=SimpleNamespace(num_steps=3))
    files, weight_sender = cast(Any, None), cast(WeightSender, sender)
    return Publisher(RunDir(out), cast(Any, backend), files, weight_sender, shutdown_timeout_s=0.2)


def test_checkpointed_and_final_versions_are_files() -> None:
    retention = Retention(max_async_level=2, interval=4, max_steps=10, start=0)
    assert [step for step in range(1, 11) if retention.is_permanent(step)] == [4, 8, 10]
    assert not Retention(2, None, None, 0).is_permanent(4)


def test_closing_waits_for_receivers_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "WAIT_LOG_INTERVAL_S", 0.1)
    waits = []

    def wait(check: Any, *_: Any, **options: Any) -> None:
        waits.append(options["what"])
        raise TimeoutError

    monkeypatch.setattr(publisher, "wait_for_blocking", wait)
    publish_step(RunDir(tmp_path).broadcasts, 3, lambda directory: None)
    build(tmp_path, None).close()
    build(tmp_path, other := Sender(), rank=1).close()
    assert not waits and not other.num_closed, "only rank 0 of a run that sends"
    build(tmp_path, sender := Sender()).close()
    assert waits == ["the engines to receive step_3"] * 2 and sender.num_closed == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_in_rounds_shorter_than_their_timeout(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one long collective instead, the other ranks fail at `dist_timeout_seconds`."""
    monkeypatch.setattr(publisher, "ROUND_S", 0.01)
    pending, rounds = Future[None](), list[float]()

    class FakeRanks(Ranks):
        def sum(self, values: Sequence[float]) -> list[float]:
            if len(values) == self.size:  # which rank failed
                return list(values)
            rounds.append(values[0])
            if len(rounds) == 3:
                pending.set_result(None)
            return list(values) if self.rank == 0 else [float(len(rounds) == 4)]

    ours = build(tmp_path, None)
    ours.backend.ranks, ours._pending = FakeRanks(rank, 2), pending
    ours.wait()
    assert rounds == [0.0, 0.0, 0.0, float(rank == 0)] and ours._pending is None


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Backend, Publisher]:
    model = {"name": "tiny-qwen3", "seq_len": 32, "debug": {"random_init": True}}
    backend = build_backend(TrainConfig.model_validate({"model": model, "data": {"fake": {"batch_size": 8}}}))
    return backend, Publisher(RunDir(tmp_path), backend, read_model_files(backend.model_dir))


def test_updates_can_wait_for_files_written_meanwhile(
    trained: tuple[Backend, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, ours = trained
    may_write, publish_weights = threading.Event(), publisher.weights.publish_weights

    def write_later(*args: Any, **options: Any) -> Path:
        assert may_write.wait(10)
        return publish_weights(*args, **options)

    monkeypatch.setattr(publisher.weights, "publish_weights", write_later)
    expected = {name: tensor.clone() for name, tensor in backend.export_state_dict().items()}
    ours.publish(1, background=True)
    assert not complete_steps(ours.run.weights), "returns before the files are complete"
    may_write.set()
    ours.wait()
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.zero_()
    written = load_file(ours.run.weights / "step_1" / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    ours.publish(2)
    assert complete_steps(ours.run.weights) == [1, 2], "without `background`, complete on return"


def test_canaries_are_computed_meanwhile_where_threads_are_used(
    trained: tuple[Backend, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, ours = trained
    texts, threads, compute = [[1, 2, 3, 4]], [], Backend.compute_canary

    def record(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compute(*arguments)

    monkeypatch.setattr(Backend, "compute_canary", record)
    ours.publish(1, texts, background=True)
    ours.wait()
    backend.concurrent = ConcurrentMicros(2)
    ours.publish(2, texts, background=True)
    ours.wait()
    assert threads[0] == threading.current_thread().name and threads[1].startswith("publish")
    first, second = (read_canary(ours.run.weights / f"step_{step}") for step in (1, 2))
    assert first is not None and second is not None and first.logprobs == second.logprobs


def test_errors_of_background_writes_are_raised(
    trained: tuple[Backend, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(publisher.weights, "publish_weights", fail)
    trained[1].publish(1, background=True)
    with pytest.raises(OSError, match="no space left"):
        trained[1].wait()
    trained[1].wait()
