"""The parts of a decoder layer, as interfaces that families fill, and factories of the parts that families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
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
from ...layers.classifier_head import ClassifierHead
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

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        """Returns the concatenated heads' outputs ``[T, width]`` by the step's attention plan; without ``cos_sin``
        nothing is rotated. In the last layer, with ``trimmed``, it returns those of the batch's ``last_tokens`` only.
        May overwrite ``projected``."""

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


class EmbeddingStep(Protocol):
    """What a model does with its embeddings ``[T, hidden]`` before the first layer: see embedding_steps.py.

    ``tokens_only``: embeddings that a request brings, in place of its tokens', stay as they are."""

    tokens_only: bool

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the rows that take the place of ``x`` [T, hidden]; ``positions`` [T] int64 are theirs."""

    def slots(self) -> Iterator[Slot]: ...


MakeEmbeddingStep = Callable[[ModelSpec, Allocate], EmbeddingStep]


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


def rms_norm(eps: float, *, offset: float = 0.0) -> MakeNorm:
    """Returns a factory of RMSNorms; ``offset`` 1: checkpoints have weights less 1, as Gemma's."""
    def make(name: str, size: int, allocate: Allocate, exchange: TokenExchange | None = None) -> Norm:
        return RMSNorm(name, size, eps, allocate, exchange, offset=offset)

    return make


def layer_norm(eps: float, *, offset: float = 0.0, weight: bool = True, bias: bool = True) -> MakeNorm:
    """Returns a factory of LayerNorms."""
    def make(name: str, size: int, allocate: Allocate, exchange: TokenExchange | None = None) -> Norm:
        return LayerNorm(name, size, eps, allocate, offset=offset, weight=weight, bias=bias)

    return make


@dataclass(frozen=True)
class LayerForm:
    """The order of a layer's parts, and the names of its norms in checkpoints; None where it has no such norm.

    A layer adds two branches to its residual: ``x += out_norm(attention(input_norm(x)))``, then
    ``x += mlp_out_norm(mlp(mlp_norm(x)))``. Pre-norm layers have the first norm of each, OLMo 2 the second, Gemma 2
    both. Both branches are multiplied by ``residual_multiplier``.

    With ``parallel`` both branches read the layer's input: the MLP behind ``mlp_norm``, or, where that is None, behind
    ``input_norm`` like the attention.
    """

    input_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    residual_multiplier: float = 1.0
    parallel: bool = False


PRE_NORM = LayerForm()
SANDWICH_NORMS = LayerForm(attention_out_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
                           mlp_out_norm="post_feedforward_layernorm")
"""As Gemma 2 has them."""
POST_NORMS = LayerForm(input_norm=None, mlp_norm=None, attention_out_norm="post_attention_layernorm",
                       mlp_out_norm="post_feedforward_layernorm")
"""As OLMo 2 has them."""
PARALLEL = LayerForm(mlp_norm=None, parallel=True)
"""As Command-R has them: one norm for both branches."""


@dataclass(frozen=True)
class HeadForm:
    """How logits are made of a head's products: times ``multiplier``, plus a bias where the head has one (an untied
    one), then ``softcap * tanh(logits / softcap)``, unless that is 0."""

    multiplier: float = 1.0
    bias: bool = False
    softcap: float = 0.0


RopeOfLayer = Callable[[int], RotarySpec | None]
"""Returns the rotary embeddings of a layer, by its index in the model; None: the layer has none."""


class Classifier(Protocol):
    """The head of a classifier."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores ``[R, labels]`` of hidden states ``[R, hidden]`` of any float type."""

    def slots(self) -> Iterator[Slot]: ...


MakeClassifier = Callable[[int, int, Allocate], Classifier]
"""Builds the head of ``(labels, hidden size, allocate)``."""


@dataclass(frozen=True)
class Blocks:
    """The parts of which a family's decoder is made. ``rotary_dim`` values of a head are rotated, by default as many as
    ``rope`` says; ``rope_of`` says it for each layer where they differ, as ``form_of`` does of ``form``.
    ``embedding``: what follows the embedding, in this order. ``classifier`` makes the head of classifiers."""

    rope: RotarySpec
    norm: MakeNorm
    attention: MakeAttention
    mlp: MakeMLP
    rotary_dim: int | None = None
    form: LayerForm = PRE_NORM
    head: HeadForm = field(default_factory=HeadForm)
    embedding: tuple[MakeEmbeddingStep, ...] = ()
    rope_of: RopeOfLayer | None = None
    form_of: Callable[[int], LayerForm] | None = None
    classifier: MakeClassifier = partial(ClassifierHead, "score")
