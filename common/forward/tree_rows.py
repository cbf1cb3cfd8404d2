"""Rows of a step whose drafts form trees: their positions, and which of the newest slots each sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

import numpy as np

from ..api.drafts import Drafts
from .forward_batch import MaskColumns

MAX_ROWS = 63
"""Rows of a request that a mask's word has bits for; the last bit would be the sign."""


def tree_rows(drafts: Mapping[int, Drafts], starts: np.ndarray,
              q_lens: np.ndarray) -> tuple[np.ndarray, MaskColumns] | None:
    """Returns the positions [T] int64 and the mask of a step's rows, where any of its ``drafts`` are a tree.

    Request b has ``q_lens[b]`` rows: its newest token, at position ``starts[b]``, and ``drafts[b]``, if there are some.
    """
    if all(found.parents is None for found in drafts.values()):
        return None
    words: list[int] = []
    for request, q_len in enumerate(q_lens.tolist()):
        found = drafts.get(request)
        words += _chain(q_len) if found is None or found.parents is None else words_of(found.parents)
    assert len(words) == int(q_lens.sum()), "a request with drafts has one more row than these"
    row_words = np.array(words, np.int64)
    positions = np.repeat(starts, q_lens) + num_bits(row_words) - 1
    return positions, MaskColumns(row_words, q_lens.astype(np.int32))


def words_of(parents: Sequence[int]) -> list[int]:
    """Returns the words of a newest token and of its drafts, whose ``parents`` are as in Drafts."""
    words = [1]
    for row, parent in enumerate(parents, 1):
        words.append(words[parent + 1] | 1 << row)
    return words


@cache
def _chain(q_len: int) -> list[int]:
    return list(accumulate(1 << row for row in range(q_len)))


def num_bits(words: np.ndarray) -> np.ndarray:
    """Returns how many bits of each of ``words`` [n] int64 are set."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    counts: np.ndarray = _BITS_OF_BYTE[as_bytes].sum(1)
    return counts


_BITS_OF_BYTE = np.array([value.bit_count() for value in range(256)], np.int64)
