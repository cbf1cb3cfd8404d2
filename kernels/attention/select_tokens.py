"""Selects the tokens with the largest scores of each request and head.

No more than ``count`` blocks of 16 tokens have one of the ``count`` largest scores, and their maxima are the ``count``
largest. So the maxima select blocks first, and then the blocks' scores tokens: of 16,384 scores 1,024 and 4,096 values
are searched. Either search bisects the 16 bits of a float16 by counting; a sort would move all scores several times,
and needs the length on the host.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from .sparse_decode_plan import SCORE_BLOCK, SparseDecodePlan, TokenScores

_MAXIMA = 1024
"""Maxima that a program keeps in registers; it keeps twice as many of longer requests, and loads more again for each
count. With four times as many the kernel takes 168 registers, not 127."""
_MOST_RESIDENT = 1 << 14
"""Scores of candidates that a program keeps in registers."""
_SCORES_OF_A_THREAD = 32
"""Of candidates. Counts are sums over a program's threads, which few warps make sooner: with 16 an earlier form of this
took 157 us for 64 requests of 16,384 tokens and 32 heads on an H200, 120 us with 32."""
_LEAST_KEY = tl.constexpr(-31745)
"""The key of minus infinity."""


@triton.jit
def _key(score):
    """An integer in the order of float16 scores."""
    bits = score.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFF, bits)


@triton.jit
def _score(key):
    """The score of a key; NaN, which no score reaches, for keys above that of infinity."""
    return tl.where(key < 0, key ^ 0x7FFF, key).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _maxima(maxima_ptr, start, blocks, TILE: tl.constexpr):
    at = start + tl.arange(0, TILE)
    return tl.load(maxima_ptr + at, at < blocks, other=float("-inf"))


@triton.jit
def _candidates(scores_ptr, chosen_ptr, first, chosen, SCORE_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Tokens of chosen blocks, ascending, and their scores [TILE, SCORE_BLOCK]: minus infinity for none."""
    at = first + tl.arange(0, TILE)
    there = at < chosen
    block = tl.load(chosen_ptr + at, there, other=0)
    token = (block * SCORE_BLOCK)[:, None] + tl.arange(0, SCORE_BLOCK)[None, :]
    return token, tl.load(scores_ptr + token, there[:, None], other=float("-inf"))


@triton.jit
def _halve(low, high, larger, middle, count, rank):
    """Narrows [low, high), where the key of this rank is, by the ``count`` of keys from ``middle`` on; ``larger``
    counts those from ``high`` on. If as many as the rank are from ``middle`` on, all of them are selected."""
    found = count == rank
    high = tl.where(found, middle + 1, tl.where(count < rank, middle, high))
    larger = tl.where(found, 0, tl.where(count < rank, count, larger))
    return tl.where(count >= rank, middle, low), high, larger


@triton.jit
def _places(marks, before, equal_left):
    """Which values are taken, and their places: ``marks`` has 1 for a key above the least, 2 ** 16 for an equal one,
    and ``before`` sums those of the values before."""
    equal_before = before >> 16
    taken = ((marks & 1) != 0) | ((marks != 0) & (equal_before < equal_left))
    return taken, (before & 0xFFFF) + tl.minimum(equal_before, equal_left)


@triton.jit
def _marks(scores, least):
    return tl.where(scores > least, 1, tl.where(scores == least, 1 << 16, 0))


@triton.jit
def _select_blocks(maxima_ptr, blocks, rank, chosen_ptr, TILE: tl.constexpr):
    """Returns a key that no selected block's maximum is below, and one above all keys."""
    maxima = _maxima(maxima_ptr, 0, blocks, TILE)
    top = tl.max(maxima, 0)
    for start in range(TILE, blocks, TILE):
        top = tl.maximum(top, tl.max(_maxima(maxima_ptr, start, blocks, TILE), 0))
    end_key = _key(top.to(tl.float16)) + 1
    low, high, larger = _LEAST_KEY, end_key, 0
    while high - low > 1:
        middle = (low + high) >> 1
        least = _score(middle)
        counts = (maxima >= least).to(tl.int32)
        for start in range(TILE, blocks, TILE):
            counts += (_maxima(maxima_ptr, start, blocks, TILE) >= least).to(tl.int32)
        low, high, larger = _halve(low, high, larger, middle, tl.sum(counts, 0), rank)
    equal_left, place = rank - larger, 0
    for start in range(0, blocks, TILE):
        marks = _marks(_maxima(maxima_ptr, start, blocks, TILE), _score(low))
        upto = tl.cumsum(marks, 0)
        taken, places = _places(marks, upto - marks, equal_left)
        tl.store(chosen_ptr + place + places, start + tl.arange(0, TILE), taken)
        total = tl.sum(marks, 0)
        equal_taken = tl.minimum(total >> 16, equal_left)
        equal_left -= equal_taken
        place += (total & 0xFFFF) + equal_taken
    return low, end_key


@triton.jit
def _take_candidates(token, scores, least, equal_left, place, selected_ptr):
    """Writes the tokens whose scores are above ``least``, and the first ``equal_left`` with that one, from ``place``
    on. Returns both numbers for the tokens after these."""
    marks = _marks(scores, least)
    of_blocks = tl.sum(marks, 1)
    before = (tl.cumsum(of_blocks, 0) - of_blocks)[:, None] + tl.cumsum(marks, 1) - marks
    taken, places = _places(marks, before, equal_left)
    tl.store(selected_ptr + place + places, token, taken)
    total = tl.sum(of_blocks, 0)
    equal_taken = tl.minimum(total >> 16, equal_left)
    return equal_left - equal_taken, place + (total & 0xFFFF) + equal_taken


@triton.jit
def _select_candidates(scores_ptr, chosen_ptr, chosen, low, high, rank, selected_ptr, SCORE_BLOCK: tl.constexpr,
                       TILE: tl.constexpr, RESIDENT: tl.constexpr):
    larger = 0
    token, scores = _candidates(scores_ptr, chosen_ptr, 0, chosen, SCORE_BLOCK, TILE)
    while high - low > 1:
        middle = (low + high) >> 1
        least = _score(middle)
        count = tl.sum((scores >= least).to(tl.int32))
        if not RESIDENT:
            for first in range(TILE, chosen, TILE):
                _, more = _candidates(scores_ptr, chosen_ptr, first, chosen, SCORE_BLOCK, TILE)
                count += tl.sum((more >= least).to(tl.int32))
        low, high, larger = _halve(low, high, larger, middle, count, rank)
    least = _score(low)
    equal_left, place = _take_candidates(token, scores, least, rank - larger, 0, selected_ptr)
    if not RESIDENT:
        for first in range(TILE, chosen, TILE):
            token, scores = _candidates(scores_ptr, chosen_ptr, first, chosen, SCORE_BLOCK, TILE)
            equal_left, place = _take_candidates(token, scores, least, equal_left, place, selected_ptr)


@triton.jit
def _select_tokens_kernel(scores_ptr, maxima_ptr, lengths_ptr, score_indptr_ptr, chosen_ptr, selected_ptr,
                          score_stride_h, maxima_stride_h, num_heads, COUNT: tl.constexpr, SCORE_BLOCK: tl.constexpr,
                          MAXIMA: tl.constexpr, TILE: tl.constexpr, RESIDENT: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    if length == 0:
        return
    first_block = tl.load(score_indptr_ptr + request) // SCORE_BLOCK
    row = (request * num_heads + head) * COUNT
    blocks = tl.cdiv(length, SCORE_BLOCK)
    chosen = tl.minimum(blocks, COUNT)
    maxima = maxima_ptr + head * maxima_stride_h.to(tl.int64) + first_block
    if blocks <= MAXIMA:
        least, top = _select_blocks(maxima, blocks, chosen, chosen_ptr + row, MAXIMA)
    else:
        least, top = _select_blocks(maxima, blocks, chosen, chosen_ptr + row, 2 * MAXIMA)
    tl.debug_barrier()  # threads read blocks that others have written
    # COUNT blocks have as many tokens that are not less than the least of their maxima.
    low = tl.where(chosen == COUNT, least, _LEAST_KEY)
    rank = tl.minimum(length, COUNT)
    _select_candidates(scores_ptr + head * score_stride_h.to(tl.int64) + first_block * SCORE_BLOCK, chosen_ptr + row,
                       chosen, low, top, rank, selected_ptr + row, SCORE_BLOCK, TILE, RESIDENT)
    for start in range(rank, COUNT, 256):
        place = start + tl.arange(0, 256)
        tl.store(selected_ptr + row + place, -1, place < COUNT)


def select_tokens(scores: TokenScores, sparse: SparseDecodePlan, count: int) -> torch.Tensor:
    """Returns the ``count`` tokens with the largest ``scores`` of each request and head, ascending: ``[B, H, count]``
    int32, after all tokens of a shorter request -1. Of equal scores the first are selected. Rows of requests without
    scores are arbitrary."""
    values, maxima = scores
    if not runs_triton(values):
        return reference.select_tokens(values, sparse.lengths, sparse.score_indptr, count)
    requests, heads = len(sparse.lengths), len(values)
    chosen, selected = (torch.empty((requests, heads, count), dtype=torch.int32, device=values.device)
                        for _ in range(2))
    candidates = triton.next_power_of_2(count)
    tile = min(candidates, _MOST_RESIDENT // SCORE_BLOCK)
    _select_tokens_kernel[(requests, heads)](
        values, maxima, sparse.lengths, sparse.score_indptr, chosen, selected, values.stride(0), maxima.stride(0),
        heads, COUNT=count, SCORE_BLOCK=SCORE_BLOCK, MAXIMA=_MAXIMA, TILE=tile, RESIDENT=tile == candidates,
        num_warps=max(4, tile * SCORE_BLOCK // (32 * _SCORES_OF_A_THREAD)))
    return selected
