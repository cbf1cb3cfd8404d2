"""Page columns: slots of several tokens a row, also where a row goes back."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.kvcache.manager import KVCacheManager
from baton.common.kvcache.page_columns import PageColumns

PAGE = 4


@pytest.mark.parametrize("seed", range(3))
def test_ragged_slots_are_those_of_the_page_tables(seed):
    rng = np.random.default_rng(seed)
    cache = KVCacheManager(400, PAGE)
    tables = [cache.new_private_table() for _ in range(5)]
    columns = PageColumns(tables, PAGE)
    starts = rng.integers(0, 30, 5)
    versions = set()
    for _ in range(40):
        q_lens = np.ones(5, np.int64) if rng.random() < 0.4 else rng.integers(1, 7, 5)
        last = starts + q_lens - 1
        for row in columns.rows_without_page(last):
            assert cache.allocate_slots(tables[row], int(last[row]) + 1)
            columns.update_capacity(row)
        assert (columns.capacities[:5] > last[:5]).all()
        positions = np.concatenate([np.arange(start, end + 1) for start, end in zip(starts, last)])
        slots = columns.slots(starts) if q_lens.max() == 1 else columns.ragged_slots(last, q_lens, positions)
        rows = np.repeat(np.arange(5), q_lens)
        assert slots.page_of_token.tolist() == [tables[row].ids[at // PAGE] for row, at in zip(rows, positions)]
        assert slots.offset_in_page.tolist() == (positions % PAGE).tolist()
        for row, end in enumerate(last):
            pages = slots.kv_indices[slots.kv_indptr[row]:slots.kv_indptr[row + 1]]
            assert pages.tolist() == tables[row].ids[:end // PAGE + 1].tolist()
            assert slots.kv_last_page_len[row] == end % PAGE + 1
        versions.add((slots.version, slots.kv_indptr.tobytes(), slots.kv_indices.tobytes()))
        starts = starts + rng.integers(1, q_lens + 1)  # some of the tokens are accepted
    assert len(versions) == len({version for version, _, _ in versions}) > 5


def test_tables_that_do_not_cover_a_position_are_noticed():
    cache = KVCacheManager(9, PAGE)
    with pytest.raises(AssertionError, match="do not cover"):
        PageColumns([cache.new_private_table()], PAGE).slots(np.array([5]))


@pytest.mark.parametrize("seed", range(3))
def test_padded_pages_have_the_scratch_page_where_a_request_has_none(seed):
    rng = np.random.default_rng(seed)
    cache, scratch = KVCacheManager(400, PAGE), 400
    tables = [cache.new_private_table() for _ in range(6)]
    columns = PageColumns(tables, PAGE)
    most = np.zeros(6, np.int64)
    lists = {}
    for _ in range(60):
        for row in np.flatnonzero(rng.random(6) < 0.3).tolist():
            if rng.random() < 0.6:
                assert columns.append_pages(cache, [row])
            if rng.random() < 0.4:
                assert cache.allocate_slots(tables[row], (tables[row].count + int(rng.integers(0, 3))) * PAGE)
                columns.update_capacity(row)
        tokens = np.maximum(1, columns.capacities + rng.integers(-9, 4 + 5 * (rng.random() < 0.2), 6))
        indptr, indices, version = columns.padded(tokens, scratch)
        most = np.maximum(most, -(-tokens // PAGE))
        for row, table in enumerate(tables):
            listed = indices[indptr[row]:indptr[row + 1]].tolist()
            assert len(listed) >= max(most[row], table.count)
            assert listed == table.ids.tolist() + [scratch] * (len(listed) - table.count)
        assert lists.setdefault(version, (indptr.tobytes(), indices.tobytes())) == (indptr.tobytes(), indices.tobytes())
        if rng.random() < 0.1:
            rows = np.flatnonzero(rng.random(6) < 0.8)
            joining = [cache.new_private_table() for _ in range(6 - len(rows))]
            columns, tables = columns.select(rows, joining), [tables[row] for row in rows.tolist()] + joining
            most = np.zeros(6, np.int64)
    assert len(lists) > 20


def test_a_page_that_was_appended_in_advance_is_not_taken_for_the_next_one():
    cache = KVCacheManager(9, PAGE)
    tables = [cache.new_private_table()]
    columns = PageColumns(tables, PAGE)
    assert columns.append_pages(cache, [0]) and columns.slots(np.array([3])).page_of_token.tolist() == [0]
    for _ in range(2):
        assert columns.append_pages(cache, [0])
    assert columns.slots(np.array([4])).page_of_token.tolist() == [tables[0].ids[1]]
