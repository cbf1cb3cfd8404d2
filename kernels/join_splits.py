"""The second half of attention that was split along the sequence: its parts, joined by their log-sum-exps."""

from __future__ import annotations

import torch

from ._triton import tl, triton

MOST_SPLITS = 64
# 64 splits of so many columns are 32 KiB of registers; a latent's 512 columns at once would not fit.
_BLOCK_COLUMNS = 128


# Without ``do_not_specialize`` a step whose splits are the first to be a multiple of 16 would compile anew: a second's
# pause for every running request.
@triton.jit(do_not_specialize=["splits"])
def _join_splits_kernel(part_ptr, lse_ptr, out_ptr, splits, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                        BLOCK_SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    dim = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    lse = tl.load(lse_ptr + row * splits + split, split < splits, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(part_ptr + (row * splits + split)[:, None] * DIM + dim[None, :],
                    (split < splits)[:, None] & (dim < DIM)[None, :], other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * DIM + dim, joined.to(out_ptr.dtype.element_ty), dim < DIM)


def decode_splits(num_reqs: int, num_kv_heads: int, max_length: int, processors: int) -> int:
    """Splits that give each multiprocessor about two programs, none shorter than 256 tokens; a power of two."""
    wanted = max(1, min(2 * processors // max(1, num_reqs * num_kv_heads), max_length // 256, MOST_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def join_splits(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> None:
    """``parts`` [B, H, splits, D] float32, normalised, with ``lses`` [B, H, splits] (base 2, minus infinity where a
    split held nothing) into ``out`` [B, H, D]; all contiguous, on a GPU. Every row has a split that holds something."""
    requests, heads, splits, dim = parts.shape
    block = min(_BLOCK_COLUMNS, max(16, triton.next_power_of_2(dim)))
    _join_splits_kernel[(requests * heads, triton.cdiv(dim, block))](
        parts, lses, out, splits, DIM=dim, BLOCK_DIM=block, BLOCK_SPLITS=MOST_SPLITS)
