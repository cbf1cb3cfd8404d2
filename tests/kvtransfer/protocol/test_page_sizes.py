"""Prefill and decode with pages of different sizes: every token's keys and values arrive, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from baton.common.kvcache.layout import KVLayout
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.protocol.reshard import RankLayout, find_mismatch
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import BACKENDS, wait_until
from baton.tests.kvtransfer.test_tp import NUM_PAGES, Fleet, make_fleet  # noqa: F401 (a fixture)


def by_token(whole: np.ndarray, page_ids: np.ndarray) -> np.ndarray:
    """``[tokens, layers, planes, heads, head_dim]`` of these pages."""
    pages = whole[page_ids].transpose(0, 4, 1, 2, 3, 5)
    return pages.reshape(-1, *pages.shape[2:])


def transfer(fleet: Fleet, room: int, tokens: int, first_page: int, chunk: int) -> None:
    """``chunk`` of prefill's pages at a time, as its forward passes complete them; then every pool is checked."""
    rng = np.random.default_rng(room)
    prefill, decode = fleet.prefill, fleet.decode
    src = rng.permutation(NUM_PAGES)[:prefill.layout.pages_for(tokens)]
    dst = rng.permutation(NUM_PAGES)[:decode.layout.pages_for(tokens)]
    before = [[pool.copy() for pool in pools] for pools in decode.pools]
    for receiver in decode.ranks:
        receiver.reserve(room, fleet.bootstrap.address, 77, tokens, first_page, dst[first_page:])
    for sender in prefill.ranks:
        sender.expect(room, 77, tokens)
    fleet.until(room, Phase.RESERVED)
    for first in range(0, len(src), chunk):
        for sender in prefill.ranks:
            for group in range(len(prefill.layout.groups)):
                sender.push(room, group, first, src[first:first + chunk], None)
    for sender in prefill.ranks:
        sender.finish(room, PrefillResult(42, 3))
    wait_until(lambda: all(endpoint.phase(room) in (Phase.DONE, Phase.FAILED) for endpoint in fleet.endpoints))
    for endpoint in fleet.endpoints:
        assert endpoint.phase(room) is Phase.DONE, endpoint.error(room)
        endpoint.forget(room)
    skipped = first_page * decode.layout.page_size
    for rank, (pools, was) in enumerate(zip(decode.pools, before)):
        got, old = (np.concatenate(each, axis=1) for each in (pools, was))
        expected = by_token(prefill.whole, src)[:tokens][:, :, :, decode.heads(rank, len(decode.pools))]
        np.testing.assert_array_equal(by_token(got, dst)[skipped:tokens], expected[skipped:])
        others = np.setdiff1d(np.arange(NUM_PAGES), dst[first_page:])
        np.testing.assert_array_equal(got[others], old[others])


@pytest.mark.parametrize("sizes", [(2, 8), (8, 2), (4, 8), (4, 2)])
@pytest.mark.parametrize("p, d, heads, groups", [
    (1, 1, 2, ((3,), (1, 2))), (2, 1, 4, ((2, 1), (2, 1))), (1, 2, 4, ((2, 1), (3,))), (2, 4, 2, ((3,), (3,))),
    (2, 1, 0, ((2, 1), (3,)))])
def test_tokens_arrive_in_pages_of_another_size(make_fleet, sizes, p, d, heads, groups):  # noqa: F811
    fleet = make_fleet(p, d, heads, groups, "fake", page_sizes=sizes, kv_checksum="full")
    for room, (tokens, first_page, chunk) in enumerate([(16, 0, 99), (13, 0, 1), (13, 1, 2), (1, 0, 1), (15, 1, 1)]):
        transfer(fleet, room, tokens, min(first_page, tokens // sizes[1]), chunk)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_write_parts_of_pages(make_fleet, backend):  # noqa: F811
    for sizes in ((2, 8), (8, 2)):
        fleet = make_fleet(1, 1, 2, ((3,), (2, 1)), backend, page_sizes=sizes, kv_checksum="sampled")
        transfer(fleet, 1, 15, 1, 1)


def test_page_sizes_of_which_none_is_a_multiple_are_refused_with_both():
    def side(page_size: int) -> RankLayout:
        return RankLayout(1, KVLayout((1,), 2, 8, page_size, "float32"))

    assert find_mismatch(side(16), side(64)) is None and find_mismatch(side(64), side(16)) is None
    why = find_mismatch(side(24), side(16))
    assert why is not None and "page_size of the KV layout is 16 here and 24 there" in why
