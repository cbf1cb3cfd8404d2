"""The router of an MoE layer: selects each token's experts and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ....kernels.elementwise import by_element
from ....kernels.gemm.dense_matmul import library_matmul
from ....kernels.moe.moe_topk import moe_topk
from ...config.moe import MoESpec
from ...weights.slots import VALUES, Allocate, Slot

_BIAS = replace(VALUES, keeps_ones=False)
"""Ernie's is a matrix of one row."""


class Router:
    """Router, replicated on every rank: its choice must be the same on all of them."""

    def __init__(self, name: str, spec: MoESpec, hidden_size: int, allocate: Allocate):
        self.name = name
        self.spec = spec
        self.weight = allocate(spec.num_experts, hidden_size)
        self.bias = allocate(spec.num_experts, dtype=torch.float32) if spec.correction_bias else None
        self.offset = allocate(spec.num_experts) if spec.router_bias else None

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None,
                 first_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(expert ids [T, top_k] int64, weights [T, top_k] float32)`` of hidden states ``[T, hidden]``. The
        ids are relative to ``first_id``, and negative in rows where ``live`` [T] is 0."""
        return moe_topk(self.logits(x), self.bias, self.spec, live, first_id)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Computes router logits ``[T, num_experts]``. Sigmoid scores of many experts lie close together, so that
        DeepSeek-V3 needs float32 in the GEMM too, and so do all routers with a bias of their choice; other softmax
        models were trained with it in the model's type. Capped logits are computed in float32, as Grok-1's."""
        if cap := self.spec.router_softcap:
            return cap * by_element(torch.tanh, library_matmul(x.float(), self.weight.float()) / cap)
        if self.spec.scoring == "sigmoid" or self.spec.correction_bias:
            return library_matmul(x.float(), self.weight.float())
        return library_matmul(x, self.weight, self.offset)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))
        if self.bias is not None:
            bias = self.bias
            yield Slot(f"{self.name}.e_score_correction_bias", bias, tuple(bias.shape), kind=_BIAS,
                       load=lambda part: bias.copy_(part.flatten()))
        if self.offset is not None:
            yield Slot(f"{self.name}.bias", self.offset, tuple(self.offset.shape))
