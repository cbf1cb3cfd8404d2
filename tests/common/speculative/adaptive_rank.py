"""One rank of test_adaptive_engine.py: ``adaptive_rank.py RANK SIZE INIT_METHOD OUT FOLDER``. Drafts pay by the costs
that rank 0 measures and do not by those of the others; writes tokens, and how many drafts of them were verified."""

from __future__ import annotations

import sys
from unittest import mock

import torch

from baton.common.distributed.parallel import init_parallel
from baton.common.engine import rank as engine_rank
from baton.tests.common.speculative.test_adaptive_engine import DEAR, FREE, run
from baton.tests.helpers.hand_driven import Engine
from baton.tests.helpers.rank_processes import end_rank
from baton.tests.helpers.toy_proposer import RepeatLastTokens


def main(rank: int, size: int, init_method: str, out: str, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = init_parallel(rank, size, 1, init_method, "cpu", timeout=120)
    engine = Engine(folder, parallel=parallel, proposer=RepeatLastTokens())
    with mock.patch.object(engine_rank, "measure_costs", lambda *args, **options: DEAR if rank else FREE):
        engine.drafting.adapt(engine_rank._draft_length(engine.config, engine.executor, engine.runner, engine.cache,
                                                        parallel.attn_tp, on_device=False))
    torch.save((run(engine), engine.drafting.num_steps, engine.drafting.num_drafted), out)
    end_rank(parallel.world)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
