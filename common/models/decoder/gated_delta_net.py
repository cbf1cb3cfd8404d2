"""The gated delta network: a layer's mixer with a recurrent state (arXiv:2412.06464), as Qwen3-Next has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import softplus

from ....kernels.arguments import DeltaNet, Float8Format, StateRuns
from ....kernels.state.causal_conv1d import causal_conv1d
from ....kernels.state.gated_delta_rule import gated_delta_rule
from ....kernels.state.gated_norm import gated_norm
from ...attention.hybrid_backend import states_of
from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...weights.slots import Allocate, Slot


class GatedDeltaNet:
    """The mixer of one layer; ``shape`` is the whole model's. The projections are ordered by key head: of each its
    query, key, values and output gates, and then of each its beta and decay inputs; with ``separate`` projections they
    are four, of queries, keys and values, of gates, betas and decays."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *, shape: DeltaNet,
                 eps: float, separate: bool = False, in_features: int | None = None):
        name = f"{name.removesuffix('self_attn')}linear_attn"
        self.layer = layer
        self.shape = own = replace(shape, num_heads=shape.num_heads // tp.size)
        self._separate = separate
        self._eps = eps
        num_values = shape.num_heads * shape.group
        keys, values = shape.num_heads * shape.key_dim, num_values * shape.value_dim
        if separate:
            parts = [("in_proj_q", keys), ("in_proj_k", keys), ("in_proj_v", values), ("in_proj_z", values),
                     ("in_proj_b", num_values), ("in_proj_a", num_values)]
        else:
            parts = [("in_proj_qkvz", 2 * keys + 2 * values), ("in_proj_ba", 2 * num_values)]
        self.projection = ColumnLinear(in_features or spec.hidden_size, [
            Columns.shard(f"{name}.{part}", size, tp) for part, size in parts], False, allocate)
        self.output = RowLinear(f"{name}.out_proj", values, spec.hidden_size, False, tp, allocate)
        self.width = values // tp.size
        heads = own.num_heads * own.group
        self._conv = allocate(own.num_heads * own.channels, 1, own.taps)
        self._a_log, self._dt_bias = (allocate(heads, dtype=torch.float32) for _ in range(2))
        self._norm = allocate(shape.value_dim)
        self._slots = [
            Slot(f"{name}.conv1d.weight", self._conv, (shape.num_heads * shape.channels, 1, shape.taps), 1,
                 load=partial(self._load_conv, shape=shape, rank=tp.rank)),
            Slot(f"{name}.A_log", self._a_log, (num_values,), 0, tp.rank * heads),
            Slot(f"{name}.dt_bias", self._dt_bias, (num_values,), 0, tp.rank * heads),
            Slot(f"{name}.norm.weight", self._norm, (shape.value_dim,))]

    def _load_conv(self, weight: torch.Tensor, shape: DeltaNet, rank: int) -> None:
        """Orders the channels of all queries, keys and values by key head."""
        first, own = rank * self.shape.num_heads, self.shape
        sizes = [shape.key_dim, shape.key_dim, shape.group * shape.value_dim]
        parts = weight.split([shape.num_heads * size for size in sizes])
        heads = [part.unflatten(0, (shape.num_heads, size))[first:first + own.num_heads]
                 for part, size in zip(parts, sizes)]
        self._conv.copy_(torch.cat(heads, 1).flatten(0, 1))

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.projection.activation_format(rows)

    def project(self, x: Rows) -> Projected:
        return (self.projection(x),)

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        mixed, gate, beta, decay = self._split(projected[0])
        log_decay = -self._a_log.exp() * softplus(decay.float() + self._dt_bias)
        heads = torch.empty(len(mixed), *log_decay.shape[1:], self.shape.value_dim, dtype=mixed.dtype,
                            device=mixed.device)
        convolved = torch.empty_like(mixed, memory_format=torch.contiguous_format)
        beta = beta.float().sigmoid()

        def mix(states: torch.Tensor, runs: StateRuns) -> None:
            shape = self.shape
            inputs, matrices = states[..., :shape.conv_values], states[..., shape.conv_values:shape.values]
            weight = self._conv.view(shape.num_heads, shape.channels, shape.taps)
            causal_conv1d(mixed, weight, None, inputs.unflatten(-1, (shape.channels, shape.taps - 1)), runs, convolved)
            gated_delta_rule(convolved, log_decay, beta, matrices, shape, runs, heads)

        states_of(step.attention).run(self.layer, mix)
        if trimmed:
            rows = step.batch.logits_rows
            heads, gate = heads[rows], gate[rows]
        return gated_norm(heads, gate, self._norm, self._eps).flatten(1)

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits projected rows [T, ...] into the convolution's inputs [T, key heads, channels], and of all value heads
        the gates [T, H, value_dim], the betas and the decays [T, H]."""
        heads, group = self.shape.num_heads, self.shape.group
        values = group * self.shape.value_dim
        if self._separate:
            *parts, beta, decay = x.split_with_sizes(self.projection.sizes, -1)
            q, k, v, gate = (part.unflatten(-1, (heads, -1)) for part in parts)
            return torch.cat((q, k, v), -1), gate.unflatten(-1, (group, -1)).flatten(1, 2), beta, decay
        qkvz, ba = x.split_with_sizes(self.projection.sizes, -1)
        mixed, gate = qkvz.unflatten(-1, (heads, -1)).split([self.shape.channels, values], -1)
        beta, decay = ba.unflatten(-1, (heads, 2, group)).unbind(2)
        return mixed, gate.unflatten(-1, (group, -1)).flatten(1, 2), beta.flatten(1), decay.flatten(1)

    def slots(self) -> Iterator[Slot]:
        yield from self.projection.slots()
        yield from self.output.slots()
        yield from self._slots
