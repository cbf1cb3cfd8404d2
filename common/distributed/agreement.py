"""What ranks that decide alike go by, where each of them alone knows something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch.distributed as dist


class Agreeing(Protocol):
    """Ranks that make the same calls in the same order."""

    def least(self, topic: str, keys: Sequence[int], values: np.ndarray, unknown: Sequence[int]) -> np.ndarray:
        """Element-wise minimum over the ranks of int64 ``values`` [n, k], row i of which belongs to ``keys[i]``; equal
        on all ranks. A key means one thing only, within its ``topic``. It may be the minimum of a while ago, and of a
        rank that has told nothing of a key then be ``unknown`` [k]."""


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, whose own log says why."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
