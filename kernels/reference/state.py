"""Twins of the kernels over recurrent states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import silu

from ..arguments import DeltaNet, Mamba2, StateRuns

CHUNK = 64
"""Tokens of which the chunk-parallel forms compute all pairs at once."""


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor,
                  runs: StateRuns, out: torch.Tensor) -> None:
    """Twin of ``state.causal_conv1d.causal_conv1d``."""
    history = _read(states, runs).float()
    taps = weight.shape[-1]
    if runs.bounds is None:
        window = torch.cat((history, x[..., None].float()), -1)  # [S, parts, channels, taps]
        out.copy_(_convolve(window, weight, bias)[..., 0])
        states[runs.targets] = window[..., 1:].to(states.dtype)
        return
    for run, (begin, end) in enumerate(runs.bounds.tolist()):
        window = torch.cat((history[run], x[begin:end].permute(1, 2, 0).float()), -1)
        out[begin:end] = _convolve(window, weight, bias).permute(2, 0, 1).to(out.dtype)
        states[runs.targets[run]] = window[..., 1 - taps:].to(states.dtype)


def _convolve(window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolves ``window`` [..., tokens + taps - 1] in float32; returns the activated ``[..., tokens]`` in float32."""
    y = torch.einsum("...tk,...k->...t", window.unfold(-1, weight.shape[-1], 1), weight.float())
    return silu(y if bias is None else y + bias.float()[..., None])


def gated_delta_rule(mixed: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor,
                     shape: DeltaNet, runs: StateRuns, out: torch.Tensor) -> None:
    """Twin of ``state.gated_delta_rule.gated_delta_rule``."""
    group, size = shape.group, (shape.num_heads, shape.group, shape.key_dim, shape.value_dim)
    initial = _read(states, runs).float().unflatten(-1, size[1:])  # [S, heads, group, K, V]
    q, k, v = mixed.float().split((shape.key_dim, shape.key_dim, group * shape.value_dim), -1)
    q, k = (_unit(part)[:, :, None].expand(-1, -1, group, -1).flatten(1, 2) for part in (q, k))
    q = q * shape.key_dim ** -0.5
    v = v.unflatten(-1, (group, shape.value_dim)).flatten(1, 2)  # [T, H, V]
    if runs.bounds is None:
        state = initial.flatten(1, 2) * log_decay.exp()[..., None, None]
        change = (v - torch.einsum("shkv,shk->shv", state, k)) * beta[..., None]
        state = state + k[..., None] * change[..., None, :]
        out.copy_(torch.einsum("shkv,shk->shv", state, q))
        states[runs.targets] = state.unflatten(1, size[:2]).flatten(2).to(states.dtype)
        return
    for rows, values in _over_chunks(_delta_chunk, (q, k, v, log_decay, beta), initial, states, runs):
        out[rows] = values.to(out.dtype)


def _over_chunks(compute: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: Sequence[torch.Tensor],
                 initial: torch.Tensor, states: torch.Tensor,
                 runs: StateRuns) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the rows of each chunk and its outputs [C, H, ...] by ``compute``, of ``inputs`` [T, H, ...] and the state
    before it; stores the state after each run, which began with ``initial`` [S, a, b, ...], where H = a * b."""
    assert runs.bounds is not None
    for run, (begin, end) in enumerate(runs.bounds.tolist()):
        state = initial[run].flatten(0, 1)
        for start in range(begin, end, CHUNK):
            rows = slice(start, min(start + CHUNK, end))
            values, state = compute(*(x[rows].transpose(0, 1) for x in inputs), state=state)
            yield rows, values.transpose(0, 1)
        states[runs.targets[run]] = state.unflatten(0, initial.shape[1:3]).flatten(1).to(states.dtype)


def _delta_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, *,
                 state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The delta rule of a chunk of C tokens in its WY representation (arXiv:2406.06484, with decay arXiv:2412.06464):
    ``q``, ``k`` [H, C, K], ``v`` [H, C, V], ``log_decay``, ``beta`` [H, C], ``state`` [H, K, V] before it. Returns the
    outputs [H, C, V] and the state after it."""
    total = log_decay.cumsum(-1)
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()  # of what token j wrote, when token i reads it
    system = torch.eye(k.shape[1], device=k.device) + (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    wanted = beta[..., None] * (v - total.exp()[..., None] * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values = total.exp()[..., None] * (q @ state) + ((q @ k.mT) * decay) @ written
    left = (total[:, -1:] - total).exp()[..., None]
    return values, state * total[:, -1].exp()[:, None, None] + (k * left).mT @ written


def selective_scan(mixed: torch.Tensor, step: torch.Tensor, log_decay: torch.Tensor, skip: torch.Tensor,
                   states: torch.Tensor, shape: Mamba2, runs: StateRuns, out: torch.Tensor) -> None:
    """Twin of ``state.selective_scan.selective_scan``."""
    size = (shape.num_groups, shape.heads, shape.head_dim, shape.state_dim)
    initial = _read(states, runs).float().unflatten(-1, size[1:])  # [S, groups, heads, P, N]
    x, b, c = mixed.float().split((shape.heads * shape.head_dim, shape.state_dim, shape.state_dim), -1)
    b, c = (part[:, :, None].expand(-1, -1, shape.heads, -1).flatten(1, 2) for part in (b, c))  # [T, H, N]
    x = x.unflatten(-1, (shape.heads, shape.head_dim)).flatten(1, 2)  # [T, H, P]
    scaled = x * step[..., None]
    if runs.bounds is None:
        state = initial.flatten(1, 2) * log_decay.exp()[..., None, None] + scaled[..., None] * b[..., None, :]
        out.copy_(torch.einsum("shpn,shn->shp", state, c) + skip[:, None] * x)
        states[runs.targets] = state.unflatten(1, size[:2]).flatten(2).to(states.dtype)
        return
    for rows, values in _over_chunks(_scan_chunk, (c, b, scaled, log_decay), initial, states, runs):
        out[rows] = (values + skip[:, None] * x[rows]).to(out.dtype)


def _scan_chunk(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, log_decay: torch.Tensor, *,
                state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """State-space duality of a chunk of C tokens (arXiv:2405.21060, section 6): ``c``, ``b`` [H, C, N], ``x``
    [H, C, P], ``log_decay`` [H, C], ``state`` [H, P, N] before it. Returns the outputs [H, C, P] and the state after
    it."""
    total = log_decay.cumsum(-1)
    decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
    values = total.exp()[..., None] * (c @ state.mT) + ((c @ b.mT) * decay) @ x
    left = (total[:, -1:] - total).exp()[..., None]
    return values, state * total[:, -1].exp()[:, None, None] + x.mT @ (b * left)


def _read(states: torch.Tensor, runs: StateRuns) -> torch.Tensor:
    """The states [S, ...] that runs begin with."""
    zero = (runs.sources < 0).view(-1, *[1] * (states.dim() - 1))
    return states[runs.sources.clamp(min=0)].masked_fill(zero, 0)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, but for shorter ones than a thousandth."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float,
               gates_first: bool) -> torch.Tensor:
    """Twin of ``state.gated_norm.gated_norm``."""
    wide, act = x.float(), silu(gate.float())
    if gates_first:
        wide = wide * act
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight.float() * normed
    return (normed if gates_first else normed * act).to(gate.dtype)
