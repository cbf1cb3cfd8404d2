"""The gated MLP of a Llama-like layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.arguments import Float8Format
from ..distributed.deferred_reduce import Summed
from ..distributed.tp import TPGroup
from ..weights.slots import Allocate, Slot
from .linear import ColumnLinear, Columns, RowLinear, Rows


class MLP:
    """``[T, hidden] -> [T, hidden]``, the ``size`` values between split over the ranks of ``tp``."""

    own_tokens = False

    def __init__(self, name: str, hidden_size: int, size: int, bias: bool, tp: TPGroup, allocate: Allocate):
        self.gate_up = ColumnLinear(hidden_size, [
            Columns.shard(f"{name}.gate_proj", size, tp), Columns.shard(f"{name}.up_proj", size, tp),
        ], bias, allocate)
        self._activates = self.gate_up.activates()
        self.down = RowLinear(f"{name}.down_proj", size, hidden_size, bias, tp, allocate)

    @property
    def sums(self) -> bool:
        """Whether there is a ``partial``."""
        return self.down.bias is None

    def form(self, rows: int) -> Float8Format | None:
        """See LinearMethod."""
        return self.gate_up.form(rows)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.down(self._between(x), gated=not self._activates)

    def _between(self, x: Rows) -> torch.Tensor:
        """What ``down`` is given: gates beside ups where they are not activated yet."""
        return self.gate_up.activated(x) if self._activates else self.gate_up(x)

    def pending(self, x: Rows) -> Summed:
        """The same, its sum left to the norm that follows."""
        return self.down.pending(self._between(x), gated=not self._activates)

    def partial(self, x: Rows) -> torch.Tensor:
        """This rank's summand, to be added to the other ranks'; only without a bias."""
        assert self.sums
        return self.down.partial(self._between(x), gated=not self._activates)

    def summands(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``partial`` as a sum of two, the second of which may be missing."""
        return self.partial(x), None

    def slots(self) -> Iterator[Slot]:
        yield from self.gate_up.slots()
        yield from self.down.slots()
