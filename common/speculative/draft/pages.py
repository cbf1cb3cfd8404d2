"""The batches of a drafter's own: rows at positions that the step's batch does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from ....kernels.arguments import RowMask
from ...forward.forward_batch import BatchColumns, ForwardBatch, MaskColumns, indptr_of, ragged_positions
from ...kvcache.manager import PageTable
from ..draft_tree import Frontier


class DraftPages:
    """The pages of some requests up to their last position in a step, read once from their page tables."""

    def __init__(self, tables: Sequence[PageTable], last_positions: np.ndarray, page_size: int, device: torch.device):
        """``last_positions`` [n] int64: the last one of each request that a pass reaches."""
        self._page_size = page_size
        self._device = device
        counts = last_positions // page_size + 1
        parts = [table.ids[:count] for table, count in zip(tables, counts.tolist())]
        self._ids = np.concatenate(parts).astype(np.int32)
        self._indptr = indptr_of(counts)
        assert len(self._ids) == self._indptr[-1], "drafts have no pages"

    def decode_batch(self, requests: np.ndarray, positions: np.ndarray, ids: torch.Tensor) -> ForwardBatch:
        """Returns a decode batch: one row for each of ``requests`` [m] (indices of the tables), with the token
        ``ids`` [m] int64 at ``positions`` [m] int64."""
        return self.batch(requests, positions, np.ones(len(requests), np.int64), ids)

    def tree_batch(self, requests: np.ndarray, first_slots: np.ndarray, ahead: int, topk: int,
                   frontier: Frontier) -> ForwardBatch:
        """Returns the batch of a pass that computes ``frontier``, the ``ahead``-th level of trees whose nodes are
        stored from ``first_slots`` [m] on, ``topk`` a level. All rows get logits."""
        lengths = np.full(len(requests), topk, np.int64)
        mask = MaskColumns(np.zeros(len(requests) * topk, np.int64), np.full(len(requests), ahead * topk, np.int32))
        batch = self.batch(requests, first_slots + (ahead - 1) * topk, lengths, frontier.tokens.flatten(),
                           np.arange(len(mask.words)), np.repeat(first_slots + ahead - 1, topk), mask)
        assert batch.mask is not None
        return replace(batch, mask=RowMask(frontier.words.flatten(), batch.mask.counts))

    def batch(self, requests: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: torch.Tensor,
              logits_rows: np.ndarray | None = None, positions: np.ndarray | None = None,
              mask: MaskColumns | None = None) -> ForwardBatch:
        """Returns a batch of ``lengths`` [m] rows a request, in slots from ``starts`` [m] on, which are their
        ``positions`` too where these are not given, with tokens ``ids`` [T] int64. ``logits_rows`` are
        ForwardBatch.from_columns'."""
        size = self._page_size
        ends = starts + lengths
        counts = -(ends // -size)
        kv_indptr, qo_indptr = indptr_of(counts), indptr_of(lengths)
        kv_indices = self._ids[np.arange(kv_indptr[-1]) + np.repeat(self._indptr[requests] - kv_indptr[:-1], counts)]
        slots = ragged_positions(starts, lengths, qo_indptr)
        in_request, offsets = np.divmod(slots, size)
        page_of_token = kv_indices[np.repeat(kv_indptr[:-1], lengths) + in_request].astype(np.int64)
        columns = BatchColumns(slots if positions is None else positions, page_of_token, offsets, kv_indptr, kv_indices,
                               (ends - (counts - 1) * size).astype(np.int32), None, qo_indptr,
                               int(lengths.max(initial=1)), mask=mask)
        return ForwardBatch.from_columns(columns, ids, self._device, logits_rows)
