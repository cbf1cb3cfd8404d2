"""Reads a RowMask: which of its request's newest slots a row sees."""

from __future__ import annotations

from .._triton import tl, triton


@triton.jit
def load_row_mask(row, words_ptr, counts_ptr, kv_indptr_ptr, last_page_len_ptr, PAGE: tl.constexpr):
    """``(length, word, first slot that has a bit)`` of a row that has a page table of its own."""
    pages = tl.load(kv_indptr_ptr + row + 1) - tl.load(kv_indptr_ptr + row)
    length = (pages - 1) * PAGE + tl.load(last_page_len_ptr + row)
    return length, tl.load(words_ptr + row), length - tl.load(counts_ptr + row)


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
