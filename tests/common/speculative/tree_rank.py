"""One rank of test_tree_steps.py: ``tree_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT``."""

from __future__ import annotations

import sys

import torch

from baton.common.config.server import ParallelArgs
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.tests.common.speculative.test_tree_steps import VOCAB, answers
from baton.tests.helpers.rank_processes import end_rank
from baton.tests.helpers.tree_drafts import TreeOracle


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=60)
    expected = answers(checkpoint)[1]
    oracle = TreeOracle(expected[0], VOCAB)
    _, found = answers(checkpoint, proposer=oracle, max_drafts=9, parallel=Parallel(tp), parts=ParallelArgs(size))
    torch.save({"tokens": found[0], "accepted": oracle.accepted}, out)
    end_rank(tp)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
