"""Static inputs of chain steps: one device buffer, which one copy fills."""

from __future__ import annotations

import numpy as np
import torch

from ...forward.chain_rows import ChainRows
from .staging import Pages, StagingBuffer, layout_of, tensors_of

_OF_REQUEST = ("sources", "positions", "num_drafts", "limits")
_INITIAL_PINNED_INDICES = 1 << 20
"""``kv_indices`` that pinned memory is allocated for from the start: allocating it takes a millisecond."""


class ChainInputs:
    """The arrays of ChainRows on the device, at fixed addresses: ``tensors`` by name, for ``max_requests`` requests and
    ``max_rows`` rows; ``tokens`` [max_rows] has the rows of a step one after the other.

    Requests that pad a step have void rows at the first positions, in ``pad_pages`` pages that are all
    ``scratch_page``. ``kv_indices`` has ``max_indices`` entries.
    """

    def __init__(self, max_requests: int, max_rows: int, max_indices: int, scratch_page: int, pad_pages: int,
                 device: torch.device):
        self._scratch_page = scratch_page
        self._pad_pages = pad_pages
        layout, end = layout_of(dict.fromkeys(_OF_REQUEST, max_requests) | {"tokens": max_rows},
                                {"kv_indptr": max_requests + 1})
        self._indices_offset = end  # kv_indices come last: their number varies
        max_indices = max(max_indices, max_requests * pad_pages)
        self._bytes = torch.zeros(end + 4 * max_indices, dtype=torch.uint8, device=device)
        self.tensors = tensors_of(self._bytes, layout)
        self.tensors["kv_indices"] = self._bytes[end:].view(torch.int32)
        self._staging = [StagingBuffer(end, layout, min(max_indices, _INITIAL_PINNED_INDICES), device)
                         for _ in range(2)]
        self._active = 0
        self._pages: Pages | None = None  # those of ``tensors``, once the copies in flight have run
        self.tensors["kv_indices"].fill_(scratch_page)

    def fill(self, chains: ChainRows, size: int) -> None:
        """Copies ``chains``, padded to ``size`` requests, to the device without waiting for it. A step that was
        launched reads the values from before. Pages of the same ``pages_version`` are not copied again."""
        self._active ^= 1
        count, num_indices = chains.num_reqs, len(chains.kv_indices)
        padding = (size - count) * self._pad_pages
        staging = self._staging[self._active]
        arrays = staging.acquire(num_indices + padding)
        for name in _OF_REQUEST:
            arrays[name][:count] = getattr(chains, name)
            arrays[name][count:size] = -(name == "sources")
        arrays["tokens"][:count * chains.width] = chains.tokens.ravel()
        pages = Pages(chains.pages_version, size)
        if not pages.same(staging.pages):
            staging.pages = pages
            arrays["kv_indptr"][:count + 1] = chains.kv_indptr
            arrays["kv_indptr"][count + 1:size + 1] = np.arange(1, size - count + 1) * self._pad_pages + num_indices
            arrays["kv_indices"][:num_indices] = chains.kv_indices
            arrays["kv_indices"][num_indices:num_indices + padding] = self._scratch_page
        used = self._indices_offset + 4 * (num_indices + padding)
        assert used <= len(self._bytes), "more pages than a captured step may have"
        staging.copy_to(self._bytes, self._indices_offset if pages.same(self._pages) else used)
        self._pages = pages
