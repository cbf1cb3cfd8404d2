"""Agreement of ranks that take the same decisions on values that each of them only knows for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch.distributed as dist


class RankAgreement(Protocol):
    """Ranks that make the same calls in the same order."""

    def min_by_key(self, topic: str, keys: Sequence[int], values: np.ndarray, unknown: Sequence[int]) -> np.ndarray:
        """Returns the element-wise minimum over the ranks of int64 ``values`` [n, k], row i of which belongs to
        ``keys[i]``; equal on all ranks.

        A key has one meaning within its ``topic``. The minimum may lag behind; a rank that had not reported a key by
        then counts as ``unknown`` [k].
        """


def is_lost_peer(error: RuntimeError) -> bool:
    """Returns whether a collective failed because another rank is gone, whose own log says why."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
