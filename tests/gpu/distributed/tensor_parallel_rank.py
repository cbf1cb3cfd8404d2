"""One rank of test_tensor_parallel.py: ``tensor_parallel_rank.py RANK SIZE INIT_METHOD OUT PART CHECKPOINT``; OUT gets
what it saw."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from baton.common.config.server import KernelArgs
from baton.common.distributed.capture import may_capture
from baton.common.distributed.deferred_reduce import DeferredSum
from baton.common.distributed.parallel import Parallel
from baton.common.distributed.peer_all_reduce import MAX_MESSAGE_BYTES, PeerAllReduce, connect_all
from baton.common.distributed.tp import TPGroup, init_tp
from baton.kernels.rowwise.rmsnorm import rmsnorm
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.rank_processes import SECONDS, end_rank

COUNTS = [8, 4096, 100_000, 64, MAX_MESSAGE_BYTES // 2, 4104]
NORMED = [(1, 4096), (7, 5120), (60, 4096), (99, 2048)]
OF_TWO, NORMED_OF_TWO = [6_000_001], [(600, 2048), (8192, 2048), (2100, 4096)]
"""What two ranks sum, too."""


def main(rank: int, size: int, init_method: str, out: str, part: str, checkpoint: str) -> None:
    group = init_tp(rank, size, init_method, f"cuda:{rank}", timeout=SECONDS / 2)
    parallel = Parallel(group)
    connect_all(parallel)
    seen = {"connected": group.symm_comm is not None, **PARTS[part](parallel, checkpoint)}
    torch.save(seen, out)
    end_rank(group)


def sums(parallel: Parallel, checkpoint: str) -> dict[str, Any]:
    group, peers = parallel.tp, parallel.tp.symm_comm
    seen = {"capture": may_capture(parallel)}
    if peers is not None:
        seen["sums"] = [worst_error(group, peers, dtype) for dtype in (torch.bfloat16, torch.float16)]
        seen["graph"] = worst_in_graph(group, peers)
        seen["equal"] = same_bits(group, peers)
        seen["norms"] = [worst_norm(group, *shape) for shape in NORMED + (NORMED_OF_TWO if group.size == 2 else [])]
    return seen


def tokens(parallel: Parallel, checkpoint: str) -> dict[str, Any]:
    return {name: answers(checkpoint, parallel, kernels)
            for name, kernels in (("eager", EAGER), ("graphs", GRAPHS), ("pieces", PIECES))}


def bfloat16(parallel: Parallel, checkpoint: str) -> dict[str, Any]:
    by_peers = answers(checkpoint, parallel, PIECES, "bfloat16")
    parallel.tp.symm_comm = None
    return {"peers": by_peers, "nccl": answers(checkpoint, parallel, PIECES, "bfloat16")}


PARTS = {"sums": sums, "tokens": tokens, "bfloat16": bfloat16}
EAGER = KernelArgs("triton", disable_cuda_graph=True)
GRAPHS = KernelArgs("triton", cuda_graph_bs=(2, 8), disable_piecewise_cuda_graph=True)
PIECES = KernelArgs("triton", cuda_graph_bs=(2, 8), piecewise_cuda_graph_tokens=(16, 48, 64))


def worst_error(group: TPGroup, peers: PeerAllReduce, dtype: torch.dtype) -> float:
    """Of 300 sums of sizes in turn, each right behind the one before: no rank waits for another in between."""
    generator = torch.Generator(group.device).manual_seed(group.rank)
    counts = COUNTS + (OF_TWO if group.size == 2 else [])
    inputs = [torch.randn(counts[i % len(counts)], device=group.device, generator=generator).to(dtype)
              for i in range(300)]
    wanted = [tensor.float() for tensor in inputs]
    for tensor in wanted:
        dist.all_reduce(tensor, group=group.device_group)
    for tensor in inputs:
        assert peers.can_all_reduce(tensor)
        peers.all_reduce(tensor)
    return max(float((got.float() - want).abs().max()) for got, want in zip(inputs, wanted))


def worst_in_graph(group: TPGroup, peers: PeerAllReduce) -> float:
    """An odd number of sums in a graph, replayed back to back over inputs that change, with sums between replays."""
    static = [torch.zeros(count, device=group.device, dtype=torch.bfloat16) for count in COUNTS[:5]]
    beside = torch.ones(4096, device=group.device, dtype=torch.bfloat16)
    results = []
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for tensor in static:
            copy = tensor.clone()
            peers.all_reduce(copy)
            results.append(copy)
    errors = []
    for turn in range(50):
        for tensor in static:
            tensor.fill_(turn % 7 + group.rank + 1)
        graph.replay()
        if turn % 3 == 0:
            peers.all_reduce(beside.fill_(1.0))
            errors.append((beside - group.size).abs().max())
        want = sum(turn % 7 + rank + 1 for rank in range(group.size))
        errors += [(result - want).abs().max() for result in results]
    return max(float(error) for error in errors)


def same_bits(group: TPGroup, peers: PeerAllReduce) -> bool:
    """Whether every rank has the very same result."""
    mine = torch.randn(200_000, device=group.device).to(torch.bfloat16)
    peers.all_reduce(mine)
    return bool((group.all_gather_rows(mine[None]) == mine).all())


def worst_norm(group: TPGroup, rows: int, width: int) -> float:
    """Of what a norm makes of a pending sum in one kernel, beside NCCL's sum and the norm behind it; infinite where
    ranks differ."""
    generator = torch.Generator(group.device).manual_seed(7)
    weight, residual = (torch.rand(*shape, device=group.device, generator=generator).bfloat16()
                        for shape in ((width,), (rows, width)))
    part = torch.randn(rows, width, device=group.device).bfloat16()
    summed = part.clone()
    dist.all_reduce(summed, group=group.device_group)
    wanted = rmsnorm(summed, weight, 1e-5, residual)
    assert group.symm_comm is not None and group.symm_comm.can_all_reduce_norm(part)
    found = DeferredSum(part, group).add_norm(residual, weight, 1e-5)
    if not all(bool((group.all_gather_rows(one[None]) == one).all()) for one in found):
        return float("inf")
    return max(float((one.float() - other.float()).abs().max()) for one, other in zip(found, wanted))


def answers(checkpoint: str, parallel: Parallel, kernels: KernelArgs, dtype: str = "float32") -> dict[str, list[int]]:
    engine = Engine(checkpoint, page_size=16, max_total_tokens=8192, max_running=8, device=parallel.device, chunk=64,
                    parallel=parallel, kernels=kernels, overlap=True, dtype=dtype)
    if may_capture(parallel):
        assert (engine.runner._decode_graphs is None) == kernels.disable_cuda_graph
        assert (engine.runner.prefill_graphs.graphs is None) != bool(kernels.piecewise_cuda_graph_tokens)
    for i in range(6):
        engine.start(str(i), [(11 * i + j) % 90 + 5 for j in range(5 + 20 * i)], max_new_tokens=24, ignore_eos=True)
    return tokens_of(engine.run())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
