"""Multiplies with a weight of the rows' own type: by our kernels where they are faster, else by cuBLAS.

Products of 65 to 128 rows are split_k_warp_specialized.py's in eager runs and CUDA graphs alike, although the host
takes 72 us to launch one and 13 us for cuBLAS's. Decode steps of that size are captured, and so are prompts wherever
launching takes longer than computing, so that the host seldom pays that; if capture decided, eager runs would compute
other sums than graphs do.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch.nn.functional import linear

from .. import reference
from ..rowwise.rmsnorm import rmsnorm
from ..rowwise.silu_and_mul import silu_and_mul
from ..rowwise.split_k_rmsnorm import split_k_rmsnorm
from ..tuning.gemm import (
    INVARIANT_LARGE,
    AnyInvariantTile,
    BatchedSplits,
    InvariantTile,
    PersistentTile,
    SplitKTile,
    WarpSpecializedTile,
)
from ..tuning.policy import policy_of
from .batch_invariant_matmul import batch_invariant_matmul
from .small_m_matmul import small_m_matmul


def dense_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T + bias``: ``[T, out]``, in their type; ``silu_and_mul`` of that,
    ``[T, out / 2]``, where it is ``gated``."""
    policy, rows = policy_of(weight.device).gemm, len(x)
    out, width = weight.shape
    if policy.batch_invariant:
        return _invariant_product(x, weight, bias, gated)
    if rows <= policy.small_m_max_rows(out, width, weight.itemsize) and x.stride(-1) == 1:
        return small_m_matmul(x, weight, bias, gated=gated)
    if bias is None:
        split = policy.split_k(rows, out, width, weight.itemsize)
        if split is not None and _has_aligned_rows(x):
            return _split_k().split_k_matmul(x, weight, split, gated=gated)
        fused = activation_tile(x, weight) if gated else None
        if fused is not None:
            return _warp_specialized(x, weight, fused, gated=True)
    y = linear(x, weight, bias)
    return silu_and_mul(y) if gated else y


def library_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``dense_matmul`` by the library alone, for small weights: routers', classifiers', gates'."""
    if policy_of(weight.device).gemm.batch_invariant:
        return _invariant_product(x, weight, bias)
    return linear(x, weight, bias)


def float32_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``dense_matmul`` by the library with results in float32, whatever the type of ``x`` and ``weight``."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return linear(x.float(), weight.float())


def _invariant_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                       gated: bool = False) -> torch.Tensor:
    """Multiplies by a tile whose order of sums is that of all others; without Triton by the twin."""
    tile = policy_of(weight.device).gemm.invariant(len(x), *weight.shape, weight.itemsize)
    return _by_invariant_tile(x, weight.contiguous(), bias, gated, tile)


def _by_invariant_tile(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool,
                       tile: AnyInvariantTile | None) -> torch.Tensor:
    if isinstance(tile, PersistentTile) and len(x) and _is_aligned(weight):
        return _persistent(x, weight, bias, tile, gated)
    stores_by_tma = bias is None and not len(weight) % (16 if gated else 8)
    if isinstance(tile, WarpSpecializedTile | SplitKTile) and stores_by_tma and _reads_by_tma(x, weight):
        if isinstance(tile, SplitKTile):
            return _split_k().split_k_matmul(x, weight, tile, gated=gated)
        return _warp_specialized(x, weight, tile, gated=gated, exact=True)
    if tile is None:
        y = reference.batch_invariant_matmul(x, weight, bias)
    else:
        y = batch_invariant_matmul(x if x.stride(-1) == 1 else x.contiguous(), weight, bias,
                                   tile if isinstance(tile, InvariantTile) else INVARIANT_LARGE)
    return silu_and_mul(y) if gated else y


def _persistent(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: PersistentTile,
                gated: bool) -> torch.Tensor:
    from .persistent_matmul import persistent_matmul  # not there without Triton
    x = x.contiguous()
    return persistent_matmul(x if _is_aligned(x) else x.clone(), weight, bias, tile, gated)


def _reads_by_tma(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Says whether TMA can read both; ``weight`` is contiguous."""
    return _has_aligned_rows(x) and _is_aligned(x) and _is_aligned(weight)


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Says whether TMA can read from its first value on."""
    return matrix.data_ptr() % 16 == 0


def _has_aligned_rows(x: torch.Tensor) -> bool:
    """Says whether rows begin at multiples of 16 bytes from the first one."""
    return x.stride(1) == 1 and not x.stride(0) % 8


def activation_tile(x: torch.Tensor, weight: torch.Tensor) -> WarpSpecializedTile | None:
    """dense_warp_specialized.py's tile of a product that ends in the activation; None where cuBLAS's, and the
    activation after it, are as fast, or its loads cannot read both."""
    tile = policy_of(weight.device).gemm.warp_specialized(len(x), *weight.shape, weight.itemsize)
    readable = tile is not None and x.dtype == weight.dtype and weight.is_contiguous() and _reads_by_tma(x, weight)
    return tile if readable else None


def _warp_specialized(x: torch.Tensor, weight: torch.Tensor, tile: WarpSpecializedTile, *,
                      gated: bool = False, exact: bool = False) -> torch.Tensor:
    from .dense_warp_specialized import warp_specialized_matmul  # not there without Triton
    return warp_specialized_matmul(x, weight, tile, gated=gated, exact=exact)


def _split_k() -> ModuleType:
    from . import split_k_warp_specialized  # not there without Triton
    return split_k_warp_specialized


def fuses_residual(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Says whether ``matmul_rmsnorm`` is faster than ``dense_matmul`` followed by ``rmsnorm`` with a residual."""
    if not x.is_cuda or weight.itemsize != 2:
        return False
    return policy_of(weight.device).gemm.adds_residual(len(x)) or _fused_reduce(x, weight) is not None


def matmul_rmsnorm(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor,
                   eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm`` with ``gain`` of ``total = residual + x @ weight.T`` [T, out], and ``total``. ``residual`` is
    contiguous, and used up."""
    splits = _fused_reduce(x, weight)
    if isinstance(splits, SplitKTile):
        return _reduced(residual, x, weight, gain, eps, splits)
    if splits is not None:
        return split_k_rmsnorm(split_product(x, weight, splits.splits), gain, eps, residual)
    residual.addmm_(x, weight.T)  # rounded once
    return rmsnorm(residual, gain, eps)


def split_product(x: torch.Tensor, weight: torch.Tensor, splits: int) -> torch.Tensor:
    """``[splits, T, out]``, whose sum is the product."""
    return torch.bmm(x.unflatten(1, (splits, -1)).transpose(0, 1), weight.unflatten(1, (splits, -1)).permute(1, 2, 0))


def _fused_reduce(x: torch.Tensor, weight: torch.Tensor) -> SplitKTile | BatchedSplits | None:
    """The splits of a product that leaves partial sums to the norm; None where it leaves none."""
    splits = policy_of(weight.device).gemm.fused_reduce(len(x), *weight.shape, weight.itemsize)
    if splits is None or not _has_aligned_rows(x) or x.dtype != weight.dtype:
        return None
    return splits


def _reduced(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, eps: float,
             tile: SplitKTile) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial sums are rounded as the summands of tensor-parallel ranks are: in float32 they would take longer to
    travel than the split gains."""
    return split_k_rmsnorm(_split_k().split_k_partials(x, weight, tile, x.dtype), gain, eps, residual)


def compile_tiles(weight: torch.Tensor, *, gated: bool = False) -> None:
    """Compile what products with it take, so that no request waits for it; its values do not matter."""
    policy, (out, width) = policy_of(weight.device).gemm, weight.shape
    numbers = policy.numbers
    if policy.batch_invariant:
        for rows in (1, 9, 17, 33, 65):
            dense_matmul(weight.new_zeros((rows, width)), weight, gated=gated)
        if isinstance(policy.invariant(1, out, width, weight.itemsize), PersistentTile):
            for many in policy.invariant_tiles:
                _by_invariant_tile(weight.new_zeros((1, width)), weight, None, gated, many)
        return
    for rows in (1, 2, 9, 17, 33):
        if rows <= policy.small_m_max_rows(out, width, weight.itemsize):
            small_m_matmul(weight.new_zeros((rows, width)), weight, gated=gated)
    if gated and policy.fuses_activation(out, width, weight.itemsize) and weight.is_contiguous():
        for tile in (numbers.warp_specialized.tall, numbers.warp_specialized.usual):
            _warp_specialized(weight.new_zeros((1, width)), weight, tile, gated=True)
    for rows in (numbers.split_k.min_rows, numbers.split_k.max_rows, numbers.batched_splits.max_rows):
        x = weight.new_zeros((rows, width))
        split = policy.split_k(rows, out, width, weight.itemsize)
        if split is not None:
            _split_k().split_k_matmul(x, weight, split, gated=gated)
        elif _fused_reduce(x, weight) is not None and not gated:
            matmul_rmsnorm(weight.new_zeros((rows, out)), x, weight, weight.new_zeros(out), 1.0)
