"""What attention groups agree on before a step: every rank comes to the same info by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup
from baton.common.runner.dp_sync import DPSync


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6),
       st.sets(st.integers(1, 32), min_size=1).map(sorted))
def test_either_all_groups_replay_one_size_or_none_does(groups, sizes):
    def size_for(rows):
        return next((size for size in sizes if size >= rows), None)

    gathered = np.array([[rows, rows, 0, decodes or not rows] for rows, decodes in groups])
    infos = []
    for rank in range(len(groups)):
        dp = TPGroup(rank, len(groups))
        dp.gather_ints = lambda values: gathered
        dp_sync = DPSync(Parallel(TPGroup(rank, len(groups)), TPGroup(), dp))
        rows, decodes = groups[rank]
        info = dp_sync.sync(rows, rows, can_decode=decodes)
        infos.append(info and info.padded_to_graph(size_for))
    assert all(info == infos[0] for info in infos)
    most = max(rows for rows, _ in groups)
    if not most:
        assert infos[0] is None
    elif any(rows and not decodes for rows, decodes in groups) or most > sizes[-1]:
        assert infos[0].graph_size is None and infos[0].num_tokens == [max(rows, 1) for rows, _ in groups]
    else:
        assert infos[0].graph_size == size_for(most)
        assert infos[0].num_tokens == infos[0].num_logits == [infos[0].graph_size] * len(groups)
