"""An SQLite file, used from a thread of its own so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...api.errors import ConfigError

T = TypeVar("T")
_BUSY_SECONDS = 30.0  # several servers of a host may share the file


class Database:
    """``await run(work)`` calls ``work(connection)`` as one transaction: after a crash all of it is there, or nothing.

    A commit survives the death of the process. (A crash of the machine may lose the last ones: their work is repeated.)
    """

    def __init__(self, path: Path, schema: str):
        """Raises ConfigError where the file cannot be opened."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        try:
            self._connection = self._thread.submit(_connect, path, schema).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"Cannot keep files in {path.parent} ({error}); give another "
                              "--file-storage-path.") from None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """A caller that is cancelled meanwhile does not undo the work."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    def close(self) -> None:
        """Waits for running work, then closes the connection."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()


def _connect(path: Path, schema: str) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.executescript(schema)
    return connection
