"""Logit bias: values that a request adds to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..forward.host_copies import upload, upload_joined


class LogitBias(NamedTuple):
    """``values`` [n] float32 to add to the logits of ``ids`` [n] int32, which are distinct."""

    ids: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, bias: Mapping[int, float]) -> LogitBias:
        return cls(np.fromiter(bias, np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias)))


def add_bias(logits: torch.Tensor, rows: Sequence[int], biases: Sequence[LogitBias]) -> None:
    """Add ``biases[i]`` to row ``rows[i]`` of ``logits`` [R, vocab], in place."""
    ids = upload_joined([bias.ids for bias in biases], torch.int64, logits.device)
    values = upload_joined([bias.values for bias in biases], torch.float32, logits.device)
    sizes = upload([len(bias.ids) for bias in biases], torch.int64, logits.device)
    index = upload(rows, torch.int64, logits.device).repeat_interleave(sizes, output_size=len(ids))
    logits[index, ids] += values
