"""SplitMix64 (Steele, Lea and Flood, 2014): its increment and its finalizer, for kernels and in torch, bit by bit."""

from __future__ import annotations

import torch

from ._triton import tl, triton

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN = tl.constexpr(_GOLDEN)
"""The increment, in kernels."""
_FACTOR_1 = tl.constexpr(_MIX_1)
_FACTOR_2 = tl.constexpr(_MIX_2)


@triton.jit
def mix(bits):
    """The finalizer of ``bits`` (uint64)."""
    bits = (bits ^ (bits >> 30)) * _FACTOR_1
    bits = (bits ^ (bits >> 27)) * _FACTOR_2
    return bits ^ (bits >> 31)


def _signed(value: int) -> int:
    """Converts a 64-bit pattern to int64: torch multiplies int64 modulo 2**64, as the hash needs."""
    return value - (1 << 64) if value >= 1 << 63 else value


SIGNED_GOLDEN = _signed(_GOLDEN)
"""The increment as an int64, for torch."""


def mix_tensor(values: torch.Tensor) -> torch.Tensor:
    """Returns the finalizer of ``values`` (int64, whose bits count)."""
    values = (values ^ shift(values, 30)) * _signed(_MIX_1)
    values = (values ^ shift(values, 27)) * _signed(_MIX_2)
    return values ^ shift(values, 31)


def shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int64 right logically; torch's shift extends the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
