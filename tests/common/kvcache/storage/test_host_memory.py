"""A storage behind real host tiers: KV tensors of ranks come back in ranks of another number, in other layer groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.common.kvcache.storage.fingerprint import StoredPool
from baton.common.kvcache.storage.open import open_storage, page_shape
from baton.common.kvcache.tiers.base import TierContext
from baton.common.kvcache.tiers.host import HostTier
from baton.tests.helpers.stored_pages import DIGEST, key_of, query, wait_until

HEADS, DRAFT_HEADS, LAYERS, PAGES = 4, 2, 5, 6
KEYS = [key_of(i) for i in range(PAGES)]


class Rank:
    """Pools, host tier and file storage of one rank."""

    def __init__(self, folder, rank, size, groups, latent=False):
        form, heads = ("latent", 1) if latent else ("heads", max(1, HEADS // size))
        self.layout = KVLayout(groups, heads, 8, 4, "float32", form)
        self.draft_layout = KVLayout((1,), max(1, DRAFT_HEADS // size), 4, 4, "float32")
        self.rank, self.size, self.latent = rank, size, latent
        self.pool, self.draft = KVPool(self.layout, 16, "cpu"), KVPool(self.draft_layout, 16, "cpu")
        self.host = HostTier(TierContext(self.pool, 1 << 20, "--hicache-size", self.draft))
        shape = page_shape([StoredPool(self.layout, HEADS), StoredPool(self.draft_layout, DRAFT_HEADS, True)], rank,
                           size)
        self.storage = self.open(folder, shape)

    def open(self, folder, shape):
        options = {"storage_dir": str(folder), "min_free_space": 0, "stall_seconds": 30}
        return open_storage("file", options, self.host, DIGEST, shape)

    def parts(self, page_ids):
        """Views ``[pages, layers, planes, heads, tokens, elements]`` of both pools, and the model's of these pages."""
        model = torch.Generator().manual_seed(3)
        for pool, heads in ((self.pool, 1 if self.latent else HEADS), (self.draft, DRAFT_HEADS)):
            layout = pool.layout
            whole = torch.randn((PAGES, layout.num_layers, layout.planes, heads, 4, layout.head_dim), generator=model)
            first = self.rank * heads // self.size
            own = whole[:, :, :, first:first + layout.num_kv_heads]
            begin = 0
            for group in pool.groups:
                yield group, page_ids, own[:, begin:begin + group.shape[1]]
                begin += group.shape[1]

    def write(self):
        ids = np.arange(3, 3 + PAGES)
        for group, pages, content in self.parts(ids):
            group[pages] = content
        self.host.store(KEYS, ids)
        self.host.flush()
        self.host.poll()
        wait_until(lambda: not self.storage.num_queued_writes)

    def read(self):
        assert query(self.storage, [*KEYS, key_of(99)]) == PAGES
        slots = self.host.reserve(PAGES)
        read = self.storage.read(KEYS, slots)
        wait_until(lambda: read.done)
        assert read.num_pages == PAGES and self.host.lookup(KEYS) == 0
        self.host.publish(KEYS, slots)
        ids = np.array([9, 2, 5, 4, 12, 7])
        task = self.host.load(KEYS, ids)
        task.wait()
        self.host.finish(task)
        assert all(torch.equal(group[pages], content) for group, pages, content in self.parts(ids))


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("writers, readers", [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)])
def test_pages_come_back_in_ranks_of_another_number(tmp_path, writers, readers, latent):
    ranks = [Rank(tmp_path, rank, writers, (2, 3), latent) for rank in range(writers)]
    for rank in ranks:
        rank.write()
    others = [Rank(tmp_path, rank, readers, (1, 1, 3), latent) for rank in range(readers)]
    for rank in others:
        rank.read()
    for rank in (*ranks, *others):
        rank.storage.close()
        rank.host.close()
