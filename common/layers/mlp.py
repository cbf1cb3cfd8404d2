"""The MLP of dense layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.arguments import Float8Format
from ..distributed.deferred_reduce import MaybeDeferred
from ..distributed.step_rows import ONE_GROUP, StepRows
from ..distributed.tp import TPGroup
from ..weights.slots import Allocate, Slot
from .activations import activation_of
from .linear import ColumnLinear, Columns, RowLinear, Rows


class MLP:
    """MLP ``[T, hidden] -> [T, hidden]``; its ``size`` intermediate values are split over the ranks of ``tp``. It
    computes any rows alike, whatever the step's ``rows``.

    Its tensors are ``gate_proj``, ``up_proj`` and ``down_proj``; without ``gated`` there is no gate. Kernels activate
    gates by silu; activations.py has the other values of ``activation``.
    """

    dispatches_tokens = False

    def __init__(self, name: str, hidden_size: int, size: int, bias: bool, tp: TPGroup, allocate: Allocate,
                 activation: str = "silu", gated: bool = True):
        parts = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.gate_up = ColumnLinear(hidden_size, [Columns.shard(f"{name}.{part}", size, tp) for part in parts], bias,
                                    allocate)
        self.computes_own_rows = tp.size == 1
        fuses_silu = gated and activation in ("silu", "swish")
        self._activate = None if fuses_silu else activation_of(activation, gated=gated)
        # Else ``down`` activates its input.
        self._fuses_activation = self._activate is not None or self.gate_up.enable_fused_activation()
        self.down = RowLinear(f"{name}.down_proj", size, hidden_size, bias, tp, allocate)

    @property
    def has_partial(self) -> bool:
        return self.down.bias is None

    def activation_format(self, rows: int) -> Float8Format | None:
        return self.gate_up.activation_format(rows)

    def __call__(self, x: Rows, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        return self.down(self._intermediate(x), gated=not self._fuses_activation)

    def _intermediate(self, x: Rows) -> torch.Tensor:
        """Returns the input of ``down``: activated, or gates and ups side by side."""
        if self._activate is not None:
            return self._activate(self.gate_up(x))
        return self.gate_up.forward_gated(x) if self._fuses_activation else self.gate_up(x)

    def forward_deferred(self, x: Rows, rows: StepRows = ONE_GROUP) -> MaybeDeferred:
        return self.down.forward_deferred(self._intermediate(x), gated=not self._fuses_activation)

    def partial(self, x: Rows, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        """Returns this rank's summand of the result; needs ``has_partial``."""
        assert self.has_partial
        return self.down.partial(self._intermediate(x), gated=not self._fuses_activation)

    def partial_pair(self, x: Rows, rows: StepRows = ONE_GROUP) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.partial(x), None

    def slots(self) -> Iterator[Slot]:
        yield from self.gate_up.slots()
        yield from self.down.slots()
