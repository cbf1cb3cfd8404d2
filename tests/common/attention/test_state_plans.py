"""Plans of steps over recurrent states."""

from __future__ import annotations

import numpy as np
import torch

from baton.common.attention.hybrid_backend import StateBackend
from baton.common.forward.forward_batch import Row, build_forward_batch
from baton.common.kvcache.layout import KVLayout
from baton.common.kvcache.pool import KVPool
from baton.kernels.arguments import StateRuns

CPU = torch.device("cpu")


def test_a_replayed_decode_step_reads_the_page_tables_of_its_replay():
    """A graph is captured from the first layer on, with a plan from before, and replayed with other page tables."""
    pool = KVPool(KVLayout((1,), 1, 2, 4, "float32", "state", layers=(0,), retained_tokens=2), 8, CPU)
    rows = [Row([5], 3, np.array([2]), further=[np.array([2])]), Row([5], 4, np.array([1, 3]),
                                                                     further=[np.array([1, 3])])]
    batch = build_forward_batch(rows, 4, CPU)
    plan = StateBackend(pool, 1, [0]).plan(batch)
    batch.in_group(1).kv_indices.copy_(torch.tensor([6, 7, 5]))
    seen: list[StateRuns] = []
    plan.run(0, lambda states, runs: seen.append(runs))
    assert seen[0].targets.tolist() == [6, 5]
    assert seen[0].sources.tolist() == [6, 7]  # the second is the first of a page
