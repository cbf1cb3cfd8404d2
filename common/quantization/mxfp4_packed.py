"""Experts whose weights stay in MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

import torch
from torch.nn.functional import linear

from ...kernels.arguments import ExpertBiases, Float8Rows, Mxfp4Weights
from ...kernels.gated_activation import GateActivation
from ...kernels.moe.mxfp4_experts import mxfp4_experts, mxfp4_products
from ...kernels.reference import dequantize_mxfp4, mxfp4_block, pack_mxfp4, pack_mxfp4_scales
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..weights.slots import PAIRS, Allocate, Slot, TensorKind
from .experts import ExpertStack
from .methods import SeparateProduct
from .shards import Shard

BLOCK = 32
"""Values that share a scale in the checkpoint."""
SCALE = TensorKind("MXFP4's scale", "U8", dummy_value=120.0)


class Mxfp4Linear(SeparateProduct):
    """Linear method of MXFP4. A rank's part of the inputs may split a block of 32, whose scale is then that of smaller
    groups."""

    def __init__(self, shards: Sequence[Shard], width: int, allocate: Allocate):
        self.shards = shards
        self._dtype = allocate.dtype
        self.group = gcd(BLOCK, width)
        if self.group < 4:
            raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and products in MXFP4 take multiples "
                              "of 4: choose another --tp-size or --ep-size.")
        out = sum(shard.size for shard in shards)
        self.width = width
        whole = -(-width // mxfp4_block(self.group)) * mxfp4_block(self.group)
        self.packed = allocate(out, whole // 2, dtype=torch.uint8)
        self.scale = allocate(whole // self.group // 4, out, 4, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(silu_and_mul(x) if gated else x, self.dequantize(), bias)

    def dequantize(self) -> torch.Tensor:
        return dequantize_mxfp4(Mxfp4Weights(self.packed, self.scale, self.group))[:, :self.width].to(self._dtype)

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            out, width = shard.shape
            target = shard.rows_of(self.packed)
            yield Slot(f"{shard.name}.weight", target, (out, width // 2), shard.dim,
                       shard.start // 2 if shard.dim else shard.start, PAIRS, load=self._pack_into(target),
                       size=self.width // 2 if shard.dim else None)
            # All scales of the rank's outputs are read, and its inputs' are taken out of them.
            scale = shard.rows_of(self.scale.transpose(0, 1))
            yield Slot(f"{shard.name}.weight_scale", scale, (out, width // BLOCK), 0, 0 if shard.dim else shard.start,
                       SCALE, load=self._scale_into(scale, shard.start if shard.dim else 0))

    def _pack_into(self, target: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def load(part: torch.Tensor) -> None:
            target.copy_(pack_mxfp4(part.to(target.device), self.group))

        return load

    def _scale_into(self, target: torch.Tensor, start: int) -> Callable[[torch.Tensor], None]:
        first, count = start // self.group, self.width // self.group

        def load(part: torch.Tensor) -> None:
            scales = part.to(target.device, torch.uint8).repeat_interleave(BLOCK // self.group, 1)
            target.copy_(pack_mxfp4_scales(scales[:, first:first + count], self.group).transpose(0, 1))

        return load


class Mxfp4Experts:
    """Experts that grouped kernels compute over weights in MXFP4."""

    accepts_float8 = False

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, limit: float, activate: GateActivation | None):
        self._gate_up, self._down = _weights_of(gate_up), _weights_of(down)
        self._biases = None if gate_up.bias is None or down.bias is None else ExpertBiases(gate_up.bias, down.bias)
        self._limit, self._activate = limit, activate

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mxfp4_experts(x, self._gate_up, self._down, local_ids, weights, self._biases, self._limit,
                             activate=self._activate)

    def products(self, x: torch.Tensor | Float8Rows, local_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert isinstance(x, torch.Tensor)
        return mxfp4_products(x, self._gate_up, self._down, local_ids, self._biases, self._limit,
                              activate=self._activate), None


def _weights_of(stack: ExpertStack) -> Mxfp4Weights:
    method = stack.methods[0]
    assert isinstance(method, Mxfp4Linear)
    return Mxfp4Weights(stack.parameters[0], stack.parameters[1], method.group)
