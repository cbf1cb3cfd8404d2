"""Random steps of {arrive, hit, evict, chunk, accept and refuse drafts, retract, abort, finish, hand over, store,
load}: no state is of other tokens.

``BATON_STATE_STEPS=1000000 pytest tests/common/scheduler/test_state_simulation.py`` takes so many steps of each kind of
server, with fresh seeds from ``BATON_STATE_SEED`` on.
"""

from __future__ import annotations

import os

import pytest

from baton.tests.helpers.state_simulation import StateTraffic

STEPS = int(os.environ.get("BATON_STATE_STEPS", "3000"))
SEED = int(os.environ.get("BATON_STATE_SEED", "0"))
STEPS_A_SEED = 500


@pytest.mark.timeout(60 + STEPS)
@pytest.mark.parametrize("pair,tier", [(False, False), (True, False), (False, True)])
def test_no_state_is_of_other_tokens(pair, tier):
    counts = dict.fromkeys(("num_checked", "num_hits", "num_retracted", "num_ended", "num_handed_over", "num_accepted",
                            "num_refused", "num_loaded"), 0)
    for round_ in range(-(-STEPS // STEPS_A_SEED)):
        traffic = StateTraffic(SEED + 10 * round_, pair=pair, tier=tier)
        for number in range(STEPS_A_SEED):
            traffic.step()
            if number % 50 == 0:
                traffic.decode.finish_step()
                traffic.decode.check_snapshots()
                traffic.decode.cache.check_integrity()
        traffic.end()
        for name in counts:
            counts[name] += getattr(traffic, name)
    assert counts["num_checked"] > 2 * STEPS and counts["num_ended"] > STEPS // 50
    assert counts["num_hits"] > STEPS // 100 or pair
    assert bool(counts["num_loaded"]) == tier and (not tier or counts["num_loaded"] > STEPS // 100)
    assert counts["num_accepted"] > STEPS // 4 and counts["num_refused"] > STEPS // 20
    assert counts["num_retracted"] > 3 and bool(counts["num_handed_over"]) == pair
