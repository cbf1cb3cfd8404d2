"""Experts' weights from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...distributed.tp import TPGroup


def sources_of(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """``[ranks, places]`` of the rank that place gets its new expert from, -1 where the expert stays; see ``Placement``
    for ``before`` and ``after``. Holders of an expert take turns."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(before.tolist()):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    sources = np.full(after.shape, -1, np.int64)
    for rank, place in zip(*np.nonzero(before != after)):
        ranks = holders[int(after[rank, place])]
        if rank in ranks:
            sources[rank, place] = rank
            continue
        sources[rank, place] = ranks[0]
        ranks.append(ranks.pop(0))
    return sources


def move_experts(group: TPGroup, before: np.ndarray, after: np.ndarray, stacks: Sequence[torch.Tensor]) -> int:
    """Bring the slices of ``stacks`` ([places, ..., n] each, of this rank) from where ``before`` has the experts to
    where ``after`` has them; every rank of ``group`` calls it. Returns how many this rank took from others.

    At most one layer's moved experts are in memory beside the stacks.
    """
    sources = sources_of(before, after)
    wanted = [(to, place, int(sources[to, place])) for to, place in zip(*np.nonzero(sources >= 0))]
    own = before[group.rank].tolist()
    leaving = [[own.index(after[to, place]) for to, place, source in wanted if source == group.rank and to == target]
               for target in range(group.size)]
    coming = [[place for to, place, source in wanted if to == group.rank and source == origin]
              for origin in range(group.size)]
    for stack in stacks:
        rows = stack.view(torch.uint8).flatten(1)
        sent = rows[[place for places in leaving for place in places]]
        taken = group.all_to_all_rows(sent, [len(places) for places in leaving], [len(places) for places in coming])
        rows[[place for places in coming for place in places]] = taken
    return sum(len(places) for origin, places in enumerate(coming) if origin != group.rank)
