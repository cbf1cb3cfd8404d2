"""One rank of test_tier_prefetch.py: ``tier_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT``."""

from __future__ import annotations

import sys

import numpy as np
import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.tests.common.scheduler.test_tier_prefetch import ask, fill_storage, some_prompts, stored_engine
from baton.tests.helpers.hand_driven import tokens_of
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=120)
    faults = {"rng": np.random.default_rng(1), "max_delay": 7, "fail_share": 0.2, "pages_a_step": 3} if rank else {}
    engine = stored_engine(checkpoint, "timeout", group=tp, options={"parallel": Parallel(tp)}, **faults)
    first = tokens_of(fill_storage(engine))
    objects = engine.storage.objects
    if rank:
        for key in [*objects][::5]:
            del objects[key]
    loads, kept = engine.scheduler.batcher.loads, len(objects)
    outputs = ask(engine, some_prompts())
    torch.save({"first": first, "again": tokens_of(outputs), "objects": kept,
                "hits": {item.rid: item.num_cached_tokens for item in outputs},
                "loaded": loads.num_loaded, "stored": loads.num_loaded_stored}, out)
    end_rank(tp)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
