"""The index of what followed n-grams in all requests, and trees of it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from baton.common.api.drafts import Drafts
from baton.common.api.errors import ConfigError
from baton.common.api.namespace import SHARED, Namespace
from baton.common.config.server.speculative import SpeculativeArgs
from baton.common.request.token_buffer import TokenBuffer
from baton.common.speculative import ngram_index
from baton.common.speculative.ngram import NgramProposer, OwnNgramProposer, make_proposer
from baton.common.speculative.ngram_index import NgramIndex
from baton.common.speculative.ngram_tree import tree_of


class Request(SimpleNamespace):
    """A request's tokens and namespace."""

    def __init__(self, tokens, namespace=SHARED):
        super().__init__(tokens=TokenBuffer(list(tokens)), namespace=namespace)

    __hash__ = object.__hash__


def proposer_of(**flags):
    return make_proposer(SimpleNamespace(speculative=SpeculativeArgs(**flags)))


def grow(req, tokens):
    for token in tokens:
        req.tokens.append(token)


def chains(index, reqs, limit=4):
    return [match and match.continuations[0] for match in index.match(reqs, [limit] * len(reqs), 1)]


def test_what_followed_in_the_request_itself():
    """The longest n-gram counts, of equal ones the newest place that is followed by enough."""
    req = Request([1, 2, 3, 9, 1, 2, 4, 8, 7, 6, 5, 1, 2])
    index = NgramIndex(1, 4, 10_000)
    assert chains(index, [req]) == [[4, 8, 7, 6]]
    grow(req, [3])
    assert chains(index, [req]) == [[9, 1, 2, 4]]  # 1, 2, 3 occurred at the start
    grow(req, [77])
    assert chains(index, [req]) == [None]


def test_what_followed_in_other_requests_of_the_namespace():
    index = NgramIndex(2, 8, 10_000)
    told, private = Request(range(50, 90)), Request(range(50, 90), Namespace("salt"))
    assert chains(index, [told, private]) == [None, None]
    asks, asks_privately, other = Request([60, 61]), Request([60, 61], Namespace("salt")), Request(
        [60, 61], Namespace("other"))
    assert chains(index, [asks, asks_privately, other]) == [[62, 63, 64, 65]] * 2 + [None]
    index.end([told])
    assert len(index) == 40
    assert chains(index, [Request([70, 71])]) == [[72, 73, 74, 75]]
    private.tokens = TokenBuffer(range(50, 90))
    assert chains(index, [Request([88, 89])]) == [None]  # nothing follows the end


def test_continuations_against_a_plain_search():
    """Requests that grow by some tokens a step: the continuation follows an equal n-gram, of the greatest length."""
    rng = np.random.default_rng(0)
    index, reqs = NgramIndex(2, 6, 1 << 20), [Request(rng.integers(0, 5, 3)) for _ in range(5)]
    found = 0
    for _ in range(60):
        for row, match in enumerate(index.match(reqs, [3] * 5, 8)):
            tokens = reqs[row].tokens.view().tolist()
            texts = [req.tokens.view().tolist() for req in reqs]
            places = {width: [text[end:end + 3] for text in texts for end in range(width, len(text))
                              if text[end - width:end] == tokens[-width:]] for width in index.windows
                      if width <= len(tokens)}
            longest = max((width for width, some in places.items() if some), default=None)
            assert (match is None) == (longest is None)
            if match is not None:
                assert match.length == longest and len(match.continuations) <= 8
                assert all(each in places[longest] for each in match.continuations)
                found += 1
        for req in reqs:
            grow(req, rng.integers(0, 5, rng.integers(0, 5)).tolist())
    assert found > 100


def test_long_prompts_are_indexed_in_steps(monkeypatch):
    monkeypatch.setattr(ngram_index, "_PROMPT_TOKENS", 100)
    index = NgramIndex(4, 4, 1 << 20)
    first, second = Request(range(1000, 1250)), Request(range(2000, 2030))
    asked = [Request(range(start, start + 4)) for start in (1010, 1120, 1240, 2010)]
    seen = []
    for _ in range(4):
        index.match([first, second], [4, 4], 1)
        seen.append([chain is not None for chain in chains(index, asked)])
    assert seen == [[True, False, False, False], [True, True, False, False], [True, True, True, True],
                    [True, True, True, True]]


def test_the_oldest_requests_are_forgotten():
    index = NgramIndex(2, 2, 64)
    reqs = [Request(range(start, start + 30)) for start in (100, 200, 300)]
    for req in reqs:
        index.match([req], [4], 1)
    index.end(reqs)
    assert len(index) == 60 and len(index._streams) == 2
    index.end(reqs)  # those that never came, or have ended
    assert len(index) == 60
    assert index.match([], [], 1) == []
    assert chains(index, [Request([110, 111])]) == [None]


def test_numbers_of_streams_come_round(monkeypatch):
    monkeypatch.setattr(ngram_index, "_STREAM_BITS", 2)
    index = NgramIndex(1, 1, 1 << 16)
    kept = Request([5, 6, 7, 5])
    for _ in range(9):
        other = Request([8, 9, 8])
        assert chains(index, [kept, other]) == [[6, 7, 5], [9, 8]]
        index.end([other])
        index._max_tokens = 0
        index.end([])


@pytest.mark.parametrize("by_frequency,limit,tokens,parents", [
    (False, 9, (1, 5, 2, 7, 6, 3, 4, 8), (-1, -1, 0, 0, 1, 2, 2, 3)),
    (False, 3, (1, 5, 2), (-1, -1, 0)),
    (True, 5, (1, 2, 5, 7, 3), (-1, 0, -1, 0, 1)),
    (True, 1, (1,), None),
])
def test_trees(by_frequency, limit, tokens, parents):
    found = tree_of([[1, 2, 3], [5, 6], [1, 2, 4], [1, 7, 8]], 2, limit, by_frequency=by_frequency)
    assert found == Drafts(tokens, parents)


def test_a_tree_without_branches_is_a_chain():
    assert tree_of([[1, 2], [1, 2, 3]], 2, 9, by_frequency=False) == Drafts((1, 2, 3))
    assert tree_of([[1, 2], [3]], 1, 9, by_frequency=True) == Drafts((1, 2))
    assert tree_of([], 1, 9, by_frequency=False) is None


def test_flags():
    """The breadth falls with the length of the match; without a capacity requests are looked up by themselves."""
    proposer = proposer_of(speculative_ngram_max_bfs_breadth=5, speculative_ngram_min_bfs_breadth=2)
    assert isinstance(proposer, NgramProposer)
    assert [proposer._breadth(length) for length in (1, 4, 8, 12)] == [5, 4, 3, 2]
    asks = Request([1, 2, 9, 4, 1, 3, 9, 1])
    (drafts,) = proposer.propose([asks], [6])
    assert drafts == Drafts((3, 2, 9, 9, 1, 4), (-1, -1, 0, 1, 2, 3))
    most = proposer_of(speculative_ngram_max_bfs_breadth=2, speculative_ngram_match_type="PROB")
    assert most.propose([asks], [3]) == [Drafts((3, 2, 9), (-1, -1, 0))]
    chain = proposer_of(speculative_ngram_max_trie_depth=2)
    assert chain.propose([asks], [6]) == [Drafts((3, 9))]
    own = proposer_of(speculative_ngram_capacity=0, speculative_ngram_max_trie_depth=2)
    assert isinstance(own, OwnNgramProposer) and own.propose([asks], [6]) == [Drafts((3, 9))]


@pytest.mark.parametrize("flags", [
    {"speculative_ngram_min_bfs_breadth": 2}, {"speculative_ngram_capacity": -1},
    {"speculative_ngram_max_trie_depth": 0}, {"speculative_ngram_max_bfs_breadth": 2, "speculative_ngram_capacity": 0}])
def test_flags_out_of_range_are_refused(flags):
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        SpeculativeArgs(**flags)
