"""Pages that arrive damaged are noticed, and fail their request on both sides and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.api.errors import TransferFailed
from baton.kvtransfer.backends.base import Region
from baton.kvtransfer.checksum import SAMPLED_WORDS, Checksum, block_positions, make_checksum, resolve_extent
from baton.kvtransfer.protocol.states import Phase
from baton.tests.kvtransfer.conftest import BACKENDS


def of(checksum, extent, group, page_ids, first):
    """Of whole pages that hold the prompt's pages ``first`` onwards."""
    places = block_positions(group, 1, first, len(page_ids), np.zeros(1, np.int64))
    return checksum.compute(extent, group, 1, page_ids, places)


WORDS = 7 * SAMPLED_WORDS + 3  # sampling does not come out even


@pytest.fixture
def pool():
    return np.random.default_rng(5).integers(0, 2**64, (12, WORDS), dtype=np.uint64)


@pytest.mark.parametrize("extent", ["sampled", "full"])
def test_parts_add_up_and_torch_agrees(pool, extent):
    ids = np.array([3, 0, 7, 11, 2])
    region = Region(pool.ctypes.data, pool.nbytes, -1)
    checksum = make_checksum([region], [len(pool)])
    whole = of(checksum, extent, 0, ids, 4)
    assert 0 < whole < 2**64
    assert (of(checksum, extent, 0, ids[:2], 4) + of(checksum, extent, 0, ids[2:], 6)) % 2**64 == whole
    assert of(Checksum([torch.from_numpy(pool.view(np.int64))]), extent, 0, ids, 4) == whole


def test_pages_are_read_in_chunks_with_equal_sums(pool, monkeypatch):
    whole = of(Checksum([pool]), "full", 0, np.arange(12), 0)
    monkeypatch.setattr("baton.kvtransfer.checksum._CHUNK_WORDS", 2 * WORDS)
    for words in (pool, torch.from_numpy(pool.view(np.int64))):
        assert of(Checksum([words]), "full", 0, np.arange(12), 0) == whole


@pytest.mark.parametrize("extent", ["sampled", "full"])
def test_swapped_missing_and_changed_pages_show(pool, extent):
    checksum = Checksum([pool, pool])
    ids = np.array([1, 2, 3])
    whole = of(checksum, extent, 0, ids, 0)
    others = [of(checksum, extent, 0, np.array(wrong), 0) for wrong in ([1, 3, 2], [1, 2, 4], [1, 2], [1, 2, 2])]
    others += [of(checksum, extent, 1, ids, 0), of(checksum, extent, 0, ids, 1)]
    assert whole not in others and len(set(others)) == len(others)
    pool[2] = 0
    assert of(checksum, extent, 0, ids, 0) != whole


def test_full_sees_every_bit_and_sampled_a_few(pool):
    checksum, ids = Checksum([pool]), np.array([1])
    full, sampled, seen = of(checksum, "full", 0, ids, 0), of(checksum, "sampled", 0, ids, 0), 0
    for word in range(WORDS):
        pool[1, word] ^= np.uint64(1 << 63 >> word % 64)
        assert of(checksum, "full", 0, ids, 0) != full
        seen += of(checksum, "sampled", 0, ids, 0) != sampled
        pool[1, word] ^= np.uint64(1 << 63 >> word % 64)
    assert SAMPLED_WORDS <= seen < WORDS / 4
    assert of(checksum, "off", 0, ids, 0) == 0


def test_the_default_reads_host_memory_only():
    assert resolve_extent("auto", [Region(0, 0, -1)]) == "sampled"
    assert resolve_extent("auto", [Region(0, 0, 0)]) == "off"
    assert resolve_extent("full", [Region(0, 0, 0)]) == "full"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extent", ["sampled", "full", "off"])
def test_right_pages_pass(make_pair, backend, extent):
    pair = make_pair(backend, kv_checksum=extent)
    for room in range(3):
        pair.transfer(room)


@pytest.mark.parametrize("extent", ["sampled", "full"])
def test_a_page_that_did_not_arrive_fails_the_request_and_no_other(make_pair, extent):
    pair = make_pair("fake", kv_checksum=extent)
    pair.sender._backend.lose_pages = 1
    pair.reserve(1)
    pair.expect(1)
    pair.until(1, Phase.RESERVED)
    pair.push_all(1)
    pair.finish(1)
    pair.until(1, Phase.DONE, endpoint=pair.sender)
    pair.until(1, Phase.FAILED, endpoint=pair.receiver)
    assert isinstance(pair.receiver.error(1), TransferFailed) and "arrived damaged" in pair.receiver.error(1).message
    pair.sender.forget(1)
    pair.receiver.forget(1)
    pair.transfer(1)


def test_without_checksums_a_lost_page_is_not_noticed(make_pair):
    """What the checksum is for."""
    pair = make_pair("fake", kv_checksum="off")
    pair.sender._backend.lose_pages = 1
    pair.transfer(1)
    assert not pair.target[0][2].any() and pair.target[1][2].any()
