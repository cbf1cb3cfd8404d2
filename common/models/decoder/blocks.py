"""The parts of a decoder layer, as interfaces that families fill, and factories of the parts that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ....kernels.arguments import Float8Format
from ...config.model import ModelSpec
from ...config.rope import RotarySpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...distributed.token_exchange import TokenExchange
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...layers.layer_norm import LayerNorm
from ...layers.linear import RowLinear
from ...layers.mlp import MLP
from ...layers.norm import FormatOf, RMSNorm
from ...weights.slots import Allocate, Slot


class LayerAttention(Protocol):
    """A layer's attention for one kind of backend. This rank's heads have ``width`` values a row, which ``output``
    projects."""

    width: int

    @property
    def output(self) -> RowLinear: ...

    def activation_format(self, rows: int) -> Float8Format | None:
        """Returns the format of its input, see LinearMethod."""

    def project(self, x: Any) -> Projected:
        """Projects the layer's input ``[T, hidden]`` to the inputs of ``attend``, row by row."""

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor, trimmed: bool) -> torch.Tensor:
        """Returns the concatenated heads' outputs ``[T, width]`` by the step's attention plan. In the last layer, with
        ``trimmed``, it returns those of the batch's ``last_tokens`` only. May overwrite ``projected``."""

    def slots(self) -> Iterator[Slot]: ...


class MakeAttention(Protocol):
    """Builds the attention of a layer, as ``MakeMLP`` its MLP. ``in_features``: the width of its input, where that is
    not the hidden size."""

    def __call__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, /, *,
                 in_features: int | None = None) -> LayerAttention: ...


class LayerMLP(Protocol):
    """A layer's MLP: ``[T, hidden] -> [T, hidden]``, for the tokens of all attention groups together, or with
    ``dispatches_tokens`` for this rank's own tokens, in a step of ``rows``."""

    dispatches_tokens: bool
    computes_own_rows: bool
    """True if it needs no other rank for the rows of an attention group."""

    @property
    def has_partial(self) -> bool:
        """True if the result is the sum of the ranks' ``partial`` results."""

    def activation_format(self, rows: int) -> Float8Format | None:
        """Returns the format of its input, see LinearMethod."""

    def __call__(self, x: Any, rows: StepRows = ONE_GROUP) -> torch.Tensor: ...

    def forward_deferred(self, x: Any, rows: StepRows = ONE_GROUP) -> MaybeDeferred:
        """Computes the MLP, with its sum over the ranks deferred where there is one."""

    def partial(self, x: Any, rows: StepRows = ONE_GROUP) -> torch.Tensor: ...

    def partial_pair(self, x: Any, rows: StepRows = ONE_GROUP) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``partial`` as two summands, which the sum over the ranks adds on the way."""

    def slots(self) -> Iterator[Slot]: ...


MakeMLP = Callable[[str, int, ModelSpec, TPGroup, Allocate], LayerMLP]
"""Builds the MLP ``(name, layer index, spec, tp, allocate)`` of a layer; its tensors' names begin with ``name``."""


def dense_mlp(*, bias: bool = False, activation: str = "silu", gated: bool = True) -> MakeMLP:
    """Returns a factory of dense MLPs; see MLP."""
    def make(name: str, index: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate) -> LayerMLP:
        return MLP(name, spec.hidden_size, spec.intermediate_size, bias, tp, allocate, activation, gated)

    return make


class Norm(Protocol):
    """A norm of a layer's rows, added to the residual before."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_norm_as(self, format_of: FormatOf, x: MaybeDeferred, residual: torch.Tensor | None,
                    rows: StepRows = ONE_GROUP) -> tuple[Any, torch.Tensor]:
        """See RMSNorm."""

    def add_norm(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See RMSNorm."""

    def slots(self) -> Iterator[Slot]: ...


MakeNorm = Callable[[str, int, Allocate, TokenExchange | None], Norm]
"""Builds the norm ``(name, size, allocate, exchange)``; see RMSNorm."""


def rms_norm(eps: float) -> MakeNorm:
    """Returns a factory of RMSNorms."""
    def make(name: str, size: int, allocate: Allocate, exchange: TokenExchange | None = None) -> Norm:
        return RMSNorm(name, size, eps, allocate, exchange)

    return make


def layer_norm(eps: float, *, offset: float = 0.0) -> MakeNorm:
    """Returns a factory of LayerNorms."""
    def make(name: str, size: int, allocate: Allocate, exchange: TokenExchange | None = None) -> Norm:
        return LayerNorm(name, size, eps, allocate, offset=offset)

    return make


@dataclass(frozen=True)
class Blocks:
    """The parts of which a family's decoder is made. ``rotary_dim`` values of a head are rotated, by default as many as
    ``rope`` says."""

    rope: RotarySpec
    norm: MakeNorm
    attention: MakeAttention
    mlp: MakeMLP
    rotary_dim: int | None = None
