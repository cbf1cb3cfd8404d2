"""One rank of test_tp.py: ``tp_rank.py RANK SIZE INIT_METHOD OUT CHECKPOINT``; writes what it computed to OUT."""

from __future__ import annotations

import sys

import numpy as np
import torch

from baton.common.api.sampling import SamplingParams
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.tp import TPGroup, init_tp
from baton.common.request.logit_processors import RequestTokens, RowProcessor
from baton.common.request.sampling_metadata import RequestedLogprobs
from baton.common.request.token_buffer import TokenBuffer
from baton.common.sampling.sampler import Sampler
from baton.kernels.tuning.policy import set_batch_invariant
from baton.tests.helpers import nemotron_family
from baton.tests.helpers.rank_processes import end_rank
from baton.tests.helpers.replayed_prompts import record_again
from baton.tests.helpers.sampling_rows import sampling_row
from baton.tests.helpers.small_models import forward, load_runner, scattered_pages, server_config


def main(rank: int, size: int, init_method: str, out: str, checkpoint: str) -> None:
    torch.set_num_threads(1)
    tp = init_tp(rank, size, init_method, "cpu", timeout=60)
    messages = [b"", b"x" * 4096, bytes(range(256)) * 100]
    received = [tp.broadcast_bytes(message if rank == 0 else None) for message in messages]
    least = tp.min_reduce(np.array([rank, -rank, 5], np.int64))
    runners = {
        "checkpoint": load_runner(server_config(checkpoint, tp=size), Parallel(tp)),
        "dummy": load_runner(server_config(checkpoint, tp=size, load_format="dummy"), Parallel(tp)),
    }
    results = {}
    for name, runner in runners.items():
        tokens = np.random.default_rng(2).integers(0, 97, 30)
        pages = scattered_pages(runner, 1, 30)[0]
        first = forward(runner, [(tokens[:29], 0, pages)])
        last = forward(runner, [(tokens[29:], 29, pages)])
        none = forward(runner, [(tokens[29:], 29, pages)], every_row=False)[:0]
        results[name] = torch.cat((first, last, none))
    replayed = record_again(runners["checkpoint"], [16, 48])
    again = forward(runners["checkpoint"], [(np.random.default_rng(2).integers(0, 97, 30), 0, pages)])
    sampler = Sampler(results["dummy"].shape[1], "cpu", seed=rank, tp=tp)  # unequal seeds: rank 0's choice must win
    rows = [sampling_row(SamplingParams(), i, RequestedLogprobs(1)) for i in range(30)]
    sampled = sampler.sample(results["dummy"].clone(), rows)
    rows = [sampling_row(SamplingParams(), i, processor=failing(rank, i % 2 == 1)) for i in range(30)]
    failed = sampler.sample(results["dummy"].clone(), rows)
    torch.save({"ordered": sums_in_order(tp), "pieces": again, "replayed": replayed, "failed": failed.token_ids,
                "reasons": dict(failed.failures),
                "logits": results, "heads": runner.layout.num_kv_heads, "bytes_equal": received == messages,
                "least": least.tolist(), "tokens": sampled.token_ids}, out)
    end_rank(tp)


def sums_in_order(tp: TPGroup) -> dict[torch.dtype, tuple[torch.Tensor, ...]]:
    """Of three tensors that differ from rank to rank, as a group of deterministic ranks adds them."""
    set_batch_invariant(True)
    group = TPGroup(tp.rank, tp.size, host_group=tp._host_group)
    set_batch_invariant(False)
    return {dtype: tuple(group.all_reduce(part) for part in parts_of(tp.rank, dtype))
            for dtype in (torch.float32, torch.bfloat16)}


def parts_of(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((1, 5), (3, 7), (40, 64))]


assert nemotron_family  # registers a family that a test uses


def failing(rank: int, fails: bool) -> RowProcessor:
    """What chooses runs on rank 0 alone; there it fails on rows that ask for it."""
    def processor(logits: torch.Tensor, params: list[dict]) -> torch.Tensor:
        assert rank == 0
        if any(given["fails"] for given in params):
            raise ValueError("as asked")
        return logits

    return RowProcessor("module:name", processor, {"fails": fails}, RequestTokens(TokenBuffer([]), 0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
