"""What GPUs do in each other's memory, by collectives of the host."""

from __future__ import annotations

import torch

from baton.common.distributed.tp import TPGroup
from baton.kernels import reference


class HostPeers:
    """Stands in for PeerAllReduce, of decode steps' exchanges alone."""

    def __init__(self, group: TPGroup):
        self._group = group

    def takes(self, tensor: torch.Tensor) -> bool:
        return False

    takes_rows = scatters = gathers = takes

    def meets(self, rows: torch.Tensor) -> bool:
        return True

    def gather_normed(self, rows, residual, weight, eps):
        normed, total = reference.rmsnorm(rows, weight, eps, residual)
        return self._group.all_gather_rows(normed), total

    def scatter_normed(self, rows, more, residual, weight, eps):
        summand = rows if more is None else rows + more
        return reference.rmsnorm(self._group.reduce_scatter_rows(summand), weight, eps, residual)
