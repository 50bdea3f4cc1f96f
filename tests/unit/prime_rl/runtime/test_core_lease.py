"""Cores that the processes of a run leave to each other."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from prime_rl.runtime import core_lease
from prime_rl.runtime.core_lease import DIRECTORY_VARIABLE, CoreLease, open_core_lease


@pytest.fixture(autouse=True)
def nine_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lease, "num_cores", lambda: 9)


def test_processes_that_compute_share_the_cores(tmp_path: Path) -> None:
    lease = CoreLease(tmp_path)
    first, second = ((tmp_path / name).open("w") for name in ("first", "second"))
    with lease.hold():
        assert lease.count_threads() == 9
        fcntl.flock(first, fcntl.LOCK_EX)
        assert lease.count_threads() == 4
        fcntl.flock(second, fcntl.LOCK_EX)
        assert lease.count_threads() == 3
        fcntl.flock(second, fcntl.LOCK_UN)
        assert lease.count_threads() == 4
        first.close()  # as the system does when a process ends
        assert lease.count_threads() == 9
    second.close()


def test_a_lease_is_held_except_while_waiting(tmp_path: Path) -> None:
    lease, other = CoreLease(tmp_path), CoreLease(None)
    other.directory = tmp_path
    assert other.count_threads() == 9
    with lease.leave():
        assert other.count_threads() == 9
    assert other.count_threads() == 4
    with pytest.raises(TimeoutError), lease.leave():
        assert other.count_threads() == 9
        raise TimeoutError
    assert other.count_threads() == 4
    with lease.hold():
        assert other.count_threads() == 4
    assert other.count_threads() == 9


def test_there_is_at_least_one_thread(tmp_path: Path) -> None:
    held = [(tmp_path / str(i)).open("w") for i in range(12)]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert CoreLease(tmp_path).count_threads() == 1
    for file in held:
        file.close()


def test_without_a_directory_leases_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    lease = open_core_lease()
    with lease.hold(), lease.leave():
        assert lease.directory is None and lease.count_threads() == 9
