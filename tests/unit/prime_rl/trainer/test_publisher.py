"""Publishing: which versions become files, and the end of a run that sends weights from memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer import publisher
from prime_rl.trainer.publisher import Publisher, Retention
from prime_rl.transport.broadcast import WeightSender
from rollouts.training.backends.ranks import Ranks
from rollouts.training.steps import publish_step


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
