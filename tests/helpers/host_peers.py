"""What GPUs do in each other's memory, by collectives of the host."""

from __future__ import annotations

import torch

from baton.common.distributed.tp import TPGroup
from baton.kernels import reference


class HostPeers:
    """Stands in for PeerAllReduce, of decode steps' exchanges alone."""

    def __init__(self, group: TPGroup):
        self._group = group

    def can_all_reduce(self, tensor: torch.Tensor) -> bool:
        return False

    can_all_reduce_norm = can_reduce_scatter = can_all_gather = can_all_reduce

    def can_norm_gather(self, rows: torch.Tensor) -> bool:
        return True

    def norm_gather(self, rows, residual, weight, eps):
        normed, total = reference.rmsnorm(rows, weight, eps, residual)
        return self._group.all_gather_rows(normed), total

    def reduce_scatter_norm(self, rows, addend, residual, weight, eps):
        summand = rows if addend is None else rows + addend
        return reference.rmsnorm(self._group.reduce_scatter_rows(summand), weight, eps, residual)
