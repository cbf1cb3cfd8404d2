"""Two tensor-parallel ranks take the same decisions, even if they measure differently, and answer as one rank does."""

from __future__ import annotations

import json
from pathlib import Path

from baton.tests.common.scheduler.test_scheduling_engine import (  # noqa: F401 (fixtures)
    HOST,
    PREEMPT,
    Took,
    alone,
    checkpoint,
    make_requests,
)
from baton.tests.helpers.rank_processes import run_ranks

SMALL = {"max_total_tokens": 160, "max_running": 4, "overlap": True}
CASES = [
    SMALL | {"policy": "random", "chunk": 16, "schedule": PREEMPT | {"enable_mixed_chunk": True}},
    SMALL | {"policy": "lpm", "schedule": PREEMPT | HOST, "link_rates": [1e18, 1.0]},
]


def test_ranks_take_the_same_decisions(checkpoint, alone, tmp_path):  # noqa: F811
    script = Path(__file__).with_name("scheduling_rank.py")
    first, second = run_ranks(script, 2, tmp_path, str(checkpoint), *map(json.dumps, CASES))
    for mine, theirs, case in zip(first, second, CASES):
        assert mine["retracted"] > 0 and mine["preempted"] > 0, case
        for what in ("aborted", "retracted", "preempted", "saved"):
            assert mine[what] == theirs[what], (what, case)
        assert {rid: actual["tokens"] for rid, actual in mine["took"].items()} == {
            rid: actual["tokens"] for rid, actual in theirs["took"].items()}
        for rid, prompt, options in make_requests(4, 30):
            assert rid in mine["aborted"] or Took(**mine["took"][rid]) == alone(rid, prompt, options), (rid, case)
    assert first[1]["saved"] < first[1]["retracted"], "one rank's slow link counts for both"
