"""The state of the server on disk: sessions, models, requests and results, in one SQLite database.

The event loop queues writes, one thread commits them in order, and what was queued without an `await` in between is
one transaction. The server sends a response only after `commit`, so clients never see what a crash could undo.
WAL mode with `synchronous=FULL`: a transaction is synced to disk when it is committed. It survives a kill of the
process, and a power failure as far as the disk does what `fsync` promises.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

VERSION = 1
SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE owners (owner TEXT PRIMARY KEY, num_sessions INTEGER NOT NULL);
CREATE TABLE records (id TEXT PRIMARY KEY, kind TEXT NOT NULL, session TEXT NOT NULL, data BLOB NOT NULL,
    next_seq INTEGER NOT NULL DEFAULT 0, snapshot INTEGER);
CREATE TABLE requests (id TEXT PRIMARY KEY, session TEXT NOT NULL, target TEXT NOT NULL, seq_id INTEGER NOT NULL,
    kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE results (id TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, target TEXT NOT NULL,
    clone INTEGER NOT NULL, cursor INTEGER NOT NULL, fetched INTEGER NOT NULL DEFAULT 0, is_json INTEGER NOT NULL,
    payload BLOB, error TEXT, category TEXT);
CREATE INDEX records_of_session ON records (session);
CREATE INDEX requests_of_session ON requests (session);
CREATE INDEX requests_of_target ON requests (target, seq_id);
CREATE INDEX results_of_session ON results (session);
CREATE INDEX results_of_target ON results (target, clone, cursor);
"""
"""`records`: sessions, models (`next_seq`: number of the next request, `snapshot`: number of the request after which
the last snapshot was taken) and sampling sessions. `requests`: those that are unfinished, or replayed after a restart.
`results`: what clients fetch; `target` and `clone` are the sampling session and its client, for polls."""

ROW_BYTES = 512
"""Size of a result beside its payload."""


class LogError(RuntimeError):
    """The database cannot be written; the server stops."""


class RequestLog:
    """The database; used from one event loop."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._db = _open(path, settings)
        self._thread = ThreadPoolExecutor(1, "request-log")
        self._queued: list[tuple[str, tuple[Any, ...]]] = []
        self._wake = asyncio.Event()
        self._next: asyncio.Future[None] | None = None
        """Completed with the transaction that will contain the queued writes."""
        self._current: asyncio.Future[None] | None = None
        """Completed with the transaction that is being written."""
        [(self.num_starts,)] = self.fetch("SELECT CAST(value AS INTEGER) FROM settings WHERE name = 'starts'")
        self.error: Exception | None = None

    def put(self, sql: str, *values: Any) -> None:
        """Queue a statement."""
        self._queued.append((sql, values))
        self._wake.set()

    async def commit(self) -> None:
        """Wait until everything that was queued so far is on disk."""
        if self._queued and self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        waiting = self._next if self._queued else self._current
        if waiting is not None:
            await asyncio.shield(waiting)
        if self.error is not None:
            raise LogError(f"the request log cannot be written: {self.error}") from self.error

    async def run(self) -> None:
        """Write queued statements until canceled; `LogError` if they cannot be written."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._queued = self._queued, []
            self._current, self._next = self._next or loop.create_future(), None
            try:
                await loop.run_in_executor(self._thread, self._write, batch)
            except Exception as error:
                self.error = error
                raise LogError(f"the request log cannot be written: {error}") from error
            finally:
                for done in (self._current, self._next if self.error else None):
                    if done is not None:
                        done.set_result(None)
                self._current = None

    async def execute(self, sql: str, *values: Any) -> list[Any]:
        """Execute one statement after all queued ones; returns its rows."""
        await self.commit()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.fetch, sql, values)

    def fetch(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a statement, before `run` starts."""
        return self._db.execute(sql, values).fetchall()

    def close(self) -> None:
        """Write what is queued, and close."""
        self._thread.shutdown()
        if self.error is None and self._queued:
            self._write(self._queued)
        self._db.close()

    def _write(self, batch: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._db.execute("BEGIN")
        try:
            for sql, values in batch:
                self._db.execute(sql, values)
            self._db.execute("COMMIT")
        except Exception:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # What the server writes.

    def add_record(self, name: str, kind: str, session_id: str, data: Mapping[str, Any]) -> None:
        """Add or replace a session, a model or a sampling session."""
        self.put("INSERT OR REPLACE INTO records (id, kind, session, data) VALUES (?, ?, ?, ?)",
                 name, kind, session_id, orjson.dumps(data))  # fmt: skip

    def add_request(self, name: str, session_id: str, target: str, seq_id: int, kind: str, body: bytes) -> None:
        """Add a request of a model or sampling session, `target`."""
        self.put("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?)",
                 name, session_id, target, seq_id, kind, body)  # fmt: skip

    def remove_request(self, name: str) -> None:
        """Remove a request that is neither waiting nor replayed."""
        self.put("DELETE FROM requests WHERE id = ?", name)

    def remove_target(self, name: str) -> None:
        """Remove a model or sampling session with its requests."""
        self.put("DELETE FROM records WHERE id = ?", name)
        self.put("DELETE FROM requests WHERE target = ?", name)

    def remove_session(self, session_id: str) -> None:
        """Remove a session with everything in it."""
        for table in ("records", "requests", "results"):
            self.put(f"DELETE FROM {table} WHERE session = ?", session_id)

    def set_progress(self, model_id: str, next_seq: int) -> None:
        """Record that all requests of a model before `next_seq` have finished."""
        self.put("UPDATE records SET next_seq = ? WHERE id = ?", next_seq, model_id)

    def set_snapshot(self, model_id: str, seq_id: int) -> None:
        """Record a snapshot after request `seq_id`; requests up to it are no longer replayed."""
        self.put("UPDATE records SET snapshot = ? WHERE id = ?", seq_id, model_id)
        self.put("DELETE FROM requests WHERE target = ? AND seq_id <= ?", model_id, seq_id)

    async def trim_results(self, max_bytes: int) -> int:
        """Delete results until they fit: fetched ones first, then the oldest. Returns how many were not fetched."""
        surplus = (
            "FROM results WHERE id IN (SELECT id FROM (SELECT id, "
            f"sum(ifnull(length(payload), 0) + {ROW_BYTES}) OVER (ORDER BY fetched, cursor DESC) AS total FROM results)"
            " WHERE total > ?)"
        )
        [(num_lost,)] = await self.execute(f"SELECT count(*) {surplus} AND NOT fetched", max_bytes)
        await self.execute(f"DELETE {surplus}", max_bytes)
        return int(num_lost)


def _open(path: Path, settings: Mapping[str, Any]) -> sqlite3.Connection:
    """Open the database; `ValueError` if another server uses it, or if its sessions need other settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL", "journal_size_limit=67108864"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN EXCLUSIVE")
        [(version,)] = db.execute("PRAGMA user_version").fetchall()
        if version == 0:
            for statement in filter(str.strip, SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version={VERSION}")
        elif version != VERSION:
            raise ValueError(f"{path} was written by another version of this program: choose another output_dir")
        _check_settings(db, path, {name: orjson.dumps(value).decode() for name, value in settings.items()})
        db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        db.close()
        raise ValueError(f"{path} cannot be opened ({error}): another server may use this output_dir") from error
    except sqlite3.DatabaseError as error:
        db.close()
        raise ValueError(f"{path} is damaged ({error}): choose another output_dir, or delete it") from error
    except ValueError:
        db.close()
        raise
    return db


def _check_settings(db: sqlite3.Connection, path: Path, settings: Mapping[str, str]) -> None:
    """Settings that results depend on may change only while no session is open."""
    known = dict(db.execute("SELECT name, value FROM settings").fetchall())
    changed = [name for name, value in settings.items() if known.get(name, value) != value]
    if changed and db.execute("SELECT 1 FROM records LIMIT 1").fetchall():
        was = ", ".join(f"{name} was {known[name]}" for name in changed)
        raise ValueError(
            f"{path} has open sessions with other settings ({was}): use these or another output_dir, or delete the "
            "file, which ends the sessions"
        )
    db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", settings.items())
    db.execute("INSERT INTO settings VALUES ('starts', '1') ON CONFLICT DO UPDATE SET value = value + 1")
