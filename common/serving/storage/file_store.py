"""Uploaded files: content in a folder, entries in the database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

from ...api.errors import Conflict, InvalidRequest, NotFound, TooLarge
from .database import Database
from .file_schema import MAX_FILE_BYTES, FileObject, PageQuery

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
"""
_ORPHANED_SECONDS = 86_400.0  # an upload that broke, or whose server died, left its content without an entry


class FileStore:
    """``now``: seconds since the epoch."""

    def __init__(self, folder: Path, database: Database, now: Callable[[], float]):
        self._folder = folder
        self._database = database
        self._now = now
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """The path of a file's content; look up its entry first."""
        return self._folder / file_id

    async def receive(self, chunks: AsyncIterator[bytes]) -> tuple[str, int]:
        """Stores content without an entry; returns an id for ``add`` or ``discard``, and its size in bytes.

        Raises TooLarge, and then stores nothing.
        """
        file_id, size = new_id(), 0
        with self.path(file_id).open("wb") as file:
            try:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_FILE_BYTES:
                        raise TooLarge(f"The file is larger than {MAX_FILE_BYTES} bytes; split it.", param="file")
                    await asyncio.to_thread(file.write, chunk)
            except BaseException:
                self.discard(file_id)
                raise
        return file_id, size

    def discard(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    async def add(self, file_id: str, filename: str, purpose: str, size: int, keep_seconds: int | None) -> FileObject:
        """Adds the entry of received content; ``keep_seconds`` None keeps it for ever."""
        entry = self.entry(file_id, filename, purpose, size, keep_seconds)
        await self._database.run(lambda connection: insert(connection, entry))
        return entry

    def entry(self, file_id: str, filename: str, purpose: str, size: int, keep_seconds: int | None) -> FileObject:
        created = int(self._now())
        return FileObject(file_id, size, created, filename, purpose,
                          None if keep_seconds is None else created + keep_seconds)

    def write(self, parts: Iterable[bytes]) -> tuple[str, int]:
        """Like ``receive``, but blocking; the content is synced to disk."""
        file_id, size = new_id(), 0
        with self.path(file_id).open("wb") as file:
            for part in parts:
                size += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        return file_id, size

    async def get(self, file_id: str) -> FileObject:
        """Raises NotFound, also for a file that has expired."""
        now = self._now()

        def find(connection: sqlite3.Connection) -> FileObject:
            return _entry(_require(connection, file_id, now))

        return await self._database.run(find)

    async def page(self, query: PageQuery) -> list[FileObject]:
        """One entry more than ``query.limit`` where there are more. Raises InvalidRequest for an unknown ``after``."""
        now = self._now()

        def find(connection: sqlite3.Connection) -> list[FileObject]:
            newest_first = query.order == "desc"
            where, values = ["(expires_at IS NULL OR expires_at > ?)"], [now]
            if query.purpose is not None:
                where.append("purpose = ?")
                values.append(query.purpose)  # type: ignore[arg-type]
            if query.after is not None:
                where.append("seq < ?" if newest_first else "seq > ?")
                values.append(seq_of(connection, "files", query.after))
            rows = connection.execute(
                f"SELECT * FROM files WHERE {' AND '.join(where)} ORDER BY seq {query.order} LIMIT ?",
                (*values, query.limit + 1))
            return [_entry(row) for row in rows]

        return await self._database.run(find)

    async def delete(self, file_id: str) -> None:
        """Raises NotFound, and Conflict where a batch that has not ended reads the file."""
        now = self._now()

        def forget(connection: sqlite3.Connection) -> None:
            _require(connection, file_id, now)
            reader = connection.execute("SELECT id FROM batches WHERE input_file_id = ? AND open",
                                        (file_id,)).fetchone()
            if reader is not None:
                raise Conflict(f"Batch {reader['id']} reads this file; cancel it first, or wait for its end.",
                               code="file_in_use")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run(forget)
        self.discard(file_id)

    async def sweep(self) -> None:
        """Removes expired files, unless a batch reads them, and content without an entry."""
        now = self._now()

        def forget(connection: sqlite3.Connection) -> tuple[list[str], set[str]]:
            expired = [row["id"] for row in connection.execute(
                "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
                "(SELECT input_file_id FROM batches WHERE open)", (now,))]
            connection.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in expired])
            return expired, {row["id"] for row in connection.execute("SELECT id FROM files")}

        expired, known = await self._database.run(forget)
        for file_id in expired:
            self.discard(file_id)
        await asyncio.to_thread(self._discard_orphaned, known)

    def _discard_orphaned(self, known: set[str]) -> None:
        for path in self._folder.iterdir():
            try:
                if path.name not in known and path.stat().st_mtime < self._now() - _ORPHANED_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                pass  # another server that shares the folder was faster


def new_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def insert(connection: sqlite3.Connection, entry: FileObject) -> None:
    connection.execute("INSERT INTO files (id, filename, purpose, bytes, created_at, expires_at) VALUES (?,?,?,?,?,?)",
                       (entry.id, entry.filename, entry.purpose, entry.bytes, entry.created_at, entry.expires_at))


def seq_of(connection: sqlite3.Connection, table: str, entry_id: str) -> int:
    """Raises InvalidRequest."""
    row = connection.execute(f"SELECT seq FROM {table} WHERE id = ?", (entry_id,)).fetchone()
    if row is None:
        raise InvalidRequest(f"after names {entry_id[:80]!r}, which is not in this list.", param="after")
    result: int = row["seq"]
    return result


def _require(connection: sqlite3.Connection, file_id: str, now: float) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM files WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)", (file_id, now)).fetchone()
    if row is None:
        raise NotFound(f"There is no file {file_id[:80]!r}.", code="file_not_found")
    return row


def _entry(row: sqlite3.Row) -> FileObject:
    return FileObject(row["id"], row["bytes"], row["created_at"], row["filename"], row["purpose"], row["expires_at"])
