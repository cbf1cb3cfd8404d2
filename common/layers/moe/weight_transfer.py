"""Moves experts' weights between ranks, for EPLB."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...distributed.tp import TPGroup


def source_ranks(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns the rank ``[ranks, experts of a rank]`` that each physical expert gets its weights from, -1 where its
    expert stays; ``before`` and ``after`` are placements. Ranks with an expert send it in turn."""
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(before.tolist()):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    sources = np.full(after.shape, -1, np.int64)
    for rank, index in zip(*np.nonzero(before != after)):
        ranks = holders[int(after[rank, index])]
        if rank in ranks:
            sources[rank, index] = rank
            continue
        sources[rank, index] = ranks[0]
        ranks.append(ranks.pop(0))
    return sources


def move_experts(group: TPGroup, before: np.ndarray, after: np.ndarray, stacks: Sequence[torch.Tensor]) -> int:
    """Moves the slices of ``stacks`` ([experts of a rank, ..., n] each, this rank's) from the placement ``before`` to
    ``after``; every rank of ``group`` calls it. Returns the number of experts that this rank got from others.

    At most one layer's moved experts are in memory besides the stacks.
    """
    sources = source_ranks(before, after)
    moves = [(to, index, int(sources[to, index])) for to, index in zip(*np.nonzero(sources >= 0))]
    own = before[group.rank].tolist()
    outgoing = [[own.index(after[to, index]) for to, index, source in moves if source == group.rank and to == target]
                for target in range(group.size)]
    incoming = [[index for to, index, source in moves if to == group.rank and source == origin]
                for origin in range(group.size)]
    for stack in stacks:
        rows = stack.view(torch.uint8).flatten(1)
        sent = rows[[index for indices in outgoing for index in indices]]
        received = group.all_to_all_rows(sent, [len(indices) for indices in outgoing],
                                         [len(indices) for indices in incoming])
        rows[[index for indices in incoming for index in indices]] = received
    return sum(len(indices) for origin, indices in enumerate(incoming) if origin != group.rank)
