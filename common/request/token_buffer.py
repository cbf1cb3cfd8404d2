"""A request's token ids as they grow."""

from __future__ import annotations

import numpy as np


class TokenBuffer:
    """Prompt and output token ids (int32), ``count`` of them.

    ``view`` moves them into one growing array; until then the newest are in a list. ``append`` and ``extend`` are that
    list's methods, because they are called for every token of every request.
    """

    __slots__ = ("_ids", "_new", "_num_written", "append", "extend")

    def __init__(self, ids: list[int]):
        self._num_written = len(ids)
        self._ids = np.empty(self._num_written + 64, np.int32)
        self._ids[: self._num_written] = ids
        self._new: list[int] = []
        self.append = self._new.append
        self.extend = self._new.extend

    def __len__(self) -> int:
        return self._num_written + len(self._new)

    @property
    def count(self) -> int:
        return self._num_written + len(self._new)

    @property
    def last(self) -> int:
        return self._new[-1] if self._new else int(self._ids[self._num_written - 1])

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        if self._new:
            self._write_new()
        return self._ids[start : self._num_written if stop is None else min(stop, self._num_written)]

    def _write_new(self) -> None:
        end = self._num_written + len(self._new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(end, np.int32)))
        self._ids[self._num_written : end] = self._new
        self._num_written = end
        self._new.clear()
