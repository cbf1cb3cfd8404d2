"""Positions and words of the rows of trees."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.drafts import Drafts
from baton.common.forward.tree_rows import MAX_ROWS, num_bits, tree_rows, words_of
from baton.tests.helpers.random_drafts import random_tree


def test_chains_need_no_words():
    assert tree_rows({}, np.array([3]), np.array([1])) is None
    assert tree_rows({0: Drafts((1, 2))}, np.array([3]), np.array([3])) is None


def test_rows_see_their_ancestors_and_themselves():
    """A tree, a chain, and a request without drafts."""
    drafts = {0: Drafts((7, 8, 9, 10), (-1, -1, 0, 2)), 2: Drafts((1, 2))}
    found = tree_rows(drafts, np.array([10, 4, 0]), np.array([5, 1, 3]))
    assert found is not None
    positions, mask = found
    assert positions.tolist() == [10, 11, 11, 12, 13, 4, 0, 1, 2]
    assert [bin(word) for word in mask.words.tolist()] == ["0b1", "0b11", "0b101", "0b1011", "0b11011", "0b1", "0b1",
                                                          "0b11", "0b111"]
    assert mask.counts.tolist() == [5, 1, 3] and mask.counts.dtype == np.int32


@pytest.mark.parametrize("count", [1, 5, MAX_ROWS - 1])
def test_words_of_random_trees(count):
    drafts = random_tree(np.random.default_rng(count), count, 1000)
    assert drafts.parents is not None
    words = words_of(drafts.parents)
    for row, word in enumerate(words):
        seen, at = {row}, row
        while at:
            at = drafts.parents[at - 1] + 1
            seen.add(at)
        assert {bit for bit in range(count + 1) if word >> bit & 1} == seen
    assert num_bits(np.array(words)).tolist() == [word.bit_count() for word in words]
