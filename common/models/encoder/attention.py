"""Attention of every token to all of its sequence, in batches of whole sequences."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

_PADDING_RATIO = 2
"""Sequences are padded to the longest of a group, which is at most so many times the shortest."""


class _Group(NamedTuple):
    """Sequences that are computed together: the rows [b, L] of their tokens, padded, which of them are tokens, and the
    flat indices [n] of these with their rows [n]."""

    padded: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor


class WholeSequences:
    """The attention of one step, whose sequences begin at rows ``indptr`` [B + 1]."""

    def __init__(self, indptr: np.ndarray, device: torch.device):
        starts, lengths = indptr[:-1].astype(np.int64), np.diff(indptr)
        order = np.argsort(lengths, kind="stable")
        self._groups = []
        while len(order):
            longest = _PADDING_RATIO * max(int(lengths[order[0]]), 1)
            count = int(np.searchsorted(lengths[order], longest, side="right"))
            self._groups.append(_group_of(starts[order[:count]], lengths[order[:count]], device))
            order = order[count:]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Returns ``[T, heads, D]`` of ``q``, ``k`` and ``v`` [T, heads, D]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            queries, keys, values = (x[group.padded].transpose(1, 2) for x in (q, k, v))
            heads = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
            out[group.rows] = heads.transpose(1, 2).flatten(0, 1)[group.tokens]
        return out


def _group_of(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> _Group:
    columns = np.arange(lengths.max())
    inside = columns < lengths[:, None]
    padded = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    tokens = np.flatnonzero(inside)
    arrays = padded, inside[:, None, None], tokens, padded.flatten()[tokens]
    return _Group(*(torch.from_numpy(array).to(device) for array in arrays))
