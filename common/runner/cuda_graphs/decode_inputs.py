"""Static inputs of decode graphs: one device buffer, which one copy fills."""

from __future__ import annotations

import numpy as np
import torch

from ...forward.forward_batch import NO_COLUMNS, BatchColumns
from .staging import Pages, StaticInputs

_INT64 = ("positions", "page_of_token", "offset_in_page")


class DecodeInputs:
    """The arrays of BatchColumns on the device, at fixed addresses: ``tensors`` by name, for ``max_rows`` rows.

    They are initialised as padding rows, which read and write the page ``scratch_page``. ``kv_indices`` has
    ``max_indices`` entries.
    """

    def __init__(self, max_rows: int, max_indices: int, scratch_page: int, device: torch.device):
        self._scratch_page = scratch_page
        self._static = StaticInputs(dict.fromkeys(_INT64, max_rows), {"kv_indptr": max_rows + 1,
                                                                      "kv_last_page_len": max_rows},
                                    max_indices, scratch_page, device)
        self.tensors = self._static.tensors
        self.fill(NO_COLUMNS, max_rows)

    def fill(self, columns: BatchColumns, size: int) -> dict[str, np.ndarray]:
        """Copies ``columns``, padded to ``size`` rows, to the device without waiting for it; returns host copies, which
        the second call after this one overwrites. A step that was launched reads the values from before.

        Pages of the same ``pages_version`` are not copied again.
        """
        count = len(columns.positions)
        num_indices = len(columns.kv_indices) + size - count
        pages = Pages(columns.pages_version, size)
        arrays, new_pages = self._static.begin(pages, num_indices)
        for name in (*_INT64, "kv_last_page_len"):
            arrays[name][:count] = getattr(columns, name)
        if new_pages:
            self._fill_pages(arrays, columns, size)
        self._static.copy(pages, num_indices)
        return {"kv_indptr": arrays["kv_indptr"][:size + 1], "kv_last_page_len": arrays["kv_last_page_len"][:size],
                "kv_indices": arrays["kv_indices"][:num_indices]}

    def _fill_pages(self, arrays: dict[str, np.ndarray], columns: BatchColumns, size: int) -> None:
        """Writes what stays the same until a request gets a new page, including padding rows."""
        count, num_indices = len(columns.positions), len(columns.kv_indices)
        arrays["kv_indptr"][:count + 1] = columns.kv_indptr
        arrays["kv_indices"][:num_indices] = columns.kv_indices
        arrays["positions"][count:size] = 0
        arrays["page_of_token"][count:size] = self._scratch_page
        arrays["offset_in_page"][count:size] = 0
        arrays["kv_last_page_len"][count:size] = 1
        arrays["kv_indptr"][count + 1:size + 1] = np.arange(num_indices + 1, num_indices + size - count + 1)
        arrays["kv_indices"][num_indices:num_indices + size - count] = self._scratch_page
