"""A request's token ids as they grow."""

from __future__ import annotations

import numpy as np


class TokenBuffer:
    """Prompt and output token ids (int32), ``count`` of them.

    They stand in one growing array as soon as somebody looks; until then the newest wait in a list. ``append`` is that
    list's, for it is called for every token of every request.
    """

    __slots__ = ("_ids", "_new", "_placed", "append")

    def __init__(self, ids: list[int]):
        self._placed = len(ids)
        self._ids = np.empty(self._placed + 64, np.int32)
        self._ids[: self._placed] = ids
        self._new: list[int] = []
        self.append = self._new.append

    def __len__(self) -> int:
        return self._placed + len(self._new)

    @property
    def count(self) -> int:
        return self._placed + len(self._new)

    @property
    def last(self) -> int:
        return self._new[-1] if self._new else int(self._ids[self._placed - 1])

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        if self._new:
            self._place()
        return self._ids[start : self._placed if stop is None else min(stop, self._placed)]

    def _place(self) -> None:
        end = self._placed + len(self._new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(end, np.int32)))
        self._ids[self._placed : end] = self._new
        self._placed = end
        self._new.clear()
