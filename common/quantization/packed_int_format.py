"""Linear layers whose weights are integers in 4 or 8 bits, packed in words of 32 bits: W4A16 and W8A16.

A weight is ``(value - zero) * scale``; a group of inputs of each output has a scale and a zero of its own. Checkpoints
differ in the order of dimensions, the dimension that words pack, and the order within a word: ``StoredInts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..api.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..weights.slots import Allocate
    from .experts import ExpertStack, GroupedExperts
    from .methods import LinearMethod
    from .shards import Shard

BLOCK = 32
"""Groups, and a rank's inputs, are multiples of this: so many inputs are packed together in memory."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint with dimensions of outputs and of inputs (or groups of them).

    ``name`` is its last part. ``outputs_first``: outputs are the first dimension. ``packs`` names the dimension of
    which a word of 32 bits has 32 / bits values, None where values are not packed.
    """

    name: str
    outputs_first: bool
    packs: Literal["outputs", "inputs"] | None = None


@dataclass(frozen=True)
class StoredInts:
    """The tensors of one projection in a checkpoint.

    ``positions``: value i of a word of 4 bits is in its nibble ``positions[i]``. ``zero_offset`` is added to stored
    zeros. ``group_index`` is the name of the tensor [in] that says which group an input is in, where groups are not
    consecutive inputs; ``shape`` is that of one which has the weight's shape, and is not used.
    """

    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor
    group_index: str
    positions: tuple[int, ...] = tuple(range(8))
    zero_offset: int = 0
    shape: str | None = None


@dataclass(frozen=True)
class PackedIntFormat:
    """Weights in ``bits``, with a scale for each ``group`` inputs of an output (-1: all). ``symmetric``: the zero is
    always 2 ** (bits - 1), and zeros of the checkpoint are not read. ``act_order``: the checkpoint says which group
    each input is in (GPTQ's desc_act)."""

    bits: int
    group: int
    symmetric: bool
    stored: StoredInts
    act_order: bool = False
    flags: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"Weights in {self.bits} bits are not supported: use a checkpoint with weights in 4 or 8 "
                              "bits.")
        if self.group != -1 and (self.group <= 0 or self.group % BLOCK):
            raise ConfigError(f"Groups of {self.group} inputs are not supported: use a checkpoint whose group_size is "
                              f"a multiple of {BLOCK}, or -1.")

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Every device computes with integers, in any type."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        from .methods import Joined, alone
        from .packed_int_linear import PackedIntLinear
        from .stored_ints import StoredIntWeight

        def linear(shards: Sequence[Shard]) -> PackedIntLinear:
            stored = StoredIntWeight(shards, width, self, allocate)
            return PackedIntLinear(stored.weight, allocate.dtype, stored.slots)

        if not self.act_order or len(shards) == 1:
            return linear(shards)
        # Each projection has groups of its own.
        return Joined([linear(alone([shard])) for shard in shards], [shard.size for shard in shards])

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        from .packed_int_linear import PackedIntExperts

        return PackedIntExperts(gate_up, down, limit, activate)
