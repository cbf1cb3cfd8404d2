"""Gumbel noise of seeded rows: a hash of (seed, position, token), the same in any batch and on any device."""

from __future__ import annotations

import torch

from ...kernels.elementwise import by_element

MIN_NOISE = 2.0**-24
"""Noise of 0 would sample a token however small its probability; a generator may return 0 once in 2**24 values."""


def seeded_exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int,
                       token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns exponential variates ``[n, vocab]`` by hash of ``seeds`` [n], ``positions`` [n] (int64) and token id:
    ``token_ids`` [vocab] int64 where given, else 0, 1, ...

    The hash is SplitMix64's finalizer (Steele, Lea and Flood, 2014) over a chain of the three. 23 bits of it become a
    uniform number in (0, 1): with 24, the largest would round to 1 in float32 and its noise to 0.
    """
    keys = _mix(_mix(seeds) ^ positions)
    tokens = torch.arange(vocab_size, device=seeds.device) if token_ids is None else token_ids
    bits = _mix(keys[:, None] + tokens * _GOLDEN)
    uniform = ((bits >> 41) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return by_element(torch.log, uniform).neg_()


def _signed(value: int) -> int:
    """Converts a 64-bit pattern to int64: torch multiplies int64 modulo 2**64, as the hash needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_A = _signed(0xBF58476D1CE4E5B9)
_MIX_B = _signed(0x94D049BB133111EB)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right logically; torch's shift extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
