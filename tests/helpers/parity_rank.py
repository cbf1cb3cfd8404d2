"""One rank of acceptance_parity.tensor_parallel: ``parity_rank.py RANK SIZE INIT_METHOD OUT FILE``."""

from __future__ import annotations

import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.tests.helpers.flag_engine import FlagEngine
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, path: str) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=120)
    flags, asked = pickle.loads(Path(path).read_bytes())
    engine = FlagEngine("--tp-size", str(size), *flags, parallel=Parallel(tp))
    torch.save([asdict(answer) for answer in engine.answers(asked)], out)
    end_rank(tp)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
