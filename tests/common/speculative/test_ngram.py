"""Prompt lookup and verification, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.api.drafts import Drafts
from baton.common.api.errors import ConfigError
from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS, SpeculativeArgs
from baton.common.speculative.ngram import continuation
from baton.common.speculative.verify import accept


def by_definition(tokens, min_window, max_window, limit):
    for width in range(max_window, min_window - 1, -1):
        suffix = tokens[len(tokens) - width:]
        ends = [end for end in range(width, len(tokens)) if tokens[end - width:end] == suffix]
        if ends and width <= len(tokens):
            full = [end for end in ends if len(tokens) - end >= limit]
            start = full[-1] if full else ends[0]
            return tokens[start:start + limit]
    return []


@pytest.mark.parametrize("windows", [(1, 12), (2, 3), (3, 3), (1, 1)])
def test_the_longest_suffix_that_was_seen_before(windows):
    rng = np.random.default_rng(0)
    drafted = 0
    for _ in range(300):
        tokens = rng.integers(0, rng.choice([2, 4, 30]), int(rng.integers(1, 60))).astype(np.int32)
        limit = int(rng.integers(0, 6))
        found = continuation(tokens, *windows, limit)
        assert found == (by_definition(tokens.tolist(), *windows, limit) if limit else [])
        drafted += bool(found)
    assert drafted > 50


def test_drafts_are_accepted_up_to_the_first_difference():
    drafts = {1: Drafts((5, 6, 7)), 2: Drafts((8, 9)), 4: Drafts((1, 2))}
    samples = [3, 5, 6, 0, 4, 1, 9, 2, 7, 1, 2, 3]
    assert accept(samples, [1, 4, 3, 1, 3], drafts) == ([1, 3, 1, 1, 3], [3, 5, 6, 0, 1, 7, 1, 2, 3])


def test_the_first_drafts_are_a_tree_too():
    tree = Drafts((5, 6, 7), (-1, -1, 0))
    assert tree.first(3) is tree and tree.first(2) == Drafts((5, 6), (-1, -1)) and tree.first(0) is None
    assert Drafts((5, 6)).first(1) == Drafts((5,)) and len(tree) == 3


@pytest.mark.parametrize("flags", [{"speculative_num_draft_tokens": 1}, {"speculative_ngram_min_match_window_size": 0},
                                   {"speculative_ngram_min_match_window_size": 13}])
def test_flags_out_of_range_are_refused(flags):
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        SpeculativeArgs(**flags)


def test_ngram_is_registered():
    assert "NGRAM" in SPECULATIVE_ALGORITHMS.names
