"""A request's token ids as they grow."""

from __future__ import annotations

import numpy as np


class TokenBuffer:
    """Prompt and output token ids (int32) in one growing array, the first ``count`` of it."""

    __slots__ = ("_ids", "count")

    def __init__(self, ids: list[int]):
        self.count = len(ids)
        self._ids = np.empty(self.count + 64, np.int32)
        self._ids[: self.count] = ids

    def __len__(self) -> int:
        return self.count

    def append(self, token_id: int) -> None:
        count = self.count
        if count == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(count, np.int32)))
        self._ids[count] = token_id
        self.count = count + 1

    @property
    def last(self) -> int:
        return int(self._ids[self.count - 1])

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._ids[start : self.count if stop is None else min(stop, self.count)]
