"""The logical-to-physical map of a layer's experts, on the device."""

from __future__ import annotations

import numpy as np
import torch


class Placement:
    """Physical expert p of rank r has the id r * experts of a rank + p, and computes the logical expert
    ``physical_to_logical[r, p]``. Every logical expert has a physical one, and never two on a rank.

    The tables are changed in place, so that captured CUDA graphs see each ``update``.
    """

    def __init__(self, physical_to_logical: np.ndarray, num_experts: int, device: torch.device, rank: int = 0):
        """``rank``: this one, whose tokens ``to_own`` maps."""
        ranks = physical_to_logical.shape[0]
        self._rank = rank
        self._own_choice = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._logical_to_physical = torch.zeros(num_experts, ranks, dtype=torch.int64, device=device)
        self.replica_counts = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.update(physical_to_logical)

    def update(self, physical_to_logical: np.ndarray) -> None:
        """Replaces the map, once the experts have been moved."""
        self.physical_to_logical = physical_to_logical
        physical_ids = np.zeros(self._logical_to_physical.shape, np.int64)
        counts = np.zeros(len(physical_ids), np.int64)
        for physical_id, expert in enumerate(physical_to_logical.ravel().tolist()):
            physical_ids[expert, counts[expert]] = physical_id
            counts[expert] += 1
        assert counts.min() > 0
        self._logical_to_physical.copy_(torch.from_numpy(physical_ids))
        self.replica_counts.copy_(torch.from_numpy(counts))
        chosen = physical_ids[np.arange(len(counts)), self._rank % counts]
        own = physical_to_logical[self._rank]
        chosen[own] = self._rank * len(own) + np.arange(len(own))
        self._own_choice.copy_(torch.from_numpy(chosen))

    def to_own(self, experts: torch.Tensor) -> torch.Tensor:
        """Maps logical expert ids ``[T, K]`` to physical ones that are always the same on this rank: its own replica
        where it has one."""
        return self._own_choice[experts]

    def to_physical(self, experts: torch.Tensor, *, shift: int = 0) -> torch.Tensor:
        """Maps logical expert ids ``[T, K]`` to physical ones. A token's row plus ``shift`` selects the replica, so
        that ranks with the same tokens select the same."""
        rows = torch.arange(shift, shift + experts.shape[0], device=experts.device)[:, None]
        return self._logical_to_physical[experts, rows % self.replica_counts[experts]]
