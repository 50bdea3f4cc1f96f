"""Batches from orchestrator to trainer, and waiting for files."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watchfiles._rust_notify import WatchfilesRustInternalError

from prime_rl.transport import batches
from prime_rl.transport.batches import (
    SCHEMA,
    FilesystemBatchReceiver,
    FilesystemBatchSender,
    decode_batch,
    encode_batch,
)
from prime_rl.transport.file_watch import wait_for, wait_for_blocking
from rollouts.training.types import Sample, Status

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(1, 6))
    stream = st.lists(finite, min_size=n, max_size=n)
    return Sample(
        prompt=draw(st.one_of(st.text(), st.just([{"role": "user", "content": "hé"}]))),
        response=draw(st.text()),
        tokens=draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n)),
        loss_mask=draw(stream),
        reward=draw(finite),
        group_index=draw(st.none() | st.integers(0, 2**40)),
        inference_logprobs=draw(st.none() | stream),
        status=draw(st.sampled_from(Status)),
        advantages=draw(st.none() | stream),
        versions=draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)),
        metadata=draw(st.dictionaries(st.text(), st.integers(0, 9) | st.text(), max_size=3)),
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.lists(samples(), max_size=4))
def test_round_trip(step: int, batch: list[Sample]) -> None:
    assert decode_batch(encode_batch(step, batch)) == (step, batch)


@pytest.mark.parametrize("schema", [2, SCHEMA + 1])  # 2: samples with another name of `reference_weight`
def test_another_schema_is_rejected_before_decoding_samples(schema: int) -> None:
    data = msgspec.msgpack.encode({"schema": schema, "step": 7, "samples": "of another shape"})
    with pytest.raises(ValueError, match=f"step 7 has schema {schema}"):
        decode_batch(data)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"step": 1})])
def test_invalid_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch"):
        decode_batch(data)


def test_unknown_fields_of_a_newer_writer_are_ignored() -> None:
    sample = Sample(prompt="p", tokens=[3], loss_mask=[1.0])
    row = {"added_later": 1, **msgspec.to_builtins(sample, builtin_types=(bytes,))}
    _, [decoded] = decode_batch(msgspec.msgpack.encode({"schema": SCHEMA, "step": 1, "samples": [row]}))
    assert decoded == sample


def test_receive_waits_for_a_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    root = tmp_path / "out" / "rollouts"
    batch = [Sample(prompt="p", tokens=[1, 2], loss_mask=[0.0, 1.0])]
    timer = threading.Timer(0.1, lambda: FilesystemBatchSender(root).send(3, batch))
    timer.start()
    assert FilesystemBatchReceiver(root).receive(3, timeout_s=20) == batch
    timer.join()
    assert FilesystemBatchSender(root).is_received(3)
    FilesystemBatchSender(root).send(3, batch)
    assert not FilesystemBatchSender(root).is_received(3), "a batch that was replaced is unread again"


def test_an_incomplete_step_is_not_received(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "batch.msgpack").write_bytes(encode_batch(1, []))
    with pytest.raises(TimeoutError, match="batch of step 1 from the orchestrator"):
        FilesystemBatchReceiver(tmp_path).receive(1, timeout_s=0.05)


def test_a_concurrently_removed_batch_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the marker and the read, a resumed run removes what its predecessor had sent."""
    FilesystemBatchSender(tmp_path).send(1, [])
    looks = 0

    def is_complete(path: Path) -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            shutil.rmtree(path)
        return looks == 1 or (path / "STABLE").exists()

    monkeypatch.setattr(batches, "is_complete", is_complete)
    with pytest.raises(TimeoutError, match="batch of step 1"):
        FilesystemBatchReceiver(tmp_path).receive(1, timeout_s=0.2)
    assert looks > 1


def test_step_in_the_wrong_directory_is_named(tmp_path: Path) -> None:
    FilesystemBatchSender(tmp_path).send(1, [])
    (tmp_path / "step_1").rename(tmp_path / "step_2")
    with pytest.raises(ValueError, match="contains the batch of step 1, not of step 2"):
        FilesystemBatchReceiver(tmp_path).receive(2, timeout_s=5)


@pytest.mark.parametrize("error", [OSError, WatchfilesRustInternalError])
def test_without_notifications_the_recheck_finds_the_file(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network mounts and containers send no notifications, and watches may be exhausted."""

    def deaf(*_: object) -> None:
        raise error("no watch is left")

    monkeypatch.setattr("watchfiles._rust_notify.RustNotify", deaf)
    looks = 0

    def look() -> str | None:
        nonlocal looks
        looks += 1
        if looks == 3:
            (tmp_path / "x").touch()
        return "seen" if (tmp_path / "x").exists() else None

    assert wait_for_blocking(look, tmp_path, timeout_s=30, what="x") == "seen" and looks == 3
    monkeypatch.undo()
    (tmp_path / "x").unlink()
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for x"):
        wait_for_blocking(lambda: None, tmp_path, timeout_s=0.1, what="x")


def test_a_notification_wakes_before_the_recheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the safety net 60 s away, only a notification can end the wait."""
    monkeypatch.setattr("prime_rl.transport.file_watch.RECHECK_S", 60.0)
    marker = tmp_path / "marker"
    timer = threading.Timer(0.2, marker.touch)
    timer.start()
    wait_for_blocking(lambda: marker.exists() or None, tmp_path, timeout_s=30, what="the marker")
    timer.join()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_wait_for_can_be_cancelled_and_names_its_path(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return wait_for_blocking(*args, **kwargs)
        finally:
            ended.set()

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("prime_rl.transport.file_watch.wait_for_blocking", watched)
            with anyio.move_on_after(0.05) as scope:
                await wait_for(lambda: None, tmp_path / "nowhere", timeout_s=None, what="nothing")
        assert scope.cancelled_caught and ended.wait(timeout=20), "the watching thread goes on"
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for version 4"):
            await wait_for(lambda: None, tmp_path / "nowhere", timeout_s=0.05, what="version 4")
        assert await wait_for(lambda: 5, tmp_path, timeout_s=None, what="five") == 5

    pytest.importorskip(backend)
    anyio.run(main, backend=backend)
