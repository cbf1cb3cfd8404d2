"""Checks whether CUDA graphs can capture a rank's collectives."""

from __future__ import annotations

import logging

import torch

from .parallel import Parallel
from .tp import TPGroup

log = logging.getLogger("baton.engine")

_SIZES = (2048, 600_000)


def may_capture(parallel: Parallel) -> bool:
    """Returns whether a decode step of these ranks can be captured. Several ranks try it once, all together.

    It cannot be where the host decides in every step what is sent (experts by all-to-all), with pipeline parallelism,
    where attention groups' tokens are counted by expert (padding to a common size would count too), and through host
    memory. Experts that EPLB moves are moved in place, between steps. A warning is logged where the trial fails. All
    ranks get the same answer.
    """
    experts = parallel.experts
    if parallel.pp.size > 1 or parallel.tp.through_host:
        return False
    if parallel.tp.size == 1:
        return True
    waits = experts.uses_all_to_all and not (experts.all_to_all is not None and experts.all_to_all.connected)
    if waits or (parallel.dp_size > 1 and experts.counts_tokens):
        return False
    failure = None
    for group in {id(group): group for group in (parallel.tp, parallel.attn_tp, parallel.dp)}.values():
        if group.size > 1 and failure is None:
            failure = _capture_failure(group, group.size == parallel.dp_size)
    captures = parallel.tp.all_true(failure is None)
    if not captures:
        log.warning("Decode steps run without CUDA graphs: %s.", failure or "other ranks cannot capture theirs")
    return captures


def may_capture_prefill(parallel: Parallel, rows: int) -> bool:
    """Returns whether piecewise graphs of prefill steps of ``rows`` rows of each attention group can be captured, given
    ``may_capture``.

    They cannot be where padding would be counted by expert, or sent to an expert that has moved, nor where an
    all-to-all that the host waits for takes the rows to their experts.
    """
    experts = parallel.experts
    if experts.counts_tokens or experts.eplb:
        return False
    return not experts.uses_all_to_all or (experts.all_to_all is not None and experts.all_to_all.fits(rows))


def _capture_failure(group: TPGroup, sends: bool) -> str | None:
    """Captures sums and gathers, with ``symm_comm`` where there is one and with NCCL, replays them twice and compares;
    with ``sends`` also an all-to-all. Returns what failed, or None. No rank replays unless all have captured."""
    graph, failure = torch.cuda.CUDAGraph(), None
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
        with group.without_symm_comm():
            collect()

    collect_both_ways()  # NCCL connects its ranks at the first call, which cannot be captured
    torch.cuda.synchronize(group.device)
    group.barrier()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            collect_both_ways()
    except Exception as error:  # torch refuses a capture by errors of many kinds
        failure = f"collectives cannot be captured ({type(error).__name__}: {error})"
    if not group.all_true(failure is None):
        return failure or "collectives cannot be captured on another rank"
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize(group.device)
    total = sum(range(1, group.size + 1))
    right = all(bool((result == total).all()) for result in summed)
    ranks = torch.arange(1, group.size + 1, device=group.device).repeat_interleave(_SIZES[0])
    right = right and all(bool((result == ranks).all()) for result in gathered)
    return None if group.all_true(right) else "captured collectives gave wrong results"
