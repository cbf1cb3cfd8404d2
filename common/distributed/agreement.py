"""Agreement of ranks that take the same decisions on values that each of them only knows for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch.distributed as dist

Sample = Callable[[], Mapping[int, Sequence[int]]]


class RankAgreement(Protocol):
    """Ranks that make the same calls in the same order."""

    def min_by_key(self, topic: str, keys: Sequence[int], sample: Sample, unknown: Sequence[int]) -> np.ndarray:
        """Returns the element-wise minimum over the ranks of the rows of ``keys`` [n, k] int64, in order of ``keys``;
        equal on all ranks. ``sample`` returns this rank's rows of all open keys of the topic, which are ``keys`` now;
        it may be called again until the next call.

        A key has one meaning within its ``topic``. The minimum may lag behind; where a rank had not reported a key by
        then it is ``unknown`` [k].
        """


def is_lost_peer(error: RuntimeError) -> bool:
    """Returns whether a collective failed because another rank is gone, whose own log says why."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
