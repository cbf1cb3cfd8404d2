"""Multi-head latent attention (MLA), which stores one latent a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....kernels.arguments import Float8Format
from ...config.mla import MLASpec
from ...config.model import ModelSpec
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.dense_weight import DenseWeight
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...layers.norm import RMSNorm
from ...weights.slots import Allocate, Slot

_LATENT_NORM_EPS = 1e-6
"""DeepSeek's own code uses it for the latents' norms, whatever config.json says of the others."""


class Queries:
    """Projects hidden states to this rank's queries ``[T, H, N + R]`` and, in the same GEMM, to the token's latent and
    shared key ``[T, L + R]``, which every rank computes."""

    def __init__(self, name: str, spec: ModelSpec, mla: MLASpec, bias: bool, tp: TPGroup, allocate: Allocate,
                 in_features: int | None = None):
        in_features = in_features or spec.hidden_size
        size = spec.num_heads * mla.qk_dim
        latent = Columns.whole(f"{name}.kv_a_proj_with_mqa", mla.latent_dim)
        self.width = mla.qk_dim
        self.norm = self.up = self.latent = None
        if mla.q_lora_rank is not None:
            down = Columns.whole(f"{name}.q_a_proj", mla.q_lora_rank)
            self.first = ColumnLinear(in_features, [down, latent], bias, allocate)
            self.norm = RMSNorm(f"{name}.q_a_layernorm", mla.q_lora_rank, _LATENT_NORM_EPS, allocate)
            self.up = ColumnLinear(mla.q_lora_rank, [Columns.shard(f"{name}.q_b_proj", size, tp)], False, allocate)
        elif bias:  # q_proj has none even then
            self.first = ColumnLinear(in_features, [Columns.shard(f"{name}.q_proj", size, tp)], False, allocate)
            self.latent = ColumnLinear(in_features, [latent], True, allocate)
        else:
            queries = Columns.shard(f"{name}.q_proj", size, tp)
            self.first = ColumnLinear(in_features, [queries, latent], False, allocate)

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.first.activation_format(rows) if self.latent is None else None

    def __call__(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.first(x)
        if self.latent is None:
            q, latent = q.split(self.first.sizes, dim=-1)
        else:
            latent = self.latent(x)
        if self.norm is not None and self.up is not None:
            q = self.up(self.norm.add_norm_as(self.up.activation_format, q, None)[0])
        return q.unflatten(-1, (-1, self.width)), latent

    def slots(self) -> Iterator[Slot]:
        for module in (self.first, self.latent, self.norm, self.up):
            if module is not None:
                yield from module.slots()


class LatentSelfAttention:
    """Latent attention as ``spec.mla`` describes it; ``bias`` is that of the projections to latents."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *, bias: bool = False,
                 o_bias: bool = False, in_features: int | None = None):
        assert spec.mla is not None
        self.layer = layer
        self.mla = spec.mla
        heads = spec.num_heads
        self.queries = Queries(name, spec, self.mla, bias, tp, allocate, in_features)
        self.norm = RMSNorm(f"{name}.kv_a_layernorm", self.mla.kv_lora_rank, _LATENT_NORM_EPS, allocate)
        # Attention needs this one as a matrix a head, in the engine's type, whatever the checkpoint's.
        self.up = DenseWeight(Columns.shard(f"{name}.kv_b_proj", heads * (self.mla.nope_dim + self.mla.v_dim), tp),
                              self.mla.kv_lora_rank, allocate)
        self.output = RowLinear(f"{name}.o_proj", heads * self.mla.v_dim, spec.hidden_size, o_bias, tp, allocate)
        self.width = heads * self.mla.v_dim // tp.size

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.queries.activation_format(rows)

    def project(self, x: Rows) -> Projected:
        q, latent = self.queries(x)
        latent, k_rope = latent.split([self.mla.kv_lora_rank, self.mla.rope_dim], dim=-1)
        return q, self.norm(latent), k_rope

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        assert cos_sin is not None, "latents have rotated keys"
        q, latent, k_rope = projected
        up = self.up.weight.unflatten(0, (-1, self.mla.nope_dim + self.mla.v_dim))  # [H, N + V, L]
        inputs = (self.layer, q, latent, k_rope, up, cos_sin)
        if trimmed:
            return step.attention.run_last_tokens(*inputs).flatten(1)
        return step.attention.run(*inputs).flatten(1)

    def slots(self) -> Iterator[Slot]:
        for module in (self.queries, self.norm, self.up, self.output):
            yield from module.slots()
