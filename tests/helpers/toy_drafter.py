"""A toy algorithm whose drafter is on the device: it repeats what followed the newest token before."""

from __future__ import annotations

import os

import numpy as np

from baton.common.api.drafts import Drafts
from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS
from baton.common.kvcache.layout import KVLayout
from baton.common.speculative.base import Algorithm


class ToyDraftModel:
    """A draft model without weights."""

    features, shifted = None, False

    def __init__(self, context):
        self.page_size = context.config.cache.page_size
        self.layout = KVLayout(groups=(1,), num_kv_heads=1, head_dim=2, page_size=self.page_size, dtype="float32")

    @classmethod
    def load(cls, context):
        return cls(context)

    def slots(self):
        return []

    def make_drafter(self, pool, workspace):
        return ToyDrafter(pool, self.page_size)


class ToyDrafter:
    """Stores each token and its position in its pool, reads all of a request's back, and finds drafts there. It counts
    accepted tokens in the file that TOY_DRAFTER_FILE names."""

    def __init__(self, pool, page_size):
        self.pool, self.page_size = pool, page_size
        self.accepted, self.file = 0, os.environ.get("TOY_DRAFTER_FILE")

    def run(self, step):
        batch, (keys, _) = step.batch, self.pool.layer(0)
        stored = np.stack([batch.input_ids.numpy(), batch.positions.numpy()], -1)
        rows = keys.numpy()  # [pages, 1, page_size, 2]
        rows[batch.page_of_token.numpy(), 0, batch.offset_in_page.numpy()] = stored
        found = [self.draft(step, rows, *each) for each in zip(step.step.sample_index, step.counts, step.limits)]
        self.accepted += sum(step.counts) - len(step.counts)
        if self.file and step.limits:
            with open(self.file, "w") as file:
                print(self.accepted, file=file)
        return found

    def draft(self, step, rows, index, count, limit):
        batch, given = step.batch, step.step
        begin, stop = batch.kv_indptr_cpu[index:index + 2]
        end = int(given.starts[index] + given.q_lens[index] - given.num_samples[index]) + count
        tokens, positions = rows[batch.kv_indices_cpu[begin:stop], 0].reshape(-1, 2)[:end].T.astype(int)
        assert positions.tolist() == list(range(end)), "the drafter was not shown all rows"
        first = int(batch.qo_indptr_cpu[index + 1]) - int(given.num_samples[index])
        newest = int(step.next_ids[first + count - 1])
        places = np.flatnonzero(tokens[:-1] == newest)
        if not limit or not len(places):
            return None
        drafts = np.append(tokens, newest)[places[-1] + 1:][:limit].tolist()
        return Drafts(tuple(drafts)) if drafts else None


SPECULATIVE_ALGORITHMS.register("TOY_DEVICE", traits=("device",))(Algorithm(load=ToyDraftModel.load))
