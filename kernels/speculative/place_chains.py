"""Places the rows of a step that verifies chains of drafts: their tokens, positions and slots, all on the device.

A request's newest token, its position and its drafts are in the state that the step before has left, or the host knows
them. One program places a request's rows, which are a few numbers: a step of one request pays for the launch.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..arguments import (
    CHAIN_DRAFTS,
    CHAIN_POSITION,
    CHAIN_TOKENS,
    ChainPages,
    ChainState,
    KnownChains,
    PlacedChains,
    PlacedRows,
)


@triton.jit
def slots_of(position, first_page, pages, kv_indices_ptr, scratch_page, stored, PAGE: tl.constexpr):
    """``(page, offset)`` of ``position`` [n] of a request whose ``pages`` begin at ``first_page``; the scratch page
    after them."""
    index = position // PAGE
    listed = index < pages
    page = tl.load(kv_indices_ptr + first_page + index, listed & stored, other=0).to(tl.int64)
    return tl.where(listed, page, scratch_page), position % PAGE


@triton.jit
def last_page_len(length, pages, PAGE: tl.constexpr):
    """The tokens in the last of ``pages`` of a request of ``length`` tokens, which reads none beyond its pages."""
    return (tl.minimum(length, pages.to(tl.int64) * PAGE) - (pages - 1).to(tl.int64) * PAGE).to(tl.int32)


@triton.jit(do_not_specialize=["scratch_page", "max_length"])
def _place_chains_kernel(state_ptr, source_ptr, start_ptr, token_ptr, num_drafts_ptr, limit_ptr, kv_indptr_ptr,
                         kv_indices_ptr, out_start_ptr, out_id_ptr, out_position_ptr, out_page_ptr, out_offset_ptr,
                         out_length_ptr, out_valid_ptr, out_sample_ptr, scratch_page, max_length,
                         CHAINS: tl.constexpr, STATE_WIDTH: tl.constexpr, POSITION: tl.constexpr,
                         DRAFTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
                         BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    first_page = tl.load(kv_indptr_ptr + request)
    pages = tl.load(kv_indptr_ptr + request + 1) - first_page
    start = tl.load(start_ptr + request)
    token = tl.load(token_ptr + request * WIDTH + column, inside, other=0)
    if CHAINS:
        source = tl.load(source_ptr + request)
        limit = tl.load(limit_ptr + request)
        num_drafts = tl.load(num_drafts_ptr + request)
        if source >= 0:
            row_ptr = state_ptr + source * STATE_WIDTH
            start = tl.load(row_ptr + POSITION)
            num_drafts = tl.load(row_ptr + DRAFTS)
            token = tl.load(row_ptr + TOKENS + column, inside & (column <= num_drafts), other=0)
        valid = tl.maximum(tl.minimum(tl.minimum(num_drafts + 1, WIDTH), limit - start), 0)
        token = tl.where(column < valid, token, 0)
        tl.store(out_valid_ptr + request, valid)
    position = start + column
    page, offset = slots_of(position, first_page, pages, kv_indices_ptr, scratch_page, inside, PAGE)
    row = request * WIDTH + column
    tl.store(out_start_ptr + request, start)
    tl.store(out_id_ptr + row, token, inside)
    tl.store(out_position_ptr + row, tl.minimum(position, max_length - 1), inside)
    tl.store(out_page_ptr + row, page, inside)
    tl.store(out_offset_ptr + row, offset, inside)
    tl.store(out_length_ptr + request, last_page_len(start + WIDTH, pages, PAGE))
    if CHAINS:
        tl.store(out_sample_ptr + row, position + 1, inside)


def place_chains(state: ChainState, sources: torch.Tensor, known: KnownChains, limits: torch.Tensor,
                 pages: ChainPages) -> PlacedChains:
    """Places the rows of B requests, as many as ``known.tokens`` [B, width] has columns.

    Request b's chain is row ``sources[b]`` of ``state`` where that is not negative, else row b of ``known``. Its rows
    after the drafts, and those at ``limits[b]`` or beyond, are void (``sources`` and ``limits`` [B] int64): they have
    token 0, and their slot.
    """
    if not runs_triton(sources):
        return reference.place_chains(state, sources, known, limits, pages)
    rows = _empty_rows(known.tokens)
    valid, sampled = torch.empty_like(known.positions), torch.empty_like(rows.positions)
    _launch(state, sources, known.positions, known.tokens, known.num_drafts, limits, pages, rows, valid, sampled,
            chains=True)
    return PlacedChains(rows, valid, sampled)


def place_rows(starts: torch.Tensor, tokens: torch.Tensor, pages: ChainPages) -> PlacedRows:
    """Places rows of ``tokens`` [B, width] int64, contiguous, from positions ``starts`` [B] int64 on."""
    if not runs_triton(starts):
        return reference.place_rows(starts, tokens, pages)
    rows = _empty_rows(tokens)
    _launch(None, starts, starts, tokens, starts, starts, pages, rows, starts, starts, chains=False)
    return rows


def _launch(state: ChainState | None, sources: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor,
            num_drafts: torch.Tensor, limits: torch.Tensor, pages: ChainPages, rows: PlacedRows, valid: torch.Tensor,
            sample_positions: torch.Tensor, *, chains: bool) -> None:
    requests, width = tokens.shape
    _place_chains_kernel[(requests,)](
        starts if state is None else state.packed, sources, starts, tokens, num_drafts, limits, pages.kv_indptr,
        pages.kv_indices, *rows, valid, sample_positions, pages.scratch_page, pages.max_length, CHAINS=chains,
        STATE_WIDTH=0 if state is None else state.packed.stride(0), POSITION=CHAIN_POSITION, DRAFTS=CHAIN_DRAFTS,
        TOKENS=CHAIN_TOKENS, WIDTH=width, PAGE=pages.page_size, BLOCK=triton.next_power_of_2(width), num_warps=1)


def _empty_rows(tokens: torch.Tensor) -> PlacedRows:
    requests, rows = len(tokens), tokens.numel()

    def empty(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=tokens.device)

    return PlacedRows(empty(requests), empty(rows), empty(rows), empty(rows), empty(rows),
                      empty(requests, torch.int32))
