"""The forward batches of a chain step: its rows, and those that a drafter computes after it, as tensors on the device.

All of them have the page tables of the step, which may list more pages than are in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ...kernels.arguments import ChainPages, DraftPasses, PlacedRows
from .forward_batch import ForwardBatch


@dataclass(frozen=True)
class ChainBatches:
    """Makes the batches of B requests in ``pages``. On a CPU host copies are the memory of the device's tensors. On a
    GPU those of page tables are empty, so that a backend that reads them fails when it is captured: one that can decode
    under capture plans by the device's. ``indptrs``: by a number of rows, their offsets [B + 1] int32 and a host
    copy."""

    pages: ChainPages
    indptrs: dict[int, tuple[torch.Tensor, np.ndarray]]

    @classmethod
    def of(cls, pages: ChainPages, widths: set[int]) -> ChainBatches:
        """Makes those of batches of ``widths`` rows a request, and of 1."""
        count, device = len(pages.kv_indptr), pages.kv_indptr.device
        hosts = {width: np.arange(count, dtype=np.int32) * np.int32(width) for width in widths | {1}}
        return cls(pages, {width: (torch.from_numpy(host).to(device), host) for width, host in hosts.items()})

    def of_rows(self, rows: PlacedRows, *, verifies: bool = True) -> ForwardBatch:
        """Returns the batch of equally many rows of each request, all of which get logits."""
        return self._batch(rows.input_ids, rows.positions, rows.page_of_token, rows.offset_in_page,
                           rows.kv_last_page_len, verifies)

    def of_last_rows(self, rows: PlacedRows, chosen: torch.Tensor, kv_last_page_len: torch.Tensor) -> ForwardBatch:
        """Returns the batch of ``rows``, of which one of each request gets logits: ``chosen`` [B] int64, up to which
        the request has ``kv_last_page_len`` [B] int32 tokens in the last of its pages. They are its ``last_tokens``,
        whose tokens and slots are not to be read."""
        batch = self.of_rows(rows)
        batch.logits_rows = chosen
        batch.last_tokens = self._batch(chosen, rows.positions[chosen], chosen, chosen, kv_last_page_len, False)
        return batch

    def of_stored_rows(self, rows: PlacedRows) -> ForwardBatch:
        """Returns the batch of ``rows`` whose keys and values are stored alone: none gets logits, and its
        ``last_tokens`` are no requests."""
        batch, none = self.of_rows(rows), rows.positions[:0]
        batch.logits_rows = none
        batch.last_tokens = replace(
            batch, max_q_len=1, input_ids=none, positions=none, page_of_token=none, offset_in_page=none,
            qo_indptr=batch.qo_indptr[:1], kv_indptr=batch.kv_indptr[:1], kv_indices=batch.kv_indices[:0],
            kv_last_page_len=batch.kv_last_page_len[:0], qo_indptr_cpu=batch.qo_indptr_cpu[:1],
            kv_indptr_cpu=batch.kv_indptr_cpu[:1], kv_indices_cpu=batch.kv_indices_cpu[:0],
            kv_last_page_len_cpu=batch.kv_last_page_len_cpu[:0])
        return batch

    def of_pass(self, passes: DraftPasses, ahead: int, ids: torch.Tensor) -> ForwardBatch:
        """Returns the decode batch of ``ids`` [B] int64, ``ahead`` positions after the newest tokens."""
        return self._batch(ids, passes.positions[ahead], passes.page_of_token[ahead], passes.offset_in_page[ahead],
                           passes.kv_last_page_len[ahead], False)

    def _batch(self, ids: torch.Tensor, positions: torch.Tensor, page_of_token: torch.Tensor,
               offset_in_page: torch.Tensor, kv_last_page_len: torch.Tensor, verifies: bool) -> ForwardBatch:
        width = len(ids) // len(kv_last_page_len)
        qo_indptr, qo_indptr_cpu = self.indptrs[width]
        pages = self.pages
        return ForwardBatch(
            max_q_len=width, input_ids=ids, positions=positions, page_of_token=page_of_token,
            offset_in_page=offset_in_page, qo_indptr=qo_indptr, kv_indptr=pages.kv_indptr, kv_indices=pages.kv_indices,
            kv_last_page_len=kv_last_page_len, logits_rows=None, qo_indptr_cpu=qo_indptr_cpu,
            kv_indptr_cpu=_host_copy(pages.kv_indptr, 0), kv_indices_cpu=_host_copy(pages.kv_indices, 0),
            kv_last_page_len_cpu=_host_copy(kv_last_page_len, len(kv_last_page_len)), verifies=verifies and width > 1)


def _host_copy(tensor: torch.Tensor, entries_on_gpu: int) -> np.ndarray:
    host: np.ndarray = np.zeros(entries_on_gpu, np.int32) if tensor.is_cuda else tensor.numpy()
    return host
