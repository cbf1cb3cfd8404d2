"""A request's token ids as they grow."""

from __future__ import annotations

import numpy as np


class TokenBuffer:
    """Prompt and output token ids (int32) in one growing array."""

    __slots__ = ("_ids", "_count")

    def __init__(self, ids: list[int]):
        self._count = len(ids)
        self._ids = np.empty(self._count + 64, np.int32)
        self._ids[: self._count] = ids

    def __len__(self) -> int:
        return self._count

    def append(self, token_id: int) -> None:
        if self._count == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(self._count, np.int32)))
        self._ids[self._count] = token_id
        self._count += 1

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._ids[start : self._count if stop is None else min(stop, self._count)]
