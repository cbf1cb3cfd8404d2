"""Samples tokens from truncated distributions without sorting them.

There are two kernels. The first finds, for each row that is truncated, the smallest logit that top-k and then top-p of
the rest leave: a search by pivots, which cut the range in five in each iteration, one pass that sums counts or
probabilities at and above them (the idea of FlashInfer's sorting-free sampling, whose pivots are random; here they
converge to the exact cut, so that a seeded choice is that of a stable sort, equal logits included). The second kernel
runs over all rows in chunks: it hashes Gumbel noise of the remaining tokens, and the largest probability / noise wins
by an atomic maximum of 64-bit words, the ratio in the high half, the token in the low one: no order of programs changes
the result.
"""

from __future__ import annotations

import torch

from .._triton import tl, triton
from ..splitmix import GOLDEN, mix
from .argmax import argmax_of, argmax_of_tops

_SEARCH_BLOCK = 4096
_CHUNK = 1024
INTS, FLOATS = 4, 3
"""The numbers of ``sample``'s parameters: row, seed, position, top_k; then temperature, top_p, log of min_p."""

_LOG2_E = tl.constexpr(1.4426950408889634)
# A logit that is lower than the largest one by more than _DEPTH * temperature has probability 0 in float32.
_DEPTH = tl.constexpr(104.0)
# A float32 range shrinks to one value in 30 iterations; only NaN takes more.
_MAX_ITERATIONS = tl.constexpr(64)
_MIN_NOISE = tl.constexpr(2.0**-24)


@triton.jit
def _noise(seed, position, token):
    """Hashes exponential noise of ``token`` [n] from seed and position (uint64 all), as
    common/sampling/gumbel_noise.py does."""
    key = mix((mix(seed + GOLDEN) ^ position) + GOLDEN)
    bits = mix(key + token * GOLDEN + GOLDEN)
    uniform = (((bits >> 41) & 0x7FFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-23)
    # Near 1, where the winners' noise lies, a fast logarithm is off by more than its value. There the series of
    # 2 atanh((1 - u) / (1 + u)) = -log(u) is good to a part in 10**7, and 1 - u is exact.
    z = (1.0 - uniform) / (1.0 + uniform)
    square = z * z
    series = 1.0 / 11.0 + square * (1.0 / 13.0 + square * (1.0 / 15.0))
    series = 1.0 / 5.0 + square * (1.0 / 7.0 + square * (1.0 / 9.0 + square * series))
    near = 2.0 * z * (1.0 + square * (1.0 / 3.0 + square * series))
    return tl.maximum(tl.where(uniform >= 0.5, near, -tl.log(uniform)), _MIN_NOISE)


@triton.jit
def _weigh(x, peak, slope, BY_MASS: tl.constexpr):
    """The weight of a token: its probability divided by the largest one, or 1."""
    if BY_MASS:
        weight = tl.exp2((x - peak) * slope)
    else:
        weight = tl.full(x.shape, 1.0, tl.float32)
    return weight


@triton.jit
def _sum_above(row_ptr, vocab, peak, slope, floor, BLOCK: tl.constexpr):
    """Sums the probabilities of the tokens above ``floor``, divided by the largest one."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, token < vocab, other=float("-inf")).to(tl.float32)
        acc += tl.where(x > floor, _weigh(x, peak, slope, True), 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _search(row_ptr, vocab, peak, slope, low, high, at_low, at_high, target, BY_MASS: tl.constexpr,
            BLOCK: tl.constexpr):
    """Finds the largest logit t in ``[low, high)`` with a weight of ``target`` or more at and above it; returns t, that
    weight, and the weight above t. ``at_low`` and ``at_high`` are the weights at and above the bounds."""
    iteration = 0
    searching = at_low > at_high  # true of any numbers
    while searching:
        step = (high - low) * 0.2
        p1 = low + step
        p2 = low + 2.0 * step
        p3 = low + 3.0 * step
        p4 = low + 4.0 * step
        a1 = tl.zeros((BLOCK,), tl.float32)
        a2 = tl.zeros((BLOCK,), tl.float32)
        a3 = tl.zeros((BLOCK,), tl.float32)
        a4 = tl.zeros((BLOCK,), tl.float32)
        largest = tl.full((BLOCK,), float("-inf"), tl.float32)
        smallest = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, token < vocab, other=float("-inf")).to(tl.float32)
            weight = _weigh(x, peak, slope, BY_MASS)
            a1 += tl.where(x >= p1, weight, 0.0)
            a2 += tl.where(x >= p2, weight, 0.0)
            a3 += tl.where(x >= p3, weight, 0.0)
            a4 += tl.where(x >= p4, weight, 0.0)
            largest = tl.maximum(largest, tl.where(x < high, x, float("-inf")))
            smallest = tl.minimum(smallest, tl.where(x >= low, x, float("inf")))
        f1 = tl.sum(a1, 0)
        f2 = tl.sum(a2, 0)
        f3 = tl.sum(a3, 0)
        f4 = tl.sum(a4, 0)
        result = tl.max(largest, 0)
        iteration += 1
        # One value is left between the bounds: the result.
        searching = (result > tl.min(smallest, 0)) & (iteration < _MAX_ITERATIONS)
        if searching:
            new_high = tl.where(f1 < target, p1, tl.where(f2 < target, p2, tl.where(f3 < target, p3,
                                tl.where(f4 < target, p4, high))))
            at_high = tl.where(f1 < target, f1, tl.where(f2 < target, f2, tl.where(f3 < target, f3,
                               tl.where(f4 < target, f4, at_high))))
            new_low = tl.where(f4 >= target, p4, tl.where(f3 >= target, p3, tl.where(f2 >= target, p2,
                               tl.where(f1 >= target, p1, low))))
            at_low = tl.where(f4 >= target, f4, tl.where(f3 >= target, f3, tl.where(f2 >= target, f2,
                              tl.where(f1 >= target, f1, at_low))))
            high = new_high
            low = new_low
        else:
            low = result
    return low, at_low, at_high


@triton.jit
def _token_of(row_ptr, vocab, value, nth, BLOCK: tl.constexpr):
    """Finds the ``nth`` (from 1) of the tokens whose logit is ``value``."""
    seen = 0
    index = vocab + 0
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, token < vocab, other=float("-inf")).to(tl.float32)
        equal = (x == value).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < nth) & (seen + here >= nth):
            rank = tl.cumsum(equal, 0)
            index = tl.min(tl.where((x == value) & (rank == nth - seen), token, vocab), 0)
        seen += here
    return index


# ``floats`` begins after ``stride`` words, aligned for half of the batches: the others would recompile, a pause of a
# second for every running request.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["floats_ptr"])
def _truncate_kernel(logits_ptr, stride_row, peak_ptr, ints_ptr, floats_ptr, floor_ptr, last_ptr, stride, vocab,
                     BLOCK: tl.constexpr):
    """Stores each sample's ``floor`` and ``last``: tokens above ``floor`` remain, and equal ones up to ``last``."""
    index = tl.program_id(0)
    row = tl.load(ints_ptr + index)
    top_k = tl.load(ints_ptr + 3 * stride + index).to(tl.int32)
    top_p = tl.load(floats_ptr + stride + index).to(tl.float32)
    floor = float("-inf") + 0.0 * top_p
    last = vocab + 0
    if (top_k > 0) | (top_p < 1.0):
        row_ptr = logits_ptr + row * stride_row
        peak = tl.load(peak_ptr + row)
        temperature = tl.load(floats_ptr + index).to(tl.float32)
        slope = tl.minimum(_LOG2_E / temperature, 1e30)  # a tiny temperature would make it infinite, and 0 * it NaN
        deepest = peak - _DEPTH * temperature
        mass = tl.zeros((BLOCK,), tl.float32)
        tokens = tl.zeros((BLOCK,), tl.float32)
        peaks = tl.zeros((BLOCK,), tl.float32)
        smallest = tl.full((BLOCK,), float("inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, token < vocab, other=float("-inf")).to(tl.float32)
            counts = (x >= deepest) & (x > float("-inf"))
            mass += tl.where(counts, _weigh(x, peak, slope, True), 0.0)
            tokens += tl.where(counts, 1.0, 0.0)
            peaks += tl.where(x == peak, 1.0, 0.0)
            smallest = tl.minimum(smallest, tl.where(counts, x, float("inf")))
        total_weight = tl.sum(mass, 0)
        num_tokens = tl.sum(tokens, 0)
        num_peaks = tl.sum(peaks, 0)
        low = tl.min(smallest, 0)
        equals = 0.0 * total_weight  # tokens at ``low`` that top-k leaves
        limit = top_k.to(tl.float32)
        if (top_k > 0) & (limit < num_tokens):
            floor = peak
            at_floor = num_peaks
            above = 0.0 * total_weight
            if num_peaks < limit:
                floor, at_floor, above = _search(row_ptr, vocab, peak, slope, low, peak, num_tokens, num_peaks, limit,
                                                 False, BLOCK)
            nth = limit - above
            if nth < at_floor - above:
                last = _token_of(row_ptr, vocab, floor, nth.to(tl.int32), BLOCK)
            equals = nth
            low = floor
            total_weight = _sum_above(row_ptr, vocab, peak, slope, floor, BLOCK) + nth * tl.exp2((floor - peak) * slope)
        if top_p < 1.0:
            target = top_p * total_weight
            cut = peak
            at_cut = num_peaks
            above = 0.0 * total_weight
            if low == peak:
                at_cut = total_weight
            elif num_peaks < target:
                cut, at_cut, above = _search(row_ptr, vocab, peak, slope, low, peak, total_weight, num_peaks, target,
                                             True, BLOCK)
            weight = tl.exp2((cut - peak) * slope)
            nth = tl.maximum(tl.ceil((target - above) / weight), 1.0)
            same = (cut == floor) & (equals > 0.0)
            floor = cut
            if nth < tl.floor((at_cut - above) / weight + 0.5):
                last = _token_of(row_ptr, vocab, cut, nth.to(tl.int32), BLOCK)
            elif not same:
                last = vocab + 0
    tl.store(floor_ptr + index, floor)
    tl.store(last_ptr + index, last)


@triton.jit
def _position(ints_ptr, position_ptr, stride, index, row, OF_ROWS: tl.constexpr):
    """The position of sample ``index``, which is of ``row``."""
    if OF_ROWS:
        position = tl.load(position_ptr + row)
    else:
        position = tl.load(ints_ptr + 2 * stride + index)
    return position.to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["floats_ptr", "position_ptr"])
def _sample_kernel(logits_ptr, stride_row, peak_ptr, ints_ptr, floats_ptr, position_ptr, floor_ptr, last_ptr, best_ptr,
                   stride, vocab, TRUNCATES: tl.constexpr, OF_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = tl.load(ints_ptr + index)
    temperature = tl.load(floats_ptr + index).to(tl.float32)
    smallest = tl.load(floats_ptr + 2 * stride + index).to(tl.float32)
    peak = tl.load(peak_ptr + row)
    x = tl.load(logits_ptr + row * stride_row + token, inside, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x - peak, temperature + tl.zeros((BLOCK,), tl.float32))
    remains = inside & (scaled >= smallest)
    if TRUNCATES:
        floor = tl.load(floor_ptr + index)
        remains = remains & ((x > floor) | ((x == floor) & (token <= tl.load(last_ptr + index))))
    if tl.max(remains.to(tl.int32), 0) > 0:
        seed = tl.load(ints_ptr + stride + index).to(tl.uint64, bitcast=True)
        position = _position(ints_ptr, position_ptr, stride, index, row, OF_ROWS)
        ratio = tl.exp(scaled) / _noise(seed, position, token.to(tl.uint64))
        ratio = tl.where(remains & (ratio > 0.0), ratio, 0.0)
        most = tl.max(ratio, 0)
        first = tl.min(tl.where(ratio == most, token, vocab), 0)
        word = (most.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
        tl.atomic_max(best_ptr + index, word)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["floats_ptr", "position_ptr"])
def _perturb_kernel(logits_ptr, stride_row, peak_ptr, ints_ptr, floats_ptr, position_ptr, floor_ptr, last_ptr, ids_ptr,
                    score_ptr, best_ptr, stride, vocab, TRUNCATES: tl.constexpr, OF_ROWS: tl.constexpr,
                    MAPPED: tl.constexpr, BEST: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = tl.load(ints_ptr + index)
    temperature = tl.load(floats_ptr + index).to(tl.float32)
    samples = temperature > 0
    temperature = tl.where(samples, temperature, 1.0)
    smallest = tl.load(floats_ptr + 2 * stride + index).to(tl.float32)
    peak = tl.load(peak_ptr + row)
    x = tl.load(logits_ptr + row * stride_row + token, inside, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x - peak, temperature + tl.zeros((BLOCK,), tl.float32))
    remains = inside & (scaled >= smallest)
    if TRUNCATES:
        floor = tl.load(floor_ptr + index)
        remains = remains & ((x > floor) | ((x == floor) & (token <= tl.load(last_ptr + index))))
    token_id = token.to(tl.int64)
    if MAPPED:
        token_id = tl.load(ids_ptr + token, inside, other=0)
    seed = tl.load(ints_ptr + stride + index).to(tl.uint64, bitcast=True)
    position = _position(ints_ptr, position_ptr, stride, index, row, OF_ROWS)
    score = tl.where(samples, scaled - tl.log(_noise(seed, position, token_id.to(tl.uint64))), scaled)
    score = tl.where(remains, score, float("-inf"))
    if BEST:
        top, best = argmax_of(score, token, vocab)
        chunk = index.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(score_ptr + chunk, top)
        tl.store(best_ptr + chunk, best)
    else:
        tl.store(score_ptr + index.to(tl.int64) * vocab + token, score, inside)


def sample(logits: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor, truncates: bool,
           positions: torch.Tensor | None = None) -> torch.Tensor:
    """Sample tokens ``[n]`` int64 from n of the rows of ``logits`` [R, vocab] of 16 or 32 bits, which is not changed.

    ``peaks`` [R] float32 are the rows' largest logits. ``params`` [7, n] int64, contiguous in its rows, are each
    sample's row, seed, position and top_k (below 1: all), and as float64 bits its temperature (above 0), top_p, and log
    of min_p. ``truncates``: some sample has a top_k or a top_p below 1. ``positions`` [R] int64 of the rows take the
    place of the samples' where given. A row without a finite logit yields token 0. Runs on a GPU or under the
    interpreter.
    """
    count, vocab = params.shape[1], logits.shape[1]
    ints, floats = params[:INTS], params[INTS:].view(torch.float64)
    best = torch.full((count,), 0x7FFFFFFF, dtype=torch.int64, device=logits.device)
    floors, lasts = _truncate(logits, peaks, params) if truncates else (peaks, ints)
    _sample_kernel[(count, triton.cdiv(vocab, _CHUNK))](
        logits, logits.stride(0), peaks, ints, floats, ints if positions is None else positions, floors, lasts, best,
        params.stride(0), vocab, TRUNCATES=truncates, OF_ROWS=positions is not None, BLOCK=_CHUNK, num_warps=4)
    return 0x7FFFFFFF - (best & 0xFFFFFFFF)


def perturb(logits: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor, truncates: bool,
            token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns scores ``[n, vocab]`` float32, the largest of which is the sample: logits by temperature, shifted so that
    the largest is 0, plus Gumbel noise; -inf where truncated. With temperature 0, logits without noise.

    Arguments are ``sample``'s. The noise of a column is that of the token of its number, or of ``token_ids`` [vocab]
    int64.
    """
    scores = torch.empty((params.shape[1], logits.shape[1]), dtype=torch.float32, device=logits.device)
    _perturb(logits, peaks, params, truncates, None, token_ids, scores, None)
    return scores


def best_perturbed(logits: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor, positions: torch.Tensor,
                   out: torch.Tensor | None = None, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the tokens [n] int64 with the largest of ``perturb``'s scores, of equal ones the first; also written to
    ``out`` [n], of any stride. ``positions`` [R] int64 are those of the rows."""
    tops = torch.empty((params.shape[1], triton.cdiv(logits.shape[1], _CHUNK)), dtype=torch.float32,
                       device=logits.device)
    columns = torch.empty_like(tops, dtype=torch.int32)
    _perturb(logits, peaks, params, True, positions, token_ids, tops, columns)
    return argmax_of_tops(tops, columns, logits.shape[1], out, token_ids)[1]


def _perturb(logits: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor, truncates: bool,
             positions: torch.Tensor | None, token_ids: torch.Tensor | None, scores: torch.Tensor,
             columns: torch.Tensor | None) -> None:
    """Writes ``perturb``'s scores, or with ``columns`` the largest one of each chunk, and where it is."""
    count, vocab = params.shape[1], logits.shape[1]
    ints, floats = params[:INTS], params[INTS:].view(torch.float64)
    floors, lasts = _truncate(logits, peaks, params) if truncates else (peaks, ints)
    _perturb_kernel[(count, triton.cdiv(vocab, _CHUNK))](
        logits, logits.stride(0), peaks, ints, floats, ints if positions is None else positions, floors, lasts,
        ints if token_ids is None else token_ids, scores, scores if columns is None else columns, params.stride(0),
        vocab, TRUNCATES=truncates, OF_ROWS=positions is not None, MAPPED=token_ids is not None,
        BEST=columns is not None, BLOCK=_CHUNK, num_warps=4)


def _truncate(logits: torch.Tensor, peaks: torch.Tensor, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``_truncate_kernel``'s floors [n] float32 and lasts [n] int32."""
    count = params.shape[1]
    floors = torch.empty(count, dtype=torch.float32, device=logits.device)
    lasts = torch.empty(count, dtype=torch.int32, device=logits.device)
    _truncate_kernel[(count,)](logits, logits.stride(0), peaks, params[:INTS], params[INTS:].view(torch.float64),
                               floors, lasts, params.stride(0), logits.shape[1], BLOCK=_SEARCH_BLOCK, num_warps=16)
    return floors, lasts
