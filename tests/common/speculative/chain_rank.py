"""One rank of test_draft_chains.py: ``chain_rank.py RANK SIZE INIT_METHOD OUT FOLDER``; writes its drafts to OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from baton.common.distributed.parallel import init_parallel
from baton.tests.common.speculative.test_draft_chains import drafts_by_each
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = init_parallel(rank, size, 1, init_method, "cpu", timeout=120)
    torch.save(drafts_by_each(Path(folder), size, parallel), out)
    end_rank(parallel.world)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
