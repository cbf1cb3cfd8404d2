"""What attention groups agree on before a step: every rank comes to the same turn by itself."""

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

    told = np.array([[rows, rows, 0, decodes or not rows] for rows, decodes in groups])
    turns = []
    for rank in range(len(groups)):
        across = TPGroup(rank, len(groups))
        across.gather_ints = lambda values: told
        meeting = DPSync(Parallel(TPGroup(rank, len(groups)), TPGroup(), across))
        rows, decodes = groups[rank]
        turn = meeting.agree(rows, rows, decodes=decodes)
        turns.append(turn and turn.replayed(size_for))
    assert all(turn == turns[0] for turn in turns)
    most = max(rows for rows, _ in groups)
    if not most:
        assert turns[0] is None
    elif any(rows and not decodes for rows, decodes in groups) or most > sizes[-1]:
        assert turns[0].size is None and turns[0].tokens == [max(rows, 1) for rows, _ in groups]
    else:
        assert turns[0].size == size_for(most)
        assert turns[0].tokens == turns[0].scored == [turns[0].size] * len(groups)
