"""One of several ranks that share GPUs: ``shared_rank.py RANK SIZE INIT_METHOD OUT DEVICE CASE...``, each case a JSON
object with a checkpoint, a dtype, an attention backend and ``ep``, the parts that experts are spread over. OUT gets the
logits of each, and those in bfloat16 once more, summed through each other's memory."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import torch

from baton.common.config.server import ParallelArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup, init_tp
from baton.tests.gpu.distributed.ipc_buffers import ipc_sums
from baton.tests.helpers.rank_processes import SECONDS, end_rank, place_of
from baton.tests.helpers.small_models import forward, load_runner, scattered_pages, server_config

TOKENS = np.random.default_rng(2).integers(0, 97, 60)


def main(rank: int, size: int, init_method: str, out: str, device: str, cases: list[dict]) -> None:
    torch.set_num_threads(1)
    place, backend = place_of(rank, device)
    world = init_tp(rank, size, init_method, place, timeout=SECONDS / 2, backend=backend)
    seen = {"moved": moved(world), "logits": [logits_of(world, **case) for case in cases]}
    if world.device.type == "cuda":
        world.symm_comm = ipc_sums(world)
        seen["peers"] = [logits_of(world, **case) for case in cases if case["dtype"] == "bfloat16"]
    torch.save(seen, out)
    end_rank(world)


def logits_of(world: TPGroup, checkpoint: str, dtype: str, backend: str, ep: int = 1) -> torch.Tensor:
    """Of a prompt in two chunks and a decode step."""
    config = server_config(checkpoint, backend=backend, dtype=dtype)
    config = dataclasses.replace(config, parallel=ParallelArgs(world.size, ep_size=ep))
    runner = load_runner(config, Parallel(world, experts=ExpertParallel(world, ep)), world.device)
    pages = scattered_pages(runner, 1, 60)[0]
    return torch.cat([forward(runner, [(TOKENS[:37], 0, pages)]), forward(runner, [(TOKENS[37:59], 37, pages)]),
                      forward(runner, [(TOKENS[59:], 59, pages)])]).cpu()


def moved(world: TPGroup) -> list[bool]:
    """Whether each collective brings what it should, in every type that models have."""
    size, found = world.size, []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = torch.full((3 * size, 5), world.rank + 1.0, dtype=dtype, device=world.device)
        total = sum(range(1, size + 1))
        ranks = torch.arange(1, size + 1, device=world.device, dtype=dtype).repeat_interleave(3)[:, None]
        found += [bool((world.reduce_scatter_rows(mine) == total).all()),
                  bool((world.start_reduce_scatter(mine).rows() == total).all()),
                  torch.equal(world.all_gather_rows(mine[:3]), ranks.expand(-1, 5)),
                  torch.equal(world.start_all_gather(mine[:3]).rows(), ranks.expand(-1, 5)),
                  torch.equal(world.all_to_all_rows(mine, [3] * size, [3] * size), ranks.expand(-1, 5)),
                  bool((world.broadcast(mine.clone(), src=1) == 2).all()),
                  bool((world.all_reduce(mine) == total).all()) and bool((mine == total).all())]
        found.append(all(part.device == world.device for part in (world.all_gather_rows(mine), mine)))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], [json.loads(case) for case in sys.argv[6:]])
