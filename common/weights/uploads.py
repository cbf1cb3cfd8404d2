"""Copies host memory that is not pinned to a GPU, at the rate of the link."""

from __future__ import annotations

import torch

_CHUNK_BYTES = 1 << 25


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of a host tensor on a GPU, which the current stream fills.

    CUDA's own copy of memory that is not pinned is done by one thread; pinning it first would hold up the launches of
    steps. Here torch's threads fill one pinned chunk while the other is copied. Pinned memory is copied as it is.
    """
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if tensor.is_pinned():
        return result.copy_(tensor, non_blocking=True)
    source = tensor.contiguous().flatten().view(torch.uint8)
    target = result.flatten().view(torch.uint8)
    chunks = [(torch.empty(min(source.numel(), _CHUNK_BYTES), dtype=torch.uint8, pin_memory=True),
               torch.cuda.Event()) for _ in range(min(2, -(-source.numel() // _CHUNK_BYTES)))]
    for number, start in enumerate(range(0, source.numel(), _CHUNK_BYTES)):
        pinned, copied = chunks[number % 2]
        copied.synchronize()  # at once where it was never recorded
        part = source[start:start + _CHUNK_BYTES]
        pinned[:part.numel()].copy_(part)
        target[start:start + part.numel()].copy_(pinned[:part.numel()], non_blocking=True)
        copied.record()
    return result
