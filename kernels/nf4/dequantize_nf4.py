"""Weights of four bits that index a table: NF4 (arXiv:2305.14314) and FP4 as bitsandbytes has them, in blocks of 64."""

from __future__ import annotations

from functools import cache

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

BLOCK = reference.NF4_BLOCK
_BYTES = 2048


@triton.jit(do_not_specialize=["total"])
def _dequantize_nf4_kernel(packed_ptr, absmax_ptr, table_ptr, out_ptr, total, BLOCK_BYTES: tl.constexpr,
                           BYTES: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < total
    packed = tl.load(packed_ptr + at, inside, other=0).to(tl.int32)
    scale = tl.load(absmax_ptr + at // BLOCK_BYTES, inside, other=0.0)
    high = tl.load(table_ptr + (packed >> 4)) * scale
    low = tl.load(table_ptr + (packed & 15)) * scale
    made = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    first = tl.program_id(0).to(tl.int64) * (2 * BYTES)
    both = first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + both, made, both < 2 * total)


def dequantize_nf4(packed: torch.Tensor, absmax: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """``[out, in]`` in ``dtype`` of ``packed`` [out, in / 2] uint8, the first of two values in the upper bits, and
    ``absmax`` [out, in / 64] float32, both contiguous. ``kind`` is "nf4" or "fp4"."""
    if not runs_triton(packed):
        return reference.dequantize_nf4(packed, absmax, kind, dtype)
    assert packed.is_contiguous() and absmax.is_contiguous()
    out = torch.empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype, device=packed.device)
    total = packed.numel()
    if total:
        _dequantize_nf4_kernel[(triton.cdiv(total, _BYTES),)](
            packed, absmax, _table(kind, packed.device), out, total, BLOCK_BYTES=BLOCK // 2, BYTES=_BYTES, num_warps=4,
            **pdl(packed))
    return out


@cache
def _table(kind: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(reference.NF4_TABLES[kind], device=device)


def quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``weight`` [out, in] to NF4, each value to the nearest one: ``(packed, absmax)``."""
    table = torch.tensor(reference.NF4_TABLES["nf4"], device=weight.device)
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    codes = torch.bucketize(blocks / absmax.clamp(min=1e-12)[..., None], (table[1:] + table[:-1]) / 2)
    pairs = codes.to(torch.uint8).flatten(1).unflatten(1, (-1, 2))
    return pairs[..., 0] << 4 | pairs[..., 1], absmax
