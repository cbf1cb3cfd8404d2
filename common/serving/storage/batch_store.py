"""Batches and the answers to their lines so far.

A batch that has not ended is *open*. One server at a time works on it: it *claims* the batch with a lease that it
renews while it lives. When it dies the lease expires, and any server that shares the folder, or is started on it,
continues after the last recorded answer.

    validating -> in_progress -> finalizing -> completed, expired
    validating -> failed
    validating, in_progress -> cancelling -> cancelled
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ...api.errors import InvalidRequest, NotFound
from .batch_schema import Batch, BatchError, BatchErrors, CreateBatch, RequestCounts, Status
from .database import Database
from .file_schema import FileObject, PageQuery
from .file_store import insert, seq_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, open INTEGER NOT NULL, status TEXT NOT NULL,
  endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT, errors TEXT,
  keep_seconds INTEGER, outcome TEXT, output_file_id TEXT, error_file_id TEXT, total INTEGER NOT NULL DEFAULT 0,
  completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0, created_at INTEGER NOT NULL,
  expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
  expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, worker TEXT, lease REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS answers (
  batch_id TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, text BLOB NOT NULL,
  PRIMARY KEY (batch_id, line)) WITHOUT ROWID;
"""
LEASE_SECONDS = 6.0
_FINAL_STATUSES: dict[str, tuple[str, ...]] = {
    "completed": ("finalizing",), "expired": ("finalizing",), "failed": ("validating",), "cancelled": ("cancelling",)}
"""The statuses from which a batch may end, by its final status."""
_PREVIOUS_STATUSES: dict[str, tuple[str, ...]] = {
    **_FINAL_STATUSES, "in_progress": ("validating",), "finalizing": ("in_progress",),
    "cancelling": ("validating", "in_progress")}
_encode = msgspec.json.Encoder().encode


class LeaseLost(Exception):
    """Another server works on the batch now, or it was cancelled meanwhile: release it, and claim it again or not."""


@dataclass(frozen=True)
class Claimed:
    """A batch that this server works on; ``done`` holds the numbers of the lines that have answers, and ``outcome`` of
    a batch that is finalizing what it becomes."""

    batch: Batch
    done: frozenset[int]
    keep_seconds: int | None
    outcome: Status | None


class BatchStore:
    """``worker`` names this server; ``now``: seconds since the epoch."""

    def __init__(self, database: Database, now: Callable[[], float], worker: str):
        self._database = database
        self._now = now
        self.worker = worker

    # ------------------------------------------------------------------ requests of clients

    async def create(self, request: CreateBatch) -> Batch:
        """Raises NotFound where there is no such file, and InvalidRequest where it is not for batches."""
        now = self._now()
        row = (f"batch_{uuid.uuid4().hex}", request.endpoint, request.input_file_id, request.completion_window,
               None if request.metadata is None else _encode(request.metadata).decode(), request.keep_seconds,
               int(now), int(now) + request.window_seconds)

        def add(connection: sqlite3.Connection) -> Batch:
            file = connection.execute(
                "SELECT purpose FROM files WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)",
                (request.input_file_id, now)).fetchone()
            if file is None:
                raise NotFound(f"There is no file {request.input_file_id[:80]!r}.", param="input_file_id",
                               code="file_not_found")
            if file["purpose"] != "batch":
                raise InvalidRequest("The input file must be uploaded with purpose 'batch'.", param="input_file_id")
            connection.execute(
                "INSERT INTO batches (id, open, status, endpoint, input_file_id, completion_window, metadata, "
                "keep_seconds, created_at, expires_at) VALUES (?, 1, 'validating', ?, ?, ?, ?, ?, ?, ?)", row)
            return _require(connection, row[0])

        return await self._database.run(add)

    async def get(self, batch_id: str) -> Batch:
        """Raises NotFound."""
        return await self._database.run(lambda connection: _require(connection, batch_id))

    async def page(self, query: PageQuery) -> list[Batch]:
        """Newest first; one more than ``query.limit`` where there are more. Raises InvalidRequest."""

        def find(connection: sqlite3.Connection) -> list[Batch]:
            before = 2**62 if query.after is None else seq_of(connection, "batches", query.after)
            rows = connection.execute("SELECT * FROM batches WHERE seq < ? ORDER BY seq DESC LIMIT ?",
                                      (before, query.limit + 1))
            return [_batch(row) for row in rows]

        return await self._database.run(find)

    async def cancel(self, batch_id: str) -> Batch:
        """Raises NotFound, and InvalidRequest for a batch that has ended or is about to."""

        def mark(connection: sqlite3.Connection) -> Batch:
            batch = _require(connection, batch_id)
            if batch.status == "cancelling":
                return batch
            if batch.status not in _PREVIOUS_STATUSES["cancelling"]:
                raise InvalidRequest(f"The batch cannot be cancelled: it is {batch.status}.", code="batch_not_open")
            self._move(connection, batch_id, "cancelling")
            return _require(connection, batch_id)

        return await self._database.run(mark)

    # ------------------------------------------------------------------ steps of the worker

    async def claim(self) -> Claimed | None:
        """Claims the oldest open batch without a live worker; None where there is none."""
        now = self._now()

        def take(connection: sqlite3.Connection) -> Claimed | None:
            row = connection.execute("SELECT * FROM batches WHERE open AND lease <= ? ORDER BY seq LIMIT 1",
                                     (now,)).fetchone()
            if row is None:
                return None
            connection.execute("UPDATE batches SET worker = ?, lease = ? WHERE id = ?",
                               (self.worker, now + LEASE_SECONDS, row["id"]))
            return Claimed(_batch(row), _answered(connection, row["id"]), row["keep_seconds"], row["outcome"])

        return await self._database.run(take)

    async def answered(self, batch_id: str) -> frozenset[int]:
        """The numbers of the lines that have answers, also those that were recorded during a cancellation."""
        return await self._database.run(lambda connection: _answered(connection, batch_id))

    async def renew(self) -> dict[str, Status]:
        """Prolongs this server's leases; returns the status of its batches."""
        now = self._now()

        def prolong(connection: sqlite3.Connection) -> dict[str, Status]:
            connection.execute("UPDATE batches SET lease = ? WHERE open AND worker = ?",
                               (now + LEASE_SECONDS, self.worker))
            return {row["id"]: row["status"] for row in connection.execute(
                "SELECT id, status FROM batches WHERE open AND worker = ?", (self.worker,))}

        return await self._database.run(prolong)

    async def release(self, batch_id: str) -> None:
        """Stops working on a batch; an open one can be claimed again at once."""
        await self._database.run(lambda connection: connection.execute(
            "UPDATE batches SET lease = 0, worker = NULL WHERE id = ? AND worker = ?", (batch_id, self.worker)))

    async def begin(self, batch_id: str, total: int) -> None:
        """Records that the input file is valid and has ``total`` lines. Raises LeaseLost."""

        def mark(connection: sqlite3.Connection) -> None:
            self._check_lease(connection, batch_id, "validating")
            connection.execute("UPDATE batches SET total = ? WHERE id = ?", (total, batch_id))
            self._move(connection, batch_id, "in_progress")

        await self._database.run(mark)

    async def refuse(self, batch_id: str, errors: list[BatchError]) -> None:
        """Records that the input file is not valid. Raises LeaseLost."""
        text = _encode(BatchErrors(errors)).decode()

        def mark(connection: sqlite3.Connection) -> None:
            self._check_lease(connection, batch_id, "validating")
            connection.execute("UPDATE batches SET errors = ? WHERE id = ?", (text, batch_id))
            self._move(connection, batch_id, "failed")

        await self._database.run(mark)

    async def record(self, batch_id: str, line: int, ok: bool, text: bytes) -> None:
        """Records the final answer of a line: ``text`` is its line of the output or error file. Raises LeaseLost."""
        column = "completed" if ok else "failed"

        def add(connection: sqlite3.Connection) -> None:
            self._check_lease(connection, batch_id, "in_progress", "cancelling")
            connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (batch_id, line, ok, text))
            connection.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch_id,))

        await self._database.run(add)

    async def finalize(self, batch_id: str, outcome: Status) -> None:
        """Records that all lines are answered or given up; the files are written next. Raises LeaseLost."""

        def mark(connection: sqlite3.Connection) -> None:
            self._check_lease(connection, batch_id, "in_progress")
            connection.execute("UPDATE batches SET outcome = ? WHERE id = ?", (outcome, batch_id))
            self._move(connection, batch_id, "finalizing")

        await self._database.run(mark)

    async def write(self, batch_id: str, ok: bool,
                    put: Callable[[Iterator[bytes]], tuple[str, int]]) -> tuple[str, int]:
        """Calls ``put`` with the answers, in the order of their lines; returns its result."""

        def read(connection: sqlite3.Connection) -> tuple[str, int]:
            rows = connection.execute("SELECT text FROM answers WHERE batch_id = ? AND ok = ? ORDER BY line",
                                      (batch_id, ok))
            return put(row["text"] for row in rows)

        return await self._database.run(read)

    async def end(self, batch_id: str, status: Status, output: FileObject | None, errors: FileObject | None) -> None:
        """Ends the batch in one transaction: adds the files' entries and removes the answers. Raises LeaseLost."""

        def close(connection: sqlite3.Connection) -> None:
            self._check_lease(connection, batch_id, *_FINAL_STATUSES[status])
            for column, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    insert(connection, file)
                    connection.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, batch_id))
            self._move(connection, batch_id, status)
            connection.execute("DELETE FROM answers WHERE batch_id = ?", (batch_id,))

        await self._database.run(close)

    # ------------------------------------------------------------------ inside

    def _check_lease(self, connection: sqlite3.Connection, batch_id: str, *statuses: str) -> None:
        row = connection.execute("SELECT worker, status FROM batches WHERE id = ?", (batch_id,)).fetchone()
        if row["worker"] != self.worker or row["status"] not in statuses:
            raise LeaseLost(batch_id)

    def _move(self, connection: sqlite3.Connection, batch_id: str, status: str) -> None:
        before = ", ".join(f"'{name}'" for name in _PREVIOUS_STATUSES[status])
        moved = connection.execute(
            f"UPDATE batches SET status = ?, {status}_at = ?, open = ? WHERE id = ? AND status IN ({before})",
            (status, int(self._now()), status not in _FINAL_STATUSES, batch_id))
        assert moved.rowcount == 1, f"{batch_id} cannot become {status}"


def _answered(connection: sqlite3.Connection, batch_id: str) -> frozenset[int]:
    rows = connection.execute("SELECT line FROM answers WHERE batch_id = ?", (batch_id,))
    return frozenset(row["line"] for row in rows)


def _require(connection: sqlite3.Connection, batch_id: str) -> Batch:
    row = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise NotFound(f"There is no batch {batch_id[:80]!r}.", code="batch_not_found")
    return _batch(row)


_COLUMNS = tuple(name for name in Batch.__struct_fields__
                 if name not in ("request_counts", "errors", "metadata", "object"))


def _batch(row: sqlite3.Row) -> Batch:
    return Batch(
        **{name: row[name] for name in _COLUMNS},
        request_counts=RequestCounts(row["total"], row["completed"], row["failed"]),
        metadata=None if row["metadata"] is None else msgspec.json.decode(row["metadata"], type=dict[str, str]),
        errors=None if row["errors"] is None else msgspec.json.decode(row["errors"], type=BatchErrors))
