"""Where a layer's experts are, as the device needs it."""

from __future__ import annotations

import numpy as np
import torch


class Placement:
    """Place p of rank r holds expert ``residents[r, p]`` and has the number r * places + p. Every expert is somewhere,
    and on no rank twice.

    The tables are changed in place, so that captured CUDA graphs see each ``move``.
    """

    def __init__(self, residents: np.ndarray, num_experts: int, device: torch.device):
        ranks = residents.shape[0]
        self._numbers = torch.zeros(num_experts, ranks, dtype=torch.int64, device=device)
        self._counts = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.move(residents)

    def move(self, residents: np.ndarray) -> None:
        """Experts are there from now on."""
        self.residents = residents
        numbers = np.zeros(self._numbers.shape, np.int64)
        counts = np.zeros(len(numbers), np.int64)
        for number, expert in enumerate(residents.ravel().tolist()):
            numbers[expert, counts[expert]] = number
            counts[expert] += 1
        assert counts.min() > 0
        self._numbers.copy_(torch.from_numpy(numbers))
        self._counts.copy_(torch.from_numpy(counts))

    def numbers_of(self, experts: torch.Tensor, *, shift: int = 0) -> torch.Tensor:
        """``[T, K]`` expert ids to numbers of places. Replicas take turns by the token's row plus ``shift``, so that
        ranks with the same tokens choose alike."""
        rows = torch.arange(shift, shift + experts.shape[0], device=experts.device)[:, None]
        return self._numbers[experts, rows % self._counts[experts]]
