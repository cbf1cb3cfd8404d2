"""The soft cap of attention's scores (Gemma 2, arXiv:2408.00118, section 2)."""

from __future__ import annotations

from .._triton import tl, triton


@triton.jit
def capped_share(scores, CAP: tl.constexpr):
    """Returns ``tanh(x / CAP)`` of scores x, which are given times log2(e), as the exponents of exp2 are."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP)))


@triton.jit
def soft_cap(scores, CAP: tl.constexpr):
    """Returns ``CAP * tanh(x / CAP)`` of scores x; both are times log2(e)."""
    return capped_share(scores, CAP) * (CAP * 1.4426950408889634)
