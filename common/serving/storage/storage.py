"""A server's storage: files and batches in one folder."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from . import batch_store as _batches
from . import file_store as _files
from .batch_store import BatchStore
from .database import Database
from .file_store import FileStore


class Storage:
    """``now``: seconds since the epoch. Raises ConfigError where the folder cannot be used."""

    def __init__(self, folder: str, now: Callable[[], float] = time.time):
        root = Path(folder).expanduser()
        self._database = Database(root / "baton.sqlite3", _files.SCHEMA + _batches.SCHEMA)
        self.now = now
        self.files = FileStore(root / "files", self._database, now)
        self.batches = BatchStore(self._database, now, uuid.uuid4().hex)

    def close(self) -> None:
        self._database.close()
