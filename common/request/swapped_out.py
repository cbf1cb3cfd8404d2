"""What a retracted request has in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SwappedOut:
    """Host slots that hold the pages of a request's first ``num_tokens`` tokens."""

    slots: np.ndarray
    num_tokens: int
