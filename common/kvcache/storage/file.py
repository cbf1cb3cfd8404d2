"""Files as a KV storage: read and written past the page cache where the file system takes it.

SGLang's names: the folder is option ``storage_dir`` or SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR, its limit ``max_size``
or SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from ...config.server.tiers import KV_STORAGES
from .base import BackendStats, StorageBackend, StorageContext, aligned_buffer, backend_options, parse_size
from .folder import FULL, ObjectFolder

DEFAULT_FOLDER = "/tmp/hicache"


class FolderOptions(msgspec.Struct, kw_only=True):
    """``storage_dir``: the folder. ``max_size``: of all objects in it, such as "200G"; by default what the file system
    has. ``min_free_space`` that stays free on it; by default 5 %. ``use_direct_io``: not through the page cache."""

    storage_dir: str | None = None
    max_size: str | int | None = None
    min_free_space: str | int | None = None
    use_direct_io: bool = True

    def open(self, variable: str, default: str) -> ObjectFolder:
        """Opens the folder, also by the environment's ``variable``_STORAGE_DIR and ``variable``_MAX_SIZE. Raises
        ConfigError."""
        path = self.storage_dir or os.environ.get(f"{variable}_STORAGE_DIR") or default
        max_size = self.max_size if self.max_size is not None else os.environ.get(f"{variable}_MAX_SIZE") or None
        return ObjectFolder(path, None if max_size is None else parse_size(max_size, "max_size"),
                            None if self.min_free_space is None else parse_size(self.min_free_space, "min_free_space"),
                            direct=self.use_direct_io)


class FolderBackend:
    """What storages have in common whose objects are files of a folder; see StorageBackend."""

    def __init__(self, folder: ObjectFolder):
        self.folder = folder

    @property
    def stats(self) -> BackendStats:
        return self.folder.stats

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [os.path.exists(self.folder.file(name)) for name in names]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.folder.delete(name)

    def clear(self) -> None:
        self.folder.clear()

    def close(self) -> None:
        self.folder.close()


class FileBackend(FolderBackend):
    """Objects as files. A thread reads one at a time: the depth of the device's queue is the number of threads."""

    def __repr__(self) -> str:
        return f"FileBackend({self.folder.path})"

    def buffer(self, num_bytes: int) -> np.ndarray:
        return aligned_buffer(num_bytes)

    def get(self, names: Sequence[str], into: Sequence[np.ndarray]) -> list[bool]:
        return [self._get(name, target) for name, target in zip(names, into)]

    def _get(self, name: str, target: np.ndarray) -> bool:
        try:
            return self.folder.with_direct(lambda flags: self._read(name, target, flags))
        except FileNotFoundError:
            return False

    def _read(self, name: str, target: np.ndarray, flags: int) -> bool:
        fd = os.open(self.folder.file(name), os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            view, done = target.data, 0
            if os.fstat(fd).st_size != len(view):
                self.folder.delete(name)
                return False
            while done < len(view):
                count = os.preadv(fd, [view[done:]], done)
                if not count:
                    return False
                done += count
            self.folder.touch(fd)
            return True
        finally:
            os.close(fd)

    def put(self, names: Sequence[str], data: Sequence[np.ndarray]) -> list[bool]:
        """Raises OSError for what is not a lack of space."""
        results = self.exists(names)
        missing = [i for i, is_there in enumerate(results) if not is_there]
        if not self.folder.has_room(sum(data[i].nbytes for i in missing)):
            return results
        written = 0
        try:
            for i in missing:
                self._put(names[i], data[i])
                results[i], written = True, written + data[i].nbytes
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.folder.evict(data[0].nbytes, is_full=True)  # for later ones: these ones' device is full
        finally:
            self.folder.written(written)
        return results

    def _put(self, name: str, source: np.ndarray) -> None:
        self.folder.with_direct(lambda flags: self._write(name, source, flags))

    def _write(self, name: str, source: np.ndarray, flags: int) -> None:
        path = self.folder.temporary(name)
        try:
            fd = self.folder.open_temporary(path, flags)
            try:
                view, done = source.data, 0
                while done < len(view):
                    done += os.pwrite(fd, view[done:], done)
            finally:
                os.close(fd)
            os.rename(path, self.folder.file(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


@KV_STORAGES.register("file")
def make(context: StorageContext) -> StorageBackend:
    options = backend_options(context, FolderOptions, "file")
    return FileBackend(options.open("SGLANG_HICACHE_FILE_BACKEND", DEFAULT_FOLDER))
