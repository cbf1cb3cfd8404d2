"""Mamba-2: a mixer with a recurrent state (arXiv:2405.21060), and layers in which it stands beside attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from ....kernels.arguments import Float8Format, Mamba2, StateRuns
from ....kernels.state.causal_conv1d import causal_conv1d
from ....kernels.state.gated_norm import gated_norm
from ....kernels.state.selective_scan import selective_scan
from ...attention.hybrid_backend import states_of
from ...config.mamba2 import Mamba2Spec
from ...config.model import ModelSpec
from ...distributed.deferred_reduce import DeferredSum, MaybeDeferred
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...weights.slots import Allocate, Slot
from .self_attention import SelfAttention


class Mamba2Mixer:
    """The mixer of one layer, and its attention where it has no other; ``mamba`` is the whole model's."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, mamba: Mamba2Spec, *,
                 eps: float):
        self.layer = layer
        shape, norm = mamba.shape(), mamba.mamba_norm
        self._least_step = mamba.mamba_least_step
        self.shape = own = replace(shape, num_groups=shape.num_groups // tp.size)
        self._eps, self._norm_order = eps, norm
        heads, inner = shape.num_groups * shape.heads, shape.num_groups * shape.heads * shape.head_dim
        groups = shape.num_groups * shape.state_dim
        parts = ("z", inner), ("x", inner), ("b", groups), ("c", groups), ("dt", heads)
        self.projection = ColumnLinear(spec.hidden_size, [
            Columns.shard(f"{name}.in_proj_{part}", size, tp) for part, size in parts], False, allocate)
        self.output = RowLinear(f"{name}.out_proj", inner, spec.hidden_size, False, tp, allocate)
        self.width = inner // tp.size
        local = own.num_groups * own.heads
        channels = shape.num_groups * shape.channels
        load = partial(self._by_group, shape=shape, rank=tp.rank)
        self._conv = allocate(own.num_groups * own.channels, 1, own.taps)
        self._slots = [Slot(f"{name}.conv1d.weight", self._conv, (channels, 1, shape.taps), 1,
                            load=lambda weight: self._conv.copy_(load(weight)))]
        self._conv_bias: torch.Tensor | None = None
        if mamba.mamba_conv_bias:
            bias = self._conv_bias = allocate(own.num_groups * own.channels)
            whole = bias if tp.size == 1 else bias[:1].expand(channels)  # so that the slot reads all of the tensor
            self._slots.append(Slot(f"{name}.conv1d.bias", whole, (channels,),
                                    load=lambda values: bias.copy_(load(values))))
        self._a_log, self._dt_bias, self._skip = (allocate(local, dtype=torch.float32) for _ in range(3))
        self._slots += [Slot(f"{name}.{part}", target, (heads,), 0, tp.rank * local) for part, target in
                        (("A_log", self._a_log), ("dt_bias", self._dt_bias), ("D", self._skip))]
        self._norm: torch.Tensor | None = None
        if norm != "none":
            self._norm = allocate(self.width)
            self._slots.append(Slot(f"{name}.norm.weight", self._norm, (inner,), 0, tp.rank * self.width))

    def _by_group(self, values: torch.Tensor, shape: Mamba2, rank: int) -> torch.Tensor:
        """Orders the channels of all x, B and C by group; returns this rank's."""
        first, count = rank * self.shape.num_groups, self.shape.num_groups
        sizes = [shape.heads * shape.head_dim, shape.state_dim, shape.state_dim]
        parts = values.split([shape.num_groups * size for size in sizes])
        return torch.cat([part.unflatten(0, (shape.num_groups, size))[first:first + count]
                          for part, size in zip(parts, sizes)], 1).flatten(0, 1)

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.projection.activation_format(rows)

    def project(self, x: Rows) -> Projected:
        return (self.projection(x),)

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        return self.mix(projected[0], step, trimmed)

    def mix(self, projected: torch.Tensor, step: StepContext, trimmed: bool) -> torch.Tensor:
        """Returns the heads' outputs ``[T, width]`` of projected rows; see ``LayerAttention.attend``."""
        gate, x, b, c, dt = projected.split_with_sizes(self.projection.sizes, -1)
        groups = self.shape.num_groups
        mixed = torch.cat([part.unflatten(-1, (groups, -1)) for part in (x, b, c)], -1)
        time_step = softplus(dt.float() + self._dt_bias)
        if self._least_step:
            time_step = time_step.clamp(min=self._least_step)
        log_decay = -self._a_log.exp() * time_step
        convolved = torch.empty_like(mixed)
        heads = torch.empty(len(mixed), *time_step.shape[1:], self.shape.head_dim, dtype=mixed.dtype,
                            device=mixed.device)

        def compute(states: torch.Tensor, runs: StateRuns) -> None:
            shape = self.shape
            inputs, matrices = states[..., :shape.conv_values], states[..., shape.conv_values:shape.values]
            bias = None if self._conv_bias is None else self._conv_bias.view(groups, shape.channels)
            causal_conv1d(mixed, self._conv.view(groups, shape.channels, shape.taps), bias,
                          inputs.unflatten(-1, (shape.channels, shape.taps - 1)), runs, convolved)
            selective_scan(convolved, time_step, log_decay, self._skip, matrices, shape, runs, heads)

        states_of(step.attention).run(self.layer, compute)
        if trimmed:
            rows = step.batch.logits_rows
            heads, gate = heads[rows], gate[rows]
        heads = heads.flatten(1)
        if self._norm is None:
            return (heads.float() * silu(gate.float())).to(gate.dtype)
        return gated_norm(heads.unflatten(-1, (groups, -1)), gate.unflatten(-1, (groups, -1)),
                          self._norm.view(groups, -1), self._eps,
                          gates_first=self._norm_order == "gate_first").flatten(1)

    def slots(self) -> Iterator[Slot]:
        yield from self.projection.slots()
        yield from self.output.slots()
        yield from self._slots


class ParallelMixers:
    """Attention and Mamba-2 side by side: both read the layer's input, and their outputs are added (Falcon-H1)."""

    def __init__(self, attention: SelfAttention, mamba: Mamba2Mixer, tp: TPGroup):
        self.attention, self.mamba = attention, mamba
        self.width = attention.width + mamba.width
        self.output: Any = _SummedOutputs(attention, mamba, tp)

    def activation_format(self, rows: int) -> Float8Format | None:
        return None

    def project(self, x: Rows) -> Projected:
        return (*self.attention.project(x), self.mamba.projection(x))

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        *of_attention, of_mamba = projected
        return torch.cat((self.attention.attend(tuple(of_attention), step, cos_sin, trimmed),
                          self.mamba.mix(of_mamba, step, trimmed)), -1)

    def slots(self) -> Iterator[Slot]:
        yield from self.attention.slots()
        yield from self.mamba.slots()


class _SummedOutputs:
    """The output projections of both, with one sum over the ranks."""

    def __init__(self, attention: SelfAttention, mamba: Mamba2Mixer, tp: TPGroup):
        self._parts = attention.output, mamba.output
        self._widths = [attention.width, mamba.width]
        self._tp = tp

    def forward_deferred(self, heads: torch.Tensor) -> MaybeDeferred:
        first, second = (output.partial(part.contiguous())
                         for output, part in zip(self._parts, heads.split_with_sizes(self._widths, -1)))
        return first + second if self._tp.size == 1 else DeferredSum(first + second, self._tp)
