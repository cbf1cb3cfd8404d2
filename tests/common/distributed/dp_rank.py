"""One rank of test_dp.py: ``dp_rank.py RANK SIZE INIT_METHOD OUT DP_SIZE DEVICE CASE...``, each case a JSON object.

A case has a checkpoint, the prompts of each data-parallel rank, and options of the engine, ``sizes`` among them: of the
decode steps that are padded, on a GPU those of CUDA graphs, of which there are none without it. OUT gets the tokens of
every prompt of this rank, and what was seen on the way. With ``peers`` the GPUs exchange rows through each other's
memory, from that case on, and ranks on a CPU have HostPeers. With ``halves`` steps of
prompts are cut in two, with ``pieces`` they replay what is recorded for these sizes.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from baton.common.config.server import DataParallelArgs, KernelArgs, ParallelArgs
from baton.common.distributed.deferred_reduce import DeferredSum
from baton.common.distributed.expert_parallel import ExpertParallel
from baton.common.distributed.parallel import Parallel, init_parallel
from baton.common.distributed.peer_all_reduce import connect_all
from baton.tests.helpers.hand_driven import Engine, tokens_of
from baton.tests.helpers.host_peers import HostPeers
from baton.tests.helpers.outputs import outputs_of
from baton.tests.helpers.padded_steps import PaddedSteps
from baton.tests.helpers.rank_processes import SECONDS, end_rank, place_of
from baton.tests.helpers.replayed_prompts import record_again


def main(rank: int, size: int, init_method: str, out: str, dp_size: int, device: str, cases: list[dict]) -> None:
    torch.set_num_threads(1)
    place, backend = place_of(rank, device)
    joined = init_parallel(rank, size, dp_size, init_method, place, timeout=SECONDS / 2, overlap=True, backend=backend)
    seen = {"exchanges": check_exchange(joined), "cases": [run(case, joined) for case in cases]}
    torch.save(seen, out)
    end_rank(joined.tp)


def check_exchange(parallel: Parallel) -> list[bool]:
    """Whether rows come together in order and part again, for parts of every kind of sizes."""
    found = []
    for counts in ([3, 3], [5, 2], [0, 4], [40, 1], [1, 0]):
        counts = (counts * parallel.dp_size)[:parallel.dp_size]
        parts = [torch.arange(count * 6.0, device=parallel.device).view(count, 6) + 1000 * i
                 for i, count in enumerate(counts)]
        whole = torch.cat(parts)

        def compute(x: torch.Tensor, whole=whole) -> torch.Tensor:
            assert torch.equal(x, whole)
            return x * 2

        rows = parallel.token_exchange.step(counts)
        mine = parts[parallel.dp_rank]
        share = (parallel.tp.rank + 1) / sum(range(1, parallel.tp.size + 1))  # of the sum, this rank's
        summed = parallel.token_exchange.apply_partial(lambda x: compute(x) * share, lambda x: (x, None), mine, rows)  # noqa: B023
        if isinstance(summed, DeferredSum):
            summed = summed.reduce()
        found.append(torch.equal(parallel.token_exchange.apply(compute, mine, rows), mine * 2)
                     and torch.allclose(summed, mine * 2))
    rows = parallel.token_exchange.step([0] * parallel.dp_size)
    none = torch.empty(0, 6, device=parallel.device)
    found.append(parallel.token_exchange.apply(lambda x: x, none, rows).shape == (0, 6))
    return found


def run(case: dict, joined: Parallel) -> dict:
    experts = ExpertParallel(joined.tp, *case.pop("experts", ()), whole_dense=case.pop("whole_dense", False))
    parallel = Parallel(joined.tp, joined.attn_tp, joined.dp, experts,
                        dp_head=case.pop("dp_head", False), dp_overlap=joined.dp_overlap)
    if case.pop("peers", False):
        if joined.device.type == "cpu":
            joined.dp.symm_comm = HostPeers(joined.dp)
        elif joined.tp.through_host:
            from baton.tests.gpu.distributed.ipc_buffers import ipc_sums
            joined.tp.symm_comm = ipc_sums(joined.tp, slots=200)
        connect_all(parallel, rows=200)
        assert joined.dp.symm_comm is not None
    meeting = watch_low_latency(parallel)
    prompts, sizes = case.pop("prompts")[parallel.dp_rank], tuple(case.pop("sizes", ()))
    backend = "triton" if parallel.device.type == "cuda" else "auto"
    pieces = tuple(case.pop("pieces", ()))
    kernels = KernelArgs(backend, disable_cuda_graph=not sizes and not pieces, cuda_graph_bs=sizes,
                         disable_piecewise_cuda_graph=not pieces, piecewise_cuda_graph_tokens=pieces)
    groups = DataParallelArgs(True, parallel.dp_size, enable_two_batch_overlap=case.pop("halves", False),
                              two_batch_min_tokens=4)
    engine = Engine(case.pop("checkpoint"), parallel=parallel, device=parallel.device, kernels=kernels, groups=groups,
                    parts=ParallelArgs(parallel.tp.size), **case)
    cut = watch_microbatches(engine)
    replayed = watch_replays(engine, sizes)
    pieces_of = watch_pieces(engine, list(pieces))
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt, max_new_tokens=8 + 5 * i)
    turns = computed = 0
    while parallel.dp.gather_ints(np.array([not engine.scheduler.idle])).any():
        turns += 1
        computed += engine.scheduler.step(0.0)
        engine.tracker.flush()
    assert not engine.tracker.live and engine.cache.num_allocated == 0
    engine.cache.check_integrity()
    outputs = outputs_of(engine.sent)
    tokens = tokens_of(outputs)
    first_mlp = next(iter(engine.runner._model.layers[0].mlp.slots()))
    return {"first_mlp": tuple(first_mlp.target.shape),
            "tokens": [tokens[str(i)] for i in range(len(prompts))], "turns": turns, "computed": computed,
            "retracted": engine.scheduler.batcher.retraction.num_retracted, "replayed": replayed, "met": meeting,
            "cut": cut, "pieces": pieces_of,
            "connected": (all_to_all := parallel.token_exchange.all_to_all) is not None and all_to_all.connected}


def watch_low_latency(parallel: Parallel) -> list[list[int]]:
    """Which rows of every norm that gathers the rows of all groups are tokens; on a GPU, which is not asked while it
    captures, how many there are."""
    seen: list[list[int]] = []
    exchange = parallel.token_exchange.low_latency
    if exchange is None:
        return seen
    can_gather = exchange.can_gather

    def watched(x, rows):
        gathers = can_gather(x, rows)
        if gathers:
            live = rows.live
            seen.append([] if live is None else [len(live)] if live.is_cuda else live.int().tolist())
        return gathers

    exchange.can_gather = watched
    return seen


def watch_microbatches(engine: Engine) -> list[list[int]]:
    """Rows of the micro-batches of every step that will be split."""
    seen: list[list[int]] = []
    if engine.runner._two_batch_overlap is not None:
        plan = engine.runner._two_batch_overlap.plan

        def watched(batch, counts):
            microbatches = plan(batch, counts)
            seen.append([one.stop - one.start for one in microbatches])
            return microbatches

        engine.runner._two_batch_overlap.plan = watched
    return seen


def watch_pieces(engine: Engine, sizes: list[int]) -> list[tuple[int, list[int]]]:
    """The size of every step in pieces, and the tokens of all groups in it."""
    runner, seen = engine.runner, []
    if not sizes:
        return seen
    if runner.device.type == "cpu":
        record_again(runner, sizes)
    step = runner.prefill_graphs.graphs.step

    def watched(size, tokens, own):
        seen.append((size, list(tokens)))
        return step(size, tokens, own)

    runner.prefill_graphs.graphs.step = watched
    return seen


def watch_replays(engine: Engine, sizes: tuple[int, ...]) -> list[int]:
    """The size of every decode step that will run as a graph, or padded as one."""
    runner = engine.runner
    if not sizes:
        return []
    if runner.device.type == "cpu":
        runner._decode_graphs = PaddedSteps(runner, sizes)
        return runner._decode_graphs.replayed
    replayed: list[int] = []
    graphs = runner._decode_graphs
    decode = graphs.decode

    def watched_decode(step, size):
        replayed.append(size)
        return decode(step, size)

    graphs.decode = watched_decode
    return replayed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]), sys.argv[6],
         [json.loads(case) for case in sys.argv[7:]])
