"""The selective scan of Mamba-2 (state-space duality, arXiv:2405.21060, section 6): prompts in chunks of 64 tokens,
whose pairs are computed by matrix products; a program goes over a head's chunks with the state in registers. Products
are of the type of their rows, and summed in float32."""

from __future__ import annotations

import torch

from .._triton import runs_triton, tl, triton
from ..arguments import Mamba2, StateRuns
from ..reference import state as reference
from ..reference.state import CHUNK

_STEP_VALUES = 32
_PROMPT_VALUES = 64
"""Values of a head in a program. On an H200 prompts' kernels read beyond memory with 32, whatever their warps, and took
1.3 to 2 times as long with states the other way round."""


@triton.jit
def _scan_kernel(mixed_ptr, step_ptr, log_decay_ptr, skip_ptr, state_ptr, begins_ptr, ends_ptr, sources_ptr,
                 targets_ptr, out_ptr, state_page, state_part, GROUPS: tl.constexpr, HEADS: tl.constexpr,
                 VALUE: tl.constexpr, STATE: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
                 BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ONE_ROW: tl.constexpr):
    """All tokens of one run, for some values of one head."""
    run = tl.program_id(0)
    head = tl.program_id(1)
    part = head // HEADS
    begin = tl.load(begins_ptr + run)
    end = tl.load(ends_ptr + run)
    source = tl.load(sources_ptr + run).to(tl.int64)
    target = tl.load(targets_ptr + run).to(tl.int64)
    values = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = tl.arange(0, BLOCK_N)
    matrix = part * state_part + (head % HEADS) * VALUE * STATE + values[None, :] * STATE + columns[:, None]
    is_matrix = (values < VALUE)[None, :] & (columns < STATE)[:, None]
    state = tl.load(state_ptr + tl.maximum(source, 0) * state_page + matrix, is_matrix & (source >= 0),
                    other=0.0).to(tl.float32)
    skip = tl.load(skip_ptr + head)
    if ONE_ROW:
        row = begin.to(tl.int64)
        inputs = mixed_ptr + (row * GROUPS + part) * CHANNELS
        x = tl.load(inputs + (head % HEADS) * VALUE + values, values < VALUE, other=0.0).to(tl.float32)
        b = tl.load(inputs + HEADS * VALUE + columns, columns < STATE, other=0.0).to(tl.float32)
        c = tl.load(inputs + HEADS * VALUE + STATE + columns, columns < STATE, other=0.0).to(tl.float32)
        of_head = row * GROUPS * HEADS + head
        state *= tl.exp(tl.load(log_decay_ptr + of_head))
        state += (x * tl.load(step_ptr + of_head))[None, :] * b[:, None]
        out = tl.sum(state * c[:, None], 0) + skip * x
        tl.store(out_ptr + of_head * VALUE + values, out.to(out_ptr.dtype.element_ty), values < VALUE)
    else:
        number = tl.arange(0, CHUNK)
        for start in range(begin, end, CHUNK):
            rows = (start + number).to(tl.int64)
            live = rows < end
            is_value = live[:, None] & (values < VALUE)[None, :]
            is_state = live[:, None] & (columns < STATE)[None, :]
            inputs = mixed_ptr + (rows * GROUPS + part) * CHANNELS
            x = tl.load(inputs[:, None] + (head % HEADS) * VALUE + values[None, :], is_value, other=0.0)
            b = tl.load(inputs[:, None] + HEADS * VALUE + columns[None, :], is_state, other=0.0)
            c = tl.load(inputs[:, None] + HEADS * VALUE + STATE + columns[None, :], is_state, other=0.0)
            of_head = rows * GROUPS * HEADS + head
            total = tl.cumsum(tl.load(log_decay_ptr + of_head, live, other=0.0), 0)
            last = tl.sum(tl.where(number == CHUNK - 1, total, 0.0), 0)
            step = tl.load(step_ptr + of_head, live, other=0.0)
            seen = number[:, None] >= number[None, :]
            decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * step[None, :]
            scores = tl.where(seen, tl.dot(c, tl.trans(b), input_precision="ieee") * decay, 0.0).to(x.dtype)
            out = tl.dot(c, state.to(c.dtype), input_precision="ieee") * tl.exp(total)[:, None]
            out += tl.dot(scores, x, input_precision="ieee") + skip * x.to(tl.float32)
            tl.store(out_ptr + of_head[:, None] * VALUE + values[None, :], out.to(out_ptr.dtype.element_ty), is_value)
            left = (x.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(x.dtype)
            state = state * tl.exp(last) + tl.dot(tl.trans(b), left, input_precision="ieee")
    tl.store(state_ptr + target * state_page + matrix, state.to(state_ptr.dtype.element_ty), is_matrix)


def selective_scan(mixed: torch.Tensor, step: torch.Tensor, log_decay: torch.Tensor, skip: torch.Tensor,
                   states: torch.Tensor, shape: Mamba2, runs: StateRuns, out: torch.Tensor) -> None:
    """For each token t of a run, from the state S [P, N] of a head: ``S = exp(log_decay[t]) * S + step[t] *
    outer(x[t], B[t])``, ``out[t] = S @ C[t] + skip * x[t]``.

    ``mixed`` [T, groups, channels], contiguous, has the x of a group's heads, its B and its C; ``step`` and
    ``log_decay`` [T, H] float32 of the H = groups * heads heads, ``skip`` [H] float32; ``states`` [pages, groups,
    heads * P * N]; ``out`` [T, H, P].
    """
    if not runs_triton(mixed):
        reference.selective_scan(mixed, step, log_decay, skip, states, shape, runs, out)
        return
    assert mixed.is_contiguous() and step.is_contiguous() and log_decay.is_contiguous() and out.is_contiguous()
    assert states.stride(2) == 1
    one_row = runs.max_rows == 1
    block = _STEP_VALUES if one_row else _PROMPT_VALUES
    _scan_kernel[(len(runs.targets), shape.num_groups * shape.heads, triton.cdiv(shape.head_dim, block))](
        mixed, step, log_decay, skip, states, runs.begins, runs.ends, runs.sources, runs.targets, out,
        states.stride(0), states.stride(1), GROUPS=shape.num_groups, HEADS=shape.heads, VALUE=shape.head_dim,
        STATE=shape.state_dim, CHANNELS=shape.channels, CHUNK=CHUNK, BLOCK_P=block,
        BLOCK_N=max(16, triton.next_power_of_2(shape.state_dim)), ONE_ROW=one_row, num_stages=1,
        num_warps=4 if one_row else 8)
