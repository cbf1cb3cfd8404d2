"""Toy drafters whose slots hold hashes of what belongs there: each step fails where one that it may read does not.

HASH stores at a position a hash of its token, the next one and the position, as EAGLE does; PLAIN_HASH leaves the next
token out, as a model of its own does. What a step drafts is stored as garbage after the request's newest token.
"""

from __future__ import annotations

import numpy as np
import torch

from baton.common.api.drafts import Drafts
from baton.common.config.server.speculative import SPECULATIVE_ALGORITHMS
from baton.common.kvcache.layout import KVLayout
from baton.common.speculative.base import Algorithm, Features

KV_HEADS = 2
GARBAGE = -7.0


def hashes(tokens, following, positions, head, layer):
    """[n] float32, exact: of slots at ``positions``; ``following`` are the tokens after ``tokens``."""
    return ((tokens * 31 + following * 17 + positions * 7 + head * 3 + layer) % 65521 + 1).astype(np.float32)


class HashDrafter:
    """``answers`` has what requests will say, by request id; every fourth draft is wrong. ``checked`` counts the slots
    that were compared, ``prompts`` are the chunks of prompts that were computed: request id, first token and end."""

    answers: dict[str, list[int]] = {}  # noqa: RUF012 (shared by both servers of a pair)

    def __init__(self, model, pool):
        self.model, self.pool = model, pool
        self.checked = self.calls = 0
        self.errs = True
        self.prompts = []

    def run(self, step):
        assert (step.features is None) == (self.model.features is None)
        rows = step.batch
        tokens, following = rows.input_ids.numpy(), step.next_ids.numpy()
        positions, pages, offsets = rows.positions.numpy(), rows.page_of_token.numpy(), rows.offset_in_page.numpy()
        self.write(tokens, following, positions, pages, offsets)
        self.prompts += [(chunk.req.rid, chunk.start, chunk.stop) for chunk in step.step.prefill_chunks]
        counts, limits = (dict(zip(step.step.sample_index, each)) for each in (step.counts, step.limits))
        found = []
        for index, req in enumerate(step.step.reqs):
            first, end = rows.qo_indptr_cpu[index:index + 2].tolist()
            right = end - first
            if index in counts:
                right += counts[index] - int(step.step.num_samples[index])
            start = int(positions[first])
            ids = np.concatenate((req.tokens.view(0, start), tokens[first:first + right],
                                  following[first + right - 1:first + right]))
            self.check(req, ids)
            if index in counts:
                found.append(self.draft(req, ids, limits[index]))
        return found

    def write(self, tokens, following, positions, pages, offsets):
        for layer, group in enumerate(self.pool.groups):
            for head in range(self.model.layout.num_kv_heads):
                values = hashes(tokens, following * self.model.shifted, positions, self.model.first_head + head, layer)
                group[pages, 0, 0, head, offsets, 0] = torch.from_numpy(values)
                group[pages, 0, 1, head, offsets, 0] = torch.from_numpy(-values)

    def check(self, req, ids):
        """The slots of all of ``ids`` but the last, which follows them, are right."""
        positions, page_size = np.arange(len(ids) - 1), self.model.layout.page_size
        pages, offsets = req.page_table.ids[positions // page_size], positions % page_size
        for layer, group in enumerate(self.pool.groups):
            for head in range(self.model.layout.num_kv_heads):
                wanted = hashes(ids[:-1], ids[1:] * self.model.shifted, positions, self.model.first_head + head, layer)
                for plane, sign in enumerate((1, -1)):
                    found = group[pages, 0, plane, head, offsets, 0].numpy()
                    wrong = np.flatnonzero(found != sign * wanted)
                    assert not len(wrong), f"{req} reads wrong slots {wrong.tolist()} of {len(positions)}"
        self.checked += len(positions)

    def draft(self, req, ids, limit):
        """Drafts what follows ``ids``, and leaves garbage where its passes would have stored the drafts."""
        if limit <= 0:
            return None
        page_size = self.model.layout.page_size
        positions = np.arange(len(ids) - 1, len(ids) - 1 + limit)
        pages = req.page_table.ids[positions // page_size]
        for group in self.pool.groups:
            group[pages, :, :, :, positions % page_size] = GARBAGE
        known = len(ids) - req.num_prompt_tokens
        drafts = (self.answers.get(req.rid, [])[known:] + [1] * limit)[:limit]
        self.calls += 1
        if self.errs and self.calls % 4 == 0:
            drafts[self.calls % limit] = int(drafts[self.calls % limit] == 0)
        return Drafts(tuple(drafts))


class HashDraftModel:
    """The shifted one asks for hidden states, as EAGLE does, so that only a server with the model can run it."""

    def __init__(self, context, shifted):
        self.features = Features() if shifted else None
        heads, rank = max(1, KV_HEADS // context.parallel.attn_tp.size), context.parallel.attn_tp.rank
        self.shifted = shifted
        self.first_head = rank * KV_HEADS // context.parallel.attn_tp.size
        self.layout = KVLayout(groups=(1, 1), num_kv_heads=heads, head_dim=2,
                               page_size=context.config.cache.page_size, dtype="float32")

    def make_drafter(self, pool, workspace):
        return HashDrafter(self, pool)

    def slots(self):
        return []


SPECULATIVE_ALGORITHMS.register("HASH", traits=("device", "shifted"), hidden=True)(
    Algorithm(load=lambda context: HashDraftModel(context, True)))
SPECULATIVE_ALGORITHMS.register("PLAIN_HASH", traits=("device",), hidden=True)(
    Algorithm(load=lambda context: HashDraftModel(context, False)))
