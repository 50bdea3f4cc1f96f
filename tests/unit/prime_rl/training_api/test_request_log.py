"""The request log: what is committed survives, and what it refuses."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prime_rl.training_api.request_log import ROW_BYTES, LogError, RequestLog

SETTINGS = {"model.name": "m"}


def use(path: Path, work: Callable[[RequestLog], Awaitable[None]]) -> None:
    """Run `work` on an open log."""

    async def run() -> None:
        log = RequestLog(path, SETTINGS)
        writer = asyncio.create_task(log.run())
        await work(log)
        writer.cancel()
        log.close()

    asyncio.run(run())


def add_result(log: RequestLog, name: str, cursor: int, size: int, *, fetched: bool = False) -> None:
    log.put("INSERT INTO results VALUES (?, 's', 'o', 't', 0, ?, ?, 0, ?, NULL, NULL)",
            name, cursor, fetched, b"x" * size)  # fmt: skip


def test_a_kill_after_commit_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)

    async def work(log: RequestLog) -> None:
        for i in range(30):
            log.add_request(f"r{i}", "s", "t", i, "optim_step", b"x" * rng.randrange(20000))
            if rng.random() < 0.5:
                log.set_progress("t", i)
            if rng.random() < 0.3:
                await log.commit()
                folder = tmp_path / f"copy{i}"
                shutil.copytree(tmp_path / "log", folder)  # what a kill leaves
                copy = RequestLog(folder / "db", SETTINGS)
                assert copy.fetch("SELECT count(*) FROM requests") == [(i + 1,)]
                copy.close()

    use(tmp_path / "log" / "db", work)


def test_writes_without_await_are_one_transaction(tmp_path: Path) -> None:
    async def work(log: RequestLog) -> None:
        log.add_request("a", "s", "t", 0, "optim_step", b"")
        log.put("INSERT INTO missing VALUES (1)")
        for _ in range(2):
            with pytest.raises(LogError, match="no such table"):
                await log.commit()
        assert log.fetch("SELECT count(*) FROM requests") == [(0,)]

    use(tmp_path / "db", work)


def test_concurrent_commits_wait_for_their_own_writes(tmp_path: Path) -> None:
    async def work(log: RequestLog) -> None:
        async def add(i: int) -> None:
            await asyncio.sleep(i % 3 * 0.001)
            log.add_request(f"r{i}", "s", "t", i, "optim_step", b"")
            await log.commit()
            assert log.fetch("SELECT 1 FROM requests WHERE id = ?", (f"r{i}",)) == [(1,)]

        await asyncio.gather(*(add(i) for i in range(50)))

    use(tmp_path / "db", work)


def test_fetched_and_old_results_are_trimmed_first(tmp_path: Path) -> None:
    async def work(log: RequestLog) -> None:
        for i in range(6):
            add_result(log, f"r{i}", i, 1000, fetched=i in (3, 5))
        assert await log.trim_results(3 * (1000 + ROW_BYTES)) == 1, "r0 was not fetched"
        assert await log.execute("SELECT id FROM results ORDER BY id") == [("r1",), ("r2",), ("r4",)]

    use(tmp_path / "db", work)


def test_other_settings_need_a_log_without_sessions(tmp_path: Path) -> None:
    async def work(log: RequestLog) -> None:
        assert log.num_starts == 1
        log.add_record("s", "session", "s", {})
        await log.commit()

    use(tmp_path / "db", work)
    with pytest.raises(ValueError, match=r'model.name was "m".*another output_dir'):
        RequestLog(tmp_path / "db", {"model.name": "n"})

    async def end(log: RequestLog) -> None:
        assert log.num_starts == 2
        log.remove_session("s")

    use(tmp_path / "db", end)
    RequestLog(tmp_path / "db", {"model.name": "n"}).close()


def test_a_second_server_and_foreign_files_are_refused(tmp_path: Path) -> None:
    async def work(log: RequestLog) -> None:
        with pytest.raises(ValueError, match="another server may use this output_dir"):
            RequestLog(tmp_path / "db", SETTINGS)

    use(tmp_path / "db", work)
    (tmp_path / "noise").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="is damaged"):
        RequestLog(tmp_path / "noise", SETTINGS)
    db = sqlite3.connect(tmp_path / "newer")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ValueError, match="another version"):
        RequestLog(tmp_path / "newer", SETTINGS)
