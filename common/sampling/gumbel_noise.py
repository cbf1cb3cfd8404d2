"""Gumbel noise of seeded rows: a hash of (seed, position, token), the same in any batch and on any device."""

from __future__ import annotations

import torch

from ...kernels.elementwise import by_element
from ...kernels.splitmix import SIGNED_GOLDEN, mix_tensor

MIN_NOISE = 2.0**-24
"""Noise of 0 would sample a token however small its probability; a generator may return 0 once in 2**24 values."""


def seeded_exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int,
                       token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns exponential variates ``[n, vocab]`` by hash of ``seeds`` [n], ``positions`` [n] (int64) and token id:
    ``token_ids`` [vocab] int64 where given, else 0, 1, ...

    The hash is SplitMix64's finalizer (Steele, Lea and Flood, 2014) over a chain of the three. 23 bits of it become a
    uniform number in (0, 1): with 24, the largest would round to 1 in float32 and its noise to 0.
    """
    keys = _next(_next(seeds) ^ positions)
    tokens = torch.arange(vocab_size, device=seeds.device) if token_ids is None else token_ids
    bits = _next(keys[:, None] + tokens * SIGNED_GOLDEN)
    uniform = ((bits >> 41) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return by_element(torch.log, uniform).neg_()


def _next(state: torch.Tensor) -> torch.Tensor:
    return mix_tensor(state + SIGNED_GOLDEN)
