"""One rank of test_predictors.py: ``predictor_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT``; writes the predictors'
rows to OUT. Each rank has whole experts."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import torch

from baton.common.bench.draft_acceptance import DraftLayers
from baton.common.config.server import ParallelArgs, ServerConfig, SpeculativeArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import init_tp
from baton.common.forward.forward_batch import build_forward_batch
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.rank_processes import end_rank
from baton.tests.helpers.small_models import load_runner, row_of, scattered_pages, server_config

TOKENS = np.random.default_rng(4).integers(0, 131, 40)
"""Of which 2 are only guessed."""


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    world = init_tp(rank, size, init_method, "cpu", timeout=120)
    config = dataclasses.replace(server_config(checkpoint), parallel=ParallelArgs(tp_size=size, ep_size=size))
    runner = load_runner(with_layers(config), Parallel(world, experts=ExpertParallel(world, size)))
    torch.save(rows_by_chunks(runner, 38), out)
    end_rank(world)


def with_layers(config: ServerConfig) -> ServerConfig:
    return dataclasses.replace(config, speculative=SpeculativeArgs(speculative_algorithm="NEXTN"))


def rows_by_chunks(runner: ModelRunner, chunk: int) -> torch.Tensor:
    """``[predictors, 38, hidden]``, of all of TOKENS but the last two."""
    predictors = DraftLayers(runner)
    pages = scattered_pages(runner, 1, len(TOKENS))[0]
    parts = []
    for start in range(0, 38, chunk):
        stop = min(start + chunk, 38)
        batch = build_forward_batch([row_of(runner, TOKENS[start:stop], start, pages)], runner.layout.page_size,
                                    runner.device, list(range(stop - start)))
        following = np.stack([TOKENS[start + k:stop + k] for k in range(1, len(predictors) + 1)])
        hidden = runner.hidden_states(batch)
        rows = predictors.hidden_states(batch, hidden, torch.from_numpy(following).to(runner.device))
        parts.append(torch.stack(rows))
    return torch.cat(parts, dim=1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
