"""Dequantizes the float8 keys and values of a prompt's pages into one contiguous buffer of the model's type."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last


@triton.jit
def _dequantize_pages_kernel(k_ptr, v_ptr, ids_ptr, out_ptr, stride_page, stride_head, size, heads, k_scale, v_scale,
                             BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Converts one head's keys or values of a page, ``size`` contiguous ones."""
    index = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    head = which % heads
    within = tl.arange(0, BLOCK)
    start_next(PDL)
    wait_for_last(PDL)
    page = tl.load(ids_ptr + index).to(tl.int64)
    at = page * stride_page + head * stride_head + within
    if which < heads:
        values = tl.load(k_ptr + at, within < size, other=0.0).to(tl.float32) * k_scale
    else:
        values = tl.load(v_ptr + at, within < size, other=0.0).to(tl.float32) * v_scale
    begin = (index * 2 * heads + which) * size
    tl.store(out_ptr + begin + within, values.to(out_ptr.dtype.element_ty), within < size)


def dequantize_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype,
                     k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
    """``[N, 2, heads, page_size, D]`` in ``dtype``: keys and values, times their scales, of pages ``ids`` [N] int32.

    ``k_pages`` and ``v_pages`` [P, heads, page_size, D] float8, strided alike; a head's page is contiguous.
    """
    if not runs_triton(k_pages):
        return reference.dequantize_pages(k_pages, v_pages, ids, dtype, k_scale, v_scale)
    _, heads, page_size, dim = k_pages.shape
    assert k_pages.stride() == v_pages.stride() and k_pages.stride()[2:] == (dim, 1)
    out = torch.empty((len(ids), 2, heads, page_size, dim), dtype=dtype, device=k_pages.device)
    if len(ids):
        block = triton.next_power_of_2(page_size * dim)
        _dequantize_pages_kernel[(len(ids), 2 * heads)](
            k_pages, v_pages, ids, out, k_pages.stride(0), k_pages.stride(1), page_size * dim, heads, k_scale, v_scale,
            BLOCK=block, num_warps=max(1, min(8, block // 512)), **pdl(k_pages))
    return out
