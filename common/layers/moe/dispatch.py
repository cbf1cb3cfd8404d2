"""Tokens to the ranks of their experts and back, by two all-to-alls.

A token travels once to every rank that holds one of its experts; that rank adds up what its experts make of it and
sends one row back (as DeepEP does, github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...distributed.tp import TPGroup

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(x [N, hidden], places [N, K], weights [N, K])`` to this rank's part ``[N, hidden]``."""


def compute_by_all_to_all(group: TPGroup, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, places: int,
                          compute: Compute) -> torch.Tensor:
    """``[T, hidden]`` of this rank's tokens, whole; every rank of ``group`` calls it, with T >= 0 tokens of its own.

    ``physical`` [T, K] int64: rank r holds ids ``[r * places, (r + 1) * places)``. Waits for the device: the ranks tell
    each other how many rows they send.
    """
    ranks = torch.arange(group.size, device=x.device)
    wanted = (physical // places == ranks[:, None, None]).any(-1)  # [ranks, T]
    rows = wanted.nonzero()[:, 1]  # by rank, then by token
    counts = wanted.sum(1)
    sent = counts.tolist()
    received = group.all_to_all_rows(counts, [1] * group.size, [1] * group.size).tolist()
    # One collective for ids and weights: both have 32 bits.
    choice = torch.cat((physical.int(), weights.float().view(torch.int32)), dim=-1)[rows]
    taken, choice = (group.all_to_all_rows(part, sent, received) for part in (x[rows], choice))
    ids, taken_weights = choice.chunk(2, dim=-1)
    # Ids of other ranks leave [0, places) by this: each copy of a token is computed by its own rank's experts alone.
    done = compute(taken, ids.long() - group.rank * places, taken_weights.contiguous().view(torch.float32))
    parts = group.all_to_all_rows(done, received, sent)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, rows, parts.float()).to(x.dtype)
