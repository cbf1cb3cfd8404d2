"""One rank of test_scheduling_ranks.py: ``scheduling_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT CASE...``.

Cases are JSON objects: options of the engine. OUT gets the results of each case, and the rank's decisions.
"""

from __future__ import annotations

import json
import sys

import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.tests.common.scheduler.test_scheduling_engine import VOCABULARY, drive, make_requests, took
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str, cases: list[dict]) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=120)
    torch.save([run(rank, Parallel(tp), checkpoint, case) for case in cases], out)
    end_rank(tp)


def run(rank: int, parallel: Parallel, checkpoint: str, case: dict) -> dict:
    link_rates = case.pop("link_rates", None)
    engine = Engine(checkpoint, parallel=parallel, vocabulary=VOCABULARY, **case)
    batcher = engine.scheduler.batcher
    if batcher.swap is not None:
        batcher.rates._link_bandwidth = link_rates[rank]
    messages, aborted = drive(engine, list(make_requests(4, 30)), 4, abort_share=0.03)
    results = {rid: vars(result) for rid, result in took(messages).items()}
    return {"took": results, "aborted": sorted(aborted), "retracted": batcher.retraction.num_retracted,
            "preempted": batcher.retraction.num_preempted, "saved": batcher.swap.num_swapped_out if batcher.swap else 0}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], [json.loads(case) for case in sys.argv[6:]])
