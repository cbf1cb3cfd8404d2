"""One rank of acceptance_parity's engines of several: ``parity_rank.py RANK SIZE INIT_METHOD OUT FILE``. With
--enable-dp-attention each rank is an attention group, and answers its share of the questions."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from baton.common.distributed.parallel import Parallel, init_parallel
from baton.tests.helpers.chains_on_cpu import chains_on_cpu
from baton.tests.helpers.flag_engine import Answer, FlagEngine, Question
from baton.tests.helpers.rank_processes import end_rank


def main(rank: int, size: int, init_method: str, out: str, path: str) -> None:
    torch.set_num_threads(1)
    flags, asked, chains = pickle.loads(Path(path).read_bytes())
    parallel = init_parallel(rank, size, size if "--enable-dp-attention" in flags else 1, init_method, "cpu",
                             timeout=120)
    with chains_on_cpu() if chains else nullcontext():
        engine = FlagEngine("--tp-size", str(size), *flags, parallel=parallel)
        answers = _group_answers(engine, parallel, asked) if parallel.dp_size > 1 else engine.answers(asked)
    torch.save([asdict(answer) for answer in answers], out)
    end_rank(parallel.world)


def _group_answers(engine: FlagEngine, parallel: Parallel, asked: Sequence[Question]) -> list[Answer]:
    """The answers to the share of this rank's attention group; all ranks step until all are idle."""
    own = asked[parallel.dp_rank::parallel.dp_size]
    for number, question in enumerate(own):
        engine.start(str(number), question)
    while parallel.dp.gather_ints(np.array([not engine.scheduler.idle])).any():
        engine.step()
    return engine.finish(len(own), idle=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
