"""The gated delta rule (Gated Delta Networks, arXiv:2412.06464).

Prompts are computed in chunks of 64 tokens by the WY representation of products of Householder matrices
(arXiv:2406.06484): with the decays D, what the tokens of a chunk write is U - W S, where S is the state before it, and
U and W are ``inverse(I + tril(beta * K K^T * D, -1))`` times the tokens' own values and keys. One kernel computes U and
W of all chunks at once, another goes over a head's chunks with the state in registers. Products are of the type of
their rows, and summed in float32: in tf32 the second kernel spilled 984 bytes a thread on sm_90.
"""

from __future__ import annotations

import torch

from .._triton import runs_triton, tl, triton
from ..arguments import DeltaNet, StateRuns
from ..reference import state as reference
from ..reference.state import CHUNK

_BLOCK_VALUES = 32


@triton.jit
def _step_kernel(mixed_ptr, log_decay_ptr, beta_ptr, state_ptr, begins_ptr, sources_ptr, targets_ptr, out_ptr,
                 state_page, state_part, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr,
                 VALUE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    run = tl.program_id(0)
    head = tl.program_id(1)
    part = head // GROUP
    row = tl.load(begins_ptr + run).to(tl.int64)
    source = tl.load(sources_ptr + run).to(tl.int64)
    target = tl.load(targets_ptr + run).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inputs = mixed_ptr + (row * HEADS + part) * CHANNELS
    q = _unit(tl.load(inputs + keys, keys < KEY, other=0.0).to(tl.float32)) * scale
    k = _unit(tl.load(inputs + KEY + keys, keys < KEY, other=0.0).to(tl.float32))
    v = tl.load(inputs + 2 * KEY + (head % GROUP) * VALUE + values, values < VALUE, other=0.0).to(tl.float32)
    matrix = part * state_part + (head % GROUP) * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    inside = (keys < KEY)[:, None] & (values < VALUE)[None, :]
    state = tl.load(state_ptr + tl.maximum(source, 0) * state_page + matrix, inside & (source >= 0),
                    other=0.0).to(tl.float32)
    of_head = row * HEADS * GROUP + head
    state *= tl.exp(tl.load(log_decay_ptr + of_head))
    change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + of_head)
    state += k[:, None] * change[None, :]
    tl.store(out_ptr + of_head * VALUE + values, tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty),
             values < VALUE)
    tl.store(state_ptr + target * state_page + matrix, state.to(state_ptr.dtype.element_ty), inside)


@triton.jit
def _unit(x):
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _over_length(x):
    """1 over the length of each row of ``x``: products are scaled by it, so that rows go to them as they are loaded."""
    wide = x.to(tl.float32)
    return 1 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _inverse(system, number, PRECISION: tl.constexpr):
    """The inverse of I + ``system`` [C, C], strictly lower: its diagonal blocks of 16 rows row by row, all at once;
    then the blocks below them by X, the product of that inverse and these, whose fourth power is 0."""
    same_block = (number // 16)[:, None] == (number // 16)[None, :]
    inverse = tl.where(number[:, None] == number[None, :], 1.0, 0.0)
    for i in range(1, 16):
        is_row = (number % 16 == i)[:, None] & same_block
        own = tl.sum(tl.where(is_row, system, 0.0), 0)
        row = tl.sum(own[:, None] * inverse, 0)
        inverse = tl.where(is_row, inverse - row[None, :], inverse)
    x = tl.dot(inverse, tl.where(same_block, 0.0, system), input_precision=PRECISION)
    square = tl.dot(x, x, input_precision=PRECISION)
    series = square - x - tl.dot(x, square, input_precision=PRECISION)
    return inverse + tl.dot(series, inverse, input_precision=PRECISION)


@triton.jit
def _write_kernel(mixed_ptr, log_decay_ptr, beta_ptr, begins_ptr, ends_ptr, w_ptr, u_ptr, HEADS: tl.constexpr,
                  GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr,
                  CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr):
    """U and W of one chunk and value head."""
    run = tl.program_id(0)
    begin = tl.load(begins_ptr + run) + tl.program_id(1) * CHUNK
    end = tl.load(ends_ptr + run)
    if begin >= end:
        return
    head = tl.program_id(2)
    number = tl.arange(0, CHUNK)
    rows = (begin + number).to(tl.int64)
    live = rows < end
    keys = tl.arange(0, BLOCK_K)
    inputs = mixed_ptr + (rows * HEADS + head // GROUP) * CHANNELS
    k = tl.load(inputs[:, None] + KEY + keys[None, :], live[:, None] & (keys < KEY)[None, :], other=0.0)
    unit = _over_length(k)
    of_head = rows * HEADS * GROUP + head
    beta = tl.load(beta_ptr + of_head, live, other=0.0)
    total = tl.cumsum(tl.load(log_decay_ptr + of_head, live, other=0.0), 0)
    below = number[:, None] > number[None, :]
    decay = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
    products = tl.dot(k, tl.trans(k), input_precision="ieee")
    system = tl.where(below, (beta * unit)[:, None] * products * unit[None, :] * decay, 0.0)
    inverse = _inverse(system, number, PRECISION)
    of_keys = (inverse * (beta * tl.exp(total) * unit)[None, :]).to(k.dtype)
    w = tl.dot(of_keys, k, input_precision="ieee")
    tl.store(w_ptr + of_head[:, None] * KEY + keys[None, :], w.to(w_ptr.dtype.element_ty),
             live[:, None] & (keys < KEY)[None, :])
    of_values = (inverse * beta[None, :]).to(k.dtype)
    for first in range(0, VALUE, BLOCK_V):
        values = first + tl.arange(0, BLOCK_V)
        inside = live[:, None] & (values < VALUE)[None, :]
        v = tl.load(inputs[:, None] + 2 * KEY + (head % GROUP) * VALUE + values[None, :], inside, other=0.0)
        u = tl.dot(of_values, v, input_precision="ieee")
        tl.store(u_ptr + of_head[:, None] * VALUE + values[None, :], u.to(u_ptr.dtype.element_ty), inside)


@triton.jit
def _chunks_kernel(mixed_ptr, log_decay_ptr, w_ptr, u_ptr, state_ptr, begins_ptr, ends_ptr, sources_ptr, targets_ptr,
                   out_ptr, state_page, state_part, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr,
                   VALUE: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_V: tl.constexpr):
    """All chunks of one run, for some values of one head."""
    run = tl.program_id(0)
    head = tl.program_id(1)
    part = head // GROUP
    begin = tl.load(begins_ptr + run)
    end = tl.load(ends_ptr + run)
    source = tl.load(sources_ptr + run).to(tl.int64)
    target = tl.load(targets_ptr + run).to(tl.int64)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    matrix = part * state_part + (head % GROUP) * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    is_matrix = (keys < KEY)[:, None] & (values < VALUE)[None, :]
    state = tl.load(state_ptr + tl.maximum(source, 0) * state_page + matrix, is_matrix & (source >= 0),
                    other=0.0).to(tl.float32)
    number = tl.arange(0, CHUNK)
    for start in range(begin, end, CHUNK):
        rows = (start + number).to(tl.int64)
        live = rows < end
        is_key = live[:, None] & (keys < KEY)[None, :]
        is_value = live[:, None] & (values < VALUE)[None, :]
        inputs = mixed_ptr + (rows * HEADS + part) * CHANNELS
        q = tl.load(inputs[:, None] + keys[None, :], is_key, other=0.0)
        k = tl.load(inputs[:, None] + KEY + keys[None, :], is_key, other=0.0)
        of_head = rows * HEADS * GROUP + head
        total = tl.cumsum(tl.load(log_decay_ptr + of_head, live, other=0.0), 0)
        last = tl.sum(tl.where(number == CHUNK - 1, total, 0.0), 0)
        w = tl.load(w_ptr + of_head[:, None] * KEY + keys[None, :], is_key, other=0.0)
        u = tl.load(u_ptr + of_head[:, None] * VALUE + values[None, :], is_value, other=0.0).to(tl.float32)
        before = state.to(q.dtype)
        written = u - tl.dot(w, before, input_precision="ieee")
        of_queries, of_keys = _over_length(q) * scale, _over_length(k)
        seen = number[:, None] >= number[None, :]
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)) * of_queries[:, None] * of_keys[None, :]
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * decay, 0.0)
        out = tl.dot(q, before, input_precision="ieee") * (tl.exp(total) * of_queries)[:, None]
        out += tl.dot(scores.to(q.dtype), written.to(q.dtype), input_precision="ieee")
        tl.store(out_ptr + of_head[:, None] * VALUE + values[None, :], out.to(out_ptr.dtype.element_ty), is_value)
        left = (written * (tl.exp(last - total) * of_keys)[:, None]).to(k.dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(k), left, input_precision="ieee")
    tl.store(state_ptr + target * state_page + matrix, state.to(state_ptr.dtype.element_ty), is_matrix)


def gated_delta_rule(mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor,
                     shape: DeltaNet, runs: StateRuns, out: torch.Tensor) -> None:
    """For each token t of a run, from the state S [K, V] of a value head: ``S = exp(log_decay[t]) * S``, ``S += beta[t]
    * outer(k[t], v[t] - k[t] @ S)``, ``out[t] = q[t] @ S``. Queries and keys are normed to length 1 before, and queries
    divided by the root of K.

    ``mixed`` [T, heads, channels], contiguous, has a key head's query, key and values; ``log_decay`` and ``beta``
    [T, H] float32 of the H = heads * group value heads; ``states`` [pages, heads, group * K * V]; ``out`` [T, H, V].
    """
    if not runs_triton(mixed):
        reference.gated_delta_rule(mixed, log_decay, beta, states, shape, runs, out)
        return
    assert mixed.is_contiguous() and log_decay.is_contiguous() and beta.is_contiguous() and out.is_contiguous()
    assert states.stride(2) == 1
    heads, count = shape.num_heads * shape.group, len(runs.targets)
    sizes = {"HEADS": shape.num_heads, "GROUP": shape.group, "KEY": shape.key_dim, "VALUE": shape.value_dim,
             "CHANNELS": shape.channels, "BLOCK_K": max(16, triton.next_power_of_2(shape.key_dim)),
             "BLOCK_V": _BLOCK_VALUES}
    blocks, scale = triton.cdiv(shape.value_dim, _BLOCK_VALUES), shape.key_dim ** -0.5
    if runs.max_rows == 1:
        _step_kernel[(count, heads, blocks)](
            mixed, log_decay, beta, states, runs.begins, runs.sources, runs.targets, out, states.stride(0),
            states.stride(1), scale, **sizes)
        return
    w = torch.empty((len(mixed), heads, shape.key_dim), dtype=mixed.dtype, device=mixed.device)
    u = torch.empty((len(mixed), heads, shape.value_dim), dtype=mixed.dtype, device=mixed.device)
    _write_kernel[(count, triton.cdiv(runs.max_rows, CHUNK), heads)](
        mixed, log_decay, beta, runs.begins, runs.ends, w, u, **sizes, CHUNK=CHUNK,
        PRECISION="ieee" if mixed.dtype == torch.float32 else "tf32")
    _chunks_kernel[(count, heads, blocks)](
        mixed, log_decay, w, u, states, runs.begins, runs.ends, runs.sources, runs.targets, out, states.stride(0),
        states.stride(1), scale, **sizes, CHUNK=CHUNK, num_warps=8, num_stages=1)
