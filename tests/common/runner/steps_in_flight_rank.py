"""One rank of test_steps_in_flight.py: ``steps_in_flight_rank.py RANK SIZE INIT_METHOD OUT FOLDER``, each an attention
group of its own. OUT gets the logits of two steps that are planned before either runs, and those of one rank alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.common.config.server import DataParallelArgs, ParallelArgs
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel, init_parallel
from baton.common.forward.forward_batch import ForwardBatch, Row, build_forward_batch
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.host_peers import HostPeers
from baton.tests.helpers.rank_processes import SECONDS, end_rank
from baton.tests.helpers.small_models import load_runner, scattered_pages, server_config
from baton.tests.helpers.steps_in_flight import VOCABULARY, snapshot

COUNTS = [[8, 4], [12, 41]]
"""The prompts' tokens of either rank, in either step."""


def main(rank: int, size: int, init_method: str, out: str, folder: str) -> None:
    torch.set_num_threads(1)
    joined = init_parallel(rank, size, size, init_method, "cpu", timeout=SECONDS / 2, overlap=True)
    cases = [("dense", {}), ("moe", {}), ("moe", {"halves": True}), ("moe", {"a2a": "low_latency"})]
    torch.save([run(Path(folder) / name, joined, **options) for name, options in cases], out)
    end_rank(joined.tp)


def run(checkpoint: Path, joined: Parallel, *, halves: bool = False, a2a: Any = "none") -> dict[str, Any]:
    config = dataclasses.replace(
        server_config(checkpoint), parallel=ParallelArgs(2, ep_size=2, moe_a2a_backend=a2a),
        data_parallel=DataParallelArgs(True, 2, enable_two_batch_overlap=halves, two_batch_min_tokens=4))
    joined.dp.symm_comm = HostPeers(joined.dp) if a2a == "low_latency" else None
    is_moe = checkpoint.name == "moe"
    parallel = Parallel(joined.tp, joined.attn_tp, joined.dp,
                        ExpertParallel(joined.tp, 2, a2a) if is_moe else None, dp_overlap=joined.dp_overlap)
    if not is_moe:
        config = dataclasses.replace(config, parallel=ParallelArgs(2))
    runner = load_runner(config, parallel)
    is_decode = a2a == "low_latency"
    batches = batches_of(runner, parallel.dp_rank, is_decode)
    before = snapshot(runner)
    infos = [runner.sync_dp(batch.num_tokens, batch.num_reqs, can_decode=is_decode) for batch in batches]
    steps = [runner.plan(batch, info) for batch, info in zip(batches, infos)]
    found = [runner.run(step) for step in reversed(steps)][::-1]
    assert all(bool(step.microbatches) == halves for step in steps)
    after = snapshot(runner)
    single = load_runner(server_config(checkpoint))
    return {"name": checkpoint.name, "found": found, "rows": [step.rows.counts for step in steps],
            "changed": [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)],
            "wanted": [single.forward(batch) for batch in batches_of(single, parallel.dp_rank, is_decode)]}


def batches_of(runner: ModelRunner, group: int, is_decode: bool) -> list[ForwardBatch]:
    """Prompts; or decode steps of two and three requests in every group."""
    tokens = np.random.default_rng(group).integers(0, VOCABULARY, (2, 64))
    pages = scattered_pages(runner, 6, 64)
    if is_decode:
        return [build_forward_batch([Row(tokens[step, b:b + 1], 0, pages[3 * step + b]) for b in range(2 + step)],
                                    runner.layout.page_size, runner.device) for step in range(2)]
    return [build_forward_batch([Row(tokens[step, :count[group]], 0, pages[step])], runner.layout.page_size,
                                runner.device) for step, count in enumerate(COUNTS)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
