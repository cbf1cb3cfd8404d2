"""Self-attention with keys and values for each KV head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.arguments import Float8Format, HeadNorms
from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...layers.norm import RMSNorm
from ...weights.slots import Allocate, Slot


class SelfAttention:
    """Attention of one layer. ``head_norm_eps``: heads of queries and keys are normed, with it.
    ``sinks``: each head has a logit that joins the denominator of its softmax."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                 qkv_bias: bool = False, o_bias: bool = False, head_norm_eps: float | None = None,
                 sinks: bool = False, in_features: int | None = None):
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.qkv = ColumnLinear(in_features or spec.hidden_size, [
            Columns.shard(f"{name}.q_proj", q_size, tp),
            Columns.kv_shard(f"{name}.k_proj", spec.num_kv_heads, spec.head_dim, tp),
            Columns.kv_shard(f"{name}.v_proj", spec.num_kv_heads, spec.head_dim, tp),
        ], qkv_bias, allocate)
        self.num_local_heads = [size // spec.head_dim for size in self.qkv.sizes]  # of q, k and v
        self.output = RowLinear(f"{name}.o_proj", q_size, spec.hidden_size, o_bias, tp, allocate)
        self.width = q_size // tp.size
        self.sinks: Slot | None = None
        if sinks:
            heads = spec.num_heads // tp.size
            self.sinks = Slot(f"{name}.sinks", allocate(heads, dtype=torch.float32), (spec.num_heads,), 0,
                              tp.rank * heads)
        self.q_norm = self.k_norm = None
        if head_norm_eps is not None:
            self.q_norm = RMSNorm(f"{name}.q_norm", spec.head_dim, head_norm_eps, allocate)
            self.k_norm = RMSNorm(f"{name}.k_norm", spec.head_dim, head_norm_eps, allocate)

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.qkv.activation_format(rows)

    def project(self, x: Rows) -> Projected:
        return (self.qkv(x),)

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor, trimmed: bool) -> torch.Tensor:
        (qkv,) = projected
        heads = qkv.view(len(qkv), sum(self.num_local_heads), self.head_dim)
        q, k, v = heads.split_with_sizes(self.num_local_heads, 1)  # [T, heads, head_dim]
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        sinks = None if self.sinks is None else self.sinks.target
        inputs = (self.layer, q, k, v, cos_sin, norms, sinks)
        if trimmed:
            return step.attention.run_last_tokens(*inputs).flatten(1)
        return step.attention.run(*inputs).flatten(1)

    def slots(self) -> Iterator[Slot]:
        for module in (self.qkv, self.output, self.q_norm, self.k_norm):
            if module is not None:
                yield from module.slots()
        if self.sinks is not None:
            yield self.sinks
