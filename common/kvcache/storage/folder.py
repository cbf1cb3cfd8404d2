"""A folder of objects that processes share, on one host or over a network file system.

An object is a file ``NAME.bin`` in one of 256 folders, written under a temporary name and then renamed: it is there as
a whole or not at all. Its time of modification is set when it is read, and the files that were read the longest time
ago are evicted first, whichever process wrote them, also after a restart.

Processes count what they write in one file, ``.usage``. Who finds the limit exceeded, and the lock ``.evict`` free,
measures the folder, evicts to 90 % of the limit and writes the true number: a process that was killed before it counted
is made good then. Meanwhile others write on, up to 5 % more than the limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from ...api.errors import ConfigError
from .base import BackendStats

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FULL = (errno.ENOSPC, errno.EDQUOT)

_EVICTED_SHARE = 0.1
_HARD_LIMIT = 1.05
_FULL_SECONDS = 5.0
_TEMPORARY_SECONDS = 600.0
"""Temporary files older than this are of a process that has died."""
_USAGE = struct.Struct("<Q")


class _Entry(NamedTuple):
    used: float
    num_bytes: int
    path: str


class ObjectFolder:
    """Paths, limits and eviction; reading and writing is up to the backends (file.py, nixl.py)."""

    def __init__(self, path: str, max_bytes: int | None, min_free_bytes: int | None, *, direct: bool = True):
        """``min_free_bytes`` that stay free on the file system; by default 5 % of it. ``direct``: not through the page
        cache. Raises ConfigError for a folder that cannot be written."""
        self.path = os.path.abspath(path)
        self.stats = BackendStats(capacity_bytes=max_bytes)
        try:
            os.makedirs(self.path, exist_ok=True)
            self._usage = os.open(os.path.join(self.path, ".usage"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"The KV storage cannot use the folder {path}: {error.strerror}.") from None
        self._direct = os.O_DIRECT if direct else 0
        self._max_bytes = max_bytes
        self._min_free_bytes = shutil.disk_usage(self.path).total // 20 if min_free_bytes is None else min_free_bytes
        self._evict_after = 0.0
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # flock does not keep the threads of a process apart
        self._made: set[str] = set()
        if max_bytes is not None:
            threading.Thread(target=self._measure, name="kv-storage-measure", daemon=True).start()

    def __repr__(self) -> str:
        return f"ObjectFolder({self.path})"

    def file(self, name: str) -> str:
        return os.path.join(self.path, name[:2], name + ".bin")

    def temporary(self, name: str) -> str:
        """A path for an object that is being written; makes the folder that it will lie in."""
        folder = os.path.join(self.path, name[:2])
        if folder not in self._made:
            os.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        return os.path.join(folder, f".{name}.{os.getpid()}.{next(self._numbers)}.tmp")

    def open_temporary(self, path: str, flags: int) -> int:
        """Opens a path of ``temporary`` for writing, also where somebody has removed the folder."""
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags, 0o644)

    def with_direct(self, act: Callable[[int], Result]) -> Result:
        """Calls ``act`` with the flags of direct I/O, and without them where the file system has none."""
        try:
            return act(self._direct)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._direct = 0
        return act(0)

    def touch(self, fd: int) -> None:
        """Notes that a file was used now."""
        with contextlib.suppress(OSError):  # a read-only share keeps its times
            os.utime(fd)

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether objects of ``num_bytes`` in all may be written; evicts where they do not fit."""
        if self._is_below_limits(num_bytes, 1.0):
            return True
        if time.monotonic() < self._evict_after:  # the last eviction has not helped: others fill the device
            return False
        self.evict(num_bytes)
        has_room = self._is_below_limits(num_bytes, _HARD_LIMIT)
        if not has_room:
            self._evict_after = time.monotonic() + _FULL_SECONDS
        return has_room

    def _is_below_limits(self, num_bytes: int, factor: float) -> bool:
        if self._max_bytes is not None and self._count(0) + num_bytes > factor * self._max_bytes:
            return False
        status = self._file_system()
        return status.f_bavail * status.f_frsize - num_bytes >= self._min_free_bytes

    def _file_system(self) -> os.statvfs_result:
        """Its sizes, also where somebody has removed the folder."""
        try:
            return os.statvfs(self.path)
        except FileNotFoundError:
            os.makedirs(self.path, exist_ok=True)
            return os.statvfs(self.path)

    def written(self, num_bytes: int) -> None:
        """Counts objects that were written."""
        if num_bytes:
            self._count(num_bytes)

    def evict(self, num_bytes: int, *, is_full: bool = False) -> bool:
        """Makes room for ``num_bytes``, and for a tenth of the limit more; False where another process does so.
        ``is_full``: the device says so, whatever is free (a quota)."""
        with self._eviction_lock() as is_ours:
            if is_ours:
                self._evict(num_bytes, is_full)
            return is_ours

    def _evict(self, num_bytes: int, is_full: bool = False) -> None:
        entries = sorted(self._entries())
        total = sum(entry.num_bytes for entry in entries)
        status = self._file_system()
        missing = self._min_free_bytes + num_bytes - status.f_bavail * status.f_frsize
        excess = 0
        if missing > 0 or is_full:
            excess = max(max(missing, 0) + int(total * _EVICTED_SHARE), num_bytes)
        if self._max_bytes is not None and total + num_bytes > self._max_bytes:
            excess = max(excess, total + num_bytes - int((1 - _EVICTED_SHARE) * self._max_bytes))
        for entry in entries:
            if excess <= 0:
                break
            with contextlib.suppress(OSError):  # another process was first
                os.unlink(entry.path)
                excess, total = excess - entry.num_bytes, total - entry.num_bytes
                self.stats.evicted += 1
        self._count(total, replace=True)

    def _measure(self) -> None:
        """Counts what is there, and removes what a process left that died while it wrote."""
        try:
            with self._eviction_lock() as is_ours:
                if is_ours:
                    self._count(sum(entry.num_bytes for entry in self._entries()), replace=True)
        except OSError as error:
            logger.warning("The KV storage cannot measure the folder %s: %s", self.path, error)

    def _entries(self) -> Iterator[_Entry]:
        """Yields all objects; removes temporary files that are old."""
        for folder in os.scandir(self.path):
            if not folder.is_dir():
                continue
            for file in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):  # evicted, or renamed, meanwhile
                    status = file.stat()
                    if file.name.endswith(".bin"):
                        yield _Entry(status.st_mtime, status.st_size, file.path)
                    elif status.st_mtime < time.time() - _TEMPORARY_SECONDS:
                        os.unlink(file.path)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            num_bytes = os.stat(self.file(name)).st_size
            os.unlink(self.file(name))
            self._count(-num_bytes)

    def clear(self) -> None:
        """Removes all objects, and what is being written."""
        for folder in list(os.scandir(self.path)):
            if folder.is_dir():
                for file in list(os.scandir(folder.path)):
                    if file.name.endswith((".bin", ".tmp")):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(file.path)
        self._count(0, replace=True)

    def close(self) -> None:
        with self._lock:
            os.close(self._usage)
            self._usage = -1

    def _count(self, num_bytes: int, *, replace: bool = False) -> int:
        """Adds to the bytes that all processes have counted, or replaces them; returns them. Without a limit there is
        nothing to count."""
        with self._lock:
            if self._max_bytes is None or self._usage < 0:  # closed while the folder was measured
                return 0
            fcntl.flock(self._usage, fcntl.LOCK_EX)
            try:
                stored = os.pread(self._usage, _USAGE.size, 0)
                total = 0 if replace or len(stored) < _USAGE.size else _USAGE.unpack(stored)[0]
                if replace or num_bytes:
                    total = max(0, total + num_bytes)
                    os.pwrite(self._usage, _USAGE.pack(total), 0)
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)
        self.stats.used_bytes = total
        return int(total)

    @contextlib.contextmanager
    def _eviction_lock(self) -> Iterator[bool]:
        """Yields whether this thread alone may evict, of all processes."""
        fd = os.open(os.path.join(self.path, ".evict"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            yield False
            return
        try:
            yield True
        finally:
            os.close(fd)
