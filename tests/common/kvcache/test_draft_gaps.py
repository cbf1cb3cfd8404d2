"""Pages of the prefix cache that the draft model's pool lacks: found, but without a claim on the draft."""

import numpy as np
import pytest

from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.tiers.base import FinishedTask
from baton.common.kvcache.write_policies.write_back import WriteBack

PAGE = 2


def tokens(*ids):
    return np.array(ids, dtype=np.int32)


def cached(cache, ids, gap=None, limit=None):
    """A table of ``ids``, all computed, whose pages are published; returns what it found of the draft."""
    table = cache.match_prefix(ids, len(ids) if limit is None else limit)
    found = table.draft_gap
    assert cache.allocate_slots(table, len(ids))
    if gap is not None:
        table.draft_gap = gap
    cache.release(table, ids)
    return found


@pytest.mark.parametrize(("gap", "first"), [(0, 0), (3, 2), (4, 4), (5, 4), (6, None)])
def test_a_request_that_finds_pages_after_a_gap_has_the_gap(gap, first):
    cache = KVCacheManager(16, PAGE)
    cached(cache, tokens(1, 2, 3, 4, 5, 6), gap)
    table = cache.match_prefix(tokens(1, 2, 3, 4, 5, 6, 7), 7)
    assert table.count == 3 and table.draft_gap == first
    cache.release(table)
    incoming = cache.match_incoming(tokens(1, 2, 3, 4, 5, 6, 7))  # the other server has the draft's pages
    assert incoming.count == (3 if first is None else first // PAGE) and incoming.draft_gap is None
    cache.release(incoming)
    cache.check_integrity()


def test_pages_that_are_computed_anew_have_the_draft_s():
    cache = KVCacheManager(4, PAGE)
    cached(cache, tokens(1, 2, 3, 4), 0)
    assert cached(cache, tokens(9, 8, 7, 6, 5, 4, 3, 2)) is None  # evicts them
    assert cached(cache, tokens(1, 2, 3, 4)) is None
    assert cached(cache, tokens(1, 2, 3, 4)) is None


def test_what_follows_pages_without_the_draft_s_claims_nothing_either():
    cache = KVCacheManager(16, PAGE, lookahead=1)
    cached(cache, tokens(1, 2, 3, 4, 5), 2)
    assert cached(cache, tokens(1, 2, 3, 4, 5, 6, 7)) == 2
    table = cache.match_prefix(tokens(1, 2, 3, 4, 5, 6, 7), 7)
    assert table.count == 3 and table.draft_gap == 2
    cache.close_draft_gap(table)
    cache.release(table)
    assert cached(cache, tokens(1, 2, 3, 4, 5, 6, 7)) is None


def test_published_pages_lose_their_claim_until_the_gap_is_closed():
    cache = KVCacheManager(16, PAGE)
    table = cache.match_prefix(tokens(1, 2, 3, 4), 4)
    assert cache.allocate_slots(table, 4)
    cache.close_draft_gap(table)
    assert not cache.has_draft_gaps
    cache.commit(table, tokens(1, 2, 3, 4))
    cache.open_draft_gap(table, 2)
    assert cache.has_draft_gaps and cached(cache, tokens(1, 2, 3, 4)) == 2
    cache.close_draft_gap(table)
    assert cached(cache, tokens(1, 2, 3, 4)) is None
    cache.release(table)


def test_a_tier_gets_no_pages_that_the_draft_lacks():
    class Tier:
        stored = []

        def store(self, keys, pages):
            self.stored.append((len(keys), pages.tolist()))
            return FinishedTask(len(keys))

        def check_integrity(self): ...

    cache = KVCacheManager(4, PAGE)
    cache.attach_tier(Tier(), WriteBack(), shared=True)
    table = cache.match_prefix(tokens(1, 2, 3, 4, 5, 6), 0)
    assert cache.allocate_slots(table, 6)
    table.draft_gap, ids = 3, table.ids.tolist()
    cache.release(table, tokens(1, 2, 3, 4, 5, 6))
    assert cache.allocate_slots(cache.match_prefix(tokens(9), 0), 8)
    assert Tier.stored == [(1, ids[:1])]
