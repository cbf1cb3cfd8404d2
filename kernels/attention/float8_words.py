"""Loads float8 values from pages in the layout in which tensor cores multiply them as float16.

A product over tokens needs two tokens' values in one register, and a page has one token's values contiguous. If they
are loaded value by value, the compiler brings them together byte by byte and converts each by itself: attention then
takes longer over float8 than over twice the bytes. So they are loaded as words of four, which two instructions convert
to float16, and the first, second, third and fourth values of the words stay separate matrices.
"""

from __future__ import annotations

import torch

from .._triton import INTERPRETED, tl, triton


@triton.jit
def load_quarters(pages_ptr, slot, present, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Loads four float16 ``[tokens, BLOCK_DIM / 4]``, the i-th of every fourth value from i on, of rows of DIM values
    that begin at ``slot`` [tokens]; zeros where ``present`` [tokens] is false."""
    word = tl.arange(0, BLOCK_DIM // 4)
    words = tl.load(pages_ptr.to(tl.pointer_type(tl.int32)) + slot[:, None] // 4 + word[None, :],
                    present[:, None] & (word < DIM // 4)[None, :], other=0)
    KIND: tl.constexpr = "e5m2x2" if pages_ptr.dtype.element_ty == tl.float8e5 else "e4m3x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; .reg .b32 first, second; mov.b32 {low, high}, $4; cvt.rn.f16x2." + KIND
        + " first, low; cvt.rn.f16x2." + KIND + " second, high; mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, second; }",
        "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1)


@triton.jit
def merge_quarters(a, b, c, d):
    """Interleaves four [N, M] to ``[N, 4 * M]``: every fourth column is of one of them."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))


def reads_words(q: torch.Tensor, pages: torch.Tensor) -> bool:
    """Says whether ``pages`` [..., dim] can be loaded so for queries ``q``: the interpreter knows no PTX, float32
    queries need float32, and a product has 16 columns at least."""
    dim = pages.shape[-1]
    aligned = dim % 16 == 0 and all(stride % 16 == 0 for stride in pages.stride()[:-1])
    return not INTERPRETED and q.itemsize == 2 and pages.itemsize == 1 and aligned and dim > 32
