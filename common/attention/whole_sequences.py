"""Attention of every token to all of its sequence, in steps of whole sequences: of encoders, and of decoders that were
made embedding models. It reads no KV cache; in the pool, of one layer, keys pass by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.arguments import HeadNorms
from ..api.errors import ConfigError
from ..config.scores import Scores
from ..forward.forward_batch import ForwardBatch
from ..kvcache.pool import KVPool
from .base import store
from .workspace import AttentionWorkspace

_PADDING_RATIO = 2
"""Sequences are padded to the longest of a group, which is at most so many times the shortest."""


class WholeSequencesBackend:
    """See AttentionBackend. ``window`` and capped scores are not for such models."""

    attends_last_tokens = False

    def __init__(self, pool: KVPool, scores: Scores):
        """Raises ConfigError for scores that are capped."""
        if scores.softcap:
            raise ConfigError("Attention in both directions does not cap scores: use a checkpoint without "
                              "attn_logit_softcapping.")
        self.pool = pool
        self.scale = scores.scale_of(pool.layout.head_dim)

    def plan(self, batch: ForwardBatch, workspace: AttentionWorkspace, *, max_length: int | None = None,
             out: torch.Tensor | None = None) -> WholeSequences:
        return WholeSequences(self, batch)

    def verifies(self, batch: ForwardBatch) -> bool:
        return False

    def warm_up(self, compute_prompt: Callable[[], None]) -> None:
        compute_prompt()

    def run_last_tokens(self, batch: ForwardBatch, workspace: AttentionWorkspace, *inputs: Any) -> torch.Tensor:
        raise AssertionError("all rows attend")


class _Group(NamedTuple):
    """Sequences that are computed together: the rows [b, L] of their tokens, padded, which of them are tokens, and the
    flat indices [n] of these with their rows [n]."""

    padded: torch.Tensor
    mask: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor


class WholeSequences:
    """The attention of a batch."""

    attends_last_tokens = False

    def __init__(self, backend: WholeSequencesBackend, batch: ForwardBatch):
        self._backend, self._batch = backend, batch
        indptr, device = batch.qo_indptr_cpu, batch.input_ids.device
        starts, lengths = indptr[:-1].astype(np.int64), np.diff(indptr)
        order = np.argsort(lengths, kind="stable")
        self._groups = []
        while len(order):
            longest = _PADDING_RATIO * max(int(lengths[order[0]]), 1)
            count = int(np.searchsorted(lengths[order], longest, side="right"))
            self._groups.append(_group_of(starts[order[:count]], lengths[order[:count]], device))
            order = order[count:]

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor | None = None,
            norms: HeadNorms | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        assert sinks is None, "models with sinks are causal"
        if cos_sin is not None or norms is not None:
            store(self._backend.pool, self._batch, 0, q, k, v, cos_sin, norms, rope_keys_in_place=True)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            queries, keys, values = (x[group.padded].transpose(1, 2) for x in (q, k, v))
            heads = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=self._backend.scale,
                                                 enable_gqa=queries.shape[1] != keys.shape[1])
            out[group.rows] = heads.transpose(1, 2).flatten(0, 1)[group.tokens]
        return out

    def run_last_tokens(self, *inputs: Any) -> torch.Tensor:
        raise AssertionError("all rows attend")

    def refresh(self, batch: ForwardBatch) -> None:
        raise AssertionError("this backend is never captured")


def _group_of(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> _Group:
    columns = np.arange(lengths.max())
    inside = columns < lengths[:, None]
    padded = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
    tokens = np.flatnonzero(inside)
    arrays = padded, inside[:, None, None], tokens, padded.flatten()[tokens]
    return _Group(*(torch.from_numpy(array).to(device) for array in arrays))
