"""Logit bias: values that a request adds to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class LogitBias(NamedTuple):
    """``values`` [n] float32 to add to the logits of ``ids`` [n] int32, which are distinct."""

    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, bias: Mapping[int, float]) -> LogitBias:
        return cls(np.fromiter(bias, np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))
