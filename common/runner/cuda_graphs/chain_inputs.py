"""Static inputs of chain steps: one device buffer, which one copy fills."""

from __future__ import annotations

import numpy as np
import torch

from ...forward.chain_rows import ChainRows
from .staging import Pages, StaticInputs

_OF_REQUEST = ("sources", "positions", "num_drafts", "limits")


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
        self._static = StaticInputs(dict.fromkeys(_OF_REQUEST, max_requests) | {"tokens": max_rows},
                                    {"kv_indptr": max_requests + 1}, max(max_indices, max_requests * pad_pages),
                                    scratch_page, device)
        self.tensors = self._static.tensors

    def fill(self, chains: ChainRows, size: int) -> None:
        """Copies ``chains``, padded to ``size`` requests, to the device without waiting for it. A step that was
        launched reads the values from before. Pages of the same ``pages_version`` are not copied again."""
        count, num_indices = chains.num_reqs, len(chains.kv_indices)
        padding = (size - count) * self._pad_pages
        pages = Pages(chains.pages_version, size)
        arrays, new_pages = self._static.begin(pages, num_indices + padding)
        for name in _OF_REQUEST:
            arrays[name][:count] = getattr(chains, name)
            arrays[name][count:size] = -(name == "sources")
        arrays["tokens"][:count * chains.width] = chains.tokens.ravel()
        if new_pages:
            arrays["kv_indptr"][:count + 1] = chains.kv_indptr
            arrays["kv_indptr"][count + 1:size + 1] = np.arange(1, size - count + 1) * self._pad_pages + num_indices
            arrays["kv_indices"][:num_indices] = chains.kv_indices
            arrays["kv_indices"][num_indices:num_indices + padding] = self._scratch_page
        self._static.copy(pages, num_indices + padding)
