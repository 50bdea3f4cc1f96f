"""Checkpoints of the training API: replaced while others read them, and damaged ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from loguru import logger

from prime_rl.training_api.checkpoints import INFO_FILE, AdapterCheckpoint, AdapterStore, NotFound, _write_info
from rollouts.training import steps
from rollouts.training.steps import publish_dir


def publish(store: AdapterStore, name: str) -> AdapterCheckpoint:
    info = AdapterCheckpoint("s:train:0", "weights", name, "owner", "base", {}, 0, created=1.0, expires=2.0)
    final = store.directory(info.model_id, info.kind, info.name)
    final.parent.mkdir(parents=True, exist_ok=True)
    publish_dir(final, lambda directory: _write_info(directory, info))
    return info


@pytest.mark.skipif(not steps.can_exchange(), reason="needs renameat2 of Linux")
def test_a_replaced_checkpoint_is_always_there(tmp_path: Path) -> None:
    store, is_done = AdapterStore(tmp_path), threading.Event()
    info = publish(store, "a")

    def replace() -> None:
        for _ in range(100):
            publish(store, "a")
        is_done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    num_reads = 0
    while not is_done.is_set():
        assert store.find(info.path, "owner") == info
        assert store.find_all("owner") in ([info], [])  # a listing is of one instant per directory
        num_reads += 1
    thread.join()
    assert num_reads > 10
    assert [path.name for path in (tmp_path / "s_train_0" / "weights").iterdir()] == ["a"]


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"model_id": "x", "unknown": 1}'])
def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, content: bytes) -> None:
    store = AdapterStore(tmp_path)
    broken, whole = (publish(store, name) for name in ("broken", "whole"))
    (store.directory(broken.model_id, "weights", "broken") / INFO_FILE).write_bytes(content)
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING")
    assert store.find_all("owner") == store.find_expired() == [whole]
    logger.remove(sink)
    assert len(lines) == 1 and "broken" in lines[0], "it is looked for every few seconds"
    store.delete_ephemeral([])
    with pytest.raises(NotFound):
        store.find(broken.path, "owner")
