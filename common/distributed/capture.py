"""Whether a CUDA graph may hold a rank's collectives."""

from __future__ import annotations

import logging

import torch

from .parallel import Parallel
from .tp import TPGroup

log = logging.getLogger("baton.engine")

_SIZES = (2048, 600_000)


def may_capture(parallel: Parallel) -> bool:
    """Whether a decode step of these ranks can be captured: tried with several ranks, once, by all of them together.

    Not where the host decides in every step what is sent: with experts by all-to-all; nor between the stages of a
    pipeline; nor where attention groups' tokens are counted by expert, for padding to a common size would count too;
    nor through host memory.
    Experts that move do so in place, between steps. A sentence in the log tells of a trial that failed. All ranks get
    the same answer.
    """
    experts = parallel.experts
    if parallel.stages.size > 1 or parallel.world.through_host:
        return False
    if parallel.world.size == 1:
        return True
    waits = experts.spreads and not (experts.sent is not None and experts.sent.connected)
    if waits or (parallel.dp_size > 1 and experts.counted):
        return False
    trouble = None
    for group in {id(group): group for group in (parallel.world, parallel.attention, parallel.across)}.values():
        if group.size > 1 and trouble is None:
            trouble = _trouble(group, group.size == parallel.dp_size)
    fine = parallel.world.all_true(trouble is None)
    if not fine:
        log.warning("Decode steps run without CUDA graphs: %s.", trouble or "other ranks cannot capture theirs")
    return fine


def may_capture_prompts(parallel: Parallel, rows: int) -> bool:
    """Whether pieces of prompts' steps of so many rows of each attention group can be captured where ``may_capture``:
    not where padding would be counted by expert, or sent to one that has moved; nor where so many rows reach experts
    by what the host waits for."""
    experts = parallel.experts
    if experts.counted or experts.movable:
        return False
    return not experts.spreads or (experts.sent is not None and experts.sent.fits(rows))


def _trouble(group: TPGroup, sends: bool) -> str | None:
    """Capture sums and gathers, through peers' memory where that is used and NCCL's, replay them twice and compare;
    with ``sends`` also what goes to one rank each. Nobody replays unless all have captured."""
    graph, trouble = torch.cuda.CUDAGraph(), None
    values = [torch.full((size,), float(group.rank + 1), dtype=torch.bfloat16, device=group.device) for size in _SIZES]
    ones = [1] * group.size
    summed: list[torch.Tensor] = []
    gathered: list[torch.Tensor] = []

    def collect() -> None:
        parts = [value.expand(group.size, -1).contiguous() for value in values]
        summed.extend(group.reduce_scatter_rows(part) for part in parts)
        summed.extend(group.all_reduce(value.clone()) for value in values)
        gathered.extend([group.all_gather_last_dim(values[0]), group.all_gather_rows(values[0])])
        if sends:
            gathered.append(group.all_to_all_rows(parts[0], ones, ones).flatten())

    def collect_both_ways() -> None:
        summed.clear()
        gathered.clear()
        collect()
        with group.without_peers():
            collect()

    collect_both_ways()  # NCCL connects its ranks at the first call, which cannot be captured
    torch.cuda.synchronize(group.device)
    group.barrier()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            collect_both_ways()
    except Exception as error:  # torch tells what a capture must not hold by errors of many kinds
        trouble = f"collectives cannot be captured ({type(error).__name__}: {error})"
    if not group.all_true(trouble is None):
        return trouble or "collectives cannot be captured on another rank"
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize(group.device)
    total = sum(range(1, group.size + 1))
    right = all(bool((result == total).all()) for result in summed)
    ranks = torch.arange(1, group.size + 1, device=group.device).repeat_interleave(_SIZES[0])
    right = right and all(bool((result == ranks).all()) for result in gathered)
    return None if group.all_true(right) else "captured collectives gave wrong results"
