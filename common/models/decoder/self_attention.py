"""Self-attention with keys and values for each KV head."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ....kernels.arguments import Float8Format, HeadNorms
from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...layers.norm import RMSNorm
from ...weights.slots import Allocate, Slot
from .qkv_steps import MakeQKVStep

PositionStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
                        "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"]
"""Takes queries [T, Hq, D], keys [T, Hkv, D], the rotary table or None, and positions [T] int64; returns queries and
keys, contiguous in D, and the rotary table that attention is to apply, None where the step has applied it."""


class SelfAttention:
    """Attention of one layer. ``head_norm_eps``: heads of queries and keys are normed, with it; their weights in the
    checkpoint are ``head_norm_offset`` smaller than those that are applied. ``sinks``: each head has a logit that joins
    the denominator of its softmax. ``qkv_step``: what else is done with queries, keys and values before rope, row by
    row. ``position_step``: what is done with them by their positions. ``gated``: the query projection has of each head
    its queries, then as many gates, by whose sigmoid the head's output is multiplied."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                 qkv_bias: bool = False, o_bias: bool = False, head_norm_eps: float | None = None,
                 head_norm_offset: float = 0.0, sinks: bool = False, in_features: int | None = None,
                 qkv_step: MakeQKVStep | None = None, position_step: PositionStep | None = None,
                 gated: bool = False):
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.qkv = ColumnLinear(in_features or spec.hidden_size, [
            Columns.shard(f"{name}.q_proj", q_size * (1 + gated), tp),
            Columns.kv_shard(f"{name}.k_proj", spec.num_kv_heads, spec.head_dim, tp),
            Columns.kv_shard(f"{name}.v_proj", spec.num_kv_heads, spec.head_dim, tp),
        ], qkv_bias, allocate)
        self.num_local_heads = [size // spec.head_dim for size in self.qkv.sizes]  # of q, k and v
        self._gated = gated
        if gated:
            self.num_local_heads[0] //= 2
        self.output = RowLinear(f"{name}.o_proj", q_size, spec.hidden_size, o_bias, tp, allocate)
        self.width = q_size // tp.size
        self.sinks: Slot | None = None
        if sinks:
            heads = spec.num_heads // tp.size
            self.sinks = Slot(f"{name}.sinks", allocate(heads, dtype=torch.float32), (spec.num_heads,), 0,
                              tp.rank * heads)
        self.q_norm = self.k_norm = None
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = (RMSNorm(f"{name}.{part}", spec.head_dim, head_norm_eps, allocate,
                                                offset=head_norm_offset) for part in ("q_norm", "k_norm"))
        self.qkv_step = None if qkv_step is None else qkv_step(name, spec, tp, self.num_local_heads, allocate)
        self._position_step = position_step

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.qkv.activation_format(rows)

    def project(self, x: Rows) -> Projected:
        qkv = self.qkv(x)
        gate: tuple[torch.Tensor, ...] = ()
        if self._gated:
            queries, rest = qkv.split([2 * self.width, sum(self.qkv.sizes[1:])], -1)
            heads, gates = queries.unflatten(-1, (-1, 2, self.head_dim)).unbind(2)
            qkv, gate = torch.cat((heads.flatten(1), rest), -1), (gates.flatten(1),)
        return (qkv if self.qkv_step is None else self.qkv_step(qkv), *gate)

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        qkv, *gate = projected
        heads = qkv.view(len(qkv), sum(self.num_local_heads), self.head_dim)
        q, k, v = heads.split_with_sizes(self.num_local_heads, 1)  # [T, heads, head_dim]
        if self._position_step is not None:
            q, k, cos_sin = self._position_step(q, k, cos_sin, step.batch.positions)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        sinks = None if self.sinks is None else self.sinks.target
        inputs = (self.layer, q, k, v, cos_sin, norms, sinks)
        run = step.attention.run_last_tokens if trimmed else step.attention.run
        heads = run(*inputs).flatten(1)
        for gates in gate:
            heads = heads * torch.sigmoid(gates[step.batch.logits_rows] if trimmed else gates)
        return heads

    def slots(self) -> Iterator[Slot]:
        for module in (self.qkv, self.output, self.q_norm, self.k_norm, self.qkv_step):
            if module is not None:
                yield from module.slots()
        if self.sinks is not None:
            yield self.sinks
