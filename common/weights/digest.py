"""Digests of whole tensors, equal for equal bytes, type and shape, wherever they are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from .uploads import upload

_CHUNK_WORDS = 1 << 22
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x6A09E667F3BCC909)


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor, device: torch.device | None = None) -> str:
    """Returns 16 hexadecimal digits, computed on ``device``, by default where the tensor is. On a GPU it is enqueued on
    the current stream, and waited for."""
    device = tensor.device if device is None or tensor.is_cuda else device
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if tail := data.numel() % 4:
        data = torch.cat([data, data.new_zeros(4 - tail)])
    words = data.view(torch.int32) if data.storage_offset() % 4 == 0 else data.clone().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start:start + _CHUNK_WORDS]
        if part.device != device:
            part = upload(part, device)
        # Every word is multiplied by an odd number that depends on its place: any one change changes the sum.
        factors = torch.arange(start, start + part.numel(), dtype=torch.int64, device=device).mul_(_ODD[0])
        factors ^= factors >> 29
        factors = factors.mul_(_ODD[1]).bitwise_or_(1)
        total += (factors * part).sum()
    facts = f"{tensor.dtype}{list(tensor.shape)}{int(total.item())}"
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def combined_digest(parts: Mapping[str, str] | Sequence[str]) -> str:
    """Returns 16 hexadecimal digits for digests by name, in whatever order they are, or for a sequence of them."""
    facts = sorted(f"{name}={digest}" for name, digest in parts.items()) if isinstance(parts, Mapping) else parts
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
