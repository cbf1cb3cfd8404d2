"""A pre-norm decoder layer: self-attention and an MLP, each of which a model family may replace."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ....kernels.arguments import Float8Format, HeadNorms
from ...config.model import ModelSpec
from ...config.rope import RotarySpec
from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.parallel import Parallel
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...distributed.token_exchange import TokenExchange
from ...distributed.tp import TPGroup
from ...forward.piecewise import Projected
from ...forward.step_context import MicroBatch, StepContext
from ...layers.layer_norm import LayerNorm
from ...layers.linear import ColumnLinear, Columns, RowLinear, Rows
from ...layers.mlp import MLP
from ...layers.norm import FormatOf, RMSNorm, unquantized
from ...weights.slots import Allocate, Slot


class SelfAttention:
    """Attention with a key and a value a KV head. ``head_norm_eps``: heads of queries and keys are normed, with it.
    ``sinks``: each head has a logit that joins the denominator of its softmax."""

    def __init__(self, name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                 qkv_bias: bool = False, o_bias: bool = False, head_norm_eps: float | None = None,
                 sinks: bool = False):
        self.layer = layer
        self.head_dim = spec.head_dim
        q_size = spec.num_heads * spec.head_dim
        self.qkv = ColumnLinear(spec.hidden_size, [
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


MakeAttention = Callable[[str, int, ModelSpec, TPGroup, Allocate], LayerAttention]
"""Builds the attention ``(name, KV layer, spec, tp, allocate)`` of a layer, as ``MakeMLP`` its MLP."""


class LayerMLP(Protocol):
    """A layer's MLP: ``[T, hidden] -> [T, hidden]``, for the tokens of all attention groups together, or with
    ``dispatches_tokens`` for this rank's own tokens, in a step of ``rows``."""

    dispatches_tokens: bool

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


def mlp_over_dp(mlp: LayerMLP, exchange: TokenExchange) -> Callable[[Any, StepRows], MaybeDeferred]:
    """Returns ``mlp`` for an attention group's own rows, with the cheapest exchange that it allows."""
    if mlp.dispatches_tokens or not exchange.spans_dp:
        return mlp.forward_deferred
    if mlp.has_partial:
        return lambda x, rows: exchange.apply_partial(
            lambda y: mlp.partial(y, rows), lambda y: mlp.partial_pair(y, rows), x, rows)
    return lambda x, rows: exchange.apply(lambda y: mlp(y, rows), x, rows)


class DecoderLayer:
    def __init__(self, index: int, kv_layer: int, spec: ModelSpec, parallel: Parallel, allocate: Allocate,
                 blocks: Blocks):
        """Builds layer ``index`` of the model, whose keys and values are layer ``kv_layer`` of the pool."""
        name = f"model.layers.{index}"
        self.input_norm = blocks.norm(f"{name}.input_layernorm", spec.hidden_size, allocate, None)
        self.attention = blocks.attention(f"{name}.self_attn", kv_layer, spec, parallel.attn_tp, allocate)
        self.mlp_norm = blocks.norm(f"{name}.post_attention_layernorm", spec.hidden_size, allocate,
                                    parallel.token_exchange)
        self.mlp = blocks.mlp(f"{name}.mlp", index, spec, parallel.tp, allocate)
        self.mlp_over_dp = mlp_over_dp(self.mlp, parallel.token_exchange)
        self.mlp_input_format = unquantized if parallel.token_exchange.spans_dp else self.mlp.activation_format

    def __call__(self, x: MaybeDeferred, residual: torch.Tensor | None, step: StepContext, cos_sin: torch.Tensor,
                 trimmed: bool = False) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes the layer. Every sum over ranks is fused with the norm that follows, the last one with that of the
        next layer. As the last layer, with ``trimmed``, it stores all keys and values and then computes the rows of the
        batch's ``last_tokens`` only."""
        projected, residual = self.pre_attention(x, residual)
        heads = self.attention.attend(projected, step, cos_sin, trimmed)
        del projected  # memory for the MLP's
        return self.post_last_attention(heads, residual, step, trimmed)

    def pre_attention(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[Projected, torch.Tensor]:
        """Computes the inputs of the attention, and the residual."""
        normed, residual = self.input_norm.add_norm_as(self.attention.activation_format, x, residual)
        return self.attention.project(normed), residual

    def post_attention(self, heads: torch.Tensor, residual: torch.Tensor,
                       rows: StepRows) -> tuple[MaybeDeferred, torch.Tensor]:
        """Computes what follows the attention in a step of ``rows``: its output projection and the MLP."""
        normed, residual = self.mlp_norm.add_norm_as(
            self.mlp_input_format, self.attention.output.forward_deferred(heads), residual, rows)
        return self.mlp_over_dp(normed, rows), residual

    def post_last_attention(self, heads: torch.Tensor, residual: torch.Tensor, step: StepContext,
                            trimmed: bool) -> tuple[MaybeDeferred, torch.Tensor]:
        """``post_attention``, where with ``trimmed`` ``heads`` are those of the batch's ``last_tokens`` only."""
        if trimmed:
            residual = residual[step.batch.logits_rows]
            if not len(residual):  # chunks in the middle of their prompts
                return residual, residual
        return self.post_attention(heads, residual, step.rows)

    def forward_microbatch(self, x: MaybeDeferred, residual: torch.Tensor | None, microbatch: MicroBatch,
                           cos_sin: torch.Tensor) -> Generator[None, None, tuple[MaybeDeferred, torch.Tensor]]:
        """Computes the layer for a micro-batch; yields while rows travel to the MLP, and while they come back. At the
        first yield its keys and values have been enqueued."""
        projected, residual = self.pre_attention(x, residual)
        heads = self.attention.attend(projected, microbatch.step, cos_sin, False)
        normed, residual = self.mlp_norm.add_norm_as(
            self.mlp_input_format, self.attention.output.forward_deferred(heads), residual)
        assert isinstance(normed, torch.Tensor)
        x = yield from microbatch.exchange.apply_partial_overlapped(self.mlp.partial, normed, microbatch.step.rows)
        return x, residual

    def slots(self) -> Iterator[Slot]:
        for module in (self.input_norm, self.attention, self.mlp_norm, self.mlp):
            yield from module.slots()
