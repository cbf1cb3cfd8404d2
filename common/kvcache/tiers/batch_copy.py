"""cudaMemcpyBatchAsync, of CUDA 13: one call for many copies by the copy engines.

Called by ctypes with arrays of addresses: cuda.bindings takes lists and converts each entry under the
interpreter's lock (2 us of the loop's thread for each page and layer group).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np

logger = logging.getLogger(__name__)

BatchCopy = Callable[[np.ndarray, np.ndarray, np.ndarray, int], None]
"""Enqueues copies of ``sizes`` [n] bytes from addresses ``sources`` to ``targets`` (uint64) on a stream; raises
RuntimeError."""

_LIBRARY = "libcudart.so.13"
_ORDERED_BY_STREAM = 1  # cudaMemcpySrcAccessOrderStream
_OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes."""

    _fields_ = (("source_order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


def load_batch_copy() -> BatchCopy | None:
    """Returns the call, None where this CUDA runtime does not have it."""
    try:
        batch = ctypes.CDLL(_LIBRARY).cudaMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    batch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                      ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    attributes = _Attributes(_ORDERED_BY_STREAM, flags=_OVERLAP_WITH_COMPUTE)
    first_of_attributes = ctypes.c_size_t(0)

    def copy(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        error = batch(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
                      ctypes.addressof(attributes), ctypes.addressof(first_of_attributes), 1, stream)
        if error != 0:
            raise RuntimeError(f"cudaMemcpyBatchAsync failed with error {error}")

    return copy
