"""Accepts drafts of chains on the device, and places the passes of the drafter that follows.

A draft is accepted where it is the token that was sampled after the row before it, and all drafts before it are. The
result is left for the next step and for the host (ChainState). One program does a request.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..arguments import (
    CHAIN_COUNT,
    CHAIN_DRAFTS,
    CHAIN_POSITION,
    CHAIN_TOKENS,
    AcceptedChains,
    ChainPages,
    ChainState,
    DraftPasses,
    PlacedChains,
    SimulatedCounts,
)
from ..splitmix import GOLDEN, mix
from .place_chains import last_page_len, slots_of


@triton.jit
def _simulated_count(key, position, threshold_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Draws how many drafts are accepted of a request whose newest token is at ``position``, as
    common/speculative/simulated.py does."""
    bits = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * GOLDEN
    drawn = (mix(bits) >> 11).to(tl.int64)
    index = tl.arange(0, BLOCK)
    threshold = tl.load(threshold_ptr + index, index < COUNT, other=0)
    return tl.sum((drawn < threshold).to(tl.int64), 0)


@triton.jit(do_not_specialize=["scratch_page", "max_length"])
def _accept_chains_kernel(sample_ptr, id_ptr, start_ptr, valid_ptr, state_ptr, key_ptr, threshold_ptr, kv_indptr_ptr,
                          kv_indices_ptr, out_next_ptr, out_sequence_ptr, out_count_ptr, out_row_ptr,
                          out_newest_row_ptr, out_newest_ptr, out_position_ptr, out_length_ptr, pass_position_ptr,
                          pass_page_ptr, pass_offset_ptr, pass_length_ptr, scratch_page, max_length,
                          SIMULATED: tl.constexpr, SIMULATED_BLOCK: tl.constexpr, STATE_WIDTH: tl.constexpr,
                          COUNT: tl.constexpr, POSITION: tl.constexpr, DRAFTS: tl.constexpr, TOKENS: tl.constexpr,
                          SAMPLES: tl.constexpr, WIDTH: tl.constexpr, NUM_DRAFTS: tl.constexpr, PAGE: tl.constexpr,
                          BLOCK: tl.constexpr, PASS_BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    requests = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = request * WIDTH + column
    first_page = tl.load(kv_indptr_ptr + request)
    pages = tl.load(kv_indptr_ptr + request + 1) - first_page
    start = tl.load(start_ptr + request)
    valid = tl.load(valid_ptr + request)
    first_id = tl.load(id_ptr + request * WIDTH)
    sample = tl.load(sample_ptr + row, inside, other=0)
    # The draft in the row after each one, and whether that row can be accepted.
    draft = tl.load(id_ptr + row + 1, column + 1 < WIDTH, other=0)
    follows = (column + 1 < valid) & (tl.load(sample_ptr + row + 1, column + 1 < WIDTH, other=0) >= 0)
    if SIMULATED:
        drawn = _simulated_count(tl.load(key_ptr + request), start, threshold_ptr, SIMULATED, SIMULATED_BLOCK)
        drawn = tl.minimum(drawn, valid - 1)
        rejects = (column == drawn) & (column + 1 < valid) & (sample == draft)
        sample = tl.where(column < drawn, draft, tl.where(rejects, (draft == 0).to(tl.int64), sample))
        follows = follows | (column + 1 < drawn)
    ends = inside & ((sample != draft) | (follows == 0))
    count = tl.where(valid > 0, 1 + tl.min(tl.where(ends, column, WIDTH), 0), 0)
    newest = tl.where(count > 0, tl.sum(tl.where(column == count - 1, sample, 0), 0), first_id)
    newest = tl.maximum(newest, 0)
    position = start + count
    tl.store(out_next_ptr + row, tl.maximum(sample, 0), inside)
    tl.store(out_sequence_ptr + request * (WIDTH + 1), first_id)
    tl.store(out_sequence_ptr + request * (WIDTH + 1) + 1 + column, tl.maximum(sample, 0), inside)
    tl.store(out_count_ptr + request, count.to(tl.int64))
    tl.store(out_row_ptr + request, request * WIDTH + tl.maximum(count - 1, 0))
    tl.store(out_newest_row_ptr + request, request * (WIDTH + 1) + count)
    tl.store(out_newest_ptr + request, newest)
    tl.store(out_position_ptr + request, position)
    tl.store(out_length_ptr + request, last_page_len(position, pages, PAGE))

    state_ptr += request * STATE_WIDTH
    tl.store(state_ptr + COUNT, count.to(tl.int64))
    tl.store(state_ptr + POSITION, position)
    tl.store(state_ptr + DRAFTS, NUM_DRAFTS)
    tl.store(state_ptr + TOKENS, newest)
    tl.store(state_ptr + SAMPLES + column, sample, inside)

    ahead = tl.arange(0, PASS_BLOCK)
    placed = ahead <= NUM_DRAFTS
    position += ahead
    page, offset = slots_of(position, first_page, pages, kv_indices_ptr, scratch_page, placed, PAGE)
    entry = ahead * requests + request
    tl.store(pass_position_ptr + entry, tl.minimum(position, max_length - 1), placed)
    tl.store(pass_page_ptr + entry, page, placed)
    tl.store(pass_offset_ptr + entry, offset, placed)
    tl.store(pass_length_ptr + entry, last_page_len(position + 1, pages, PAGE), placed)


def accept_chains(samples: torch.Tensor, placed: PlacedChains, state: ChainState, pages: ChainPages, num_drafts: int,
                  simulated: SimulatedCounts | None = None) -> AcceptedChains:
    """Accepts the drafts of ``placed`` by the ``samples`` [B * width] int64 of its rows; negative ones have failed.

    Writes the first B rows of ``state``, all but their ``num_drafts`` drafts, which the caller writes to ``state.tokens
    [:B, 1:1 + num_drafts]``. A failed sample ends the walk before its row, unless that is the request's first. With
    ``simulated`` samples are replaced first, so that the drawn numbers of drafts are accepted.
    """
    requests = len(placed.valid)
    width = len(samples) // requests
    assert max(num_drafts, width - 1) <= state.max_drafts
    if not runs_triton(samples):
        return reference.accept_chains(samples, placed, state, pages, num_drafts, simulated)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=samples.device)

    entries = 1 + num_drafts, requests
    passes = DraftPasses(empty(*entries), empty(*entries), empty(*entries), empty(*entries, dtype=torch.int32))
    found = AcceptedChains(empty(requests * width), empty(requests, 1 + width), empty(requests), empty(requests),
                           empty(requests), empty(requests), empty(requests), empty(requests, dtype=torch.int32),
                           passes)
    keys, thresholds = (samples, samples) if simulated is None else simulated
    drawn = 0 if simulated is None else len(thresholds)
    _accept_chains_kernel[(requests,)](
        samples, placed.rows.input_ids, placed.rows.starts, placed.valid, state.packed, keys, thresholds,
        pages.kv_indptr, pages.kv_indices, *found[:-1], *passes, pages.scratch_page, pages.max_length,
        SIMULATED=drawn, SIMULATED_BLOCK=triton.next_power_of_2(max(drawn, 1)), STATE_WIDTH=state.packed.stride(0),
        COUNT=CHAIN_COUNT, POSITION=CHAIN_POSITION, DRAFTS=CHAIN_DRAFTS, TOKENS=CHAIN_TOKENS,
        SAMPLES=CHAIN_TOKENS + 1 + state.max_drafts, WIDTH=width, NUM_DRAFTS=num_drafts, PAGE=pages.page_size,
        BLOCK=triton.next_power_of_2(width), PASS_BLOCK=triton.next_power_of_2(1 + num_drafts), num_warps=1)
    return found
