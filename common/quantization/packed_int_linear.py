"""The linear method of packed integer weights, and their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...kernels._triton import runs_triton
from ...kernels.arguments import ExpertBiases, Float8Rows, PackedInts
from ...kernels.gated_activation import GateActivation
from ...kernels.gemm.packed_int_matmul import compile_tiles, dequantize_ints, packed_int_matmul
from ...kernels.moe.moe_sum import moe_sum
from ...kernels.moe.packed_int_experts import packed_int_expert_products
from ...kernels.rowwise.silu_and_mul import silu_and_mul
from ..api.errors import ConfigError
from ..weights.slots import Allocate, Slot
from .experts import ExpertByExpert, ExpertStack
from .methods import Joined, SeparateProduct
from .packed_int_format import BLOCK
from .shards import Shard


class PackedIntLinear(SeparateProduct):
    """Linear method of a packed integer ``weight``, which ``slots`` fill, with rows of ``dtype``."""

    def __init__(self, weight: PackedInts, dtype: torch.dtype, slots: Callable[[], Iterator[Slot]]):
        self.weight, self._dtype, self._slots = weight, dtype, slots
        if weight.values.is_cuda:
            compile_tiles(weight, dtype)

    def of_stack(self, parameters: Iterator[torch.Tensor]) -> PackedInts:
        """Returns the stack of weights like this one whose tensors are the next ones of ``parameters``."""
        one = self.weight
        return one._replace(values=next(parameters), scales=next(parameters),
                            order=None if one.order is None else next(parameters))

    def __call__(self, x: torch.Tensor | Float8Rows, bias: torch.Tensor | None = None, *,
                 gated: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return packed_int_matmul(silu_and_mul(x) if gated else x, self.weight, bias)

    def dequantize(self) -> torch.Tensor:
        return dequantize_ints(self.weight, self._dtype)

    def slots(self) -> Iterator[Slot]:
        return self._slots()


def allocate_ints(shards: Sequence[Shard], width: int, bits: int, group: int, allocate: Allocate) -> PackedInts:
    """Allocates a packed weight [sum of the shards' sizes, width] with a scale and a zero for each ``group`` inputs of
    an output; raises ConfigError where ``width`` is not packed."""
    if width % BLOCK:
        raise ConfigError(f"{shards[0].name} has {width} inputs on each rank, and {BLOCK} are packed together: choose "
                          "another --tp-size, or weights in another format.")
    out = sum(shard.size for shard in shards)
    return PackedInts(allocate(out, width * bits // 8, dtype=torch.uint8),
                      allocate(width // group, out, dtype=torch.int32), None, bits, group)


def stacks_of(stack: ExpertStack) -> list[PackedInts]:
    """Returns the stacks of one linear layer of all experts: one, or, where projections have groups of their own, one
    for each."""
    first, parameters = stack.methods[0], iter(stack.parameters)
    methods = first.parts if isinstance(first, Joined) else (first,)
    found = []
    for method in methods:
        assert isinstance(method, PackedIntLinear)
        found.append(method.of_stack(parameters))
    return found


class PackedIntExperts(ExpertByExpert):
    """Experts by grouped kernels; where Triton does not run, one after another."""

    def __init__(self, gate_up: ExpertStack, down: ExpertStack, limit: float, activate: GateActivation | None):
        super().__init__(gate_up, down, limit, activate)
        self._stacks = stacks_of(gate_up), stacks_of(down)
        self._biases = None if gate_up.bias is None or down.bias is None else ExpertBiases(gate_up.bias, down.bias)

    def __call__(self, x: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not runs_triton(x):
            return super().__call__(x, local_ids, weights)
        out = torch.empty_like(x)
        if len(x):
            moe_sum(self.products(x, local_ids)[0], local_ids.contiguous(), len(self._gate_up.methods),
                    weights.contiguous(), None, out)
        return out

    def products(self, x: torch.Tensor | Float8Rows, local_ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert isinstance(x, torch.Tensor)
        if not runs_triton(x):
            return super().products(x, local_ids)
        return packed_int_expert_products(x, *self._stacks, local_ids, self._biases, self._limit, self._activate), None
