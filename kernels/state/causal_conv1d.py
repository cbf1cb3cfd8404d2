"""The short causal convolution of layers with recurrent states."""

from __future__ import annotations

import torch

from .._triton import runs_triton, tl, triton
from ..arguments import StateRuns
from ..reference import state as reference

_BLOCK_ROWS = 16
_BLOCK_CHANNELS = 64


@triton.jit
def _channels_of(block, part_channels, BLOCK_C: tl.constexpr):
    """The part of a block of channels, their places in it, and which there are: neighbours, as loads want them."""
    blocks = tl.cdiv(part_channels, BLOCK_C)
    place = block % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    return block // blocks, place, place < part_channels


@triton.jit
def _convolve_kernel(x_ptr, weight_ptr, bias_ptr, state_ptr, begins_ptr, ends_ptr, sources_ptr, targets_ptr, out_ptr,
                     x_row, x_part, state_page, state_part, num_channels, part_channels, TAPS: tl.constexpr,
                     HAS_BIAS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    run = tl.program_id(0)
    begin = tl.load(begins_ptr + run)
    end = tl.load(ends_ptr + run)
    if begin + tl.program_id(1) * BLOCK_T >= end:
        return
    rows = begin + tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, place, inside = _channels_of(tl.program_id(2), part_channels, BLOCK_C)
    channels = part * part_channels + place
    source = tl.load(sources_ptr + run).to(tl.int64)
    x_channel = x_ptr + part * x_part + place
    history = state_ptr + tl.maximum(source, 0) * state_page + part * state_part + place * (TAPS - 1)
    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channels, inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        row = rows - (TAPS - 1) + tap
        seen = (rows < end)[:, None] & inside[None, :]
        own = tl.load(x_channel[None, :] + row.to(tl.int64)[:, None] * x_row, seen & (row >= begin)[:, None],
                      other=0.0).to(tl.float32)
        if tl.program_id(1) == 0:  # others see no token before their run
            own += tl.load(history[None, :] + (row - begin + TAPS - 1)[:, None],
                           seen & (row < begin)[:, None] & (source >= 0), other=0.0).to(tl.float32)
        acc += own * tl.load(weight_ptr + channels * TAPS + tap, inside, other=0.0).to(tl.float32)[None, :]
    acc = acc / (1.0 + tl.exp(-acc))
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * num_channels + channels[None, :], acc.to(out_ptr.dtype.element_ty),
             (rows < end)[:, None] & inside[None, :])
    if ONE_ROW:
        _keep_inputs(x_channel, history, state_ptr, targets_ptr, run, begin, end, source, part, place, inside, x_row,
                     state_page, state_part, TAPS)


@triton.jit
def _keep_inputs_kernel(x_ptr, state_ptr, begins_ptr, ends_ptr, sources_ptr, targets_ptr, x_row, x_part, state_page,
                        state_part, num_channels, part_channels, TAPS: tl.constexpr, BLOCK_C: tl.constexpr):
    run = tl.program_id(0)
    part, place, inside = _channels_of(tl.program_id(1), part_channels, BLOCK_C)
    source = tl.load(sources_ptr + run).to(tl.int64)
    history = state_ptr + tl.maximum(source, 0) * state_page + part * state_part + place * (TAPS - 1)
    _keep_inputs(x_ptr + part * x_part + place, history, state_ptr, targets_ptr, run, tl.load(begins_ptr + run),
                 tl.load(ends_ptr + run), source, part, place, inside, x_row, state_page, state_part,
                 TAPS)


@triton.jit
def _keep_inputs(x_channel, history, state_ptr, targets_ptr, run, begin, end, source, part, place, inside, x_row,
                 state_page, state_part, TAPS: tl.constexpr):
    """Stores the last TAPS - 1 inputs of a run. Ascending places: those that are read lie behind those written, of the
    same channel, which one thread has."""
    target = state_ptr + tl.load(targets_ptr + run).to(tl.int64) * state_page + part * state_part + place * (TAPS - 1)
    for place_in in tl.static_range(TAPS - 1):
        row = end - (TAPS - 1) + place_in
        own = tl.load(x_channel + row.to(tl.int64) * x_row, inside & (row >= begin), other=0.0).to(tl.float32)
        before = tl.load(history + row - begin + TAPS - 1, inside & (row < begin) & (source >= 0),
                         other=0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(target + place_in, (own + before).to(state_ptr.dtype.element_ty), inside)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor,
                  runs: StateRuns, out: torch.Tensor) -> None:
    """Convolves each channel over the last ``taps`` tokens and applies silu: ``out[t] = silu(bias + sum_i weight[i] *
    x[t - taps + 1 + i])``; tokens before a run are those of its source.

    ``x`` [T, parts, channels] with contiguous channels; ``weight`` [parts, channels, taps], ``bias`` [parts,
    channels]; ``states`` [pages, parts, channels, taps - 1] are the last inputs; ``out`` as ``x``, contiguous.
    """
    if not runs_triton(x):
        reference.causal_conv1d(x, weight, bias, states, runs, out)
        return
    _, parts, part_channels = x.shape
    num_channels, taps, count = parts * part_channels, weight.shape[-1], len(runs.targets)
    assert weight.is_contiguous() and out.is_contiguous() and x.stride(2) == 1
    assert states.stride()[2:] == (taps - 1, 1)
    one_row = runs.max_rows == 1
    block_rows = 1 if one_row else _BLOCK_ROWS
    blocks = parts * triton.cdiv(part_channels, _BLOCK_CHANNELS)
    strides = x.stride(0), x.stride(1), states.stride(0), states.stride(1), num_channels, part_channels
    _convolve_kernel[(count, triton.cdiv(runs.max_rows, block_rows), blocks)](
        x, weight, weight if bias is None else bias, states, runs.begins, runs.ends, runs.sources, runs.targets, out,
        *strides, TAPS=taps, HAS_BIAS=bias is not None, ONE_ROW=one_row, BLOCK_T=block_rows, BLOCK_C=_BLOCK_CHANNELS)
    if not one_row:  # a kernel of its own: programs of several blocks of rows read the source, which may be the target
        _keep_inputs_kernel[(count, blocks)](x, states, runs.begins, runs.ends, runs.sources, runs.targets, *strides,
                                             TAPS=taps, BLOCK_C=_BLOCK_CHANNELS)
