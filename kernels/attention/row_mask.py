"""Reads a RowMask: which of its request's newest slots a row sees."""

from __future__ import annotations

from .._triton import tl, triton


@triton.jit
def sees(word, slot, masked_from):
    """Says whether rows of these words see the slots: all before ``masked_from``, then those whose bit is set."""
    return (slot < masked_from) | ((word >> tl.maximum(slot - masked_from, 0)) & 1 != 0)


@triton.jit
def popcount(word):
    """The number of bits that are set in an int64."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    word += word >> 32
    return word & 0x7F
