"""Copies small tensors between host and device, without waiting for what the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies values to a small tensor on the device. From pageable memory the copy would wait for all running work."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def upload_joined(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies one-dimensional arrays of one type, concatenated, to the device, and converts them to ``dtype`` there."""
    size = sum(map(len, arrays))
    host = torch.empty(size, dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=host.numpy())
    return host.to(device, non_blocking=True).to(dtype)


class Download:
    """Tensors that are being copied to the host; ``wait`` returns them as lists, ``arrays`` as arrays."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors[0].is_cuda:
            self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                             for t in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[list[Any]]:
        return [array.tolist() for array in self.arrays()]

    def arrays(self) -> list[np.ndarray]:
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
