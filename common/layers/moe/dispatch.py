"""All-to-all dispatch and combine by two collectives.

A token is sent once to every rank that has one of its experts; that rank sums its experts' results and sends one row
back (as DeepEP does, github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...distributed.tp import TPGroup

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes ``(x [N, hidden], local expert ids [N, K], weights [N, K])``; returns this rank's summand ``[N, hidden]``."""


def compute_by_all_to_all(group: TPGroup, x: torch.Tensor, physical_ids: torch.Tensor, weights: torch.Tensor,
                          num_local: int, compute: Compute) -> torch.Tensor:
    """Returns the experts' weighted sums ``[T, hidden]`` for this rank's tokens ``x``; every rank of ``group`` calls
    it, with T >= 0 tokens of its own.

    ``physical_ids`` [T, K] int64: rank r has the experts ``[r * num_local, (r + 1) * num_local)``. Waits for the
    device: the ranks exchange how many rows they send.
    """
    ranks = torch.arange(group.size, device=x.device)
    targets = (physical_ids // num_local == ranks[:, None, None]).any(-1)  # [ranks, T]
    rows = targets.nonzero()[:, 1]  # by rank, then by token
    counts = targets.sum(1)
    sent = counts.tolist()
    received = group.all_to_all_rows(counts, [1] * group.size, [1] * group.size).tolist()
    # One collective for ids and weights: both have 32 bits.
    choices = torch.cat((physical_ids.int(), weights.float().view(torch.int32)), dim=-1)[rows]
    dispatched, choices = (group.all_to_all_rows(part, sent, received) for part in (x[rows], choices))
    ids, dispatched_weights = choices.chunk(2, dim=-1)
    # Ids of other ranks leave [0, num_local) by this: each copy of a token is computed by its own rank's experts only.
    y = compute(dispatched, ids.long() - group.rank * num_local, dispatched_weights.contiguous().view(torch.float32))
    parts = group.all_to_all_rows(y, received, sent)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, rows, parts.float()).to(x.dtype)
