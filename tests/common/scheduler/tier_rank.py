"""One rank of test_tier_loads.py: ``tier_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT``; writes its answers to OUT."""

from __future__ import annotations

import sys

import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.tests.common.scheduler.test_tier_loads import ask_all, tiered
from baton.tests.helpers.hand_driven import tokens_of
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=120)
    engine = tiered(checkpoint, ("dict", "slow-dict")[rank], parallel=Parallel(tp))
    first = tokens_of(ask_all(engine))
    tier = engine.cache.tier
    if rank:
        tier.free(list(tier.pages)[::5])
    kept = tier.num_pages
    outputs = ask_all(engine)
    torch.save({"first": first, "again": tokens_of(outputs), "kept": kept,
                "hits": {item.rid: item.num_cached_tokens for item in outputs},
                "loaded": engine.scheduler.batcher.loads.num_loaded}, out)
    end_rank(tp)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
