"""Reading safetensors files without mapping them, and ahead of the loader."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..api.errors import ConfigError
from .lazy import TYPES
from .samples import StoredTensor

_CHUNK_BYTES = 16 << 20
MIN_COLUMN_BYTES = 1024
"""Bytes of a row that are read alone: a read of fewer takes as long, and the whole row is read instead."""


class OpenFile:
    """A file that is open for reading while one of its tensors is there; raises OSError."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def tensor(self, stored: StoredTensor) -> ReadTensor:
        """Returns one of the file's tensors. Its slices raise ConfigError where the file cannot be read, or is shorter
        than its header says."""
        def fill(view: memoryview, start: int) -> None:
            offset, done = stored.start + start, 0
            while done < len(view):
                try:
                    count = os.preadv(self._descriptor, [view[done:]], offset + done)
                except OSError as error:
                    raise ConfigError(f"Cannot read {stored.file}: {error}.") from None
                if not count:
                    raise ConfigError(f"Cannot read {stored.file}: it ends within {stored.name}.")
                done += count

        return ReadTensor(stored, fill, reads_columns=True)


class ReadTensor:
    """A LazyTensor of bytes that ``fill(view, start)`` reads, from the tensor's byte ``start`` on: a slice reads its
    rows, and of long rows, with ``reads_columns``, the columns alone."""

    def __init__(self, tensor: StoredTensor, fill: Callable[[memoryview, int], None], *, reads_columns: bool):
        self._tensor, self._fill, self._reads_columns = tensor, fill, reads_columns

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._tensor.dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        shape = self._tensor.shape
        if not shape:
            return self._read(0, 1, ())[0][key]
        rows, rest = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            return self._read(0, shape[0], shape[1:])[key]
        start, stop, _ = rows.indices(shape[0])
        columns = _columns(rest, shape, TYPES[self._tensor.dtype].itemsize) if self._reads_columns else None
        if columns is not None:
            return self._read_columns(range(start, stop), columns)
        return self._read(start, max(start, stop), shape[1:])[(slice(None), *rest)]

    def _read(self, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = TYPES[self._tensor.dtype]
        row_bytes = math.prod(shape) * dtype.itemsize
        content = bytearray((stop - start) * row_bytes)
        self._fill(memoryview(content), start * row_bytes)
        if not content:
            return torch.empty((stop - start, *shape), dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(stop - start, *shape)

    def _read_columns(self, rows: range, columns: range) -> torch.Tensor:
        """Reads a part of each of a matrix's rows."""
        dtype = TYPES[self._tensor.dtype]
        size = len(columns) * dtype.itemsize
        content = bytearray(len(rows) * size)
        if not content:
            return torch.empty((len(rows), len(columns)), dtype=dtype)
        view = memoryview(content)
        for index, row in enumerate(rows):
            self._fill(view[index * size:(index + 1) * size],
                       (row * self._tensor.shape[1] + columns.start) * dtype.itemsize)
        return torch.frombuffer(content, dtype=dtype).view(len(rows), len(columns))


def _columns(rest: tuple[Any, ...], shape: tuple[int, ...], itemsize: int) -> range | None:
    """Returns the columns of a matrix that are worth a read of their own in each row; None where rows are read."""
    if len(shape) != 2 or len(rest) != 1 or not isinstance(rest[0], slice) or rest[0].step not in (None, 1):
        return None
    columns = range(*rest[0].indices(shape[1]))
    return columns if MIN_COLUMN_BYTES <= len(columns) * itemsize < shape[1] * itemsize else None


@contextmanager
def reading_ahead(files: Sequence[Path], num_threads: int) -> Iterator[Callable[[Path], None]]:
    """Reads ``files`` into the system's page cache by so many threads, at most as many files ahead of the one that the
    loader is at, of which it tells by calling the context's function. Does nothing without threads."""
    if not num_threads:
        yield lambda file: None
        return
    stop = threading.Event()
    waiting = iter(files)
    with ThreadPoolExecutor(num_threads, "read-ahead") as threads:

        def begin_next() -> None:
            file = next(waiting, None)
            if file is not None:
                threads.submit(_read_through, file, stop)

        def begin(file: Path) -> None:
            begin_next()

        for _ in range(num_threads):
            begin_next()
        try:
            yield begin
        finally:
            stop.set()


def _read_through(file: Path, stop: threading.Event) -> None:
    """Reads a file once; an error is left to the loader, which will meet it."""
    buffer = bytearray(_CHUNK_BYTES)
    try:
        with file.open("rb", buffering=0) as content:
            while not stop.is_set() and content.readinto(buffer):
                pass
    except OSError:
        return
