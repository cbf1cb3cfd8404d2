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
from .lazy import DTYPES
from .samples import StoredTensor

_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_CHUNK_BYTES = 16 << 20


class ReadTensor:
    """A LazyTensor of an open file: a slice reads its rows."""

    def __init__(self, file: int, tensor: StoredTensor):
        self._file, self._tensor = file, tensor

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
        return self._read(start, max(start, stop), shape[1:])[(slice(None), *rest)]

    def _read(self, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads rows; raises ConfigError where the file cannot be read, or is shorter than its header says."""
        dtype = _TYPES[self._tensor.dtype]
        row_bytes = math.prod(shape) * dtype.itemsize
        content = bytearray((stop - start) * row_bytes)
        view, offset, done = memoryview(content), self._tensor.start + start * row_bytes, 0
        while done < len(content):
            try:
                count = os.preadv(self._file, [view[done:]], offset + done)
            except OSError as error:
                raise ConfigError(f"Cannot read {self._tensor.file}: {error}.") from None
            if not count:
                raise ConfigError(f"Cannot read {self._tensor.file}: it ends within {self._tensor.name}.")
            done += count
        if not content:
            return torch.empty((stop - start, *shape), dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(stop - start, *shape)


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
